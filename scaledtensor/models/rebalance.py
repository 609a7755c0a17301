"""`rebalance`: new scales for tensors whose values have outgrown their present ones.

A tensor that is written in place keeps its scale and its expected RMS, as a parameter does from one
step to the next. Rules trust this RMS, and training drifts away from it. `statistics` measures the
drift, and `rebalance` corrects it. A recipe rebalances the parameters every few steps of an
optimizer, without waiting for a device. A rebalance reads every element, so it does not pay in
every step.
"""

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from scaledtensor.errors import DTypeError, ScaleError, UnsupportedError
from scaledtensor.formats.tensors import covers_storage
from scaledtensor.ops.algebra import elements
from scaledtensor.ops.results import store
from scaledtensor.scales.measure import (
    amax,
    at_limit,
    finite_magnitudes,
    measured_rms,
    root_mean_square,
    underflowed,
)
from scaledtensor.scales.powers import MIN_SCALE, nearest_power_of_two, power_of_two_near
from scaledtensor.scales.singles import Single, put, rms_of, rounded, scale_of, single_of, tensor_of
from scaledtensor.tensors.coded import CodedTensor
from scaledtensor.tensors.memo import after_write
from scaledtensor.tensors.ruled import Ruled
from scaledtensor.tensors.shards import (
    by_groups,
    is_sharded,
    of_all_parts,
    part_of,
    squares_and_amax,
)
from scaledtensor.tensors.steps import Held
from scaledtensor.tensors.tensor import ScaledTensor, is_stored

__all__ = ["Statistics", "rebalance", "rebalance_every", "statistics"]


@dataclass(frozen=True)
class Statistics:
    """The numbers that `statistics` measures on the elements of a ScaledTensor."""

    rms: float
    """RMS(qdata). The rules hold it near 1."""
    amax: float
    """The largest finite |qdata|."""
    drift: float
    """log2 of the measured RMS of the value, divided by the RMS that rules expect; 0 for zeros.
    From 1 or -1 on, the scales of results computed from this tensor are one power of two off."""
    saturated: float
    """Share of the finite elements at or beyond the largest value of the recipe's forward format,
    or of their own format if there is no recipe."""
    underflowed: float
    """Share of the finite elements that are not zero and that this format rounds to zero."""


def statistics(x: ScaledTensor | CodedTensor) -> Statistics:
    """Measure a ScaledTensor or a CodedTensor. It waits for the tensor's device.

    Raises:
        DTypeError: `x` is neither.
    """
    if not isinstance(x, Ruled):
        raise DTypeError(f"statistics are of a ScaledTensor; got {type(x).__name__}")
    held = x.widened()
    size = finite_magnitudes(elements(held).detach().double())
    n = max(size.numel(), 1)
    fmt = x.format if x.recipe is None else x.recipe.forward
    rms = float(root_mean_square(size))
    value, expected = rms * float(held.scale), float(held.rms)
    return Statistics(
        rms=rms,
        amax=float(amax(size)),
        drift=math.log2(value / expected) if value and expected else 0.0,
        saturated=float(at_limit(size, fmt)) / n,
        underflowed=float(underflowed(size, fmt)) / n,
    )


