"""hardware: the dtype that this machine multiplies fast, and the units that each recipe runs on.

`scaledtensor.backends` and `ops.products.dtype` make the decisions. This module asks for them and
prints a table.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from scaledtensor import native
from scaledtensor.backends import BACKENDS, Backend, Units
from scaledtensor.ops.products.dtype import choice
from scaledtensor.ops.products.quantize import is_exact, sharing
from scaledtensor.recipes import Recipe
from scaledtensor.recipes import get as get_recipe
from scaledtensor.recipes.base import RECIPES
from scaledtensor.recipes.casts import GEMMS, Cast, Gemm

__all__ = ["Device", "Hardware", "Product", "hardware"]


class Product(NamedTuple):
    """One product of a layer under a recipe."""

    recipe: str
    """The name of the recipe."""
    product: str
    """"forward", "dgrad" or "wgrad"."""
    casts: str
    """The casts of its operands; "-" stands for an operand without a cast."""
    runs_on: str
    """"FP8 units", "float32" or "bfloat16"."""
    reason: str
    """Why FP8 units do not take the product; empty if they do, and if the device has none."""


@dataclass(frozen=True)
class Device:
    """One device: its name, the dtype of its emulated products, and the products of each recipe."""

    device: torch.device
    name: str
    dtype: torch.dtype
    """The dtype of emulated products."""
    reason: str
    """The reason for that dtype."""
    products: tuple[Product, ...]
    casts: str
    """How eager casts run."""


@dataclass(frozen=True)
class Hardware:
    """The devices of this machine. `str()` is the table."""

    torch: str
    """The version of torch."""
    devices: tuple[Device, ...]
    """The CPU first, then the CUDA devices."""

    def __str__(self) -> str:
        lines = [f"torch {self.torch}"]
        for found in self.devices:
            lines += ["", f"{found.device}: {found.name}"]
            lines.append(f"  emulated products are computed in {_spelled(found.dtype)}: ")
            lines[-1] += found.reason
            lines.append(f"  {found.casts}")
            lines += [f"  {line}" for line in _table(found.products)]
        if len(self.devices) == 1:
            lines += ["", "cuda: torch finds no device"]
        return "\n".join(lines)

    __repr__ = __str__


def hardware(recipes: Sequence[Recipe | str] | None = None) -> Hardware:
    """Report the dtype that this machine multiplies fast, and the units that each recipe runs on.

    An 8-bit product runs on the FP8 units of a device if they take it. Otherwise it is emulated:
    the same values are multiplied in bfloat16 if that is exact and the device multiplies bfloat16
    fast, and else in float32. Both are exact, and results are rounded to the activation format in
    either case. `scaledtensor.products_in` and the environment variable SCALEDTENSOR_PRODUCTS
    override the dtype.

    Args:
        recipes: Recipes or their names; None stands for every recipe that has a name, with its
            defaults.

    Raises:
        RecipeError: No recipe has that name.
        HardwareError: SCALEDTENSOR_PRODUCTS is not "auto", "bfloat16" or "float32".
    """
    known = list(RECIPES) if recipes is None else recipes
    chosen = [get_recipe(recipe) for recipe in known]
    devices = (_device(b, d, chosen) for b in BACKENDS.values() for d in b.devices())
    return Hardware(torch.__version__, tuple(devices))


def _device(backend: Backend, device: torch.device, recipes: Sequence[Recipe]) -> Device:
    dtype, reason = choice(device)
    units = None if backend.units is None else backend.units(device)
    found = (_product(r, gemm, units, dtype) for r in recipes for gemm in GEMMS)
    casts = native.status() if backend.host else "casts are PyTorch operators"
    return Device(device, backend.describe(device), dtype, reason, tuple(found), casts)


def _product(recipe: Recipe, name: str, units: Units | None, dtype: torch.dtype) -> Product:
    gemm: Gemm = getattr(recipe.gemms, name)
    left, right = gemm.left, gemm.right
    reason = ""
    if units is not None:
        if left is None or right is None or max(left.format.bits, right.format.bits) > 8:
            reason = "not all operands are cast to 8 bits or fewer"
        else:
            reason = units.obstacle_of_casts(sharing(left), sharing(right)) or ""
        if not reason:
            return Product(recipe.name, name, str(gemm), "FP8 units", "")
    exact = all(_is_bfloat16(x, dim, recipe) for x, dim in ((left, -1), (right, -2)))
    return Product(
        recipe.name, name, str(gemm), _spelled(dtype if exact else torch.float32), reason
    )


def _is_bfloat16(cast: Cast | None, dim: int, recipe: Recipe) -> bool:
    """Whether bfloat16 holds the operand."""
    if cast is None:
        return recipe.activation.storage_dtype == torch.bfloat16
    if cast.format.bits > 8:
        return cast.format.storage_dtype == torch.bfloat16
    return is_exact(cast, dim)


def _spelled(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _table(found: Sequence[Product]) -> list[str]:
    lines = [("recipe", "product", "operands", "runs on")]
    for p in found:
        runs = p.runs_on if not p.reason else f"{p.runs_on} ({p.reason})"
        lines.append((p.recipe, p.product, p.casts, runs))
    widths = [max(len(line[i]) for line in lines) for i in range(3)]
    return [
        "  ".join((*(cell.ljust(w) for cell, w in zip(line, widths, strict=False)), line[3]))
        for line in lines
    ]
