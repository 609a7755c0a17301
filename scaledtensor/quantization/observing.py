"""Weights that record the inputs of their products, while calibration data run through a model.

Calibration puts an `Observed` in the place of each chosen weight. It shares the memory of the
weight, and behaves as the plain weight. A product with it, in any spelling of the table of
products, tells its `Seen` which inputs it had. So do products with its views `w.t()` and `w[e]` and
with its conversions, such as `w.bfloat16()`. These are the products whose inputs a
`QuantizedTensor` casts.

`Seen` has bounded memory: for a weight that sums over K elements, it keeps one number for the amax,
K numbers for the channels, K x K for the second moments, and 2^18 counts for a histogram.
"""

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor

from scaledtensor import _torch
from scaledtensor.errors import QuantizationError
from scaledtensor.ops.products import by_gemm
from scaledtensor.ops.products.quantize import mixed
from scaledtensor.ops.products.table import BY_GEMM, PRODUCTS
from scaledtensor.quantization import products
from scaledtensor.quantization.configs import Config, Static
from scaledtensor.quantization.parts import Order, matrix_shape

__all__ = ["Histogram", "Observed", "Seen", "windows"]

#: Mantissa bits of a magnitude that choose its place in a histogram.
_BITS = 10
_DROPPED = 23 - _BITS


class Histogram:
    """Counts of the magnitudes of float32 numbers, by exponent and the first 10 bits of the
    mantissa. A magnitude of the histogram is less than 2^-10 of itself away from the true one."""

    def __init__(self, device: torch.device) -> None:
        self.counts = torch.zeros(1 << (8 + _BITS), dtype=torch.int64, device=device)

    def add(self, x: Tensor) -> None:
        places = x.float().abs().view(torch.int32).reshape(-1) >> _DROPPED
        self.counts += torch.bincount(places, minlength=self.counts.numel())

    def magnitudes(self, where: float = 0.5) -> Tensor:
        """A magnitude of each place that was counted, float32: the lowest one for `where` = 0, and
        the highest one for 1."""
        places = self.counts.nonzero().reshape(-1).int()
        offset = int(where * ((1 << _DROPPED) - 1))
        found = ((places << _DROPPED) + offset).view(torch.float32)
        return torch.where(places == 0, 0.0, found)

    def numbers(self) -> Tensor:
        """How many elements have each of the `magnitudes`."""
        return self.counts[self.counts > 0]

    def quantile(self, percent: float) -> Tensor:
        """The least magnitude that is not below `percent` of all elements, 0-dim float32. It is at
        most 2^-10 of itself too large."""
        within = self.numbers().cumsum(0)
        rank = (within[-1].double() * (percent / 100)).ceil().clamp_min(1)
        index = int(torch.searchsorted(within.double(), rank))
        return self.magnitudes(1.0)[index]


