"""compressed-tensors: the checkpoints of LLM Compressor, which vLLM, SGLang and transformers read.

The library is vllm-project/compressed-tensors, and names of schemes are from its
`quantization/quant_scheme.py`. `config.json` has an entry `quantization_config` with groups of
modules. Each group has arguments for its weights and for the inputs of their products, and modules
that no group names, or that `ignore` names, are plain.
"""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from scaledtensor.errors import CheckpointError, QuantizationError, UnsupportedError
from scaledtensor.exchange.layouts import Layout
from scaledtensor.formats import E2M1FN, E2M3FN, E4M3FN, INT4, INT8, Format
from scaledtensor.quantization.configs import Config, Dynamic, Static, WeightOnly
from scaledtensor.quantization.parts import scale_dtype
from scaledtensor.recipes.casts import Cast

__all__ = ["FOREIGN", "LAYOUTS", "METHOD", "arguments", "entry", "scheme_reader"]

#: The value of `quant_method` in config.json.
METHOD = "compressed-tensors"

_SERVERS = ("vLLM", "SGLang", "transformers")
_fp8 = partial(Layout, written="float-quantized", readers=_SERVERS)
_fp8_alone = partial(Layout, written="naive-quantized", readers=_SERVERS)
_int8 = partial(Layout, written="int-quantized", readers=_SERVERS)
_words = partial(
    Layout,
    written="pack-quantized",
    codes="weight_packed",
    packing="words",
    size="weight_shape",
    groups=True,
    readers=_SERVERS,
)
_packed = partial(Layout, codes="weight_packed", packing="bytes", dtype=torch.uint8)
_mxfp4 = partial(_packed, written="mxfp4-pack-quantized", readers=("vLLM", "transformers"))
_mxfp6 = partial(_packed, written="mxfp6-pack-quantized", readers=("transformers",))
_mxfp8 = partial(
    Layout, written="mxfp8-quantized", dtype=torch.uint8, readers=("vLLM", "transformers")
)
_nvfp4 = partial(
    _packed,
    written="nvfp4-pack-quantized",
    dtype=torch.float8_e4m3fn,
    tensor_scale="weight_global_scale",
    reciprocal=True,
    difference="0 if the scale of the tensor is a power of two; else 2^-23",
    decoded="0 if the scale of the tensor is a power of two; else 2^-8, in BF16",
    readers=_SERVERS,
)

LAYOUTS: tuple[Layout, ...] = (
    _fp8("FP8", Static("e4m3fn"), shape="one", input_scale="input_scale"),
    _fp8("FP8_DYNAMIC", Dynamic("e4m3fn")),
    _fp8("FP8_BLOCK", Dynamic("fp8_block"), whole=False),
    _fp8_alone("FP8A16", WeightOnly("e4m3fn"), groups=True),
    _fp8_alone("FP8A16 per tensor", WeightOnly("e4m3fn", "tensor"), shape="one"),
    _int8("W8A8", Dynamic("int8")),
    _int8("W8A8 static", Static("int8", "channel"), input_scale="input_scale"),
    _words("W8A16", WeightOnly("int8")),
    _words("W4A16", WeightOnly("int4", 128)),
    _mxfp4("MXFP4A16", WeightOnly("mxfp4")),
    _mxfp4("MXFP4", Dynamic("mxfp4")),
    _mxfp6("MXFP6A16", WeightOnly("e2m3fn", 32, "e8m0")),
    _mxfp8("MXFP8A16", WeightOnly("mxfp8")),
    _mxfp8("MXFP8", Dynamic("mxfp8")),
    _nvfp4("NVFP4A16", WeightOnly("nvfp4")),
    _nvfp4("NVFP4", Dynamic("nvfp4"), input_scale="input_global_scale"),
)

#: Names of tensors that no layout covers -> their meaning.
FOREIGN = {
    "weight_zero_point": "zero points: the scheme is asymmetric",
    "input_zero_point": "zero points of inputs: the scheme is asymmetric",
    "weight_g_idx": "an order of columns (actorder)",
    "output_scale": "scales of outputs",
    "k_scale": "scales of a cache of keys",
    "v_scale": "scales of a cache of values",
}

