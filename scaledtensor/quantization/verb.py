"""`quantize_` converts the weights of a model for inference, in place."""

import fnmatch
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from torch.amp import is_autocast_available
from torch.nn.parameter import is_lazy

from scaledtensor.errors import ModelError, QuantizationError
from scaledtensor.formats import TwoLevelScale
from scaledtensor.models import scripting, state_dicts
from scaledtensor.models.operands import TABLES, is_operand
from scaledtensor.models.scale_model import plug_ins, show
from scaledtensor.models.simulate import refuse_simulated
from scaledtensor.ops.products.quantize import mixed, quantized
from scaledtensor.quantization import training
from scaledtensor.quantization.calibration import observed
from scaledtensor.quantization.configs import Config, Plan, config_for, plan_of
from scaledtensor.quantization.error_feedback import rounded_with_feedback
from scaledtensor.quantization.observing import Seen
from scaledtensor.quantization.parts import Order, matrix_of
from scaledtensor.quantization.tensor import QuantizedTensor
from scaledtensor.recipes.casts import HADAMARD
from scaledtensor.tensors.shards import is_dtensor
from scaledtensor.tensors.steps import is_scaled
from scaledtensor.tensors.wrapper import Wrapper

__all__ = [
    "Weight",
    "adapters_of",
    "conversions",
    "place",
    "quantize_",
    "quantized_weight",
    "role_of",
    "weights_of",
    "without_autocast",
]

M = TypeVar("M", bound=nn.Module)

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
#: Output layers by name, for models without transformers' `get_output_embeddings`.
_HEADS = ("lm_head", "head", "unembed", "output_layer")


def quantize_(
    model: M,
    config: Plan,
    filter_fn: Callable[[nn.Module, str], bool] | None = None,
    *,
    calibration: Iterable[Any] | None = None,
    train: bool = False,
) -> M:
    """Convert the weights of matrix products of `model` to few bits, in place.

    Each converted weight becomes a frozen `QuantizedTensor` parameter under its old name. Modules,
    hooks and all other parameters stay as they are. Results of products are plain tensors, in the
    dtype of their input. `print(model)` shows the config of each module. `unscale_model(model)`
    ends it: weights become plain parameters of the quantised value. On the meta device it gives a
    model without values, into which `load_state_dict(..., assign=True)` puts codes.

    Args:
        model: a plain module, in float32, bfloat16 or float16.
        config: `WeightOnly`, `Dynamic` or `Static` for all weights; or a mapping from patterns of
            module names to configs, such as `{"*.mlp.*": WeightOnly("nvfp4"), "*":
            WeightOnly("e4m3fn")}`. The first pattern that matches decides. None leaves a module as
            it is.
        filter_fn: called as `filter_fn(module, fqn)` with a module that owns parameters and its
            fully qualified name. False leaves this module as it is.
        calibration: batches for configs that need data (`Static`, `fold`, `error_feedback`). Each
            is passed to the model: a mapping as keyword arguments, a tuple or list as positional
            arguments, anything else as the only argument. The model runs in evaluation mode and
            without gradients. Its modes and buffers are then as before.
        train: leave the weights plain and trainable, and let the model train for few bits
            (quantisation-aware training). Every call of `model` itself rounds weights and inputs as
            the config says, with the results of the converted model to the bit. Gradients pass
            through the casts unchanged. Parameters stay the same objects, so optimizers keep
            working. `Static` keeps the scales of inputs that `calibration` chose.
            `quantize_(model, config)` afterwards converts the weights, and `unscale_model(model)`
            ends the training without that.

    Returns:
        The same model.

    Raises:
        ModelError: `model` is no module, or a weight has no data yet, is a ScaledTensor or a
            tensor of another library, is quantised already, belongs to a scripted module, or is
            spread over ranks. Weights are on the meta device, and the config needs data.
        QuantizationError: the config is none, needs data that were not given, chooses no weight, or
            has two configs for one weight, or a pattern matches no module. There is no batch, a
            batch does not fit the model, an input has a NaN or an infinity, or no batch reached a
            chosen weight. The model trains for another config, or all its weights have scales of
            their training and `calibration` is given. With `train`: the model trains already, or
            the config has `fold` or `error_feedback`.
        UnsupportedError: the model simulates a format. When a model that trains is called: a part
            of it is checkpointed.

    After an error the model is as it was.
    """
    if not isinstance(model, nn.Module):
        raise ModelError(f"quantize_ takes an nn.Module; got {type(model).__name__}")
    plan = plan_of(config)
    refuse_simulated(model)
    weights = weights_of(model, plan, filter_fn)
    if not weights:
        raise QuantizationError(
            "the config chooses no weight of this model: it has no linear or convolution layer of "
            "the roles, or the filter leaves all of them out"
        )
    if train:
        training.check(model, weights)
        training.begin(model, weights, _observed(model, weights, calibration))
        return model
    training.check_same(model, weights)
    # A parameter made in inference mode could not be read where gradients are recorded.
    with torch.inference_mode(False):
        made = conversions(model, weights, calibration)
        place(model, {id(w.parameter): held for w, held in zip(weights, made, strict=True)})
    return model


