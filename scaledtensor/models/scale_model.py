"""`scale_model` wraps the parameters of a model in place, and `unscale_model` unwraps them.

Parameters stay the same objects, so optimizers, schedulers and ties keep working. The sections of
this file: the two verbs, frozen weights, the text that `print(model)` shows, and the conversion of
parameters.
"""

import fnmatch
import gc
import sys
from collections.abc import Callable, Iterator
from functools import partial
from importlib import import_module
from typing import Any, NamedTuple, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from scaledtensor import _torch
from scaledtensor.errors import ModelError, RecipeError, UnsupportedError
from scaledtensor.models import delayed, interpose, scripting, state_dicts
from scaledtensor.models.operands import is_operand, note_ties
from scaledtensor.models.simulate import refuse_simulated
from scaledtensor.models.state_dicts import kept
from scaledtensor.ops.products.sites import Site
from scaledtensor.ops.results import dequantized
from scaledtensor.recipes import Delayed, Recipe, Unit
from scaledtensor.recipes import get as get_recipe
from scaledtensor.recipes.casts import Cast
from scaledtensor.scales.singles import CELLS
from scaledtensor.tensors import steps
from scaledtensor.tensors.shards import is_dtensor, part_of
from scaledtensor.tensors.sparse import coo
from scaledtensor.tensors.steps import is_scaled
from scaledtensor.tensors.storable import check_strided
from scaledtensor.tensors.tensor import ScaledTensor, is_stored
from scaledtensor.tensors.wrap import scaled
from scaledtensor.tensors.wrapper import Wrapper, is_wrapper

__all__ = ["TRAINS_AS", "scale_model", "show", "unscale_model"]

M = TypeVar("M", bound=nn.Module)

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)

#: Attributes that belong to a ScaledTensor parameter. All others are the user's tags, and stay.
_OWN = {
    *ScaledTensor.INNER,
    "tensor_scale",
    *CELLS,
    *("format", "recipe", "nonnegative", "coding", "power", "memo", "site", "_is_param"),
    *("config", "order", "extras", "input_scale", "columns", "loop"),
    steps.MARK,
}


#: The attribute of a module that tells which of its weights train for few bits, and how
#: (`quantization/training.py`).
TRAINS_AS = "_trains_as"


def scale_model(
    model: M,
    recipe: Recipe | str = Unit(),  # noqa: B008 - frozen
    filter_fn: Callable[[nn.Module, str], bool] | None = None,
) -> M:
    """Wrap every floating-point parameter of `model` in a ScaledTensor, in place; or switch a model
    that is scaled already to another recipe.

    Modules are not replaced, so hooks, modes, overridden forwards and parametrizations stay.
    Parameters stay the same objects, with their `requires_grad`, their gradients and their
    attributes. So tied parameters stay tied, and optimizers with their states, schedulers and
    averages of weights that were made before keep working. Buffers and integer parameters stay
    plain.

    A switch to another recipe gives the same model as a fresh one with these values. Parameters
    that the recipe leaves plain become plain again, and masters of another format are rounded to
    it.

    Under a recipe with `store_frozen`, weights of products that require no gradient now are stored
    as products cast them. To train one later, widen it first: `p.data = p.detach().dequantize()`.

    `print(model)` then shows the recipe of each module that has wrapped parameters.

    Args:
        model: any module.
        recipe: a recipe, which says how products cast, or its name. Its `overrides` and `min_size`
            choose for each module by name and by the size of its weight.
        filter_fn: called as `filter_fn(module, fqn)` with a module that owns parameters and its
            fully qualified name. False leaves this module's own parameters as they are. Products
            with plain parameters run in the activation format.

    Returns:
        The same model.

    Raises:
        ModelError: `model` is no module; a parameter has no data yet, is of a dtype without a
            format, is spread over ranks, is a `CodedTensor`, or has hooks of its own; or it cannot
            stay the same object, since DistributedDataParallel, a graph whose backward pass has not
            run, a view or a weak reference holds it. The model is then unchanged. The backward pass
            of a graph that was recorded before the conversion raises ModelError too.
        RecipeError: no recipe has that name; a pattern of its overrides matches no module; or a
            weight does not fit its blocks and the recipe has no padding.
        UnsupportedError: the model simulates a format.
    """
    if not isinstance(model, nn.Module):
        raise ModelError(
            f"scale_model takes an nn.Module; got {type(model).__name__}. scaledtensor.scaled(x) "
            "wraps a single tensor"
        )
    chosen = get_recipe(recipe)
    refuse_simulated(model)
    for module in model.modules():
        if any(interpose.is_alone(t) for t in interpose.transforms(module)):
            raise ModelError(
                "this model trains for few bits (quantize_(..., train=True)): unscale_model(model) "
                "ends that, and comes before scale_model(model, ...)"
            )
    _check_patterns(model, chosen)
    changes: dict[int, _Change] = {}
    for module, fqn, name, p in _parameters(model):
        if filter_fn is not None and not filter_fn(module, fqn):
            continue
        full = f"{fqn}.{name}" if fqn else name
        _check_scalable(p, full)
        if not p.dtype.is_floating_point:
            continue
        own = chosen.for_module(fqn)
        if own is not None and _is_small(p, own):
            own = None
        if own is not None:
            own.check_shape(tuple(p.shape), full)
        if isinstance(own, Delayed):
            delayed.check(module, fqn, name)
        # Of a tied parameter, the first owner that has a recipe for it decides.
        if id(p) not in changes or changes[id(p)].recipe is None:
            changes[id(p)] = _Change(p, full, own, own is not None and own.store_frozen)
    frozen = _frozen_weights(model)
    _convert(model, [c._replace(stored=c.stored and key in frozen) for key, c in changes.items()])
    complete(model)
    for plug_in in plug_ins(model):
        plug_in.attach(model, chosen)
    return model


