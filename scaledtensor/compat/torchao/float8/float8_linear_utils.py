"""Conversion of linear layers, and histories of casts: torchao's `float8.float8_linear_utils`."""

from collections.abc import Callable, Iterable
from functools import partial
from typing import TypeVar

import torch
from torch import nn

import scaledtensor as sct
from scaledtensor.compat.torchao.float8.config import (
    Float8LinearConfig,
    Float8LinearRecipeName,
    ScalingType,
)
from scaledtensor.compat.torchao.float8.float8_linear import Float8Linear
from scaledtensor.compat.torchao.float8.recipe import casts, recipe_of
from scaledtensor.errors import ModelError, RecipeError, UnsupportedError
from scaledtensor.formats import BF16, FP16, FP32
from scaledtensor.models import delayed

__all__ = [
    "convert_to_float8_training",
    "linear_requires_sync",
    "sync_float8_amax_and_scale_history",
]

M = TypeVar("M", bound=nn.Module)

Filter = Callable[[nn.Module, str], bool]

_FORMATS = {torch.float32: FP32, torch.bfloat16: BF16, torch.float16: FP16}


def convert_to_float8_training(
    module: M,
    *,
    module_filter_fn: Filter | None = None,
    config: Float8LinearConfig | None = None,
) -> M:
    """Prepare the linear layers of `module` for training in FP8, in place: calls `scale_model` with
    the config's recipe.

    Activations and parameters keep the dtype of each layer's weight. Parameters and modules stay
    the same objects, so an existing optimizer keeps its parameters. The class of each `nn.Linear`
    becomes `Float8Linear`. A subclass of `nn.Linear` keeps its class and its forward.

    Args:
        module: any module; a linear layer itself too.
        module_filter_fn: called as `module_filter_fn(module, fqn)` with each `nn.Linear`. If it
            returns False, the layer's parameters stay plain, like the parameters of all modules
            that are not linear layers.
        config: defaults to `Float8LinearConfig()`, which is tensorwise dynamic scaling.

    Returns:
        The same module.

    Raises:
        ModelError: `scale_model` cannot convert the module.
        RecipeError: `config` is no `Float8LinearConfig` of this module, or a product of its formats
            needs `emulate=True`.
        UnsupportedError: the config combines delayed casts with casts that are not tensorwise
            dynamic ones, or rounds delayed scales.
    """
    if not isinstance(module, nn.Module):
        raise ModelError(f"convert_to_float8_training takes an nn.Module; got {module!r}")
    if config is None:
        config = Float8LinearConfig()
    if not isinstance(config, Float8LinearConfig):
        raise RecipeError(
            f"config is a {Float8LinearConfig.__module__}.Float8LinearConfig; got {config!r}"
        )
    chosen = [
        m
        for fqn, m in module.named_modules()
        if isinstance(m, nn.Linear) and (module_filter_fn is None or module_filter_fn(m, fqn))
    ]
    for dtype in dict.fromkeys(m.weight.dtype for m in chosen):
        recipe = recipe_of(config, _FORMATS.get(dtype, FP32))
        sct.scale_model(module, recipe, _among([m for m in chosen if m.weight.dtype == dtype]))
    for m in chosen:
        if type(m) is nn.Linear:
            vars(m)["config"] = config
            m.__class__ = Float8Linear
    return module


def _among(modules: list[nn.Linear]) -> Filter:
    ids = {id(m) for m in modules}
    return lambda module, fqn: id(module) in ids


def linear_requires_sync(config: Float8LinearConfig) -> bool:
    """Return whether a cast of the config is delayed."""
    return any(c.scaling_type is ScalingType.DELAYED for c in casts(config))


def sync_float8_amax_and_scale_history(
    model: nn.Module, fp8_layers: Iterable[nn.Module] | None = None
) -> None:
    """Share the amaxes of delayed casts between all ranks, then end a step of their histories.

    A step of any optimizer of torch does the same, so this function is needed only without such an
    optimizer. Beside an optimizer it makes no second step, before `optimizer.step()` (as in
    torchao's examples) or after it: a history advances only if it has seen a cast since its last
    step.

    Args:
        model: a model with delayed casts. A model without them does not change.
        fp8_layers: the model's FP8 layers, if the caller has a list of them.
    """
    for layer in [model] if fp8_layers is None else fp8_layers:
        delayed.share_histories(layer)
        delayed.advance(layer)


def _auto_filter_for_recipe(recipe: str | Float8LinearRecipeName, filter_fqns: list[str]) -> Filter:
    """Return a filter that leaves out layers whose casts take more time than FP8 products save.

    It leaves out small layers, layers with sizes that are no multiples of 16, and layers with a
    string from `filter_fqns` in their name. The limits of size are from torchao's measurements on
    an H100.

    Raises:
        RecipeError: no config has this name.
        UnsupportedError: the name is "rowwise_with_gw_hp". torchao has no measurements of it.
    """
    Float8LinearConfig.from_recipe_name(recipe)
    name = Float8LinearRecipeName(recipe)
    if name is Float8LinearRecipeName.ROWWISE_WITH_GW_HP:
        raise UnsupportedError(
            f"there is no automatic filter for {name.value!r}; pass a module_filter_fn of your own"
        )
    return partial(_pays, by_row=name is Float8LinearRecipeName.ROWWISE, left_out=filter_fqns)


def _pays(module: nn.Module, fqn: str, *, by_row: bool, left_out: list[str]) -> bool:
    if not isinstance(module, nn.Linear) or any(name in fqn for name in left_out):
        return False
    n, k = module.weight.shape
    if n % 16 or k % 16:
        return False
    if by_row:
        return n > 2048 and k > 1024 and (n > 4096 or k > 2048)
    return n > 1024 or k > 4096
