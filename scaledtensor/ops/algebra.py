"""The functions that rules are written with: operands, values and the moments of a Gaussian.

`elements(x)` are the elements of a ScaledTensor in a dtype that torch computes in, and `value(x)`
is its value. `operand(x, like)` gives any operand a scale. `gaussian_rms` integrates a function's
second moment.
"""

import math
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from scaledtensor import _torch
from scaledtensor.backends import backend_of
from scaledtensor.errors import DTypeMismatchError, UnsupportedError
from scaledtensor.formats import Format, decode
from scaledtensor.ops import invariant
from scaledtensor.ops.products.dtype import product_dtype
from scaledtensor.ops.registry import Overload, Raw, WithoutScale
from scaledtensor.scales.cast_nodes import values_of
from scaledtensor.scales.forms import Form
from scaledtensor.scales.measure import finite_norm, measured_rms
from scaledtensor.scales.powers import (
    MAX_SCALE,
    MIN_SCALE,
    A,
    product_of,
    quadrature,
    settle,
)
from scaledtensor.scales.singles import (
    ONE,
    Amount,
    Single,
    amount,
    amounts_of,
    calculates,
    rms_of,
    rounded,
    scale_of,
    scaled_by,
    single_of,
    tensor_of,
)
from scaledtensor.tensors.ruled import Ruled
from scaledtensor.tensors.tensor import ScaledTensor, is_stored
from scaledtensor.tensors.verbs import LIBRARY

__all__ = [
    "Operand",
    "at_value",
    "bounded_square",
    "check_dtypes",
    "computable",
    "constant",
    "count",
    "difference",
    "elements",
    "factor",
    "first_scaled",
    "gaussian_moment",
    "gaussian_rms",
    "integrand",
    "measured",
    "mismatch",
    "of_floats",
    "operand",
    "plain",
    "quadrature",
    "read_value",
    "real",
    "rms_seen",
    "saved_format",
    "statistic",
    "value",
    "wide",
    "within",
]


class Operand(NamedTuple):
    """One side of a binary operator: the value is `q * scale`. Scale and RMS are Amounts."""

    q: Tensor
    scale: Any
    rms: Any
    nonnegative: bool = False
    fills: bool = False
    """Whether elements may be fills of a mask: finite ones stay finite under another scale."""

    @property
    def value(self) -> Tensor:
        """The value in float32."""
        return scaled_by(self.q.float(), self.scale)


def saved_format(x: Any) -> Format | None:
    """Return the format in which the recipe of `x` keeps activations for the backward pass. None
    keeps them as they are."""
    if not isinstance(x, Ruled) or x.recipe is None:
        return None
    return x.recipe.saved


def elements(x: ScaledTensor) -> Tensor:
    """Return qdata in a dtype that torch computes in. 8-bit elements are decoded to the dtype of
    products (`products.dtype`), bfloat16 or float32, which is exact."""
    q = x.qdata
    if q.dtype.itemsize > 1:
        return q
    decoded = x.memo.decoded
    if decoded is not None and not (x.memo.passing and _torch.is_within_backward()):
        return decoded
    if torch.compiler.is_compiling() and _torch.is_within_backward() and is_stored(x):
        # Other operators than in the forward pass decode here. A compiler that saw the same ones
        # would keep their result, two bytes an element, and not read the parameter's codes again.
        return _decoded(q.unsqueeze(0), x.format).squeeze(0)
    return _decoded(q, x.format)


def factor(x: Any, other: Any, like: ScaledTensor) -> Operand:
    """Return `operand(x, like)` for a product with `other`.

    A traced backward pass rounds a weight again, after the gradient `other` has arrived. Otherwise
    a compiler would keep the rounded values of the forward pass, which are as large as the weight.
    """
    source = x.memo.source if isinstance(x, ScaledTensor) else None
    if source is None or not isinstance(other, ScaledTensor) or not _torch.is_within_backward():
        return operand(x, like)
    scale, rms = amounts_of(x)
    now = Form("after", 1.0, rms_of(other))
    q = source.matrix
    made = values_of(q, now, x.format.name, product_dtype(q.device))
    return Operand(made, scale, rms, x.nonnegative)


