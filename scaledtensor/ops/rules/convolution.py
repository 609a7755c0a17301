"""Pooling: maxima, means, and what undoes them.

All are homogeneous, so they work on the elements. A backward of pooling is linear in the gradient:
each gradient of the result is spread over its window, and the sum of squares over the whole follows
from how it is spread.
"""

import math
from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from scaledtensor.formats import FP32
from scaledtensor.ops.algebra import (
    Operand,
    check_dtypes,
    elements,
    first_scaled,
    operand,
    quadrature,
)
from scaledtensor.ops.operators import aten
from scaledtensor.ops.products.dtype import multiplied
from scaledtensor.ops.registry import Overload, Raw, rule
from scaledtensor.ops.rules.reduction import growth
from scaledtensor.ops.rules.windows import expanded, pairs, sym_max
from scaledtensor.scales.powers import product_of, settle
from scaledtensor.tensors.tensor import ScaledTensor


# Convolutions, plain and transposed, in one to three dimensions.  A convolution is a sum of
# products like a matrix product: the RMS grows by the root of the number of terms in a sum (Blake
# et al. 2023, section 4.1). Forward these are input channels of a group times the taps of a
# kernel; for the gradient of the input, output channels of a group times the windows that see an
# element; for that of the weight, images times the windows of one. Taps on padding are no terms,
# and are counted out.  8-bit operands are convolved as bfloat16 or float32 elements, whichever
# the machine multiplies faster (`products`). Both are exact: every E4M3 and E5M2 value is one,
# and products are summed in float32. On a CPU with bfloat16 units bfloat16 is 1.1 to 3.5 times as
# fast, backward 1.1 to 2.9.
class Terms(NamedTuple):
    """How many products are summed into one element, on average."""

    output: Any
    input: Any
    weight: Any


