"""Gradients as bytes: options, codes and scales. `reduce.py` sends them.

`Wire.scaling` says how a gradient g becomes codes. Let max be the largest number of the format.

"block", the default: 128 elements in a row share a scale 2^k, sent beside them as a byte (E8M0).
    It is the least scale under which none of the elements exceeds max. This takes 1.008 bytes per
    element, and ranks agree on nothing.

"auto": all elements of a bucket, on all ranks, share one scale, as in FP8-LM (arXiv 2310.18313,
    section 2.1): q = round(mu g / s). s is the least power of two under which the largest |g| of
    all ranks stays within max. Ranks first agree on this maximum, one number per rank. mu begins at
    1. If more than 0.001% of the elements of all ranks exceeded max, mu is halved for the bucket's
    next step. Otherwise it grows by 4^(1/1000), to at most 2: from 1/2 to 2 takes 1000 steps.
    Nothing exceeds max at mu <= 1, so mu stays in 1/2 ... 2. The counts travel with the codes, so
    all ranks decide alike without another collective. The sum of an all-reduce is coded under such
    a power of two for each rank's part, without mu, which is sent beside it as a byte.

A power-of-two factor of g changes scales and no code, as long as float32 holds g and the results.
An infinity or NaN becomes NaN, in that element and no other. Zero stays zero.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, cast

import torch
from torch import Tensor

from scaledtensor.errors import DTypeError, FormatError
from scaledtensor.formats import (
    E4M3FN,
    E5M2,
    Format,
    decode,
    dequantize_blocks,
    encode,
    get,
    quantize_blocks,
    random_key,
)

__all__ = ["AutoScales", "Bucket", "Wire"]

BLOCK = 128  #: elements that share a scale
_COUNT = 4  # bytes of the number of saturated elements
_ONE_IN = 100_000  # 0.001% may saturate
_GROWTH = 4.0 ** (1 / 1000)
_LEAST_MU, _MOST_MU = 0.5, 2.0
_GOLDEN = 0x9E3779B9  # 2^32 / golden ratio: multiples of it are spread evenly


@dataclass(frozen=True)
class Wire:
    """How gradients travel between ranks.

    Attributes:
        format: the format of the codes: E4M3FN or E5M2, or its name or torch dtype.
        scaling: "block" or "auto"; the docstring of the module explains both.
        rounding: "nearest_even", or "stochastic", which is unbiased; ranks draw differently.
        gather: the format in which the sum of an all-reduce returns: "fp8", or "bf16", which rounds
            16 times as finely and takes half as many bytes again.

    Raises:
        FormatError: a field has none of the allowed values.
    """

    format: Format = E4M3FN
    scaling: Literal["block", "auto"] = "block"
    rounding: Literal["nearest_even", "stochastic"] = "nearest_even"
    gather: Literal["fp8", "bf16"] = "fp8"

    def __post_init__(self) -> None:
        object.__setattr__(self, "format", get(self.format))
        allowed: dict[str, tuple[object, ...]] = {
            "format": (E4M3FN, E5M2),
            "scaling": ("block", "auto"),
            "rounding": ("nearest_even", "stochastic"),
            "gather": ("fp8", "bf16"),
        }
        for field, values in allowed.items():
            if getattr(self, field) not in values:
                raise FormatError(
                    f"Wire: {field} is {' or '.join(map(repr, values))}; got"
                    f" {getattr(self, field)!r}"
                )


class AutoScales:
    """The factor mu of each bucket with scaling "auto": the same numbers on all ranks.

    Any rank saves `state_dict()` with a checkpoint, and all ranks load it.
    """

    def __init__(self) -> None:
        self.mu: dict[str, Tensor] = {}

    def of(self, bucket: str, device: torch.device) -> Tensor:
        """Return mu of a bucket, 0-dim float32. It is 1 for a new bucket."""
        mu = self.mu.get(bucket)
        if mu is None:
            mu = torch.ones((), device=device, dtype=torch.float32)
        self.mu[bucket] = mu.to(device)  # a loaded mu may be on another device
        return self.mu[bucket]

    def decide(self, bucket: str, saturated: Tensor, elements: int) -> None:
        """Set mu for the next step, on the device, since reading the count would wait for it."""
        mu = self.mu[bucket]
        grown = (mu * _GROWTH).clamp(max=_MOST_MU)
        self.mu[bucket] = torch.where(saturated.long() * _ONE_IN > elements, mu / 2, grown)

    def state_dict(self) -> dict[str, Tensor]:
        """Return a copy of mu for each bucket."""
        return {bucket: mu.clone() for bucket, mu in self.mu.items()}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Replace mu of all buckets.

        Raises:
            DTypeError: an entry is not one float32 number from 1/2 to 2; nothing is changed then.
        """
        for bucket, mu in state.items():
            fits = isinstance(mu, Tensor) and mu.dtype is torch.float32 and mu.shape == ()
            if not fits or not _LEAST_MU <= float(mu) <= _MOST_MU:
                raise DTypeError(f"mu of bucket {bucket!r} is a float32 from 1/2 to 2; got {mu!r}")
        self.mu = {bucket: mu.clone() for bucket, mu in state.items()}


