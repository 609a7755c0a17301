"""Casts under a scale that a recipe chooses: `scaledtensor.recipes.casts` has the formulas.

The functions cast the elements of a ScaledTensor, which are near 1 under the tensor's scale. A
scale that they find is relative to the tensor's scale, so a tensor times a power of two has the
same codes.
"""

import typing
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from scaledtensor.backends import Sharing, backend_of
from scaledtensor.formats import (
    E8M0FNU,
    Format,
    PerBlock,
    PerTensor,
    TwoLevelScale,
    decode,
    dequantize_blocks,
    encode,
    encode_blocks,
    fake_quantize,
    from_dtype,
    quantize_blocks,
)
from scaledtensor.formats.layouts import beside_blocks, block_dims, to_blocks
from scaledtensor.ops.algebra import elements
from scaledtensor.ops.products.dtype import product_dtype
from scaledtensor.ops.registry import rule
from scaledtensor.ops.results import store
from scaledtensor.recipes.casts import (
    HADAMARD,
    Amax,
    Cast,
    Fixed,
    History,
    LeastError,
    Microscale,
    TwoLevel,
    parsed_cast,
)
from scaledtensor.scales.powers import MAX_SCALE, MIN_SCALE
from scaledtensor.tensors import verbs
from scaledtensor.tensors.memo import note
from scaledtensor.tensors.tensor import ScaledTensor

__all__ = [
    "Coded",
    "factor_dtype",
    "factors",
    "granularity",
    "is_exact",
    "least_error",
    "mixed",
    "part_quantized",
    "quantized",
    "recoded",
    "rounding_options",
    "sharing",
]


class Coded(NamedTuple):
    """Elements as codes, and their scales relative to the scale of the tensor."""

    codes: Tensor
    scale: Tensor
    """float32 or float8_e8m0fnu; float8_e4m3fn for blocks under a second level."""
    whole: Tensor | None = None
    """The second level, 0-dim float32."""


@rule(verbs.quantize)
def quantize(x: ScaledTensor, cast: str) -> ScaledTensor:
    """Elements are cast under one scale that the recipe chooses (amax, least error, constant). It
    becomes the tensor's scale and may be any number, not only a power of two."""
    how = parsed_cast(cast)
    coded = quantized(elements(x), x.scale, how, -1)
    return recoded(x, coded.codes, coded.scale * x.scale, how.format)


def recoded(x: ScaledTensor, codes: Tensor, scale: Tensor, fmt: Format) -> ScaledTensor:
    """Return `x` with its elements cast to `codes` in `fmt` under `scale`."""
    out = ScaledTensor.make(codes, scale, x.rms.clone(), fmt, x.dtype, x.recipe, x.nonnegative)
    if codes.dtype.itemsize == 1 and backend_of(codes).writes_cpp and torch.compiler.is_compiling():
        note(out, decoded=decode(codes, fmt, torch.bfloat16))
    return out


@rule(verbs.gradient_quantize)
def gradient_quantize(x: ScaledTensor, cast: str) -> ScaledTensor:
    """The identity forward; the cast happens to the gradient."""
    return x.like(x.qdata, x.scale, x.rms)


def quantized(q: Tensor, held: Tensor, cast: Cast, dim: int, whole: Tensor | None = None) -> Coded:
    """Cast `q`, elements under the scale `held`, for a product that sums over dimension `dim` (-1
    or -2). `whole` is the second level of `TwoLevel` scales; by default it follows from `q`."""
    fmt, cut = cast.format, granularity(cast, dim)
    how = rounding_options(cast, q)
    match cast.scale:
        case Amax() | Microscale() | TwoLevel() if cast.scale.least_error:
            return _searched(q, cast, dim, how, whole)
        case Amax(power_of_two, margin):
            kind: Any = "pow2" if power_of_two else "fp32"
            if margin == 0:
                codes, scale = quantize_blocks(q, fmt, cut, kind, **how)
                return Coded(codes, _single(scale))
            return _filling(q, q, cut, kind, cast, how)
        case History(_, margin):  # without a history: as Amax
            return quantized(q, held, replace(cast, scale=Amax(margin=margin)), dim)
        case Microscale(mode):
            codes, scale = quantize_blocks(q, fmt, cut, "e8m0", typing.cast(Any, mode), **how)
            return Coded(codes, _single(scale))
        case TwoLevel():
            codes, levels = quantize_blocks(q, fmt, cut, "nvfp4", **how, tensor_scale=whole)
            return Coded(codes, *levels)
        case Fixed(exponent):
            relative = (2.0**exponent / held.double()).clamp(MIN_SCALE, MAX_SCALE).float()
            return Coded(encode_blocks(q, fmt, cut, relative, **how), relative)
        case LeastError(below):
            scale = least_error(q, fmt, below=below)
            return Coded(encode_blocks(q, fmt, cut, scale, **how), scale)
        case _:
            one = torch.ones((), device=q.device, dtype=torch.float32)
            if fmt.storage_dtype.itemsize > 1:  # a compute format keeps infinities
                return Coded(store(q, fmt), one)
            shift = 2.0**cast.scale.shift
            return Coded(encode(q / shift if shift != 1 else q, fmt, **how), one * shift)


