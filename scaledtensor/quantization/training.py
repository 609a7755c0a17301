"""Training for few bits: the same weights and configs as in `quantize_`, with plain parameters.

`quantize_(model, config, train=True)` lets a transform run around the model's forward
(`models/interpose.py`). In place of each chosen weight, every function of torch gets a
`QuantizedTensor` that the transform makes of it. Products are therefore the same code as after
`quantize_(model, config)`, and results have the same bits. Gradients pass through the casts
unchanged (straight-through, Bengio et al., arXiv 1308.3432), to the plain weight and to the input.
"""

from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from importlib import import_module
from typing import Any, ClassVar, NamedTuple, cast

import torch
from torch import Tensor, nn

from scaledtensor import _torch
from scaledtensor.errors import QuantizationError, UnsupportedError
from scaledtensor.models.interpose import Mode, Transform, interpose, remove, transforms
from scaledtensor.models.scale_model import TRAINS_AS, show
from scaledtensor.quantization.calibration import Weight
from scaledtensor.quantization.configs import config_from
from scaledtensor.quantization.observing import Seen
from scaledtensor.quantization.parts import Order
from scaledtensor.quantization.tensor import QuantizedTensor
from scaledtensor.tensors.shards import is_dtensor
from scaledtensor.tensors.verbs import LIBRARY

__all__ = ["Trained", "Training", "begin", "check", "check_same", "end", "seen"]

_config = lru_cache(maxsize=None)(config_from)


class Trained(NamedTuple):
    """How a weight trains. Modules keep one for each such weight, as `TRAINS_AS`."""

    config: str
    """The config as JSON."""
    order: str
    """How the summed dimension lies in the weight."""
    input_scale: float | None = None
    """The scale of inputs that calibration chose, for `Static`."""

    @property
    def roles(self) -> tuple[str, ...]:
        return _config(self.config).roles

    def __str__(self) -> str:
        return f"trains for {_config(self.config)}"


class Training(Transform):
    """The transform: functions get quantised weights in place of plain ones."""

    order: ClassVar[int] = 0
    mark: ClassVar[str | None] = None
    alone: ClassVar[bool] = True

    def mode(self, module: nn.Module, args: Any, kwargs: Any) -> Mode:
        weights = {}
        for owner in module.modules():
            for name, trained_as in owner.__dict__.get(TRAINS_AS, {}).items():
                p = getattr(owner, name)
                if is_dtensor(p):
                    raise UnsupportedError(
                        f"a weight of {type(owner).__name__} is spread over ranks when the model's "
                        "forward begins: shard the whole model as one by fully_shard(model), or "
                        "train it for few bits with DistributedDataParallel"
                    )
                weights[p] = trained_as
        return _Substitution(weights)

    def removed(self, module: nn.Module) -> None:
        for owner in module.modules():
            owner.__dict__.pop(TRAINS_AS, None)
        show(module)


class _Substitution(Mode):
    """Puts a quantised weight in place of each plain one. Dynamo traces it."""

    def __init__(self, weights: dict[Tensor, Trained]) -> None:
        super().__init__()
        self.weights = weights
        #: (weight, whether gradients are on) -> the weight quantised, once in a forward pass
        self.made: dict[tuple[Tensor, bool], Tensor] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _torch.BODIES:
            with self:
                return _torch.BODIES[func](*args, **kwargs)
        if getattr(func, "__name__", "") == "__get__" and func not in _VIEWS:
            return func(*args, **kwargs)
        args = [self.held(x) for x in args]
        kwargs = {name: self.held(x) for name, x in kwargs.items()}
        return func(*args, **kwargs)

    def held(self, x: Any) -> Any:
        """An argument of a function, with quantised weights in place of plain ones."""
        if isinstance(x, (list, tuple)) and any(isinstance(y, Tensor) for y in x):
            return [self.held(y) for y in x]
        if not isinstance(x, Tensor) or x not in self.weights:
            return x
        self.refuse_checkpoint()
        key = x, torch.is_grad_enabled()
        if key not in self.made:
            self.made[key] = trained(x, *self.weights[x])
        return self.made[key]


#: Attributes of a tensor that are views of its value.
_VIEWS = {getattr(Tensor, name).__get__ for name in ("T", "mT", "H", "mH")}


# --- a plain weight as a quantised one, for autograd -----------------------------------------


