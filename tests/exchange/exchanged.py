"""Models and weights of these tests."""

from typing import Any

import torch
from torch import Tensor, nn

import scaledtensor as sct
from scaledtensor.formats import TwoLevelScale
from scaledtensor.quantization.configs import Config
from scaledtensor.quantization.verb import quantized_weight

#: The scale of an input: a power of two, so that its reciprocal is exact.
INPUT_SCALE = 0.0625


def plain_weight(rows: int = 256, columns: int = 384, seed: int = 0) -> Tensor:
    """Normal numbers, in rows of different sizes."""
    generator = torch.Generator().manual_seed(seed)
    sizes = torch.rand(rows, 1, generator=generator) + 0.01
    return torch.randn(rows, columns, generator=generator) * sizes


def weight(config: Config, x: Tensor | None = None, **more: Any) -> sct.QuantizedTensor:
    """A weight of `config`, with a scale of its input if the layouts of this config keep one."""
    made = quantized_weight(plain_weight() if x is None else x, config)
    two_level = made.scale.dtype == torch.float8_e4m3fn
    scale = TwoLevelScale(made.scale, made.tensor_scale) if two_level else made.scale
    if config.static or (two_level and config.input is not None):
        more |= {"input_scale": INPUT_SCALE}
    return sct.QuantizedTensor(made.codes, scale, config, **more)


class Model(nn.Module):
    """A table, two layers, a norm and a head that stays plain."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(16, 128)
        self.layers = nn.ModuleList([nn.Linear(128, 256), nn.Linear(256, 128, bias=False)])
        self.norm = nn.LayerNorm(128)
        self.head = nn.Linear(128, 16, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.table(ids)
        for layer in self.layers:
            x = torch.relu(layer(x))
        return self.head(self.norm(x))


IDS = torch.arange(12).view(2, 6)


def model(config: Config | dict[str, Config | None] | None = None, seed: int = 0) -> Model:
    """A model whose weights are normal; its layers are quantised if there is a config."""
    torch.manual_seed(seed)
    made = Model()
    if config is not None:
        sct.quantize_(made, config, lambda module, name: name != "head")
    return made