def _decoded(q: Tensor, fmt: Format) -> Tensor:
    dtype = product_dtype(q.device)
    if q.dim() > 1 and not q.is_contiguous() and q.mT.is_contiguous():
        # A transposed operand of a product is read in memory order, and once for both its uses.
        return decode(q.mT, fmt, dtype).mT
    if q.dim() > 3 and not q.is_contiguous() and q.movedim(1, -1).is_contiguous():
        # The channels of an image stay last for the convolution. (A 1 x 1 kernel is contiguous
        # either way and keeps its strides. With its channels last beside an image that has them
        # first, its float32 gradients corrupt torch's memory on AVX2.)
        return decode(q.movedim(1, -1), fmt, dtype).movedim(-1, 1)
    return decode(q, fmt, dtype)


def computable(op: Overload, q: Tensor) -> Tensor:
    """Return `q` in float32 if the device has no kernel of `op` for bfloat16."""
    name = op._schema.name.removesuffix("_backward")
    return q.float() if name in backend_of(q).lacks_bfloat16 else q


def value(x: ScaledTensor, power: Amount = ONE) -> Tensor:
    """Return the value times a power of two.

    The value is exact if the scale is a power of two, because bfloat16 and float32 have the
    exponents of a scale. Under another scale, as 8-bit elements may have, it is the nearest
    float32.
    """
    q, scale = elements(x), scale_of(x)
    if q.dtype == torch.float16 or x.qdata.itemsize == 1:
        q = q.float()
    if power is ONE:
        return scaled_by(q, scale)
    together = product_of(scale, power)
    if isinstance(together, Single) and MIN_SCALE <= together <= MAX_SCALE:
        return scaled_by(q, together)
    return scaled_by(scaled_by(q, scale), power)


def of_floats(dtype: torch.dtype | None) -> torch.dtype | None:
    """Return the dtype that a caller asks of a result. `dispatch` runs the operator on plain values
    if it is no float dtype."""
    if dtype is not None and not dtype.is_floating_point:
        raise WithoutScale
    return dtype


def statistic(x: Tensor, dtype: torch.dtype | None) -> Tensor:
    """Return a plain statistic: float32, or in the dtype that a caller asks."""
    return x if dtype is None else x.to(dtype)


def plain(x: Any) -> Any:
    """Return the value of a ScaledTensor, and anything else as it is."""
    return value(x) if isinstance(x, ScaledTensor) else x


def wide(x: Any) -> Any:
    """Return the value of a tensor of floats in float32, and anything else as it is."""
    x = plain(x)
    return x.float() if isinstance(x, Tensor) and x.dtype.is_floating_point else x


def within(number: Any, dtype: torch.dtype) -> Any:
    """Return a finite number beyond the range of a dtype as the last number of the range, and
    anything else as it is. The elements of a float32 tensor may be bfloat16 numbers, whose range
    ends before `torch.finfo(torch.float32).max`, and torch's kernels refuse such a number."""
    if not isinstance(number, float) or not math.isfinite(number):
        return number
    most = torch.finfo(dtype).max
    return max(-most, min(most, number))


def first_scaled(*xs: Any) -> ScaledTensor:
    """Return the first ScaledTensor among the operands. Dispatch guarantees one."""
    for x in xs:
        if isinstance(x, ScaledTensor):
            return x
    raise LookupError("no operand is a ScaledTensor")