def _quantized(w: Tensor, config: str, order: Any, input_scale: float | None = None) -> Tensor:
    how = _seen("", tuple(w.shape), Trained(config, order, input_scale))
    verb = import_module("scaledtensor.quantization.verb")
    # `quantize_` runs outside of autocast.
    with _torch.disable_torch_function(), verb.without_autocast(w):
        made: QuantizedTensor = verb.quantized_weight(w.detach(), how.config, order, how)
    return made


def _seen(name: str, shape: tuple[int, ...], trained_as: Trained) -> Seen:
    found = Seen(name, _config(trained_as.config), cast(Order, trained_as.order), shape)
    if trained_as.input_scale is not None:
        found.input_scale = torch.tensor(trained_as.input_scale, dtype=torch.float32)
    return found


def _straight_through(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
    return grad, None, None, None


_NAME = LIBRARY.define(
    "quantized_weight(Tensor w, str config, str order, float? input_scale=None) -> Tensor"
)
LIBRARY.impl(_NAME, _quantized, "CompositeExplicitAutograd")
torch.library.register_autograd(f"scaledtensor::{_NAME}", _straight_through, lib=LIBRARY)


def _traced(mode: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Tensor:
    """Let tracing see the operators that make the result. torch would take it for a plain
    tensor."""
    with mode:
        return _quantized(*args, **(kwargs or {}))


for _mode in _torch.TRACING:
    torch.library.register_torch_dispatch(f"scaledtensor::{_NAME}", _mode, _traced, lib=LIBRARY)

#: The QuantizedTensor of a plain weight, as `config` in JSON stores it. The gradient of the plain
#: weight is the gradient of the quantised one.
trained: Callable[..., Tensor] = torch.ops.scaledtensor.quantized_weight.default


# --- begin and end ---------------------------------------------------------------------------


def check(model: nn.Module, weights: Iterable[Weight]) -> None:
    """Check that `weights`, which `verb.weights_of` found, can train for few bits.

    Raises:
        QuantizationError: the model trains already, or a config rounds by data.
    """
    if any(TRAINS_AS in module.__dict__ for module in model.modules()):
        raise QuantizationError(
            "this model trains for few bits already: quantize_(model, config) converts its "
            "weights, and unscale_model(model) ends the training"
        )
    for w in weights:
        if w.config.fold or w.config.rounding != "nearest":
            raise QuantizationError(
                f"{w.config} rounds by calibration data, and training rounds to nearest in each "
                "step: train with rounding='nearest' and fold=False"
            )


def begin(model: nn.Module, weights: Sequence[Weight], seen: dict[str, Seen]) -> None:
    """Let `weights` train for few bits. `seen` are facts about their inputs, by name.

    Raises:
        ModelError, QuantizationError: as `quantize_` says. The model is then unchanged.
    """
    made: dict[str, Trained] = {}
    for w in weights:
        found = seen.get(w.name)
        scale = None if found is None or found.input_scale is None else float(found.input_scale)
        made[w.name] = Trained(w.config.to_json(), found.order if found else w.order, scale)
        with torch.no_grad():
            try:
                _quantized(w.parameter, *made[w.name])
            except QuantizationError as error:
                raise QuantizationError(f"{w.name}: {error}") from error
    interpose(model, Training())
    for w in weights:
        for module, name in w.owners:
            module.__dict__.setdefault(TRAINS_AS, {})[name] = made[w.name]
    show(model)


def seen(weights: Iterable[Weight]) -> dict[str, Seen]:
    """Facts about the inputs of the weights that train, by name, as calibration found them."""
    found = {}
    for w in weights:
        module, name = w.owners[0]
        trained_as = module.__dict__.get(TRAINS_AS, {}).get(name)
        if trained_as is not None:
            found[w.name] = _seen(w.name, tuple(w.parameter.shape), trained_as)
    return found


def check_same(model: nn.Module, weights: Iterable[Weight]) -> None:
    """Check that every weight that trains for few bits is converted by the config of its training.

    Raises:
        QuantizationError: the configs differ, or a weight that trains is not converted.
    """
    given = {(id(m), name): w.config for w in weights for m, name in w.owners}
    for fqn, module in model.named_modules():
        for name, (written, *_) in module.__dict__.get(TRAINS_AS, {}).items():
            config = given.get((id(module), name))
            if config != _config(written):
                raise QuantizationError(
                    f"{fqn}.{name} trains for {_config(written)}, and quantize_ was given "
                    f"{config} for it: convert it by the config of its training, or end the "
                    "training first by unscale_model(model)"
                )


def end(model: nn.Module) -> None:
    """End the training; parameters stay as they are."""
    for module in model.modules():
        for t in transforms(module):
            if isinstance(t, Training):
                remove(module, t)