def rebalance(
    target: ScaledTensor | nn.Module | Optimizer, by: Literal["rms", "amax"] = "rms"
) -> int:
    """Give tensors the scale that fits their present values, in place.

    Args:
        target: a ScaledTensor that is no part of a larger one; or a module, for its parameters and
            buffers; or an optimizer, for its states.
        by: "rms" makes RMS(qdata) as near to 1 as a power of two can. "amax" puts the largest
            |qdata| between half of the largest value of the recipe's forward format and this value.
            An 8-bit tensor without a recipe takes its own format.

    Values stay the same, to the bit if their format holds them under the new scale. The expected
    RMS becomes the measured one. Views see the new scale. Tensors of zeros are left alone, and so
    are a module's weights that `Recipe.store_frozen` keeps as products cast them.

    Returns:
        How many scales changed.

    Raises:
        DTypeError: `target` is none of these.
        ScaleError: `by` has another value.
        UnsupportedError: `target` is a part of a tensor, which has the scale of the whole, or a
            CodedTensor, whose codes and scales are made together; or "amax" has no 8-bit format to
            fill.
    """
    if by not in ("rms", "amax"):
        raise ScaleError(f"rebalance is by 'rms' or 'amax'; got {by!r}")
    if isinstance(target, Ruled):
        if not isinstance(target, ScaledTensor) or not covers_storage(target.qdata):
            raise UnsupportedError(
                "rebalance changes the scale of a whole tensor: pass that of which this is a view;"
                " codes under block scales are made anew with scaledtensor.scaled()"
            )
        return int(_rebalanced(target, by))
    return sum(map(int, _all_rebalanced(_tensors(target), by)))


def rebalance_every(optimizer: Optimizer, steps: int, by: Literal["rms", "amax"] = "rms") -> Any:
    """Rebalance the parameters and states of `optimizer` after every `steps` of its steps.

    Returns:
        The handle of a hook. Its `remove()` ends the rebalancing.

    Raises:
        ScaleError: `steps` is not a positive int, or `by` is unknown.
    """
    if not isinstance(steps, int) or isinstance(steps, bool) or steps < 1:
        raise ScaleError(f"rebalance_every takes a positive number of steps; got {steps!r}")
    if by not in ("rms", "amax"):
        raise ScaleError(f"rebalance is by 'rms' or 'amax'; got {by!r}")
    done = 0

    def after_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        nonlocal done
        done += 1
        if done % steps == 0:
            parameters = [p for group in optimizer.param_groups for p in group["params"]]
            _all_rebalanced([*parameters, *_tensors(optimizer)], by)

    hook: Callable[..., Any] = after_step
    return optimizer.register_step_post_hook(hook)


def _tensors(target: Any) -> list[Any]:
    if isinstance(target, nn.Module):
        return [*target.parameters(), *target.buffers()]
    if isinstance(target, Optimizer):
        return [t for state in target.state.values() for t in state.values()]
    raise DTypeError(
        f"rebalance takes a ScaledTensor, a module or an optimizer; got {type(target).__name__}"
    )


def _all_rebalanced(tensors: Iterable[Any], by: str) -> list[Tensor]:
    """Rebalance the tensors that can be; whether the scale of each of these changed."""
    tensors = list(tensors)
    whole = [_rebalanced(x, by) for x in tensors if _is_whole(x)]
    return [*whole, *_parts_rebalanced(filter(_is_spread, tensors), by)]


def _is_whole(x: Any) -> bool:
    return type(x) is ScaledTensor and covers_storage(x.qdata) and not is_stored(x)


def _is_spread(x: Any) -> bool:
    return is_sharded(x) and type(part_of(x)) is ScaledTensor and not is_stored(part_of(x))


#: The key under which a group of parameters counts its steps, so that checkpoints hold the count.
COUNT = "steps_for_rebalance"


def after_step(held: Held) -> None:
    """Rebalance parameters after a step of an optimizer, as often as `Recipe.rebalance` says."""
    for group, ours in held:
        periods = [(p, _period(p)) for p in ours]
        if not any(every for _, every in periods):
            continue
        group[COUNT] = done = group.get(COUNT, 0) + 1
        due = [p for p, every in periods if every and done % every == 0 and _was_written(p)]
        _all_rebalanced(due, "rms")
        for p in due:
            vars(p)[_SEEN] = p._version


#: The attribute for the number of writes into a parameter that its last rebalance has seen.
_SEEN = "_rebalanced_after"


def _was_written(p: Any) -> bool:
    """Whether a parameter may have changed since its last rebalance. A backward pass may still need
    the numbers of others, which this step did not touch. A part is always measured with the others
    of its tensor."""
    return is_sharded(p) or p.grad is not None or vars(p).get(_SEEN, 0) != p._version