class Seen:
    """The facts that calibration data show about the inputs of one weight.

    Args:
        name: the name of the weight, for messages.
        config: the config of the weight. It decides which figures are kept.
        order: how the summed dimension lies in the weight.
        shape: the shape of the weight.

    Attributes:
        number: how many products were seen.
        amax: the largest magnitude of an input as it meets the cast, 0-dim float32.
        channels: the largest magnitude of each element along the summed dimension, float32.
        moments: for each matrix of the weight (an expert, a group of a convolution), the sum of x^T
            x over its inputs x, float32.
        histogram: the magnitudes of inputs.
        columns: the factors of `Config.fold`, once they are known.
        input_scale: the scale of `Static`, once it is known.
    """

    def __init__(self, name: str, config: Config, order: Order, shape: tuple[int, ...]) -> None:
        self.name, self.config, self.order, self.shape = name, config, order, shape
        self.number = 0
        self.amax: Tensor | None = None
        self.channels: Tensor | None = None
        self.moments: Tensor | None = None
        self.histogram: Histogram | None = None
        self.columns: Tensor | None = None
        self.input_scale: Tensor | None = None
        self.spelled: str | None = None  # a product that has no rows, by name
        self.sums_last: bool | None = None  # whether the first product did

    @property
    def matrix_shape(self) -> tuple[int, ...]:
        """The shape of the matrix of codes."""
        return matrix_shape(self.shape, self.order)

    @property
    def wants_rows(self) -> bool:
        return self.config.fold or self.config.rounding != "nearest"

    @property
    def wants_moments(self) -> bool:
        return self.config.rounding != "nearest" or (self.config.fold and self.config.input is None)

    def measure(self, x: Tensor, dim: int) -> None:
        """Look at one input. `dim` is the dimension that the product sums over."""
        if not x.numel():
            return
        self.number += 1
        largest = x.abs().amax().float()
        if not largest.isfinite():
            kind = "a NaN" if largest.isnan() else "an infinity"
            raise QuantizationError(
                f"an input of {self.name} has {kind} in the calibration data: leave that batch "
                "out, or find the layer before this one that makes it"
            )
        if not isinstance(self.config, Static):
            return
        plain = self.columns is None and not self.config.rotate
        if not plain:
            x = products.entering(x, self, dim)
            largest = x.abs().amax().float()
        self.amax = largest if self.amax is None else torch.maximum(self.amax, largest)
        if self.config.observer != "amax":
            self.histogram = self.histogram or Histogram(x.device)
            self.histogram.add(x)

    def entering_moments(self) -> Tensor:
        """The `moments` of inputs as they meet the codes: divided by `columns`, and mixed."""
        if self.moments is None:
            raise QuantizationError(f"no rows of inputs of {self.name} were seen")
        held = self.moments
        if self.columns is not None:
            held = held / self.columns / self.columns[:, None]
        return mixed(mixed(held, -1), -2) if self.config.rotate else held

    def measure_again(self) -> None:
        """Forget the figures for the scale, which a second pass over the data measures."""
        self.amax = self.histogram = None

    def collect(self, index: int | None, rows: Tensor, matrices: int) -> None:
        """Add the rows (M, K) that met the matrix `index` of the weight; None is all matrices."""
        rows = rows.float()
        if self.config.fold and rows.shape[0]:
            largest = rows.abs().amax(0)
            held = self.channels
            self.channels = largest if held is None else torch.maximum(held, largest)
        if self.wants_moments:
            terms = rows.shape[-1]
            if self.moments is None:
                self.moments = torch.zeros(
                    matrices, terms, terms, device=rows.device, dtype=torch.float32
                )
            held = self.moments if index is None else self.moments[index]
            held += rows.mT @ rows


class Observed(Tensor):
    """A weight, or a view of one, that tells `seen` of the inputs of its products."""

    seen: Seen
    turned: bool
    """Whether this is the transpose of the weight, in its last two dimensions."""
    matrix: int | None
    """The index of this matrix in a weight that is a batch of matrices."""

    @classmethod
    def of(cls, x: Tensor, seen: Seen, turned: bool = False, matrix: int | None = None) -> Self:
        with _torch.disable_torch_function():
            self = x.detach().as_subclass(cls)
        self.seen, self.turned, self.matrix = seen, turned, matrix
        return self

    @classmethod
    def parameter(cls, p: Tensor, seen: Seen) -> Self:
        """The weight in the place of the parameter `p`."""
        self = cls.of(p, seen)
        self._is_param = True  # isinstance(x, nn.Parameter) asks for it
        return self

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func in _torch.BODIES:
            return _torch.BODIES[func](*args, **kwargs)
        product = None if _torch.is_transforming() else PRODUCTS.get(func)
        with _torch.disable_torch_function():
            if product is None or product.on is None or not product.places:
                return _as_view(func, args, func(*args, **kwargs))
            return product.on(partial(_observe, (func, args, kwargs)), *args, **kwargs)


_CONVERSIONS = {
    *(Tensor.to, Tensor.type, Tensor.type_as, Tensor.float, Tensor.double),
    *(Tensor.half, Tensor.bfloat16, Tensor.contiguous, Tensor.clone),
}


def _as_view(func: Any, args: tuple[Any, ...], y: Any) -> Any:
    """`y`, a result of a function of an observed weight: itself observed if it is the weight, one
    matrix of it, a transposition or a conversion."""
    w = args[0] if args else None
    if type(y) is not Tensor or not isinstance(w, Observed) or not y.is_floating_point():
        return y
    turned = y.dim() >= 2 and w.dim() == y.dim() and _layout(y) == _layout(w.mT)
    if func in _CONVERSIONS and y.shape == w.shape:
        return Observed.of(y, w.seen, w.turned, w.matrix)
    if _torch.memory_of(y) != _torch.memory_of(w):
        return y
    if _layout(y) == _layout(w):
        return Observed.of(y, w.seen, w.turned, w.matrix)
    if turned:
        return Observed.of(y, w.seen, not w.turned, w.matrix)
    if w.dim() == 3 and (y.shape, y.stride()) == (w.shape[1:], w.stride()[1:]):
        index = (y.storage_offset() - w.storage_offset()) // max(w.stride(0), 1)
        return Observed.of(y, w.seen, w.turned, index)
    return y


