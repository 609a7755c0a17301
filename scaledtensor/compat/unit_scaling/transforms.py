"""`unit_scaling.transforms`: each transform takes a model and returns a copy that computes
differently.

The copy is independent of the model. Transforms nest in any order, with `compile` or `track_scales`
outermost.

    model = compile(simulate_fp8(unit_scale(model)))
    model = track_scales(unit_scale(simulate_fp8(model)))

`scaledtensor.unit_scale`, `simulate_format` and `track_scales` do the work. They work in place, and
their documentation is complete.
"""

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeVar, cast

import torch
from torch import Tensor, fx, nn

import scaledtensor as sct
from scaledtensor.compat.unit_scaling.formats import FPFormat
from scaledtensor.compat.unit_scaling.replacing import ReplacingUnitScale
from scaledtensor.errors import FormatError, ModelError
from scaledtensor.inspect import (
    Metrics,
    Scales,
    TrackedModule,
    prune_non_float_tensors,
    prune_same_scale_tensors,
    prune_selected_nodes,
)
from scaledtensor.models.interpose import interpose
from scaledtensor.models.interpose import transforms as transforms_of
from scaledtensor.models.simulate import SimulateFormat
from scaledtensor.tensors.tensor import ScaledTensor
from scaledtensor.unit_scaling.verb import UnitScale

__all__ = [
    "Metrics",
    "compile",
    "prune_non_float_tensors",
    "prune_same_scale_tensors",
    "prune_selected_nodes",
    "simulate_format",
    "simulate_fp8",
    "track_scales",
    "unit_scale",
]

M = TypeVar("M", bound=nn.Module)


def unit_scale(
    module: M, replace: Mapping[Callable[..., Any], Callable[..., Any]] | None = None
) -> M:
    """Return a copy of `module` at unit scale; see `scaledtensor.unit_scale`.

    Args:
        module: any module. It does not change.
        replace: a function that the model calls -> the function that is called instead. A
            replacement from torch is scaled as if the model called it: `{new_gelu: F.gelu}`. Any
            other replacement is not scaled again: `{new_gelu: U.gelu}`. Most models need no
            replacement, since a formula written in torch's functions is scaled as a whole. For a
            key that is a plain Python function, a wrapper takes its place where the model's code
            finds it, and stays there. Outside of the model the wrapper calls the function.

    Raises:
        ModelError: `module` is no module, is compiled, or is unit-scaled already.
        UnsupportedError: the model's code does not find a key of `replace` by a name.
    """
    scaled = _copied(module)
    if not replace:
        return sct.unit_scale(scaled)
    return ReplacingUnitScale.apply(scaled, replace)


def simulate_format(module: M, fwd_format: FPFormat, bwd_format: FPFormat) -> M:
    """Return a copy of `module` with matrix products, convolutions and attention in low precision.

    `fwd_format` rounds operands, and `bwd_format` rounds the gradients of results. See
    `scaledtensor.simulate_format`.

    Raises:
        FormatError: a format is no `FPFormat`.
        ModelError: `module` is no module, is compiled, or simulates a format already.
    """
    for fmt in (fwd_format, bwd_format):
        if not isinstance(fmt, FPFormat):
            raise FormatError(f"a format is an FPFormat here; got {fmt!r}")
    return interpose(_copied(module), _Quantised(None, None, fwd=fwd_format, bwd=bwd_format))


def simulate_fp8(module: M) -> M:
    """Return `simulate_format(module)` with E4M3 forward, E5M2 backward and stochastic rounding."""
    return simulate_format(module, FPFormat(4, 3), FPFormat(5, 2))


def compile(module: M) -> M:
    """Return a copy of `module`, compiled by `torch.compile`.

    Unit scaling records a run of the model before it is compiled. It records each way of calling
    the model (train or eval, which arguments are given) once, at its first call.

    Raises:
        ModelError: `module` is no module or is compiled already.
    """
    own = _copied(module)
    compiled = cast(nn.Module, torch.compile(own))

    def planned(_: nn.Module, args: Any, kwargs: Any) -> None:
        for transform in transforms_of(own):
            if isinstance(transform, UnitScale):
                transform.mode(own, args, kwargs)

    compiled.register_forward_pre_hook(planned, with_kwargs=True)
    return cast(M, compiled)


def track_scales(
    module: nn.Module, *, capture: Literal["dynamo", "eager"] | None = None
) -> TrackedModule:
    """Return a copy of `module` that records the scale of every tensor of its last call.

    The copy's `scales_graph()` has `node.meta["metrics"]`, and includes the gradients of float
    inputs; see `scaledtensor.track_scales`. Before a call the graph is empty.

    Args:
        module: any module. It does not change.
        capture: "dynamo" records the operators that Dynamo captures, under Dynamo's names, like the
            published library. "eager" records the functions that Python calls. The default is
            "dynamo", or "eager" for a module with transforms, since Dynamo splits their functions.

    Raises:
        ModelError: `module` is no module or is tracked already, or `capture` is unknown.
        UnsupportedError: (when called) Dynamo captured nothing.
    """
    own = _copied(module)
    if capture is None:
        capture = "eager" if any(map(transforms_of, own.modules())) else "dynamo"
    return _Tracked(own, Scales(), capture, gradients=True)


class _Tracked(TrackedModule):
    """A tracked model. Its graph has the published names."""

    def scales_graph(self) -> fx.Graph:
        """Return `scales.scales_graph()`, or an empty graph before a call."""
        try:
            graph = super().scales_graph()
        except ModelError:  # nothing was recorded
            return fx.Graph()
        for node in graph.nodes:
            if "captured" in node.meta:
                name = node.meta["captured"]
                node.meta["clean_name"] = name.removeprefix("l_").removeprefix("L_").strip("_")
        return graph


@dataclass(frozen=True, kw_only=True)
class _Quantised(SimulateFormat):
    """Rounding by two `FPFormat`s, with their numbers of random bits."""

    fwd: FPFormat
    bwd: FPFormat

    def operand(self, x: Any) -> Any:
        x = super().operand(x)  # which refuses ScaledTensors
        floats = isinstance(x, Tensor) and x.is_floating_point()
        return self.fwd.quantise_fwd(x) if floats else x

    def result(self, y: Any) -> Any:
        floats = isinstance(y, Tensor) and not isinstance(y, ScaledTensor)
        return self.bwd.quantise_bwd(y) if floats and y.requires_grad else y


def _copied(module: M) -> M:
    if not isinstance(module, nn.Module):
        raise ModelError(f"a transform takes an nn.Module; got {type(module).__name__}")
    return copy.deepcopy(module)
