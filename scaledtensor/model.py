"""Whole-model verbs: wrap the parameters of an unchanged model, and unwrap them again."""

import fnmatch
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from scaledtensor import histories, steps
from scaledtensor.coded import CodedTensor
from scaledtensor.errors import ModelError, RecipeError, UnsupportedError
from scaledtensor.ops.functions import cast_once
from scaledtensor.recipes import Recipe, Unit
from scaledtensor.recipes import get as get_recipe
from scaledtensor.shards import is_sharded, part_of
from scaledtensor.steps import is_scaled
from scaledtensor.tensor import ScaledTensor, is_stored
from scaledtensor.wrap import scaled

__all__ = ["scale_model", "unscale_model"]

M = TypeVar("M", bound=nn.Module)

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)

#: Modules whose weights are no factors of matrix products.
_OTHERS = (nn.Embedding, nn.EmbeddingBag, nn.LayerNorm, nn.RMSNorm)

#: Where a module says which of its weights of products are something else to another module.
UNCAST = "_not_only_factors"

#: Attributes that make a ScaledTensor parameter one. Every other is a tag of the user's, and stays.
_OWN = {
    *CodedTensor.INNER,
    *("format", "granularity", "recipe", "nonnegative", "decoded", "amax_history", "_is_param"),
    steps.MARK,
}


def scale_model(
    model: M,
    recipe: Recipe | str = Unit(),  # noqa: B008 - frozen
    filter_fn: Callable[[nn.Module, str], bool] | None = None,
) -> M:
    """Wrap every floating-point parameter of `model` in a ScaledTensor, in place.

    Modules are not replaced: hooks, modes, overridden forwards and parametrizations stay. Tied
    parameters stay tied, frozen ones frozen. Buffers and integer parameters stay plain. Create the
    optimizer afterwards, since the parameters are new objects.

    Under a recipe with `store_frozen`, weights of products that require no gradient now are stored
    as products cast them. To train one later, widen it first: `p.data = p.detach().dequantize()`.

    `print(model)` then shows the recipe of each module that has wrapped parameters.

    Args:
        model: any module.
        recipe: how products cast, or the name of a recipe. Its `overrides` and `min_size` choose
            for each module by name and by the size of its weight.
        filter_fn: called as `filter_fn(module, fqn)` with the module that owns a parameter and its
            fully qualified name; False leaves that module's own parameters plain, and its matrix
            products in the activation format.

    Returns:
        The same model.

    Raises:
        ModelError: a parameter is wrapped already, has no data yet, is of a dtype without a format,
            or carries hooks of its own. The model is then unchanged.
        RecipeError: no recipe has that name; a pattern of its overrides matches no module; or a
            weight does not fit its blocks and the recipe has no padding.
        UnsupportedError: a recipe by history, for a model that `unit_scale` made.
    """
    chosen = get_recipe(recipe)
    _check_patterns(model, chosen)
    histories.check(model, chosen)
    frozen = _frozen_weights(model)

    def wrap(p: nn.Parameter, fqn: str, name: str) -> Tensor | None:
        if is_lazy(p):
            raise ModelError(f"{name} has no shape yet; run one batch through the model first")
        if isinstance(p, ScaledTensor):
            raise ModelError(f"{name} is a ScaledTensor already; unscale_model() undoes it")
        if not p.dtype.is_floating_point:
            return None
        if p.dtype not in _DTYPES:
            allowed = ", ".join(str(d) for d in _DTYPES)
            raise ModelError(f"{name} is {p.dtype}; parameters are one of {allowed}")
        own = chosen.for_module(fqn)
        if own is None or _is_small(p, own):
            return None
        own.check_shape(tuple(p.shape), name)
        held = scaled(p.detach(), own.master, recipe=own)
        return cast_once(held) if own.store_frozen and id(p) in frozen else held

    _replace_parameters(model, wrap, _scaled_gradient, filter_fn)
    for module in model.modules():
        histories.attach(module)
    _note_ties(model)
    _show_recipes(model)
    return model


def _scaled_gradient(g: Tensor) -> Tensor:
    """That of an embedding may be sparse."""
    if not g.is_sparse:
        return scaled(g)
    return torch.sparse_coo_tensor(
        g._indices(), scaled(g._values()), g.shape, check_invariants=False
    )


