"""Hooks of `fully_shard` (FSDP2): a sharded ScaledTensor is gathered in 8-bit codes if it can be.

`fully_shard` keeps a part of each parameter on each rank. It asks the part for the elements to send
(`before`), and gives it the elements that arrived (`after`). A weight that products cast once,
under one scale, is cast before it is sent. This sends one byte per element, and exactly the codes
that the product would make from the whole weight. All other parameters are sent in their own
format, or in the `param_dtype` of the `MixedPrecisionPolicy`. A parameter of codes under scales of
blocks is widened when `fully_shard` divides it, since a part has no scales of its own.

A tensor has one scale, so its parts must agree on one. New or overwritten parts agree in a
collective of four numbers. If `Recipe.rebalance` moves scales, one collective serves all
parameters. Between these, a step of an optimizer leaves the scale of a part alone, and only
elements are sent. A recipe that scales a weight by its amax needs the amax of the whole weight
after each step: one collective for all weights.

Callers reach this module from below by its name, since it belongs to a higher floor:

| caller | function | called |
|---|---|---|
| `ScaledTensor.fsdp_pre_all_gather` (`tensors/tensor.py`) | `before` | before each gather |
| `ScaledTensor.fsdp_post_all_gather` | `after` | after each gather |
| `tensors/steps.py` | `after_step` | after each step of an optimizer |
| the module's hook that `before` registers | `_forget` | after `load_state_dict` |

Two facts are noted in the memo of a part (`tensors/memo.py`): `agreed` says that all parts are
under one scale, and `whole_amax` is the amax of the whole tensor.
"""

from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from scaledtensor.models.operands import is_only_operand
from scaledtensor.models.rebalance import put_under
from scaledtensor.ops.algebra import elements
from scaledtensor.ops.products.quantize import part_quantized, recoded
from scaledtensor.ops.products.table import cast_once
from scaledtensor.recipes.casts import Amax, Carried, Cast, Fixed
from scaledtensor.scales.powers import nearest_power_of_two
from scaledtensor.tensors import steps
from scaledtensor.tensors.memo import note
from scaledtensor.tensors.shards import (
    by_groups,
    is_sharded,
    of_all_parts,
    part_of,
    squares_and_amax,
)
from scaledtensor.tensors.tensor import Context, ScaledTensor
from scaledtensor.tensors.wrapper import as_bytes

__all__ = ["after", "after_step", "before"]

#: A weight is sent as codes if its cast takes its scale from one of these.
_SENT_AS_CODES = (Amax, Carried, Fixed)


class _Sent(NamedTuple):
    """The facts that belong to the elements. All ranks have the same, so they are not sent."""

    context: Context
    scale: Tensor
    rms: Tensor
    site: Any
    """The `Site` of the part, if it has one. The whole tensor shares it."""


