"""Every unit-scaled function, with shapes, hyperparameters, and the promises of its closed form.

The fields of a case list its exceptions.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import scaledtensor.functional as U

FREE = ("gmean", "hmean", "amean", "to_output_scale", "exact")
BINARY = (*FREE, "to_grad_input_scale")
TERNARY = (*FREE, "to_left_grad_scale", "to_right_grad_scale")
#: Constraints of functions that can choose only the scale of a parameter or of a loss.
PARAMETER = ("exact",)

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Case:
    name: str
    run: Callable[..., Any]
    """Function of tensors and options that returns one tensor or several."""
    shapes: tuple[tuple[Shape, ...], ...]
    constraints: tuple[str, ...] | None = ()
    """Constraints besides None, or None if the function takes no `constraint`."""
    mults: tuple[float, ...] = ()
    bias: bool = False
    """The last tensor is zeros, as a bias at unit scale would add to the output's variance."""
    skewed: bool = False
    """The promise is unit RMS, not unit standard deviation: the mean counts as scale."""
    unscaled: bool = False
    """The output is not at unit scale: it is a loss, or logarithms with a meaning."""
    sparse: bool = False
    """A gradient is mostly zeros, which fit any scale, so ScaledTensors hold it low."""
    plain_gradient: bool = False
    """Arguments with plain gradients, even for ScaledTensors: torch computes them from the plain
    target and loss."""
    prepare: tuple[Callable[[Tensor], Tensor], ...] = field(default=())
    """Turns Gaussian numbers into suitable inputs of the function."""


def draw(case: Case, shapes: tuple[Shape, ...], seed: int = 0) -> list[Tensor]:
    rng = torch.Generator().manual_seed(seed)
    tensors = [torch.randn(s, generator=rng) for s in shapes]
    if case.bias:
        tensors[-1].zero_()
    return [f(x) for f, x in zip(case.prepare, tensors, strict=True)] if case.prepare else tensors


