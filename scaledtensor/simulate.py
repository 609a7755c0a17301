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
from torch.nn import functional as F

from scaledtensor import _torch
from scaledtensor.errors import UnsupportedError
from scaledtensor.formats import E4M3FN, E5M2, Format, FormatLike, fake_quantize, get
from scaledtensor.formats.rounding import Overflow, Rounding
from scaledtensor.interpose import ENTERED, Mode, interpose, transforms
from scaledtensor.steps import is_scaled
from scaledtensor.tensor import ScaledTensor

__all__ = ["SimulateFormat", "simulate_format", "simulate_fp8"]

M = TypeVar("M", bound=nn.Module)

#: Positions and names of the operands of every product, in every spelling.
OPERANDS: dict[Callable[..., Any], tuple[tuple[int, str], ...]] = {
    **dict.fromkeys(
        (torch.matmul, torch.linalg.matmul, Tensor.matmul, Tensor.__matmul__, Tensor.__rmatmul__),
        ((0, "input"), (1, "other")),
    ),
    **dict.fromkeys(
        (torch.mm, torch.bmm, torch.mv, torch.dot, torch.inner),
        ((0, "input"), (1, "mat2")),
    ),
    **dict.fromkeys(
        (Tensor.mm, Tensor.bmm, Tensor.mv, Tensor.dot, Tensor.inner),
        ((0, "self"), (1, "mat2")),
    ),
    **dict.fromkeys((torch.outer, Tensor.outer), ((0, "input"), (1, "vec2"))),
    **dict.fromkeys((torch.tensordot, torch.functional.tensordot), ((0, "a"), (1, "b"))),
    **dict.fromkeys((torch.addmm, Tensor.addmm, Tensor.addmm_), ((1, "mat1"), (2, "mat2"))),
    **dict.fromkeys((torch.addmv, Tensor.addmv, Tensor.addmv_), ((1, "mat"), (2, "vec"))),
    **dict.fromkeys(
        (
            *(torch.baddbmm, Tensor.baddbmm, Tensor.baddbmm_),
            *(torch.addbmm, Tensor.addbmm, Tensor.addbmm_),
        ),
        ((1, "batch1"), (2, "batch2")),
    ),
    **dict.fromkeys(
        (
            *(F.linear, F.conv1d, F.conv2d, F.conv3d),
            *(torch.conv1d, torch.conv2d, torch.conv3d, torch.convolution, torch.conv_tbc),
            *(F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d),
            *(torch.conv_transpose1d, torch.conv_transpose2d, torch.conv_transpose3d),
        ),
        ((0, "input"), (1, "weight")),
    ),
    F.bilinear: ((0, "input1"), (1, "input2"), (2, "weight")),
    F.grouped_mm: ((0, "mat_a"), (1, "mat_b")),
    _torch.grouped_mm: ((0, "mat_a"), (1, "mat_b")),
    F.scaled_dot_product_attention: ((0, "query"), (1, "key"), (2, "value")),
}

#: Products of any number of operands, and where these begin: one by one, or as one list.
OPERANDS_FROM: dict[Callable[..., Any], int] = {
    **dict.fromkeys((torch.einsum, torch.functional.einsum), 1),
    **dict.fromkeys((torch.linalg.multi_dot, torch.chain_matmul, torch.functional.chain_matmul), 0),
}

#: Products that are written into the first argument.
IN_PLACE = {Tensor.addmm_, Tensor.addmv_, Tensor.baddbmm_, Tensor.addbmm_}


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
    overflow: Overflow = "saturate"

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
        start = OPERANDS_FROM.get(func)
        if start is not None:
            self.refuse_checkpoint()
            listed = len(args) == start + 1
            matrices = [self.how.operand(x) for x in (args[start] if listed else args[start:])]
            call = (*args[:start], matrices) if listed else (*args[:start], *matrices)
            return self.how.result(func(*call, **kwargs))
        operands = OPERANDS.get(func)
        if operands is None:
            return func(*args, **kwargs)
        self.refuse_checkpoint()
        args = list(args)
        for position, name in operands:
            if position < len(args):
                args[position] = self.how.operand(args[position])
            elif name in kwargs:
                kwargs = {**kwargs, name: self.how.operand(kwargs[name])}
        if func not in IN_PLACE:
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
    overflow: Overflow = "saturate",
) -> M:
    """Make every matrix product, convolution and attention of `model` see low precision, in place.

    Its operands (weights and activations, not biases) are rounded to the values of `fwd_format`,
    the gradient of its result to those of `bwd_format`, without scales and with the accumulation of
    the device; autograd saves the rounded operands. In any spelling (`@`, `bmm`, `einsum`, `addmm`,
    grouped, `nn.MultiheadAttention`, recurrent layers), eager and compiled. With `unit_scale`, in
    either order, the products of the unit-scaled model are rounded. What no mode sees is not: under
    `torch.compile`, the body of an activation checkpoint.

    Args:
        model: any module; compile it afterwards. `scaledtensor.interpose.remove` undoes it.
        fwd_format: any format of `scaledtensor.formats`, its name or its torch dtype; None rounds
            no operand.
        bwd_format: the same for gradients.
        rounding: of operands: see `scaledtensor.formats.encode`. "stochastic" draws from torch's
            generator.
        bwd_rounding: of gradients; that of operands by default.
        overflow: "saturate", or "ieee": to infinity or NaN, as the format has it.

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
                f"{_BOTH}; scaledtensor.interpose.remove(model) takes the simulation away"
            )


def simulate_fp8(model: M) -> M:
    """`simulate_format` with the OCP formats: E4M3FN forwards, E5M2 backwards, to nearest even."""
    return simulate_format(model, E4M3FN, E5M2)
