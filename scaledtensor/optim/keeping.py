"""How a step reads and writes what is kept between steps: states and master weights, in groups.

All of it is a function of float32 matrices whose rows are groups of 128 elements, the same eager
and compiled: `read` makes such rows of what is kept, `write` puts rows back in place. States are
kept as `formats.expansion` says, or as float32 numbers; masters are what a parameter narrower than
float32 is rounded from.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from scaledtensor.errors import FormatError
from scaledtensor.formats import FP16, Expanded, Format, decode, encode
from scaledtensor.formats import get as get_format
from scaledtensor.formats.bits import Mode, encode_bits
from scaledtensor.formats.expansion import (
    can_hold_apart,
    holds_any,
    narrow_rows,
    value_table,
    watched_from,
    widen_rows,
)

__all__ = [
    "GROUP",
    "MASTERS",
    "STATE_FORMATS",
    "STATE_ROUNDINGS",
    "Kept",
    "Master",
    "Watch",
    "check_master",
    "empty_state",
    "hold_apart",
    "read_state",
    "table_of",
    "watch_over",
    "write_state",
]

GROUP = 128

STATE_FORMATS = ("fp32", "bf16", "fp16", "e4m3fn", "e5m2", "int8")
STATE_ROUNDINGS = ("nearest_even", "stochastic")

Kept = tuple[Tensor, ...]
"""What is kept of some groups: codes of shape (groups, 128), then what each group has one of."""

Key = Tensor | None
"""Of stochastic rounding; None rounds to nearest."""


# --- states ----------------------------------------------------------------------------------


def empty_state(name: str, groups: int, device: torch.device) -> Kept:
    """Zeros, in the state format `name`."""
    if name == "fp32":
        return (torch.zeros(groups, GROUP, device=device),)
    codes = torch.zeros(groups, GROUP, dtype=get_format(name).storage_dtype, device=device)
    power = torch.full((groups,), 16, dtype=torch.uint8, device=device)
    return codes, torch.ones(groups, device=device), power


def read_state(name: str, kept: Kept, table: Tensor | None, spikes: bool) -> Tensor:
    """`table`: see `table_of`; `spikes`: see `Watch.reads`."""
    if name == "fp32":
        return kept[0]
    return narrow_rows(Expanded(*kept), get_format(name), table, spikes)


def table_of(name: str, device: torch.device) -> Tensor | None:
    """What a step looks the values of 8-bit states up in."""
    fmt = get_format(name)
    return value_table(fmt, device) if fmt.bits == 8 else None


def write_state(
    name: str, kept: Kept, rows: Tensor, key: Key, start: int, watched: Tensor | None
) -> Tensor | None:
    """Says which groups go to `hold_apart`, if `watched` says from which M on they would."""
    if name == "fp32":
        kept[0].copy_(rows)
        return None
    made = widen_rows(rows, get_format(name), key, start, spikes=watched is None)
    for held, new in zip(kept, made, strict=True):
        held.copy_(new)
    return None if watched is None else made.amax > watched


# --- spikes ----------------------------------------------------------------------------------
#
# To look whether a magnitude stands out takes a CPU half as long as the whole step, and next to no
# group has one. There, a step writes states without a look, and the groups of which M says that
# there may be one are written again.


class Watch(NamedTuple):
    """Of the states before a step."""

    above: tuple[Tensor | None, ...]
    """The M of each group above which it is written again; None where the step looks itself."""
    reads: bool
    """Whether a group may hold a magnitude apart. A compiled step has code of its own for that."""


def watch_over(name: str, states: Sequence[Kept]) -> Watch:
    if name == "fp32" or not can_hold_apart(get_format(name)):
        return Watch((None,) * len(states), False)
    above = tuple(watched_from(kept[1]) if kept[1].is_cpu else None for kept in states)
    return Watch(above, any(holds_any(kept[1]) for kept in states))


def hold_apart(name: str, kept: Kept, rows: Tensor, found: Tensor, key: Key, start: int) -> None:
    """Write the groups that `found` says again, with a look at each."""
    if not found.any():
        return
    (places,) = (found & (kept[1] != 1.0)).nonzero(as_tuple=True)  # 1 is of zeros
    made = widen_rows(rows[places], get_format(name), key, start)
    for held, new in zip(kept, made, strict=True):
        held[places] = new


# --- masters ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Master:
    """What the value of a parameter is kept in."""

    state: str | None
    """What the part beside the parameter is called in the optimizer's state; None: no such part."""
    of: tuple[str, ...]
    """Formats of parameters that it makes sense for."""
    why: str
    """What is wrong with the others."""
    empty: Callable[[int, torch.device], Kept]
    read: Callable[[Tensor, Format, Kept, Tensor], Tensor]
    """(elements, their format, kept, unit): the value in units of the parameter's scale. A master
    is kept in units of 1, since that scale may be moved."""
    write: Callable[[Tensor, Format, Kept, Tensor, Tensor, Key, int], None]
    """(elements, their format, kept, value, unit, key, start)."""


def _nothing(groups: int, device: torch.device) -> Kept:
    return ()


