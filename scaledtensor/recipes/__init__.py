"""Recipes: how the operands of a matrix product are cast. Frozen data, one dataclass each."""

from scaledtensor.recipes.base import Recipe, get
from scaledtensor.recipes.unit import Unit

__all__ = ["Recipe", "Unit", "get"]