def terms(
    x: Sequence[int],
    w: Sequence[int],
    out: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    transposed: bool,
    groups: int,
) -> Terms:
    """From the shapes of input, weight and output: (N, C, ...), (C, C / groups, ...)."""
    dims = len(x) - 2
    # A transposed convolution is the gradient of one whose input is its output.
    image, windows = (out[2:], x[2:]) if transposed else (x[2:], out[2:])
    geometry = (expanded(sizes, dims) for sizes in (stride, padding, dilation))
    seen = pairs(image, windows, w[2:], *geometry)

    def each(count: int, extent: Sequence[int]) -> Any:
        return count * seen / sym_max(math.prod(extent), 1)

    return Terms(
        output=each(x[1] // groups, out[2:]),
        input=each(out[1] // groups, x[2:]),
        weight=each(x[0], w[2:]),
    )


@rule(aten.convolution.default)
def convolution(x: Any, w: Any, bias: Any, *geometry: Any) -> Raw:
    """r = rx rw sqrt(channels of a group * taps inside the image), and the bias in quadrature."""
    check_dtypes(x, w)
    like = first_scaled(x, w, bias)
    a, b = operand(x, like), operand(w, like)
    left, right = multiplied(a.q, b.q)
    q = aten.convolution.default(left, right, None, *geometry)
    stride, padding, dilation, transposed, _, groups = geometry
    n = terms(x.shape, w.shape, q.shape, stride, padding, dilation, transposed, groups)
    product = Raw(q, product_of(a.scale, b.scale), a.rms * b.rms * n.output**0.5)
    return product if bias is None else _biased(product, operand(bias, like))


def _biased(product: Raw, bias: Operand) -> Raw:
    rms = quadrature(product.rms, bias.rms)
    scale, ratio, ratio_bias = settle(rms, product.held, bias.scale)
    added = (bias.q * ratio_bias).view(-1, *[1] * (product.q.dim() - 2))
    return Raw(product.q * ratio + added, scale, rms, settled=True)


@rule(aten.convolution_backward.default)
def convolution_backward(
    g: Any, x: Any, w: Any, bias_sizes: Any, *options: Any
) -> tuple[Raw | None, Raw | None, Raw | None]:
    """dx: rg rw sqrt(channels of a group * windows on an element); dw: rg rx sqrt(images * windows
    that a tap sees); db: rg sqrt(images * windows)."""
    *geometry, mask = options
    like = first_scaled(g, x, w)
    out, a, b = operand(g, like), operand(x, like), operand(w, like)
    operands = multiplied(out.q, a.q, b.q)
    dx, dw, _ = aten.convolution_backward.default(
        *operands, None, *geometry, [mask[0], mask[1], False]
    )
    stride, padding, dilation, transposed, _, groups = geometry
    n = terms(x.shape, w.shape, g.shape, stride, padding, dilation, transposed, groups)
    of_x, of_w = product_of(out.scale, b.scale), product_of(out.scale, a.scale)
    return (
        Raw(dx, of_x, out.rms * b.rms * n.input**0.5) if mask[0] else None,
        Raw(dw, of_w, out.rms * a.rms * n.weight**0.5) if mask[1] else None,
        _summed(out) if mask[2] else None,
    )


def _summed(g: Operand) -> Raw:
    """The gradient of a bias."""
    dims = [0, *range(2, g.q.dim())]
    n = math.prod(g.q.shape[d] for d in dims)
    return Raw(g.q.sum(dims, dtype=torch.float32), g.scale, g.rms * n**0.5, format=FP32)


def _share(part: Sequence[int], whole: Sequence[int]) -> Any:
    """How many elements of `part` there are for one of `whole`."""
    return math.prod(part) / sym_max(math.prod(whole), 1)


def _like(x: ScaledTensor, q: Tensor) -> Tensor:
    """What backward kernels take for the input: they read its shape, strides and dtype alone."""
    return torch.empty_like(elements(x), dtype=q.dtype)


# --- maxima ----------------------------------------------------------------------------------


def largest(x: ScaledTensor, n: float) -> Tensor:
    """RMS of the largest of n: 1.6 ln n - 0.85 within 5% of the second moment of the largest of n
    Gaussians, from n = 3 to 4000 (it is 1 for one and for two). What is not negative is taken for
    a Gaussian's positive part: of n, those above zero count."""
    square = max(1.0, 1.6 * math.log(max(n, 1)) - 0.85)
    if x.nonnegative:
        # Twice the square, for r is that of the half; where all n were negative it is zero.
        square = 2 * max(square - 0.5**n, 0.5)
    return x.rms * math.sqrt(square)


def _pooled(x: ScaledTensor, result: tuple[Tensor, Tensor], n: float) -> tuple[Raw, Tensor]:
    q, index = result
    return Raw(q, x.scale, largest(x, n), nonnegative=x.nonnegative), index


@rule(aten.max_pool2d_with_indices.default, aten.max_pool3d_with_indices.default, pass_op=True)
def max_pool(
    op: Overload, x: ScaledTensor, kernel: Sequence[int], *options: Any
) -> tuple[Raw, Tensor]:
    """The largest of n = prod(kernel) Gaussians: r sqrt(1.6 ln n - 0.85), fitted to the integral;
    the indices are plain."""
    dims = 2 if op is aten.max_pool2d_with_indices.default else 3
    return _pooled(x, op(elements(x), kernel, *options), math.prod(expanded(kernel, dims)))


@rule(aten.adaptive_max_pool2d.default, aten.adaptive_max_pool3d.default, pass_op=True)
def adaptive_max_pool(op: Overload, x: ScaledTensor, size: Sequence[int]) -> tuple[Raw, Tensor]:
    """As max_pool, of as many as there are for one of the result."""
    result = op(elements(x), size)
    return _pooled(x, result, x.numel() / max(result[0].numel(), 1))


@rule(aten.fractional_max_pool2d.default, aten.fractional_max_pool3d.default, pass_op=True)
def fractional_max_pool(
    op: Overload, x: ScaledTensor, kernel: Sequence[int], size: Sequence[int], samples: Any
) -> tuple[Raw, Tensor]:
    """As max_pool. Of the samples, their value counts."""
    q = elements(x)
    where = samples.dequantize() if isinstance(samples, ScaledTensor) else samples
    return _pooled(x, op(q, kernel, size, where.to(q.dtype)), math.prod(kernel))


@rule(
    aten.max_pool2d_with_indices_backward.default,
    aten.max_pool3d_with_indices_backward.default,
    aten.adaptive_max_pool2d_backward.default,
    aten.adaptive_max_pool3d_backward.default,
    aten.fractional_max_pool2d_backward.default,
    aten.fractional_max_pool3d_backward.default,
    pass_op=True,
)
def max_pool_backward(op: Overload, g: Any, x: ScaledTensor, *options: Any) -> Raw:
    """Each gradient goes to one element: r_g sqrt(results / elements)."""
    out = operand(g, x)
    q = op(out.q, _like(x, out.q), *options)
    return Raw(q, out.scale, out.rms * _share(g.shape, x.shape) ** 0.5)


@rule(aten.max_unpool2d.default, aten.max_unpool3d.default, pass_op=True)
def max_unpool(op: Overload, x: ScaledTensor, index: Tensor, *options: Any) -> Raw:
    """The elements among zeros: r sqrt(share)."""
    q = op(elements(x), index, *options)
    rms = x.rms * _share(x.shape, q.shape) ** 0.5
    return Raw(q, x.scale, rms, nonnegative=x.nonnegative)


# --- means -----------------------------------------------------------------------------------


def _computable(op: Overload, q: Tensor) -> Tensor:
    """Means over volumes are not written for bfloat16 on a CPU."""
    return q.float() if op in _WIDE and q.is_cpu else q


_WIDE = (aten.avg_pool3d.default, aten.avg_pool3d_backward.default)


@rule(aten.avg_pool2d.default, aten.avg_pool3d.default, pass_op=True)
def avg_pool(op: Overload, x: ScaledTensor, *options: Any) -> Raw:
    """r sqrt(n) / divisor for windows of n elements that are no padding; of what is not negative
    r sqrt(2n/3 + n^2/3) / divisor."""
    q = op(_computable(op, elements(x)), *options)
    seen, divisor = _windows(op, x.shape, q.shape, options)
    terms = seen / sym_max(math.prod(q.shape[-_dims(op) :]), 1)
    factor = growth(terms, x.nonnegative) / (divisor or terms)
    return Raw(q, x.scale, x.rms * factor, nonnegative=x.nonnegative)


@rule(aten.avg_pool2d_backward.default, aten.avg_pool3d_backward.default, pass_op=True)
def avg_pool_backward(op: Overload, g: Any, x: ScaledTensor, *options: Any) -> Raw:
    """r_g sqrt(windows that see an element) / divisor."""
    out = operand(g, x)
    source = _computable(op, out.q)
    q = op(source, _like(x, source), *options)
    seen, divisor = _windows(op, x.shape, g.shape, options)
    divisor = divisor or seen / sym_max(math.prod(g.shape[-_dims(op) :]), 1)
    windows = seen / sym_max(math.prod(x.shape[-_dims(op) :]), 1)
    return Raw(q, out.scale, out.rms * (windows**0.5 / divisor))


def _dims(op: Overload) -> int:
    return 3 if "3d" in op._schema.name else 2


def _windows(
    op: Overload, x: Sequence[int], out: Sequence[int], options: Sequence[Any]
) -> tuple[Any, Any]:
    """Pairs of a window and an element, and the divisor: None where it is what a window sees."""
    dims = _dims(op)
    given = dict(zip(("kernel", "stride", "padding", "", "count_pad", "by"), options, strict=False))
    kernel = expanded(given["kernel"], dims)
    stride = expanded(given.get("stride", ()), dims, kernel)
    padding = expanded(given.get("padding", 0), dims)
    seen = pairs(x[-dims:], out[-dims:], kernel, stride, padding, [1] * dims)
    divisor = given.get("by") or (math.prod(kernel) if given.get("count_pad", True) else None)
    return seen, divisor


@rule(aten._adaptive_avg_pool2d.default, aten._adaptive_avg_pool3d.default, pass_op=True)
def adaptive_avg_pool(op: Overload, x: ScaledTensor, size: Sequence[int]) -> Raw:
    """The mean over windows of 1/n, n counted: r times its root; of what is not negative as the
    mean."""
    q = op(elements(x), size)
    if x.nonnegative:
        n = max(x.numel() / max(q.numel(), 1), 1)
        factor = growth(n, True) / n
    else:
        factor = math.sqrt(_inverse_widths(x, size) / max(math.prod(size), 1))
    return Raw(q, x.scale, x.rms * factor, nonnegative=x.nonnegative)


@rule(
    aten._adaptive_avg_pool2d_backward.default,
    aten._adaptive_avg_pool3d_backward.default,
    pass_op=True,
)
def adaptive_avg_pool_backward(op: Overload, g: Any, x: ScaledTensor) -> Raw:
    """r_g times the root of the sum over windows of 1/n, divided by the number of elements."""
    out = operand(g, x)
    q = op(out.q, _like(x, out.q))
    size = g.shape[-_dims(op) :]
    factor = _inverse_widths(x, size) / max(math.prod(x.shape[-_dims(op) :]), 1)
    return Raw(q, out.scale, out.rms * math.sqrt(factor))


def _inverse_widths(x: ScaledTensor, size: Sequence[int]) -> float:
    """The sum over all windows of one over the number of elements of each."""
    return math.prod(map(_inverse_widths_in, map(int, x.shape[-len(size) :]), map(int, size)))


@cache
def _inverse_widths_in(n: int, windows: int) -> float:
    return sum(1 / (-(-(i + 1) * n // windows) - i * n // windows) for i in range(windows) if n)
