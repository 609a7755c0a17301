"""The guard of `Unit`: the steps in which sites look, and a calibration over data.

The rules know shapes and no data. A site (`scaledtensor.ops.products.sites`) measures operands and
corrects their casts. This module chooses the steps in which it does so. In training, a site looks:

- in the first step after `scale_model`, at ten products, and at each tenth of any further ones;
- in each step at whose end the recipe rebalances the parameters;
- in the steps that follow, until no site lowers a shift, and in compiled code until almost no
  element of any site saturates.

A site from a checkpoint continues with the shifts that were found before. It looks in the same
steps as the uninterrupted run, except for the steps that follow, since no file tells of them.
"""

import sys
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from scaledtensor import _torch
from scaledtensor.errors import ModelError, UnsupportedError
from scaledtensor.models import delayed
from scaledtensor.models.passes import as_it_was, called
from scaledtensor.models.rebalance import COUNT
from scaledtensor.ops.products import sites
from scaledtensor.ops.products.sites import Site
from scaledtensor.recipes import Unit
from scaledtensor.tensors.shards import by_groups, is_sharded, of_all_parts, part_of, ranks_of
from scaledtensor.tensors.steps import Held, is_scaled

__all__ = ["calibrate"]


def after_step(held: Held) -> None:
    """End a step of an optimizer: its weights keep the shifts that were found in it, and look in
    the next step if that is due."""
    spread, any_due, any_guarded = [], False, False
    again, sites.settling = sites.settling, False
    for group, ours in held:
        done = group.get(COUNT, 0)
        for p in ours:
            part: Any = part_of(p)
            recipe, site = part.recipe, part.site
            if not isinstance(recipe, Unit) or part.dim() < 2:
                continue
            every = recipe.rebalance if recipe.guard else 0
            due = every > 0 and (done + 1) % every == 0
            any_due, any_guarded = any_due or due, any_guarded or every > 0
            looks = due or (again and every > 0)
            # The count is the same on every rank. Some ranks may have new parts, without sites.
            if part is not p and every > 0:
                since = done % every
                if done == 1 or since in (0, _SETTLED):
                    spread.append(p)
                looks = due or (again and since < _SETTLED)
            if site is None:
                if looks:
                    part.site = Site(looks=True)
            elif looks or site.looks or site.new:
                site.settle(part)
                site.followed = looks and (site.looks or site.new)
                site.looks = looks
                site.new = site.new and not any(seen.number for seen in site.seen)
                site.forget()
    if any_guarded:
        sites.beside.looks, sites.beside.new = any_due, False
    _agree(spread)


#: The number of steps in which compiled code looks at parts that are spread over ranks. Then its
#: shifts are found, and all ranks agree on them.
_SETTLED = 4


def _agree(spread: list[Any]) -> None:
    """Give the parts of a weight on all ranks the largest shifts that one of them found.

    Each rank sees only some operands of the whole weight, and a checkpoint holds one recipe.
    """
    for groups, sharers in by_groups(spread, ranks_of).items():
        parts: list[Any] = [part_of(p) for p in sharers]
        own = [(part.site and part.site.found) or part.recipe.shifts for part in parts]
        device = parts[0].device
        found = of_all_parts(torch.tensor(own, dtype=torch.float64, device=device), groups)
        for part, shifts in zip(parts, found.amax(0).tolist(), strict=True):
            of_inputs, of_gradients = map(int, shifts)
            part.recipe = part.recipe.with_shifts((of_inputs, of_gradients))
            if part.site is not None:
                part.site.found = None


