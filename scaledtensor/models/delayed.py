"""The histories of a model under delayed scaling: buffers of its modules, and the ends of steps.

The history of a weight is a buffer of the weight's module, `<name>_amax`, so it is saved, loaded
and moved with the module. If several modules of a model own a weight, the first of them keeps its
one history. The table of an embedding has none. `scaledtensor.ops.products.delayed` has the numbers
of a history, and reads and writes them in products.

A product knows a weight and its site, and no module. Optimizers know parameters, and no modules
either. So each module that keeps histories has a record of them (`Histories`), and all records are
in one set (`_LIVE`). From this set `keeper_of` finds the history for a site, and `after_step` finds
the histories of an optimizer's parameters.
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
from scaledtensor.tensors.shards import (
    Groups,
    by_groups,
    is_sharded,
    of_all_parts,
    part_of,
    ranks_of,
)
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

# --- names -----------------------------------------------------------------------------------

_SUFFIX = "_amax"


def name_of(parameter: str) -> str:
    """The name of the buffer that holds the history of the parameter `parameter`."""
    return parameter + _SUFFIX


def parameter_of(name: str) -> str:
    """The name of the parameter whose history is called `name`; empty for any other name."""
    return name.removesuffix(_SUFFIX) if name.endswith(_SUFFIX) else ""


# --- the record of a module ------------------------------------------------------------------


class Histories:
    """The record that a module has of its histories. Copies and pickles of the module have a copy
    of it, which joins the set of records by itself."""

    def __init__(self, module: nn.Module, names: list[str], unwritten: bool) -> None:
        self.names = names
        """The parameters that have a history."""
        self.unwritten = unwritten
        """Whether the buffers were made without memory (on the meta device), so that `to_empty`
        leaves arbitrary numbers in them."""
        self.told = 0
        """How many saturated casts warnings have told of."""
        self._join(module)

    def _join(self, module: nn.Module) -> None:
        self._module = weakref.ref(module)
        self.born = next(_births)
        _LIVE.add(self)
        histories_moved()

    @property
    def module(self) -> nn.Module | None:
        """The module, if it is alive and this is its record."""
        found = self._module()
        return found if found is not None and _record(found) is self else None

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_module": self._module()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._join(state["_module"])


#: The records of all modules.
_LIVE: "weakref.WeakSet[Histories]" = weakref.WeakSet()
_births = itertools.count()

#: The attribute of a module that holds its record.
_ATTRIBUTE = "_scaledtensor_histories"


def _record(module: nn.Module) -> Histories | None:
    found: Histories | None = vars(module).get(_ATTRIBUTE)
    return found


def _names(module: nn.Module) -> list[str]:
    """The parameters of `module` that have histories, without those that were deleted since."""
    record = _record(module)
    names = [] if record is None else record.names
    return [n for n in names if n in module._parameters and name_of(n) in module._buffers]


def _living() -> list[tuple[Histories, nn.Module]]:
    """The records whose modules are alive, and these modules. The youngest record is the last."""
    found = [(record, record.module) for record in list(_LIVE)]
    alive = [(record, module) for record, module in found if module is not None]
    return sorted(alive, key=lambda both: both[0].born)


# --- a module gets histories, and loses them -------------------------------------------------


def check(module: nn.Module, fqn: str, name: str) -> None:
    """Raises ModelError if `module` has another attribute of the history's name."""
    if hasattr(module, name_of(name)) and name not in _names(module):
        place = f"{fqn}.{name}" if fqn else name
        raise ModelError(
            f"the history of {place} under Delayed is to be called {place}{_SUFFIX}, and the "
            "module has an attribute of that name; rename it"
        )


