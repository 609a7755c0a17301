"""Expected RMS that are far from the elements, and are measured in their place.

The rules take factors and terms for independent, and know no data. If they depend on each other, an
expectation can run away: over the rounds of a loop, or at once, if one of two factors is huge and
the other vanishes where it is (`exp(-a) * (x * exp(a)).cumsum()`, the scan of a state-space model).
A cast to 8 bits under such a scale rounds everything to zero, and a square leaves the range.
"""

import math
from typing import Any

import torch
from torch import Tensor

from scaledtensor import _torch
from scaledtensor.scales.forms import Form
from scaledtensor.scales.measure import measured_if_real, measured_rms
from scaledtensor.scales.singles import Single, tensor_of

__all__ = ["believed", "bounded", "compounding", "either", "is_wild", "of_factors", "wild"]

#: An expected RMS beyond these numbers is measured. Products of two elements under such scales
#: would leave the range of float32. The least is smaller, since gradients of a scaled loss may be.
_LEAST, _MOST = 2.0**-100, 2.0**60
#: It stays unless it is off by more than this factor: a loss times a power of two changes no scale,
#: and the RMS of values without a variance (1 / x^2) says little about most of them.
_FAR = 2.0**40

#: The product with a factor of a larger RMS is measured. No weight and no activation is so large,
#: and no gradient of a loss that is scaled for FP16.
_LARGE = 2.0**20
#: The expectation of such a product stays unless it is too large by more than this factor, so a
#: loss times a power of two changes no scale. E5M2 holds elements of 2^-10 under their scale. It
#: also stays if it is too small: a few elements may then be huge (1 / x), and the others fit it.
_OFF = 2.0**10


def believed(rms: Any, q: Tensor, held: Any) -> Any:
    """Return the expected RMS of elements `q` under the scale `held`, or the measured one if the
    expectation ran away, by correlated terms in a loop or by an infinite element."""
    if type(rms) is not Single or _LEAST < rms < _MOST:
        return rms
    found = measured_if_real(rms, q, held)
    return rms if rms / _FAR <= found <= rms * _FAR or (not found and rms < math.inf) else found


def bounded(rms: Any) -> Any:
    """Return the RMS of a product, in traced code at most 2^100. Correlated factors in a loop, such
    as h (1 - h), square an RMS that is too large again and again. Eager code measures such values
    (`believed`)."""
    return rms.clamp_max(2.0**100) if isinstance(rms, Form) else rms


def wild(rms: Any) -> Any:
    """Return a measured RMS that may be of any order, such as the RMS of exponentials. Traced code
    does not know the number, and so marks it for `of_factors`. No one scale may hold all rows of
    such a tensor, so traced code does not cast it to 8 bits in a product without a weight."""
    if not torch.compiler.is_compiling():
        return rms
    form = Form.of(rms)
    form.wild = True
    return form


def compounding(rms: Any, follows: bool = True) -> None:
    """Mark the RMS of a product without a weight in traced code. All RMS that follow from it are
    marked too, except results of functions with bounded values (`follows=False`). In a loop of such
    products, the error of an expectation multiplies, so `verbs.fit` measures marked operands."""
    if isinstance(rms, Form):
        rms.compounds = follows


def is_wild(rms: Any) -> bool:
    """Whether traced code derives an RMS from one that is marked as `wild`."""
    return isinstance(rms, Form) and rms.wild


def either(rms: Any, *of: Any) -> Any:
    """Return the RMS of a choice between operands, `wild` if one of theirs is."""
    return wild(rms) if any(map(is_wild, of)) else rms


def of_factors(rms: Any, q: Tensor, held: Any, *factors: Any) -> Any:
    """Return the expected RMS of the product `q` under the scale `held`, or the measured one if it
    is far smaller. Eager code measures if one of the RMS `factors` is large, and waits for the
    device. Traced code measures in every step, and only if a factor is `wild`."""
    if type(rms) is Single:
        for factor in factors:
            if type(factor) is Single and factor > _LARGE:
                break
        else:
            return rms
        found = measured_if_real(rms, q, held, waits=True)
        return found if 0 < found < rms / _OFF and rms < math.inf else rms
    if not is_wild(rms) or _torch.is_transforming():
        return rms
    seen, expected = measured_rms(q) * tensor_of(held), rms.tensor()
    return wild(torch.where((seen > 0) & (seen < expected / _OFF), seen, expected))
