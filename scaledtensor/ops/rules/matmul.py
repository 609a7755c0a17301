"""Matrix products.

A sum of K independent products has an RMS that grows by sqrt(K) (Blake et al. 2023, section 4.1). K
is the number of in-features in the forward pass, of out-features in dgrad, and of tokens in wgrad.
Each of the three is an ATen call.

8-bit operands are multiplied as 8-bit operands by the FP8 units of a device that has them
(`backends`). On other devices their elements are multiplied in bfloat16 or float32: the dtype that
the machine multiplies faster (`products.dtype`). Both are exact: every E4M3 and E5M2 value is a
value of both, and products accumulate in float32.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from scaledtensor import _torch
from scaledtensor.backends import Units, units_of
from scaledtensor.ops.algebra import (
    check_dtypes,
    factor,
    first_scaled,
    measured,
    operand,
    quadrature,
)
from scaledtensor.ops.operators import aten
from scaledtensor.ops.plausible import wild
from scaledtensor.ops.products.dtype import multiplied, product_dtype, warn_of_emulation
from scaledtensor.ops.registry import Raw, rule
from scaledtensor.ops.results import is_wide
from scaledtensor.ops.rules import sparse
from scaledtensor.ops.rules.arithmetic import plus_product
from scaledtensor.recipes.casts import Carried
from scaledtensor.scales.measure import measured_rms
from scaledtensor.scales.powers import (
    commutes,
    is_one,
    product_of,
    settle,
    settle_product,
)
from scaledtensor.scales.singles import (
    ONE,
    amounts_of,
    rms_of,
    scale_of,
    scaled_by,
    scaled_in_place,
    tensor_of,
)
from scaledtensor.tensors.sparse import is_sparse
from scaledtensor.tensors.tensor import ScaledTensor

# --- products of two tensors -----------------------------------------------------------------


@rule(aten.mm.default)
def mm(a: Any, b: Any) -> Raw:
    """r = ra rb sqrt(K) for sums of K products. In this and the following products, r is measured
    if neither operand has negative elements. A sparse operand with E stored elements in N rows has
    K = E / N, and the RMS is then measured if it is finite and not zero."""
    return _product(torch.mm, a, b)


@rule(aten.bmm.default)
def bmm(a: Any, b: Any) -> Raw:
    """r = ra rb sqrt(K)."""
    return _product(torch.bmm, a, b)


@rule(aten.mv.default)
def mv(a: Any, b: Any) -> Raw:
    """r = ra rb sqrt(K)."""
    return _product(torch.mv, a, b)


@rule(aten.dot.default, aten.vdot.default)
def dot(a: Any, b: Any) -> Tensor:
    """A plain float32 statistic."""
    check_dtypes(a, b)
    like = first_scaled(a, b)
    x, y = operand(a, like), operand(b, like)
    product: Tensor = torch.dot(x.q.float(), y.q.float()) * x.scale * y.scale
    return product


@rule(aten.linalg_cross.default)
def cross(a: Any, b: Any, *, dim: int = -1) -> Raw:
    """r = ra rb sqrt(2): each element is a sum of two products."""
    like = first_scaled(a, b)
    x, y = operand(a, like), operand(b, like)
    q = torch.linalg.cross(*multiplied(x.q, y.q), dim=dim)
    return Raw(q, product_of(x.scale, y.scale), x.rms * y.rms * 2**0.5)


@rule(aten._trilinear.default)
def trilinear(
    a: Any,
    b: Any,
    c: Any,
    expand1: Sequence[int],
    expand2: Sequence[int],
    expand3: Sequence[int],
    sumdim: Sequence[int],
    unroll_dim: int = 1,
) -> Raw:
    """r = ra rb rc sqrt(n) for sums of n products. It is a part of the derivative of a plain
    `nn.Bilinear`."""
    like = first_scaled(a, b, c)
    factors = [operand(x, like) for x in (a, b, c)]
    expanded = (expand1, expand2, expand3)
    terms = 1
    for dim in sumdim:
        terms *= max(
            # Each expanded dimension before `dim` moves the operand's own dimension to the left.
            f.q.shape[dim - sum(d < dim for d in dims)]
            for f, dims in zip(factors, expanded, strict=True)
            if dim not in dims
        )
    x, y, z = (f.q.float() for f in factors)
    q = aten._trilinear.default(x, y, z, *expanded, sumdim, unroll_dim)
    (s1, s2, s3), (r1, r2, r3) = ([f.scale for f in factors], [f.rms for f in factors])
    return Raw(q, s1 * s2 * s3, r1 * r2 * r3 * terms**0.5)


# --- a product and a sum ---------------------------------------------------------------------


@rule(
    aten.addmm.default,
    aten.baddbmm.default,
    aten.addmv.default,
    aten._sparse_addmm.default,  # torch.sparse.mm, with beta = 0
)
def addmm(c: Any, a: Any, b: Any, *, beta: float = 1, alpha: float = 1) -> Raw:
    """r = sqrt((beta rc)^2 + (alpha ra rb)^2 K) for beta c + alpha a b. If c is a or b, as in a
    polynomial of a matrix (Newton-Schulz), the two parts cancel each other, and r is measured."""
    matmul = torch.bmm if a.dim() == 3 else torch.mm if b.dim() == 2 else torch.mv
    product = _product(matmul, a, b)
    cancels = (c is a or c is b) and beta != 0
    total = _plus(c, product, first_scaled(c, a, b), beta, alpha, wide=cancels)
    return measured(total.q, total.scale) if cancels else total


@rule(aten.addbmm.default)
def addbmm(c: Any, a: Any, b: Any, *, beta: float = 1, alpha: float = 1) -> Raw:
    """Same as `addmm`, with K products for each matrix of the batch."""
    product = _product(torch.bmm, a, b)
    batch = max(a.shape[0], 1)
    total = product._replace(q=product.q.sum(0), rms=product.rms * batch**0.5)
    return _plus(c, total, first_scaled(c, a, b), beta, alpha)


@rule(aten.addr.default)
def addr(c: Any, a: Any, b: Any, *, beta: float = 1, alpha: float = 1) -> Raw:
    """r = sqrt((beta rc)^2 + (alpha ra rb)^2) for beta c plus alpha times the outer product of a
    and b."""
    like = first_scaled(c, a, b)
    x, y = operand(a, like), operand(b, like)
    outer = Raw(torch.outer(*multiplied(x.q, y.q)), product_of(x.scale, y.scale), x.rms * y.rms)
    return _plus(c, outer, like, beta, alpha)


def _plus(
    c: Any, product: Raw, like: ScaledTensor, beta: float, alpha: float, wide: bool = False
) -> Raw:
    """Return beta c + alpha times the product; in float32 if `wide`. torch does not read c if beta
    is 0: it may be memory that nobody wrote."""
    if beta == 0:
        c.expand(product.q.shape)
        q = product.q if alpha == 1 else product.q * alpha
        return product._replace(q=q, rms=product.rms * abs(alpha))
    base = operand(c, like)
    start = base.q.float() if wide else base.q
    rms = quadrature(base.rms * abs(beta), product.rms * abs(alpha))
    scale, ratio, factor = settle(rms, base.scale, product.held)
    q = plus_product(start * beta if beta != 1 else start, ratio, product.q, factor, alpha)
    return Raw(q, scale, rms, settled=True)


# --- products of groups ----------------------------------------------------------------------


@rule(aten._grouped_mm.default)
def grouped_mm(
    a: Any, b: Any, offs: Tensor | None = None, bias: Tensor | None = None, out_dtype: Any = None
) -> Raw:
    """r = ra rb sqrt(K) for sums of K products in a group. If the groups divide the summed
    dimension, K is its mean size in a group."""
    check_dtypes(a, b)
    like = first_scaled(a, b)
    units = _units(a, b, grouped=True) if offs is not None and bias is None else None
    if units is not None and offs is not None:
        scale, ratio, rms = settle_product(a.shape[-1], (a.scale, a.rms), (b.scale, b.rms))
        q = units.groups(a.qdata, b.qdata, offs, tensor_of(ratio, a.device), _is_fast(a, b))
        return Raw(q, scale, rms, settled=True, dtype=out_dtype)
    x, y = operand(a, like), operand(b, like)
    left, right = multiplied(x.q, y.q, wide=is_wide(a, b))
    if not (_is_aligned(left) and _is_aligned(right)):
        left, right = left.float(), right.float()
    groups = offs.shape[0] if a.dim() == b.dim() == 2 and offs is not None else 1
    q = _grouped(left, right, offs, bias)
    rms = x.rms * y.rms * (a.shape[-1] / max(groups, 1)) ** 0.5
    return Raw(q, product_of(x.scale, y.scale), rms, dtype=out_dtype)


def _grouped(a: Tensor, b: Tensor, offs: Tensor | None, bias: Tensor | None) -> Tensor:
    # torch computes float32 products of groups on a CPU, but traces products in bfloat16 only.
    if _torch.is_tracing(a) and a.dtype == torch.float32 and bias is None:
        traced: Tensor = torch.ops.scaledtensor.grouped_mm(a, b, offs)
        return traced
    product: Tensor = aten._grouped_mm.default(a, b, offs, bias)
    return product


_LIBRARY = torch.library.Library("scaledtensor", "FRAGMENT")
_LIBRARY.define("grouped_mm(Tensor a, Tensor b, Tensor? offs) -> Tensor")
_LIBRARY.impl("grouped_mm", aten._grouped_mm.default, "CompositeExplicitAutograd")


@torch.library.register_fake("scaledtensor::grouped_mm", lib=_LIBRARY)  # type: ignore[untyped-decorator]
def _grouped_fake(a: Tensor, b: Tensor, offs: Tensor | None) -> Tensor:
    """Return the shape for groups of rows, of columns or of the summed dimension, and for
    batches."""
    groups = () if a.dim() != b.dim() else (b.shape[0],) if offs is None else (offs.shape[0],)
    return a.new_empty(*groups, a.shape[-2], b.shape[-1])


def _is_aligned(x: Tensor) -> bool:
    """Whether rows or columns begin at multiples of 16 bytes, which the grouped kernels need."""
    return all(stride * x.itemsize % 16 == 0 for stride in x.stride() if stride != 1)


# --- how operands are multiplied -------------------------------------------------------------


def _product(matmul: Any, a: Any, b: Any) -> Raw:
    raw = _of_independent(matmul, a, b)
    if not (isinstance(a, ScaledTensor) and a.nonnegative):
        return raw
    return _of_one_sign(raw) if isinstance(b, ScaledTensor) and b.nonnegative else raw


def _of_one_sign(raw: Raw) -> Raw:
    """Return a product without negative terms, which add up to sqrt(K) to K times one term. A
    recurrence of probabilities (a hidden Markov model, Sinkhorn's iteration) multiplies that factor
    by itself, so the RMS is measured."""
    if is_sparse(raw.q):
        return raw
    rms = wild(measured_rms(raw.q) * tensor_of(raw.held).float())
    return raw._replace(rms=rms, settled=False, nonnegative=True)


def _of_independent(matmul: Any, a: Any, b: Any) -> Raw:
    if type(a) is type(b) is ScaledTensor and not torch.compiler.is_compiling():
        p, q = a.qdata, b.qdata
        if p.dtype is q.dtype and a.dtype is b.dtype and _as_they_are(p):
            return _of_floats(matmul, p, q, amounts_of(a), amounts_of(b))
    check_dtypes(a, b)
    if is_sparse(a) or is_sparse(b):
        return sparse.product(matmul, a, b)
    k = a.shape[-1]
    units = _units(a, b)
    if units is not None:
        scale, ratio, rms = settle_product(k, (scale_of(a), rms_of(a)), (scale_of(b), rms_of(b)))
        behind = torch.compiler.is_compiling() and _carries(a, b)
        factor_of = None if behind or is_one(ratio) else tensor_of(ratio, a.device)
        q = units.scaled(a.qdata, b.qdata, factor_of, _is_fast(a, b))
        return Raw(scaled_by(q, ratio) if behind else q, scale, rms, settled=True)
    like = first_scaled(a, b)
    wide = is_wide(a, b)
    if torch.compiler.is_compiling():
        x, y = factor(a, b, like), factor(b, a, like)
        q = matmul(*multiplied(x.q, y.q, wide=wide))
        return Raw(q, product_of(x.scale, y.scale), x.rms * y.rms * k**0.5)
    x, y = operand(a, like), operand(b, like)
    scale, ratio, rms = settle_product(k, (x.scale, x.rms), (y.scale, y.rms))
    if _goes_first(ratio, a, b):
        scaled_in_place(y.q, ratio)
        ratio = ONE
    q = matmul(*multiplied(x.q, y.q, wide=wide))
    # The product is a new tensor and changes in place, except in a trace: export would lose track.
    if not is_one(ratio):
        traced = _torch.is_tracing(q)
        q = scaled_by(q, ratio) if traced else scaled_in_place(q, ratio)
    return Raw(q, scale, rms, settled=True)


def _as_they_are(q: Tensor) -> bool:
    """Whether eager products of elements like `q` with one another are in their dtype."""
    if type(q) is not Tensor:
        return False
    dtype = q.dtype
    return dtype is torch.float32 or (dtype is torch.bfloat16 and product_dtype(q.device) is dtype)


def _of_floats(matmul: Any, p: Tensor, q: Tensor, *amounts: tuple[Any, Any]) -> Raw:
    """The steps of `_product` that are left for elements that are multiplied as they are."""
    scale, ratio, rms = settle_product(p.shape[-1], *amounts)
    made = matmul(p, q)
    return Raw(made if is_one(ratio) else scaled_in_place(made, ratio), scale, rms, settled=True)


def _goes_first(ratio: Any, a: Any, b: Any) -> bool:
    """Whether `b` is multiplied by the ratio in place of the product. A weight has fewer elements
    than the product, and nobody else holds the elements that were just decoded from its codes."""
    return (
        isinstance(b, ScaledTensor)
        and b.qdata.itemsize == 1
        and commutes(ratio)
        and b.memo.decoded is None
        and a.dim() > 1 < b.dim()
        and b.shape[-2] < a.shape[-2]
    )


def _units(a: Any, b: Any, grouped: bool = False) -> Units | None:
    """Return the FP8 units that take two operands, or None. A device with units that refuse them
    warns of the emulation."""
    if not (isinstance(a, ScaledTensor) and isinstance(b, ScaledTensor)):
        return None
    if a.qdata.itemsize > 1 or b.qdata.itemsize > 1:
        return None
    units = units_of(a.qdata)
    if units is None:
        return None
    obstacle = units.obstacle_of_groups if grouped else units.obstacle_of_codes
    reason = obstacle(a.qdata, b.qdata)
    if reason is None:
        return units
    warn_of_emulation(reason)
    return None


def _carries(a: ScaledTensor, b: ScaledTensor) -> bool:
    """Whether both scales are powers of two from rules. Then the ratio may multiply the product
    after it is rounded. In compiled code the kernel that reads the product does this; a scale for
    the units would be one more tensor, and one more kernel to write it."""
    recipe = a.recipe or b.recipe
    once = None if recipe is None else recipe.gemms.once
    return once is not None and all(isinstance(cast.scale, Carried) for cast in once)


def _is_fast(a: ScaledTensor, b: ScaledTensor) -> bool:
    """Whether the recipe lets this product add in fewer bits. In a backward pass, autograd calls
    dgrad and wgrad in the same way and records neither. The second forward pass of a checkpoint
    records."""
    recipe = a.recipe or b.recipe
    if recipe is None:
        return False
    gemms = recipe.gemms
    if _torch.is_within_backward() and not torch.is_grad_enabled():
        return gemms.dgrad.fast and gemms.wgrad.fast
    return gemms.forward.fast
