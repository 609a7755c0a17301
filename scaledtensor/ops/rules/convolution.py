"""Convolutions and pooling.

A convolution, plain or transposed, is a sum of products like a matrix product: the RMS grows by the
root of the number of terms (Blake et al. 2023, section 4.1). The terms of the result are the input
channels of a group times the taps of the kernel. The terms of the input's gradient are the output
channels of a group times the windows that see an element. The terms of the weight's gradient are
the images times the windows of one image. Taps on padding are not terms, and are not counted.

8-bit operands are convolved as bfloat16 or float32 elements. The machine multiplies one of the two
faster (`products.dtype`), and both are exact: every E4M3 and E5M2 value is a value of both, and
products are summed in float32. On a CPU with bfloat16 units, bfloat16 is 1.1 to 3.5 times as fast,
and 1.1 to 2.9 times in the backward pass.

Pooling is homogeneous, so it works on the elements. Its backward pass is linear in the gradient. It
spreads each gradient over a window, which gives the sum of squares over the whole image.
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
    computable,
    elements,
    first_scaled,
    operand,
    quadrature,
)
from scaledtensor.ops.operators import aten
from scaledtensor.ops.products.dtype import multiplied
from scaledtensor.ops.registry import Overload, Raw, rule
from scaledtensor.ops.results import is_wide
from scaledtensor.ops.rules.reduction import growth
from scaledtensor.ops.rules.windows import expanded, pairs, share, sym_max
from scaledtensor.scales.powers import product_of, settle, times
from scaledtensor.scales.singles import rms_of, scale_of
from scaledtensor.tensors.tensor import ScaledTensor

__all__ = ["terms"]


# --- convolutions ----------------------------------------------------------------------------


class Terms(NamedTuple):
    """Mean number of products that are summed into one element of each result."""

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
    """Count the terms, from the shapes of input and output (N, C, ...) and weight (C, C / groups,
    ...)."""
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
    """r = rx rw sqrt(terms). The terms are the input channels of a group times the taps inside the
    image. With a bias b, r^2 grows by rb^2."""
    check_dtypes(x, w)
    like = first_scaled(x, w, bias)
    a, b = operand(x, like), operand(w, like)
    left, right = multiplied(a.q, b.q, wide=is_wide(x, w))
    q = aten.convolution.default(left, right, None, *geometry)
    stride, padding, dilation, transposed, _, groups = geometry
    n = terms(x.shape, w.shape, q.shape, stride, padding, dilation, transposed, groups)
    product = Raw(q, product_of(a.scale, b.scale), a.rms * b.rms * n.output**0.5)
    if bias is None:
        return product
    c = operand(bias, like)
    rms = quadrature(product.rms, c.rms)
    scale, ratio, ratio_bias = settle(rms, product.held, c.scale)
    added = times(c.q, ratio_bias).view(-1, *[1] * (q.dim() - 2))
    return Raw(times(q, ratio) + added, scale, rms, settled=True)


@rule(aten.convolution_backward.default)
def convolution_backward(
    g: Any, x: Any, w: Any, bias_sizes: Any, *options: Any
) -> tuple[Raw | None, Raw | None, Raw | None]:
    """r_g rw sqrt(output channels of a group * windows over an element) for the input, r_g rx
    sqrt(images * windows whose tap is inside the image) for the weight, and r_g sqrt(images *
    windows) for the bias."""
    *geometry, mask = options
    like = first_scaled(g, x, w)
    out, a, b = (operand(t, like) for t in (g, x, w))
    operands = multiplied(out.q, a.q, b.q, wide=is_wide(g, x, w))
    dx, dw, _ = aten.convolution_backward.default(
        *operands, None, *geometry, [mask[0], mask[1], False]
    )
    stride, padding, dilation, transposed, _, groups = geometry
    n = terms(x.shape, w.shape, g.shape, stride, padding, dilation, transposed, groups)
    of_x, of_w = product_of(out.scale, b.scale), product_of(out.scale, a.scale)
    return (
        Raw(dx, of_x, out.rms * b.rms * n.input**0.5) if mask[0] else None,
        Raw(dw, of_w, out.rms * a.rms * n.weight**0.5) if mask[1] else None,
        _of_bias(out) if mask[2] else None,
    )


def _of_bias(g: Operand) -> Raw:
    dims = [0, *range(2, g.q.dim())]
    n = math.prod(g.q.shape[d] for d in dims)
    return Raw(g.q.sum(dims, dtype=torch.float32), g.scale, g.rms * n**0.5, format=FP32)


# --- pooling of maxima -----------------------------------------------------------------------


def _largest(x: ScaledTensor, result: tuple[Tensor, Tensor], n: float) -> tuple[Raw, Tensor]:
    """Return the largest of n elements, and its index.

    For n Gaussians 1.6 ln n - 0.85 is within 5% of the second moment, from n = 3 to 4000 (the
    moment is 1 for one and for two). A tensor without negative elements counts as the positive part
    of a Gaussian, so only the elements above zero count.
    """
    q, index = result
    square = max(1.0, 1.6 * math.log(max(n, 1)) - 0.85)
    if x.nonnegative:
        # r is the RMS of the positive half, so the square is twice as large. The largest is zero if
        # all n were negative.
        square = 2 * max(square - 0.5**n, 0.5)
    rms = rms_of(x) * math.sqrt(square)
    return Raw(q, scale_of(x), rms, nonnegative=x.nonnegative), index


@rule(aten.max_pool2d_with_indices.default, aten.max_pool3d_with_indices.default, pass_op=True)
def max_pool(
    op: Overload, x: ScaledTensor, kernel: Sequence[int], *options: Any
) -> tuple[Raw, Tensor]:
    """r sqrt(1.6 ln n - 0.85) for the largest of n = prod(kernel) Gaussians, a fit to the integral.
    The indices are plain."""
    n = math.prod(expanded(kernel, _dims(op)))
    return _largest(x, op(elements(x), kernel, *options), n)


@rule(aten.adaptive_max_pool2d.default, aten.adaptive_max_pool3d.default, pass_op=True)
def adaptive_max_pool(op: Overload, x: ScaledTensor, size: Sequence[int]) -> tuple[Raw, Tensor]:
    """Same as `max_pool2d_with_indices`; n is the number of elements for each element of the
    result."""
    result = op(elements(x), size)
    return _largest(x, result, x.numel() / max(result[0].numel(), 1))


@rule(aten.fractional_max_pool2d.default, aten.fractional_max_pool3d.default, pass_op=True)
def fractional_max_pool(
    op: Overload, x: ScaledTensor, kernel: Sequence[int], size: Sequence[int], samples: Any
) -> tuple[Raw, Tensor]:
    """Same as `max_pool2d_with_indices`, by the values of the samples."""
    q = elements(x)
    where = samples.dequantize() if isinstance(samples, ScaledTensor) else samples
    return _largest(x, op(q, kernel, size, where.to(q.dtype)), math.prod(kernel))


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
    """r_g sqrt(gradients / elements): each gradient goes to one element."""
    out = operand(g, x)
    q = op(out.q, _like(x, out.q), *options)
    return Raw(q, out.scale, out.rms * share(g.shape, x.shape) ** 0.5)


@rule(aten.max_unpool2d.default, aten.max_unpool3d.default, pass_op=True)
def max_unpool(op: Overload, x: ScaledTensor, index: Tensor, *options: Any) -> Raw:
    """r sqrt(elements / results): the elements lie among zeros."""
    q = op(elements(x), index, *options)
    rms = rms_of(x) * share(x.shape, q.shape) ** 0.5
    return Raw(q, scale_of(x), rms, nonnegative=x.nonnegative)


def _like(x: ScaledTensor, q: Tensor) -> Tensor:
    """Return a stand-in for the input: backward kernels read its shape, strides and dtype only."""
    return torch.empty_like(elements(x), dtype=q.dtype)


def _dims(op: Overload) -> int:
    return 3 if "3d" in op._schema.name else 2


# --- pooling of means ------------------------------------------------------------------------


@rule(aten.avg_pool2d.default, aten.avg_pool3d.default, pass_op=True)
def avg_pool(op: Overload, x: ScaledTensor, *options: Any) -> Raw:
    """r sqrt(n) / divisor for windows with n elements of the image. For terms that are known to be
    nonnegative, r sqrt(2n/3 + n^2/3) / divisor."""
    q = op(computable(op, elements(x)), *options)
    seen, divisor = _windows(op, x.shape, q.shape, options)
    terms = seen / sym_max(math.prod(q.shape[-_dims(op) :]), 1)
    factor = growth(terms, x.nonnegative) / (divisor or terms)
    return Raw(q, scale_of(x), rms_of(x) * factor, nonnegative=x.nonnegative)


@rule(aten.avg_pool2d_backward.default, aten.avg_pool3d_backward.default, pass_op=True)
def avg_pool_backward(op: Overload, g: Any, x: ScaledTensor, *options: Any) -> Raw:
    """r_g sqrt(windows over an element) / divisor."""
    out = operand(g, x)
    source = computable(op, out.q)
    q = op(source, _like(x, source), *options)
    seen, divisor = _windows(op, x.shape, g.shape, options)
    divisor = divisor or seen / sym_max(math.prod(g.shape[-_dims(op) :]), 1)
    windows = seen / sym_max(math.prod(x.shape[-_dims(op) :]), 1)
    return Raw(q, out.scale, out.rms * (windows**0.5 / divisor))


def _windows(
    op: Overload, x: Sequence[int], out: Sequence[int], options: Sequence[Any]
) -> tuple[Any, Any]:
    """Return the number of pairs of a window and an element, and the divisor; None if each window
    divides by its own number of elements."""
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
    """r sqrt(mean over windows of 1/n) for windows of n elements. For terms that are known to be
    nonnegative, the same as `mean`."""
    q = op(elements(x), size)
    if x.nonnegative:
        n = max(x.numel() / max(q.numel(), 1), 1)
        factor = growth(n, True) / n
    else:
        factor = math.sqrt(_inverse_widths(x, size) / max(math.prod(size), 1))
    return Raw(q, scale_of(x), rms_of(x) * factor, nonnegative=x.nonnegative)


@rule(
    aten._adaptive_avg_pool2d_backward.default,
    aten._adaptive_avg_pool3d_backward.default,
    pass_op=True,
)
def adaptive_avg_pool_backward(op: Overload, g: Any, x: ScaledTensor) -> Raw:
    """r_g sqrt(s / elements), where s is the sum of 1/n over windows of n elements."""
    out = operand(g, x)
    q = op(out.q, _like(x, out.q))
    size = g.shape[-_dims(op) :]
    factor = _inverse_widths(x, size) / max(math.prod(x.shape[-_dims(op) :]), 1)
    return Raw(q, out.scale, out.rms * math.sqrt(factor))


def _inverse_widths(x: ScaledTensor, size: Sequence[int]) -> float:
    """Return the sum over all windows of 1/n for n elements in a window."""
    return math.prod(map(_inverse_widths_in, map(int, x.shape[-len(size) :]), map(int, size)))


@cache
def _inverse_widths_in(n: int, windows: int) -> float:
    return sum(1 / (-(-(i + 1) * n // windows) - i * n // windows) for i in range(windows) if n)
