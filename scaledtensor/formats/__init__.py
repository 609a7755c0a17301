"""Number formats: what they are, and the casts between them and torch's own."""

from scaledtensor.formats import numpy as numpy  # not in __all__: a star import would shadow numpy
from scaledtensor.formats.blocks import (
    TwoLevelScale,
    dequantize_blocks,
    encode_blocks,
    quantize_blocks,
)
from scaledtensor.formats.custom import custom
from scaledtensor.formats.expansion import Expanded, dequantize_expanded, quantize_expanded
from scaledtensor.formats.format import (
    BF16,
    E2M1FN,
    E2M3FN,
    E3M2FN,
    E3M4,
    E4M3,
    E4M3B11FNUZ,
    E4M3FN,
    E4M3FNUZ,
    E5M2,
    E5M2FNUZ,
    E8M0FNU,
    FORMATS,
    FP16,
    FP32,
    INT4,
    INT8,
    MXINT8,
    Format,
    FormatLike,
    Specials,
    from_dtype,
    get,
)
from scaledtensor.formats.granularity import Granularity, PerAxis, PerBlock, PerTensor
from scaledtensor.formats.packing import pack, unpack
from scaledtensor.formats.rounding import decode, encode, fake_quantize
from scaledtensor.formats.stochastic import random_key

__all__ = [
    "BF16",
    "E2M1FN",
    "E2M3FN",
    "E3M2FN",
    "E3M4",
    "E4M3",
    "E4M3B11FNUZ",
    "E4M3FN",
    "E4M3FNUZ",
    "E5M2",
    "E5M2FNUZ",
    "E8M0FNU",
    "FORMATS",
    "FP16",
    "FP32",
    "INT4",
    "INT8",
    "MXINT8",
    "Expanded",
    "Format",
    "FormatLike",
    "Granularity",
    "PerAxis",
    "PerBlock",
    "PerTensor",
    "Specials",
    "TwoLevelScale",
    "custom",
    "decode",
    "dequantize_blocks",
    "dequantize_expanded",
    "encode",
    "encode_blocks",
    "fake_quantize",
    "from_dtype",
    "get",
    "pack",
    "quantize_blocks",
    "quantize_expanded",
    "random_key",
    "unpack",
]
