"""States of an optimizer in few bits: what a step reads is widened, what it leaves is narrowed.

    fp32              as torch has them
    bf16              rounded stochastically: a change too small for 8 bits counts on average
    e4m3fn, e5m2, int8    groups of 128 widened to the range of the format (`formats.expansion`),
                      rounded stochastically too

A step is that of torch, a few parameters at a time, so that few states are wide at once. Scalars
(the number of steps) stay as they are.
"""

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer

from scaledtensor.errors import FormatError
from scaledtensor.expanded import ExpandedTensor

__all__ = ["STATE_FORMATS", "LowPrecisionStates"]

STATE_FORMATS = ("fp32", "bf16", "e4m3fn", "e5m2", "int8")

#: Elements that are wide at once.
_PART = 1 << 24


class LowPrecisionStates(Optimizer):
    """A mixin before a class of torch.optim."""

    state_format: str = "fp32"

    def _keep_states_in(self, state_format: str) -> None:
        if state_format not in STATE_FORMATS:
            raise FormatError(
                f"state_format is one of {', '.join(map(repr, STATE_FORMATS))}; got "
                f"{state_format!r}"
            )
        self.state_format = state_format

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        if self.state_format == "fp32":
            return super().step(closure)
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        # Without the hooks that torch may have wrapped around it, which are of the whole step.
        plain_step = inspect.unwrap(super().step.__func__)
        for groups in self._parts():
            with self._wide(groups):
                plain_step(self)
        return loss

    def _parts(self) -> Iterator[list[dict[str, Any]]]:
        for group in self.param_groups:
            part: list[Tensor] = []
            for p in group["params"]:
                if p.grad is None:
                    continue
                if part and sum(q.numel() for q in part) + p.numel() > _PART:
                    yield [{**group, "params": part}]
                    part = []
                part.append(p)
            if part:
                yield [{**group, "params": part}]

    @contextmanager
    def _wide(self, groups: list[dict[str, Any]]) -> Iterator[None]:
        whole = self.param_groups
        self.param_groups = groups
        held = {p: dict(self.state[p]) for g in groups for p in g["params"] if p in self.state}
        for p, states in held.items():
            self.state[p].update({k: _widened(v, p) for k, v in states.items()})
        try:
            yield
            for g in groups:
                for p in g["params"]:
                    own = self.state[p]
                    own.update({k: self._narrowed(v, p) for k, v in own.items()})
        except BaseException:
            for p, states in held.items():
                self.state[p].update(states)
            raise
        finally:
            self.param_groups = whole

    def _narrowed(self, x: Any, p: Tensor) -> Any:
        if not isinstance(x, Tensor) or x.shape != p.shape or isinstance(x, ExpandedTensor):
            return x
        return ExpandedTensor(x, self.state_format, rounding="stochastic")


def _widened(x: Any, p: Tensor) -> Any:
    return x.dequantize() if isinstance(x, ExpandedTensor) else x