def attach(module: nn.Module, taken: set[int]) -> None:
    """Give a history to each weight of `module` whose recipe is `Delayed`, and to no other
    parameter.

    Histories of the right length stay. `taken` has the ids of the weights whose history another
    module of the model keeps; the weights of this module are added to it.
    """
    found = {}
    for name, p in module.named_parameters(recurse=False):
        recipe = p.recipe if isinstance(p, ScaledTensor) else None
        multiplies = p.dim() > 1 and not isinstance(module, TABLES)
        if isinstance(recipe, Delayed) and multiplies and id(p) not in taken:
            found[name] = delayed.new(recipe.history, p.device)
            taken.add(id(p))
    record = _record(module)
    names = [] if record is None else record.names
    present = {name: _like(module._buffers.get(name_of(name))) for name in names}
    if present == {name: _like(history) for name, history in found.items()}:
        return
    detach(module)
    for name, history in found.items():
        module.register_buffer(name_of(name), history)
    if found:
        module.register_load_state_dict_pre_hook(_begin_anew)
        unwritten = any(history.is_meta for history in found.values())
        vars(module)[_ATTRIBUTE] = Histories(module, list(found), unwritten)


def _like(history: Tensor | None) -> Any:
    return None if history is None else (history.shape, history.device)


def detach(module: nn.Module) -> None:
    """Remove the histories of `module`."""
    record = vars(module).pop(_ATTRIBUTE, None)
    if record is None:
        return
    for name in record.names:
        module._buffers.pop(name_of(name), None)
    drop_hooks(module._load_state_dict_pre_hooks, _begin_anew)
    histories_moved()


def _begin_anew(module: nn.Module, state: dict[str, Any], prefix: str, *rest: Any) -> None:
    """Before `load_state_dict`: fill in the histories that `state` does not have.

    A checkpoint of the original model has none. A weight that it has begins a new history. A weight
    that it does not have keeps its history.
    """
    for name in _names(module):
        history = module.get_buffer(name_of(name))
        weight = state.get(prefix + name)
        if weight is not None:
            device = weight.device if history.is_meta else history.device
            history = torch.zeros(history.shape, device=device, dtype=torch.float32)
        state.setdefault(prefix + name_of(name), history)


# --- a product finds the history of its weight -----------------------------------------------

#: A count of `histories_moved`, and at this count a function for each site that returns its
#: history.
_index: tuple[int, dict[int, Callable[[], Tensor | None]]] = (-1, {})


def keeper_of(site: Site, count: int) -> Callable[[], Tensor | None] | None:
    """A function that returns the history for `site`; None if no module keeps one.

    It stays right until a module begins or ceases to keep histories. `count` is how often modules
    have done so (`histories_moved`). The index over all sites is made once for each count.
    """
    global _index
    if _index[0] != count or id(site) not in _index[1]:
        _index = count, _by_site()
    return _index[1].get(id(site))


def _by_site() -> dict[int, Callable[[], Tensor | None]]:
    """The functions of all sites that have a history, by the id of the site. If two modules keep
    one for the same site, the younger module's counts."""
    found: dict[int, Callable[[], Tensor | None]] = {}
    for _, module in _living():
        for name in _names(module):
            p = module._parameters[name]
            if is_scaled(p):
                part = part_of(p)
                part.site = part.site or Site()
                found[id(part.site)] = partial(_kept, weakref.ref(module), name)
    return found


def _kept(owner: "weakref.ref[nn.Module]", name: str) -> Tensor | None:
    """The history of a parameter of a module, made float32 again if the module was converted."""
    module = owner()
    record = None if module is None else _record(module)
    if module is None or record is None:
        return None
    history = module._buffers.get(name_of(name))
    if history is None or (history.dtype is torch.float32 and not record.unwritten):
        return history
    with _torch.outside_modes(), torch.inference_mode(False), torch.no_grad():
        if history.dtype is not torch.float32:
            # An amax beyond half precision became infinite there. Zero stands for an unknown one.
            history = history.float().nan_to_num(0.0, 0.0, 0.0)
            module._buffers[name_of(name)] = history
        if record.unwritten and not history.is_meta:
            for each in record.names:
                module.get_buffer(name_of(each)).zero_()
            record.unwritten = False
    return history