def _period(p: Any) -> int:
    """The number of steps from one rebalance of a parameter to the next; 0 for none."""
    recipe = part_of(p).recipe
    return 0 if recipe is None else recipe.rebalance


@torch.no_grad()
def _rebalanced(x: ScaledTensor, by: str) -> Tensor:
    """Rebalance `x`; whether its scale changed, as a tensor on its device."""
    if by == "rms" and (rms_under := _rms_where_the_scale_stays(x)) is not None:
        put(x, rms=rms_under)
        return torch.zeros((), dtype=torch.bool)
    value = elements(x).double() * _scale(x).double()
    rms = measured_rms(value)
    scale = nearest_power_of_two(rms) if by == "rms" else _filling(float(amax(value)), x)
    return _put(x, value, scale, rms)


def _rms_where_the_scale_stays(x: ScaledTensor) -> Single | None:
    """The RMS if the host has the scale and the scale stays, else None.

    This is the usual case, in which no element is written. The RMS is measured on the elements: a
    power of two as a factor changes no digit of a sum.
    """
    scale = scale_of(x)
    if not isinstance(scale, Single) or math.frexp(scale)[0] != 0.5:
        return None
    rms = Single(rounded(measured_rms(elements(x)).item() * float(scale)))
    return rms if rms > MIN_SCALE and power_of_two_near(rms) == scale else None


@torch.no_grad()
def put_under(x: ScaledTensor, scale: Tensor, rms: Tensor) -> Tensor:
    """Hold the values of `x`, whose RMS is `rms`, under `scale`, in place; whether the scale
    changed. Zeros keep their scale."""
    return _put(x, elements(x).double() * _scale(x).double(), scale, rms)


def _put(x: ScaledTensor, value: Tensor, scale: Tensor, rms: Tensor) -> Tensor:
    """The same as `put_under`, for values that were computed before."""
    before = _scale(x)
    scale = torch.where(rms > 0, scale, before)
    changed = scale != before
    x.qdata.copy_(store((value / scale.double()).float(), x.format))
    put(x, single_of(scale), single_of(torch.where(rms > 0, rms, tensor_of(rms_of(x)))))
    return changed


def _scale(x: ScaledTensor) -> Tensor:
    """The scale as a tensor to read. A tensor that holds a number for it keeps the number."""
    return tensor_of(scale_of(x))


@torch.no_grad()
def _parts_rebalanced(tensors: Iterable[Any], by: str) -> Iterator[Tensor]:
    """The same as `_rebalanced` for tensors that are spread over ranks: by the numbers of the whole
    tensor, in one collective for each group of ranks."""
    for groups, sharded in by_groups(tensors).items():
        parts = [part_of(x) for x in sharded]
        found = of_all_parts(torch.stack([squares_and_amax(part) for part in parts]), groups)
        squares, largest = found[..., 0].sum(0), found[..., 1].amax(0)
        for x, part, square, most in zip(sharded, parts, squares, largest, strict=True):
            rms = (square / max(x.numel(), 1)).sqrt().float()
            scale = nearest_power_of_two(rms) if by == "rms" else _filling(float(most), part)
            yield put_under(part, scale, rms)
            after_write(part)


def _filling(largest: float, x: ScaledTensor) -> Tensor:
    """The power of two that brings the largest finite value into (max / 2, max]."""
    fmt = x.format if x.recipe is None else x.recipe.forward
    if fmt.bits > 8:
        raise UnsupportedError(
            f"by='amax' fills an 8-bit format, and this tensor is {fmt.name} and goes into no "
            "other: use by='rms', or give it a recipe"
        )
    significand, exponent = math.frexp(largest / fmt.max)
    power = math.ldexp(1.0, exponent - (significand == 0.5))
    return torch.full_like(x.scale, min(max(power, 2.0**-126), 2.0**127))
