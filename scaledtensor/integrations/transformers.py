"""transformers: `from_pretrained`, `save_pretrained` and Trainer for models of ScaledTensors.

The import registers the quantization method "scaledtensor" with transformers. With this method,
`from_pretrained` loads a checkpoint of ScaledTensors, or converts a plain checkpoint:

    import scaledtensor.integrations.transformers as st

    config = st.ScaledConfig("unit")
    model = AutoModelForCausalLM.from_pretrained(path, quantization_config=config)

The folders of `scaledtensor.exchange` open in the same way, as models of quantised weights:

    model = AutoModelForCausalLM.from_pretrained(folder, quantization_config=st.ScaledConfig())

`scaledtensor.scale_model` attaches the method to a model of transformers that it converts, so that
`save_pretrained` and Trainer save the model.
"""

import json
import re
from collections.abc import Container, Iterator, Sequence
from copy import copy
from functools import partial
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.core_model_loading import ConversionOps, WeightConverter
from transformers.quantizers import (
    AutoHfQuantizer,
    HfQuantizer,
    register_quantization_config,
    register_quantizer,
)
from transformers.utils.quantization_config import QuantizationConfigMixin

from scaledtensor.errors import CheckpointError, RecipeError
from scaledtensor.integrations.foreign import (
    Foreign,
    JoinForeign,
    dtype_of,
    foreign_files,
    is_foreign,
)
from scaledtensor.models.delayed import parameter_of
from scaledtensor.models.scale_model import complete, scale_model, unscale_model
from scaledtensor.models.state_dicts import FACTS, joined, parted, parted_names
from scaledtensor.quantization.configs import Config, config_from
from scaledtensor.quantization.tensor import QuantizedTensor
from scaledtensor.quantization.verb import place, quantize_
from scaledtensor.recipes import Recipe, Unit
from scaledtensor.recipes import get as get_recipe
from scaledtensor.tensors.tensor import ScaledTensor, is_stored
from scaledtensor.tensors.wrapper import is_wrapper

__all__ = ["ScaledConfig", "ScaledQuantizer"]

#: The value of `quant_method` in config.json.
METHOD = "scaledtensor"


@register_quantization_config(METHOD)
class ScaledConfig(QuantizationConfigMixin):  # type: ignore[misc]
    """The `quantization_config` of a model of ScaledTensors.

    Args:
        recipe: a recipe, which says how products cast, its name, or its entry in `config.json`; by
            default `Unit()`. A config of `quantize_`, such as `WeightOnly("nvfp4")`, quantises the
            weights after they are loaded. A folder that `scaledtensor.exchange` reads takes no
            recipe, since the folder says how its weights are quantised.
        dequantize: let `save_pretrained` write a plain checkpoint of the values, in the original
            format of the model, with a config.json that does not name this method. By default it
            writes codes, scales and formats, from which `from_pretrained` and Trainer restore all
            bits.

    Raises:
        RecipeError: no recipe has that name, or a field has a value that the recipe does not allow.
    """

    def __init__(
        self,
        recipe: Recipe | Config | str | dict[str, Any] | None = None,
        dequantize: bool = False,
        quant_method: str = METHOD,
    ) -> None:
        self.given = recipe is not None
        self.recipe = _read_recipe(Unit() if recipe is None else recipe)
        self.dequantize = dequantize
        self.quant_method = quant_method

    def to_dict(self) -> dict[str, Any]:
        """The config in types that JSON has. transformers prints it, and writes it to
        config.json."""
        try:
            recipe = json.loads(self.recipe.to_json())
        except RecipeError:  # its class is not registered: it prints, but saving it raises
            recipe = str(self.recipe)
        return {
            "quant_method": self.quant_method,
            "recipe": recipe,
            "dequantize": self.dequantize,
        }


def _read_recipe(given: Any) -> Recipe | Config:
    if isinstance(given, Config):
        return given
    if not isinstance(given, dict):
        return get_recipe(given)
    return config_from(given) if "config" in given else Recipe.from_json(json.dumps(given))


class Join(ConversionOps):  # type: ignore[misc]
    """Makes a ScaledTensor of its parts in a checkpoint."""

    def __init__(self, hf_quantizer: HfQuantizer) -> None:
        # An attribute of this name tells transformers not to cast the parts.
        self.hf_quantizer = hf_quantizer

    def convert(
        self,
        input_dict: dict[str, Any],
        *args: Any,
        full_layer_name: str,
        model: Any,
        **kwargs: Any,
    ) -> dict[str, Tensor]:
        parts = {name.rpartition(".")[2]: found[0] for name, found in input_dict.items()}
        made = joined(full_layer_name, parts)
        if isinstance(made, QuantizedTensor):  # codes stay, and results have the model's dtype
            return {full_layer_name: made.to(dtype_of(model, full_layer_name))}
        return {full_layer_name: made}


