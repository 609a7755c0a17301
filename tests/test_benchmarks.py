"""The benchmarks run in their quick form, and the exhaustive one can fail; no time is judged."""

import json
from pathlib import Path

import pytest
import torch

from scaledtensor import formats


@pytest.fixture(autouse=True)
def _from_the_root(monkeypatch):
    monkeypatch.syspath_prepend(Path(__file__).parent.parent)


def exhaustive(*arguments):
    from benchmarks.exhaustive import main

    few = ["--slice", "4096", "--offset", "17", "--processes", "1", "--paths", "eager"]
    return main([*few, *arguments])


def test__exhaustive__finds_no_mismatch_in_a_thin_slice(capsys):
    # FP6 has no NaN, E8M0 no zero, FP32 no table, and the comparison has a branch for each.
    names = ["e5m2", "e4m3fnuz", "e8m0fnu", "e3m2fn", "fp32"]
    assert exhaustive("--formats", *names) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "--slice 4096 --offset 17" in lines[0]
    assert [line.split()[0] for line in lines[1:-1]] == names
    assert all("1048576 inputs x 6 casts" in line for line in lines[1:-1])
    assert all(line.endswith("mismatches: none") for line in lines[1:-1])
    assert lines[-1].startswith("5 formats, 0 mismatches")


@pytest.mark.parametrize("mode", ["saturate", "saturate_finite", "ieee"])
def test__exhaustive__shows_a_single_wrong_code(mode, capsys, monkeypatch):
    from benchmarks.exhaustive import blocks

    tiny = next(blocks(4096, 17))[1000]

    def wrong_at_one(x, fmt, overflow):
        codes = formats.encode(x, fmt, overflow=overflow)
        at = (x == tiny) & (overflow == mode)
        return torch.where(at, codes.view(torch.uint8) ^ 1, codes.view(torch.uint8)).view(
            codes.dtype
        )

    monkeypatch.setattr("benchmarks.exhaustive.encode", wrong_at_one)
    assert exhaustive("--formats", "e4m3fn") == 1
    _, summary, where, last = capsys.readouterr().out.splitlines()
    assert summary.endswith(f"mismatches: eager encode {mode} 1")
    assert "gives 0x1, ml_dtypes 0x0" in where
    assert last.startswith("1 formats, 1 mismatches")


def test__exhaustive__sees_a_nan_lost_and_a_zero_of_the_wrong_sign(capsys, monkeypatch):
    def careless(x, fmt, overflow):
        return formats.fake_quantize(x, fmt, overflow=overflow).nan_to_num(nan=1.0) + 0.0

    monkeypatch.setattr("benchmarks.exhaustive.fake_quantize", careless)
    assert exhaustive("--formats", "e2m1fn", "e4m3fn") == 1
    lines = capsys.readouterr().out.splitlines()
    for name, wrong in (("e2m1fn", "-0 for 0"), ("e4m3fn", "NaN")):
        (summary,) = (line for line in lines if line.startswith(name))
        assert "eager fake_quantize ieee" in summary, wrong
        assert "encode" not in summary


def test__the_offsets_of_a_slice__are_all_inputs_and_scatter():
    from benchmarks.exhaustive import blocks

    def members(offset):
        return torch.cat(list(blocks(4096, offset))).view(torch.int32).long() & 0xFFFFFFFF

    one, next_one = members(17), members(18)
    assert torch.equal(one // 4096, torch.arange(1 << 20))
    # 4096 offsets therefore reach every member.
    assert torch.equal((one + 1) % 4096, next_one % 4096)
    assert (one % 4096).unique().numel() > 4000
    # These are groups that start with many zero bits, as in short formats.
    ties = one[:: 1 << 8] % 4096
    assert ties.unique().numel() > 2000


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--slice", "3"], "a power of two up to 16384, got 3"),
        (["--slice", "64", "--offset", "64"], "--offset is 0 to 63, got 64"),
        (["--formats", "fp7"], "invalid choice: 'fp7'"),
    ],
)
def test__exhaustive__refuses_what_it_cannot_run(arguments, message, capsys):
    from benchmarks.exhaustive import main

    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 2
    assert message in capsys.readouterr().err


def test__casts__print_every_cast_and_bar_and_write_json(tmp_path, capsys):
    from benchmarks.casts import BARS, main

    figures = tmp_path / "casts.json"
    # Otherwise the C library keeps the pages for all later tests.
    main(["--quick", "--fresh-pages", "--paths", "eager", "--json", str(figures)])
    printed = capsys.readouterr().out
    report = json.loads(figures.read_text())
    ours = [f for f in report["figures"] if f["library"] == "scaledtensor"]
    assert {(f["cast"], f["dtype"]) for f in ours} == {
        (cast, dtype)
        for cast in ("encode", "decode", "fake_quantize")
        for dtype in ("float32", "bfloat16")
    }
    assert {f["cast"] for f in report["figures"] if f["library"] == "ml_dtypes"}
    assert all(f["ns"] > 0 and f["copies"] > 0 for f in report["figures"])
    for library in report["skipped"]:
        assert library in printed
    for bar in BARS:
        assert bar.words in printed
    assert f"vectors of the CPU: {report['cpu_capability']}" in printed
    assert f"{BARS[0].words:50} <= {BARS[0].limit_here()}: not measured" in printed


def test__casts__have_a_bar_for_each_kind_of_cpu(monkeypatch):
    from benchmarks.casts import Bar

    bar = Bar("words", 1.4, lambda figures: [], on_avx2=2.0)
    for capability, limit in (("AVX2", 2.0), ("AVX512", 1.4)):
        monkeypatch.setattr("torch.backends.cpu.get_cpu_capability", lambda c=capability: c)
        assert bar.limit_here() == limit
        assert Bar("words", 3.0, bar.ratios).limit_here() == 3.0


def test__casts_compiled__run(capsys):
    from benchmarks.casts import BARS, main

    main(["--quick", "--fresh-pages", "--paths", "compiled", "--casts", "encode"])
    printed = capsys.readouterr().out
    bar = f"{BARS[0].words:50} <= {BARS[0].limit_here()}: "
    assert bar in printed
    assert f"{bar}not measured" not in printed


def test__imports__print_every_figure_beside_its_bar_and_write_json(tmp_path, capsys):
    from benchmarks.imports import BARS, main

    figures = tmp_path / "imports.json"
    main(["--rounds", "1", "--steps", "3", "--json", str(figures)])
    printed = capsys.readouterr().out
    assert all(name in printed for name in BARS)
    assert list(json.loads(figures.read_text())["figures"]) == list(BARS)
