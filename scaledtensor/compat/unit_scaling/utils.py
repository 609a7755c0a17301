"""`unit_scaling.utils`: a model's code with its scales, and the scales of a single tensor."""

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from typing import Any, cast

import torch
from torch import Tensor, nn

from scaledtensor import inspect

__all__ = ["ScalePair", "ScaleTracker", "analyse_module"]


@dataclass
class ScalePair:
    """Standard deviations of a tensor and of its gradient; None until they are known."""

    forward: float | None = None
    backward: float | None = None

    def __str__(self) -> str:
        forward, backward = (
            "n/a" if x is None else f"{x:.3}" for x in (self.forward, self.backward)
        )
        return f"(-> {forward}, <- {backward})"


class ScaleTracker(torch.autograd.Function):
    """Writes the standard deviation of a tensor, and later of its gradient, into a `ScalePair`."""

    @staticmethod
    def forward(ctx: Any, t: Tensor, scale_tracker: ScalePair) -> Tensor:
        scale_tracker.forward = float(t.std())
        ctx.scale_tracker = scale_tracker
        return t.view_as(t)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        ctx.scale_tracker.backward = float(grad.std())
        return grad, None

    @staticmethod
    def track(t: Tensor, scale_tracker: ScalePair) -> Tensor:
        """Return `t`. Its scales are written into `scale_tracker`."""
        return cast(Tensor, ScaleTracker.apply(t, scale_tracker))  # type: ignore[no-untyped-call]


def analyse_module(
    module: nn.Module,
    inputs: Tensor | tuple[Tensor, ...],
    backward: Tensor | None = None,
    recurse_modules: bool = True,
    syntax_highlight: bool = True,
    autowrap_modules: tuple[Any, ...] = (),
    autowrap_functions: tuple[Callable[..., Any], ...] = (),
) -> str:
    """Return the source of a model's classes, with the scales of each line's tensor and gradient.

    See `scaledtensor.inspect.analyse_module`, which runs the model and does not trace it.

    Args:
        module: any module. It does not change.
        inputs: the module's input, or a tuple of inputs.
        backward: the gradient of the result.
        recurse_modules: whether to list torch's classes too, such as `nn.Linear`.
        syntax_highlight: whether to colour the code for a terminal, if Pygments is installed.
        autowrap_modules, autowrap_functions: have no effect. A model that runs needs no wrapping.

    Raises:
        ModelError: no result is differentiable.
    """
    code = inspect.analyse_module(module, inputs, backward, library=recurse_modules)
    if not syntax_highlight or find_spec("pygments") is None:
        return code
    pygments: Any = import_module("pygments")  # an extra, without types
    lexer: Any = import_module("pygments.lexers").PythonLexer()
    formatter: Any = import_module("pygments.formatters").TerminalFormatter()
    return str(pygments.highlight(code, lexer, formatter))