def _rounded(value: Tensor, fmt: Format) -> Tensor:
    return encode(value, fmt, overflow="saturate" if fmt.bits <= 8 else "ieee")


def _read_itself(elements: Tensor, fmt: Format, kept: Kept, unit: Tensor) -> Tensor:
    return decode(elements, fmt, torch.float32)


def _write_itself(
    elements: Tensor,
    fmt: Format,
    kept: Kept,
    value: Tensor,
    unit: Tensor,
    key: Key,
    start: int,
) -> None:
    elements.copy_(_rounded(value, fmt))


def _write_drawn(
    elements: Tensor,
    fmt: Format,
    kept: Kept,
    value: Tensor,
    unit: Tensor,
    key: Key,
    start: int,
) -> None:
    elements.copy_(encode_bits(value, fmt, Mode("stochastic", "ieee", key), start))


def _zeros(groups: int, device: torch.device) -> Kept:
    return (torch.zeros(groups, GROUP, device=device),)


def _still(elements: Tensor, fmt: Format, master: Tensor) -> Tensor:
    """The master, but where someone wrote into the parameter since: there, what was written."""
    here = decode(elements, fmt, torch.float32)
    return torch.where(decode(_rounded(master, fmt), fmt, torch.float32) == here, master, here)


def _read_single(elements: Tensor, fmt: Format, kept: Kept, unit: Tensor) -> Tensor:
    return _still(elements, fmt, kept[0] / unit)


def _write_single(
    elements: Tensor,
    fmt: Format,
    kept: Kept,
    value: Tensor,
    unit: Tensor,
    key: Key,
    start: int,
) -> None:
    elements.copy_(_rounded(value, fmt))
    kept[0].copy_(value * unit)


def _halves(groups: int, device: torch.device) -> Kept:
    return empty_state("fp16", groups, device)


def _read_half(elements: Tensor, fmt: Format, kept: Kept, unit: Tensor) -> Tensor:
    return _still(elements, fmt, narrow_rows(Expanded(*kept), FP16) / unit)


def _write_half(
    elements: Tensor,
    fmt: Format,
    kept: Kept,
    value: Tensor,
    unit: Tensor,
    key: Key,
    start: int,
) -> None:
    made = widen_rows(value * unit, FP16, key, start, spikes=False)
    # The parameter is what the master rounds to, not what the value does: `_still` compares them.
    elements.copy_(_rounded(narrow_rows(made, FP16) / unit, fmt))
    for held, new in zip(kept, made, strict=True):
        held.copy_(new)


def _remainders(groups: int, device: torch.device) -> Kept:
    return (torch.zeros(groups, GROUP, dtype=torch.int16, device=device),)


def _read_split(elements: Tensor, fmt: Format, kept: Kept, unit: Tensor) -> Tensor:
    high = elements.view(torch.int16).int() << 16
    return (high + kept[0].int()).view(torch.float32)


def _write_split(
    elements: Tensor,
    fmt: Format,
    kept: Kept,
    value: Tensor,
    unit: Tensor,
    key: Key,
    start: int,
) -> None:
    """The upper half is the nearest BF16, ties away from zero; the lower half is from -2^15 to
    2^15 - 1 and what is missing to the float32."""
    bits = torch.where(value == value, value, torch.nan).view(torch.int32)  # one NaN, no carry
    high = (bits + (1 << 15)) >> 16
    elements.copy_(high.to(torch.int16).view(torch.bfloat16))
    kept[0].copy_((bits - (high << 16)).to(torch.int16))


_NARROW = ("bf16", "fp16", "e4m3fn", "e5m2")

MASTERS: Mapping[str | None, Master] = {
    None: Master(
        None,
        ("fp32", *_NARROW),
        "no format of elements that a step knows",
        _nothing,
        _read_itself,
        _write_itself,
    ),
    "fp32": Master(
        "master",
        _NARROW,
        "a float32 parameter is its own master",
        _zeros,
        _read_single,
        _write_single,
    ),
    "fp16": Master(
        "master",
        ("bf16", "e4m3fn", "e5m2"),
        "a master has more digits than its parameter",
        _halves,
        _read_half,
        _write_half,
    ),
    "bf16": Master(
        None,
        ("bf16",),
        "it is the parameter itself, in bfloat16, rounded stochastically",
        _nothing,
        _read_itself,
        _write_drawn,
    ),
    "bf16+16": Master(
        "remainder",
        ("bf16",),
        "its upper half is the parameter itself, in bfloat16",
        _remainders,
        _read_split,
        _write_split,
    ),
}


def check_master(name: str | None, fmt: Format, shape: tuple[int, ...]) -> None:
    """Raises FormatError where a parameter in `fmt` cannot have the master format `name`."""
    if fmt.name not in MASTERS[name].of:
        fits = [repr(n) for n, master in MASTERS.items() if fmt.name in master.of]
        known = f"for it there is {', '.join(fits)}" if fits else "steps in low precision have none"
        raise FormatError(
            f"master_format={name!r} is for parameters in {', '.join(MASTERS[name].of)}: "
            f"{MASTERS[name].why}; got one of shape {shape} in {fmt.name}; {known}"
        )
