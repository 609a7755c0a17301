"""torch.nn's modules at unit scale: `import scaledtensor.nn as uu`.

Each is the torch module of its name over the function of its name in `scaledtensor.functional`,
with its parameters initialised to unit variance (weights) or zero (biases) and tagged for u-muP.
What differs from torch are defaults: no bias, and no gains or shifts in norms.
"""

from scaledtensor.mup import MupType, Parameter
from scaledtensor.nn.activations import (
    GELU,
    Dropout,
    LeakyReLU,
    LogSoftmax,
    ReLU,
    Sigmoid,
    SiLU,
    Softmax,
    Tanh,
)
from scaledtensor.nn.common import DepthModuleList, DepthSequential
from scaledtensor.nn.convolutions import (
    Conv1d,
    Conv2d,
    Conv3d,
    ConvTranspose1d,
    ConvTranspose2d,
    ConvTranspose3d,
)
from scaledtensor.nn.linear import Embedding, Linear, LinearReadout
from scaledtensor.nn.losses import (
    BCEWithLogitsLoss,
    CrossEntropyLoss,
    KLDivLoss,
    L1Loss,
    MSELoss,
    NLLLoss,
    SmoothL1Loss,
)
from scaledtensor.nn.norms import (
    BatchNorm1d,
    BatchNorm2d,
    BatchNorm3d,
    GroupNorm,
    LayerNorm,
    RMSNorm,
)
from scaledtensor.nn.transformer import (
    MHSA,
    MLP,
    TransformerDecoder,
    TransformerLayer,
    TransformerStack,
)

__all__ = [
    "GELU",
    "MHSA",
    "MLP",
    "BCEWithLogitsLoss",
    "BatchNorm1d",
    "BatchNorm2d",
    "BatchNorm3d",
    "Conv1d",
    "Conv2d",
    "Conv3d",
    "ConvTranspose1d",
    "ConvTranspose2d",
    "ConvTranspose3d",
    "CrossEntropyLoss",
    "DepthModuleList",
    "DepthSequential",
    "Dropout",
    "Embedding",
    "GroupNorm",
    "KLDivLoss",
    "L1Loss",
    "LayerNorm",
    "LeakyReLU",
    "Linear",
    "LinearReadout",
    "LogSoftmax",
    "MSELoss",
    "MupType",
    "NLLLoss",
    "Parameter",
    "RMSNorm",
    "ReLU",
    "SiLU",
    "Sigmoid",
    "SmoothL1Loss",
    "Softmax",
    "Tanh",
    "TransformerDecoder",
    "TransformerLayer",
    "TransformerStack",
]
