"""Sites: where the operands of a weight's products are held to what the rules expect of them.

The rules take the terms of a sum as independent, and know no data. Where terms are correlated
(weights of one sign, averages, outlier channels), the true values are up to sqrt(n) times larger
than the rules expect, layer upon layer, and a cast to 8 bits saturates. A site is a weight with the
two roles of `Unit.shifts`: its inputs, and the gradients of its results. While a site looks, it
measures each operand just before the cast, and sets the shift of a role that does not fit:

    a     the largest finite magnitude of the elements, in units of the scale that they carry
    r     their RMS
    F     the largest value of the format, and f its smallest normal one

    found = max(round(log2(r)), min(ceil(log2(a / F)), floor(log2(r / 2f))))

so that nothing saturates, unless most elements would have to be subnormal for it (as in 4 bits). A
weight with several products has the smallest shift under which nothing saturates, if it takes that
to hold the smallest of their operands.
The present shift stays where a / 2^shift <= F, or it is no smaller than `found`; and where
r / 2^shift >= min(2f, 1/4).

The elements are relative to the scale that the rules propagate, so a loss times a power of two
changes no shift. The shift becomes part of the weight's recipe: files keep it, `print(model)` shows
it, and compiled code reads it (`scaledtensor.tensors.site`). What compiled code measures is said by
`scaledtensor.ops.products.counted`, and when a site looks by `scaledtensor.models.guard`.
"""

import math
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from scaledtensor import _torch
from scaledtensor.backends import backend_of
from scaledtensor.errors import SaturationWarning
from scaledtensor.formats import Format
from scaledtensor.ops.algebra import elements
from scaledtensor.ops.registry import observers
from scaledtensor.recipes import Unit
from scaledtensor.recipes.casts import EXPONENTS, Cast
from scaledtensor.scales.measure import (
    amax_and_squares,
    at_limit,
    beyond,
    rounds_to_zero,
    underflowed,
)
from scaledtensor.tensors import verbs
from scaledtensor.tensors.site import GRADIENT, INPUT, Seen, Site
from scaledtensor.tensors.tensor import ScaledTensor, is_parameter

__all__ = [
    "GRADIENT",
    "INPUT",
    "LOST_FOR_GOOD",
    "Site",
    "calibrating",
    "fitted",
    "is_calibrating",
    "look_at_cast",
    "look_at_inputs",
    "look_back",
    "looks",
    "place",
    "take_over",
    "tell",
    "trains",
]

#: Shares of the elements of one cast from which on a warning says that they are lost: beyond the
#: format in training, where the next look mends it; beyond it where nothing will; and rounded to
#: zero although they are no zeros, which no scale mends where other elements fill the format.
_LOST, LOST_FOR_GOOD, _VANISHED = 0.001, 0.01, 0.1

_WHAT = ("inputs", "gradients")

#: The kinds of loss that a warning was given of.
_told: set[str] = set()
_calibrating = 0
#: Whether compiled code found in this step that elements saturate. A site whose inputs were wrong
#: for that has seen nothing yet.
settling = False


@contextmanager
def calibrating() -> Iterator[None]:
    """Every site looks, whatever step it is and whether gradients are recorded or not."""
    global _calibrating
    _calibrating += 1
    try:
        yield
    finally:
        _calibrating -= 1


def is_calibrating() -> bool:
    return _calibrating > 0


def looks(weight: Any) -> bool:
    """Whether a product of a parameter is to measure its operands."""
    site = weight.site
    if observers or (site is None and not _calibrating):
        return False  # a report shows what every step does
    recipe = weight.recipe
    if not isinstance(recipe, Unit) or recipe.gemms.once is None or not _is_real(weight):
        return False
    if _calibrating:
        return True
    if not recipe.guard:
        return False
    return site.is_due() if trains() else site.new and not site.glanced


#: Of the products without a weight: when they are looked at.
beside = Site(new=True)