def before(
    part: ScaledTensor, mesh: Any, outer_size: torch.Size, module: nn.Module, mp_policy: Any
) -> tuple[tuple[Tensor, ...], _Sent]:
    """Return the elements of a part to send, padded to the longest part, and the facts of them."""
    steps.watch(part)
    group = mesh.get_group()
    _forget_when_loaded(module)
    _agree(part, group, outer_size.numel())
    held = _as_sent(part, group, module, mp_policy.param_dtype)
    q = as_bytes(held.qdata.detach())  # not every backend knows 8-bit floats
    missing = -(-outer_size[0] // mesh.size()) - q.shape[0] if q.dim() else 0
    if missing > 0 and q.shape[1:] == outer_size[1:]:
        q = torch.cat([q, q.new_zeros(missing, *q.shape[1:])])
    return (q,), _Sent(held.context, held.scale, held.rms, part.site)


def after(
    arrived: tuple[Tensor, ...], metadata: _Sent, out: Any
) -> tuple[ScaledTensor, tuple[Tensor, ...]] | None:
    """Return the whole tensor around the elements that arrived.

    If `out` is given, the elements arrived in `out`, and only its scale is written.
    """
    (data,) = arrived
    fmt, dtype, recipe, nonnegative = metadata.context
    # Copies: tensors that the forward pass saved keep the scales that they had.
    scale, rms = metadata.scale.clone(), metadata.rms.clone()
    if out is not None:
        whole = part_of(out)
        whole.scale, whole.rms, whole.recipe = scale, rms, recipe
        whole.site = metadata.site
        return None
    q = data.view(fmt.storage_dtype)
    whole = ScaledTensor.make(q, scale, rms, fmt, dtype, recipe, nonnegative)
    whole.site = metadata.site
    return whole, (data,)


def _as_sent(
    part: ScaledTensor, group: Any, module: nn.Module, dtype: torch.dtype | None
) -> ScaledTensor:
    """Return the codes of a part if products cast its tensor once, or the part as `dtype`."""
    own = _weight_cast(part, module)
    if own is None:
        return part if dtype is None else cast(ScaledTensor, part.detach().to(dtype))
    if isinstance(own.scale, Amax):
        amax = part.memo.whole_amax
        if amax is None:
            amax = of_all_parts(squares_and_amax(part), (group,))[:, 1].amax()
            note(part, whole_amax=amax)
        codes, scale, _ = part_quantized(elements(part), amax / part.scale, own)
        held = recoded(part, codes, scale * part.scale, own.format)
    else:
        held = cast_once(part.detach())
    if dtype is None or dtype == held.dtype:
        return held
    context: Any = (held.format, dtype, *held.context[2:])
    return ScaledTensor.make(held.qdata, held.scale, held.rms, *context)


def _weight_cast(part: ScaledTensor, module: nn.Module) -> Cast | None:
    """Return the one cast that products give the weight, if each part can be cast alone."""
    once = None if part.recipe is None else part.recipe.gemms.once
    if once is None or not isinstance(once[1].scale, _SENT_AS_CODES) or once[1].format.bits > 8:
        return None
    if getattr(once[1].scale, "least_error", False):  # the error is of the whole tensor
        return None
    alike = [
        is_only_operand(module, name, p)
        for name, p in module._parameters.items()
        if is_sharded(p) and part_of(p).shape == part.shape
    ]
    return once[1] if alike and all(alike) else None


# --- one scale for all parts -----------------------------------------------------------------


def _agree(part: ScaledTensor, group: Any, numel: int) -> None:
    """Put all parts of a tensor of `numel` elements under one scale, once.

    Parts that are under one scale already, such as parts from a checkpoint, keep it. Other parts
    get the scale for the RMS of the whole tensor. A tensor of zeros gets none until it has a value.
    """
    if part.memo.agreed:
        return
    own = torch.stack([part.scale, part.rms]).double()
    found = of_all_parts(torch.cat([squares_and_amax(part), own]), (group,))
    squares, amax, scales, expected = found.unbind(1)
    filled = squares > 0
    scale = torch.where(filled, scales, 0.0).amax()
    one = (torch.where(filled, scales, scale) == scale).all() & (expected[filled] > 0).all()
    rms = (squares.sum() / max(numel, 1)).sqrt()
    held = torch.where(part.rms > 0, part.rms.double(), expected.amax())
    scale = torch.where(one, scale.float(), nearest_power_of_two(rms.float()))
    put_under(part, scale, torch.where(one, held, rms).float())
    note(part, agreed=bool(rms > 0), whole_amax=amax.amax())


def _forget_when_loaded(module: nn.Module) -> None:
    """Register a hook by which all parts agree again after `load_state_dict`, on every rank.

    After `load_state_dict`, torch makes new parts on the ranks with a shorter part, and on no
    other. New parts have not agreed. Their ranks would wait for a collective that the other ranks
    never start.
    """
    if _forget not in module._load_state_dict_post_hooks.values():
        module.register_load_state_dict_post_hook(_forget)


def _forget(module: nn.Module, *_: Any) -> None:
    for p in module._parameters.values():
        if is_sharded(p):
            note(part_of(p), agreed=False)


@torch.no_grad()
def after_step(held: steps.Held) -> None:
    """Note the amax of each whole weight that its recipe scales by its amax, in one collective."""
    wanted = [p for _, ours in held for p in ours if is_sharded(p) and _is_by_amax(part_of(p))]
    for groups, sharded in by_groups(wanted).items():
        parts = [part_of(p) for p in sharded]
        found = of_all_parts(torch.stack([squares_and_amax(part)[1] for part in parts]), groups)
        for part, amax in zip(parts, found.amax(0), strict=True):
            note(part, whole_amax=amax)


def _is_by_amax(part: ScaledTensor) -> bool:
    once = None if part.recipe is None else part.recipe.gemms.once
    return once is not None and isinstance(once[1].scale, Amax)