def unscale_model(model: M) -> M:
    """Replace every ScaledTensor parameter of `model` by a plain one of the same value, in place.

    Exact wherever the appearance dtype holds the value; gradients are dequantised too. Of a weight
    that was stored as products cast it (`Recipe.store_frozen`), that is the rounded value.

    Returns:
        The same model.

    Raises:
        ModelError: no parameter of `model` is a ScaledTensor.
    """
    if any(is_sharded(p) for p in model.parameters()):
        raise ModelError(
            "parameters of this model are spread over ranks, which unwraps none of them: put "
            "p.full_tensor().dequantize() of each into a new model, or a checkpoint of it "
            "(scaledtensor.checkpoint) into a plain one"
        )
    if not any(isinstance(p, ScaledTensor) for p in model.parameters()):
        raise ModelError("no parameter of this model is a ScaledTensor")

    def unwrap(p: nn.Parameter, fqn: str, name: str) -> Tensor | None:
        return p.detach().dequantize() if isinstance(p, ScaledTensor) else None

    def plain(g: Tensor) -> Tensor:
        return g.dequantize() if isinstance(g, ScaledTensor) else g

    for module in model.modules():
        histories.detach(module)
    _replace_parameters(model, unwrap, plain, None)
    _show_recipes(model)
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
    """Ids of the frozen parameters that are weights of products to every module that owns them."""
    found: set[int] = set()
    others: set[int] = set()
    for module, _, name, p in _parameters(model):
        factor = not is_lazy(p) and is_factor(module, name, p)
        (found if factor and not p.requires_grad else others).add(id(p))
    return found - others


def _note_ties(model: nn.Module) -> None:
    """Tell each module which of its weights are read elsewhere by what is no product."""
    owners = list(_parameters(model))
    others = {id(p) for module, _, name, p in owners if not is_factor(module, name, p)}
    for module, _, name, p in owners:
        if id(p) in others and is_factor(module, name, p):
            module.__dict__[UNCAST] = (*module.__dict__.get(UNCAST, ()), name)


def is_factor(module: nn.Module, name: str, p: Tensor) -> bool:
    """Whether a parameter of that name is a weight of products to `module`."""
    # Of one dimension but for its shape is what is added, or multiplied by elements.
    wide = sum(n > 1 for n in p.shape) > 1
    return wide and name.endswith(("weight", "proj")) and not isinstance(module, _OTHERS)


def refuse_stored(held: steps.Held) -> None:
    """Before each step of an optimizer. Raises UnsupportedError where it would train a weight that
    is stored as products cast it."""
    for p in (p for _, ours in held for p in ours if p.grad is not None):
        if is_stored(part_of(p)):
            raise UnsupportedError(
                f"the optimizer has a gradient for a weight of {tuple(p.shape)} that is stored "
                f"in {part_of(p).format.name} (Recipe.store_frozen), which would round its updates "
                "away: widen it first by p.data = p.detach().dequantize(), or let it require "
                "a gradient before scale_model()"
            )


# --- what print(model) shows -----------------------------------------------------------------


def _shown(module: nn.Module, own: Callable[[], str] | None) -> str:
    """A module's `extra_repr`, and the recipe of its parameters."""
    usual = type(module).extra_repr(module) if own is None else own()
    recipes = {
        str(part_of(p).recipe)
        for p in module.parameters(recurse=False)
        if is_scaled(p) and part_of(p).recipe is not None
    }
    return ", ".join(filter(None, (usual, *sorted(recipes))))


def _show_recipes(model: nn.Module) -> None:
    """Let `extra_repr` tell recipes where a module has any, and what it told before elsewhere."""
    for module in model.modules():
        present: Any = module.__dict__.get("extra_repr")
        ours = isinstance(present, partial) and present.func is _shown
        has_recipe = any(is_scaled(p) for p in module.parameters(recurse=False))
        if has_recipe and not ours:
            module.__dict__["extra_repr"] = partial(_shown, module, present)
        elif ours and not has_recipe:
            del module.__dict__["extra_repr"]
            if present.args[1] is not None:
                module.__dict__["extra_repr"] = present.args[1]


def _replace_parameters(
    model: nn.Module,
    convert: Callable[[nn.Parameter, str, str], Tensor | None],
    convert_grad: Callable[[Tensor], Tensor],
    filter_fn: Callable[[nn.Module, str], bool] | None,
) -> None:
    """Convert all first, then swap: an error leaves the model as it was."""
    made: dict[int, nn.Parameter] = {}
    for module, fqn, name, p in _parameters(model):
        if id(p) in made or (filter_fn is not None and not filter_fn(module, fqn)):
            continue
        full = f"{fqn}.{name}" if fqn else name
        data = convert(p, fqn, full)
        if data is None:
            continue
        _check_hookless(p, full)
        new = nn.Parameter(data, p.requires_grad)
        for key, tag in vars(p).items():
            if key not in _OWN:
                setattr(new, key, tag)
        if p.grad is not None:
            new.grad = convert_grad(p.grad)
        made[id(p)] = new
    for module, _, name, p in list(_parameters(model)):
        if id(p) in made:
            # As an assignment would: recurrent layers keep a list of their parameters beside it.
            setattr(module, name, made[id(p)])


def _parameters(model: nn.Module) -> Iterator[tuple[nn.Module, str, str, nn.Parameter]]:
    for fqn, module in model.named_modules():
        for name, p in module._parameters.items():
            if p is not None:
                yield module, fqn, name, p


def _check_hookless(p: nn.Parameter, name: str) -> None:
    if p._backward_hooks or getattr(p, "_post_accumulate_grad_hooks", None):
        raise ModelError(
            f"{name} has hooks registered on the parameter itself, which a new parameter would "
            "lose; register them after the conversion"
        )
