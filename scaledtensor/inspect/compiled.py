"""Compiled form: graphs that Dynamo captured, run operator by operator and recorded."""

import operator
import re
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor, fx

from scaledtensor.inspect.places import Place
from scaledtensor.inspect.recorder import Recorder, clean_name

__all__ = ["interpreter"]


def interpreter(module: fx.GraphModule, recorder: Callable[[], Recorder]) -> Callable[..., Any]:
    """What runs in the place of `module`. `recorder` is asked at each run for where to record."""

    def run(*args: Any) -> Any:
        return _Recorded(module, recorder()).run(*args)

    return cast(Callable[..., Any], torch.compiler.disable(run))  # type: ignore[no-untyped-call]


class _Recorded(fx.Interpreter):
    """Runs each node as it is; autograd follows as it would in eager mode."""

    def __init__(self, module: fx.GraphModule, recorder: Recorder) -> None:
        super().__init__(module)
        self.recorder = recorder

    def run_node(self, n: fx.Node) -> Any:
        if not n.op.startswith("call_"):
            out = super().run_node(n)
            if n.op == "placeholder" and isinstance(out, Tensor):
                self.recorder.node_of(out, clean_name(n.name), "placeholder")
                self.recorder.captured(out, n.name)
            elif n.op == "output":
                self.recorder.result(out)
            return out
        args, kwargs = self.fetch_args_kwargs_from_env(n)
        out = super().run_node(n)
        taken = n.target is operator.getitem and not isinstance(args[0], Tensor)
        if not taken:  # an element of a tuple is a node since the tuple was
            self.recorder.call(n.op, n.target, args, kwargs, out, _place(n), clean_name(n.name))
        if isinstance(out, Tensor):
            self.recorder.captured(out, n.name)
        return out


def _place(n: fx.Node) -> Place:
    modules = list(n.meta.get("nn_module_stack", {}).values())
    # L['self'].layers.0
    module = re.sub(r"^L\[[^\]]*\]\.?", "", modules[-1][0]) if modules else ""
    frames = re.findall(r'File "([^"]*)", line (\d+)', n.meta.get("stack_trace") or "")
    return Place(module, ":".join(frames[-1]) if frames else "")
