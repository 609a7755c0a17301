"""Models whose matrix products see low precision: what a format does to training, on any device.

The operands of every product and convolution are rounded to one format on the way in, and the
gradient of its result to another on the way back; all else stays as it is. No scale is chosen: a
format serves as far as the numbers fit it, which is what unit scaling is for.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor, nn

from scaledtensor.errors import UnsupportedError
from scaledtensor.formats import E4M3FN, E5M2, Format, FormatLike, fake_quantize, get
from scaledtensor.formats.rounding import Overflow, Rounding
from scaledtensor.models.interpose import ENTERED, Mode, interpose, transforms
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
class SimulateFormat:
    """The transform: rounding by a format, forwards and backwards; None rounds nothing."""

    order: ClassVar[int] = 1  # after unit scaling: its products are products
    mark: ClassVar[str | None] = None

    forward: Format | None = E4M3FN
    backward: Format | None = E5M2
    rounding: Rounding = "nearest_even"
    backward_rounding: Rounding = "nearest_even"
    overflow: Overflow = "saturate_finite"

    def mode(self, module: nn.Module, args: Any, kwargs: Any) -> Mode:
        return _Simulation(self)

    def operand(self, x: Any) -> Any:
        """A product's operand: rounded, its gradient as it comes."""
        if isinstance(x, ScaledTensor):
            raise UnsupportedError(_BOTH)
        if self.forward is None or not isinstance(x, Tensor) or not x.is_floating_point():
            return x
        return _rounded(x, self.forward, self.rounding, self.overflow, None)

    def result(self, y: Any) -> Any:
        """A product's result: as it is, its gradient rounded."""
        if self.backward is None or not isinstance(y, Tensor) or not y.requires_grad:
            return y
        return _rounded(y, None, self.backward_rounding, self.overflow, self.backward)


class _Rounded(torch.autograd.Function):
    """`x` rounded to one format, its gradient to another; None rounds nothing."""

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
            # The same memory, but not a view, which autograd would let no model write into. Nobody
            # but the product's derivative has `x` itself, and that is told of writes.
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
    """Dynamo traces it."""

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
    """Make every matrix product, convolution and attention of `model` see low precision, in place.

    Its operands (weights and activations, not biases) are rounded to the values of `fwd_format`,
    the gradient of its result to those of `bwd_format`, without scales and with the accumulation of
    the device; autograd saves the rounded operands. In any spelling (`@`, `bmm`, `einsum`, `addmm`,
    grouped, `nn.MultiheadAttention`, recurrent layers), eager and compiled. With `unit_scale`, in
    either order, the products of the unit-scaled model are rounded. What no mode sees is not: under
    `torch.compile`, the body of an activation checkpoint.

    Args:
        model: any module; compile it afterwards. `scaledtensor.models.interpose.remove` undoes it.
        fwd_format: any format of `scaledtensor.formats`, its name or its torch dtype; None rounds
            no operand.
        bwd_format: the same for gradients.
        rounding: of operands: see `scaledtensor.formats.encode`. "stochastic" draws from torch's
            generator.
        bwd_rounding: of gradients; that of operands by default.
        overflow: see `scaledtensor.formats.encode`. What is not finite stays so by default, as in
            the casts of a ScaledTensor's operands.

    Returns:
        The same model.

    Raises:
        FormatError: no format has that name.
        ModelError: `model` is no module, is compiled, or simulates a format already.
        UnsupportedError: a parameter of it is a ScaledTensor. When called: a part of it is
            checkpointed, or it multiplies ScaledTensors.
    """
    forward, backward = (None if f is None else get(f) for f in (fwd_format, bwd_format))
    how = SimulateFormat(forward, backward, rounding, bwd_rounding or rounding, overflow)
    probe = torch.zeros(1)
    for fmt, mode in ((how.forward, how.rounding), (how.backward, how.backward_rounding)):
        if fmt is not None:
            fake_quantize(probe, fmt, rounding=mode, overflow=overflow)  # names what is wrong
    if isinstance(model, nn.Module) and any(map(is_scaled, model.parameters())):
        raise UnsupportedError(_BOTH)
    return interpose(model, how)


def refuse_simulated(model: nn.Module) -> None:
    """Raises UnsupportedError where a module of `model` simulates a format: `scale_model` asks."""
    for module in model.modules():
        if any(isinstance(t, SimulateFormat) for t in transforms(module)):
            raise UnsupportedError(
                f"{_BOTH}; scaledtensor.models.interpose.remove(model) takes the simulation away"
            )


def simulate_fp8(model: M) -> M:
    """`simulate_format` with the OCP formats: E4M3FN forwards, E5M2 backwards, to nearest even."""
    return simulate_format(model, E4M3FN, E5M2)