def complete(model: nn.Module) -> None:
    """Add to the modules of `model` everything that goes with ScaledTensor parameters: histories,
    hooks of state dicts, notes of ties, and recipes in `print(model)`."""
    taken: set[int] = set()
    for module in model.modules():
        delayed.attach(module, taken)
        state_dicts.attach(module)
        scripting.attach(module)
    note_ties(model)
    show(model)


def plug_ins(model: nn.Module) -> list[Any]:
    """The plug-in for transformers, if `model` contains one of its models. Only then has the user
    loaded transformers."""
    library, models = map(sys.modules.get, ("transformers", "transformers.modeling_utils"))
    if library is None or models is None or int(library.__version__.partition(".")[0]) < 5:
        return []
    if not any(isinstance(module, models.PreTrainedModel) for module in model.modules()):
        return []
    return [import_module("scaledtensor.integrations.transformers")]


def unscale_model(model: M) -> M:
    """Make every ScaledTensor and every quantised parameter of `model` a plain one of the same
    value, in place. It ends a training for few bits too (`quantize_(..., train=True)`), whose
    parameters are plain and stay as they are.

    Parameters stay the same objects, as in `scale_model`. The value is exact if the parameter's
    dtype holds it. Gradients are dequantized too, and so are buffers that the model has set to
    scaled results (running means). A weight that was stored as products cast it
    (`Recipe.store_frozen`) keeps the rounded value.

    Returns:
        The same model.

    Raises:
        ModelError: no parameter of `model` is scaled or quantised, or one has hooks of its own or
            cannot stay the same object (see `scale_model`). The model is then unchanged.
    """
    if any(is_dtensor(p) and is_wrapper(_torch.local_part(p)) for p in model.parameters()):
        raise ModelError(
            "parameters of this model are spread over ranks, which unwraps none of them: put "
            "p.full_tensor().dequantize() of each into a new model, or a checkpoint of it "
            "(scaledtensor.checkpoint) into a plain one"
        )
    changes = {
        id(p): _Change(p, f"{fqn}.{name}" if fqn else name, None, False)
        for _, fqn, name, p in _parameters(model)
        if isinstance(p, Wrapper)
    }
    modules = ((m, t) for m in model.modules() for t in interpose.transforms(m))
    ended = [(m, t) for m, t in modules if interpose.is_alone(t)]
    if not changes and not ended:
        raise ModelError("no parameter of this model is a ScaledTensor or quantised")
    _convert(model, list(changes.values()))
    for module, transform in ended:
        interpose.remove(module, transform)
    for module in model.modules():
        delayed.detach(module)
        state_dicts.attach(module)
        scripting.attach(module)
        for name, buffer in module.named_buffers(recurse=False):
            if isinstance(buffer, ScaledTensor):  # the module put a scaled result there
                module._buffers[name] = buffer.detach().dequantize()
    note_ties(model)
    show(model)
    for plug_in in plug_ins(model):
        plug_in.detach(model)
    return model


