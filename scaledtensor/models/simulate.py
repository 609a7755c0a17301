"""Simulates low precision in the matrix products of a plain model, on any device.

The operands of every product and convolution are rounded to one format, and the gradient of the
result to another. All other operators stay as they are. No scale is chosen, so a format works as
far as the numbers fit into it. Unit scaling makes them fit.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor, nn

from scaledtensor.errors import UnsupportedError
from scaledtensor.formats import E4M3FN, E5M2, Format, FormatLike, fake_quantize, get
from scaledtensor.formats.rounding import Overflow, Rounding
from scaledtensor.models.interpose import ENTERED, Mode, Transform, interpose, transforms
from scaledtensor.ops.products.table import PRODUCTS
from scaledtensor.tensors.steps import is_scaled
from scaledtensor.tensors.tensor import ScaledTensor

__all__ = ["SimulateFormat", "simulate_format", "simulate_fp8"]

M = TypeVar("M", bound=nn.Module)

_BOTH = (
    "simulate_format rounds plain tensors; ScaledTensors are rounded by their recipe already: "
    "scale_model(model, Unit(forward=..., gradient=...)) does both in one"
)


@dataclass(frozen=True)
class SimulateFormat(Transform):
    """The transform: rounds forwards to one format and backwards to another; None rounds
    nothing."""

    order: ClassVar[int] = 1  # it sees the products that unit scaling calls
    mark: ClassVar[str | None] = None

    forward: Format | None = E4M3FN
    backward: Format | None = E5M2
    rounding: Rounding = "nearest_even"
    backward_rounding: Rounding = "nearest_even"
    overflow: Overflow = "saturate_finite"

    def mode(self, module: nn.Module, args: Any, kwargs: Any) -> Mode:
        return _Simulation(self)

    def operand(self, x: Any) -> Any:
        """An operand of a product, rounded. Its gradient is not rounded."""
        if isinstance(x, ScaledTensor):
            raise UnsupportedError(_BOTH)
        if self.forward is None or not isinstance(x, Tensor) or not x.is_floating_point():
            return x
        return _rounded(x, self.forward, self.rounding, self.overflow, None)

    def result(self, y: Any) -> Any:
        """The result of a product. Its gradient is rounded."""
        if self.backward is None or not isinstance(y, Tensor) or not y.requires_grad:
            return y
        return _rounded(y, None, self.backward_rounding, self.overflow, self.backward)


class _Rounded(torch.autograd.Function):
    """Rounds `x` to one format, and its gradient to another; None rounds nothing."""

    generate_vmap_rule = True

    @staticmethod
    def forward(
        x: Tensor,
        forward: Format | None,
        rounding: Rounding,
        overflow: Overflow,
        backward: Format | None,
    ) -> Tensor:
        if forward is None:
            # The result has the same memory and is no view, since autograd lets no model write into
            # a view. Only the product's derivative has `x`, and autograd counts writes for it.
            return x.detach()
        return fake_quantize(x, forward, rounding=rounding, overflow=overflow)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.rest = inputs[2:]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        rounding, overflow, fmt = ctx.rest
        if fmt is not None:
            grad = _rounded(grad, fmt, rounding, overflow, None)
        return grad, None, None, None, None


#: (x, forward, rounding, overflow, backward)
_rounded: Callable[..., Any] = _Rounded.apply


class _Simulation(Mode):
    """Rounds the operands and the results of each product. Dynamo traces it."""

    def __init__(self, how: SimulateFormat) -> None:
        super().__init__()
        self.how = how

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in ENTERED:
            with self:
                return ENTERED[func](*args, **kwargs)
        product = PRODUCTS.get(func)
        if product is None or not product.places:
            return func(*args, **kwargs)
        self.refuse_checkpoint()
        args, kwargs = product.mapped(self.how.operand, args, kwargs)
        if not product.in_place:
            return self.how.result(func(*args, **kwargs))
        target, *rest = args
        return target.copy_(self.how.result(func(target.clone(), *rest, **kwargs)))


def simulate_format(
    model: M,
    fwd_format: FormatLike | None = E4M3FN,
    bwd_format: FormatLike | None = E5M2,
    *,
    rounding: Rounding = "nearest_even",
    bwd_rounding: Rounding | None = None,
    overflow: Overflow = "saturate_finite",
) -> M:
    """Round the operands of every matrix product, convolution and attention of `model`, in place.

    Operands (weights and activations, not biases) are rounded to `fwd_format`, and the gradient of
    the result to `bwd_format`. There are no scales, and the device accumulates as usual. Autograd
    saves the rounded operands. This holds for all spellings (`@`, `bmm`, `einsum`, `addmm`, grouped
    products, `nn.MultiheadAttention`, recurrent layers), eager and compiled. With `unit_scale`, in
    either order, the products of the unit-scaled model are rounded. Under `torch.compile`, no mode
    sees the body of an activation checkpoint, so its products are not rounded.

    Args:
        model: any module; compile it afterwards. `scaledtensor.models.interpose.remove` undoes the
            change.
        fwd_format: format of operands: a format of `scaledtensor.formats`, its name or its torch
            dtype; None rounds no operand.
        bwd_format: format of gradients, in the same form; None rounds no gradient.
        rounding: rounding of operands; see `scaledtensor.formats.encode`. "stochastic" draws from
            torch's generator.
        bwd_rounding: rounding of gradients; defaults to `rounding`.
        overflow: see `scaledtensor.formats.encode`. By default infinities and NaNs stay, as in the
            casts of a ScaledTensor's operands.

    Returns:
        The same model.

    Raises:
        FormatError: no format has that name.
        ModelError: `model` is no module, is compiled, or simulates a format already.
        UnsupportedError: a parameter of `model` is a ScaledTensor. When `model` is called: a part
            of it is checkpointed, or it multiplies ScaledTensors.
    """
    forward, backward = (None if f is None else get(f) for f in (fwd_format, bwd_format))
    how = SimulateFormat(forward, backward, rounding, bwd_rounding or rounding, overflow)
    probe = torch.zeros(1, dtype=torch.float32)
    for fmt, mode in ((how.forward, how.rounding), (how.backward, how.backward_rounding)):
        if fmt is not None:
            fake_quantize(probe, fmt, rounding=mode, overflow=overflow)  # may raise
    if isinstance(model, nn.Module) and any(map(is_scaled, model.parameters())):
        raise UnsupportedError(_BOTH)
    return interpose(model, how)


def refuse_simulated(model: nn.Module) -> None:
    """For verbs that change parameters: raises UnsupportedError if a module of `model` simulates a
    format."""
    for module in model.modules():
        if any(isinstance(t, SimulateFormat) for t in transforms(module)):
            raise UnsupportedError(
                f"{_BOTH}; scaledtensor.models.interpose.remove(model) takes the simulation away"
            )


def simulate_fp8(model: M) -> M:
    """`simulate_format` with the OCP formats: E4M3FN forwards and E5M2 backwards, to nearest
    even."""
    return simulate_format(model, E4M3FN, E5M2)
