"""The histories of a model under delayed scaling: where they are kept, and when a step ends.

Each weight's is a buffer of its module, `<name>_amax`, so that it is saved, loaded and moved with
the module. The module's forward runs under a mode that hands it to the casts: torch.compile then
sees it as what it is, a buffer that the graph reads and writes.
"""

import warnings
import weakref
from collections.abc import Sequence
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from scaledtensor import verbs
from scaledtensor.errors import RecipeWarning, UnsupportedError
from scaledtensor.interpose import ENTERED, Mode, drop_hooks, interpose, remove, transforms
from scaledtensor.ops import delayed
from scaledtensor.ops.delayed import GRADIENT, INPUT, WEIGHT
from scaledtensor.ops.functions import PRODUCTS
from scaledtensor.recipes import Delayed, Recipe
from scaledtensor.shards import by_groups, is_sharded, of_all_parts, part_of, ranks_of
from scaledtensor.steps import Held
from scaledtensor.tensor import ScaledTensor

__all__ = ["advance", "attach", "check", "detach", "exceeded", "name_of", "parameter_of"]

_ROWS = {"input": INPUT, "weight": WEIGHT, "gradient": GRADIENT}
_SUFFIX = "_amax"


class Histories:
    """The transform of a module that has weights with histories."""

    order: ClassVar[int] = 2
    mark: ClassVar[str | None] = None

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.told = 0
        _LIVE.add(self)

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)  # a copy is as alive as what it is of
        _LIVE.add(self)

    def mode(self, module: nn.Module, args: Any, kwargs: Any) -> Mode:
        return _Delayed(module)


#: All there are: an optimizer knows parameters, and not where their histories are.
_LIVE: "weakref.WeakSet[Histories]" = weakref.WeakSet()


class _Delayed(Mode):
    """Casts the operands of products with a weight of the module. Dynamo traces it."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in ENTERED:
            with self:
                return ENTERED[func](*args, **kwargs)
        known = PRODUCTS.get(func)
        if known is None or known.on is None:
            return func(*args, **kwargs)
        _, history = self.of(known.operands(args, kwargs))
        if history is None:
            return func(*args, **kwargs)
        return known.on(self.multiply, *args, **kwargs)

    def multiply(self, function: Any, *operands: Any, **kwargs: Any) -> Any:
        """`function` of operands that are cast by the history of the weight among them."""
        kwargs = {k: v for k, v in kwargs.items() if k not in ("spelled", "lowered")}
        weight, history = self.of(operands)
        assert history is not None
        y = function(*(self.cast(x, weight, history) for x in operands), **kwargs)
        return delayed.gradient_cast(y, history, weight.recipe.gemms.once[2])

    def of(self, operands: Sequence[Any]) -> tuple[Any, Tensor | None]:
        """The operand that has a history, and it. A parameter that `torch.func` put in place of one
        that is scaled has none, as no product is cast there."""
        for name, p in self.module._parameters.items():
            history = self.module._buffers.get(name + _SUFFIX)
            scaled = isinstance(p, ScaledTensor)
            if history is not None and scaled and any(x is p for x in operands):
                return p, history
        return None, None

    def cast(self, x: Any, weight: Any, history: Tensor) -> Any:
        first, own, _ = weight.recipe.gemms.once
        if x is weight:
            if x.format == own.format:  # a stored frozen weight, whose amax is always the same
                return x
            return delayed.cast(x, history, own, WEIGHT)
        if not isinstance(x, ScaledTensor):
            x = verbs.promote(x, weight.detach())
        return delayed.cast(x, history, first, INPUT)


def check(model: nn.Module, recipe: Recipe) -> None:
    """Raises UnsupportedError where a recipe by history meets a model that a transform runs."""
    every = (recipe, *(other for _, other in recipe.overrides))
    others = (t for m in model.modules() for t in transforms(m) if not isinstance(t, Histories))
    if any(isinstance(r, Delayed) for r in every) and any(others):
        raise UnsupportedError(
            "delayed scaling runs each layer under a mode of its own, which the mode of a model "
            "that unit_scale (or another transform) made would take for parts of the model: take "
            "Unit() or Current(), which need no history"
        )


def attach(module: nn.Module) -> None:
    """Give each weight of `module` that its recipe scales by history one, and no other; those of
    that length that there are stay."""
    found = {}
    for name, p in module.named_parameters(recurse=False):
        recipe = p.recipe if isinstance(p, ScaledTensor) else None
        looked_up = isinstance(module, (nn.Embedding, nn.EmbeddingBag))
        if isinstance(recipe, Delayed) and p.dim() > 1 and not looked_up:
            found[name] = delayed.new(recipe.history, p.device)
    present = {name: module.get_buffer(name + _SUFFIX).shape for name in _names(module)}
    if present == {name: history.shape for name, history in found.items()}:
        return
    detach(module)
    for name, history in found.items():
        module.register_buffer(name + _SUFFIX, history)
    if found:
        module.register_load_state_dict_pre_hook(_allow_missing)  # type: ignore[no-untyped-call]
        interpose(module, Histories(module))


def detach(module: nn.Module) -> None:
    """Take its histories from `module`."""
    others = [t for t in transforms(module) if not isinstance(t, Histories)]
    if len(others) == len(transforms(module)):
        return
    remove(module)
    for t in others:
        interpose(module, t)
    for name in _names(module):
        del module._buffers[name + _SUFFIX]
    drop_hooks(module._load_state_dict_pre_hooks, _allow_missing)


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
    seen = [
        module.get_buffer(name + _SUFFIX)[:, 0]
        for module in model.modules()
        for name in _names(module)
    ]
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
