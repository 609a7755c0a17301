"""The arithmetic of a row: a change of the model, and a context around each forward pass."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import scaledtensor as sct
from scaledtensor import recipes
from scaledtensor.errors import RecipeError
from scaledtensor.ops.products.dtype import choice


def _unchanged(model: nn.Module) -> None:
    pass


def _no_context(device: torch.device) -> AbstractContextManager[Any]:
    return nullcontext()


def _multiplies_bf16(device: torch.device) -> bool:
    return choice(device).dtype == torch.bfloat16


def _bf16_autocast(device: torch.device) -> AbstractContextManager[Any]:
    # Weights change in every step, so autocast's cache of their casts would save nothing.
    return torch.autocast(device.type, dtype=torch.bfloat16, cache_enabled=False)


def _autocast_where_fast(device: torch.device) -> AbstractContextManager[Any]:
    """The context of FP8 products that are emulated: bfloat16 between them if the device multiplies
    it fast, else float32. Attention is computed in this dtype too."""
    return _bf16_autocast(device) if _multiplies_bf16(device) else nullcontext()


def _slow_without_units(device: torch.device) -> str | None:
    if _multiplies_bf16(device):
        return None
    return f"torch multiplies bfloat16 slowly here, since {choice(device).reason}"


def _never_slow(device: torch.device) -> str | None:
    return None


@dataclass(frozen=True)
class Precision:
    """The arithmetic of a row. `prepare` changes a model in place, and `restore` makes its
    parameters plain again."""

    name: str
    title: str
    prepare: Callable[[nn.Module], object] = _unchanged
    restore: Callable[[nn.Module], object] = _unchanged
    context: Callable[[torch.device], AbstractContextManager[Any]] = _no_context
    slow: Callable[[torch.device], str | None] = _never_slow
    """The reason why torch takes many times as long on a device; None if it does not."""


class _UnscaledGemm(torch.autograd.Function):
    """The three products of a linear layer on FP8 operands that were cast with no scale."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        x, weight = _cast(x, torch.float8_e4m3fn), _cast(weight, torch.float8_e4m3fn)
        ctx.save_for_backward(x, weight)
        return _product(x, weight.mT)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        grad = _cast(grad_outputs[0], torch.float8_e5m2)
        return _product(grad, weight), _product(grad.flatten(0, -2).mT, x.flatten(0, -2))


def _cast(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Round `x` to an FP8 dtype, saturating, and hold it in the dtype that the device multiplies
    fast.

    bf16 and fp32 hold every FP8 value, so a GEMM of these operands is the FP8 GEMM.
    """
    largest = torch.finfo(dtype).max
    return x.clamp(-largest, largest).to(dtype).to(choice(x.device).dtype)


def _product(a: Tensor, b: Tensor) -> Tensor:
    """The product, rounded to bf16 as by FP8 units, in the dtype of the operands."""
    return (a @ b).bfloat16().to(a.dtype)


class UnscaledFP8Linear(nn.Linear):
    """`nn.Linear` with E4M3 operands forward and an E5M2 gradient backward, and no scales."""

    def forward(self, input: Tensor) -> Tensor:
        y: Tensor = _UnscaledGemm.apply(input, self.weight)  # type: ignore[no-untyped-call]
        return y if self.bias is None else y + self.bias.to(y.dtype)


def _cast_linears(model: nn.Module) -> None:
    for module in model.modules():
        if type(module) is nn.Linear:
            # Only `forward` differs: parameters, their names and the optimizer's view stay.
            module.__class__ = UnscaledFP8Linear


_PLAIN = {
    precision.name: precision
    for precision in (
        Precision("fp32", "FP32"),
        Precision(
            "bf16", "BF16 (torch.autocast)", context=_bf16_autocast, slow=_slow_without_units
        ),
        Precision("fp8", "FP8, no scales", prepare=_cast_linears, context=_autocast_where_fast),
    )
}
PLAIN_NAMES = tuple(_PLAIN)


def get(name: str) -> Precision:
    """Return the arithmetic called `name`: `fp32`, `bf16`, `fp8` (cast with no scale), or a recipe.

    Raises:
        RecipeError: nothing has this name.
    """
    if name in _PLAIN:
        return _PLAIN[name]
    try:
        recipe = recipes.get(name)
    except RecipeError as error:
        raise RecipeError(f"{error}; without scales: {', '.join(PLAIN_NAMES)}") from None
    return Precision(
        name,
        "FP8, ScaledTensor" if name == "unit" else f"ScaledTensor, {name}",
        prepare=lambda model: sct.scale_model(model, recipe=recipe),
        restore=sct.unscale_model,
    )