def _layout(x: Tensor) -> Any:
    return x.shape, x.stride(), x.storage_offset()


# --- products --------------------------------------------------------------------------------


def _observe(
    call: Any,
    function: Callable[..., Any],
    *operands: Any,
    spelled: Any = None,
    lowered: Any = None,
    **kwargs: Any,
) -> Any:
    """`function(*operands)`, which tells the first observed operand of the plain ones."""
    weights = [i for i, x in enumerate(operands) if isinstance(x, Observed)]
    plain = [
        products.under_autocast(x.as_subclass(Tensor) if i in weights else x)
        for i, x in enumerate(operands)
    ]
    if weights:
        place = weights[0]
        weight: Observed = operands[place]
        inputs = [(i, x) for i, x in enumerate(plain) if isinstance(x, Tensor) and i not in weights]
        # The figures are products too, and autocast would calculate them in 16 bits.
        with torch.autocast(weight.device.type, enabled=False):
            for i, x in inputs:
                weight.seen.measure(x, products.summed_dim(i, place, x))
            if len(operands) == 2 and inputs:
                _collect(_Call(call, function, inputs[0][1], weight, place == 0))
    return function(*plain, **kwargs)


class _Call(NamedTuple):
    """A product of an input and a weight."""

    call: Any
    """The function that the model called, its arguments and its keyword arguments."""
    function: Any
    x: Tensor
    weight: Observed
    weight_first: bool


def _collect(made: _Call) -> None:
    seen, weight = made.weight.seen, made.weight
    found = _rows(made)
    if found is None:
        spelled = made.call[0]
        seen.spelled = getattr(spelled, "__name__", str(spelled))
        return
    last = found.last != weight.turned
    if seen.sums_last is None:
        seen.sums_last = last
    first_pass = seen.columns is None
    if seen.wants_rows and first_pass and seen.sums_last == last:
        for index, each in found.rows:
            seen.collect(weight.matrix if index is None else index, each, found.matrices)


Rows = Iterator[tuple[int | None, Tensor]]


class _Found(NamedTuple):
    """The input of a product as rows that are summed over."""

    last: bool
    """Whether the product sums over the last dimension of its weight, and not the one before."""
    rows: Rows
    """The rows (M, K) for each matrix of the weight, with the index of the matrix."""
    matrices: int = 1
    """How many matrices the weight has: experts, or groups of a convolution."""


def _rows(made: _Call) -> _Found | None:
    """The rows of the input; None for products that have none."""
    function, x, w = made.function, made.x, made.weight
    name = getattr(made.call[0], "__name__", "")
    shape = made.weight.seen.shape
    experts = shape[0] if len(shape) == 3 else 1
    if made.weight.seen.order == "kernel":
        if name not in _CONVOLUTIONS or made.weight_first:
            return None
        given = _given(made)
        return _Found(True, windows(x, w, given), given.get("groups", 1))
    if function is torch.nn.functional.linear or function is torch.inner:
        return _Found(True, iter([(None, x.reshape(-1, x.shape[-1]))]), experts)
    if isinstance(function, partial) and function.func is torch.tensordot:
        a, b = (w, x) if made.weight_first else (x, w)
        dims = function.keywords["dims"]
        return _labelled(by_gemm.tensordot_equation(a.dim(), b.dim(), dims), made, experts)
    if isinstance(function, partial) and function.func is torch.einsum:
        return _labelled(function.args[0], made, experts)
    if name.endswith("grouped_mm"):
        return _grouped(made, experts)
    if function in BY_GEMM:
        if not made.weight_first:
            return _Found(False, _matrices(x if x.dim() > 1 else x[None], w), experts)
        return _Found(True, _matrices(x.mT if x.dim() > 1 else x[None], w), experts)
    return None