def integers(high: int, *shape: int) -> Tensor:
    """Return numbers that look random, without a generator, which compiled code cannot make."""
    return (torch.arange(math.prod(shape)) * 7919 // 13 % high).view(shape)


def log_probabilities(x: Tensor) -> Tensor:
    return torch.log_softmax(x, -1)


def noise(x: Tensor) -> Tensor:
    """Return a Gaussian sample in the shape of `x`, in an order that is independent of `x`."""
    u = (torch.arange(x.numel(), dtype=torch.float64) * 0.6180339887 + 1e-4) % 1
    return torch.special.ndtri(u).view(x.shape).to(x.dtype)


def rotate(query: Tensor, key: Tensor) -> Any:
    angles = integers(1000, query.shape[-2], query.shape[-1] // 2).repeat(1, 2) * 0.1
    return U.apply_rotary(query, key, angles.cos(), angles.sin())


def experts(x: Tensor, w: Tensor, **options: Any) -> Tensor:
    ends = torch.tensor([96, 128, 200, len(x)], dtype=torch.int32)
    return U.grouped_linear(x, w, ends, **options)


def embed(w: Tensor, **options: Any) -> Tensor:
    return U.embedding(integers(w.shape[0], 32, 16), w, **options)


def class_loss(loss: Callable[..., Tensor], x: Tensor, **options: Any) -> Tensor:
    return loss(x, integers(x.shape[1], x.shape[0], *x.shape[2:]), **options)


def branch(x: Tensor, w: Tensor) -> Tensor:
    return U.residual_apply(lambda y: U.linear(y, w, constraint=None), x, 0.5)


def norm(function: Callable[..., Tensor], x: Tensor, *parameters: Tensor, **o: Any) -> Tensor:
    return function(x, (x.shape[-1],), *parameters, **o)


def ones(x: Tensor) -> Tensor:
    return torch.ones_like(x)


def same(x: Tensor) -> Tensor:
    return x


MATRIX = (((64, 256),), ((4, 16, 96),))
TWO = (((64, 256),) * 2,)
SHARP = (0.5, 1.0, 4.0)
HEADS = ((2, 4, 64, 32),) * 3
GROUPED = ((2, 8, 64, 32), (2, 2, 64, 32), (2, 2, 64, 32))
ATTENTION = FREE

CASES = [
    Case("gelu", U.gelu, MATRIX, BINARY, SHARP),
    Case("gelu tanh", partial(U.gelu, approximate="tanh"), MATRIX, ()),
    Case("silu", U.silu, MATRIX, BINARY, SHARP),
    Case("silu_glu", U.silu_glu, TWO, TERNARY, SHARP),
    Case("relu", U.relu, MATRIX, BINARY),
    Case("leaky_relu", partial(U.leaky_relu, negative_slope=0.2), MATRIX, BINARY),
    Case("tanh", U.tanh, MATRIX, BINARY, SHARP),
    Case("sigmoid", U.sigmoid, MATRIX, BINARY, SHARP, skewed=True),
    Case("softmax", partial(U.softmax, dim=-1), MATRIX, BINARY, SHARP, skewed=True),
    Case("log_softmax", partial(U.log_softmax, dim=-1), MATRIX, PARAMETER, SHARP, unscaled=True),
    Case("dropout", partial(U.dropout, p=0.3), MATRIX, None),
    Case("matmul", U.matmul, (((64, 256), (256, 32)), ((2, 48, 64), (2, 64, 32))), TERNARY),
    Case("matmul broadcast", U.matmul, (((8, 64, 256), (256, 32)),), TERNARY),
    Case("matmul vector", U.matmul, (((256, 512), (512,)),), TERNARY),
    Case("bmm", U.bmm, (((8, 64, 32), (8, 32, 16)),), TERNARY),
    Case("einsum", partial(U.einsum, "bik, bkj -> bij"), (((8, 64, 32), (8, 32, 16)),), TERNARY),
    Case("einsum ...", partial(U.einsum, "...k,jk"), (((4, 64, 32), (128, 32)),), TERNARY),
    Case(
        "einsum chain",
        partial(U.einsum, "ij,jk,kl->il"),
        (((96, 64), (64, 96), (96, 64)),),
        ("gmean", "to_output_scale", "exact"),
    ),
    Case("linear", U.linear, (((4, 64, 256), (128, 256), (128,)),), BINARY, bias=True),
    Case("linear_readout", U.linear_readout, (((4, 64, 64), (128, 64)),), BINARY, unscaled=True),
    Case("avg_pool1d", partial(U.avg_pool1d, kernel_size=4), (((8, 16, 64),),), BINARY),
    Case(
        "avg_pool2d",
        partial(U.avg_pool2d, kernel_size=3, stride=2, divisor_override=2),
        (((4, 8, 33, 33),),),
        BINARY,
    ),
    Case(
        "adaptive_avg_pool1d",
        partial(U.adaptive_avg_pool1d, output_size=16),
        (((8, 16, 64),), ((8, 16, 4),)),
        BINARY,
    ),
    Case(
        "adaptive_avg_pool2d",
        partial(U.adaptive_avg_pool2d, output_size=(None, 1)),
        (((16, 32, 8, 8),),),
        BINARY,
    ),
    Case(
        "adaptive_avg_pool3d",
        partial(U.adaptive_avg_pool3d, output_size=2),
        (((4, 32, 4, 8, 4),),),
        BINARY,
    ),
    Case("mean", partial(U.mean, dim=(-2, -1)), (((16, 64, 4, 8),),), BINARY),
    Case(
        "conv1d",
        partial(U.conv1d, dilation=2),
        (((8, 16, 64), (32, 16, 3), (32,)),),
        BINARY,
        bias=True,
    ),
    Case(
        "conv1d groups",
        partial(U.conv1d, groups=4, padding=1),
        (((8, 16, 64), (32, 4, 3)),),
        BINARY,
    ),
    Case("conv1d same", partial(U.conv1d, padding="same"), (((16, 256), (32, 16, 3)),), ()),
    Case(
        "conv2d",
        partial(U.conv2d, stride=2, padding=1),
        (((8, 16, 32, 32), (32, 16, 3, 3), (32,)),),
        BINARY,
        bias=True,
    ),
    Case("conv3d", partial(U.conv3d, padding=1), (((2, 8, 12, 12, 12), (16, 8, 3, 3, 3)),), BINARY),
    Case(
        "conv_transpose1d",
        partial(U.conv_transpose1d, stride=2),
        (((8, 16, 64), (16, 64, 4), (64,)),),
        BINARY,
        bias=True,
    ),
    Case(
        "conv_transpose2d",
        partial(U.conv_transpose2d, stride=2),
        (((8, 16, 16, 16), (16, 32, 4, 4)),),
        BINARY,
    ),
    Case(
        "conv_transpose3d",
        partial(U.conv_transpose3d, stride=2, groups=2),
        (((2, 8, 8, 8, 8), (8, 4, 4, 4, 4)),),
        BINARY,
    ),
    Case(
        "layer_norm",
        partial(norm, U.layer_norm),
        (((64, 256), (256,), (256,)),),
        PARAMETER,
        bias=True,
        prepare=(same, ones, same),
    ),
    Case(
        "rms_norm",
        partial(norm, U.rms_norm),
        (((64, 256), (256,)),),
        PARAMETER,
        prepare=(same, ones),
    ),
    Case(
        "group_norm",
        lambda x, w, b, **k: U.group_norm(x, 4, w, b, **k),
        (((16, 128, 8, 8), (128,), (128,)),),
        PARAMETER,
        bias=True,
        prepare=(same, ones, same),
    ),
    Case(
        "batch_norm",
        lambda x, w, b, **k: U.batch_norm(x, None, None, w, b, True, **k),
        (((16, 128, 8, 8), (128,), (128,)),),
        PARAMETER,
        bias=True,
        prepare=(same, ones, same),
    ),
    Case("add", U.add, TWO, TERNARY),
    Case("add broadcast", U.add, (((64, 256), (256,)),), TERNARY),
    Case("add alpha", partial(U.add, alpha=-2), TWO, TERNARY),
    Case("add number", lambda x: U.add(x, 1.0), MATRIX, None),
    Case("mul", U.mul, TWO, TERNARY),
    Case("mul broadcast", U.mul, (((64, 256), (256,)),), TERNARY),
    Case("mul square", lambda x, **k: U.mul(x, x, **k), MATRIX, BINARY, skewed=True),
    Case("residual_apply", branch, (((64, 256), (256, 256)),), None),
    Case(
        "residual_split",
        lambda x: U.residual_add(*U.residual_split(x, 0.3), 0.3),
        MATRIX,
        None,
        unscaled=True,
    ),
    Case("embedding", embed, (((64, 128),),), PARAMETER),
    Case("apply_rotary", rotate, (((2, 4, 32, 16), (2, 2, 32, 16)),), None),
    Case(
        "scaled_dot_product_attention",
        U.scaled_dot_product_attention,
        (HEADS,),
        ATTENTION,
        (1.0, 8.0),
    ),
    Case(
        "attention causal",
        partial(U.scaled_dot_product_attention, is_causal=True),
        (HEADS,),
        ATTENTION,
        (1.0, 8.0),
    ),
    Case(
        "attention grouped",
        partial(U.scaled_dot_product_attention, enable_gqa=True),
        (GROUPED,),
        ATTENTION,
    ),
    Case(
        "attention scale",
        partial(U.scaled_dot_product_attention, scale=32**-0.5),
        (HEADS,),
        ATTENTION,
    ),
    Case(
        "moe_route",
        lambda x, **k: U.moe_route(x, 2, **k)[0],
        (((512, 8),),),
        BINARY,
        (0.5, 1.0, 2.0),
        unscaled=True,
        sparse=True,
    ),
    Case("grouped_linear", experts, (((256, 64), (4, 64, 32)),), BINARY),
    Case(
        "cross_entropy",
        partial(class_loss, U.cross_entropy),
        (((64, 128),), ((4, 32, 16),)),
        PARAMETER,
        unscaled=True,
    ),
    Case(
        "nll_loss",
        partial(class_loss, U.nll_loss),
        (((64, 128),), ((4, 32, 16),)),
        PARAMETER,
        unscaled=True,
        prepare=(log_probabilities,),
    ),
    Case("mse_loss", U.mse_loss, TWO, PARAMETER, unscaled=True),
    Case("l1_loss", U.l1_loss, TWO, PARAMETER, unscaled=True),
    Case("smooth_l1_loss", partial(U.smooth_l1_loss, beta=0.7), TWO, PARAMETER, unscaled=True),
    Case(
        "binary_cross_entropy_with_logits",
        lambda x, **k: U.binary_cross_entropy_with_logits(x, (noise(x) > 0).to(x.dtype), **k),
        MATRIX,
        PARAMETER,
        SHARP,
        unscaled=True,
    ),
    Case(
        "kl_div",
        lambda x, **k: U.kl_div(x, F.softmax(noise(x), -1), reduction="batchmean", **k),
        MATRIX,
        PARAMETER,
        unscaled=True,
        plain_gradient=True,
        skewed=True,
        prepare=(log_probabilities,),
    ),
]

#: Functions that compute no tensor of their own, and the files that test them.
ELSEWHERE = {
    "avg_pool3d": "torch has no BF16 kernel of it for a CPU: test_spellings.py",
    "global_batch": "a setting: test_scaling.py",
    "residual_add": "in residual_apply",
    "scale_bwd": "test_scaling.py",
    "scale_fwd": "test_scaling.py",
    "transformer_residual_scaling_rule": "no tensor: test_published.py",
}
