"""Small models in plain torch, and their results with and without tracking, to compare."""

import copy
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from scaledtensor import ScaledTensor
from scaledtensor.inspect import Scales, track_scales, tracking


class Mlp(nn.Module):
    """A residual block of two linear layers and a gain of its own."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.fc1 = nn.Linear(width, 4 * width)
        self.fc2 = nn.Linear(4 * width, width)
        self.gain = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        """A module that adds to x."""
        h = self.fc1(x)
        h = F.gelu(h)
        return x + self.fc2(h) * self.gain


class Stack(nn.Module):
    """Two such blocks and a head that returns a loss."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Mlp(width) for _ in range(2))
        self.head = nn.Linear(width, 4)

    def forward(self, x: Tensor, y: Tensor | None = None) -> Tensor:
        for block in self.blocks:
            x = block(x)
        logits = self.head(x)
        return logits.square().mean() if y is None else F.cross_entropy(logits, y)


class Residual(nn.Module):
    """Two convolutions with batch norm beside a shortcut."""

    def __init__(self, inner: int, outer: int) -> None:
        super().__init__()
        self.conv1, self.norm1 = nn.Conv2d(inner, outer, 3, 2, 1), nn.BatchNorm2d(outer)
        self.conv2, self.norm2 = nn.Conv2d(outer, outer, 3, 1, 1), nn.BatchNorm2d(outer)
        self.shortcut = nn.Conv2d(inner, outer, 1, 2)

    def forward(self, x: Tensor) -> Tensor:
        h = F.relu(self.norm1(self.conv1(x)), inplace=True)
        return F.relu(self.norm2(self.conv2(h)) + self.shortcut(x))


class Awkward(nn.Module):
    """A model that breaks naive tracking: writes in place, views, several outputs, both kinds of
    checkpoints, a part used twice, tied weights, no_grad, dropout, a custom function."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)
        self.b.weight = self.a.weight
        self.lstm = nn.LSTM(8, 8, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        h = checkpoint(self._part, x * 1.0, use_reentrant=True)
        h = h + checkpoint(self._part, x, use_reentrant=False)
        z = h.clone()
        z[0] = 0
        z.view(-1)[:3] = 1
        z.mul_(2)
        left, right = z.chunk(2, -1)
        left = left + right
        out, (last, _) = self.lstm(torch.cat([left, right], -1))
        top, _ = out.max(-1)
        with torch.no_grad():
            shift = top.detach() * 2
        doubled: Tensor = _Double.apply(self.b(self.b(out)))
        return (doubled + last.transpose(0, 1) + (top - shift).unsqueeze(-1)).square().mean()

    def _part(self, x: Tensor) -> Tensor:
        return F.dropout(self.a(x).tanh(), 0.3)


class _Double(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return 2 * x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        return 2 * gradient


Built = tuple[nn.Module, tuple[Tensor, ...]]


def mlp() -> Built:
    return Stack(), (torch.randn(8, 16), torch.randint(4, (8,)))


def encoder() -> Built:
    layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
    return nn.Sequential(layer, nn.Linear(16, 4)), (torch.randn(4, 6, 16),)


def resnet() -> Built:
    parts = Residual(3, 8), Residual(8, 16), nn.AdaptiveAvgPool2d(1), nn.Flatten()
    return nn.Sequential(*parts, nn.Linear(16, 4)), (torch.randn(4, 3, 16, 16),)


def awkward() -> Built:
    return Awkward(), (torch.randn(4, 5, 8, requires_grad=True),)


BUILDERS: dict[str, Callable[[], Built]] = {
    "mlp": mlp,
    "encoder": encoder,
    "resnet": resnet,
    "awkward": awkward,
}

#: Ways to run a model: left alone, tracked in a `with`, or wrapped.
DOORS = ("with", "module")


def step(
    model: nn.Module, args: tuple[Any, ...], door: str = "", **options: Any
) -> tuple[list[Tensor | None], Scales]:
    """Return the result, gradients and buffers of one step of a copy of `model`, and its scales."""
    model, scales = copy.deepcopy(model), Scales()
    args = tuple(
        x.detach().clone().requires_grad_(x.requires_grad) if isinstance(x, Tensor) else x
        for x in args
    )
    torch.manual_seed(1)
    if door == "with":
        with tracking(model) as scales:
            loss = _loss(model(*args, **options))
            loss.backward()
    elif door == "module":
        tracked = track_scales(model)
        loss = _loss(tracked(*args, **options))
        loss.backward()
        scales = tracked.scales
    else:
        loss = _loss(model(*args, **options))
        loss.backward()
    inputs = [x.grad for x in args if isinstance(x, Tensor)]
    found = [loss, *(p.grad for p in model.parameters()), *model.buffers(), *inputs]
    return found, scales


def _loss(result: Any) -> Tensor:
    result = getattr(result, "loss", result)
    return result if result.dim() == 0 else result.square().mean()


def same(a: Tensor | None, b: Tensor | None) -> bool:
    """Compare to the last bit. ScaledTensors have the same elements and scale."""
    if a is None or b is None:
        return a is b
    if isinstance(a, ScaledTensor) and isinstance(b, ScaledTensor):
        return same(a.qdata, b.qdata) and same(a.scale, b.scale)
    if a.dtype.itemsize == 1:
        a, b = a.view(torch.uint8), b.view(torch.uint8)
    return torch.equal(a, b)
