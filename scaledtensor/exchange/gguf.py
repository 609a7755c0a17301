"""GGUF: the files of llama.cpp, read and written by its `gguf` package.

A row of a weight is a series of blocks of 32 elements. Each block has its scale before its codes:

    Q8_0    float16 scale, 32 bytes of integers
    Q4_0    float16 scale, 16 bytes: element i in the low nibble of byte i, element i + 16 in the
            high one, each an integer plus 8
    MXFP4   E8M0 scale, 16 bytes of E2M1 codes in the order of Q4_0

A float16 scale holds the powers of two from 2^-24 to 2^15, and 11 bits of any other number from
2^-14 on. `save` rounds a float32 scale to it. The codes do not change, so that a value changes by
at most 2^-11 of itself. A scale below 2^-14 would lose more bits, and one beyond 65504 has no
float16: `save` refuses both.
"""

import importlib
import math
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from scaledtensor.checkpoint.files import replacing
from scaledtensor.errors import CheckpointError, UnsupportedError
from scaledtensor.exchange.layouts import Layout
from scaledtensor.quantization.configs import WeightOnly
from scaledtensor.quantization.tensor import QuantizedTensor

__all__ = ["LAYOUTS", "METHOD", "blocks_of", "load", "save", "weight_of"]

METHOD = "gguf"

_layout = partial(Layout, readers=("llama.cpp",))
_rounded = partial(
    _layout,
    dtype=torch.float16,
    difference="0 if float16 holds the scales, as it holds powers of two; else 2^-11",
    decoded="as saved and loaded",
)

LAYOUTS: tuple[Layout, ...] = (
    _rounded("Q8_0", WeightOnly("int8", 32), "Q8_0"),
    _rounded("Q4_0", WeightOnly("int4", 32), "Q4_0", packing="halves"),
    _layout("MXFP4", WeightOnly("mxfp4"), "MXFP4", packing="halves", dtype=torch.uint8),
)

_BLOCK = 32
#: dtype of a plain tensor -> its type in GGUF.
_PLAIN = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}


# --- weights ---------------------------------------------------------------------------------


def blocks_of(layout: Layout, x: QuantizedTensor, where: str) -> Tensor:
    """The bytes of a weight, uint8 of shape (rows, bytes of a row).

    Raises:
        UnsupportedError: float16 cannot hold a scale, or the weight is not one of rows of whole
            blocks.
    """
    if x.dim() != 2 or x.order != "rows" or x.columns is not None or x.config.rotate:
        raise UnsupportedError(
            f"{where} is not the unrotated weight of an nn.Linear or an nn.Embedding, and GGUF has "
            "no place for another one: leave its module out of quantize_"
        )
    rows, columns = x.shape
    if columns % _BLOCK:
        raise UnsupportedError(
            f"{where} has rows of {columns} elements, and GGUF has blocks of {_BLOCK}: leave its "
            "module out of quantize_"
        )
    codes = x.codes.reshape(rows, -1, _BLOCK)
    if layout.packing == "halves":
        codes = codes ^ 8 if layout.name == "Q4_0" else codes
        low, high = codes.chunk(2, -1)
        codes = (low & 15) | ((high & 15) << 4)
    scale = x.scale if layout.dtype == torch.uint8 else _halved(x.scale, where)
    parts = (scale.unsqueeze(-1).contiguous().view(torch.uint8), codes.view(torch.uint8))
    return torch.cat(parts, -1).reshape(rows, -1)


def _halved(scale: Tensor, where: str) -> Tensor:
    if scale.isnan().any():
        raise UnsupportedError(f"{where} has a NaN among its scales; such a weight is not exported")
    held = scale.half()
    kept = (held.float() == scale) | ((scale >= 2.0**-14) & held.isfinite())
    if not kept.all():
        raise UnsupportedError(
            f"{where} has the scale {scale[~kept][0].item():g}, which a float16 does not hold to "
            "11 bits: scales in GGUF are from 2^-14 to 65504"
        )
    return held