def place(model: nn.Module, made: Mapping[int, QuantizedTensor]) -> None:
    """Put quantised weights into `model`, with everything that goes with them: hooks of state
    dicts, configs in `print(model)`, and the plug-in of transformers. A training under configs
    ends.

    Args:
        model: the model; it may have quantised weights already.
        made: the weights, by the `id` of the parameter that each replaces. A tied parameter is
            replaced in all its modules.
    """
    new = {key: nn.Parameter(held, requires_grad=False) for key, held in made.items()}
    for module in model.modules():
        for name, p in module._parameters.items():
            if id(p) in new:
                module._parameters[name] = new[id(p)]
    training.end(model)
    for module in model.modules():
        state_dicts.attach(module)
        scripting.attach(module)
    show(model)
    config = next((p.config for p in model.parameters() if isinstance(p, QuantizedTensor)), None)
    for plug_in in plug_ins(model):
        plug_in.attach(model, config)


def conversions(
    model: nn.Module, weights: "list[Weight]", calibration: Iterable[Any] | None
) -> list[QuantizedTensor]:
    """The weights as their configs store them. The model is unchanged."""
    seen = training.seen(weights)
    others = [w for w in weights if w.name not in seen]
    if calibration is not None and not others:
        raise QuantizationError(
            "calibration was given, and all weights keep the scales of inputs with which they train"
        )
    seen |= _observed(model, others, calibration)
    return [_converted(w, seen.get(w.name)) for w in weights]


def _observed(
    model: nn.Module, weights: "list[Weight]", batches: Iterable[Any] | None
) -> dict[str, Seen]:
    """Facts about the inputs of each weight from the calibration data, by the weight's name."""
    wanting = [w for w in weights if w.config.needs_data]
    if not wanting:
        if batches is not None:
            raise QuantizationError(
                f"calibration was given, and {weights[0].config} needs none: it is for Static, "
                "fold=True and rounding='error_feedback'"
            )
        return {}
    if batches is None:
        raise QuantizationError(
            f"{wanting[0].config} needs data: quantize_(model, config, calibration=batches), with "
            "some batches of inputs as the model gets them"
        )
    for w in wanting:
        if w.parameter.is_meta:
            raise ModelError(
                f"{w.name} is on the meta device and has no values, so no input can be observed, "
                f"and {w.config} needs inputs: load the weights first, or quantize_ a model that "
                "has them and load its state dict"
            )
    return observed(model, wanting, batches)


def _converted(w: "Weight", seen: Seen | None) -> QuantizedTensor:
    order = w.order if seen is None else seen.order
    try:
        with without_autocast(w.parameter):
            return quantized_weight(w.parameter.detach(), w.config, order, seen)
    except QuantizationError as error:
        raise QuantizationError(f"{w.name}: {error}") from error


# --- which weights ---------------------------------------------------------------------------


class Weight(NamedTuple):
    """A weight to convert."""

    name: str
    """The fully qualified name of the parameter, under its first owner."""
    parameter: nn.Parameter
    config: Config
    order: Order
    owners: list[tuple[nn.Module, str]]
    """All modules that own the parameter, with its name in each."""