_FORMATS: dict[tuple[str, int], Format] = {
    ("float", 8): E4M3FN,
    ("float", 6): E2M3FN,
    ("float", 4): E2M1FN,
    ("int", 8): INT8,
    ("int", 4): INT4,
}


# --- writing ---------------------------------------------------------------------------------


def arguments(cast: Cast, dynamic: bool | str) -> dict[str, Any]:
    """The library's `QuantizationArgs` for a cast, as config.json has them."""
    kind, bits = next(k for k, fmt in _FORMATS.items() if fmt == cast.format)
    across, along = cast.block
    two_level = scale_dtype(cast) == torch.float8_e4m3fn
    if cast.block == (0, 0):
        strategy = "tensor"
    elif along == 0:
        strategy = "token" if dynamic else "channel"
    elif across == 1:
        strategy = "tensor_group" if two_level else "group"
    else:
        strategy = "block"
    found: dict[str, Any] = {
        "num_bits": bits,
        "type": kind,
        "symmetric": True,
        "group_size": along if across == 1 and along else None,
        "strategy": strategy,
        "dynamic": dynamic,
    }
    if strategy == "block":
        found["block_structure"] = [across, along]
    if scale_dtype(cast) != torch.float32:
        found["scale_dtype"] = "torch.float8_e4m3fn" if two_level else "torch.uint8"
    return found


def _scheme(layout: Layout, config: Config) -> dict[str, Any]:
    given = config.input
    inputs = None
    if given is not None:
        local = "local" if scale_dtype(given) == torch.float8_e4m3fn else True
        inputs = arguments(given, False if config.static else local)
    return {
        "weights": arguments(config.weight, False),
        "input_activations": inputs,
        "output_activations": None,
        "format": layout.written,
    }


def entry(
    found: Mapping[str, tuple[Layout, Config]], kinds: Mapping[str, str | None], left: Iterable[str]
) -> dict[str, Any]:
    """The entry `quantization_config` of config.json.

    Args:
        found: the layout and the config of each quantised module, by its name.
        kinds: the name of the class, "Linear" or "Embedding", by the name of the module;
            None if it is unknown.
        left: the names of plain modules of these classes.
    """
    schemes: list[tuple[dict[str, Any], list[str]]] = []
    for name, (layout, config) in found.items():
        scheme = _scheme(layout, config)
        names = next((names for held, names in schemes if held == scheme), None)
        if names is None:
            schemes.append((scheme, [name]))
        else:
            names.append(name)
    classes = {kind for name in found if (kind := kinds[name]) is not None}
    by_class = len(schemes) == 1 and None not in map(kinds.get, found)
    groups = {}
    for i, (scheme, names) in enumerate(schemes):
        # One scheme is for classes, so that servers find it for layers that they merge.
        targets = sorted(classes) if by_class else names
        groups[f"group_{i}"] = {"targets": targets, **scheme}
    written = {scheme["format"] for scheme, _ in schemes}
    ignored = [name for name in left if kinds[name] in classes] if by_class else []
    return {
        "quant_method": METHOD,
        "config_groups": groups,
        "format": written.pop() if len(written) == 1 else "mixed-precision",
        "quantization_status": "compressed",
        "ignore": ignored,
        "kv_cache_scheme": None,
        "global_compression_ratio": None,
    }


# --- reading ---------------------------------------------------------------------------------


def scheme_reader(
    where: str, told: Mapping[str, Any]
) -> Callable[[str, str | None], tuple[Layout, Config] | None]:
    """A function that returns the layout and the config of a module of that name and class.

    Raises:
        CheckpointError: the entry is damaged.
        UnsupportedError: a group has arguments that no layout covers.
    """
    groups = told.get("config_groups")
    if not isinstance(groups, dict) or not all(isinstance(g, dict) for g in groups.values()):
        raise CheckpointError(f"{where} is damaged: its config_groups are no groups")
    read: list[tuple[Sequence[str], tuple[Layout, Config]]] = []
    for key, group in groups.items():
        targets = group.get("targets")
        if not isinstance(targets, list) or not all(isinstance(t, str) for t in targets):
            raise CheckpointError(f"{where} is damaged: {key} names no targets")
        written = group.get("format") or told.get("format")
        read.append((targets, _read_group(f"{where}, {key},", group, written)))
    ignored = told.get("ignore") or []

    def scheme(name: str, kind: str | None) -> tuple[Layout, Config] | None:
        if any(_matches(pattern, name, kind) for pattern in ignored):
            return None
        for targets, found in read:
            if any(_matches(target, name, kind) for target in targets):
                return found
        classes = {id(found): found for targets, found in read if not all(map(_is_name, targets))}
        return classes.popitem()[1] if kind is None and len(classes) == 1 else None

    return scheme