# --- all histories of a model ----------------------------------------------------------------


def all_of(model: nn.Module) -> list[Tensor]:
    """The histories of the weights of `model`."""
    return [m.get_buffer(name_of(name)) for m in model.modules() for name in _names(m)]


def exceeded(model: nn.Module) -> dict[str, dict[str, int]]:
    """How many casts had elements beyond the scale of the history: for each parameter, of its
    inputs, of itself and of gradients. Waits for the device."""
    found = {}
    for fqn, module in model.named_modules():
        for name in _names(module):
            counts = module.get_buffer(name_of(name))[:, -1].tolist()
            full = f"{fqn}.{name}" if fqn else name
            found[full] = {role: int(counts[row]) for role, row in _ROWS.items()}
    return found


# --- steps end -------------------------------------------------------------------------------


def after_step(held: Held) -> None:
    """End a step of the histories whose parameters an optimizer has stepped."""
    if _LIVE:
        stepped = {id(p): p for _, ours in held for p in ours}
        share(stepped)
        for record, module in _living():
            _advance(record, module, set(stepped))


def advance(model: nn.Module) -> None:
    """End a step of all histories of `model`, if no optimizer of torch steps it."""
    own = set(model.modules())
    for record, module in _living():
        if module in own:
            _advance(record, module, {id(p) for p in module.parameters(recurse=False)})


@torch.no_grad()
def _advance(record: Histories, module: nn.Module, stepped: set[int]) -> None:
    for name in _names(module):
        p: Any = module._parameters[name]
        # No optimizer steps a frozen weight, but its inputs have a history too.
        if id(p) not in stepped and p.requires_grad:
            continue
        history = module.get_buffer(name_of(name))
        delayed.advance(history)
        if not part_of(p).recipe.guard:  # type: ignore[union-attr]
            _tell(record, module, name, int(history[:, -1].sum()))


def _tell(record: Histories, module: nn.Module, name: str, count: int) -> None:
    if count > record.told:
        warnings.warn(
            f"delayed scaling saturated {count - record.told} casts in this step ({count} in "
            f"all) at {name} of {module}: they were larger than any step that their "
            "history holds. Delayed(guard=True) scales such a tensor by its own amax",
            RecipeWarning,
            stacklevel=2,
        )
        record.told = count


# --- several ranks ---------------------------------------------------------------------------


@torch.no_grad()
def share_histories(model: nn.Module, group: Any = None) -> None:
    """Give all ranks the largest amaxes that one of them saw in this step, in one collective for
    all histories of `Delayed`.

    Call it on every rank, with the same model, before each step of the optimizer of a model under
    DistributedDataParallel. A sharded model does this by itself.

    Args:
        model: any model; nothing happens if its weights have no histories.
        group: the ranks; by default all.
    """
    seen = [history[:, 0] for history in all_of(model)]
    if seen and dist.is_initialized():
        _take_largest(seen, (group or dist.group.WORLD,))


@torch.no_grad()
def share(stepped: dict[int, Any]) -> None:
    """The same for the parameters in `stepped`, by id, that are spread over ranks."""
    seen = {
        id(module._parameters[name]): module.get_buffer(name_of(name))[:, 0]
        for _, module in _living()
        for name in _names(module)
    }
    # Their order is the optimizer's, which is the same on every rank.
    spread = [p for p in stepped.values() if id(p) in seen and is_sharded(p)]
    for ranks, sharers in by_groups(spread, ranks_of).items():
        _take_largest([seen[id(p)] for p in sharers], ranks)


def _take_largest(seen: list[Tensor], ranks: Groups) -> None:
    """Write the largest number of all ranks into each of these tensors of one shape."""
    largest = of_all_parts(torch.stack(seen), ranks).amax(0)
    for column, amax in zip(seen, largest, strict=True):
        column.copy_(amax)
