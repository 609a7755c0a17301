"""Resampling: interpolation, grids, padding by the image itself, columns of patches.

All of these operators are linear in the image, one dimension at a time: y = A x. Let |A|^2 be the
sum of the squares of all weights. The mean square of y is the mean square of x times |A|^2 /
len(y). For gradients, the factor is |A|^2 / len(x). So one number for each dimension, computed from
its sizes, gives the rules of both directions.
"""

import math
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch

from scaledtensor.ops.algebra import computable, elements, first_scaled, operand, plain
from scaledtensor.ops.operators import aten, define_operator
from scaledtensor.ops.registry import Overload, Raw, rule
from scaledtensor.ops.rules.views import move
from scaledtensor.ops.rules.windows import expanded, pairs, share, sym_max
from scaledtensor.scales.powers import product_of
from scaledtensor.scales.singles import rms_of, scale_of
from scaledtensor.tensors.tensor import ScaledTensor

__all__ = ["FUNCTIONS"]

rule(
    aten.channel_shuffle.default,
    aten.native_channel_shuffle.default,
    aten.pixel_shuffle.default,
    aten.pixel_unshuffle.default,
    pass_op=True,
)(move)


# --- repetition ------------------------------------------------------------------------------


@rule(
    aten.reflection_pad1d.default,
    aten.reflection_pad2d.default,
    aten.reflection_pad3d.default,
    aten.replication_pad1d.default,
    aten.replication_pad2d.default,
    aten.replication_pad3d.default,
    aten.upsample_nearest1d.default,
    aten.upsample_nearest2d.default,
    aten.upsample_nearest3d.default,
    aten._upsample_nearest_exact1d.default,
    aten._upsample_nearest_exact2d.default,
    aten._upsample_nearest_exact3d.default,
    pass_op=True,
)
def repeated(op: Overload, x: ScaledTensor, *options: Any) -> Raw:
    """r: the same elements, some of them several times, under the same scale."""
    q = op(elements(x), *options)
    return Raw(q, scale_of(x), rms_of(x), settled=True, nonnegative=x.nonnegative)


@rule(
    aten.reflection_pad1d_backward.default,
    aten.reflection_pad2d_backward.default,
    aten.reflection_pad3d_backward.default,
    aten.replication_pad1d_backward.default,
    aten.replication_pad2d_backward.default,
    aten.replication_pad3d_backward.default,
    pass_op=True,
)
def pad_backward(op: Overload, g: Any, x: Any, padding: Sequence[int]) -> Raw:
    """r_g sqrt(gradients / elements): each gradient goes to one element."""
    out = operand(g, first_scaled(g, x))
    q = op(out.q, plain(x).to(out.q.dtype), padding)
    return Raw(q, out.scale, out.rms * share(g.shape, x.shape) ** 0.5)


@rule(
    aten.upsample_nearest1d_backward.default,
    aten.upsample_nearest2d_backward.default,
    aten.upsample_nearest3d_backward.default,
    aten._upsample_nearest_exact1d_backward.default,
    aten._upsample_nearest_exact2d_backward.default,
    aten._upsample_nearest_exact3d_backward.default,
    pass_op=True,
)
def repeated_backward(
    op: Overload, g: ScaledTensor, size: Sequence[int], source: Sequence[int], *options: Any
) -> Raw:
    """r_g sqrt(gradients / elements): each gradient goes to one element."""
    # Inductor writes the kernel for sizes that are constants alone.
    q = op(elements(g), [int(n) for n in size], [int(n) for n in source], *options)
    return Raw(q, scale_of(g), rms_of(g) * share(g.shape, q.shape) ** 0.5)


# --- interpolation ---------------------------------------------------------------------------

#: Operator name -> kernel of its weights, and whether it is stretched over the area of a pixel.
_KERNELS = {
    "upsample_linear1d": ("linear", False),
    "upsample_bilinear2d": ("linear", False),
    "upsample_trilinear3d": ("linear", False),
    "upsample_bicubic2d": ("cubic", False),
    "_upsample_bilinear2d_aa": ("linear", True),
    "_upsample_bicubic2d_aa": ("cubic_aa", True),
    "_upsample_lanczos2d_aa": ("lanczos", True),
}
_INTERPOLATIONS = [getattr(aten, name).default for name in _KERNELS]
_BACKWARDS = [getattr(aten, f"{name}_backward").default for name in _KERNELS]