def part_quantized(q: Tensor, amax: Tensor, cast: Cast) -> Coded:
    """Cast a part of a tensor by `Amax` under the scale of the whole tensor, whose largest
    magnitude is `amax`."""
    power_of_two = cast.scale.power_of_two  # type: ignore[union-attr]
    kind = "pow2" if power_of_two else "fp32"
    return _filling(q, amax.to(q.dtype).view(1), PerTensor(), kind, cast, rounding_options(cast, q))


def _filling(
    q: Tensor, like: Tensor, cut: PerTensor | PerBlock, kind: Any, cast: Cast, how: dict[str, Any]
) -> Coded:
    """Cast `q` under the scale that follows from the amax of `like`."""
    margin = cast.scale.margin  # type: ignore[union-attr]
    scale = _single(quantize_blocks(like, cast.format, cut, kind)[1])
    scale = (scale * 2.0**margin).clamp_max(MAX_SCALE)
    return Coded(encode_blocks(q, cast.format, cut, scale, **how), scale)


def rounding_options(cast: Cast, q: Tensor) -> dict[str, Any]:
    """Return the options of `encode` for `q`: infinities are kept, and random keys are drawn."""
    how: dict[str, Any] = {"rounding": cast.rounding, "overflow": "saturate_finite"}
    if cast.rounding != "stochastic":
        return how
    return {**how, "generator": torch.ops.scaledtensor.random_key(q)}


def _single(scale: Any) -> Tensor:
    found: Tensor = scale
    return found


def granularity(cast: Cast, dim: int) -> PerTensor | PerBlock:
    """Return the blocks that share a scale in a matrix, or a batch of matrices, that a product sums
    over dimension `dim`."""
    across, along = cast.block
    if (across, along) == (0, 0):
        return PerTensor()
    rows, columns = (across, along) if dim == -1 else (along, across)
    return PerBlock((rows or -1, columns or -1))


def sharing(cast: Cast) -> Sharing:
    """Return the facts about a cast that FP8 units ask for."""
    scales = torch.float32
    if isinstance(cast.scale, Microscale):
        scales = torch.float8_e8m0fnu
    elif isinstance(cast.scale, TwoLevel):
        scales = torch.float8_e4m3fn
    return Sharing(cast.block, cast.format.storage_dtype, scales, str(cast))


def factors(coded: Coded, cast: Cast, dim: int) -> tuple[Tensor, Tensor | None]:
    """Return codes as matrices to multiply, and the factor of their product: a scale that all terms
    of a sum share is multiplied afterwards.

    The matrices have the dtype that the device multiplies, and bfloat16 only if that is exact.
    Every code of 8 bits or fewer is a bfloat16 number, also times a power of two. A code of 4 bits
    times an E4M3FN number is a bfloat16 number too.
    """
    codes, scale, whole = coded
    fmt, shape = cast.format, codes.shape
    if fmt.bits > 8:
        return codes, None
    cut = granularity(cast, dim)
    dtype = factor_dtype(codes.device, cast, dim)
    if whole is not None:
        one = TwoLevelScale(scale, torch.ones_like(whole))
        return dequantize_blocks(codes, one, fmt, cut, dtype), whole
    if isinstance(cut, PerTensor):
        return decode(codes, fmt, dtype), _numbers(scale)
    if cut.block[dim] == -1:
        return decode(codes, fmt, dtype), _by_row(_numbers(scale), cut, shape, dim)
    return dequantize_blocks(codes, scale, fmt, cut, dtype), None


def factor_dtype(device: torch.device, cast: Cast, dim: int) -> torch.dtype:
    """Return the dtype of the matrices of `factors`."""
    return product_dtype(device) if is_exact(cast, dim) else torch.float32


def is_exact(cast: Cast, dim: int) -> bool:
    """Whether bfloat16 holds the `factors` of codes of this cast, including the scales that differ
    along `dim`."""
    if isinstance(cast.scale, TwoLevel):
        # The significant bits of the format and the 4 of the scale fit into the 8 of bfloat16.
        return cast.format.mantissa_bits + 1 + 4 <= 8
    cut = granularity(cast, dim)
    if isinstance(cut, PerTensor) or cut.block[dim] == -1:
        return True
    binary = isinstance(cast.scale, Amax) and cast.scale.power_of_two
    return binary or isinstance(cast.scale, Microscale)


def _numbers(scale: Tensor) -> Tensor:
    return scale if scale.dtype == torch.float32 else decode(scale, E8M0FNU)


def _by_row(scale: Tensor, cut: PerBlock, shape: torch.Size, dim: int) -> Tensor:
    """Return the scales of blocks that span the summed dimension, one for each index of the other
    dimension."""
    other = -3 - dim
    if cut.block[other] == 1:
        return scale
    spread = scale.repeat_interleave(cut.block[other], other)
    return spread.narrow(other, 0, shape[other])


