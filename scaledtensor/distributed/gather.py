"""What FSDP2 gathers of a sharded ScaledTensor: the 8-bit codes of its products, where it can.

`fully_shard` keeps of each parameter a part on each rank, and asks the part what to send
(`before`) and what to make of what arrived (`after`). The weight of a
product that is cast once, under one scale, is cast before it is sent: a byte an element, the very
codes that the product would make of the whole. Everything else is sent as it is held, or in the
`param_dtype` of the `MixedPrecisionPolicy`. A parameter of codes under scales of blocks is widened
when it is cut, since no part of it has scales of its own.

A tensor has one scale, so its parts must agree on one: when they are new or overwritten, in a
collective of four numbers, and where `Recipe.rebalance` moves it, in one for all parameters. In
between a step of an optimizer leaves the scale of a part alone, and elements are all that is sent.
A recipe that scales a weight by its amax needs that of the whole after each step: one collective
for all weights.
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

__all__ = ["SENT_AS_CODES"]

#: What chooses the scale of a weight that is sent as codes.
SENT_AS_CODES = (Amax, Carried, Fixed)


class _Sent(NamedTuple):
    """What goes with the elements: the same on every rank, so that it need not be sent."""

    context: Context
    scale: Tensor
    rms: Tensor
    site: Any
    """The part's `Site`, if it has one. The whole tensor shares it."""


def before(
    part: ScaledTensor, mesh: Any, outer_size: torch.Size, module: nn.Module, mp_policy: Any
) -> tuple[tuple[Tensor, ...], _Sent]:
    """`fsdp_pre_all_gather`: the elements to send of a part, padded as the longest, and what they
    are."""
    steps.watch(part)
    group = mesh.get_group()
    _forget_when_loaded(module)
    agree(part, group, outer_size.numel())
    held = _as_sent(part, group, module, mp_policy.param_dtype)
    q = as_bytes(held.qdata.detach())  # not every backend knows 8-bit floats
    missing = -(-outer_size[0] // mesh.size()) - q.shape[0] if q.dim() else 0
    if missing > 0 and q.shape[1:] == outer_size[1:]:
        q = torch.cat([q, q.new_zeros(missing, *q.shape[1:])])
    context = held.context
    return (q,), _Sent(context, held.scale, held.rms, part.site)


def after(
    arrived: tuple[Tensor, ...], metadata: _Sent, out: Any
) -> tuple[ScaledTensor, tuple[Tensor, ...]] | None:
    """`fsdp_post_all_gather`: the whole tensor around what arrived; into `out` there is nothing but
    its scale to write."""
    (data,) = arrived
    (fmt, dtype, recipe, nonnegative) = metadata.context
    # New ones: what the forward pass saved keeps those it saw.
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
    """What a part sends: codes, where products cast its tensor once; or itself, as `dtype`."""
    own = _weight_cast(part, module)
    if own is None:
        return part if dtype is None else cast(ScaledTensor, part.detach().to(dtype))
    if isinstance(own.scale, Amax):
        if part.memo.whole_amax is None:
            note(part, whole_amax=of_all_parts(squares_and_amax(part), (group,))[:, 1].amax())
        codes, scale, _ = part_quantized(elements(part), part.memo.whole_amax / part.scale, own)
        held = recoded(part, codes, scale * part.scale, own.format)
    else:
        held = cast_once(part.detach())
    if dtype is None or dtype == held.dtype:
        return held
    context: Any = (held.format, dtype, *held.context[2:])
    return ScaledTensor.make(held.qdata, held.scale, held.rms, *context)


def _weight_cast(part: ScaledTensor, module: nn.Module) -> Cast | None:
    """The one cast of a weight of products that a part of it can be given."""
    once = None if part.recipe is None else part.recipe.gemms.once
    if once is None or not isinstance(once[1].scale, SENT_AS_CODES) or once[1].format.bits > 8:
        return None
    alike = [
        is_only_operand(module, name, p)
        for name, p in module._parameters.items()
        if is_sharded(p) and part_of(p).shape == part.shape
    ]
    return once[1] if alike and all(alike) else None


# --- one scale for all parts -----------------------------------------------------------------


def agree(part: ScaledTensor, group: Any, numel: int) -> None:
    """See to it that all parts of a tensor of `numel` elements are under one scale, which they do
    once. Where they are, as those of a checkpoint, it stays; else it is that of the RMS of the
    whole. A tensor of zeros has none until it has a value."""
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
    """See to it that parts agree anew after `load_state_dict`, on every rank.

    After it torch makes new parts on the ranks whose part is shorter than the longest, which know
    of no agreement, and on no other: those would wait for a collective that these never start.
    """
    if _forget not in module._load_state_dict_post_hooks.values():
        module.register_load_state_dict_post_hook(_forget)  # type: ignore[no-untyped-call]


def _forget(module: nn.Module, *_: Any) -> None:
    for p in module._parameters.values():
        if is_sharded(p):
            note(part_of(p), agreed=False)


@torch.no_grad()
def after_step(held: steps.Held) -> None:
    """The amax of every weight that its recipe scales by it, in one collective."""
    wanted = [p for _, ours in held for p in ours if is_sharded(p) and _is_by_amax(part_of(p))]
    for groups, sharded in by_groups(wanted).items():
        parts = [part_of(p) for p in sharded]
        found = of_all_parts(torch.stack([squares_and_amax(part)[1] for part in parts]), groups)
        for part, amax in zip(parts, found.amax(0), strict=True):
            note(part, whole_amax=amax)


def _is_by_amax(part: ScaledTensor) -> bool:
    once = None if part.recipe is None else part.recipe.gemms.once
    return once is not None and isinstance(once[1].scale, Amax)
