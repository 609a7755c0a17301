"""torchao: safetensors files of its tensor subclasses (`torchao.prototype.safetensors`).

A weight `layer.weight` is written as `layer._weight_qdata`, `layer._weight_scale` and so on. The
metadata of the file say, for each tensor, its class and its attributes as JSON (`describe`). The
attributes are the arguments of the class in torchao 0.18.
"""

import json
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from scaledtensor.errors import CheckpointError, QuantizationError, UnsupportedError
from scaledtensor.exchange.layouts import Layout
from scaledtensor.formats import E2M1FN, E4M3FN, INT4, INT8
from scaledtensor.quantization.configs import Config, Dynamic, WeightOnly
from scaledtensor.quantization.tensor import QuantizedTensor
from scaledtensor.tensors.codec import dtype_name

__all__ = [
    "FOREIGN",
    "LAYOUTS",
    "METHOD",
    "Described",
    "config_of",
    "describe",
    "described",
    "entry",
    "extra_parts",
    "metadata",
]

METHOD = "torchao"

_layout = partial(
    Layout,
    codes="_weight_qdata",
    scale="_weight_scale",
    readers=("torchao", "transformers"),
)
_float8 = partial(_layout, written="Float8Tensor")
_int8 = partial(_layout, written="Int8Tensor")
_intx = partial(_layout, written="IntxUnpackedToInt8Tensor", groups=True)
_mx = partial(_layout, written="MXTensor", dtype=torch.float8_e8m0fnu, readers=("torchao",))
_nvfp4 = partial(
    _mx,
    written="NVFP4Tensor",
    packing="bytes",
    dtype=torch.float8_e4m3fn,
    tensor_scale="_weight_per_tensor_scale",
    decoded="2^-23: it rounds twice",
)

LAYOUTS: tuple[Layout, ...] = (
    _float8("Float8Tensor per tensor", WeightOnly("e4m3fn", "tensor"), shape="one by one"),
    _float8("Float8Tensor", WeightOnly("e4m3fn"), groups=True),
    _float8("Float8Tensor dynamic", Dynamic("e4m3fn")),
    _int8("Int8Tensor", WeightOnly("int8")),
    _int8("Int8Tensor dynamic", Dynamic("int8")),
    _intx("IntxUnpackedToInt8Tensor", WeightOnly("int4", 32)),
    _mx("MXTensor FP8", WeightOnly("mxfp8")),
    _mx("MXTensor FP4", WeightOnly("mxfp4"), packing="bytes"),
    _nvfp4("NVFP4Tensor", WeightOnly("nvfp4")),
)

_ZERO = "_weight_zero_point"
#: Parts that some weights have for their inputs.
_OF_INPUTS = ("act_pre_scale", "act_quant_scale", "act_quant_zero_point", "act_per_tensor_scale")

#: Names of other tensors of a weight -> their meaning (see `compressed_tensors.FOREIGN`).
FOREIGN = {f"_weight_{name}": "of inputs" for name in _OF_INPUTS} | {_ZERO: "zero points"}


# --- writing ---------------------------------------------------------------------------------


def extra_parts(layout: Layout, x: QuantizedTensor) -> dict[str, Tensor]:
    """The tensors that torchao writes beside codes and scales: zero points of zero."""
    if layout.written not in ("Int8Tensor", "IntxUnpackedToInt8Tensor"):
        return {}
    return {_ZERO: torch.zeros(x.scale.shape, dtype=torch.int8)}


def metadata(state: Mapping[str, Tensor], layouts: Mapping[str, Layout]) -> dict[str, str]:
    """The metadata of a file with these tensors, some of which have layouts."""
    plain = json.dumps({"_type": "Tensor"})
    told = {
        name: describe(layouts[name], x) if isinstance(x, QuantizedTensor) else plain
        for name, x in state.items()
    }
    return told | {"tensor_names": json.dumps(list(state))}


def entry(
    found: Mapping[str, tuple[Layout, Config]], kinds: Mapping[str, str | None], left: Iterable[str]
) -> dict[str, Any]:
    """The entry `quantization_config` of config.json (see `compressed_tensors.entry`). It names the
    config of torchao by which transformers knows the method; the metadata say all the rest."""
    layout, config = next(iter(found.values()))
    told: dict[str, Any] = {
        "quant_method": METHOD,
        "modules_to_not_convert": list(left),
        "include_input_output_embeddings": any(kinds[name] != "Linear" for name in found),
        "untie_embedding_weights": False,
    }
    if layout.name in _CONFIGS:
        told["quant_type"] = {"default": _CONFIGS[layout.name](config.weight.block[1])}
    return told


