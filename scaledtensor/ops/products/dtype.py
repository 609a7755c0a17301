"""The dtype of emulated products, and the warning that a product is emulated.

Every value of an 8-bit format is a bfloat16 and a float32 value, and products of both accumulate in
float32. So the emulated product of two operands has the same meaning in either dtype. Each kind of
device decides by itself which dtype it multiplies fast (`scaledtensor.backends`).

`products_in` and the environment variable SCALEDTENSOR_PRODUCTS override the choice. Float16
operands are always multiplied in float32, since their sums leave the range of float16.
"""

import os
import warnings
from typing import Literal, get_args

import torch
from torch import Tensor

from scaledtensor.backends import Choice, backend_of
from scaledtensor.errors import HardwareError, RecipeWarning
from scaledtensor.setting import Setting

__all__ = [
    "Name",
    "choice",
    "multiplied",
    "product_dtype",
    "products_in",
    "state",
    "warn_of_emulation",
]

Name = Literal["auto", "bfloat16", "float32"]

#: The environment variable that overrides the choice.
VARIABLE = "SCALEDTENSOR_PRODUCTS"


class products_in(Setting):  # noqa: N801 - reads as a verb, like torch.no_grad
    """Choose the dtype of emulated products: a setting, and a context manager that restores the
    setting before.

    Args:
        name: "float32", "bfloat16", or "auto", which chooses by the device (`sct.hardware()`).

    Code that `torch.compile` has compiled keeps the dtype that it was compiled with.

    Raises:
        HardwareError: `name` is another string.
    """

    _now: Name = "auto"

    def __init__(self, name: Name) -> None:
        super().__init__(_checked(name, "products_in"))


def _checked(name: str, source: str) -> Name:
    for known in get_args(Name):
        if name == known:
            return known  # type: ignore[no-any-return]
    allowed = ", ".join(repr(known) for known in get_args(Name))
    raise HardwareError(f"{source} takes one of {allowed}; got {name!r}")


_choices: dict[tuple[str, int | None], Choice] = {}


def product_dtype(device: torch.device) -> torch.dtype:
    """Return the dtype of emulated products on `device`: torch.bfloat16 or torch.float32."""
    return choice(device).dtype


def choice(device: torch.device) -> Choice:
    """Return the dtype of emulated products on `device`, and the reason for it."""
    if products_in._now != "auto":
        return Choice(getattr(torch, products_in._now), "chosen by scaledtensor.products_in")
    key = (device.type, device.index)
    found = _choices.get(key)
    if found is None:
        found = _choices[key] = _chosen(device)
    return found


def state() -> str:
    """Return the choice that compiled code depends on, for the keys of caches."""
    return str(product_dtype(torch.device("cpu")))


def multiplied(*operands: Tensor, wide: bool = False) -> tuple[Tensor, ...]:
    """Return the operands of one product in the dtype in which it is computed.

    It is bfloat16 if all operands are and the device multiplies bfloat16 fast, and else float32. A
    `wide` product is float32, because its result keeps more bits than bfloat16 has.
    """
    dtype = operands[0].dtype
    if dtype == torch.bfloat16 and (wide or product_dtype(operands[0].device) != torch.bfloat16):
        dtype = torch.float32
    for q in operands:
        if q.dtype is not dtype or dtype not in (torch.bfloat16, torch.float32):
            return tuple(q.float() for q in operands)
    return operands


def _chosen(device: torch.device) -> Choice:
    named = os.environ.get(VARIABLE)
    if named is not None and _checked(named, f"the environment variable {VARIABLE}") != "auto":
        return Choice(getattr(torch, named), f"chosen by {VARIABLE}")
    return backend_of(device).products(device)


def warn_of_emulation(reason: str) -> None:
    """Warn, once for each reason, that a device with FP8 units does not do a product on them."""
    if reason not in _told:
        _told.add(reason)
        warnings.warn(
            f"an FP8 product is computed from the same values in 16 or 32 bits: {reason}",
            RecipeWarning,
            stacklevel=2,
        )


_told: set[str] = set()
