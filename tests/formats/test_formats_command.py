"""`scaledtensor formats` prints exact and complete tables, and reports its limits."""

import itertools
import math
import re
from fractions import Fraction

import pytest
from formats_oracle import ALL, SHORT, all_codes, ml_decode

from scaledtensor.__main__ import main
from scaledtensor.apps import formats
from scaledtensor.formats import FORMATS, Format, describe, get

PNG = b"\x89PNG\r\n\x1a\n"
BYTES = [fmt for fmt in ALL if fmt.bits <= 8]


def read(text: str) -> float:
    """Return a printed number. This reader shares no code with the writer."""
    if text in ("NaN", "inf", "-inf"):
        return float(text)
    sign = -1.0 if text.startswith("-") else 1.0
    factor, _, power = text.lstrip("-").rpartition("2^")
    if "^" not in text:
        return sign * float(Fraction(text.lstrip("-")))
    odd = int(factor.removesuffix(" x ") or 1)
    return sign * float(odd * Fraction(2) ** int(power))


def reference(fmt: Format) -> list[float]:
    """Return the value of every code by ml_dtypes. MXINT8 is int8 in steps of 2^-6."""
    if fmt.name == "mxint8":
        return [value / 64 for value in reference(get("int8"))]
    return ml_decode(all_codes(fmt), fmt).tolist()


def same(a: float, b: float) -> bool:
    return (math.isnan(a) and math.isnan(b)) or (
        a == b and math.copysign(1, a) == math.copysign(1, b)
    )


def shown(capsys, *arguments):
    assert main(["formats", *arguments]) == 0
    return capsys.readouterr().out.splitlines()


@pytest.mark.parametrize("fmt", SHORT, ids=repr)
def test__numbers__are_exact_and_short(fmt: Format) -> None:
    for value in reference(fmt)[:: max(1, fmt.num_codes // 4096)]:
        text = describe.number(value)
        assert same(read(text), value)
        assert len(text) <= 12


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (448.0, "448"),
        (0.0625, "0.0625"),
        (2.0**-6, "2^-6"),
        (-(2.0**-149), "-2^-149"),
        (2.0**127, "2^127"),
        (3 * 2.0**-9, "3 x 2^-9"),
        (-0.0, "-0"),
        (1000000.0, "15625 x 2^6"),
    ],
)
def test__number__reads_as_a_person_would_write_it(value: float, text: str) -> None:
    assert describe.number(value) == text


def test__the_table__has_one_line_a_format_and_its_numbers(capsys):
    head, *lines = shown(capsys)
    assert [line.split()[0] for line in lines] == list(FORMATS)
    for line in lines:
        cells = dict(
            zip(re.split(r"  +", head.strip()), re.split(r"  +", line.strip()), strict=True)
        )
        fmt = get(cells["name"])
        assert int(cells["bits"]) == fmt.bits
        assert read(cells["max"]) == fmt.max
        if fmt.exponent_bits:
            assert read(cells["min normal"]) == fmt.min_normal
        assert read(cells["eps"]) == fmt.eps
        assert [cells[key] for key in ("inf", "NaN", "-0")] == [
            "yes" if has else "no" for has in (fmt.has_inf, fmt.has_nan, fmt.has_signed_zero)
        ]


@pytest.mark.parametrize("fmt", BYTES, ids=repr)
def test__one_format__shows_every_value(fmt, capsys):
    lines = shown(capsys, fmt.name.upper())
    lines = lines[lines.index("codes and values") + 1 :]
    found = {}
    for line in lines:
        if " to 0x" not in line:
            code, *cells = re.split(r"  +", line.strip())
            found |= {int(code, 16) + i: read(cell) for i, cell in enumerate(cells)}
    mirrored = re.fullmatch(
        r" +0x(\w+) to 0x(\w+)  the same in this order, negative(?:; but 0x(\w+) is (\S+))?",
        lines[-1],
    )
    if mirrored:
        half = int(mirrored[1], 16)
        assert sorted(found) == list(range(half))
        found |= {code + half: -value for code, value in found.items()}
        if mirrored[3]:
            found[int(mirrored[3], 16)] = read(mirrored[4])
    values = reference(fmt)
    assert sorted(found) == list(range(fmt.num_codes))
    assert all(same(found[code], value) for code, value in enumerate(values))


