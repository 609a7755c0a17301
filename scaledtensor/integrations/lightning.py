"""Lightning: `Trainer(plugins=ScaledPrecision("unit"))` trains a module as ScaledTensors."""

from collections.abc import Callable
from typing import Any

from lightning.pytorch.plugins import Precision
from torch import nn

from scaledtensor.model import scale_model
from scaledtensor.recipes import Recipe, Unit
from scaledtensor.recipes import get as get_recipe
from scaledtensor.steps import is_scaled

__all__ = ["ScaledPrecision"]


class ScaledPrecision(Precision):  # type: ignore[misc]
    """Wraps the parameters of a LightningModule by `scale_model`, before its optimizers are made.

    It takes the place of `precision=` in `lightning.pytorch.Trainer`. A module that has
    ScaledTensor parameters already is left as it is. Checkpoints hold the ScaledTensors, and load
    into modules that are converted and, by value, into plain ones.

    Args:
        recipe: how products cast, or the name of a recipe.
        filter_fn: which modules are converted, as `scale_model` takes it.

    Raises:
        RecipeError: no recipe has that name.
    """

    def __init__(
        self,
        recipe: Recipe | str = Unit(),  # noqa: B008 - frozen
        filter_fn: Callable[[nn.Module, str], bool] | None = None,
    ) -> None:
        self.recipe, self.filter_fn = get_recipe(recipe), filter_fn

    def convert_module(self, module: nn.Module) -> nn.Module:
        if any(is_scaled(p) for p in module.parameters()):
            return module
        return scale_model(module, self.recipe, self.filter_fn)

    def __repr__(self) -> Any:
        return f"ScaledPrecision({self.recipe})"
