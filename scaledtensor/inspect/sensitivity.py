"""sensitivity: the loss that each module of a model costs when it alone is quantised, and a plan.

`Sensitivity.plan` chooses a config for each module under a budget of bytes. It adds up the rises
that were measured one at a time, and takes the least sum (a multiple-choice knapsack, solved by
dynamic programming over bytes).
"""

import glob
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from scaledtensor import _torch
from scaledtensor.errors import ModelError, QuantizationError
from scaledtensor.inspect.rows import aligned
from scaledtensor.models.passes import as_it_was, called
from scaledtensor.models.scale_model import TRAINS_AS
from scaledtensor.models.simulate import refuse_simulated
from scaledtensor.quantization.calibration import fitted
from scaledtensor.quantization.configs import Config, plan_of
from scaledtensor.quantization.verb import Weight, conversions, weights_of

__all__ = ["Effect", "Sensitivity", "sensitivity"]

#: The dynamic program counts bytes in at most this number of steps.
_STEPS = 1 << 15


@dataclass(frozen=True)
class Effect:
    """One module, quantised alone by one config. Fields are built-in types, except for `config`."""

    modules: tuple[str, ...]
    """The name of the module. There are several names if the modules share a weight."""
    config: Config
    rise: float
    """The mean loss minus the mean loss of the model as it is; or the relative error of its
    outputs."""
    bytes: int
    """The bytes of the quantised weights, with scales."""
    plain_bytes: int
    """The bytes of the same weights as they are."""
    elements: int

    @property
    def bits(self) -> float:
        """Bits for each element of the weights, with scales."""
        return 8 * self.bytes / self.elements


@dataclass(frozen=True)
class Sensitivity:
    """The effects of each config on each module. `str()` is a table, worst first."""

    effects: tuple[Effect, ...]
    loss: float | None
    """The mean loss of the model as it is; None if effects are relative errors of outputs."""

    def rows(self) -> list[dict[str, Any]]:
        """A row for each module and config, in built-in types. `pandas.DataFrame(found.rows())`
        makes a table of them."""
        return [
            asdict(e) | {"modules": list(e.modules), "config": e.config.to_json(), "bits": e.bits}
            for e in self.effects
        ]

    def __str__(self) -> str:
        what = "relative error of outputs"
        if self.loss is not None:
            what = f"rise of the loss from {self.loss:.6g}"
        table: list[tuple[str, ...]] = [("module", "config", "bits", "bytes", what)]
        for e in sorted(self.effects, key=lambda e: -_number(e.rise)):
            cells = (_spelled(e.modules), str(e.config), f"{e.bits:.2f}", str(e.bytes))
            table.append((*cells, f"{e.rise:.3g}" if self.loss is None else f"{e.rise:+.3g}"))
        return "\n".join(aligned(table))

    __repr__ = __str__

    def plan(
        self, budget_bytes: int | None = None, *, bits: float | None = None
    ) -> dict[str, Config | None]:
        """The configs under a budget with the least sum of effects, by module, for `quantize_`.

        The sum stands for the loss of all modules together, which nobody measured. The dynamic
        program is exact if the budget has at most 32768 steps of the bytes' greatest common
        divisor. Otherwise it rounds the bytes of each module up to 1/32768 of the budget.

        Args:
            budget_bytes: the most bytes that the weights of the table may have together, with
                scales. Other parameters are not counted.
            bits: the budget in bits for each element of these weights, in place of `budget_bytes`.

        Returns:
            A config for each module of the table; None leaves it as it is.

        Raises:
            QuantizationError: no budget or two of them are given, or the budget is below the
                smallest possible.
        """
        options = self._options()
        elements = sum(next(iter(o.values()))[2] for o in options.values())
        if (budget_bytes is None) == (bits is None):
            raise QuantizationError(
                "a plan has one budget: plan(budget_bytes=...) or plan(bits=...), bits for each "
                f"element; got budget_bytes={budget_bytes}, bits={bits}"
            )
        budget = int(elements * bits / 8) if bits is not None else int(budget_bytes or 0)
        least = sum(min(size for size, *_ in o.values()) for o in options.values())
        if budget < least:
            told = f"{8 * least / elements:.4g} bits for each element"
            raise QuantizationError(
                f"a budget of {budget} bytes is below the smallest possible, {least} bytes "
                f"({told}): give more, or measure configs of fewer bits"
            )
        found: dict[str, Config | None] = {}
        for modules, config in zip(options, _least(list(options.values()), budget), strict=True):
            found |= dict.fromkeys(map(glob.escape, modules), config)
        return found

    def _options(self) -> dict[tuple[str, ...], dict[Config | None, tuple[int, float, int]]]:
        """For each module: config -> bytes, rise and elements. None is the module as it is."""
        found: dict[tuple[str, ...], dict[Config | None, tuple[int, float, int]]] = {}
        for e in self.effects:
            own = found.setdefault(e.modules, {None: (e.plain_bytes, 0.0, e.elements)})
            own[e.config] = (e.bytes, _number(e.rise), e.elements)
        return found