@register_quantizer(METHOD)
class ScaledQuantizer(HfQuantizer):  # type: ignore[misc]
    """The methods that transformers calls while it loads and saves a model of ScaledTensors."""

    requires_calibration = False

    def __init__(self, quantization_config: ScaledConfig, **kwargs: Any) -> None:
        super().__init__(quantization_config, **kwargs)
        self.files: list[str] = []
        self.foreign: Foreign | None = None
        self.histories: set[str] = set()
        self.serialized_names: dict[str, list[str]] = {}
        #: An empty list that replaces the model's conversions while the model's own names are
        #: saved, and these conversions.
        self.no_conversions: list[Any] = []
        self.conversions: list[Any] | None = None

    def is_serializable(self) -> bool:
        return True

    @property
    def is_trainable(self) -> bool:
        return True

    @property
    def is_qat_trainable(self) -> bool:
        return True

    @property
    def is_compileable(self) -> bool:
        return True

    # --- loading -----------------------------------------------------------------------------

    def _process_model_before_weight_loading(
        self, model: PreTrainedModel, checkpoint_files: Sequence[str] | None = None, **kwargs: Any
    ) -> None:
        self.foreign = foreign_files(checkpoint_files or ())
        if self.foreign is not None:
            if self.quantization_config.given:
                raise RecipeError(
                    f"{self.foreign.where} says how the weights are quantised, and ScaledConfig() "
                    f"opens them so: {self.quantization_config.recipe} is for a plain checkpoint"
                )
            self.pre_quantized = True
            self.serialized_names = {"weight": self.foreign.names}
        elif self.pre_quantized:
            self.files = list(checkpoint_files or ())
            state = model.state_dict()
            found = [name for name, _ in _read(self.files)]
            leaves = sorted({n.split(".")[-2] for n in found if n.endswith(f".{FACTS}")})
            self.serialized_names = {leaf: parted_names(leaf) for leaf in leaves}
            # Histories of delayed scaling have buffers only after their parameters are loaded.
            self.histories = {n for n in found if parameter_of(n) in state and n not in state}
            known = set(model._keys_to_ignore_on_load_unexpected or ())
            model._keys_to_ignore_on_load_unexpected = known | set(map(re.escape, self.histories))

    def get_load_operations(self) -> dict[str, Any]:
        operation = Join if self.foreign is None else JoinForeign
        return {"deserialize": operation, "dequantize": operation}

    def update_weight_conversions(
        self, weight_conversions: list[Any], model: PreTrainedModel
    ) -> list[Any]:
        """The conversions for loading. A checkpoint of parts has the model's own names, so it needs
        no conversion except for joining the parts."""
        if not self.serialized_names:
            return weight_conversions
        if self.foreign is not None:
            return [*weight_conversions, *self.get_weight_conversions()]
        converters: list[WeightConverter] = self.get_weight_conversions()
        return converters

    def _process_model_after_weight_loading(
        self, model: PreTrainedModel, **kwargs: Any
    ) -> PreTrainedModel:
        # transformers refuses .float() and .half() for a model that it takes to be quantized.
        model.is_quantized = False
        recipe = self.quantization_config.recipe
        if self.foreign is not None:
            held = [p for p in model.parameters() if isinstance(p, QuantizedTensor)]
            for p in held:
                p.requires_grad_(False)
            place(model, {})
            if held:  # config.json of the model's own codes names one of their configs
                self.quantization_config.recipe = held[0].config
        elif not self.serialized_names:  # a plain checkpoint, even if config.json names this method
            if isinstance(recipe, Config):
                quantize_(model, recipe)
            else:
                scale_model(model, recipe)
        else:
            vars(model).pop("_weight_conversions", None)
            complete(model)
            for p in model.parameters():
                if isinstance(p, QuantizedTensor) or (isinstance(p, ScaledTensor) and is_stored(p)):
                    p.requires_grad_(False)  # again: transformers has set it for all parameters
            vars(model).pop("_keys_to_ignore_on_load_unexpected", None)
            with torch.no_grad():
                for name, read in _read(self.files, self.histories):
                    model.get_buffer(name).copy_(read())
        attach(model, self.quantization_config, self)
        return model

    # --- saving ------------------------------------------------------------------------------

    def get_state_dict_and_metadata(
        self, model: PreTrainedModel
    ) -> tuple[dict[str, Tensor] | None, dict[str, str]]:
        """(the tensors that `save_pretrained` writes, its additions to the metadata of files)."""
        _show(model, self.quantization_config)
        if getattr(model, "_hf_peft_config_loaded", False):
            return None, {}  # PEFT saves the adapters by itself
        plain = self.quantization_config.dequantize
        held = vars(model).get("_weight_conversions")
        if not plain and held is not self.no_conversions:
            self.conversions, model._weight_conversions = held, self.no_conversions
        elif plain and held is self.no_conversions:
            model._weight_conversions = self.conversions
        state = model.state_dict(keep_vars=True)
        ties = model.all_tied_weights_keys.items()
        left = {name for name, source in ties if state.get(name) is state.get(source)}
        if plain:
            left |= {n for n in state if is_wrapper(state.get(parameter_of(n)))}
        found: dict[str, Tensor] = {}
        for name, x in state.items():
            if name in left:
                continue
            if not is_wrapper(x):
                found[name] = x.detach() if isinstance(x, Tensor) else x
            elif plain:
                found[name] = x.detach().dequantize()
            else:
                found |= {f"{name}.{part}": t for part, t in parted(x).items()}
        return found, {}

    def _dequantize(
        self, model: PreTrainedModel, dtype: torch.dtype | None = None
    ) -> PreTrainedModel:
        plain: PreTrainedModel = unscale_model(model)
        return plain.to(dtype) if isinstance(dtype, torch.dtype) else plain


