"""`check_rule`: tests whether the rule of an operator keeps the promises of every rule."""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor

from scaledtensor.errors import DTypeError, ShapeError
from scaledtensor.formats import decode
from scaledtensor.scales.powers import is_power_of_two
from scaledtensor.tensors.tensor import ScaledTensor
from scaledtensor.tensors.wrap import scaled

__all__ = [
    "TOLERANCE",
    "assert_scaled_close",
    "assert_unit_scaled",
    "bits",
    "check_rule",
    "exact",
    "name_of",
    "rms",
]


_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def bits(x: Tensor) -> Tensor:
    """The bit patterns of a plain tensor, as integers of its width."""
    return x.contiguous().view(_INTEGERS[x.dtype.itemsize])


def exact(x: Tensor) -> Tensor:
    """The value in float64, detached from autograd's graph."""
    if isinstance(x, ScaledTensor):
        return decode(x.qdata.detach(), x.format, torch.float64) * x.scale.double()
    return x.detach().double()


def rms(*samples: Tensor) -> float:
    """The RMS over all elements of all samples.

    Unlike the RMS in `scaledtensor.scales.measure`, it is infinite or NaN if an element is, since a
    test has to see such elements.
    """
    squares = sum(float(s.detach().double().square().sum()) for s in samples)
    return math.sqrt(squares / max(sum(s.numel() for s in samples), 1))


def name_of(function: Callable[..., Any]) -> str:
    return str(getattr(function, "__name__", None) or type(function).__name__)


Shapes = Sequence[Sequence[int]]

#: The rounding of one operation in the compute format, relative to the RMS of the result.
TOLERANCE = {torch.float32: 2.0**-17, torch.bfloat16: 2.0**-5}

#: The least number of elements for a measured RMS, in samples of one population.
_ENOUGH = 4096


def check_rule(
    operator: Callable[..., Tensor],
    cases: Sequence[Shapes],
    *,
    tolerance: float = 1.0,
    low: float = 0.5,
    high: float = 2.0,
    scales: int = 20,
    differentiable: bool = True,
    seed: int = 0,
) -> None:
    """Test whether the rule of `operator` keeps the promises of every rule.

    The inputs are Gaussians of every shape in `cases`, in float32 and bfloat16, under scales from
    2^-scales to 2^scales. The promises are:

    1. Scales are exact powers of two, and expected RMS are finite.
    2. Values and gradients are equal to the operator's on plain float64 tensors, within the
       rounding of the compute format.
    3. RMS(qdata) of results and gradients is in [low, high].
    4. If an incoming gradient is multiplied by 2^k, scales are multiplied by 2^k too, and no bit of
       an element changes.

    Args:
        operator: takes as many tensors as a case has shapes, and returns one tensor: a
            ScaledTensor, or a plain one (a statistic).
        cases: the shapes of the inputs for each call, such as `[[(8, 32)], [(4, 1), (4, 16)]]`.
        tolerance: factor for the tolerance of one rounding, for an operator that rounds repeatedly.
        low, high: bounds for RMS(qdata). Widen them for a rule that cannot expect better.
        scales: largest exponent of the inputs' scales. Take 0 for an operator whose inputs have to
            be near 1, such as exp.
        differentiable: whether gradients are checked.
        seed: seed of the inputs.

    Raises:
        AssertionError: a promise does not hold. The message names the promise and the case.
        ShapeError: `cases` has no case, or one without a shape.
    """
    if not cases or not all(cases):
        raise ShapeError(f"check_rule takes cases with one or more shapes each, got {cases!r}")
    for case in cases:
        shapes = [tuple(s) for s in case]
        for dtype in (torch.float32, torch.bfloat16):
            _Check(operator, shapes, dtype, scales, differentiable, seed).run(tolerance, low, high)