def _versioned(kind: str, **values: Any) -> dict[str, Any]:
    return {"_type": kind, "_version": 2, "_data": values}


#: Layout -> the config of torchao for a group size.
_CONFIGS: dict[str, Callable[[int], dict[str, Any]]] = {
    "Float8Tensor per tensor": lambda size: _versioned("Float8WeightOnlyConfig"),
    "Float8Tensor": lambda size: _versioned("Float8WeightOnlyConfig"),
    "Float8Tensor dynamic": lambda size: _versioned("Float8DynamicActivationFloat8WeightConfig"),
    "Int8Tensor": lambda size: _versioned("Int8WeightOnlyConfig"),
    "Int8Tensor dynamic": lambda size: _versioned("Int8DynamicActivationInt8WeightConfig"),
    "IntxUnpackedToInt8Tensor": lambda size: _versioned(
        "IntxWeightOnlyConfig",
        weight_dtype=_typed("torch.dtype", "int4"),
        granularity={"_type": "PerGroup", "_version": 1, "_data": {"group_size": size or 32}},
    ),
}


def describe(layout: Layout, x: QuantizedTensor) -> str:
    """The entry of a weight in the metadata."""
    rows, columns = x.shape
    across, along = x.config.weight.block
    block = [across or rows, along or columns]
    dtype, data = _typed("torch.dtype", dtype_name(x.dtype)), ["qdata", "scale"]
    dynamic = x.config.input is not None
    match layout.written:
        case "Float8Tensor":
            automatic = _typed("KernelPreference", "AUTO")
            facts: dict[str, Any] = {
                "block_size": block,
                "mm_config": None,
                "act_quant_kwargs": _FLOAT8_INPUT if dynamic else None,
                "kernel_preference": automatic,
                "dtype": dtype,
            }
        case "Int8Tensor":
            facts = {"act_quant_kwargs": _INT8_INPUT if dynamic else None, "reduce_range": False}
            facts |= {"block_size": block, "dtype": dtype}
            data = ["zero_point", *data]
        case "IntxUnpackedToInt8Tensor":
            facts = {"target_dtype": _typed("torch.dtype", "int4"), "block_size": block}
            facts |= {"dtype": dtype, "activation_quantization": None}
            data = [*data, "zero_point"]
        case "MXTensor":
            element = "float8_e4m3fn" if x.format == E4M3FN else "float4_e2m1fn_x2"
            facts = {
                "elem_dtype": _typed("torch.dtype", element),
                "block_size": along,
                "orig_dtype": dtype,
                "kernel_preference": _typed("KernelPreference", "EMULATED"),
                "act_quant_kwargs": None,
                "is_swizzled_scales": False,
            }
        case _:
            facts = {"is_swizzled_scales": False, "use_triton_kernel": False}
            facts |= {"act_quant_kwargs": None, "block_size": along, "orig_dtype": dtype}
            data = ["per_tensor_scale", *data]
    return json.dumps({"_type": layout.written, "_data": facts, "_tensor_data_names": data})


def _typed(kind: str, value: Any) -> dict[str, Any]:
    return {"_type": kind, "_data": value}


_PER_ROW = _typed("PerRow", {"dim": -1})
_FLOAT8_INPUT = _typed(
    "QuantizeTensorToFloat8Kwargs",
    {
        "float8_dtype": _typed("torch.dtype", "float8_e4m3fn"),
        "granularity": _PER_ROW,
        "mm_config": None,
        "hp_value_lb": None,
        "hp_value_ub": None,
        "kernel_preference": _typed("KernelPreference", "AUTO"),
    },
)
_INT8_INPUT = _typed(
    "QuantizeTensorToInt8Kwargs",
    {
        "granularity": _PER_ROW,
        "mapping_type": _typed("MappingType", "SYMMETRIC"),
        "reduce_range": False,
    },
)


# --- reading ---------------------------------------------------------------------------------