def check_dtypes(*operands: Any) -> None:
    """Raise DTypeMismatchError unless the operands of a product have one dtype.

    torch checks that in its kernels, and a rule would promote the operands. When a rule runs,
    autocast has already converted the operands of the operators that it knows. When a function is
    caught, autocast has yet to convert them.
    """
    first, *others = (x.dtype for x in operands)
    for other in others:
        if other != first and not (first in _AUTOCAST and other in _AUTOCAST and _autocasts()):
            raise mismatch(first, other)


_AUTOCAST = (torch.float32, torch.bfloat16, torch.float16)


def _autocasts() -> bool:
    return any(map(torch.is_autocast_enabled, ("cpu", "cuda")))


def mismatch(first: torch.dtype, other: torch.dtype) -> DTypeMismatchError:
    return DTypeMismatchError(
        f"the operands of a product have one dtype, as in torch; got {first} and {other}. Convert "
        f"one, as x.to({other}), or run the model under torch.autocast"
    )


def operand(x: Any, like: ScaledTensor) -> Operand:
    """Return `x` with a scale: a ScaledTensor has one, a plain tensor is measured, a number has 1.
    Under `batch_invariant` a plain tensor counts as of unit scale in a forward pass.

    A Python number keeps its float32 value. In the storage dtype, Adam's eps could become 0.
    """
    if isinstance(x, ScaledTensor):
        return Operand(elements(x), *amounts_of(x), x.nonnegative)
    if not isinstance(x, Tensor):
        return _number(x, like)
    if x.layout != torch.strided:
        raise UnsupportedError(
            f"this operator takes no plain tensor in {x.layout} beside a ScaledTensor, as products "
            "do: of scaled values, torch.sparse_coo_tensor(indices, scaledtensor.scaled(values), "
            "size), or as x.to_dense()"
        )
    if not x.dtype.is_floating_point:
        if x.is_complex():
            raise WithoutScale
        x = x.float()
    if x.dim() == 0:
        # Its power of two moves into the scale, so a loss multiplier of 2**-18 only edits scales.
        given = amount(x.to(like.device, torch.float32))
        (unit,) = settle(abs(given))
        return Operand(tensor_of(given / unit, like.device), unit, abs(given))
    q = x if x.dtype == torch.bfloat16 else x.float()
    if invariant.assumes_unit_scale():
        one = torch.ones((), device=x.device, dtype=torch.float32)
        return Operand(q, single_of(one), single_of(one.clone()))
    rms = amount(measured_rms(x))
    (scale,) = settle(rms)
    return Operand(scaled_by(q, 1 / scale), scale, rms)


def _number(x: Any, like: ScaledTensor) -> Operand:
    if calculates(like):
        number = Single(rounded(real(x)))
        return Operand(torch.full((), number, dtype=torch.float32), ONE, abs(number), x >= 0)
    q = torch.full((), real(x), device=like.device, dtype=torch.float32)
    return Operand(q, torch.ones_like(q), q.abs(), x >= 0)


def real(number: Any) -> Any:
    """Return a Python number that is an operand of a ScaledTensor. A number that follows from a
    symbolic size stays symbolic, because `float` would fix the size. Beside a complex number the
    operator runs on plain values (`WithoutScale`), as beside a complex tensor."""
    if isinstance(number, complex):
        raise WithoutScale
    symbolic = isinstance(number, (torch.SymInt, torch.SymFloat))
    return 1.0 * number if symbolic else float(number)


def difference(x: Any, y: Any, *others: Any) -> tuple[Tensor, Tensor, Any]:
    """Return both values in float32, and the RMS of their difference.

    One of the operands, or of `others`, is a ScaledTensor.
    """
    like = first_scaled(x, y, *others)
    a, b = operand(x, like), operand(y, like)
    return a.value, b.value, quadrature(a.rms, b.rms)


def at_value(function: Callable[..., Tensor], x: ScaledTensor, rms: Amount, **kwargs: Any) -> Raw:
    """Return a function that is not homogeneous, applied to the value. It makes a new tensor."""
    return Raw(function(read_value(x)), None, rms, fresh=True, **kwargs)