def test__a_wide_format__shows_ranges_that_cover_all_codes(capsys):
    lines = [line.strip() for line in shown(capsys, "fp16")]
    assert "0x0001 to 0x03ff  subnormals, 2^-24 to 1023 x 2^-24 in steps of 2^-24" in lines
    assert "0x0400 to 0x7bff  normals, 2^-14 to 65504, 1024 to an octave" in lines
    for name in ("bf16", "fp16", "fp32"):
        lines = shown(capsys, name)
        spans = [re.findall(r"0x(\w+)", line) for line in lines if line.startswith("  0x")]
        spans = [(int(span[0], 16), int(span[-1], 16)) for span in spans]
        assert spans[0][0] == 0
        assert spans[-1][1] == get(name).num_codes - 1
        assert all(a[1] + 1 == b[0] for a, b in itertools.pairwise(spans))


@pytest.mark.parametrize(
    ("name", "policy", "made"),
    [
        ("e4m3fn", "beyond max, inf: ieee", "NaN"),
        ("e5m2", "beyond max, inf: ieee", "inf"),
        ("e2m1fn", "beyond max, inf: ieee", "6"),
        ("e4m3fnuz", "-0", "0"),
        ("e8m0fnu", "0", "NaN"),
        ("int4", "NaN", "0"),
        ("fp32", "beyond max, inf: saturate", "16777215 x 2^104"),
    ],
)
def test__policies__are_shown(name, policy, made, capsys):
    assert any(
        re.fullmatch(rf"  {policy} +{re.escape(made)}", line) for line in shown(capsys, name)
    )


@pytest.mark.parametrize("name", ["e2m1fn", "e8m0fnu", "int8", "fp32"])
def test__plot__writes_a_picture(name, tmp_path, capsys):
    path = tmp_path / "picture.png"
    assert shown(capsys, name, "--plot", str(path))[-1] == f"picture: {path}"
    assert path.read_bytes().startswith(PNG)
    assert path.stat().st_size > 20_000  # The command draws something.


@pytest.mark.parametrize("suffix", [".svg", ".pdf"])
def test__plot__writes_vectors(suffix, tmp_path, capsys):
    path = tmp_path / f"picture{suffix}"
    shown(capsys, "e2m1fn", "--plot", str(path))
    assert path.stat().st_size > 5_000


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["fp7"], "unknown format 'fp7'; known are e4m3fn, e5m2"),
        (["e5m2", "--plot", "{tmp}/no/where.png"], "No such file or directory"),
        (["e5m2", "--plot", "{tmp}/picture.bmp"], "--plot writes .png, .svg, .pdf; got"),
        (["--plot", "{tmp}/picture.png"], "--plot draws one format; name one of e4m3fn"),
        (["e5m2", "--markdown"], "--markdown prints the page of all formats"),
    ],
)
def test__bad_input__is_one_line_and_exit_code_two(arguments, message, tmp_path, capsys):
    assert main(["formats", *(a.format(tmp=tmp_path) for a in arguments)]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    (line,) = err.splitlines()
    assert line.startswith("scaledtensor: ")
    assert message in line


def test__plot_without_matplotlib__says_what_to_install(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(formats, "find_spec", lambda name: None)
    assert main(["formats", "e5m2", "--plot", str(tmp_path / "picture.png")]) == 2
    assert "pip install scaledtensor[plot]" in capsys.readouterr().err
    assert main(["formats", "e5m2"]) == 0
