"""Fine-grained FP8: the checkpoints of DeepSeek-V3, which transformers, vLLM and SGLang read.

A weight is float8_e4m3fn with `weight_scale_inv`, the scales of its blocks of 128 x 128. In spite
of the name they are factors, not reciprocals: value = code * scale. They are float32, or E8M0
(`scale_fmt` "ue8m0", DeepSeek-V3.1). `quantization_config` of config.json has the `quant_method`
"fp8" and the size of blocks; None stands for one scale for the tensor.

transformers 5.23 takes the rows of a block to be the rows of the weight divided by the rows of the
scales. It misreads shorter last blocks, so all blocks are whole here.
"""

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

import torch

from scaledtensor.errors import CheckpointError, UnsupportedError
from scaledtensor.exchange.layouts import Layout
from scaledtensor.quantization.configs import Config, Dynamic, Static
from scaledtensor.quantization.parts import scale_dtype

__all__ = ["FOREIGN", "LAYOUTS", "METHOD", "entry", "scheme_reader"]

METHOD = "fp8"

_inv = partial(Layout, scale="weight_scale_inv", readers=("transformers", "vLLM", "SGLang"))
_micro = Dynamic("e4m3fn", (128, 128), "e8m0", input_granularity=128, input_scale="e8m0")
_whole = Dynamic("e4m3fn", "tensor", input_granularity="tensor")

LAYOUTS: tuple[Layout, ...] = (
    _inv("128 x 128", Dynamic("fp8_block")),
    _inv("128 x 128 UE8M0", _micro, dtype=torch.float8_e8m0fnu),
    _inv("per tensor", _whole, shape="number"),
    _inv("per tensor static", Static("e4m3fn"), shape="number", input_scale="activation_scale"),
)

FOREIGN: dict[str, str] = {}


def entry(
    found: Mapping[str, tuple[Layout, Config]], kinds: Mapping[str, str | None], left: Iterable[str]
) -> dict[str, Any]:
    """The entry `quantization_config` of config.json (see `compressed_tensors.entry`).

    Raises:
        UnsupportedError: the weights have more than one layout, or one belongs to an embedding.
    """
    layouts = {layout.name: (layout, config) for layout, config in found.values()}
    if len(layouts) > 1:
        raise UnsupportedError(
            f"weights are in {' and '.join(layouts)}, and fine-grained FP8 has one layout for a "
            "model: choose one config in quantize_, or export as compressed-tensors"
        )
    config = next(iter(layouts.values()))[1]
    tables = [name for name in found if kinds[name] == "Embedding"]
    if tables:
        raise UnsupportedError(
            f"{tables[0]} is an embedding, and fine-grained FP8 holds linear layers: leave the "
            "role 'embedding' out of the config"
        )
    block = config.weight.block
    return {
        "quant_method": METHOD,
        "activation_scheme": "static" if config.static else "dynamic",
        "weight_block_size": None if block == (0, 0) else list(block),
        "scale_fmt": "ue8m0" if scale_dtype(config.weight) == torch.float8_e8m0fnu else "float",
        "modules_to_not_convert": [name for name in left if kinds[name] != "Embedding"],
    }


def scheme_reader(
    where: str, told: Mapping[str, Any]
) -> Callable[[str, str | None], tuple[Layout, Config] | None]:
    """A function that returns the layout and the config of a module (see
    `compressed_tensors.scheme_reader`)."""
    size, kind = told.get("weight_block_size", [128, 128]), told.get("scale_fmt", "float")
    activation = told.get("activation_scheme", "dynamic")
    block = (0, 0) if size is None else tuple(size) if isinstance(size, list) else size
    for layout in LAYOUTS:
        config = layout.config
        micro = scale_dtype(config.weight) == torch.float8_e8m0fnu
        same = (config.weight.block, micro) == (block, kind == "ue8m0")
        if same and config.static == (activation == "static"):
            return lambda name, of_class: (layout, config)
    if activation not in ("dynamic", "static") or kind not in ("float", "ue8m0"):
        raise CheckpointError(
            f"{where} is damaged: activation_scheme {activation!r}, scale_fmt {kind!r}"
        )
    raise UnsupportedError(
        f"{where} has blocks of {size} with scale_fmt {kind!r} and activation_scheme "
        f"{activation!r}; known are {', '.join(layout.name for layout in LAYOUTS)}"
    )
