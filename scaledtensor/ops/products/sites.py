"""Sites: weights that measure the operands of their products and correct the shifts of the casts.

The rules assume that the terms of a sum are independent, and know no data. If terms are correlated
(weights of one sign, averages, outlier channels), the true values are up to sqrt(n) times larger
than the rules expect. That repeats in each layer, and casts to 8 bits saturate. A site is a weight
with the two roles of `Unit.shifts`: its inputs, and the gradients of its results. While a site
looks, it measures each operand just before the cast, and sets the shift of a role that does not
fit:

    a     the largest finite magnitude of the elements, in units of the scale that they carry
    r     their RMS
    F     the largest value of the format, and f its smallest normal one

    found = max(round(log2(r)), min(ceil(log2(a / F)), floor(log2(r / 2f))))

Under this shift nothing saturates, except in 4 bits, where most elements would then have to be
subnormal. A weight with several products gets the smallest shift under which nothing saturates, if
the smallest of their operands needs it. The present shift stays if two conditions hold: first,
a / 2^shift <= F, or the shift is no smaller than `found`; second, r / 2^shift >= min(2f, 1/4).

The elements are relative to the scale that the rules propagate, so a loss times a power of two
changes no shift. The shift becomes part of the weight's recipe: files keep it, `print(model)` shows
it, and compiled code reads it (`scaledtensor.tensors.site`). `scaledtensor.ops.products.counted`
describes the measurements of compiled code. `scaledtensor.models.guard` decides when a site looks.
"""

import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeAlias

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
    within,
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
    "fit",
    "fits",
    "fitted",
    "is_calibrating",
    "look_at_cast",
    "look_at_inputs",
    "look_back",
    "looks",
    "place",
    "product_of_fitted",
    "take_over",
    "tell",
    "trains",
]

#: A warning is given if a larger share of the elements of one cast is lost. The first number is for
#: saturated elements in training, where the next look corrects the shift; the second for saturated
#: elements that nothing corrects; the third for other numbers than 0 that are rounded to zero. No
#: scale corrects the latter if other elements fill the format.
_LOST, LOST_FOR_GOOD, _VANISHED = 0.001, 0.01, 0.1

#: The casts of left operands or inputs, of right operands or weights, and of gradients.
Casts: TypeAlias = tuple[Cast, Cast, Cast]

_WHAT = ("inputs", "gradients")

#: The kinds of loss that a warning has named.
_told: set[str] = set()
_calibrating = 0
#: Whether compiled code found in this step that elements saturate. The inputs of later sites were
#: then wrong, so these sites have seen nothing yet.
settling = False


@contextmanager
def calibrating() -> Iterator[None]:
    """Within this context every site looks, in any step, with and without gradients."""
    global _calibrating
    _calibrating += 1
    try:
        yield
    finally:
        _calibrating -= 1


def is_calibrating() -> bool:
    return _calibrating > 0


def looks(weight: Any) -> bool:
    """Whether a product of a parameter measures its operands."""
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


#: The site of all products without a weight, which decides when they are looked at.
beside = Site(new=True)


def fits(recipe: Any, weight: Any) -> bool:
    """Whether a product has no weight, and so fits its operands and its gradient."""
    return weight is None and isinstance(recipe, Unit) and recipe.guard and not observers


def fit(operands: Sequence[Any], recipe: Any) -> Sequence[Any]:
    """Return the operands of a product without a weight under scales by which their casts to 8 bits
    lose nothing. Only a host measures them. On other devices a measurement is a wait. So the steps
    that look warn of elements that saturate, and the operands stay as they are. A graph measures
    operands that follow from other such products."""
    fmt = recipe.gemms.once[0].format
    if torch.compiler.is_compiling():
        return [verbs.fit(x, fmt.name) if isinstance(x, ScaledTensor) else x for x in operands]
    if fmt.bits != 8 or not all(map(_is_wide, operands)):
        return operands
    if all(backend_of(x).host for x in operands):
        seen = [_seen(x) for x in operands]
        if not any(fitted(held, fmt, 0) for held in seen):
            return operands
        return [verbs.shifted(x, _holding(s, fmt)) for x, s in zip(operands, seen, strict=True)]
    if "saturated" not in _told and beside.is_due():
        for x in operands:
            _tell_beside(x, fmt, operands)
    return operands


def product_of_fitted(product: Callable[[Casts], Any], casts: Casts, recipe: Any) -> Any:
    """Return a product without a weight, whose operands `fit` returned. If the casts make zeros of
    whole rows, as in gated linear attention, the operands are not cast to 8 bits."""
    y = product(casts)
    lost = _zeros(y) if casts[0].format.bits == 8 else 0.0
    if lost > LOST_FOR_GOOD:
        wide = Cast(recipe.activation)
        casts = wide, wide, casts[2]
        with torch.no_grad():  # nothing is saved if the zeros are the product's own
            own = _zeros(product(casts))
        y = product(casts) if lost - own > LOST_FOR_GOOD else y
    _fit_gradient(y, recipe)
    return y


