"""`scaledtensor formats`: tables and pictures of the formats, and the reference page
docs/formats.md.

The tables of the page are computed from the records of the formats and from their casts.
"""

from __future__ import annotations

import argparse
import textwrap
import typing
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path

import torch

from scaledtensor.errors import FormatError, UnsupportedError
from scaledtensor.formats import describe
from scaledtensor.formats.format import E4M3FN, FORMATS, Format, get
from scaledtensor.formats.rounding import Overflow, Rounding, encode

#: The direction in which each rounding takes a number between two values of the format.
ROUNDINGS: Mapping[str, str] = {
    "nearest_even": "to the nearer value; a tie goes to the value with the even code",
    "nearest_away": "to the nearer value; a tie goes away from zero",
    "toward_zero": "to the value nearer to zero",
    "to_odd": "an inexact number goes to the value with the odd code",
    "stochastic": "up with a probability that is the distance from the lower value, in steps: exact"
    " on average",
}


OVERFLOWS: Mapping[str, str] = {
    "saturate": "values beyond ±max, and infinities, become ±max (the default)",
    "saturate_finite": "values beyond ±max become ±max; infinities stay, or become NaN if the"
    " format has no infinity, ±max if it has neither; products cast their operands so",
    "ieee": "values beyond ±max, and infinities, become infinity, NaN if the format has no"
    " infinity, ±max if it has neither; same as `astype` of ml_dtypes",
}


EXAMPLES = (1.03125, 1.0625, 1.09375, 1.1875, -1.0625)


_DRAWS = 256  # of a random rounding: enough to find both values at odds of 1 : 3


PAGE = """\
# Number formats

<!-- Written by `python -m scaledtensor formats --markdown`; a test compares. Edit the records in
scaledtensor/formats/format.py, or the words in scaledtensor/apps/formats.py. -->

`scaledtensor.formats` encodes, decodes and rounds tensors in the formats below, exactly, for every
input.

```python
import torch
from scaledtensor import formats

x = torch.tensor([0.3, -3.1, 10.0])
codes = formats.encode(x, "e4m3fn")
print(codes.dtype)  # torch.float8_e4m3fn
print(formats.decode(codes, "e4m3fn"))  # tensor([ 0.3125, -3.0000, 10.0000])
print(formats.fake_quantize(x, "e2m1fn"))  # tensor([ 0.5000, -3.0000,  6.0000])

codes = formats.encode(x, "e2m1fn")  # 4 bits, each in the low bits of a byte
print(codes)  # tensor([ 1, 13,  7], dtype=torch.uint8)
packed = formats.pack(codes, "e2m1fn")  # two in a byte
print(packed)  # tensor([209,   7], dtype=torch.uint8)
print(formats.unpack(packed, "e2m1fn", x.shape))  # tensor([ 1, 13,  7], dtype=torch.uint8)
```

A format is a record, its name in any case, or the torch dtype of its codes: `formats.E4M3FN`,
`"e4m3fn"` and `torch.float8_e4m3fn` are one. That holds wherever this library takes a format. NumPy
arrays and lists have functions of the same names, whose codes are arrays of the `ml_dtypes` type:

```python
import numpy as np
from scaledtensor.formats import numpy as fnp

x = np.array([0.3, -3.1, 10.0])
codes = fnp.encode(x, "e4m3fn")
print(codes.dtype)  # float8_e4m3fn
print(fnp.decode(codes, "e4m3fn"))  # [ 0.3125 -3.     10.    ]

codes = fnp.encode(x, "e2m1fn")
print(codes)  # [0.5 -3 6]
packed = fnp.pack(codes, "e2m1fn")
print(packed)  # [209   7]
print(fnp.unpack(packed, "e2m1fn", x.shape))  # [0.5 -3 6]
```

`scaledtensor formats NAME` prints every value of a format; `--plot FILE.png` draws them.

{facts}

All numbers in tables are exact. torch has no dtype for a format whose codes are `uint8`: the code
is in the low bits of a byte.

## How a code is read

Sign, exponent field e, mantissa field m, most significant bit first. With M mantissa bits:

    (-1)^sign * 2^(e - bias) * (1 + m / 2^M)     for e > 0
    (-1)^sign * 2^(1 - bias) * (m / 2^M)         for e = 0 (subnormals and zero)

except for the codes that are not finite numbers:

{specials}

Every format has all its subnormals; no cast flushes them to zero. E8M0, the scale of block formats,
is a bare unsigned exponent, 2^(e - bias), with neither zero nor subnormals. An integer format is
two's complement that counts steps of its eps, from -max - eps to max.

`formats.custom` makes a custom format of up to 16 bits, for the same casts.

## Inputs without a nearest value

The results of `encode` for NaN, for values that are too large, for zeros, for a negative number,
and for a half and three quarters of the smallest positive value:

{policies}

Each result is one code, the same in eager and compiled code. ml_dtypes gives the same code, for
integers if it is given the number after rounding. For BF16, FP16 and FP32, torch's casts choose the
NaN. In words:

{words}

`overflow`:

{overflows}

A value that rounds to ±max is not beyond it. With "ieee", overflow begins where a next value after
max, if the format had one, would be nearer.

## Rounding

A number between two values of the format is rounded:

{roundings}

The examples are in E4M3FN, whose values next to 1 are 1, 1.125 and 1.25:

{examples}

Every input is rounded once, from its own dtype. torch and ml_dtypes round float64 twice, through
float32.
"""