def read_value(x: Any, power: Amount = ONE) -> Any:
    """Return the value times a power of two, only to be read. It is the elements themselves if they
    would be multiplied by 1. A plain tensor has its own elements as its value."""
    if not isinstance(x, ScaledTensor):
        return x if power is ONE else scaled_by(x, power)
    q, scale = x.qdata, scale_of(x)
    by_one = type(scale) is type(power) is Single and float.__mul__(scale, power) == 1
    wide = q.dtype is torch.float32 or q.dtype is torch.bfloat16
    return q if by_one and wide else value(x, power)


def measured(q: Tensor, scale: Amount | None = None, **kwargs: Any) -> Raw:
    """Return a result whose RMS is measured: the value is `q * scale`, and None stands for 1.

    A few operators need it, because their second moment has no closed form under Gaussian inputs:
    the entries of a matrix inverse, an eigenvector, a Bessel function. The docstring of such a rule
    says "measured". It costs one pass over the result, and eager code waits for the number. A
    homogeneous operator passes elements and their scale, and so stays equivariant to the bit.
    """
    rms = amount(measured_rms(q))
    return Raw(q, scale, rms if scale is None else rms * scale, **kwargs)


def rms_seen(q: Tensor, otherwise: Amount) -> Any:
    """Return the RMS of `q`, plain values of a function; `otherwise` if some overflow or all are 0.

    Functions of a wide range (exp, softplus) need it. Their moment under a Gaussian lies in the
    tail on one side, and models feed them the other side: log-probabilities, decays, time steps. If
    a recurrence multiplies such results, a wrong moment grows with its steps.
    """
    q = q.detach()
    norm = None if torch.compiler.is_compiling() else finite_norm(q)
    if norm is not None:
        return Single(rounded(norm / max(q.numel(), 1) ** 0.5)) if norm else otherwise
    total = torch.linalg.vector_norm(q, dtype=torch.float64)
    seen = (total / max(q.numel(), 1) ** 0.5).float()
    return torch.where(seen.isfinite() & (seen > 0), seen, tensor_of(otherwise))


def constant(number: float, like: Amount) -> Any:
    """Return a number as an Amount of the kind of `like`."""
    if type(like) is Single:
        return Single(rounded(number))
    return torch.full_like(tensor_of(like), number)


def bounded_square(rms: A) -> A:
    """Return rms^2 for formulas that saturate. They are constant above 2^60, and the square stays
    in range."""
    return rms.clamp_max(2.0**60).square()


def count(shape: Sequence[int], dims: int | Sequence[int] | None) -> int:
    """Return the number of elements that a reduction over `dims` (None or empty: all) joins."""
    if dims is None or (not isinstance(dims, int) and len(dims) == 0):
        dims = range(len(shape))
    elif isinstance(dims, int):
        dims = (dims,)
    return math.prod(shape[d] for d in dims) if len(shape) else 1


def gaussian_moment(power: float) -> float:
    """Return sqrt(E|z|^(2 power)) for z ~ N(0, 1); 1 if the moment is infinite."""
    if power <= -0.5:
        return 1.0
    return math.exp(0.5 * (power * math.log(2) + math.lgamma(power + 0.5) - math.lgamma(0.5)))


# --- second moments under a Gaussian, by quadrature ------------------------------------------
# These serve functions whose integral has no closed form. `gaussian_rms("atan", r)` is
# sqrt(E atan(r z)^2) for z ~ N(0, 1). It depends on r alone and reads no element of a tensor. The
# trapezoid rule runs over ln|z|, from 2^-40 to 4.75. So it resolves a function near zero under any
# r (1 / (1 + x^2) is a needle if r is large), and stops at the largest of a million elements. The
# moment of an exponential beyond that belongs to elements that no tensor has. The integral is an
# operator, so that eager and compiled code get the same bits, because compilers do not look inside.
# On a CPU each result is remembered by its r.