def tells(operands: Sequence[Any], recipe: Any) -> bool:
    """Whether a product without a weight has shifts, which is never so. In the steps that look, a
    cast that loses elements is told of."""
    if "saturated" in _told or not isinstance(recipe, Unit) or not recipe.guard:
        return False
    fmt = recipe.gemms.once[0].format if recipe.gemms.once else recipe.activation
    if fmt.bits != 8 or observers or not all(map(_is_wide, operands)) or not beside.is_due():
        return False
    for x in operands:
        q, largest, _ = amax_and_squares(elements(x).detach())
        lost = _share(beyond(q.abs(), fmt), q) if largest > fmt.max else 0.0
        if lost > LOST_FOR_GOOD:
            tell(
                "saturated",
                f"{lost:.1%} of an operand of the product of {_shapes(operands)} are beyond "
                f"{fmt.name}'s largest value. The product has no weight whose shifts would correct "
                "it: normalise its operands, multiply what they .dequantize() to, or take "
                "torch.nn.functional.scaled_dot_product_attention if this is attention",
            )
    return False


def _shapes(operands: Sequence[Any]) -> str:
    return " and ".join(str([*x.shape]) for x in operands)


def _is_wide(x: Any) -> bool:
    """Whether `x` holds numbers that a cast to 8 bits may lose."""
    return isinstance(x, ScaledTensor) and x.format.bits > 8 and x.numel() > 0 and _is_real(x)


def trains() -> bool:
    """Whether what runs is for a backward pass, or is recomputed in one, or will be."""
    recorded = torch.is_grad_enabled() or _torch.is_within_backward()
    return recorded or _torch.innermost_checkpoint() is not None


def _look(weight: Any, role: int, x: Any) -> None:
    """Measure `x`, an operand in that role that is about to be cast, and set the shift of the role
    in the recipe of `weight` so that the cast holds `x`."""
    fmt = weight.recipe.gemms.once[2 if role == GRADIENT else 0].format
    if not isinstance(x, ScaledTensor) or fmt.bits > 8 or x.format.bits <= 8 or not x.numel():
        return
    site = weight.site = weight.site or Site()
    shift = weight.recipe.shifts[role]
    q, largest, squares = amax_and_squares(elements(x).detach())
    corrects = bool(_calibrating) or trains()
    if fmt.bits == 8:
        _tell(site, weight, role, q, largest, fmt, shift, corrects)
    if not corrects:
        site.glanced = True
        return
    found = site.seen[role] = site.seen[role].and_of(largest, squares, q.numel())
    if is_parameter(weight) and not weight.requires_grad:
        site.new = False  # no step will end
    fitting = fitted(found, fmt, shift)
    if role == INPUT and math.ldexp(found.least, -fitting) < rounds_to_zero(fmt):
        tell(
            "apart",
            f"{_named(site, weight)} has several products, and the inputs of one are too small for "
            f"{fmt.name} beside those of another: no one shift holds both, and the small ones are "
            "cast to zero. Normalise them, or keep these products wide: "
            "overrides={'<its module>': None}",
        )
    if is_parameter(weight):
        site.next[role] = None  # what a view of it found before was of fewer operands
    if fitting != shift:
        shifts = list(weight.recipe.shifts)
        shifts[role] = fitting
        weight.recipe = replace(weight.recipe, shifts=(shifts[INPUT], shifts[GRADIENT]))
        if is_parameter(weight):
            site.found = weight.recipe.shifts
        else:  # a view of the weight, which takes it when this step ends
            site.next[role] = fitting


def fitted(seen: Seen, fmt: Format, shift: int, anew: bool = False) -> int:
    """The shift under which elements fit into `fmt`: the present one wherever they do, unless it is
    to be found `anew`."""
    if not seen.largest:
        return shift
    rms, least = math.sqrt(seen.squares / seen.number), 2 * fmt.min_normal
    significand, exponent = math.frexp(seen.largest / fmt.max)
    fits = exponent - (significand == 0.5)
    low = min(fits, math.floor(math.log2(rms / least)))
    found = round(math.log2(rms))
    if seen.least < rms / 2:
        found = min(found, math.floor(math.log2(seen.least / least)))
    found = max(found, low)
    saturates = math.ldexp(seen.largest, -shift) > fmt.max and shift < found
    vanishes = math.ldexp(seen.least, -shift) < min(least, 0.25)
    return _within(found) if anew or saturates or vanishes else shift