def _zeros(y: Any) -> float:
    """Return the share of elements that are zero; 0 if counting would cost a wait."""
    if not (_is_wide(y) and backend_of(y).host):
        return 0.0
    share: float = within(elements(y).detach(), 0.0) / y.numel()
    return share


def _fit_gradient(y: Any, recipe: Any) -> None:
    """Let the gradient of a product without a weight be cast as `fit` says of its operands."""
    if not (isinstance(y, ScaledTensor) and y.requires_grad and _is_real(y)):
        return
    fmt = recipe.gemms.once[2].format
    if fmt.bits == 8 and y.grad_fn is not None and backend_of(y).host:
        y.register_hook(partial(_fitted_gradient, fmt))  # type: ignore[no-untyped-call]


def _seen(x: ScaledTensor) -> Seen:
    q, largest, squares = amax_and_squares(elements(x).detach())
    return Seen().and_of(largest, squares, q.numel())


def _fitted_gradient(fmt: Format, x: Any) -> Any:
    if not _is_wide(x):
        return x
    seen = _seen(x)
    return verbs.shifted(x, _holding(seen, fmt)) if fitted(seen, fmt, 0) else x


def _tell_beside(x: Any, fmt: Format, operands: Sequence[Any]) -> None:
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


def _shapes(operands: Sequence[Any]) -> str:
    return " and ".join(str([*x.shape]) for x in operands)


def _is_wide(x: Any) -> bool:
    """Whether `x` has numbers that a cast to 8 bits may lose."""
    return isinstance(x, ScaledTensor) and x.format.bits > 8 and x.numel() > 0 and _is_real(x)


def trains() -> bool:
    """Whether this code runs for a backward pass, is recomputed in one, or will be recomputed."""
    recorded = torch.is_grad_enabled() or _torch.is_within_backward()
    return recorded or _torch.innermost_checkpoint() is not None


def looks_again() -> None:
    """Let all sites look in the next step too, since a shift became lower. The format now ends
    closer to the elements, and the first steps may bring far larger ones, as behind a layer scale
    of 1e-6."""
    global settling
    settling = settling or not _calibrating


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
        site.next[role] = None  # a view of the weight found it, from fewer operands
    if fitting < shift:
        looks_again()
    if fitting != shift:
        shifts = list(weight.recipe.shifts)
        shifts[role] = fitting
        weight.recipe = weight.recipe.with_shifts((shifts[INPUT], shifts[GRADIENT]))
        if is_parameter(weight):
            site.found = weight.recipe.shifts
        else:  # a view of the weight, which takes it when this step ends
            site.next[role] = fitting


def fitted(seen: Seen, fmt: Format, shift: int, again: bool = False) -> int:
    """Return the shift under which elements fit into `fmt`. The present shift is kept if they fit,
    except with `again=True`."""
    if not seen.largest:
        return shift
    rms, least = math.sqrt(seen.squares / seen.number), 2 * fmt.min_normal
    low = min(_holding(seen, fmt), math.floor(math.log2(rms / least)))
    found = round(math.log2(rms))
    if seen.least < rms / 2:
        found = min(found, math.floor(math.log2(seen.least / least)))
    found = max(found, low)
    saturates = math.ldexp(seen.largest, -shift) > fmt.max and shift < found
    vanishes = math.ldexp(seen.least, -shift) < min(least, 0.25)
    return _within(found) if again or saturates or vanishes else shift


def _holding(seen: Seen, fmt: Format) -> int:
    """Return the least shift under which nothing saturates, so that small elements count too."""
    if not seen.largest:
        return 0
    significand, exponent = math.frexp(seen.largest / fmt.max)
    return _within(exponent - (significand == 0.5))


def _within(shift: int) -> int:
    return min(max(shift, EXPONENTS[0]), EXPONENTS[-1])


#: (share of the elements that saturate, growth of the shift). Compiled code uses it, since it
#: cannot see how far beyond the format the elements were.
_GROWTH = ((0.5, 8), (0.1, 4), (0.01, 2), (_LOST, 1))


#: The least shift that compiled code tries for a gradient that is all zeros.
_LOWEST = EXPONENTS[0]


def look_at_cast(
    site: Site, role: int, q: Tensor, factors: Tensor, fmt: Format, corrects: bool
) -> None:
    """Look at `q`, an operand that compiled code cast under the factors of its weight, and note the
    shift for the next run of the code."""
    factor = float(factors[role])
    shift = math.frexp(factor)[1] - 1
    q = q.detach().float() if q.dtype.itemsize == 1 else q.detach()
    q, amax, sum_of_squares = amax_and_squares(q)
    lost = _share(at_limit(q.abs(), fmt), q) if amax == fmt.max else 0.0
    low, high = site.between[role]
    seeks_below = corrects and low is None and high is not None
    if lost > LOST_FOR_GOOD and not seeks_below:
        _tell_saturated(site.name or "a weight", role, lost, fmt, "compiled" if corrects else "")
    if not corrects:
        site.glanced = True
        return
    squares = sum_of_squares * factor**2
    seen = site.seen[role] = site.seen[role].and_of(amax * factor, squares, q.numel())
    if site.sought[role] == shift:  # the code runs again without a step of an optimizer
        site.sought[role], site.settling[role] = None, True
        seen = site.seen[role] = Seen().and_of(amax * factor, squares, q.numel())
    _seek(site, role, fmt, shift, lost, vanished=amax == 0)
    found = site.sought[role]
    if found is None:
        found = fitted(seen, fmt, shift, site.settling[role])
    site.next[role] = None if found == shift else found
    if found < shift:
        looks_again()


