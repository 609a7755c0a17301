"""Every module in one line: how to make it, and its inputs."""

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

import scaledtensor.nn as uu


def drawn(*shape: int) -> Callable[[], tuple[Tensor, ...]]:
    return lambda: (torch.randn(shape),)


def tokens() -> tuple[Tensor, ...]:
    return (torch.randint(0, 32, (16, 64)),)


def logits() -> tuple[Tensor, ...]:
    return torch.randn(256, 32), torch.randint(0, 32, (256,))


def pair() -> tuple[Tensor, ...]:
    return torch.randn(64, 32), torch.randn(64, 32)


def probabilities() -> tuple[Tensor, ...]:
    return torch.randn(64, 32).log_softmax(-1), torch.randn(64, 32).softmax(-1)


def labels() -> tuple[Tensor, ...]:
    return torch.randn(64, 32), torch.randint(0, 2, (64, 32)).float()


@dataclass(frozen=True)
class Case:
    make: Callable[[], nn.Module]
    arguments: Callable[[], tuple[Tensor, ...]]
    same: bool = True
    """The published library has it, with the same value and gradients."""
    exempt: tuple[str, ...] = field(default=())
    """Tensors without unit scale: "output", "input" (its gradient), or the name of a parameter."""


ROWS = drawn(64, 128)
CASES = {
    "GELU": Case(uu.GELU, ROWS, exempt=("input",)),  # constrained to the output's scale
    "GELU_mult": Case(lambda: uu.GELU(2.0, None, "tanh"), ROWS),
    "SiLU": Case(lambda: uu.SiLU(constraint=None), ROWS),
    "ReLU": Case(lambda: uu.ReLU(constraint=None), ROWS, same=False),
    "LeakyReLU": Case(lambda: uu.LeakyReLU(0.2, constraint=None), ROWS, same=False),
    "Tanh": Case(lambda: uu.Tanh(constraint=None), ROWS, same=False),
    # The output has unit RMS and a mean.
    "Sigmoid": Case(lambda: uu.Sigmoid(constraint=None), ROWS, same=False, exempt=("output",)),
    # The output has unit RMS and a mean.
    "Softmax": Case(
        lambda: uu.Softmax(-1, mult=2.0, constraint=None), ROWS, exempt=("output", "input")
    ),
    # Logarithms have a meaning, so they are not scaled.
    "LogSoftmax": Case(lambda: uu.LogSoftmax(-1), ROWS, same=False, exempt=("output",)),
    "Dropout": Case(lambda: uu.Dropout(0.3), ROWS),
    "Linear": Case(lambda: uu.Linear(128, 128), ROWS),
    "Linear_free": Case(lambda: uu.Linear(128, 64, constraint=None), ROWS),
    "Linear_bias": Case(lambda: uu.Linear(128, 128, bias=True), ROWS),
    # The weight's gradient is 1 / sqrt(fan_in) by design.
    "LinearReadout": Case(lambda: uu.LinearReadout(128, 64), ROWS, exempt=("output",)),
    "Conv1d": Case(lambda: uu.Conv1d(32, 32, 3), drawn(8, 32, 64)),
    "Conv1d_strided": Case(
        lambda: uu.Conv1d(32, 32, 4, 2, 1, 2, 4, bias=True, constraint=None),
        drawn(8, 32, 128),
        same=False,  # The published module does not honour the constraint.
    ),
    "Conv2d": Case(lambda: uu.Conv2d(16, 16, 3, bias=True), drawn(4, 16, 20, 20), same=False),
    "Conv3d": Case(lambda: uu.Conv3d(8, 8, 2), drawn(2, 8, 10, 10, 10), same=False),
    "ConvTranspose1d": Case(
        lambda: uu.ConvTranspose1d(32, 32, 4, 2, bias=True, constraint=None),
        drawn(8, 32, 64),
        same=False,
    ),
    "ConvTranspose2d": Case(
        lambda: uu.ConvTranspose2d(16, 16, 2, constraint=None), drawn(4, 16, 20, 20), same=False
    ),
    "ConvTranspose3d": Case(
        lambda: uu.ConvTranspose3d(8, 8, 2, 2, constraint=None),
        drawn(2, 8, 8, 8, 8),
        same=False,
    ),
    "LayerNorm": Case(lambda: uu.LayerNorm(128), ROWS),
    "LayerNorm_affine": Case(lambda: uu.LayerNorm((8, 16), 1e-3, True), drawn(64, 8, 16)),
    "RMSNorm": Case(lambda: uu.RMSNorm(128), ROWS),
    "RMSNorm_affine": Case(lambda: uu.RMSNorm((8, 16), 1e-3, True), drawn(64, 8, 16)),
    "GroupNorm": Case(lambda: uu.GroupNorm(4, 32, affine=True), drawn(16, 32, 8, 8), same=False),
    "BatchNorm1d": Case(lambda: uu.BatchNorm1d(128, affine=True), ROWS, same=False),
    "BatchNorm2d": Case(lambda: uu.BatchNorm2d(32), drawn(8, 32, 8, 8), same=False),
    "BatchNorm3d": Case(lambda: uu.BatchNorm3d(8, affine=True), drawn(4, 8, 6, 6, 6), same=False),
    "Embedding": Case(lambda: uu.Embedding(32, 128), tokens),
    # Their value is the value of torch's losses.
    "CrossEntropyLoss": Case(uu.CrossEntropyLoss, logits, exempt=("output",)),
    "CrossEntropyLoss_mult": Case(
        lambda: uu.CrossEntropyLoss(0.5, reduction="sum"), logits, exempt=("output",)
    ),
    "NLLLoss": Case(uu.NLLLoss, logits, same=False, exempt=("output",)),
    "MSELoss": Case(uu.MSELoss, pair, same=False, exempt=("output",)),
    "L1Loss": Case(uu.L1Loss, pair, same=False, exempt=("output",)),
    "SmoothL1Loss": Case(uu.SmoothL1Loss, pair, same=False, exempt=("output",)),
    "BCEWithLogitsLoss": Case(uu.BCEWithLogitsLoss, labels, same=False, exempt=("output",)),
    "KLDivLoss": Case(
        lambda: uu.KLDivLoss(reduction="batchmean"), probabilities, same=False, exempt=("output",)
    ),
    # Two linear layers read the input, so its gradient is a sum of two terms.
    "MLP": Case(lambda: uu.MLP(64), drawn(8, 64, 64), exempt=("input",)),
    # The output's scale serves all three gradients, and the gradients of queries and keys are
    # small.
    "MHSA": Case(
        lambda: uu.MHSA(64, 4, is_causal=True),
        drawn(8, 64, 64),
        exempt=("input", "linear_qkv.weight"),
    ),
    "TransformerLayer": Case(
        lambda: uu.TransformerLayer(64, 4, 0.5, 0.4, is_causal=False),
        drawn(8, 64, 64),
        exempt=("mhsa.linear_qkv.weight",),
    ),
}