# --- folders of other methods ----------------------------------------------------------------

_usual = AutoHfQuantizer.merge_quantization_configs


def _merged(cls: Any, told: Any, given: Any) -> Any:
    """A ScaledConfig that was passed to `from_pretrained` wins over the config of a folder of
    another method, if `scaledtensor.exchange` reads it. transformers refuses two methods."""
    if isinstance(given, ScaledConfig) and is_foreign(told):
        return given
    return _usual(told, given)


AutoHfQuantizer.merge_quantization_configs = classmethod(_merged)


# --- calls of scale_model and unscale_model --------------------------------------------------


def attach(
    model: nn.Module,
    config: ScaledConfig | Recipe | Config,
    quantizer: ScaledQuantizer | None = None,
) -> None:
    """Tell transformers that its models in `model` consist of ScaledTensors."""
    for own in _pretrained(model):
        if quantizer is None:
            held = config if isinstance(config, ScaledConfig) else ScaledConfig(config)
            quantizer = ScaledQuantizer(held)
        own.hf_quantizer = quantizer


def detach(model: nn.Module) -> None:
    """Undo `attach`."""
    for own in _pretrained(model):
        quantizer = vars(own).get("hf_quantizer")
        if isinstance(quantizer, ScaledQuantizer):
            if vars(own).get("_weight_conversions") is quantizer.no_conversions:
                own._weight_conversions = quantizer.conversions
            quantizer.remove_quantization_config(own)


def _pretrained(model: nn.Module) -> Iterator[PreTrainedModel]:
    return (m for m in model.modules() if isinstance(m, PreTrainedModel))


def _show(model: PreTrainedModel, config: ScaledConfig) -> None:
    """Let config.json name this method, if the method will load the checkpoint."""
    before = model.config
    held = getattr(before, "quantization_config", None)
    if config.dequantize and isinstance(held, ScaledConfig):
        del before.quantization_config
    elif not config.dequantize and held is not config:
        # The model gets its own config, since other models may share the present one.
        model.config = copy(before)
        model.config.quantization_config = config
        for module in model.modules():
            if vars(module).get("config") is before:
                module.config = model.config


# --- files -----------------------------------------------------------------------------------


def _read(files: Sequence[str], wanted: Container[str] | None = None) -> Iterator[tuple[str, Any]]:
    """The names in safetensors files, or the wanted ones, each with a function that reads its
    tensor."""
    for path in files:
        if not str(path).endswith(".safetensors"):
            raise CheckpointError(
                f"{path} is no safetensors file, as checkpoints of this method are; weights of "
                "other files go into a model by scaledtensor.checkpoint.load_into"
            )
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118
                if wanted is None or name in wanted:
                    yield name, partial(file.get_tensor, name)
