"""The hooks of optimizers' steps, which exist as long as a parameter with a recipe is alive.

A recipe has actions before and after each step of an optimizer (`_BEFORE` and `_AFTER`). The
optimizer may be made before the parameters are scaled or after, in any code, and torch has no hook
for this. It has hooks that all optimizers call at each of their steps. So the first parameter with
a recipe registers two of these hooks. At each step they check whether the optimizer holds such
parameters, and do nothing for any other optimizer. The last such parameter removes the hooks.
"""

import weakref
from collections.abc import Callable, Iterable
from importlib import import_module
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from scaledtensor import _torch
from scaledtensor.backends import backend_of
from scaledtensor.scales.singles import calculates
from scaledtensor.tensors.shards import is_dtensor, is_dtensor_class, is_sharded, part_of
from scaledtensor.tensors.tensor import ScaledTensor

__all__ = [
    "FUNCTIONS",
    "MARK",
    "Held",
    "adopt_states",
    "held",
    "is_scaled",
    "is_update",
    "optimizers",
    "watch",
]

Held: TypeAlias = list[tuple[dict[str, Any], list[Any]]]
"""The groups of an optimizer that hold ScaledTensors, each with its ScaledTensors. DTensors of
ScaledTensors are included."""

#: The actions before a step and after it, in this order. Each is a module and its function of
#: `Held`. The modules belong to higher floors, so they are named here, and a step loads them.
_BEFORE = (("scaledtensor.models.scale_model", "refuse_stored"),)
_AFTER = (
    ("scaledtensor.models.delayed", "after_step"),
    ("scaledtensor.models.rebalance", "after_step"),
    ("scaledtensor.models.guard", "after_step"),
)
_AFTER_SPREAD = (("scaledtensor.distributed.gather", "after_step"),)

#: The attribute by which a parameter keeps the hooks.
MARK = "_keeps_step_hooks"


class _Kept:
    """One object that all parameters hold. It dies with the last parameter. (Weak references to the
    parameters themselves would keep `Module.to` from swapping them.)"""

    def __init__(self) -> None:
        self.optimizers: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        """The optimizers that have stepped such parameters."""


def _nothing() -> None:
    return None


_kept: Callable[[], _Kept | None] = _nothing  # a weak reference, once there is something
_handles: list[Any] = []


def watch(x: ScaledTensor) -> None:
    """Make the steps of an optimizer that holds `x` run the actions of recipes. `x` is a parameter,
    or this rank's part of one."""
    global _kept
    if x.recipe is None or MARK in vars(x):
        return
    kept = _kept()
    if kept is None:
        kept = _Kept()
        _kept = weakref.ref(kept)
        weakref.finalize(kept, _release).atexit = False
        if not _handles:
            _handles.append(register_optimizer_step_pre_hook(_before))
            _handles.append(register_optimizer_step_post_hook(_after))
    vars(x)[MARK] = kept


def _release() -> None:
    """Remove the hooks, after the last parameter was deleted."""
    if _kept() is not None:  # there is a new parameter by now
        return
    if _torch.is_within_step(in_any_thread=True):
        # torch may be iterating over its hooks, since garbage is collected at any time. The next
        # collection finds this cycle, and calls this function again.
        cycle = _Kept()
        vars(cycle)["itself"] = cycle
        weakref.finalize(cycle, _release).atexit = False
        return
    while _handles:
        _handles.pop().remove()


def _requires_grad(x: Tensor, requires_grad: bool = True) -> Tensor:
    """`nn.Parameter` calls this, and so does other code that makes a leaf of a tensor."""
    if isinstance(x, ScaledTensor) and not torch.compiler.is_compiling():
        watch(x)
    return x.requires_grad_(requires_grad)


#: The function that makes a parameter of a ScaledTensor.
FUNCTIONS: dict[Any, Callable[..., Any]] = {Tensor.requires_grad_: _requires_grad}


def is_update() -> bool:
    """Whether this code calculates an update of parameters: it is in the step of an optimizer, and
    not in a closure, which runs the model with gradients."""
    return not torch.is_grad_enabled() and _torch.is_within_step()


# --- the hooks -------------------------------------------------------------------------------


