"""scaled: the function that makes a ScaledTensor of a plain tensor."""

from typing import Any, Literal, cast, get_args

import torch
from torch import Tensor

from scaledtensor.errors import DTypeError, ScaleError
from scaledtensor.formats import (
    Format,
    FormatLike,
    Granularity,
    PerTensor,
    TwoLevelScale,
    encode,
    from_dtype,
    quantize_blocks,
)
from scaledtensor.formats import get as get_format
from scaledtensor.formats.layouts import (
    as_granularity,
    block_dims,
    check_scale_shape,
    expand_scale,
    scale_shape,
    to_blocks,
)
from scaledtensor.recipes import Recipe
from scaledtensor.recipes import get as get_recipe
from scaledtensor.scales.measure import amax, measured_rms
from scaledtensor.scales.powers import (
    MAX_SCALE,
    MIN_SCALE,
    checked_scale,
    is_power_of_two,
    nearest_power_of_two,
)
from scaledtensor.tensors.coded import CodedTensor
from scaledtensor.tensors.ruled import Ruled
from scaledtensor.tensors.storable import APPEARANCES, appearance, check_strided, is_storable
from scaledtensor.tensors.tensor import ScaledTensor, from_plain, under_scale

__all__ = ["scaled"]

#: "rms", "amax", "one", a mode of OCP MX, or NVFP4's two levels.
Choice = Literal["rms", "amax", "one", "floor", "rceil", "ceil", "even", "nvfp4"]


def scaled(
    x: Tensor,
    format: FormatLike | None = None,
    scale: Choice | float | Tensor = "rms",
    granularity: Granularity = PerTensor(),  # noqa: B008 - frozen
    *,
    dtype: torch.dtype | None = None,
    recipe: Recipe | str | None = None,
) -> ScaledTensor | CodedTensor:
    """Wrap a plain tensor. The result is a leaf: no gradient flows back into `x`.

    Args:
        x: float16, bfloat16, float32 or float64, of any shape.
        format: the format of the elements: a `Format`, its name or its torch dtype; by default the
            one that stores `x.dtype` exactly.
        scale: how a scale is chosen for the elements that share it. "rms", the power of two nearest
            to their RMS; "amax", max|x| / format.max, which fills the format and is no power of
            two; "floor", "rceil", "ceil", "even", the power of two by their amax as in OCP MX
            (`formats.quantize_blocks`); "nvfp4", an E4M3FN number for each block times a float32
            for the tensor, for formats of 8 bits or fewer; "one"; or powers of two of your own: a
            number, or a tensor of the shape that `granularity` gives. Infinities and NaNs count in
            neither the RMS nor the maximum.
        granularity: the elements that share a scale: `PerTensor()`, `PerAxis(dim)` or
            `PerBlock(sizes)`.
        dtype: the dtype that autograd and optimizers see; by default `x.dtype`.
        recipe: how matrix products cast the result, or the name of a recipe.

    Returns:
        A ScaledTensor; or a `CodedTensor`, which operators read and do not compute on, if there is
        more than one scale, a scale of two levels (even for a single block, `PerTensor()`), or a
        format for which torch has no dtype.

    Raises:
        DTypeError: `x` is not a real floating-point tensor.
        FormatError: unknown format, one of scales, or one of more than 8 bits for "nvfp4".
        ScaleError: unknown choice, or not positive finite powers of two.
        ShapeError: `granularity` or a tensor of scales does not fit the shape of `x`.
        RecipeError: no recipe has that name.
    """
    if isinstance(x, Ruled):
        raise DTypeError(f"this is a {x.kind} already; use .to_format() or .rescale()")
    if not isinstance(x, Tensor) or x.dtype not in APPEARANCES:
        given = x.dtype if isinstance(x, Tensor) else type(x).__name__
        raise DTypeError(
            f"scaled() takes float16, bfloat16, float32 or float64 tensors; got {given}"
        )
    if format is None and x.dtype == torch.float64:
        raise DTypeError("no format stores float64; pass one, for example format='fp32'")
    fmt = from_dtype(x.dtype) if format is None else get_format(format)
    check_strided(x)
    seen = appearance(dtype or x.dtype)
    chosen = None if recipe is None else get_recipe(recipe)
    cut = as_granularity(granularity)
    if isinstance(scale, str) and scale not in get_args(Choice):
        raise ScaleError(
            f"scale is {', '.join(map(repr, get_args(Choice)))}, or a power of two; got {scale!r}"
        )
    single = isinstance(cut, PerTensor) and scale != "nvfp4"
    if not single or not is_storable(fmt):
        return _coded(x, fmt, scale, cut, seen, chosen)
    if scale == "rms":
        return from_plain(x, fmt, seen, chosen)
    return under_scale(x, _one_scale(x, fmt, scale), measured_rms(x), fmt, seen, chosen)