class _Check:
    """The check of one case in one dtype."""

    def __init__(
        self,
        operator: Callable[..., Tensor],
        shapes: list[tuple[int, ...]],
        dtype: torch.dtype,
        scales: int,
        differentiable: bool,
        seed: int,
    ) -> None:
        self.operator, self.shapes, self.dtype = operator, shapes, dtype
        self.differentiable = differentiable
        self.rng = torch.Generator().manual_seed(seed)
        powers = torch.randint(-scales, scales + 1, (len(shapes) + 1,), generator=self.rng)
        self.powers, self.power_of_grad = powers[:-1].tolist(), int(powers[-1])

    def run(self, tolerance: float, low: float, high: float) -> None:
        smallest = min(math.prod(s) for s in self.shapes)
        samples = max(1, min(64, math.ceil(_ENOUGH / max(smallest, 1))))
        results, gradients = [], []
        for i in range(samples):
            inputs = [self._input(s, k) for s, k in zip(self.shapes, self.powers, strict=True)]
            out = self.operator(*inputs)
            if not isinstance(out, Tensor):
                raise DTypeError(f"check_rule takes an operator with one result, got {type(out)}")
            results.append(out)
            if not self.differentiable:
                if i == 0:
                    self._same(out, self.operator(*map(exact, inputs)), tolerance, "the result")
                continue
            grad = self._grad(out)
            found = torch.autograd.grad(out, inputs, grad, retain_graph=True)
            gradients.append(found)
            if i == 0:
                self._values(inputs, out, grad, found, tolerance)
                shifted = torch.autograd.grad(out, inputs, _times(grad, 3))
                for n, (x, y) in enumerate(zip(found, shifted, strict=True)):
                    self._shifted(x, y, 3, f"gradient {n}")
        self._in_range(results, low, high, "the result")
        for n, pooled in enumerate(zip(*gradients, strict=True)):
            self._in_range(list(pooled), low, high, f"gradient {n}")

    def _input(self, shape: tuple[int, ...], power: int) -> Tensor:
        x = torch.randn(shape, generator=self.rng, dtype=torch.float32) * 2.0**power
        return scaled(x.to(self.dtype)).requires_grad_(self.differentiable)

    def _grad(self, out: Tensor) -> Tensor:
        grad = (
            torch.randn(out.shape, generator=self.rng, dtype=torch.float32)
            * 2.0**self.power_of_grad
        )
        plain = grad.to(out.dtype)
        return scaled(plain) if isinstance(out, ScaledTensor) else plain

    def _values(
        self,
        inputs: list[Tensor],
        out: Tensor,
        grad: Tensor,
        found: Sequence[Tensor],
        tolerance: float,
    ) -> None:
        plain = [exact(x).requires_grad_() for x in inputs]
        want = self.operator(*plain)
        self._same(out, want, tolerance, "the result")
        expected = torch.autograd.grad(want, plain, exact(grad).to(want.dtype))
        for n, (got, reference) in enumerate(zip(found, expected, strict=True)):
            self._same(got, reference, 4 * tolerance, f"gradient {n}")

    def _same(self, got: Tensor, want: Tensor, tolerance: float, what: str) -> None:
        bound = tolerance * TOLERANCE[self.dtype]
        with self._named(what):
            finite = want.detach()[want.isfinite()]
            assert_scaled_close(got, want, rtol=bound, atol=bound * rms(finite))

    def _in_range(self, samples: list[Tensor], low: float, high: float, what: str) -> None:
        if all(isinstance(s, ScaledTensor) for s in samples):
            with self._named(what):
                assert_unit_scaled(samples, low, high)

    def _shifted(self, x: Tensor, y: Tensor, k: int, what: str) -> None:
        with self._named(f"{what}, for a gradient times 2^{k}"):
            if not isinstance(x, ScaledTensor) or not isinstance(y, ScaledTensor):
                _check(torch.equal(x * 2.0**k, y), "is not the same one times that")
                return
            _check(torch.equal(bits(x.qdata), bits(y.qdata)), "has other elements")
            ratio = float(y.scale) / float(x.scale)
            _check(ratio == 2.0**k, f"has a scale that moved by {ratio:g}")

    def _named(self, what: str) -> AbstractContextManager[None]:
        shapes = ", ".join(map(str, self.shapes))
        dtype = str(self.dtype).removeprefix("torch.")
        return _named(f"{what} of {name_of(self.operator)} for inputs of {dtype} {shapes}")


@contextmanager
def _named(what: str) -> Iterator[None]:
    """Put `what`, the checked thing, before the message of an AssertionError."""
    try:
        yield
    except AssertionError as error:
        raise AssertionError(f"{what}: {error}") from None


def assert_scaled_close(
    got: Tensor, want: Tensor, *, rtol: float = 1e-5, atol: float = 0.0
) -> None:
    """Assert that `got` has the same values as `want`, and the same scale if `want` has one.

    If `got` is a ScaledTensor, its scale has to be an exact power of two, and its expected RMS
    finite and not negative. NaNs are equal to NaNs.

    Args:
        got: a ScaledTensor or a plain tensor.
        want: a ScaledTensor or a plain tensor. If both are ScaledTensors, their formats and scales
            have to be equal.
        rtol, atol: same as in `torch.testing.assert_close`. Values are compared in float64.

    Raises:
        AssertionError: the two differ. The message names the difference.
    """
    if isinstance(got, ScaledTensor):
        _check(bool(is_power_of_two(got.scale)), f"scale {float(got.scale)!r} is no power of two")
        expected = float(got.rms)
        _check(math.isfinite(expected) and expected >= 0, f"the expected RMS is {expected!r}")
    if isinstance(got, ScaledTensor) and isinstance(want, ScaledTensor):
        _check(got.format == want.format, f"format {got.format!r}, expected {want.format!r}")
        scales = float(got.scale), float(want.scale)
        _check(scales[0] == scales[1], "scale {!r}, expected {!r}".format(*scales))
    torch.testing.assert_close(exact(got), exact(want), rtol=rtol, atol=atol, equal_nan=True)


def assert_unit_scaled(x: Tensor | Sequence[Tensor], low: float = 0.5, high: float = 2.0) -> None:
    """Assert that the RMS of the elements is in [low, high]. A ScaledTensor's elements are `qdata`.

    Args:
        x: a tensor, or several samples of one population. The RMS is over all of their elements.
        low, high: bounds of the RMS.

    Raises:
        AssertionError: the RMS is outside; the message has it.
        ShapeError: `x` has no element.
    """
    samples = [x] if isinstance(x, Tensor) else list(x)
    if not sum(s.numel() for s in samples):
        raise ShapeError("assert_unit_scaled takes tensors with elements, got none")
    elements = [s.qdata if isinstance(s, ScaledTensor) else s for s in samples]
    found = rms(*elements)
    _check(low <= found <= high, f"the RMS of the elements is {found:.4g}, not in [{low}, {high}]")


def _check(holds: bool, message: str) -> None:
    if not holds:
        raise AssertionError(message)


def _times(x: Tensor, k: int) -> Tensor:
    if isinstance(x, ScaledTensor):
        return x.like(x.qdata, x.scale * 2.0**k, x.rms * 2.0**k)
    return x * 2.0**k