def weights_of(
    model: nn.Module,
    plan: list[tuple[str, Config | None]],
    filter_fn: Callable[[nn.Module, str], bool] | None = None,
) -> list[Weight]:
    """The weights that a plan chooses. All owners of a tied weight must have a listed role.

    Raises:
        ModelError, QuantizationError: as `quantize_` says.
    """
    _check_filter(filter_fn)
    names = {fqn for fqn, _ in model.named_modules()}
    for pattern, _ in plan:
        if not fnmatch.filter(names, pattern):
            raise QuantizationError(
                f"the config names {pattern!r}, and no module of this model has such a name: they "
                f"are {', '.join(sorted(names - {''})[:8])}, ..."
            )
    found: dict[int, Weight] = {}
    left: set[int] = set()
    differing: dict[int, str] = {}
    head = output_layer(model)
    for module, fqn, name, p in _parameters(model):
        full = f"{fqn}.{name}" if fqn else name
        config = config_for(plan, fqn)
        role = role_of(module, fqn, name, p, head)
        chosen = config is not None and role in config.roles
        if chosen and filter_fn is not None:
            chosen = bool(filter_fn(module, fqn))
        if not chosen or config is None:
            left.add(id(p))
            continue
        _check(module, p, full)
        owners = found[id(p)].owners if id(p) in found else []
        owners.append((module, name))
        if id(p) not in found:
            found[id(p)] = Weight(full, p, config, order_of(module, p), owners)
        elif found[id(p)].config != config:
            first = found[id(p)]
            differing[id(p)] = (
                f"{first.name} and {full} are one weight, and the config has {first.config} for "
                f"the former and {config} for the latter: give both modules the same config"
            )
    for key in differing.keys() - left:
        raise QuantizationError(differing[key])
    return [w for key, w in found.items() if key not in left]


def _check_filter(filter_fn: Any) -> None:
    if filter_fn is None:
        return
    wanted = "filter_fn is called as filter_fn(module, fqn), and returns a bool"
    if not callable(filter_fn):
        raise QuantizationError(
            f"{wanted}; got {type(filter_fn).__name__}. Names are patterns of a mapping, as in "
            "{'*.mlp.*': config}"
        )
    try:
        signature = inspect.signature(filter_fn)
    except ValueError:  # some callables of C have none
        return
    try:
        signature.bind(None, None)
    except TypeError as error:
        raise QuantizationError(f"{wanted}; it does not take two arguments: {error}") from error


def _parameters(model: nn.Module) -> Iterator[tuple[nn.Module, str, str, nn.Parameter]]:
    """The parameters of a model without the adapters of peft, which train and are merged in full
    precision."""
    adapters = adapters_of(model)
    for fqn, module in model.named_modules():
        if fqn not in adapters:
            for name, p in module._parameters.items():
                if p is not None:
                    yield module, fqn, name, p


def adapters_of(model: nn.Module) -> set[str]:
    """The names of the modules that are adapters of peft, or are inside one. A layer of peft lists
    the names of its adapters."""
    adapters: set[str] = set()
    for fqn, module in model.named_modules():  # a module comes before its children
        if fqn.rpartition(".")[0] in adapters:
            adapters.add(fqn)
        elif fqn not in adapters:
            listed = getattr(module, "adapter_layer_names", ())
            adapters |= {f"{fqn}.{name}".removeprefix(".") for name in listed}
    return adapters


def output_layer(model: nn.Module) -> nn.Module | None:
    """The output layer of the vocabulary, which transformers' models name."""
    get = getattr(model, "get_output_embeddings", None)
    if not callable(get):
        return None
    try:
        found = get()
    except (AttributeError, NotImplementedError):
        return None
    return found if isinstance(found, nn.Module) else None