def _check_patterns(model: nn.Module, recipe: Recipe) -> None:
    names = [fqn for fqn, _ in model.named_modules()]
    for pattern, _ in recipe.overrides:
        if not fnmatch.filter(names, pattern):
            raise RecipeError(
                f"the recipe overrides {pattern!r}, and no module of this model has such a name: "
                f"they are {', '.join(names[1:9])}{', ...' if len(names) > 9 else ''}"
            )


def _is_small(p: nn.Parameter, recipe: Recipe) -> bool:
    return p.dim() > 1 and min(p.shape) < recipe.min_size


# --- frozen weights --------------------------------------------------------------------------


def _frozen_weights(model: nn.Module) -> set[int]:
    """Ids of the frozen parameters that are operands of products in every module that owns them."""
    found: set[int] = set()
    others: set[int] = set()
    for module, _, name, p in _parameters(model):
        operand = not is_lazy(p) and is_operand(module, name, p)
        (found if operand and not p.requires_grad else others).add(id(p))
    return found - others


def refuse_stored(held: steps.Held) -> None:
    """Called before each step of an optimizer. Raises UnsupportedError if the step would train a
    weight that is stored as products cast it."""
    for p in (p for _, ours in held for p in ours):
        if is_stored(part_of(p)) and p.grad is not None:
            raise UnsupportedError(
                f"the optimizer has a gradient for a weight of {tuple(p.shape)} that is stored "
                f"in {part_of(p).format.name} (Recipe.store_frozen), which would round its updates "
                "away: widen it first by p.data = p.detach().dequantize(), or let it require "
                "a gradient before scale_model()"
            )


# --- print(model) ----------------------------------------------------------------------------


def _shown(module: nn.Module, own: Callable[[], str] | None) -> str:
    """A module's `extra_repr`, and the recipe or the config of its parameters."""
    usual = type(module).extra_repr(module) if own is None else own()
    return ", ".join(filter(None, (usual, *sorted(_told(module)))))


def _told(module: nn.Module) -> set[str]:
    params = list(module.parameters(recurse=False))
    told = [part_of(p).recipe for p in params if is_scaled(p)]
    told += [getattr(p, "config", None) for p in params if is_wrapper(p)]
    told += module.__dict__.get(TRAINS_AS, {}).values()
    return {str(x) for x in told if x is not None}


def show(model: nn.Module) -> None:
    """Let `extra_repr` of a module with recipes or configs show them, and restore `extra_repr` of
    all others."""
    for module in model.modules():
        present: Any = module.__dict__.get("extra_repr")
        ours = isinstance(present, partial) and present.func is _shown
        told = bool(_told(module))
        if told and not ours:
            module.__dict__["extra_repr"] = partial(_shown, module, present)
        elif ours and not told:
            del module.__dict__["extra_repr"]
            if present.args[1] is not None:
                module.__dict__["extra_repr"] = present.args[1]


# --- parameters change and stay the same objects ---------------------------------------------


class _Change(NamedTuple):
    """The change of one parameter."""

    parameter: nn.Parameter
    name: str
    recipe: Recipe | None
    """The new recipe; None makes the parameter plain."""
    stored: bool
    """Whether the parameter will be stored as products cast it."""

    @property
    def swaps(self) -> bool:
        """Whether a plain parameter becomes a ScaledTensor, or the other way round."""
        return (self.recipe is not None) != is_wrapper(self.parameter)


def _convert(model: nn.Module, changes: list[_Change]) -> None:
    """Check all changes first, so that an error leaves the model unchanged. Then make one after
    another, so that at most one parameter exists twice at a time."""
    stepping = steps.optimizers()  # read now: the last ScaledTensor takes this list with it
    with _torch.without_weak_references(model):
        for change in changes:
            if change.swaps:
                _check_swap(change)
        for change in changes:
            if change.swaps:
                _swap(change)
            elif change.recipe is not None:
                _switch(change)
    for optimizer in stepping:
        steps.adopt_states(optimizer, (p for p, _, recipe, _ in changes if recipe is None))


