"""Lightning: `Trainer(plugins=ScaledPrecision("unit"))` trains a module with ScaledTensors."""

from collections.abc import Callable
from typing import Any

from lightning.pytorch.plugins import Precision
from torch import nn

from scaledtensor.models.delayed import parameter_of
from scaledtensor.models.scale_model import scale_model
from scaledtensor.recipes import Recipe, Unit
from scaledtensor.recipes import get as get_recipe
from scaledtensor.tensors.steps import is_scaled

__all__ = ["ScaledPrecision"]

#: The key of the histories of delayed scaling in a checkpoint.
_HISTORIES = "scaledtensor_histories"


class ScaledPrecision(Precision):  # type: ignore[misc]
    """Wraps the parameters of a LightningModule by `scale_model`, before its optimizers are made.

    It replaces `precision=` in `lightning.pytorch.Trainer`. A module that has ScaledTensor
    parameters already stays as it is. Checkpoints hold the ScaledTensors. They load into converted
    modules and, by value, into plain ones.

    Args:
        recipe: a recipe, which says how products cast, or its name.
        filter_fn: choice of the modules that are converted; see `scale_model`.

    Raises:
        RecipeError: no recipe has that name.
    """

    def __init__(
        self,
        recipe: Recipe | str = Unit(),  # noqa: B008 - frozen
        filter_fn: Callable[[nn.Module, str], bool] | None = None,
    ) -> None:
        self.recipe, self.filter_fn = get_recipe(recipe), filter_fn
        self.module: nn.Module | None = None

    def convert_module(self, module: nn.Module) -> nn.Module:
        self.module = module
        if any(is_scaled(p) for p in module.parameters()):
            return module
        return scale_model(module, self.recipe, self.filter_fn)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        # Lightning loads weights before `convert_module`, into a module without histories.
        state = checkpoint["state_dict"]
        names = [name for name in state if is_scaled(state.get(parameter_of(name)))]
        checkpoint[_HISTORIES] = {name: state.pop(name) for name in names}

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        # So it loaded only values. Now the module has places for scales, with which training
        # continues.
        if self.module is not None and any(is_scaled(p) for p in self.module.parameters()):
            state = checkpoint["state_dict"] | checkpoint.get(_HISTORIES, {})
            self.module.load_state_dict(state, strict=getattr(self.module, "strict_loading", True))

    def __repr__(self) -> Any:
        return f"ScaledPrecision({self.recipe})"