def _within(shift: int) -> int:
    return min(max(shift, EXPONENTS[0]), EXPONENTS[-1])


#: (share of the elements that saturate, by how much a shift grows then), for who cannot see how far
#: beyond the format they were.
_GROWTH = ((0.5, 8), (0.1, 4), (0.01, 2), (_LOST, 1))


def look_at_cast(
    site: Site, role: int, q: Tensor, factors: Tensor, fmt: Format, corrects: bool
) -> None:
    """Look at `q`, an operand in that role after its cast by compiled code under the factors of its
    weight, and note the shift that it is to have when the code runs again."""
    factor = float(factors[role])
    shift = math.frexp(factor)[1] - 1
    q = q.detach().float() if q.dtype.itemsize == 1 else q.detach()
    q, amax, sum_of_squares = amax_and_squares(q)
    lost = _share(at_limit(q.abs(), fmt), q) if amax == fmt.max else 0.0
    if lost > LOST_FOR_GOOD:
        _tell_saturated(site.name or "a weight", role, lost, fmt, "compiled" if corrects else "")
    if not corrects:
        site.glanced = True
        return
    squares = sum_of_squares * factor**2
    seen = site.seen[role] = site.seen[role].and_of(amax * factor, squares, q.numel())
    if site.sought[role] == shift:  # the code runs again, and no step of an optimizer said so
        site.sought[role], site.settling[role] = None, True
        seen = site.seen[role] = Seen().and_of(amax * factor, squares, q.numel())
    _seek(site, role, fmt, shift, lost, vanished=amax == 0)
    found = site.sought[role]
    if found is None:
        found = fitted(seen, fmt, shift, site.settling[role])
    site.next[role] = None if found == shift else found