def _one_scale(x: Tensor, fmt: Format, scale: str | float | Tensor) -> Tensor:
    if not isinstance(scale, str):
        return checked_scale(scale, x.device, power_of_two=True)
    if scale == "one":
        return torch.ones((), device=x.device, dtype=torch.float32)
    if scale == "amax":
        return _filling(x, fmt)
    return cast(Tensor, _by_blocks(x, fmt, scale, PerTensor())[1])


def _filling(x: Tensor, fmt: Format) -> Tensor:
    """The smallest scale under which no finite element of `x` overflows `fmt`."""
    largest = amax(x.detach().double())
    scale = (largest / fmt.max).clamp(MIN_SCALE, MAX_SCALE).float()
    above = torch.nextafter(scale, torch.full_like(scale, float("inf")))
    return torch.where(scale.double() * fmt.max < largest, above, scale)


# --- several scales --------------------------------------------------------------------------


def _coded(
    x: Tensor,
    fmt: Format,
    scale: str | float | Tensor,
    granularity: Granularity,
    dtype: torch.dtype,
    recipe: Recipe | None,
) -> CodedTensor:
    scales: Tensor | TwoLevelScale
    if isinstance(scale, str) and scale not in ("rms", "one"):
        codes, scales = _by_blocks(x, fmt, scale, granularity)
    else:
        scales = _chosen(x, scale, granularity)
        # The quotient by a power of two is exact in float64.
        codes = encode(x.detach().double() / expand_scale(scales, granularity, x.shape), fmt)
    return CodedTensor(codes, scales, fmt, granularity, dtype=dtype, recipe=recipe)


def _by_blocks(
    x: Tensor, fmt: Format, choice: str, granularity: Granularity
) -> tuple[Tensor, Tensor | TwoLevelScale]:
    how: Any = {"amax": ("fp32",), "nvfp4": ("nvfp4",)}.get(choice, ("pow2", choice))
    return quantize_blocks(x, fmt, granularity, *how)


def _chosen(x: Tensor, scale: str | float | Tensor, granularity: Granularity) -> Tensor:
    shape = scale_shape(granularity, x.shape)
    if scale == "one":
        return torch.ones(shape, device=x.device, dtype=torch.float32)
    if isinstance(scale, str):
        return nearest_power_of_two(_block_rms(x, granularity)).view(shape)
    if not isinstance(scale, Tensor) or scale.dim() == 0:
        return checked_scale(scale, x.device, power_of_two=True).expand(shape).clone()
    check_scale_shape(scale, granularity, x.shape)
    given = scale.detach().to(x.device, torch.float32).contiguous()
    if not (is_power_of_two(given).all() and torch.equal(given.to(scale), scale.detach())):
        raise ScaleError(
            "scales of your own are powers of two, from 2**-126 to 2**127; round them first "
            "(scaledtensor.scales.powers.nearest_power_of_two), or make a CodedTensor "
            "of codes and scales"
        )
    return given


def _block_rms(x: Tensor, granularity: Granularity) -> Tensor:
    """The RMS of each block over the elements that it has. Infinities and NaNs count as zeros. The
    computation is in float64, where no square of a float32 overflows."""
    finite = to_blocks(x.detach().double().nan_to_num(0.0, 0.0, 0.0), granularity)
    present = to_blocks(torch.ones_like(x, dtype=torch.float64), granularity)
    dims = block_dims(finite)
    total, count = (t.sum(dims) if dims else t for t in (finite.square(), present))
    return (total / count.clamp_min(1)).sqrt().float()