def held(optimizer: Optimizer) -> Held:
    """The ScaledTensors among the parameters of an optimizer, by group; empty without any.

    Each step of every optimizer calls this. So it collects the classes of the parameters first,
    which takes 15 us for 1,000 parameters.
    """
    found = []
    for group in optimizer.param_groups:
        kinds = set(map(type, group["params"]))
        if any(issubclass(kind, ScaledTensor) or is_dtensor_class(kind) for kind in kinds):
            ours = [p for p in group["params"] if is_scaled(p)]
            if ours:
                found.append((group, ours))
    return found


def is_scaled(p: Any) -> bool:
    """Whether a parameter is a ScaledTensor or a DTensor of one."""
    return isinstance(p, ScaledTensor) or is_sharded(p)


@_torch.uncompiled
def _before(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    # Actions read attributes of hundreds of tensors. Each read would ask `__torch_function__`.
    with _torch.disable_torch_function():
        found = held(optimizer)
        _do(_BEFORE, found)
        _choose_fused(optimizer, found)
        kept = _kept()
        if found and kept is not None:
            kept.optimizers.add(optimizer)
            adopt_states(
                optimizer, (p for _, ours in found for p in ours if isinstance(p, ScaledTensor))
            )


@_torch.uncompiled
def _after(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    with _torch.disable_torch_function():
        found = held(optimizer)
        _let_choose(found)
        _do(_AFTER, found)
        if any(is_dtensor(p) for _, ours in found for p in ours):
            _do(_AFTER_SPREAD, found)


# --- Adam's choice ---------------------------------------------------------------------------
# An Adam that is given neither `fused` nor `foreach` chooses by the classes of its parameters, and
# steps subclasses of Tensor one operator at a time. On a CPU the fused step takes a tenth of that.

#: The choice of `fused` in a group, during a step. It is true, and no program gives it.
_CHOSEN = 1


def _choose_fused(optimizer: Optimizer, found: Held) -> None:
    if not isinstance(optimizer, torch.optim.Adam):
        return
    steps_itself = getattr(optimizer, "_steps_itself", None)
    if type(optimizer) not in (torch.optim.Adam, torch.optim.AdamW) and (
        steps_itself is None or steps_itself()
    ):
        return  # a class that may have a step of its own
    for group, ours in found:
        if (
            group["fused"] is None
            and group["foreach"] is None
            and not (group["capturable"] or group["differentiable"] or group["amsgrad"])
            and all(map(_calculates, ours))
            and all(p.is_floating_point() for p in group["params"])
        ):
            group["fused"] = _CHOSEN


def _calculates(p: Any) -> bool:
    """Whether a fused step reads nothing that is on another device: torch puts the count of steps
    there, and the rule would wait for it."""
    part = part_of(p)
    return type(part) is ScaledTensor and backend_of(part).host and calculates(part)


def _let_choose(found: Held) -> None:
    for group, _ in found:
        if type(group.get("fused")) is int:
            group["fused"] = None


# --- states ----------------------------------------------------------------------------------


def optimizers() -> list[Optimizer]:
    """The optimizers that have stepped a parameter with a recipe."""
    kept = _kept()
    return [] if kept is None else list(kept.optimizers)


@torch.no_grad()
def adopt_states(optimizer: Optimizer, parameters: Iterable[Tensor]) -> None:
    """Convert states of the elements of a parameter that became a ScaledTensor, or a plain tensor,
    after the states were made (or loaded). They become the kind that the optimizer would make now.

    The optimizer could compute with the old states too. But a plain state would be measured for
    each operator that takes it together with a ScaledTensor. An optimizer with its own kind of
    states (`optim.LowPrecision`) keeps them.
    """
    itself = getattr(optimizer, "_steps_itself", None)
    if itself is not None and itself():
        return
    for p in parameters:
        state = optimizer.state.get(p) or {}
        for name, x in list(state.items()):
            other = (type(x) is ScaledTensor) != isinstance(p, ScaledTensor)
            if other and _is_of_elements(x, p):
                state[name] = torch.zeros_like(p, dtype=x.dtype).copy_(x)


def _is_of_elements(x: Any, p: Tensor) -> bool:
    # A step's number has no dimensions. That check is faster than the comparison of shapes.
    if type(x) not in (Tensor, ScaledTensor) or x.dim() == 0:
        return False
    return bool(x.is_floating_point() and x.shape == p.shape)


def _do(actions: tuple[tuple[str, str], ...], found: Held) -> None:
    if found:
        for module, name in actions:
            getattr(import_module(module), name)(found)
