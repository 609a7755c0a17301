"""The histories of a model under delayed scaling: where they are kept, and when a step ends.

Each weight's is a buffer of its module, `<name>_amax`, so that it is saved, loaded and moved with
the module. A product finds it by the site of the weight (`Site.history`), wherever the product is
and in whatever spelling. A weight that several modules of a model own has one history, in the first
of them. The table of an embedding has none.
"""

import itertools
import warnings
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from scaledtensor import _torch
from scaledtensor.errors import ModelError, RecipeWarning
from scaledtensor.models.interpose import drop_hooks
from scaledtensor.models.operands import TABLES
from scaledtensor.ops.products import delayed
from scaledtensor.ops.products.delayed import GRADIENT, INPUT, WEIGHT
from scaledtensor.recipes import Delayed
from scaledtensor.tensors.shards import by_groups, is_sharded, of_all_parts, part_of, ranks_of
from scaledtensor.tensors.site import Site, histories_moved
from scaledtensor.tensors.steps import Held, is_scaled
from scaledtensor.tensors.tensor import ScaledTensor

__all__ = [
    "advance",
    "all_of",
    "attach",
    "check",
    "detach",
    "exceeded",
    "keeper_of",
    "name_of",
    "parameter_of",
    "share",
    "share_histories",
]

_ROWS = {"input": INPUT, "weight": WEIGHT, "gradient": GRADIENT}
_SUFFIX = "_amax"


class Histories:
    """The record in a module of the histories that its buffers hold."""

    def __init__(self, module: nn.Module, names: list[str], unwritten: bool) -> None:
        self.names, self.unwritten, self.told = names, unwritten, 0
        self._live(module)

    def _live(self, module: nn.Module) -> None:
        self._module = weakref.ref(module)
        self.born = next(_births)
        _LIVE.add(self)
        histories_moved()

    @property
    def module(self) -> nn.Module | None:
        """The module, while it is there and has these histories."""
        found = self._module()
        return found if found is not None and vars(found).get(_ATTRIBUTE) is self else None

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_module": self._module()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)  # a copy is as alive as what it is of
        self._live(state["_module"])


#: All there are: an optimizer knows parameters, and not where their histories are.
_LIVE: "weakref.WeakSet[Histories]" = weakref.WeakSet()
_births = itertools.count()

#: The attribute of a module that has them. Its copies and pickles have it too.
_ATTRIBUTE = "_scaledtensor_histories"


def _living() -> list[tuple[Histories, nn.Module]]:
    """All there are and their modules, the youngest last."""
    found = [(h, h.module) for h in list(_LIVE)]
    alive = [(h, module) for h, module in found if module is not None]
    return sorted(alive, key=lambda both: both[0].born)


#: The sites of the weights of living modules, and where their histories are: as of which count.
_index: tuple[int, dict[int, Callable[[], Tensor | None]]] = (-1, {})


def keeper_of(site: Site, count: int) -> Callable[[], Tensor | None] | None:
    """What returns the history of the weight of that site, if a module keeps one. `count` is how
    often histories have moved so far (`histories_moved`)."""
    global _index
    if _index[0] != count or id(site) not in _index[1]:
        found: dict[int, Callable[[], Tensor | None]] = {}
        for _, module in _living():
            for name in _names(module):
                p = module._parameters[name]
                if is_scaled(p):
                    part = part_of(p)
                    part.site = part.site or Site()
                    found[id(part.site)] = partial(_kept, weakref.ref(module), name)
        _index = count, found
    return _index[1].get(id(site))


def _kept(owner: "weakref.ref[nn.Module]", name: str) -> Tensor | None:
    """The history of a parameter of a module, as float32, whatever the module was converted to."""
    module = owner()
    histories = None if module is None else vars(module).get(_ATTRIBUTE)
    if module is None or histories is None:
        return None
    history = module._buffers.get(name + _SUFFIX)
    if history is None or (history.dtype is torch.float32 and not histories.unwritten):
        return history
    with _torch.outside_modes(), torch.inference_mode(False), torch.no_grad():
        if history.dtype is not torch.float32:  # what half precision does not hold is not known
            history = history.float().nan_to_num(0.0, 0.0, 0.0)
            module._buffers[name + _SUFFIX] = history
        if histories.unwritten and not history.is_meta:  # as `to_empty` leaves it
            for each in histories.names:
                module.get_buffer(each + _SUFFIX).zero_()
            histories.unwritten = False
    return history


def check(module: nn.Module, fqn: str, name: str) -> None:
    """Raises ModelError where the history of a parameter would take another tensor's name."""
    if hasattr(module, name + _SUFFIX) and name not in _names(module):
        place = f"{fqn}.{name}" if fqn else name
        raise ModelError(
            f"the history of {place} under Delayed is to be called {place}{_SUFFIX}, and the "
            "module has an attribute of that name; rename it"
        )