def role_of(
    module: nn.Module, fqn: str, name: str, p: Tensor, head: nn.Module | None = None
) -> str | None:
    """The role of a parameter, out of `configs.ROLES`; None if `quantize_` never converts it."""
    if is_lazy(p) or not p.dtype.is_floating_point:
        return None
    if isinstance(module, TABLES):
        return "embedding" if name == "weight" else None
    # `is_operand` leaves out matrices of one row or column, which may be gains.
    of_linear = isinstance(module, nn.Linear) and name == "weight"
    transposed = isinstance(module, nn.modules.conv._ConvTransposeNd)
    if transposed or not (of_linear or is_operand(module, name, p)):
        return None
    if isinstance(module, _CONVOLUTIONS):
        return "convolution"
    if p.dim() not in (2, 3) or isinstance(module, nn.Bilinear):
        return None
    named = head is None and fqn.rpartition(".")[2] in _HEADS
    return "head" if module is head or named else "linear"


def order_of(module: nn.Module, p: Tensor) -> Order:
    """How the summed dimension of products lies in a weight. transformers' Conv1D sums over its
    rows; all other layers over the columns."""
    if isinstance(module, _CONVOLUTIONS):
        return "kernel"
    return "columns" if type(module).__name__ == "Conv1D" else "rows"


def _check(module: nn.Module, p: nn.Parameter, name: str) -> None:
    if isinstance(module, torch.jit.ScriptModule):
        raise ModelError(
            f"{name} belongs to a module of torch.jit.script, whose code is fixed: call quantize_ "
            "on the model that was scripted, and torch.export.export in place of torch.jit.script"
        )
    if isinstance(p, QuantizedTensor):
        raise ModelError(
            f"{name} is quantised already ({p.config}): unscale_model(model) makes it plain first"
        )
    if is_dtensor(p):
        raise ModelError(f"{name} is spread over ranks; call quantize_() before fully_shard()")
    if is_scaled(p) or isinstance(p, Wrapper):
        raise ModelError(
            f"{name} is a ScaledTensor: unscale_model(model), which is exact, comes before "
            "quantize_(model, ...)"
        )
    if hasattr(p, "__tensor_flatten__"):
        library = type(p).__module__.partition(".")[0]
        raise ModelError(
            f"{name} is a {type(p).__name__} of {library}, and quantize_ takes plain weights: give "
            "it the model as it was before, or put nn.Parameter(weight.dequantize()) in its place"
        )
    if p.dtype not in _DTYPES:
        raise ModelError(f"{name} is {p.dtype}; weights are float32, bfloat16 or float16")


# --- the conversion --------------------------------------------------------------------------


def without_autocast(weight: Tensor) -> AbstractContextManager[Any]:
    """A context without autocast, in which weights are quantised. Some devices have no autocast
    that torch could switch off, such as meta."""
    kind = weight.device.type
    return torch.autocast(kind, enabled=False) if is_autocast_available(kind) else nullcontext()


def quantized_weight(
    weight: Tensor, config: Config, order: Order = "rows", seen: Seen | None = None
) -> QuantizedTensor:
    """The weight as a config stores it.

    Args:
        weight: a plain weight of any layer.
        config: the config.
        order: how the summed dimension lies in the weight.
        seen: facts about the inputs from the calibration data.

    Raises:
        QuantizationError: the config does not fit the shape.
    """
    shape = tuple(weight.shape)
    matrix = matrix_of(weight, order)
    columns = None if seen is None else seen.columns
    if columns is not None:
        matrix = matrix * columns
    if config.rotate:
        if matrix.shape[-1] % HADAMARD:
            raise QuantizationError(
                f"rotate mixes {HADAMARD} elements along the summed dimension, and a weight of "
                f"{shape} has {matrix.shape[-1]}: leave its module out"
            )
        matrix = mixed(matrix, -1)
    if config.rounding == "error_feedback" and seen is not None and seen.moments is not None:
        coded = rounded_with_feedback(matrix, seen.entering_moments(), config.weight)
    else:
        coded = quantized(
            matrix, torch.ones((), device=matrix.device, dtype=torch.float32), config.weight, -1
        )
    scale: Any = coded.scale
    if coded.whole is not None:
        scale = TwoLevelScale(coded.scale, coded.whole)
    return QuantizedTensor(
        coded.codes,
        scale,
        config,
        shape,
        order=order,
        dtype=weight.dtype,
        input_scale=None if seen is None else seen.input_scale,
        columns=columns,
    )