def _swap(change: _Change) -> None:
    p, own = change.parameter, change.recipe
    data = p.detach().dequantize() if own is None else kept(p.detach(), own, change.stored)
    new = nn.Parameter(data, p.requires_grad)
    for key, tag in vars(p).items():
        if key not in _OWN:
            setattr(new, key, tag)
    if own is not None:
        new.site = Site(change.name, new=True)  # type: ignore[attr-defined]
    if p.grad is not None:
        new.grad = dequantized(p.grad) if own is None else _scaled_gradient(p.grad)
    _torch.swap(p, new, lambda: ModelError(_RECORDED.format(change.name)))


def _scaled_gradient(g: Tensor) -> Tensor:
    """A gradient as a ScaledTensor. An embedding's may be sparse."""
    return coo(g, scaled(g._values())) if g.is_sparse else scaled(g)


def _switch(change: _Change) -> None:
    """Give a ScaledTensor another recipe. A weight that stays stored in the same cast is not
    rounded again."""
    p: Any = change.parameter
    recipe, stored = cast(Recipe, change.recipe), change.stored
    if stored and is_stored(p) and _weight_cast(p.recipe) == _weight_cast(recipe):
        p.recipe = recipe
    else:
        # float64 holds all elements. The dtype that the parameter shows may hold less.
        p.data = kept(p.detach().to(torch.float64).dequantize(), recipe, stored, p.dtype)
    p.site = Site(change.name, new=True)
    steps.watch(p)


def _weight_cast(recipe: Recipe) -> Cast | None:
    return None if recipe.gemms.once is None else recipe.gemms.once[1]


def _parameters(model: nn.Module) -> Iterator[tuple[nn.Module, str, str, nn.Parameter]]:
    for fqn, module in model.named_modules():
        for name, p in module._parameters.items():
            if p is not None:
                yield module, fqn, name, p


def _check_scalable(p: nn.Parameter, name: str) -> None:
    if is_lazy(p):
        raise ModelError(f"{name} has no shape yet; run one batch through the model first")
    if isinstance(p, _torch.FakeTensor):
        raise ModelError(
            f"{name} is a FakeTensor, which has no elements to measure and which its mode keeps; "
            "build and convert the model under torch.device('meta')"
        )
    if is_dtensor(p):
        raise ModelError(
            f"{name} is spread over ranks; call scale_model() before fully_shard() and "
            "parallelize_module()"
        )
    if is_wrapper(p) and not isinstance(p, ScaledTensor):
        raise ModelError(
            f"{name} is a {p.kind}, whose codes and scales were made together: unscale_model() "
            "makes it plain, and a scaled model then trains on from its value"
        )
    if p.dtype.is_floating_point and p.dtype not in _DTYPES and not isinstance(p, ScaledTensor):
        allowed = ", ".join(str(d) for d in _DTYPES)
        raise ModelError(f"{name} is {p.dtype}; parameters are one of {allowed}")


def _check_swap(change: _Change) -> None:
    p, name = change.parameter, change.name
    check_strided(p)
    if p._backward_hooks or getattr(p, "_post_accumulate_grad_hooks", None):
        raise ModelError(
            f"{name} has hooks registered on the parameter itself, which see a gradient of another "
            "class after the conversion, and which the parameter would lose; register them "
            "after it"
        )
    holder = _torch.holder_of(p)
    if holder is not None:
        gc.collect()  # a cycle that a compilation left behind may hold it
        holder = _torch.holder_of(p)
    if holder is not None:
        raise ModelError(f"{name} cannot become another kind of tensor: {_HELD[holder]}")


#: A finding of `_torch.holder_of` -> a description of the holder, with advice.
_HELD = {
    "weak reference": "a weak reference to it is alive, as a compiled step of an optimizer keeps; "
    "convert the model first, and compile optimizer.step afterwards",
    "hook": "hooks are registered at the node of the graph that accumulates its gradient, as "
    "DeepSpeed does, and would not be called again; convert the model first",
    "tensor": "a graph whose backward pass has not run, a view of it or DistributedDataParallel "
    "holds it. Convert the model before DistributedDataParallel(model) and before "
    "torch.nn.utils.weight_norm(module) (torch.nn.utils.parametrizations.weight_norm may come "
    "first); run the backward pass first, or delete what the model returned",
}

_RECORDED = (
    "this graph was recorded before {} was converted (scale_model, unscale_model), so that its "
    "gradient has no place to go: run the backward pass before, or the forward pass again"
)
