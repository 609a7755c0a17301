"""NVIDIA ModelOpt: the checkpoints of its `export_hf_checkpoint`, which TensorRT-LLM, vLLM and
SGLang read.

A module has `weight`, `weight_scale` and, for NVFP4, `weight_scale_2`, the float32 for the tensor.
`input_scale` is the scale of inputs; for NVFP4 it is their float32 for the tensor. The scales are
factors: value = code * weight_scale * weight_scale_2. `hf_quant_config.json` names the algorithm,
and the same stands in config.json with the `quant_method` "modelopt".
"""

import fnmatch
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

import torch

from scaledtensor._version import __version__
from scaledtensor.errors import CheckpointError, UnsupportedError
from scaledtensor.exchange.layouts import Layout
from scaledtensor.quantization.configs import Config, Dynamic, Static, WeightOnly

__all__ = ["FILE", "FOREIGN", "LAYOUTS", "METHOD", "entry", "scheme_reader", "second_file"]

METHOD = "modelopt"
#: The name of the file beside config.json.
FILE = "hf_quant_config.json"

_layout = partial(Layout, readers=("TensorRT-LLM", "vLLM", "SGLang"))
_nvfp4 = partial(
    _layout,
    packing="bytes",
    dtype=torch.float8_e4m3fn,
    tensor_scale="weight_scale_2",
    decoded="2^-23: it rounds twice",
)

LAYOUTS: tuple[Layout, ...] = (
    _layout("FP8", Static("e4m3fn"), shape="number", input_scale="input_scale"),
    _layout("FP8_PER_CHANNEL_PER_TOKEN", Dynamic("e4m3fn"), shape="vector"),
    _layout("FP8_PB_WO", WeightOnly("fp8_block"), shape="spread"),
    _nvfp4("NVFP4", Dynamic("nvfp4"), input_scale="input_scale"),
    _nvfp4("W4A16_NVFP4", WeightOnly("nvfp4")),
    _layout("MXFP8", Dynamic("mxfp8"), dtype=torch.uint8),
    _layout("W8A16", WeightOnly("int8"), shape="vector", readers=("TensorRT-LLM",)),
)

FOREIGN = {
    "pre_quant_scale": "factors of inputs (AWQ)",
    "svdquant_lora_a": "a low-rank residual (SVDQuant)",
    "svdquant_lora_b": "a low-rank residual (SVDQuant)",
    "k_scale": "scales of a cache of keys",
    "v_scale": "scales of a cache of values",
}


def entry(
    found: Mapping[str, tuple[Layout, Config]], kinds: Mapping[str, str | None], left: Iterable[str]
) -> dict[str, Any]:
    """The entry `quantization_config` of config.json (see `compressed_tensors.entry`)."""
    tables = [name for name in found if kinds[name] == "Embedding"]
    if tables:
        raise UnsupportedError(
            f"{tables[0]} is an embedding, and ModelOpt's checkpoints hold linear layers: leave "
            "the role 'embedding' out of the config"
        )
    algorithms = {layout.name for layout, _ in found.values()}
    told: dict[str, Any] = {
        "quant_method": METHOD,
        "producer": {"name": "scaledtensor", "version": __version__},
        "kv_cache_scheme": None,
        "ignore": sorted(left),
    }
    if len(algorithms) == 1:
        layout, config = next(iter(found.values()))
        return told | {"quant_algo": layout.name} | _group(config)
    layers = {
        name: {"quant_algo": layout.name} | _group(config)
        for name, (layout, config) in found.items()
    }
    return told | {"quant_algo": "MIXED_PRECISION", "quantized_layers": layers}


def _group(config: Config) -> dict[str, int]:
    across, along = config.weight.block
    return {"group_size": along} if across == 1 and along else {}


def second_file(told: Mapping[str, Any]) -> dict[str, Any]:
    """The content of hf_quant_config.json for an entry of config.json."""
    names = ("quant_algo", "group_size", "quantized_layers")
    quantization = {name: told[name] for name in names if name in told}
    quantization |= {"kv_cache_quant_algo": None, "exclude_modules": told["ignore"]}
    return {"producer": told["producer"], "quantization": quantization}


def scheme_reader(
    where: str, told: Mapping[str, Any]
) -> Callable[[str, str | None], tuple[Layout, Config] | None]:
    """A function that returns the layout and the config of a module (see
    `compressed_tensors.scheme_reader`). `told` is an entry of config.json or of
    hf_quant_config.json."""
    own = told.get("quantization", told)
    if not isinstance(own, dict) or "quant_algo" not in own:
        raise CheckpointError(f"{where} is damaged: it names no quant_algo")
    ignored = own.get("exclude_modules", own.get("ignore")) or []
    if own["quant_algo"] != "MIXED_PRECISION":
        whole = _read_layout(where, own)
        layers = None
    else:
        whole = None
        layers = {k: _read_layout(f"{where}, {k},", v) for k, v in own["quantized_layers"].items()}

    def scheme(name: str, kind: str | None) -> tuple[Layout, Config] | None:
        if any(fnmatch.fnmatchcase(name, pattern) for pattern in ignored):
            return None
        return whole if layers is None else layers.get(name)

    return scheme


def _read_layout(where: str, told: Mapping[str, Any]) -> tuple[Layout, Config]:
    algorithm = str(told.get("quant_algo")).upper()
    found = next((layout for layout in LAYOUTS if layout.name == algorithm), None)
    if found is None:
        raise UnsupportedError(
            f"{where} has the quant_algo {told.get('quant_algo')!r}; known are "
            + ", ".join(layout.name for layout in LAYOUTS)
        )
    size = _group(found.config).get("group_size")
    if told.get("group_size") not in (None, 0, size):
        raise UnsupportedError(
            f"{where} has groups of {told['group_size']!r}, and {algorithm} has {size} here"
        )
    return found, found.config
