"""Master formats: where a step reads the value of a parameter, and where it writes the new value.

A parameter in a narrow format loses small updates when the step rounds it. A master keeps more
digits of the value than the parameter has. Each class here is one master format. `read` and `write`
use float32 rows of 128 elements, in units of the parameter's scale, and trace under
`torch.compile`. The master itself is in units of 1, because the scale of a parameter may change.

To add a master format, add a class and its entry in `MASTERS`.
"""

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from scaledtensor.errors import FormatError
from scaledtensor.formats import FP16, Expanded, Format, decode, encode
from scaledtensor.formats.bits import Mode, encode_bits
from scaledtensor.formats.expansion import narrow_rows, widen_rows
from scaledtensor.optim.states import GROUP, STATES, Kept, Key, unit_of, values_of

__all__ = ["MASTERS", "MASTER_STATES", "Draw", "Master", "check_master"]

_NARROW = ("bf16", "fp16", "e4m3fn", "e5m2")

#: Names of masters in `optimizer.state`.
MASTER_STATES = ("master", "remainder")


class Draw(NamedTuple):
    """The random numbers of stochastic rounding, for elements counted from `start`."""

    key: Key
    start: int


class Master:
    """No master: the parameter alone keeps its value."""

    #: Name of the master in `optimizer.state`; None if nothing is kept beside the parameter.
    state: str | None = None
    #: Formats of parameters that can have this master.
    of: tuple[str, ...] = ("fp32", *_NARROW)
    #: Why the other formats cannot, for the error message.
    why = "no format of elements that a step knows"
    #: Whether `write` rounds stochastically.
    draws = False

    def empty(self, groups: int, device: torch.device) -> Kept:
        """Return zeros for the part beside the parameter."""
        return ()

    def read(self, elements: Tensor, fmt: Format, kept: Kept, unit: Tensor) -> Tensor:
        """Return the value of a parameter whose elements are in format `fmt`."""
        return decode(elements, fmt, torch.float32)

    def write(
        self, elements: Tensor, fmt: Format, kept: Kept, unit: Tensor, value: Tensor, draw: Draw
    ) -> None:
        """Store `value` in the parameter and in the master, in place."""
        elements.copy_(_rounded(value, fmt))

    def shown(self, kept: Kept, p: Tensor) -> Tensor:
        """Return the tensor in `optimizer.state` for parameter `p`: a view of `kept`."""
        return kept[0].view(-1)[: p.numel()].view(p.shape)

    def converted(self, x: Tensor, p: Tensor) -> Tensor:
        """Return a copy of a master that was saved in any format, in this format."""
        return values_of(x).to(p.device, torch.float32, copy=True)


class Float32Master(Master):
    """A float32 number beside each element."""

    state = "master"
    of = _NARROW
    why = "a float32 parameter is its own master"

    def empty(self, groups: int, device: torch.device) -> Kept:
        return (torch.zeros(groups, GROUP, device=device, dtype=torch.float32),)

    def read(self, elements: Tensor, fmt: Format, kept: Kept, unit: Tensor) -> Tensor:
        return _unless_written(elements, fmt, kept[0] / unit)

    def write(
        self, elements: Tensor, fmt: Format, kept: Kept, unit: Tensor, value: Tensor, draw: Draw
    ) -> None:
        elements.copy_(_rounded(value, fmt))
        kept[0].copy_(value * unit)


