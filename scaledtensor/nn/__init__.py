"""torch.nn's modules at unit scale: `import scaledtensor.nn as uu`.

Each module has the name and the arguments of a torch module, and calls the function of that name in
`scaledtensor.functional`. Weights start with unit variance, biases start at zero, and all
parameters are tagged for u-muP. Two defaults differ from torch: layers have no bias, and norms have
no gains or shifts.
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