@rule(*_INTERPOLATIONS, pass_op=True)
def interpolate(op: Overload, x: ScaledTensor, size: Sequence[int], *options: Any) -> Raw:
    """r times the root of the mean over the result of the sum of squared weights w, counted from
    the sizes. For terms that are known to be nonnegative the square is (2 w + 1) / 3, since a third
    of their mean square is the square of their mean, which stays."""
    q = op(computable(op, elements(x)), size, *options)
    square = _squares(op, x.shape, size, options) / max(math.prod(size), 1)
    positive = x.nonnegative and _KERNELS[_name(op)][0] == "linear"
    if x.nonnegative:
        square = (2 * square + 1) / 3
    return Raw(q, scale_of(x), rms_of(x) * math.sqrt(square), nonnegative=positive)


@rule(*_BACKWARDS, pass_op=True)
def interpolate_backward(
    op: Overload, g: ScaledTensor, size: Sequence[int], source: Sequence[int], *options: Any
) -> Raw:
    """r_g times the root of the sum of all squared weights divided by the number of elements."""
    # The rule counts weights, so the sizes are constants in compiled code, as in torch's kernel.
    size, source = [int(n) for n in size], [int(n) for n in source]
    q = op(computable(op, elements(g)), size, source, *options)
    square = _squares(op, source, size, options) / max(math.prod(source[-len(size) :]), 1)
    return Raw(q, scale_of(g), rms_of(g) * math.sqrt(square))


# In compiled code and in derivatives, torch writes interpolations in gathers and sums. So
# `F.interpolate` runs as an operator of this library there, with the same rule.
_OPTIONS = "str name, bool align, float[] factors"
_upsample = define_operator(
    f"upsample(Tensor x, SymInt[] size, {_OPTIONS}) -> Tensor",
    lambda grad, size, x_shape, name, align, factors: _derived(
        _upsample_backward, f"{name}_backward", (grad, size, x_shape), name, align, factors
    ),
)
_upsample_backward: Any = define_operator(
    f"upsample_backward(Tensor g, SymInt[] size, SymInt[] source, {_OPTIONS}) -> Tensor",
    lambda grad, size, name, align, factors: _derived(
        _upsample, name, (grad, size), name, align, factors
    ),
)


def _derived(
    operator: Any, plain: str, given: tuple[Any, ...], name: str, align: bool, factors: Any
) -> Any:
    """The derivative by an operator of this library. The gradient of a plain result is plain, and
    so is the gradient that torch's operator `plain` makes of it."""
    if isinstance(given[0], ScaledTensor):
        return operator(*given, name, align, factors)
    options = factors if name in _NEAREST else (align, *factors)
    return getattr(aten, plain).default(*given, *options)


@rule(_upsample)
def upsample(x: ScaledTensor, size: Any, name: str, align: bool, factors: Sequence[float]) -> Raw:
    """Same as torch's interpolation with the name `name`."""
    op = getattr(aten, name).default
    if name in _NEAREST:
        return repeated(op, x, size, *factors)
    return interpolate(op, x, size, align, *factors)


@rule(_upsample_backward)
def upsample_backward(
    g: ScaledTensor, size: Any, source: Any, name: str, align: bool, factors: Sequence[float]
) -> Raw:
    """Same as torch's backward operator of the interpolation with the name `name`."""
    op = getattr(aten, f"{name}_backward").default
    if name in _NEAREST:
        return repeated_backward(op, g, size, source, *factors)
    return interpolate_backward(op, g, size, source, align, *factors)


_NEAREST = {
    f"{name}{dims}d"
    for name in ("upsample_nearest", "_upsample_nearest_exact")
    for dims in (1, 2, 3)
}

#: (mode, dimensions, antialias) -> name of the operator.
_MODE_NAMES = {
    **{("nearest", dims, False): f"upsample_nearest{dims}d" for dims in (1, 2, 3)},
    **{("nearest-exact", dims, False): f"_upsample_nearest_exact{dims}d" for dims in (1, 2, 3)},
    ("linear", 1, False): "upsample_linear1d",
    ("bilinear", 2, False): "upsample_bilinear2d",
    ("bilinear", 2, True): "_upsample_bilinear2d_aa",
    ("bicubic", 2, False): "upsample_bicubic2d",
    ("bicubic", 2, True): "_upsample_bicubic2d_aa",
    ("trilinear", 3, False): "upsample_trilinear3d",
}