class Described(NamedTuple):
    """One tensor, as the metadata describe it."""

    kind: str
    """The name of its class; "Tensor" for a plain one."""
    facts: dict[str, Any]
    parts: tuple[str, ...]
    """The names of its parts, relative to its module."""


def described(where: str, metadata: Mapping[str, str]) -> dict[str, Described]:
    """The tensors of a file by name.

    Raises:
        CheckpointError: the metadata are damaged.
    """
    try:
        names = json.loads(metadata["tensor_names"])
        found = {}
        for name in names:
            told = json.loads(metadata[name])
            own = name.rpartition(".")[2]
            parts = tuple(f"_{own}_{part}" for part in told.get("_tensor_data_names", ()))
            found[name] = Described(told["_type"], told.get("_data", {}), parts)
        return found
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise CheckpointError(f"{where} is damaged: its metadata cannot be read") from error


def config_of(
    where: str, told: Described, parts: Mapping[str, Tensor]
) -> tuple[Layout, Config, torch.dtype]:
    """The layout, the config and the dtype of a weight of torchao.

    Args:
        where: the name of the file and the tensor in messages.
        told: its entry in the metadata.
        parts: its tensors, by their names in the layout.

    Raises:
        CheckpointError: a part is missing or does not fit.
        UnsupportedError: it has attributes that no layout covers.
    """
    for name in told.parts:
        if name not in parts:
            raise CheckpointError(f"{where} has no {name}, which its metadata name")
    facts = told.facts
    for name in (
        "act_pre_scale",
        "act_quant_scale",
        "act_quant_zero_point",
        "act_per_tensor_scale",
    ):
        if f"_weight_{name}" in parts:
            raise UnsupportedError(f"{where} has {name}, for which there is no place here")
    if _ZERO in parts and parts[_ZERO].any():
        raise UnsupportedError(f"{where} is asymmetric: zero points are not supported")
    if facts.get("is_swizzled_scales"):
        raise UnsupportedError(
            f"{where} has swizzled scales, in the order of one kernel: torchao writes them plain "
            "if is_swizzled_scales is False"
        )
    codes = parts.get("_weight_qdata")
    if codes is None:
        raise CheckpointError(f"{where} has no _weight_qdata")
    try:
        config = _config(told.kind, facts, codes)
        dtype = getattr(torch, str((facts.get("dtype") or facts["orig_dtype"])["_data"]))
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise CheckpointError(f"{where} is damaged: its metadata lack {error}") from error
    except QuantizationError as error:
        raise UnsupportedError(f"{where}: {error}") from error
    for layout in LAYOUTS:
        if config is not None and layout.written == told.kind and layout.fits(config):
            return layout, config, dtype
    raise UnsupportedError(
        f"{where} is a {told.kind} with {facts}; known are "
        + ", ".join(layout.name for layout in LAYOUTS)
    )


def _config(kind: str, facts: Mapping[str, Any], codes: Tensor) -> Config | None:
    dynamic = facts.get("act_quant_kwargs") is not None
    size = facts["block_size"]
    if kind in ("MXTensor", "NVFP4Tensor"):
        if dynamic:
            return None
        if kind == "NVFP4Tensor":
            return WeightOnly(E2M1FN, int(size), "two_level")
        element = facts["elem_dtype"]["_data"]
        fmt = {"float8_e4m3fn": E4M3FN, "float4_e2m1fn_x2": E2M1FN}.get(element)
        return None if fmt is None else WeightOnly(fmt, int(size), "e8m0")
    fmt = {"Float8Tensor": E4M3FN, "Int8Tensor": INT8}.get(kind)
    if kind == "IntxUnpackedToInt8Tensor" and facts["target_dtype"]["_data"] == "int4":
        fmt = INT4 if facts.get("activation_quantization") is None else None
    if fmt is None or (fmt == E4M3FN and codes.dtype != torch.float8_e4m3fn):
        return None
    rows, columns = codes.shape
    across, along = (int(n) for n in size)
    block = (0, 0) if (across, along) == (rows, columns) else (across, along % columns)
    if not dynamic:
        return WeightOnly(fmt, block)
    per_row = facts["act_quant_kwargs"]["_data"]["granularity"]["_type"] == "PerRow"
    return Dynamic(fmt, block, input_granularity="token" if per_row else "tensor")
