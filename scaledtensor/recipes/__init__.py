"""Recipes: how the operands of matrix products are cast. Frozen data, one dataclass each."""

from scaledtensor.recipes.base import Recipe, get
from scaledtensor.recipes.blocks import MXFP4, MXFP6, MXFP8, NVFP4, Blockwise
from scaledtensor.recipes.casts import Cast, Gemm, Gemms
from scaledtensor.recipes.constant import Constant
from scaledtensor.recipes.current import Current, MinMSE
from scaledtensor.recipes.delayed import Delayed
from scaledtensor.recipes.per_gemm import PerGemm
from scaledtensor.recipes.scales import (
    Amax,
    Carried,
    Fixed,
    History,
    LeastError,
    Microscale,
    TwoLevel,
)
from scaledtensor.recipes.unit import Unit

__all__ = [
    "MXFP4",
    "MXFP6",
    "MXFP8",
    "NVFP4",
    "Amax",
    "Blockwise",
    "Carried",
    "Cast",
    "Constant",
    "Current",
    "Delayed",
    "Fixed",
    "Gemm",
    "Gemms",
    "History",
    "LeastError",
    "Microscale",
    "MinMSE",
    "PerGemm",
    "Recipe",
    "TwoLevel",
    "Unit",
    "get",
]
