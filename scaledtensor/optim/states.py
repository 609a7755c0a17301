"""States of an optimizer in 8 bits: a step reads them widened and leaves them narrowed.

A state is kept as an `ExpandedTensor`, in groups of 128 widened to the range of its format: 1.04
bytes an element (COAT, arXiv 2410.19313). The step is that of torch, of some parameters at a time,
so that few states are wide at once. Scalars, such as the number of steps, stay as they are.

Rounding is stochastic by default: an average that decays by 1/1000 a step is otherwise rounded back
to where it was, for ever. The draws are of torch's default generator.
"""

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer

from scaledtensor.errors import FormatError
from scaledtensor.expanded import ExpandedTensor
from scaledtensor.formats.rounding import Rounding
from scaledtensor.tensor import ScaledTensor

__all__ = ["ROUNDINGS", "STATE_FORMATS", "LowPrecisionStates"]

#: "fp32" leaves states as torch makes them: in the dtype of the parameter.
STATE_FORMATS = ("fp32", "e4m3fn", "e5m2", "int8")
ROUNDINGS = ("stochastic", "nearest_even")

#: Elements of parameters whose states are wide at once.
_PART = 1 << 24


class LowPrecisionStates(Optimizer):
    """A mixin for classes of torch.optim, before them."""

    state_format: str = "fp32"
    state_rounding: str = "stochastic"

    def _keep_states(self, state_format: str, state_rounding: str) -> None:
        for name, given, allowed in (
            ("state_format", state_format, STATE_FORMATS),
            ("state_rounding", state_rounding, ROUNDINGS),
        ):
            if given not in allowed:
                raise FormatError(
                    f"{name} is one of {', '.join(map(repr, allowed))}; got {given!r}"
                )
        self.state_format, self.state_rounding = state_format, state_rounding

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        if self.state_format == "fp32":
            return super().step(closure)
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        # What torch wraps around a step, hooks and profiling, is around this one already.
        bare = inspect.unwrap(super().step.__func__)  # type: ignore[attr-defined]
        with torch.no_grad():
            for part in self._parts():
                with self._wide(part):
                    bare(self)
        return loss

    def load_state_dict(self, state_dict: Any) -> None:
        """As torch's; states in 8 bits come back to the bit, wider ones are narrowed."""
        super().load_state_dict(state_dict)
        if self.state_format != "fp32":
            for p, states in self.state.items():
                self._narrow(p, states)

    def plain_state_dict(self) -> dict[str, Any]:
        """`state_dict()` in the layout of torch.optim's own classes: states in the dtype of their
        parameter, which those load."""
        held = self.state_dict()
        states = {
            index: {k: v.dequantize() if isinstance(v, ExpandedTensor) else v for k, v in s.items()}
            for index, s in held["state"].items()
        }
        return {**held, "state": states}

    def _parts(self) -> Iterator[dict[str, Any]]:
        """The groups, cut where they have more elements than are to be wide at once."""
        for group in self.param_groups:
            part: list[Tensor] = []
            for p in group["params"]:
                if p.grad is None:
                    continue
                if part and sum(q.numel() for q in part) + p.numel() > _PART:
                    yield {**group, "params": part}
                    part = []
                part.append(p)
            if part:
                yield {**group, "params": part}

    @contextmanager
    def _wide(self, part: dict[str, Any]) -> Iterator[None]:
        """The optimizer as if it had this group alone, its states wide."""
        whole = self.param_groups
        before = {p: dict(self.state[p]) for p in part["params"] if p in self.state}
        for p, states in before.items():
            self.state[p].update({k: _widened(v, p) for k, v in states.items()})
        self.param_groups = [part]
        try:
            yield
        except BaseException:
            for p, states in before.items():
                self.state[p].update(states)
            raise
        finally:
            self.param_groups = whole
        for p in part["params"]:
            self._narrow(p, self.state[p])

    def _narrow(self, p: Tensor, states: dict[str, Any]) -> None:
        for key, x in states.items():
            if key == "step" or not isinstance(x, Tensor) or isinstance(x, ExpandedTensor):
                continue
            if x.shape == p.shape and x.is_floating_point():
                plain = x.detach().dequantize() if isinstance(x, ScaledTensor) else x.detach()
                rounding = cast(Rounding, self.state_rounding)
                states[key] = ExpandedTensor(
                    plain, self.state_format, dtype=p.dtype, rounding=rounding
                )


def _widened(x: Any, p: Tensor) -> Any:
    if not isinstance(x, ExpandedTensor):
        return x
    return x.widened() if isinstance(p, ScaledTensor) else x.dequantize()
