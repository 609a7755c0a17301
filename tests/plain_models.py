"""Small models in plain torch that know nothing of scales, and batches from which they can
learn."""

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from tensors import gaussian
from torch import Tensor, nn

# --- ResNet-18 -------------------------------------------------------------------------------


class Residual(nn.Module):
    """Two convolutions beside a shortcut, as in He et al. 2016."""

    def __init__(self, inner: int, outer: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inner, outer, 3, stride, 1, bias=False)
        self.norm1 = nn.BatchNorm2d(outer)
        self.conv2 = nn.Conv2d(outer, outer, 3, 1, 1, bias=False)
        self.norm2 = nn.BatchNorm2d(outer)
        nn.init.constant_(self.norm2.weight, 0.25)  # a branch starts small (Goyal et al. 2017)
        self.shortcut = nn.Sequential()
        if stride != 1 or inner != outer:
            self.shortcut = nn.Sequential(
                nn.Conv2d(inner, outer, 1, stride, bias=False), nn.BatchNorm2d(outer)
            )

    def forward(self, x: Tensor) -> Tensor:
        h = F.relu(self.norm1(self.conv1(x)), inplace=True)
        h = self.norm2(self.conv2(h))
        h += self.shortcut(x)
        return F.relu(h, inplace=True)


class ResNet(nn.Module):
    """The eighteen layers of a ResNet-18, eight times narrower."""

    def __init__(self, stages: int = 4, classes: int = 10, width: int = 8) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, width, 7, 2, 3, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(3, 2, 1),
        )
        widths = [width, width, 2 * width, 4 * width, 8 * width][: stages + 1]
        self.stages = nn.Sequential(
            *(
                nn.Sequential(Residual(a, b, 1 if i == 0 else 2), Residual(b, b, 1))
                for i, (a, b) in enumerate(itertools.pairwise(widths))
            )
        )
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.head = nn.Linear(widths[-1], classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.pool(self.stages(self.stem(x))).flatten(1))


# --- U-Net -----------------------------------------------------------------------------------


class Twice(nn.Sequential):
    """Two convolutions, each with a group norm and a silu."""

    def __init__(self, inner: int, outer: int) -> None:
        super().__init__(
            nn.Conv2d(inner, outer, 3, padding=1),
            nn.GroupNorm(4, outer),
            nn.SiLU(),
            nn.Conv2d(outer, outer, 3, padding=1, padding_mode="reflect"),
            nn.GroupNorm(4, outer),
            nn.SiLU(),
        )


class UNet(nn.Module):
    """A U-Net of three levels, which goes up once by a transposed convolution and once by
    interpolation."""

    def __init__(self, classes: int = 4, width: int = 8) -> None:
        super().__init__()
        self.down1, self.down2 = Twice(3, width), Twice(width, 2 * width)
        self.bottom = Twice(2 * width, 4 * width)
        self.up2 = nn.ConvTranspose2d(4 * width, 2 * width, 2, 2)
        self.up1 = nn.Conv2d(2 * width, width, 1)
        self.back2, self.back1 = Twice(4 * width, 2 * width), Twice(2 * width, width)
        self.head = nn.Conv2d(width, classes, 1)

    def forward(self, x: Tensor) -> Tensor:
        a = self.down1(x)
        b = self.down2(F.max_pool2d(a, 2))
        c = self.bottom(F.avg_pool2d(b, 2))
        b = self.back2(torch.cat((b, self.up2(c)), 1))
        up = F.interpolate(self.up1(b), scale_factor=2, mode="bilinear", align_corners=False)
        return self.head(self.back1(torch.cat((a, up), 1)))


# --- recurrent -------------------------------------------------------------------------------


class Recurrent(nn.Module):
    """A language model over one of torch's recurrent networks."""

    def __init__(self, kind: type[nn.RNNBase], vocabulary: int = 32, **options: Any) -> None:
        super().__init__()
        self.table = nn.Embedding(vocabulary, 32)
        self.network = kind(32, 32, num_layers=2, batch_first=True, **options)
        both = 2 if options.get("bidirectional") else 1
        self.head = nn.Linear(32 * both, vocabulary)

    def forward(self, x: Tensor) -> Tensor:
        h, _ = self.network(self.table(x))
        return self.head(h)


# --- batches ---------------------------------------------------------------------------------

Batch = tuple[Tensor, Tensor]


def images(seed: int) -> Batch:
    """Return images with a pattern for each class, in noise."""
    rng = torch.Generator().manual_seed(seed)
    patterns = gaussian(10, 3, 8, 8)
    labels = torch.randint(10, (16,), generator=rng)
    smooth = F.interpolate(patterns, scale_factor=8, mode="bicubic")[labels]
    return smooth + 0.5 * torch.randn(smooth.shape, generator=rng), labels


def masks(seed: int) -> Batch:
    """Return images and classes of pixels. The class is a quadrant of two smoothed channels."""
    rng = torch.Generator().manual_seed(seed)
    x = F.avg_pool2d(torch.randn(4, 3, 16, 16, generator=rng), 3, 1, 1) * 3
    return x, (x[:, 0] > 0).long() + 2 * (x[:, 1] > 0).long()


def tokens(seed: int) -> Batch:
    """Return sequences that count up from anywhere, with gaps."""
    rng = torch.Generator().manual_seed(seed)
    steps = torch.randint(1, 4, (8, 13), generator=rng)
    ids = steps.cumsum(1) % 32
    return ids[:, :-1], ids[:, 1:]


@dataclass(frozen=True)
class Style:
    build: Callable[[], nn.Module]
    batch: Callable[[int], Batch]

    def loss(self, model: nn.Module, seed: int = 0, length: int | None = None) -> Tensor:
        """Return the cross entropy; for sequences, up to a length."""
        x, target = self.batch(seed)
        if x.dim() == 2:
            x, target = x[:, :length], target[:, :length]
        logits = model(x)
        if logits.dim() == 3:
            logits = logits.transpose(1, 2)
        return F.cross_entropy(logits, target)


STYLES = {
    "resnet": Style(ResNet, images),
    "unet": Style(UNet, masks),
    "lstm": Style(lambda: Recurrent(nn.LSTM), tokens),
    "gru": Style(lambda: Recurrent(nn.GRU, bidirectional=True), tokens),
    "rnn": Style(lambda: Recurrent(nn.RNN), tokens),
}
