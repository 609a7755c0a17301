"""A model that pays for the casts of FP8 training and for nothing else.

Its linear layers multiply E4M3FN operands and an E5M2 gradient, cast without scales by the casts of
this library, and keep codes for the backward pass. All else is `torch.autocast` on float32
parameters. No rule, no scale and no guard runs. It does not train, since most gradients underflow.
"""

from typing import Any

import torch
from torch import Tensor, nn

from scaledtensor.formats import decode, encode, fake_quantize
from scaledtensor.ops.products.dtype import product_dtype

__all__ = ["CastsAlone", "InAutocast"]


class _Products(torch.autograd.Function):
    """The three products of a linear layer."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        codes = encode(x, "e4m3fn"), encode(weight, "e4m3fn")
        ctx.save_for_backward(*codes)
        rows, matrix = (decode(c, "e4m3fn", product_dtype(x.device)) for c in codes)
        return (rows @ matrix.mT).bfloat16()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        dtype = product_dtype(grads[0].device)
        rows, matrix = (decode(c, "e4m3fn", dtype) for c in ctx.saved_tensors)
        dy = fake_quantize(grads[0].bfloat16(), "e5m2").to(dtype)
        dw = dy.flatten(0, -2).mT @ rows.flatten(0, -2)
        return (dy @ matrix).bfloat16(), dw.float()


class _CastLinear(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        y: Tensor = _Products.apply(input.bfloat16(), self.weight)  # type: ignore[no-untyped-call]
        return y if self.bias is None else y + self.bias.bfloat16()


class InAutocast(nn.Module):
    """A loss under `torch.autocast`, for float32 parameters and bfloat16 activations."""

    def __init__(self, loss_of: nn.Module) -> None:
        super().__init__()
        self.loss_of = loss_of

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        with torch.autocast(x.device.type, torch.bfloat16, cache_enabled=False):
            loss: Tensor = self.loss_of(x, y)
        return loss


class CastsAlone(InAutocast):
    """A loss whose model has the casts of FP8 training in its linear layers, and no scales. It
    changes the model in place."""

    def __init__(self, loss_of: nn.Module) -> None:
        super().__init__(loss_of)
        for parameter in loss_of.parameters():
            product_dtype(parameter.device)  # asks the machine, which a trace cannot
        for module in loss_of.modules():
            if type(module) is nn.Linear:
                module.__class__ = _CastLinear