def page() -> str:
    """The text of docs/formats.md."""
    formats = FORMATS.values()
    return PAGE.format(
        facts=describe.markdown([describe.facts(fmt) for fmt in formats]),
        specials=describe.markdown([describe.specials(fmt) for fmt in formats]),
        policies=describe.markdown([describe.policies(fmt) for fmt in formats]),
        words=_list({fmt.name: fmt.policy for fmt in formats}),
        overflows=_list({name: OVERFLOWS[name] for name in typing.get_args(Overflow)}),
        roundings=_list({name: ROUNDINGS[name] for name in typing.get_args(Rounding)}),
        examples=describe.markdown([_example(name) for name in typing.get_args(Rounding)]),
    )


def _list(meanings: Mapping[str, str]) -> str:
    return "\n".join(f"- `{name}`: {words}" for name, words in meanings.items())


def _example(rounding: Rounding) -> dict[str, str]:
    """The results of `rounding` for each of `EXAMPLES`. A random rounding may have several."""
    row: dict[str, str] = {"rounding": rounding}
    for x in EXAMPLES:
        codes = encode(torch.full((_DRAWS,), x, dtype=torch.float32), E4M3FN, rounding=rounding)
        found = {E4M3FN.value(code) for code in describe.unsigned(codes)}
        row[str(x)] = " or ".join(describe.number(v) for v in sorted(found, key=abs))
    return row


def run(args: argparse.Namespace) -> int:
    if args.markdown and (args.name or args.plot):
        raise FormatError("--markdown prints the page of all formats; it goes with nothing else")
    if args.markdown:
        print(page(), end="")
    elif args.name:
        fmt = get(args.name)
        if args.plot:
            draw(fmt, args.plot)  # first: it may raise, and then nothing is printed
        print(one(fmt))
        if args.plot:
            print(f"\npicture: {args.plot}")
    elif args.plot:
        raise FormatError(f"--plot draws one format; name one of {', '.join(FORMATS)}")
    else:
        print(describe.columns([describe.facts(fmt) for fmt in FORMATS.values()]))
    return 0


def one(fmt: Format) -> str:
    record, policy = describe.facts(fmt), describe.policies(fmt)
    lines = [f"{key:24}{fact}" for key, fact in record.items()]
    lines += ["", "encode, to nearest even, makes of"]
    lines += [f"  {key:30}{made}" for key, made in policy.items() if key != "name"]
    lines += ["", *textwrap.wrap(fmt.policy, 96), "", "codes and values"]
    lines += [f"  {line}" for line in describe.values(fmt)]
    return "\n".join(lines)


def draw(fmt: Format, path: Path) -> None:
    if find_spec("matplotlib") is None:
        raise UnsupportedError("--plot needs matplotlib: pip install scaledtensor[plot]")
    from scaledtensor.apps import formats_figure  # matplotlib is an extra

    if path.suffix not in formats_figure.SUFFIXES:
        raise FormatError(f"--plot writes {', '.join(formats_figure.SUFFIXES)}; got {str(path)!r}")
    formats_figure.draw(fmt, path)
