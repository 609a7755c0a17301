"""Calibration of `quantize_`: data run through the plain model, and each weight's inputs are
observed (`quantization/observing.py`).

All weights see the inputs that the plain model gives them. The inputs of a model whose earlier
layers are converted would differ slightly. The batches run once. They run a second time if a
`Static` config has `fold`, since its inputs are measured after the division by `fold`'s factors.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Protocol, cast

import torch
from torch import Tensor, nn

from scaledtensor import _torch
from scaledtensor.errors import QuantizationError
from scaledtensor.formats import PerTensor, quantize_blocks
from scaledtensor.models.operands import TABLES
from scaledtensor.models.passes import as_it_was, called
from scaledtensor.ops.products.quantize import least_error
from scaledtensor.quantization.configs import Config, Static
from scaledtensor.quantization.folding import folded
from scaledtensor.quantization.observing import Observed, Seen
from scaledtensor.quantization.parts import Order, matrix_of

__all__ = ["input_scale", "observed"]


class Weight(Protocol):
    """A weight to convert (`verb.Weight`)."""

    @property
    def name(self) -> str: ...
    @property
    def parameter(self) -> nn.Parameter: ...
    @property
    def config(self) -> Config: ...
    @property
    def order(self) -> Order: ...
    @property
    def owners(self) -> list[tuple[nn.Module, str]]: ...


def observed(
    model: nn.Module,
    weights: Sequence[Weight],
    batches: Iterable[Any],
) -> dict[str, Seen]:
    """The facts that `batches` show about the inputs of each weight, by the weight's name. Tables
    of embeddings have no inputs, and are left out.

    Args:
        model: the plain model.
        weights: weights whose configs need data.
        batches: as `quantize_` takes them.

    Raises:
        QuantizationError: there is no batch, a batch does not fit the model, an input has a NaN or
            an infinity, or no product with some weight ran.
    """
    held = _listed(batches)
    seen = {
        w.name: Seen(w.name, w.config, w.order, tuple(w.parameter.shape))
        for w in weights
        if not all(isinstance(module, TABLES) for module, _ in w.owners)
    }
    watched = [w for w in weights if w.name in seen]
    _run(model, watched, seen, held)
    _check_reached(watched, seen)
    again = []
    for w in watched:
        found = seen[w.name]
        turned = found.order
        if found.order != "kernel":
            found.order = "rows" if found.sums_last is not False else "columns"
        if found.config.fold:
            with torch.autocast(w.parameter.device.type, enabled=False):
                found.columns = folded(matrix_of(w.parameter.detach(), found.order), found)
        changed = found.columns is not None or (found.config.rotate and found.order != turned)
        if found.config.static and changed:
            again.append(w)
            found.measure_again()
    if again:
        _run(model, again, seen, held)
    for found in seen.values():
        if isinstance(found.config, Static):
            found.input_scale = input_scale(found)
    return seen


def _listed(batches: Any) -> list[Any]:
    """The batches. They are kept, since they may run twice."""
    if isinstance(batches, (Mapping, Tensor, str, bytes, nn.Module)) or not isinstance(
        batches, Iterable
    ):
        raise QuantizationError(
            "calibration is an iterable of batches, such as a list or a DataLoader; got "
            f"{type(batches).__name__}. One batch is a list of one: calibration=[batch]"
        )
    held = list(batches)
    if not held:
        raise QuantizationError(
            "calibration has no batch: give some batches of inputs as the model gets them. A "
            "generator that was read before is empty"
        )
    return held


def _run(
    model: nn.Module, weights: Sequence[Weight], seen: Mapping[str, Seen], batches: list[Any]
) -> None:
    with as_it_was(model), torch.no_grad(), _torch.uncompiled_calls(), _in_place(weights, seen):
        for number, batch in enumerate(batches):
            fitted(
                *(model, batch, f"batch {number} of the calibration data"),
                "calibration=(x for x, _ in loader)",
            )


def fitted(model: nn.Module, batch: Any, what: str, instead: str) -> Any:
    """Call the model with a batch, and return the result.

    Raises:
        QuantizationError: the batch does not fit the model. The error calls the batch `what`, and
            names `instead` for pairs of inputs and labels.
    """
    try:
        return called(model, batch)
    except (TypeError, AttributeError) as error:
        raise QuantizationError(
            f"{what}, a {type(batch).__name__}, does not fit the model ({type(error).__name__}: "
            f"{error}). The model gets a mapping as keyword arguments, a tuple or list as "
            "positional arguments, and anything else as its only argument. For a loader of "
            f"(input, label) pairs write {instead}"
        ) from error


@contextmanager
def _in_place(weights: Sequence[Weight], seen: Mapping[str, Seen]) -> Iterator[None]:
    """Put observed weights in the places of the parameters within it."""
    try:
        for w in weights:
            watched = Observed.parameter(w.parameter, seen[w.name])
            for module, name in w.owners:
                module._parameters[name] = watched  # type: ignore[assignment]
        yield
    finally:
        for w in weights:
            for module, name in w.owners:
                module._parameters[name] = w.parameter


def _check_reached(weights: Sequence[Weight], seen: Mapping[str, Seen]) -> None:
    missed = [w.name for w in weights if not seen[w.name].number]
    if missed:
        more = f" and {len(missed) - 8} more" if len(missed) > 8 else ""
        pattern = missed[0].rpartition(".")[0] or "*"
        raise QuantizationError(
            f"the calibration data reached no product with {', '.join(missed[:8])}{more}: these "
            "weights saw no data. Give batches that reach them, or leave them as they are by "
            f"filter_fn or by a pattern, as in {{{pattern!r}: None, '*': config}}"
        )
    zeros = [w.name for w in weights if w.config.static and seen[w.name].amax == 0]
    if zeros:
        raise QuantizationError(
            f"all inputs of {', '.join(zeros[:8])} in the calibration data are zero, so there is "
            "no scale for others: give batches of real inputs, or leave these weights as they are "
            "by filter_fn"
        )
    for w in weights:
        found = seen[w.name]
        wants = [k for k in ("fold", "rounding") if getattr(w.config, k) not in (False, "nearest")]
        if wants and found.channels is None and found.moments is None:
            raise QuantizationError(
                f"{' and '.join(wants)} need the rows of inputs of {w.name}, and its product "
                f"{found.spelled} has none that this release knows: give this weight a config "
                "without them"
            )


def input_scale(seen: Seen) -> Tensor:
    """The scale under which `Static` casts inputs, 0-dim float32: amax / F, the quantile of the
    magnitudes / F, or the power of two with the least squared error."""
    config: Any = seen.config
    held, fmt, top = seen.histogram, config.input.format, seen.amax
    if top is None:
        raise QuantizationError(f"no input of {seen.name} was seen")
    if held is not None and config.observer == "least_error":
        return least_error(held.magnitudes(), fmt, held.numbers())
    if held is not None:
        top = torch.minimum(held.quantile(config.percentile), top)
    return cast(Tensor, quantize_blocks(top.view(1), fmt, PerTensor(), "fp32")[1])