def calibrate(
    model: nn.Module,
    batches: Iterable[Any],
    *,
    call: Callable[[nn.Module, Any], Any] | None = None,
    loss: Callable[[nn.Module, Any], Tensor] | None = None,
) -> dict[str, tuple[int, int]]:
    """Correct the casts of a model by measuring its operands on some data.

    Under `Unit`, a weight gets a shift (`Unit.shifts`) if its inputs saturate or vanish in the cast
    that the rules expect. All measured inputs fit under this shift. Under `Delayed`, the largest
    magnitudes become the latest step of each weight's history. So inference has static scales, and
    training has scales of the data from its first step on.

    For training, call it before the first step; for inference, after the weights are loaded. The
    passes run in evaluation mode and uncompiled. Parameters, other buffers and gradients keep their
    values. Compiled code uses the new casts without a new compilation.

    Args:
        model: a model under the recipe `Unit` or `Delayed`, or with modules under one of them. It
            may be compiled.
        batches: the data, one batch after another; a tensor gives its rows as batches. `model` gets
            a batch that is a tensor as it is, a tuple or list as its arguments, and a mapping as
            keyword arguments.
        call: `call(model, batch)` runs the model; by default as above.
        loss: `loss(model, batch)` returns a loss. Its backward pass corrects the casts of gradients
            as well. By default there are only forward passes.

    Returns:
        The shifts of inputs and of gradients by the name of the weight, for weights with a shift.

    Raises:
        ModelError: no weight of `model` has one of these recipes; there was no batch; or no weight
            took part in a product. The model is then unchanged.
        UnsupportedError: both `call` and `loss` are given.
    """
    if call is not None and loss is not None:
        raise UnsupportedError("calibrate takes `call` or `loss`, which runs the model itself")
    weights = _weights(getattr(model, "_orig_mod", model))  # named as before torch.compile
    kept = delayed.all_of(model)
    if not weights and not kept:
        raise ModelError(
            "no weight of this model has the recipe Unit or Delayed, whose casts are calibrated: "
            "scaledtensor.scale_model(model, Unit()) first"
        )
    seen_before = [history.clone() for history in kept]
    with torch.no_grad():
        for history in kept:
            history[:, 0] = 0  # the amax of a step that has not ended is not from these data
    before = {name: p.recipe for name, p in weights.items()}
    for p in weights.values():
        p.recipe, site = p.recipe.uncorrected, p.site or Site()
        p.site, site.found = site, None
        site.forget()
    count, done = 0, False
    try:
        grads = torch.set_grad_enabled(loss is not None)
        with sites.calibrating(), _torch.uncompiled_calls(), as_it_was(model, kept), grads:
            for batch in batches:
                count += 1
                if loss is not None:
                    loss(model, batch).backward()
                else:
                    (call or called)(model, batch)
        if not count:
            raise ModelError("calibrate was given no batch")
        seen = any(seen.number for p in weights.values() for seen in p.site.seen)
        if not seen and not any(bool((history[:, 0] > 0).any()) for history in kept):
            raise ModelError(
                "no weight with the recipe Unit or Delayed took part in a product while the model "
                "ran"
            )
        done = True
        _reshard(model)
        delayed.share({id(p): p for p in model.parameters()})
        delayed.advance(model)
    finally:
        for name, p in weights.items():
            if not done:
                p.recipe = before[name]
            p.site.new = p.site.new and not done
            if done:
                p.site.settle(p)
            p.site.forget()
        if done:
            _agree([p for p in model.parameters() if is_sharded(p) and _is_site(part_of(p))])
        else:
            with torch.no_grad():
                for history, before_it in zip(kept, seen_before, strict=True):
                    history.copy_(before_it)
    return {name: p.recipe.shifts for name, p in weights.items() if p.recipe.shifts != (0, 0)}


def _weights(model: nn.Module) -> dict[str, Any]:
    """The weights that can be sites, by name."""
    scaled = {name: part_of(p) for name, p in model.named_parameters() if is_scaled(p)}
    return {name: part for name, part in scaled.items() if _is_site(part)}


def _reshard(model: nn.Module) -> None:
    """Shard all parameters again: `fully_shard` leaves the outermost ones whole after a forward
    pass."""
    sharded = getattr(sys.modules.get("torch.distributed.fsdp"), "FSDPModule", ())
    for module in model.modules():
        if isinstance(module, sharded):
            module.reshard()


def _is_site(weight: Any) -> bool:
    recipe = weight.recipe
    return isinstance(recipe, Unit) and weight.dim() > 1 and recipe.gemms.once is not None
