"""hardware: what this machine multiplies fast, and what each recipe will run on.

The decisions are made elsewhere, in `ops.products` (the dtype of emulated products) and
`ops.hardware` (what FP8 units take); here they are asked and written down.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from scaledtensor import native
from scaledtensor.ops.products import dtype as products
from scaledtensor.ops.products.cuda import obstacle_of_casts
from scaledtensor.ops.products.quantize import is_exact
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
    """How its operands are cast; "-" stands for an operand that is not."""
    runs_on: str
    """"FP8 units", "float32" or "bfloat16"."""
    reason: str
    """Why FP8 units do not take the product; empty where they do, and on a CPU."""


@dataclass(frozen=True)
class Device:
    """One device: its name, the dtype of its emulated products, and the products of each recipe."""

    device: torch.device
    name: str
    dtype: torch.dtype
    """What emulated products are computed in."""
    reason: str
    """What that was decided by."""
    products: tuple[Product, ...]
    casts: str
    """How eager casts run."""


@dataclass(frozen=True)
class Hardware:
    """What was found. `str()` is the table."""

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
    """What this machine multiplies fast, and what each recipe will run on: CPU and CUDA devices.

    An 8-bit product runs on the FP8 units of a CUDA device where they take it. Elsewhere it is
    emulated by a product of the same values, in bfloat16 where the device multiplies that fast and
    it is exact, and in float32 where not. Both are exact, and results are rounded to the activation
    format in either case. `scaledtensor.products_in` and the environment variable
    SCALEDTENSOR_PRODUCTS override the dtype.

    Args:
        recipes: recipes or their names; None is every recipe that has a name, with its defaults.

    Raises:
        RecipeError: no recipe has that name.
        HardwareError: SCALEDTENSOR_PRODUCTS is none of "auto", "bfloat16" and "float32".
    """
    known = list(RECIPES) if recipes is None else recipes
    chosen = [get_recipe(recipe) for recipe in known]
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    devices = [torch.device("cpu"), *(torch.device("cuda", i) for i in range(count))]
    return Hardware(torch.__version__, tuple(_device(d, chosen) for d in devices))


def _device(device: torch.device, recipes: Sequence[Recipe]) -> Device:
    dtype, reason = products.choice(device)
    held: tuple[int, int] | None = None
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
        if torch.version.hip is None:
            held = torch.cuda.get_device_capability(device)
            name += f", compute capability {held[0]}.{held[1]}"
    else:
        facts = torch.cpu.get_capabilities()
        model = facts.get("cpu_name") or facts.get("architecture") or "CPU"
        capability = torch.backends.cpu.get_cpu_capability()
        name = f"{model}, {capability}, {torch.get_num_threads()} threads"
    found = (_product(r, gemm, held, dtype) for r in recipes for gemm in GEMMS)
    casts = native.status() if device.type == "cpu" else "casts are PyTorch operators"
    return Device(device, name, dtype, reason, tuple(found), casts)


def _product(
    recipe: Recipe, name: str, held: tuple[int, int] | None, dtype: torch.dtype
) -> Product:
    gemm: Gemm = getattr(recipe.gemms, name)
    left, right = gemm.left, gemm.right
    reason = ""
    if held is not None:
        if left is None or right is None or max(left.format.bits, right.format.bits) > 8:
            reason = "not all operands are cast to 8 bits or fewer"
        else:
            reason = obstacle_of_casts(left, right, held) or ""
        if not reason:
            return Product(recipe.name, name, str(gemm), "FP8 units", "")
    exact = all(_is_bfloat16(x, dim, recipe) for x, dim in ((left, -1), (right, -2)))
    return Product(
        recipe.name, name, str(gemm), _spelled(dtype if exact else torch.float32), reason
    )


def _is_bfloat16(cast: Cast | None, dim: int, recipe: Recipe) -> bool:
    """Whether the operand can be a bfloat16 one."""
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