def _seek(site: Site, role: int, fmt: Format, shift: int, lost: float, vanished: bool) -> None:
    """Seek a shift between the ones that lose elements: a greater one where elements saturate, and
    a smaller one where growth went too far for another product of the weight."""
    global settling
    low, high = site.between[role]
    growth = next((more for least, more in _GROWTH if lost > least), 0)
    if growth:
        low = shift if low is None else max(low, shift)
        sought = _within(shift + growth)
        least = site.seen[role].least
        bounds = [] if high is None else [(shift + high) // 2]
        if least < math.inf:
            bounds.append(math.floor(math.log2(least / (2 * fmt.min_subnormal))))
        sought = min([sought, *(max(bound, shift + 1) for bound in bounds)])
        known = site.sought[role]
        site.sought[role] = sought if known is None else max(sought, known)
    elif vanished and low is not None and shift > low + 1:
        high = shift
        site.sought[role] = (low + shift) // 2
    else:
        return
    site.between[role] = low, high
    settling = True


def _share(lost: Tensor, q: Tensor) -> float:
    """The share of the elements of `q` that a count of them is."""
    return float(lost) / q.numel()


def tell(kind: str, message: str) -> None:
    """Warn of a loss, once in a process for each kind."""
    if kind not in _told:
        _told.add(kind)
        warnings.warn(message, SaturationWarning, stacklevel=3)


def _named(site: Site, weight: Any) -> str:
    return site.name or f"a weight of {[*weight.shape]}"


def _tell(
    site: Site,
    weight: Any,
    role: int,
    q: Tensor,
    largest: float,
    fmt: Format,
    shift: int,
    corrects: bool,
) -> None:
    """Warn, once for each kind of loss, of the first cast that loses elements. `corrects` says
    whether the shift is set before this cast."""
    name = _named(site, weight)
    # A new site loses nothing where it corrects, since no cast came before. So does calibration.
    nothing = corrects and (site.new or _calibrating)
    factor = math.ldexp(1.0, shift)
    fits = nothing or largest <= fmt.max * factor
    lost = 0.0 if fits else _share(beyond(q.abs(), fmt, factor), q)
    if lost > (_LOST if corrects else LOST_FOR_GOOD):
        _tell_saturated(name, role, lost, fmt, "eager" if corrects else "")
    if role == GRADIENT or "vanished" in _told:  # gradients have no smallest value that matters
        return
    least = rounds_to_zero(fmt) * factor
    if _share((q.abs() <= least).sum(), q) <= _VANISHED:  # in one pass: this counts zeros too
        return
    vanished = _share(underflowed(q.abs(), fmt, factor), q)
    if vanished > _VANISHED and largest > least * 2.0**8:
        tell(
            "vanished",
            f"{vanished:.1%} of the inputs of {name} are too small for {fmt.name} beside the "
            "largest ones, and are cast to zero: no one scale holds both. Normalise them, or keep "
            "this product wide: overrides={'<its module>': None}",
        )


#: What happens to the shifts of a weight, by who met elements beyond a format.
_CORRECTED = {
    "eager": "The shifts of this weight are corrected now; steps since the last look lost these",
    "compiled": "The shifts of this weight are corrected from the next step on",
    "": "Outside of training nothing corrects it",
}


def _tell_saturated(name: str, role: int, lost: float, fmt: Format, who: str) -> None:
    tell(
        "saturated",
        f"{lost:.1%} of the {_WHAT[role]} of {name} are beyond {fmt.name}'s largest value: the "
        "terms that they are sums of are correlated, which the rules do not know. "
        f"{_CORRECTED[who]}. scaledtensor.calibrate(model, batches) corrects all weights "
        "beforehand",
    )


def place(operands: Sequence[Any], weight: Any) -> int:
    """Which of the operands is the weight: the second, if none is known to be."""
    return next((i for i, x in enumerate(operands) if x is weight), 1)


def look_at_inputs(weight: Any, operands: Sequence[Any]) -> tuple[Cast, Cast, Cast]:
    """Look at the other operands of a product of `weight`; the casts that its recipe has then."""
    for x in operands:
        if x is not weight:
            _look(weight, INPUT, x)
    casts: tuple[Cast, Cast, Cast] = weight.recipe.gemms.once
    return casts


def look_back(weight: Any, y: Any) -> Any:
    """`y`, a product of `weight`, whose gradient is looked at when it comes."""
    shift = weight.recipe.shifts[GRADIENT]  # which the cast of the gradient has

    def looked(grad: Any) -> Any:
        # The recipe may be another by now: the backward pass of a graph keeps to its own casts.
        if not isinstance(grad, ScaledTensor) or not isinstance(weight.recipe, Unit):
            return None
        _look(weight, GRADIENT, grad)
        return verbs.shifted(grad, weight.recipe.shifts[GRADIENT] - shift)

    if isinstance(y, ScaledTensor) and y.requires_grad:
        y.register_hook(looked)  # type: ignore[no-untyped-call]
    return y


def take_over(weight: Any, source: Tensor) -> None:
    """A weight is overwritten by one that was scaled before, as when a checkpoint is loaded: what
    was found of that one's operands comes along."""
    theirs = source.recipe if isinstance(source, ScaledTensor) else None
    if isinstance(source, ScaledTensor) and source.site is not None:
        theirs = source.site.corrected(theirs)
    if isinstance(weight.recipe, Unit) and isinstance(theirs, Unit):
        weight.recipe = replace(weight.recipe, shifts=theirs.shifts)
        # A file has no site: what it holds has seen steps.
        weight.site.new = isinstance(source, ScaledTensor) and bool(source.site and source.site.new)
        weight.site.forget()


def _is_real(weight: ScaledTensor) -> bool:
    """Whether there are numbers to read: not while code is compiled, exported or transformed."""
    if torch.compiler.is_compiling() or _torch.is_tracing(weight.qdata):
        return False
    return backend_of(weight.qdata).has_elements