_STEP = 1 / 8
_FIRST, _COUNT = -40, 339  # points of |z|, up to 2^2.25
_LARGEST = 2.0**100
_LEAST = 2.0**-60


class Integrand(NamedTuple):
    function: Callable[..., Tensor]
    """The elementwise function of (v, *parameters). NaN marks points outside of its domain."""
    heavy: bool
    """Whether there is no second moment (1 / z). The median of |f| then takes its place."""


_INTEGRANDS: dict[str, Integrand] = {}


def integrand(name: str, function: Callable[..., Tensor], *, heavy: bool = False) -> str:
    """Name an elementwise function for `gaussian_rms`, and return the name."""
    _INTEGRANDS[name] = Integrand(function, heavy)
    return name


def gaussian_rms(name: str, rms: Amount, *parameters: float, nonnegative: bool = False) -> Any:
    """Return the RMS of the named function of a Gaussian of RMS `rms`, or of its absolute value.

    The result is zero only if `rms` is zero and the function vanishes there.
    """
    numbers = tuple(float(p) for p in parameters)
    if type(rms) is Single:
        return Single(_remembered(rms, name, numbers, nonnegative))
    rms = tensor_of(rms)
    if type(rms) is Tensor and backend_of(rms).host and not torch.compiler.is_compiling():
        number = _remembered(rms.item(), name, numbers, nonnegative)
        return torch.scalar_tensor(number, dtype=torch.float32)
    result: Tensor = torch.ops.scaledtensor.gaussian_rms(rms, name, numbers, nonnegative)
    return result


LIBRARY.define("gaussian_rms(Tensor rms, str name, float[] parameters, bool nonnegative) -> Tensor")


def _compute(rms: Tensor, name: str, parameters: list[float], nonnegative: bool) -> Tensor:
    if backend_of(rms).host:
        number = _remembered(rms.item(), name, tuple(parameters), nonnegative)
        return torch.scalar_tensor(number, dtype=torch.float32)
    return _integral(rms, name, parameters, nonnegative)


@lru_cache(maxsize=8192)
def _remembered(rms: float, name: str, parameters: tuple[float, ...], nonnegative: bool) -> float:
    single = torch.scalar_tensor(rms, dtype=torch.float32)
    return _integral(single, name, list(parameters), nonnegative).item()


def _integral(rms: Tensor, name: str, parameters: list[float], nonnegative: bool) -> Tensor:
    function, heavy = _INTEGRANDS[name]
    # Made on the device, since a CUDA graph cannot capture a copy from the host.
    t = torch.arange(_COUNT, dtype=torch.float64, device=rms.device) * _STEP + _FIRST
    z = torch.exp2(t)
    weight = z * torch.exp(-z.square() / 2)
    v = z * rms
    if not nonnegative:
        v, weight = torch.cat((v, -v)), torch.cat((weight, weight))
    f = function(v, *parameters).double().abs()
    counted = f.isfinite()
    weight = torch.where(counted, weight, 0.0)
    f = torch.where(counted, f, 0.0).clamp_max(_LARGEST)
    total = weight.sum().clamp_min(1e-300)
    if heavy:
        ordered, index = f.sort()
        half = (weight[index].cumsum(0) < total / 2).sum().clamp_max(f.numel() - 1)
        result = ordered.index_select(0, half.view(1))[0]
    else:
        result = ((weight * f.square()).sum() / total).sqrt()
    floor = torch.where(rms > 0, _LEAST, 0.0)
    return torch.maximum(result.clamp_max(_LARGEST), floor).float()


LIBRARY.impl("gaussian_rms", _compute, "CompositeExplicitAutograd")


@torch.library.register_fake("scaledtensor::gaussian_rms", lib=LIBRARY)  # type: ignore[untyped-decorator]
def _fake(rms: Tensor, name: str, parameters: list[float], nonnegative: bool) -> Tensor:
    return torch.empty_like(rms)
