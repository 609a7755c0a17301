"""Custom formats, described by the special values that they have."""

import torch

from scaledtensor.errors import FormatError, UnsupportedError
from scaledtensor.formats.format import FORMATS, Format, Specials

__all__ = ["SPECIALS", "custom"]

#: (infinity has a code, NaN has one, -0 has one) -> the encoding.
SPECIALS = {
    (True, True, True): Specials.IEEE,
    (False, True, True): Specials.NAN_ONLY,
    (False, True, False): Specials.FNUZ,
    (True, True, False): Specials.P3109,
    (False, False, True): Specials.NONE,
}
_SUFFIX = {
    Specials.IEEE: "",
    Specials.NAN_ONLY: "fn",
    Specials.FNUZ: "fnuz",
    Specials.P3109: "p3109",
    Specials.NONE: "finite",
}


def custom(
    exponent_bits: int,
    mantissa_bits: int,
    bias: int | None = None,
    *,
    has_inf: bool = True,
    has_nan: bool = True,
    signed_zero: bool = True,
    name: str | None = None,
) -> Format:
    """A signed floating-point format of 2 to 16 bits, for every cast of `scaledtensor.formats`.

    By default the codes are laid out as in IEEE 754. A format without infinity follows the "fn"
    conventions (NaN is all ones). A format without -0 follows "fnuz" (NaN is the code of -0), or
    IEEE P3109 if it has infinity. With neither infinity nor NaN, every code is a finite number.

    Args:
        exponent_bits: 1 to 8.
        mantissa_bits: 0 to 14; at least 1 with infinity and -0, since NaN needs a mantissa bit.
        bias: by default 2^(exponent_bits - 1) - 1, and one more without -0. Every value must be
            a float32.
        has_inf: whether infinity has a code.
        has_nan: whether NaN has a code.
        signed_zero: whether -0 has a code.
        name: lower case, and not the name of a built-in format. By default the name lists the
            facts, as "e5m1" does; if a built-in format has that name and the same facts, it is
            returned.

    Codes are uint8 up to 8 bits, else int16, in the low bits. Raises FormatError for an impossible
    format, UnsupportedError for more than 16 bits.
    """
    counts = {"exponent_bits": exponent_bits, "mantissa_bits": mantissa_bits}
    counts |= {} if bias is None else {"bias": bias}
    for fact, number in counts.items():
        if isinstance(number, bool) or not isinstance(number, int):
            raise FormatError(f"{fact} is a whole number, got {number!r}")
    specials = SPECIALS.get((bool(has_inf), bool(has_nan), bool(signed_zero)))
    if specials is None:
        allowed = "; ".join(_describe(*facts) for facts in SPECIALS)
        raise FormatError(
            f"no encoding has {_describe(has_inf, has_nan, signed_zero)}; allowed are: {allowed}"
        )
    bits = 1 + exponent_bits + mantissa_bits
    if exponent_bits > 0 and mantissa_bits >= 0 and bits > 16:
        raise UnsupportedError(
            f"a custom format of {bits} bits: codes are stored in 8 or 16 bits, so take at most"
            " 15 exponent and mantissa bits together"
        )
    if bias is None:
        bias = (1 << max(exponent_bits, 1) - 1) - int(signed_zero)
    if name is not None and name in FORMATS:
        raise FormatError(f"{name!r} is a built-in format; formats.get({name!r}) returns it")
    text = _default_name(exponent_bits, mantissa_bits, bias, specials) if name is None else name
    known = FORMATS.get(text)
    if known is not None:
        facts = (known.exponent_bits, known.mantissa_bits, known.bias, known.specials)
        if facts == (exponent_bits, mantissa_bits, bias, specials):
            return known
        text += "_custom"
    storage = torch.uint8 if bits <= 8 else torch.int16
    return Format(text, exponent_bits, mantissa_bits, bias, specials, storage)


def _default_name(exponent_bits: int, mantissa_bits: int, bias: int, specials: Specials) -> str:
    usual = (1 << max(exponent_bits, 1) - 1) - (specials not in (Specials.FNUZ, Specials.P3109))
    shift = "" if bias == usual else f"b{bias}".replace("-", "minus")
    return f"e{exponent_bits}m{mantissa_bits}{shift}{_SUFFIX[specials]}"


def _describe(has_inf: bool, has_nan: bool, signed_zero: bool) -> str:
    return f"has_inf={has_inf}, has_nan={has_nan}, signed_zero={signed_zero}"
