"""Recipes: how the operands of matrix products are cast. Frozen data, one dataclass each."""

from scaledtensor.recipes.base import Recipe, get
from scaledtensor.recipes.by_block import MXFP4, MXFP6, MXFP8, NVFP4, Blockwise
from scaledtensor.recipes.by_tensor import Constant, Current, Delayed, MinMSE, PerGemm, Unit
from scaledtensor.recipes.casts import (
    Amax,
    Carried,
    Cast,
    Fixed,
    Gemm,
    Gemms,
    History,
    LeastError,
    Microscale,
    TwoLevel,
)

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