def _seek(site: Site, role: int, fmt: Format, shift: int, lost: float, vanished: bool) -> None:
    """Seek a shift between the shifts that lose elements: a greater one if elements saturate, and a
    smaller one if it grew too far for another product of the weight, or if a whole gradient
    vanished twice. A gradient may also be zero: the layers before a branch that starts at zero have
    none in the first step. So this search begins with the second look, and ends at `_LOWEST`."""
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
    elif vanished and role == GRADIENT and low is None and (high is None or shift <= high):
        lower = shift if high is None else shift - math.floor(math.log2(fmt.max))
        high = shift
        site.sought[role] = lower if lower >= _LOWEST else 0
    else:
        return
    site.between[role] = low, high
    settling = True


def _share(lost: Tensor, q: Tensor) -> float:
    """Return a count of elements of `q` as a share."""
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
    # A new site that corrects loses nothing, since no cast came before. Neither does a site that
    # looked in the step before, nor calibration.
    nothing = corrects and (site.new or site.followed or _calibrating)
    factor = math.ldexp(1.0, shift)
    fits = nothing or largest <= fmt.max * factor
    lost = 0.0 if fits else _share(beyond(q.abs(), fmt, factor), q)
    if lost > (_LOST if corrects else LOST_FOR_GOOD):
        _tell_saturated(name, role, lost, fmt, "eager" if corrects else "")
    if role == GRADIENT or "vanished" in _told:  # gradients have no smallest value that matters
        return
    least = rounds_to_zero(fmt) * factor
    if least < 0 or within(q, least) <= _VANISHED * q.numel():  # this counts zeros too
        return
    vanished = _share(underflowed(q.abs(), fmt, factor), q)
    if vanished > _VANISHED and largest > least * 2.0**8:
        tell(
            "vanished",
            f"{vanished:.1%} of the inputs of {name} are too small for {fmt.name} beside the "
            "largest ones, and are cast to zero: no one scale holds both. Normalise them, or keep "
            "this product wide: overrides={'<its module>': None}",
        )


#: kind of the code that met elements beyond a format -> the end of its warning.
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
    """Return the index of the weight among the operands; 1 if none is known to be the weight."""
    return next((i for i, x in enumerate(operands) if x is weight), 1)


def look_at_inputs(weight: Any, operands: Sequence[Any]) -> Casts:
    """Look at the other operands of a product of `weight`, and return the casts that its recipe
    then has."""
    for x in operands:
        if x is not weight:
            _look(weight, INPUT, x)
    casts: Casts = weight.recipe.gemms.once
    return casts


def look_back(weight: Any, y: Any) -> Any:
    """Return `y`, a product of `weight`, with a hook that looks at its gradient."""
    shift = weight.recipe.shifts[GRADIENT]  # which the cast of the gradient has

    def looked(grad: Any) -> Any:
        # The recipe may have changed, but the backward pass of a graph keeps its own casts.
        if not isinstance(grad, ScaledTensor) or not isinstance(weight.recipe, Unit):
            return None
        _look(weight, GRADIENT, grad)
        return verbs.shifted(grad, weight.recipe.shifts[GRADIENT] - shift)

    if isinstance(y, ScaledTensor) and y.requires_grad:
        y.register_hook(looked)  # type: ignore[no-untyped-call]
    return y


def take_over(weight: Any, source: Tensor) -> None:
    """Give a weight the shifts of `source`, which overwrites it, as when a checkpoint is loaded."""
    theirs = source.recipe if isinstance(source, ScaledTensor) else None
    if isinstance(source, ScaledTensor) and source.site is not None:
        theirs = source.site.corrected(theirs)
    if isinstance(weight.recipe, Unit) and isinstance(theirs, Unit):
        weight.recipe = weight.recipe.with_shifts(theirs.shifts)
        # A file has no site, and its values have seen steps.
        weight.site.new = isinstance(source, ScaledTensor) and bool(source.site and source.site.new)
        weight.site.forget()


def _is_real(weight: ScaledTensor) -> bool:
    """Whether a weight has numbers to read. It has none while code is compiled or exported."""
    if torch.compiler.is_compiling() or _torch.is_tracing(weight.qdata):
        return False
    return backend_of(weight.qdata).has_elements