class Blocks:
    """Codes of rows under a scale for each `block` elements of a row; -1 is the whole row."""

    def __init__(self, wire: Wire, block: int, rank: int) -> None:
        self.wire, self.block, self.rank = wire, (1, block), rank

    def encode(self, rows: Tensor) -> Tensor:
        """Return the bytes of each row: its codes, then its scales."""
        rows = _infinite_as_nan(rows)
        options = _rounding(self.wire, rows.device, self.rank)
        parts = quantize_blocks(rows, self.wire.format, self.block, "e8m0", **options)
        return torch.cat([cast(Tensor, part).view(torch.uint8) for part in parts], 1)

    def decode(self, rows: Tensor, length: int) -> Tensor:
        """Return the values of `length` elements of each row, float32."""
        codes = rows[:, :length].contiguous().view(self.wire.format.storage_dtype)
        scale = rows[:, length:].contiguous().view(torch.float8_e8m0fnu)
        return dequantize_blocks(codes, scale, self.wire.format, self.block)


class Bucket:
    """Codes of rows under one scale that all ranks agreed on, and mu.

    Args:
        most: the largest finite magnitude in the bucket on all ranks, float32 of shape (1,).
        scales, name: the `AutoScales` with mu, and the name of the bucket in it; without
            `scales`, mu is always 1.
    """

    def __init__(
        self, wire: Wire, most: Tensor, scales: AutoScales | None, name: str, rank: int
    ) -> None:
        self.wire, self.scales, self.name, self.rank = wire, scales, name, rank
        # The scale of a block that holds the largest of all numbers, by the rule of all blocks.
        self.scale = cast(Tensor, quantize_blocks(most, wire.format, 1, "pow2")[1])
        self.mu = torch.ones_like(most) if scales is None else scales.of(name, most.device)

    @staticmethod
    def most(rows: Tensor) -> Tensor:
        """Return the largest finite magnitude on this rank."""
        return rows.nan_to_num(0.0, 0.0, 0.0).abs_().amax().float().view(1)

    def encode(self, rows: Tensor) -> Tensor:
        """Return the bytes of each row: its codes, then the number of saturated elements."""
        elements = _infinite_as_nan(rows.float() * (self.mu / self.scale))
        saturated = torch.count_nonzero(elements.abs() > self.wire.format.max).int()
        options = _rounding(self.wire, rows.device, self.rank)
        codes = encode(elements, self.wire.format, **options).view(torch.uint8)
        count = saturated.view(1).view(torch.uint8).expand(len(rows), _COUNT)
        return torch.cat([codes, count], 1)

    def decode(self, rows: Tensor, length: int) -> Tensor:
        """Return the elements, mu g / s. `finish` multiplies the sum over ranks by s / mu once."""
        codes = rows[:, :length].contiguous().view(self.wire.format.storage_dtype)
        return decode(codes, self.wire.format)

    def finish(self, total: Tensor) -> Tensor:
        """Return the sum of gradients for a sum of elements, in place."""
        return total.mul_(self.scale).div_(self.mu)

    def decide(self, rows: Tensor, length: int) -> None:
        """Set mu for the next step, from the counts that all ranks sent."""
        if self.scales is not None:
            counts = rows[:, length:].contiguous().view(torch.int32)
            self.scales.decide(self.name, counts.sum(), len(rows) ** 2 * length)


def _infinite_as_nan(x: Tensor) -> Tensor:
    """Return `x` with NaN for each infinity. A difference takes a quarter of a selection's time."""
    return x + (x - x)


def _rounding(wire: Wire, device: torch.device, rank: int) -> dict[str, Any]:
    """Return the options of rounding for this rank.

    Ranks with the same seed draw the same key. Each adds its own number to it, because equal errors
    on all ranks would add up.
    """
    if wire.rounding == "nearest_even":
        return {}
    key = random_key(device=device)
    step = (rank * _GOLDEN + 2**31) % 2**32 - 2**31
    return {"rounding": "stochastic", "generator": key + torch.tensor([0, step]).to(key)}
