"""In-place operators of optimizers, calculated on the elements themselves.

The scale stays, so each is PyTorch's own kernel with a factor that holds the ratio of the scales.
An expectation of the RMS is the rule's (`arithmetic`). `ops/writes.py` says when these functions
serve; the rule of the functional operator serves otherwise.
"""

import math
from typing import Any

import torch

from scaledtensor.ops.algebra import quadrature
from scaledtensor.ops.operators import aten
from scaledtensor.ops.rules.arithmetic import rms_of_lerp, rms_with_product, rms_with_quotient
from scaledtensor.ops.writes import amounts_in_place, change, elements_in_place, in_place
from scaledtensor.scales.powers import times
from scaledtensor.scales.singles import Single, rounded

_add, _mul, _div = torch.Tensor.add_, torch.Tensor.mul_, torch.Tensor.div_
_lerp, _addcmul, _addcdiv = torch.Tensor.lerp_, torch.Tensor.addcmul_, torch.Tensor.addcdiv_


@in_place(aten.add.Tensor, aten.add.Scalar)
def add(x: Any, y: Any, alpha: float = 1) -> bool:
    """x + alpha y."""
    if isinstance(y, (int, float)):
        return _plus_number(x, float(y) * alpha)
    found = amounts_in_place(x, y)
    if found is None:
        return False
    before, (scale, rms) = found
    positive = x.nonnegative and getattr(y, "nonnegative", False) and alpha > 0
    size = abs(alpha)
    now = quadrature(before[1], rms if size == 1 else rms * size)
    by = float(scale) / float(before[0]) * alpha
    return change(x, before, now, _add, elements_in_place(y), alpha=by, nonnegative=positive)


@in_place(aten.sub.Tensor, aten.sub.Scalar)
def sub(x: Any, y: Any, alpha: float = 1) -> bool:
    """x - alpha y."""
    return add(x, y, -alpha)


def _plus_number(x: Any, number: float) -> bool:
    found = amounts_in_place(x)
    if found is None or not math.isfinite(number):
        return False
    before = found[0]
    positive = x.nonnegative and number >= 0
    now = quadrature(before[1], Single(rounded(abs(number))))
    by = rounded(number) / float(before[0])
    return change(x, before, now, _add, other=by, nonnegative=positive)


@in_place(aten.mul.Tensor, aten.mul.Scalar)
def mul(x: Any, y: Any) -> bool:
    """x times a number."""
    found = amounts_in_place(x) if isinstance(y, (int, float)) else None
    if found is None:
        return False
    positive = x.nonnegative and y >= 0
    return change(x, found[0], found[0][1] * abs(y), _mul, y, nonnegative=positive)


@in_place(aten.div.Tensor, aten.div.Scalar)
def div(x: Any, y: Any) -> bool:
    """x divided by a number."""
    found = amounts_in_place(x) if isinstance(y, (int, float)) and y else None
    if found is None:
        return False
    positive = x.nonnegative and y > 0
    return change(x, found[0], found[0][1] / abs(y), _div, y, nonnegative=positive)


@in_place(aten.lerp.Scalar)
def lerp(x: Any, y: Any, weight: Any) -> bool:
    """x + weight (y - x)."""
    found = amounts_in_place(x, y) if isinstance(weight, (int, float)) else None
    if found is None:
        return False
    before, (scale, rms) = found
    w = Single(rounded(weight))
    now = rms_of_lerp(before[1], rms, w)

    def towards(q: Any, ratio: float) -> None:
        _lerp(q, times(elements_in_place(y), Single(ratio)), w)

    return change(x, before, now, towards, ratio=float(scale) / float(before[0]))


@in_place(aten.addcmul.default)
def addcmul(x: Any, a: Any, b: Any, value: float = 1) -> bool:
    """x + value a b."""
    found = amounts_in_place(x, a, b)
    if found is None:
        return False
    before, left, right = found
    now = rms_with_product(before[1], left[1], right[1], a is b, value)
    positive = x.nonnegative and a is b and value >= 0
    by = float(left[0]) * float(right[0]) / float(before[0]) * value
    factors = map(elements_in_place, (a, b))
    return change(x, before, now, _addcmul, *factors, value=by, nonnegative=positive)


@in_place(aten.addcdiv.default)
def addcdiv(x: Any, a: Any, b: Any, value: float = 1) -> bool:
    """x + value a / b."""
    found = amounts_in_place(x, a, b)
    if found is None:
        return False
    before, left, right = found
    now = rms_with_quotient(before[1], left[1], right[1], value)
    by = float(left[0]) / float(right[0]) / float(before[0]) * value
    return change(x, before, now, _addcdiv, *map(elements_in_place, (a, b)), value=by)