def weight_of(
    layout: Layout, held: Tensor, where: str, dtype: torch.dtype = torch.float32
) -> QuantizedTensor:
    """The weight that the bytes `blocks_of` stand for.

    Raises:
        CheckpointError: the bytes are no whole blocks, or a scale is NaN, negative or infinite.
    """
    wide = layout.dtype.itemsize
    size = wide + _BLOCK // (1 if layout.packing == "typed" else 2)
    if held.dim() != 2 or held.dtype != torch.uint8 or held.shape[1] % size:
        raise CheckpointError(
            f"{where} is {held.dtype} of shape {tuple(held.shape)}; {layout.name} has a matrix of "
            f"bytes, {size} for a block"
        )
    rows = held.shape[0]
    blocks = held.reshape(rows, -1, size)
    scale, codes = blocks[..., :wide].contiguous(), blocks[..., wide:]
    if layout.packing == "halves":
        codes = torch.cat((codes & 15, codes >> 4), -1)
        codes = codes ^ 8 if layout.name == "Q4_0" else codes
    whole = codes.reshape(rows, -1).contiguous()
    if layout.dtype == torch.uint8:
        numbers = scale.view(torch.float8_e8m0fnu).squeeze(-1)
    else:
        numbers = scale.view(torch.float16).squeeze(-1).float()
    values = numbers.float()
    if not values.isfinite().all():
        raise CheckpointError(f"{where} holds a scale that is NaN or infinite")
    config = layout.config
    if (values < 0).any():
        whole, numbers, config = _positive(whole, numbers)
    return QuantizedTensor(whole, numbers, config, dtype=dtype)


def _positive(codes: Tensor, scale: Tensor) -> tuple[Tensor, Tensor, WeightOnly]:
    """The same values under positive scales. llama.cpp's own Q4_0 has negative scales. The element
    -8 becomes 8 there, which 4 bits do not hold, so the codes become 8-bit integers."""
    wide = _SIGNED[codes.long() & 15] if codes.amax() < 16 else codes.view(torch.int8)
    sign = torch.where(scale < 0, -1, 1).to(torch.int8)
    turned = wide.view(len(wide), -1, _BLOCK) * sign.unsqueeze(-1)
    return turned.flatten(1).view(torch.uint8), scale.abs(), WeightOnly("int8", _BLOCK)


#: The values of INT4 codes.
_SIGNED = torch.tensor([*range(8), *range(-8, 0)], dtype=torch.int8)


# --- files -----------------------------------------------------------------------------------


def save(tensors: Mapping[str, tuple[Layout | None, Tensor]], path: Path) -> None:
    """Write tensors by name, each with its layout or None for a plain one, to a file.

    Raises:
        CheckpointError: the file cannot be written, or the package is missing.
        UnsupportedError: GGUF has no type for a tensor.
    """
    library = _library()
    arrays: list[tuple[str, Any, Any]] = []
    for name, (layout, x) in tensors.items():
        if layout is not None and isinstance(x, QuantizedTensor):
            held, kind = blocks_of(layout, x, name), layout.written
        elif x.dtype in _PLAIN and 0 < x.dim() <= 4:
            kind = _PLAIN[x.dtype]
            held = x.detach().cpu().contiguous().view(torch.uint8)
        else:
            raise UnsupportedError(
                f"{name} is {x.dtype} of {x.dim()} dimensions; GGUF holds float32, float16 and "
                "bfloat16 of 1 to 4 dimensions here"
            )
        arrays.append((name, held.numpy(), library.GGMLQuantizationType[kind]))
    with replacing(path) as temporary:
        writer = library.GGUFWriter(temporary, "scaledtensor")
        for name, array, kind in arrays:
            writer.add_tensor(name, array, raw_dtype=kind)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()


def load(path: Path, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """The tensors of a file by name.

    Raises:
        CheckpointError: the file does not exist or is damaged, or the package is missing.
        UnsupportedError: a tensor has a type that no layout covers.
    """
    library = _library()
    layouts = {layout.written: layout for layout in LAYOUTS}
    plain = {kind: dtype for dtype, kind in _PLAIN.items()}
    found: dict[str, Tensor] = {}
    for name, kind, shape, data in _read(library, path):
        where = f"{name} of {path}"
        if kind in layouts:
            held = torch.from_numpy(data.copy())
            found[name] = weight_of(layouts[kind], held, where, dtype)
        elif kind in plain:
            held = torch.frombuffer(bytearray(data.tobytes()), dtype=plain[kind])
            if held.numel() != math.prod(shape):
                raise CheckpointError(f"{where} is damaged: it has {held.numel()} elements")
            found[name] = held.reshape(shape)
        else:
            known = ", ".join((*layouts, *plain))
            raise UnsupportedError(f"{where} is {kind}; known are {known}")
    return found


def _read(library: Any, path: Path) -> list[tuple[str, str, tuple[int, ...], Any]]:
    """Name, type, shape and data of each tensor."""
    if not path.exists():
        raise CheckpointError(f"{path} does not exist")
    try:
        reader = library.GGUFReader(path)
        return [
            (t.name, t.tensor_type.name, tuple(int(n) for n in reversed(t.shape)), t.data)
            for t in reader.tensors
        ]
    except Exception as error:  # damaged bytes can make the reader raise any error
        raise CheckpointError(f"{path} is damaged or no GGUF file: {error}") from error


def _library() -> Any:
    try:
        return importlib.import_module("gguf")
    except ImportError as error:
        raise CheckpointError("gguf is not installed: pip install 'scaledtensor[gguf]'") from error