def least_error(
    q: Tensor, fmt: Format, counts: Tensor | None = None, *, below: int = LeastError().below
) -> Tensor:
    """Return the power of two under which the cast of `q` has the least squared error, 0-dim
    float32. An element counts `counts` times."""
    top = _single(quantize_blocks(q, fmt, PerTensor(), "pow2")[1])
    scales = [(top * 2.0**-k).clamp_min(MIN_SCALE) for k in range(below + 1)]
    return _best(q, fmt, PerTensor(), scales, counts=counts)


def _best(
    q: Tensor,
    fmt: Format,
    cut: PerTensor | PerBlock,
    scales: list[Tensor],
    whole: Tensor | None = None,
    counts: Tensor | None = None,
) -> Tensor:
    """Return for each block the one of `scales`, float32, with the least squared error. The first
    of several is taken. `whole` is a factor of all scales."""
    finite = to_blocks(q.float().nan_to_num(0.0, 0.0, 0.0), cut)
    dims = block_dims(finite)
    errors = []
    for scale in scales:
        s = beside_blocks(scale if whole is None else scale * whole, cut, q.shape)
        error = (fake_quantize(finite / s, fmt) * s - finite).double().square()
        if counts is not None:
            error = error * counts
        errors.append(error.sum(dims).view(scale.shape))
    least = torch.stack(errors).argmin(0, keepdim=True)  # to gather: an index would be read
    found: Tensor = torch.stack(scales).gather(0, least).squeeze(0)
    return found


#: Factors of the scale by amax among which the least squared error decides. In a format of 4 bits
#: the largest codes are far apart, so that a larger scale can be better too.
_FACTORS = (1, *(1 - k / 32 for k in range(1, 13)), 1.125, 1.25, 1.5)
_BINARY_FACTORS = (1, 0.5, 0.25, 2)


def _searched(q: Tensor, cast: Cast, dim: int, how: dict[str, Any], whole: Tensor | None) -> Coded:
    """Cast `q` under scales near the scales by amax, those with the least squared error."""
    fmt, scale = cast.format, replace(cast.scale, least_error=False)  # type: ignore[arg-type]
    plain, cut = replace(cast, scale=scale), granularity(cast, dim)
    first = quantized(q, torch.ones((), device=q.device, dtype=torch.float32), plain, dim, whole)
    kind = first.scale.dtype
    numbers = first.scale if kind == torch.float32 else decode(first.scale, from_dtype(kind))
    binary = kind == torch.float8_e8m0fnu or getattr(scale, "power_of_two", False)
    tried = [numbers * f for f in (_BINARY_FACTORS if binary else _FACTORS)]
    stored = None if kind == torch.float32 else from_dtype(kind)
    if stored is None:
        tried = [s.clamp(MIN_SCALE, MAX_SCALE) for s in tried]
    else:
        least = stored.min_subnormal
        tried = [decode(encode(s.clamp_min(least), stored), stored) for s in tried]
    best = _best(q, fmt, cut, tried, first.whole)
    held = best if stored is None else encode(best, stored)
    levels: Any = held if first.whole is None else TwoLevelScale(held, first.whole)
    return Coded(encode_blocks(q, fmt, cut, levels, **how), held, first.whole)


# --- the random Hadamard transform -----------------------------------------------------------

#: Signs drawn once, for both operands of a product and for every product, as in arXiv 2509.25149.
_SIGNS = (1, -1, 1, 1, 1, -1, -1, 1, -1, 1, -1, -1, -1, -1, 1, -1)


def mixed(q: Tensor, dim: int) -> Tensor:
    """Return `q` in float32 with each 16 elements along `dim`, -1 or -2, multiplied by an
    orthogonal matrix: Sylvester's Hadamard matrix times random signs. Zeros fill the last 16."""
    x = q.float() if dim == -1 else q.float().mT
    n = x.shape[-1]
    x = torch.nn.functional.pad(x, (0, -n % HADAMARD))
    matrix = _hadamard(x.device)
    groups = x.reshape(*x.shape[:-1], x.shape[-1] // HADAMARD, HADAMARD)
    y: Tensor = (groups @ matrix).flatten(-2)
    return y if dim == -1 else y.mT


def _hadamard(device: torch.device) -> Tensor:
    h = torch.ones(1, 1, device=device, dtype=torch.float32)
    while h.shape[0] < HADAMARD:
        h = torch.cat([torch.cat([h, h], 1), torch.cat([h, -h], 1)])
    # By arithmetic: a tensor of numbers of the host would be a constant of an exported program.
    bits = sum(1 << i for i, sign in enumerate(_SIGNS) if sign < 0)
    signs = 1.0 - 2.0 * (bits >> torch.arange(HADAMARD, device=device) & 1)
    matrix: Tensor = signs[:, None] * h / HADAMARD**0.5
    return matrix