def _number(rise: float) -> float:
    return math.inf if math.isnan(rise) else rise


def _spelled(modules: tuple[str, ...]) -> str:
    return ", ".join(m or "the model itself" for m in modules)


def _least(
    options: Sequence[Mapping[Config | None, tuple[int, float, int]]], budget: int
) -> list[Config | None]:
    """One key of each mapping, with the least sum of rises under a budget of bytes."""
    sizes = [size for o in options for size, *_ in o.values()]
    least = [min(size for size, *_ in o.values()) for o in options]
    # Bytes above each module's smallest choice are counted, so that rounding never makes the
    # smallest plan impossible.
    free = budget - sum(least)
    step = math.gcd(*(s - m for o, m in zip(options, least, strict=True) for s, *_ in o.values()))
    step = max(step, -(-free // _STEPS), 1)
    count = free // step + 1
    best = np.zeros(count)
    taken: list[tuple[list[Config | None], Any]] = []
    for own, smallest in zip(options, least, strict=True):
        keys = list(own)
        sums = np.full((len(keys), count), np.inf)
        for i, key in enumerate(keys):
            shift = -(-(own[key][0] - smallest) // step)
            if shift < count:
                sums[i, shift:] = best[: count - shift] + own[key][1]
        choice = sums.argmin(0)
        best = sums[choice, np.arange(count)]
        taken.append((keys, choice))
    left = count - 1
    if not np.isfinite(best[left]):
        raise QuantizationError(
            f"no plan of {budget} bytes has a finite loss: the configs that fit make the loss of "
            f"some module infinite or NaN, out of {len(sizes)} measured choices"
        )
    found: list[Config | None] = []
    for (keys, choice), own, smallest in zip(
        reversed(taken), reversed(options), reversed(least), strict=True
    ):
        key = keys[int(choice[left])]
        found.append(key)
        left -= -(-(own[key][0] - smallest) // step)
    return found[::-1]


# --- the measurement -------------------------------------------------------------------------


def sensitivity(
    model: nn.Module,
    configs: Config | Sequence[Config],
    batches: Iterable[Any],
    loss_fn: Callable[[Any, Any], Any] | None = None,
    filter_fn: Callable[[nn.Module, str], bool] | None = None,
) -> Sensitivity:
    """Measure how much the loss rises when each module alone is quantised, by each config.

        found = sct.inspect.sensitivity(model, [sct.WeightOnly("nvfp4"), sct.WeightOnly("e4m3fn")],
                                        batches)
        print(found)
        sct.quantize_(model, found.plan(bits=5))

    The model runs over all batches once for each module and config, in evaluation mode and without
    gradients. Afterwards it is as before.

    Args:
        model: a plain module, as `quantize_` takes it.
        configs: a config, or a sequence of them.
        batches: the data. The model gets a mapping as keyword arguments, a tuple or list as
            positional arguments, anything else as its only argument. Configs that need data are
            calibrated with them too.
        loss_fn: called as `loss_fn(output, batch)`; it returns the loss, a number. By default the
            loss is the result's `loss`, or the first 0-dim tensor in the result. If there is
            neither, the effect is the relative error of the outputs: the norm of their changes
            divided by their norm.
        filter_fn: as `quantize_` takes it.

    Returns:
        The effects of each module. Modules that share a weight are one.

    Raises:
        ModelError, QuantizationError, UnsupportedError: as `quantize_` says. There is no batch, or
            no config.
    """
    listed = [configs] if isinstance(configs, Config) else list(configs)
    if not listed:
        raise QuantizationError("sensitivity needs a config, such as [sct.WeightOnly('nvfp4')]")
    data = list(batches)
    if not data:
        raise QuantizationError(
            "sensitivity has no batch: give some batches of inputs as the model gets them. A "
            "generator that was read before is empty"
        )
    refuse_simulated(model)
    if any(TRAINS_AS in module.__dict__ for module in model.modules()):
        raise ModelError(
            "this model trains for few bits: its weights are measured after unscale_model(model)"
        )
    chosen = [(c, weights_of(model, plan_of(c), filter_fn)) for c in listed]
    if not any(weights for _, weights in chosen):
        raise QuantizationError("no config chooses a weight of this model")
    groups = _groups(model, [w for _, weights in chosen for w in weights])
    effects: list[Effect] = []
    with as_it_was(model), torch.no_grad(), _torch.uncompiled_calls():
        plain = _Run(model, data, loss_fn)
        for config, weights in chosen:
            calibration = data if config.needs_data else None
            held = conversions(model, weights, calibration)
            made = {w.name: x for w, x in zip(weights, held, strict=True)}
            for modules, names in groups.items():
                own = [w for w in weights if w.name in names]
                if own:
                    effects.append(_effect(modules, config, own, made, plain))
    return Sensitivity(tuple(effects), plain.mean)


def _groups(model: nn.Module, weights: Iterable[Weight]) -> dict[tuple[str, ...], set[str]]:
    """The names of modules that share weights, and the names of these weights."""
    names = {id(module): fqn for fqn, module in model.named_modules()}
    found: list[tuple[set[str], set[str]]] = []
    for w in weights:
        modules, own = {names[id(m)] for m, _ in w.owners}, {w.name}
        for other in [f for f in found if f[0] & modules]:
            found.remove(other)
            modules, own = modules | other[0], own | other[1]
        found.append((modules, own))
    order = {fqn: i for i, fqn in enumerate(names.values())}
    listed = [(tuple(sorted(modules, key=order.__getitem__)), own) for modules, own in found]
    return dict(sorted(listed, key=lambda group: order[group[0][0]]))


class _Run:
    """The losses or the outputs of the model as it is, and of a changed one."""

    def __init__(self, model: nn.Module, data: list[Any], loss_fn: Any) -> None:
        self.model, self.data, self.loss_fn = model, data, loss_fn
        instead = (
            "batches=[x for x, _ in loader], or give a module that takes both and returns a loss"
        )
        results = [(fitted(model, b, f"batch {i}", instead), b) for i, b in enumerate(data)]
        losses = [self._loss(*r) for r in results]
        self.mean: float | None = None
        self.outputs: list[list[Tensor]] = []
        if all(x is not None for x in losses):
            self.mean = math.fsum(x for x in losses if x is not None) / len(losses)
        else:
            self.outputs = [_floats(y) for y, _ in results]
            if not any(self.outputs):
                raise ModelError("no result of this model is a tensor of floats")

    def _loss(self, result: Any, batch: Any) -> float | None:
        if self.loss_fn is not None:
            return float(self.loss_fn(result, batch))
        loss = getattr(result, "loss", None)
        if isinstance(loss, Tensor):
            return float(loss)
        return next((float(x) for x in _floats(result) if x.dim() == 0), None)

    def rise(self) -> float:
        """How much worse the present model is than the one that `__init__` saw."""
        if self.mean is not None:
            losses = (self._loss(called(self.model, batch), batch) for batch in self.data)
            return math.fsum(x for x in losses if x is not None) / len(self.data) - self.mean
        error = norm = 0.0
        for batch, plain in zip(self.data, self.outputs, strict=True):
            for x, y in zip(_floats(called(self.model, batch)), plain, strict=True):
                error += float((x.double() - y.double()).square().sum())
                norm += float(y.double().square().sum())
        return math.sqrt(error / norm) if norm else math.sqrt(error)


def _floats(result: Any) -> list[Tensor]:
    return [x for x in tree_leaves(result) if isinstance(x, Tensor) and x.is_floating_point()]


def _effect(
    modules: tuple[str, ...],
    config: Config,
    weights: list[Weight],
    made: Mapping[str, Any],
    plain: _Run,
) -> Effect:
    with _in_place({w.name: (w, made[w.name]) for w in weights}):
        rise = plain.rise()
    return Effect(
        modules,
        config,
        rise,
        sum(made[w.name].nbytes for w in weights),
        sum(w.parameter.nbytes for w in weights),
        sum(w.parameter.numel() for w in weights),
    )


@contextmanager
def _in_place(changed: Mapping[str, tuple[Weight, Tensor]]) -> Iterator[None]:
    """Put quantised weights in the places of the parameters within it."""
    try:
        for w, held in changed.values():
            for module, name in w.owners:
                module._parameters[name] = nn.Parameter(held, requires_grad=False)
        yield
    finally:
        for w, _ in changed.values():
            for module, name in w.owners:
                module._parameters[name] = w.parameter