def _matrices(x: Tensor, w: Tensor) -> Rows:
    """The rows of `x`, whose last dimension is summed, for each matrix of `w`."""
    if w.dim() == 2:
        return iter([(None, x.reshape(-1, x.shape[-1]))])
    batch = x if x.dim() > 2 and x.shape[-3] > 1 else x.expand(*x.shape[:-3], w.shape[0], -1, -1)
    return ((e, batch[..., e, :, :].reshape(-1, x.shape[-1])) for e in range(w.shape[0]))


def _labelled(equation: str, made: _Call, experts: int) -> _Found | None:
    """The rows of an einsum that sums over one of the last two dimensions of the weight."""
    terms, arrow, out = equation.replace(" ", "").partition("->")
    labels = terms.split(",")
    if "." in equation or len(labels) != 2 or not arrow:
        return None
    of_w, of_x = labels if made.weight_first else labels[::-1]
    w, x = made.weight, made.x
    summed = [n for n in of_w[-2:] if n in of_x and n not in out]
    twice = len(set(of_x)) < len(of_x) or len(set(of_w)) < len(of_w)
    other = set(of_w[-2:]) - set(summed)
    if len(summed) != 1 or twice or other & set(of_x):
        return None
    batch = of_w[0] if w.dim() == 3 and of_w[0] in of_x else ""
    ends = batch + summed[0]
    order = [of_x.index(n) for n in (*(n for n in of_x if n not in ends), *ends)]
    turned = x.permute(order)
    last = of_w[-1] == summed[0]
    if not batch:
        rows = turned.reshape(-1, turned.shape[-1])
        each: Iterable[int | None] = range(w.shape[0]) if w.dim() == 3 else [None]
        return _Found(last, ((e, rows) for e in each), experts)
    parts = ((e, turned[..., e, :].reshape(-1, turned.shape[-1])) for e in range(w.shape[0]))
    return _Found(last, parts, experts)


def _grouped(made: _Call, experts: int) -> _Found | None:
    """The rows of each expert: `offs` has the ends of the groups of rows."""
    _, args, kwargs = made.call
    ends = kwargs.get("offs", args[2] if len(args) > 2 else None)
    x, w = made.x, made.weight
    if made.weight_first or w.dim() != 3:
        return None
    if x.dim() == 3:
        return _Found(False, _matrices(x, w), experts)
    bounds = [0, *ends.tolist()]
    parts = ((e, x[bounds[e] : bounds[e + 1]]) for e in range(w.shape[0]))
    return _Found(False, parts, experts)


_CONVOLUTIONS = ("conv1d", "conv2d", "conv3d")


def _given(made: _Call) -> dict[str, Any]:
    """The arguments of a convolution by name."""
    _, args, kwargs = made.call
    names = ("input", "weight", "bias", "stride", "padding", "dilation", "groups")
    return {**dict(zip(names, args, strict=False)), **kwargs}


def windows(x: Tensor, w: Tensor, given: dict[str, Any]) -> Rows:
    """The windows of a convolution's input, one a row, for each group of channels."""
    n = w.dim() - 2
    x = x if x.dim() == n + 2 else x[None]

    def each(name: str, usual: int) -> list[int]:
        value = given.get(name, usual)
        found = [value] * n if isinstance(value, int) else list(value)
        return found * n if len(found) == 1 else found

    stride, dilation = each("stride", 1), each("dilation", 1)
    spans = [d * (k - 1) for d, k in zip(dilation, w.shape[2:], strict=True)]
    padding = given.get("padding", 0)
    if padding == "same":
        sides = [(s // 2, s - s // 2) for s in spans]
    else:
        sides = [(p, p) for p in ([0] * n if padding == "valid" else each("padding", 0))]
    x = torch.nn.functional.pad(x, [p for side in reversed(sides) for p in side])
    for i in range(n):
        x = x.unfold(2 + i, spans[i] + 1, stride[i])[..., :: dilation[i]]
    # (batch, channels, *places, *taps) -> (batch, *places, groups, channels of a group and taps)
    spread = x.permute(0, *range(2, 2 + n), 1, *range(2 + n, 2 + 2 * n))
    groups = given.get("groups", 1)
    rows = spread.reshape(-1, groups, w.shape[1:].numel())
    yield from ((g, rows[:, g]) for g in range(groups))
