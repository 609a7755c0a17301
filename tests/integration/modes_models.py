"""Small models for the tests of modes, and assertions about gradients."""

import math

import torch
from assertions import assert_in_range, assert_shifted, dequantized
from small_models import GPT, LoRA
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import scaledtensor as sct

UNIT = sct.recipes.Unit()
#: This recipe rounds nothing to fewer bits than float32, so any difference is a mistake.
EXACT = sct.recipes.Unit("fp32", "fp32", "fp32")

Recipe = sct.recipes.Recipe
Gradients = dict[str, Tensor]


def plain_gpt(layers: int = 2, dropout: float = 0.0) -> GPT:
    torch.manual_seed(0)
    return GPT(vocabulary=16, context=8, layers=layers, heads=2, width=16, dropout=dropout)


def gpt(recipe: Recipe = UNIT, layers: int = 2, dropout: float = 0.0) -> GPT:
    return sct.scale_model(plain_gpt(layers, dropout), recipe)


def tokens(batch: int = 4, length: int = 9, seed: int = 0) -> Tensor:
    rng = torch.Generator().manual_seed(seed)
    return torch.randint(16, (batch, length), generator=rng)


def loss_of(model: nn.Module, t: Tensor) -> Tensor:
    return model(t[:, :-1], t[:, 1:])[1]


def gradients(model: nn.Module) -> Gradients:
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def gradients_of(model: nn.Module, t: Tensor) -> Gradients:
    """Return the gradients of one batch alone."""
    model.zero_grad()
    loss_of(model, t).backward()
    return gradients(model)


class Checkpointed(nn.Module):
    """A block whose activations are computed again in the backward pass."""

    def __init__(self, block: nn.Module, reentrant: bool) -> None:
        super().__init__()
        self.block, self.reentrant = block, reentrant

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.block, x, use_reentrant=self.reentrant)


def lora_gpt(recipe: Recipe = UNIT, layers: int = 2) -> GPT:
    model = plain_gpt(layers)
    for block in model.blocks:
        block.attention.qkv = LoRA(block.attention.qkv)
        block.mlp[0] = LoRA(block.mlp[0])
    return sct.scale_model(model, recipe)


# --- assertions ------------------------------------------------------------------------------


def assert_identical(got: Gradients, want: Gradients) -> None:
    """Gradients are scaled, and have the same scales, formats and bits."""
    assert got.keys() == want.keys()
    assert got
    for name, g in got.items():
        assert isinstance(g, sct.ScaledTensor), name
        assert_shifted(g, want[name], 0)


def assert_sane(found: Gradients) -> None:
    """Gradients are scaled by powers of two, with elements near 1. The limits are wide, because few
    correlated terms are not the Gaussians of the promise."""
    for name, g in found.items():
        assert_in_range([g], 0.05, 20, what=name)


def assert_near(got: Gradients, want: Gradients, tolerance: float) -> None:
    """Each gradient is within a relative distance."""
    assert got.keys() == want.keys()
    for name, g in got.items():
        distance = float((dequantized(g) - dequantized(want[name])).norm())
        assert distance <= tolerance * float(dequantized(want[name]).norm()) + 1e-12, name


def distance(got: Gradients, want: Gradients) -> float:
    """Return the relative distance of all gradients as one vector."""
    off = [float((dequantized(g) - dequantized(want[name])).norm()) for name, g in got.items()]
    return math.hypot(*off) / math.hypot(*(float(dequantized(g).norm()) for g in want.values()))
