"""The histories of a model under delayed scaling: where they are kept, and when a step ends.

Each weight's is a buffer of its module, `<name>_amax`, so that it is saved, loaded and moved with
the module. A product finds it by the site of the weight (`Site.history`), wherever the product is
and in whatever spelling. A weight that several modules own has one history, in the first of them.
"""

import warnings
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from scaledtensor.errors import RecipeWarning
from scaledtensor.interpose import drop_hooks
from scaledtensor.ops import delayed
from scaledtensor.ops.delayed import GRADIENT, INPUT, WEIGHT
from scaledtensor.recipes import Delayed
from scaledtensor.shards import by_groups, is_sharded, of_all_parts, part_of, ranks_of
from scaledtensor.site import Site, histories_moved
from scaledtensor.steps import Held, is_scaled
from scaledtensor.tensor import ScaledTensor

__all__ = [
    "advance",
    "all_of",
    "attach",
    "detach",
    "exceeded",
    "keeper_of",
    "name_of",
    "parameter_of",
]

_ROWS = {"input": INPUT, "weight": WEIGHT, "gradient": GRADIENT}
_SUFFIX = "_amax"


class Histories:
    """What a module that keeps histories has of them beside its buffers."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.told = 0
        self._live()

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)  # a copy is as alive as what it is of
        self._live()

    def _live(self) -> None:
        _LIVE.add(self)
        histories_moved()


#: All there are: an optimizer knows parameters, and not where their histories are.
_LIVE: "weakref.WeakSet[Histories]" = weakref.WeakSet()

#: The attribute of a module that has them. Its copies and pickles have it too.
_ATTRIBUTE = "_scaledtensor_histories"


def keeper_of(site: Site) -> Callable[[], Tensor | None]:
    """What returns the history of the weight of that site, if a module keeps one."""
    for histories in list(_LIVE):
        for name in _names(histories.module):
            p = histories.module._parameters[name]
            if is_scaled(p) and part_of(p).site is site:
                return partial(_kept, weakref.ref(histories.module), name_of(name))
    return _nothing


def _kept(module: "weakref.ref[nn.Module]", buffer: str) -> Tensor | None:
    alive = module()
    return None if alive is None else alive._buffers.get(buffer)


def _nothing() -> None:
    """Of a weight without a history."""


def attach(module: nn.Module) -> None:
    """Give each weight of `module` that its recipe scales by history one, and no other; those of
    that length that there are stay. A weight that another module has one for gets none here."""
    found = {}
    for name, p in module.named_parameters(recurse=False):
        recipe = p.recipe if isinstance(p, ScaledTensor) else None
        looked_up = isinstance(module, (nn.Embedding, nn.EmbeddingBag))
        elsewhere = any(p is other for other in _kept_elsewhere(module))
        if isinstance(recipe, Delayed) and p.dim() > 1 and not (looked_up or elsewhere):
            found[name] = delayed.new(recipe.history, p.device)
    present = {name: module.get_buffer(name + _SUFFIX).shape for name in _names(module)}
    if present == {name: history.shape for name, history in found.items()}:
        return
    detach(module)
    for name, history in found.items():
        module.register_buffer(name + _SUFFIX, history)
    if found:
        module.register_load_state_dict_pre_hook(_allow_missing)  # type: ignore[no-untyped-call]
        module.__dict__[_ATTRIBUTE] = Histories(module)


def _kept_elsewhere(module: nn.Module) -> list[Tensor | None]:
    """The parameters that other modules have histories for."""
    others = [h.module for h in list(_LIVE) if h.module is not module]
    return [other._parameters[name] for other in others for name in _names(other)]


def detach(module: nn.Module) -> None:
    """Take its histories from `module`."""
    if module.__dict__.pop(_ATTRIBUTE, None) is None:
        return
    for name in _names(module):
        del module._buffers[name + _SUFFIX]
    drop_hooks(module._load_state_dict_pre_hooks, _allow_missing)
    histories_moved()


def parameter_of(name: str) -> str:
    """The name of the parameter whose history is called `name`; empty for any other name."""
    return name.removesuffix(_SUFFIX) if name.endswith(_SUFFIX) else ""


def name_of(parameter: str) -> str:
    """What the history of the parameter of that name is called."""
    return parameter + _SUFFIX


def _names(module: nn.Module) -> list[str]:
    """The parameters of `module` that have histories."""
    return [name for name in module._parameters if name + _SUFFIX in module._buffers]


def _allow_missing(module: nn.Module, state: dict[str, Any], prefix: str, *rest: Any) -> None:
    """A checkpoint of the original model has no histories: those here stay."""
    for name in _names(module):
        state.setdefault(prefix + name + _SUFFIX, module._buffers[name + _SUFFIX])


def all_of(model: nn.Module) -> list[Tensor]:
    """The histories of the weights of `model`."""
    return [m.get_buffer(name + _SUFFIX) for m in model.modules() for name in _names(m)]


def exceeded(model: nn.Module) -> dict[str, dict[str, int]]:
    """How many casts were of more than the history's scale holds, by parameter: of its inputs, of
    itself, of gradients. Waits for the device."""
    found = {}
    for fqn, module in model.named_modules():
        for name in _names(module):
            counts = module.get_buffer(name + _SUFFIX)[:, -1].tolist()
            full = f"{fqn}.{name}" if fqn else name
            found[full] = {role: int(counts[row]) for role, row in _ROWS.items()}
    return found


def advance(model: nn.Module) -> None:
    """End a step, where no optimizer of torch does."""
    own = set(model.modules())
    for histories in list(_LIVE):
        if histories.module in own:
            _advance(histories, {id(p) for p in histories.module.parameters(recurse=False)})


@torch.no_grad()
def share_histories(model: nn.Module, group: Any = None) -> None:
    """What one rank saw in this step, all have seen: one collective for all histories of `Delayed`.

    For DistributedDataParallel, before each step of the optimizer; a model that is sharded does
    this by itself. Every rank calls it with the same model.

    Args:
        model: one with weights that have histories, or without, to which nothing happens.
        group: the ranks; by default all.
    """
    seen = [history[:, 0] for history in all_of(model)]
    if seen and dist.is_initialized():
        largest = of_all_parts(torch.stack(seen), (group or dist.group.WORLD,)).amax(0)
        for column, amax in zip(seen, largest, strict=True):
            column.copy_(amax)


def after_step(held: Held) -> None:
    """A step of an optimizer ends one of the histories of its parameters."""
    if _LIVE:
        stepped = {id(p): p for _, ours in held for p in ours}
        _share(stepped)
        for histories in list(_LIVE):
            _advance(histories, set(stepped))


@torch.no_grad()
def _share(stepped: dict[int, Any]) -> None:
    """Where parameters are spread over ranks, what one of them saw in this step all have seen: one
    collective for all histories."""
    seen = {
        id(h.module._parameters[name]): h.module.get_buffer(name + _SUFFIX)[:, 0]
        for h in _LIVE
        for name in _names(h.module)
    }
    # In the order of the optimizer, which is the same on every rank.
    spread = [p for p in stepped.values() if id(p) in seen and is_sharded(p)]
    for ranks, sharers in by_groups(spread, ranks_of).items():
        largest = of_all_parts(torch.stack([seen[id(p)] for p in sharers]), ranks).amax(0)
        for p, amax in zip(sharers, largest, strict=True):
            seen[id(p)].copy_(amax)


@torch.no_grad()
def _advance(histories: Histories, stepped: set[int]) -> None:
    module = histories.module
    for name in _names(module):
        p: Any = module._parameters[name]
        if id(p) not in stepped:
            continue
        history = module.get_buffer(name + _SUFFIX)
        delayed.advance(history)
        if not part_of(p).recipe.guard:  # type: ignore[union-attr]
            _tell(histories, name, int(history[:, -1].sum()))


def _tell(histories: Histories, name: str, count: int) -> None:
    if count > histories.told:
        warnings.warn(
            f"delayed scaling saturated {count - histories.told} casts in this step ({count} in "
            f"all) at {name} of {histories.module}: they were larger than any step that their "
            "history holds. Delayed(guard=True) scales such a tensor by its own amax",
            RecipeWarning,
            stacklevel=2,
        )
        histories.told = count