class Float16Master(Master):
    """A float16 number beside each element, rounded stochastically, in groups of 128 with a power
    of two as their scale (FP8-LM, arXiv 2310.18313, has one scale for a tensor)."""

    state = "master"
    of = ("bf16", "e4m3fn", "e5m2")
    why = "a master has more digits than its parameter"
    draws = True

    def empty(self, groups: int, device: torch.device) -> Kept:
        return STATES["fp16"].empty(groups, device)

    def read(self, elements: Tensor, fmt: Format, kept: Kept, unit: Tensor) -> Tensor:
        return _unless_written(elements, fmt, narrow_rows(Expanded(*kept), FP16) / unit)

    def write(
        self, elements: Tensor, fmt: Format, kept: Kept, unit: Tensor, value: Tensor, draw: Draw
    ) -> None:
        made = widen_rows(value * unit, FP16, draw.key, draw.start, spikes=False)
        # The parameter is the rounded master, not the rounded value: `_unless_written` compares
        # the parameter with the master.
        elements.copy_(_rounded(narrow_rows(made, FP16) / unit, fmt))
        for held, new in zip(kept, made, strict=True):
            held.copy_(new)

    def shown(self, kept: Kept, p: Tensor) -> Tensor:
        return STATES["fp16"].shown(kept, p, 1.0)

    def converted(self, x: Tensor, p: Tensor) -> Tensor:
        return STATES["fp16"].converted(x, p, unit_of(x))


class DrawnMaster(Master):
    """The bfloat16 parameter alone, rounded stochastically."""

    of = ("bf16",)
    why = "it is the parameter itself, in bfloat16, rounded stochastically"
    draws = True

    def write(
        self, elements: Tensor, fmt: Format, kept: Kept, unit: Tensor, value: Tensor, draw: Draw
    ) -> None:
        mode = Mode("stochastic", "ieee", draw.key)
        elements.copy_(encode_bits(value, fmt, mode, draw.start))


class SplitMaster(Master):
    """A float32 number in two halves: the bfloat16 parameter, and the missing 16 bits."""

    state = "remainder"
    of = ("bf16",)
    why = "its upper half is the parameter itself, in bfloat16"

    def empty(self, groups: int, device: torch.device) -> Kept:
        return (torch.zeros(groups, GROUP, dtype=torch.int16, device=device),)

    def read(self, elements: Tensor, fmt: Format, kept: Kept, unit: Tensor) -> Tensor:
        high = elements.view(torch.int16).int() << 16
        return (high + kept[0].int()).view(torch.float32)

    def write(
        self, elements: Tensor, fmt: Format, kept: Kept, unit: Tensor, value: Tensor, draw: Draw
    ) -> None:
        """The upper half is the nearest BF16 number, ties away from zero. The lower half is the
        difference of the bits, from -2^15 to 2^15 - 1."""
        bits = torch.where(value == value, value, torch.nan).view(torch.int32)  # one NaN, no carry
        high = (bits + (1 << 15)) >> 16
        elements.copy_(high.to(torch.int16).view(torch.bfloat16))
        kept[0].copy_((bits - (high << 16)).to(torch.int16))

    def converted(self, x: Tensor, p: Tensor) -> Tensor:
        if x.dtype != torch.int16:
            raise FormatError(f"a remainder is int16; got {x.dtype}")
        return x.detach().to(p.device, copy=True)


def _rounded(value: Tensor, fmt: Format) -> Tensor:
    return encode(value, fmt, overflow="saturate" if fmt.bits <= 8 else "ieee")


def _unless_written(elements: Tensor, fmt: Format, master: Tensor) -> Tensor:
    """Return the master, except where the parameter was written since the last step: there, return
    the value that was written."""
    here = decode(elements, fmt, torch.float32)
    return torch.where(decode(_rounded(master, fmt), fmt, torch.float32) == here, master, here)


#: The formats that `master_format` names.
MASTERS: Mapping[str | None, Master] = {
    None: Master(),
    "fp32": Float32Master(),
    "fp16": Float16Master(),
    "bf16": DrawnMaster(),
    "bf16+16": SplitMaster(),
}


def check_master(name: str | None, fmt: Format, shape: tuple[int, ...]) -> None:
    """Raise FormatError if a parameter in `fmt` cannot have the master format `name`."""
    if fmt.name not in MASTERS[name].of:
        fits = [repr(n) for n, master in MASTERS.items() if fmt.name in master.of]
        known = f"for it there is {', '.join(fits)}" if fits else "steps in low precision have none"
        raise FormatError(
            f"master_format={name!r} is for parameters in {', '.join(MASTERS[name].of)}: "
            f"{MASTERS[name].why}; got one of shape {shape} in {fmt.name}; {known}"
        )