def resized(
    input: Any,
    size: Any = None,
    scale_factor: Any = None,
    mode: str = "nearest",
    align_corners: bool | None = None,
    recompute_scale_factor: bool | None = None,
    antialias: bool = False,
) -> Any:
    """Works like `F.interpolate`. Its mode "area" is a mean, and runs in torch."""
    dims = input.dim() - 2
    name = _MODE_NAMES.get((mode, dims, antialias))
    given = scale_factor if size is None else size
    fits = not isinstance(given, Sequence) or len(given) == dims
    if name is None or not fits or (size is None) == (scale_factor is None):
        options = (size, scale_factor, mode, align_corners, recompute_scale_factor, antialias)
        return torch.nn.functional.interpolate(input, *options)
    factors: list[float] = []
    if size is None:
        factors = [float(f) for f in expanded(given, dims)]
        size = [int(n * f) for n, f in zip(input.shape[2:], factors, strict=True)]
        factors = [] if recompute_scale_factor else factors
    return _upsample(input, expanded(size, dims), name, bool(align_corners), factors)


FUNCTIONS: dict[Any, Callable[..., Any]] = {torch.nn.functional.interpolate: resized}


def _name(op: Overload) -> str:
    return op._schema.name.split("::")[1].removesuffix("_backward")


def _squares(op: Overload, source: Sequence[int], size: Sequence[int], options: Any) -> float:
    """Return the sum of all squared weights of an interpolation from `source` to `size`."""
    kernel, stretched = _KERNELS[_name(op)]
    align, *factors = options
    factors = [*factors, *[None] * (len(size) - len(factors))]
    return math.prod(
        _squared_weights(kernel, stretched, int(n), int(m), align, factor)
        for n, m, factor in zip(source[-len(size) :], size, factors, strict=True)
    )


@cache
def _squared_weights(
    kernel: str, stretched: bool, n: int, size: int, align: bool, factor: float | None
) -> float:
    """Return the sum along one dimension, from n elements to `size`."""
    step = 1 / factor if factor else n / max(size, 1)
    if align:
        step = (n - 1) / max(size - 1, 1)
    gather = _antialiased if stretched else _at_point
    return sum(
        sum(w * w for w in gather(kernel, i, n, step, align).values()) for i in range(size) if n
    )


def _at_point(kernel: str, i: int, n: int, step: float, align: bool) -> dict[int, float]:
    """Return element -> weight in result i. Points beyond the border are the border."""
    center = i * step if align else (i + 0.5) * step - 0.5
    if kernel == "linear":
        center = max(center, 0.0)
    shape, reach = _SHAPES[kernel]
    weights: dict[int, float] = {}
    for j in range(math.floor(center) - reach + 1, math.floor(center) + reach + 1):
        inside = min(max(j, 0), n - 1)
        weights[inside] = weights.get(inside, 0.0) + shape(j - center)
    return weights


def _antialiased(kernel: str, i: int, n: int, step: float, align: bool) -> dict[int, float]:
    """Return element -> weight in result i, for the elements under a pixel and inside the image."""
    shape, reach = _SHAPES[kernel]
    stretch = max(step, 1.0)
    center = step * (i + 0.5)
    first = max(int(center - reach * stretch + 0.5), 0)
    last = min(int(center + reach * stretch + 0.5), n)
    raw = {j: shape((j + 0.5 - center) / stretch) for j in range(first, last)}
    total = sum(raw.values()) or 1.0
    return {j: w / total for j, w in raw.items()}


def _triangle(t: float) -> float:
    return max(0.0, 1 - abs(t))


def _cubic(t: float, a: float = -0.75) -> float:
    """The cubic kernel of Keys (1981). torch takes a = -3/4, and a = -1/2 for antialiasing."""
    t = abs(t)
    if t < 1:
        return ((a + 2) * t - (a + 3)) * t * t + 1
    return ((t - 5) * t + 8) * t * a - 4 * a if t < 2 else 0.0


def _lanczos(t: float) -> float:
    def sinc(t: float) -> float:
        return math.sin(math.pi * t) / (math.pi * t) if t else 1.0

    return sinc(t) * sinc(t / 3) if abs(t) < 3 else 0.0


#: Kernel -> its weight at a distance, and its largest distance.
_SHAPES: dict[str, tuple[Callable[[float], float], int]] = {
    "linear": (_triangle, 1),
    "cubic": (_cubic, 2),
    "cubic_aa": (lambda t: _cubic(t, -0.5), 2),
    "lanczos": (_lanczos, 3),
}


# --- grids -----------------------------------------------------------------------------------

#: The modes in the order of their numbers in torch.
_MODES = ("linear", "nearest", "cubic")


@cache
def _at_random(mode: int) -> tuple[float, float]:
    """Return the means of the sum of squared weights and of the sum of squared slopes, along one
    dimension at a random point."""
    if _MODES[mode] == "nearest":
        return 1.0, 0.0
    shape, reach = _SHAPES[_MODES[mode]]
    points = [(i + 0.5) / 64 for i in range(64)]
    taps = range(1 - reach, reach + 1)
    squares = sum(shape(j - t) ** 2 for t in points for j in taps)
    slopes = sum((shape(j - t + 1e-4) - shape(j - t - 1e-4)) ** 2 for t in points for j in taps)
    return squares / 64, slopes / 64 / 4e-8