def attach(module: nn.Module, taken: set[int]) -> None:
    """Give a history to each weight of `module` that its recipe scales by one, and to no other. A
    history of that length that is there already stays. `taken` has the ids of weights whose history
    another module of the model keeps; the weights of this module are added to it."""
    found = {}
    for name, p in module.named_parameters(recurse=False):
        recipe = p.recipe if isinstance(p, ScaledTensor) else None
        looked_up = isinstance(module, TABLES)
        if isinstance(recipe, Delayed) and p.dim() > 1 and not looked_up and id(p) not in taken:
            found[name] = delayed.new(recipe.history, p.device)
            taken.add(id(p))
    known = vars(module).get(_ATTRIBUTE)
    names = [] if known is None else known.names
    present = {name: _like(module._buffers.get(name + _SUFFIX)) for name in names}
    if present == {name: _like(history) for name, history in found.items()}:
        return
    detach(module)
    for name, history in found.items():
        module.register_buffer(name + _SUFFIX, history)
    if found:
        module.register_load_state_dict_pre_hook(_begin_anew)  # type: ignore[no-untyped-call]
        unwritten = any(history.is_meta for history in found.values())
        vars(module)[_ATTRIBUTE] = Histories(module, list(found), unwritten)


def _like(history: Tensor | None) -> Any:
    return None if history is None else (history.shape, history.device)


def detach(module: nn.Module) -> None:
    """Take its histories from `module`."""
    known = vars(module).pop(_ATTRIBUTE, None)
    if known is None:
        return
    for name in known.names:
        module._buffers.pop(name + _SUFFIX, None)
    drop_hooks(module._load_state_dict_pre_hooks, _begin_anew)
    histories_moved()


def parameter_of(name: str) -> str:
    """The name of the parameter whose history is called `name`; empty for any other name."""
    return name.removesuffix(_SUFFIX) if name.endswith(_SUFFIX) else ""


def name_of(parameter: str) -> str:
    """What the history of the parameter of that name is called."""
    return parameter + _SUFFIX


def _names(module: nn.Module) -> list[str]:
    """The parameters of `module` that have histories."""
    known = vars(module).get(_ATTRIBUTE)
    names = [] if known is None else known.names
    return [n for n in names if n in module._parameters and n + _SUFFIX in module._buffers]


def _begin_anew(module: nn.Module, state: dict[str, Any], prefix: str, *rest: Any) -> None:
    """A checkpoint of the original model has no histories. The histories of the weights in it begin
    anew, and others stay."""
    for name in _names(module):
        history = module.get_buffer(name + _SUFFIX)
        weight = state.get(prefix + name)
        if weight is not None:
            device = weight.device if history.is_meta else history.device
            history = torch.zeros(history.shape, device=device)
        state.setdefault(prefix + name + _SUFFIX, history)


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
    for histories, module in _living():
        if module in own:
            _advance(histories, module, {id(p) for p in module.parameters(recurse=False)})


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
        share(stepped)
        for histories, module in _living():
            _advance(histories, module, set(stepped))


@torch.no_grad()
def share(stepped: dict[int, Any]) -> None:
    """Where parameters, by id, are spread over ranks, what one of them saw in this step all have
    seen: one collective for all histories."""
    seen = {
        id(module._parameters[name]): module.get_buffer(name + _SUFFIX)[:, 0]
        for _, module in _living()
        for name in _names(module)
    }
    # In the order of the optimizer, which is the same on every rank.
    spread = [p for p in stepped.values() if id(p) in seen and is_sharded(p)]
    for ranks, sharers in by_groups(spread, ranks_of).items():
        largest = of_all_parts(torch.stack([seen[id(p)] for p in sharers]), ranks).amax(0)
        for p, amax in zip(sharers, largest, strict=True):
            seen[id(p)].copy_(amax)


@torch.no_grad()
def _advance(histories: Histories, module: nn.Module, stepped: set[int]) -> None:
    for name in _names(module):
        p: Any = module._parameters[name]
        # No optimizer steps a frozen weight, and its inputs have a history all the same.
        if id(p) not in stepped and p.requires_grad:
            continue
        history = module.get_buffer(name + _SUFFIX)
        delayed.advance(history)
        if not part_of(p).recipe.guard:  # type: ignore[union-attr]
            _tell(histories, module, name, int(history[:, -1].sum()))


def _tell(histories: Histories, module: nn.Module, name: str, count: int) -> None:
    if count > histories.told:
        warnings.warn(
            f"delayed scaling saturated {count - histories.told} casts in this step ({count} in "
            f"all) at {name} of {module}: they were larger than any step that their "
            "history holds. Delayed(guard=True) scales such a tensor by its own amax",
            RecipeWarning,
            stacklevel=2,
        )
        histories.told = count