def _is_name(target: str) -> bool:
    return target.startswith("re:") or "." in target or target[:1].islower()


def _matches(target: str, name: str, kind: str | None) -> bool:
    """As the library matches: a pattern, a name, or the name of a class."""
    if target.startswith("re:"):
        return re.match(target.removeprefix("re:"), name) is not None
    return target in (name, kind)


def _read_group(where: str, group: Mapping[str, Any], written: Any) -> tuple[Layout, Config]:
    if group.get("output_activations"):
        raise UnsupportedError(f"{where} casts outputs, which no config of scaledtensor does")
    if not isinstance(group.get("weights"), dict):
        raise UnsupportedError(f"{where} casts no weights; only groups that do are read")
    weight = _read_arguments(f"{where} weights", group["weights"])
    inputs = group.get("input_activations")
    try:
        if inputs is None:
            config: Config = WeightOnly(*weight)
        else:
            fmt, block, scale = _read_arguments(f"{where} input_activations", inputs)
            dynamic = inputs.get("dynamic")
            if dynamic not in (True, False, "local") or (dynamic is False and block != (0, 0)):
                raise UnsupportedError(f"{where} has inputs with dynamic={dynamic!r}")
            config = (
                Dynamic(*weight, input_format=fmt, input_granularity=block, input_scale=scale)
                if dynamic
                else Static(*weight, input_format=fmt)
            )
    except QuantizationError as error:
        raise UnsupportedError(f"{where}: {error}") from error
    for layout in LAYOUTS:
        if layout.fits(config) and written in (layout.written, *_ALIKE.get(layout.written, ())):
            return layout, config
    known = ", ".join(sorted({layout.written for layout in LAYOUTS}))
    raise UnsupportedError(
        f"{where} is {config} in the format {written!r}: no layout here covers this. The formats "
        f"are {known}"
    )


#: Format -> other names under which the same layout is written.
_ALIKE = {
    "float-quantized": ("naive-quantized",),
    "naive-quantized": ("float-quantized",),
    "int-quantized": ("naive-quantized",),
}


def _read_arguments(where: str, told: Mapping[str, Any]) -> tuple[Format, tuple[int, int], str]:
    """The format, the block and the kind of scales that `QuantizationArgs` stand for."""
    if not told.get("symmetric", True):
        raise UnsupportedError(f"{where} are asymmetric: zero points are not supported")
    if told.get("actorder") not in (None, False, "weight", "static"):
        raise UnsupportedError(
            f"{where} have actorder={told['actorder']!r}, which reorders columns: not supported"
        )
    fmt = _FORMATS.get((told.get("type", "int"), told.get("num_bits", 8)))
    if fmt is None:
        raise UnsupportedError(
            f"{where} have type {told.get('type')!r} of {told.get('num_bits')!r} bits; known are "
            + ", ".join(f"{kind} of {bits}" for kind, bits in _FORMATS)
        )
    size = told.get("group_size")
    strategy = told.get("strategy") or (
        "tensor" if size is None else "channel" if size == -1 else "group"
    )
    match strategy:
        case "tensor":
            block = (0, 0)
        case "channel" | "token":
            block = (1, 0)
        case "group" | "tensor_group" if isinstance(size, int) and size > 0:
            block = (1, size)
        case "block" if _is_block(told.get("block_structure")):
            block = tuple(told["block_structure"])
        case _:
            raise UnsupportedError(f"{where} have the strategy {strategy!r}, which is not known")
    two_level = strategy == "tensor_group"
    micro = fmt.bits < 8 and fmt not in (INT4, INT8) and not two_level
    if micro or "uint8" in str(told.get("scale_dtype")):
        return fmt, block, "e8m0"
    return fmt, block, "two_level" if two_level else "amax"


def _is_block(given: Any) -> bool:
    return (
        isinstance(given, list)
        and len(given) == 2
        and all(isinstance(n, int) and n > 0 for n in given)
    )