@rule(aten.grid_sampler_2d.default, aten.grid_sampler_3d.default, pass_op=True)
def grid_sampler(op: Overload, x: Any, grid: Any, mode: int, *options: Any) -> Raw:
    """r times the root of the mean sum of squared weights at a random point: r (2/3)^(d / 2) for
    linear interpolation in d dimensions. The coordinates are float32 values, because bfloat16
    coordinates miss the pixel."""
    source = operand(x, first_scaled(x, grid))
    square = _at_random(mode)[0] ** (x.dim() - 2)
    positive = source.nonnegative and _MODES[mode] != "cubic"
    q = op(source.q.float(), plain(grid).float(), mode, *options)
    return Raw(q, source.scale, source.rms * math.sqrt(square), nonnegative=positive)


@rule(aten.grid_sampler_2d_backward.default, aten.grid_sampler_3d_backward.default, pass_op=True)
def grid_sampler_backward(
    op: Overload, g: Any, x: Any, grid: Any, mode: int, padding: int, align: bool, mask: Any
) -> tuple[Raw | None, Raw | None]:
    """r_g sqrt(points / pixels) times the factor of the forward pass for the image. r_g rx
    sqrt(channels) sqrt(s) size / 2 for a coordinate, which spans 2 from border to border; s is the
    mean sum of squared slopes of the weights."""
    like = first_scaled(g, x, grid)
    out, source = operand(g, like), operand(x, like)
    operands = (t.float() for t in (out.q, source.q, plain(grid)))
    dx, dgrid = op(*operands, mode, padding, align, mask)
    square, slope = _at_random(mode)
    sizes = [int(n) - align for n in x.shape[2:]]
    dims = len(sizes)
    weight = share(g.shape[2:], x.shape[2:]) * square**dims
    half = math.sqrt(sum(n * n for n in sizes) / dims) / 2
    reach = half * math.sqrt(x.shape[1] * (slope or 1.0) * square ** (dims - 1))
    of_grid = product_of(out.scale, source.scale)
    return (
        Raw(dx, out.scale, out.rms * weight**0.5) if mask[0] else None,
        Raw(dgrid, of_grid, out.rms * source.rms * reach) if mask[1] else None,
    )


@rule(aten.affine_grid_generator.default)
def affine_grid(theta: ScaledTensor, size: Sequence[int], align: bool) -> Raw:
    """r sqrt(1 + d / 3) in d dimensions: a sum of elements times d coordinates from -1 to 1, and of
    one element times 1."""
    q = aten.affine_grid_generator.default(elements(theta).float(), size, align)
    dims = len(size) - 2
    return Raw(q, scale_of(theta), rms_of(theta) * math.sqrt(1 + dims / 3))


# --- columns of patches ----------------------------------------------------------------------


def _seen(image: Sequence[int], *geometry: Any) -> tuple[Any, list[Any]]:
    """Return the number of pairs of a patch and an element of the image, and the sizes of the
    columns."""
    kernel, dilation, padding, stride = (expanded(sizes, 2) for sizes in geometry)
    patches = [
        (n + 2 * p - d * (k - 1) - 1) // s + 1
        for n, k, d, p, s in zip(image, kernel, dilation, padding, stride, strict=True)
    ]
    return pairs(image, patches, kernel, stride, padding, dilation), [*patches, *kernel]


@rule(aten.im2col.default)
def im2col(x: ScaledTensor, *geometry: Any) -> Raw:
    """r sqrt(share of entries inside the image): the other entries are zeros for padding."""
    seen, columns = _seen(x.shape[-2:], *geometry)
    q = aten.im2col.default(elements(x), *geometry)
    inside = seen / sym_max(math.prod(columns), 1)
    return Raw(q, scale_of(x), rms_of(x) * inside**0.5, nonnegative=x.nonnegative)


@rule(aten.col2im.default)
def col2im(x: ScaledTensor, size: Sequence[int], *geometry: Any) -> Raw:
    """r sqrt(n) for n patches over an element in the mean. For terms that are known to be
    nonnegative, r sqrt(2n/3 + n^2/3)."""
    seen, _ = _seen(size, *geometry)
    q = aten.col2im.default(elements(x), size, *geometry)
    terms = seen / sym_max(math.prod(size), 1)
    factor = ((2 * terms + terms**2) / 3 if x.nonnegative else terms) ** 0.5
    return Raw(q, scale_of(x), rms_of(x) * factor, nonnegative=x.nonnegative)
