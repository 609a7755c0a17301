"""The C++ that Inductor writes for AVX2 loads bytes and int32 in one go, and computes the same."""

import pytest
import torch
from formats_oracle import all_codes, same

from scaledtensor import _torch
from scaledtensor.formats import E2M1FN, E4M3FN, E5M2, E8M0FNU, decode, encode

on_avx2 = pytest.mark.skipif(
    torch.backends.cpu.get_cpu_capability() != "AVX2", reason="Inductor is left as it is"
)


@pytest.fixture(autouse=True)
def _fresh():
    torch._dynamo.reset()


def _written(run, *inputs):
    """The result of compiled `run`, and the C++ of its kernels."""
    from torch._inductor.utils import run_and_get_code

    got, code = run_and_get_code(torch.compile(run, fullgraph=True, dynamic=False), *inputs)
    return got, "\n".join(code)


@on_avx2
@pytest.mark.parametrize("fmt", [E4M3FN, E5M2, E2M1FN, E8M0FNU], ids=repr)
def test__compiled_casts__have_no_lane_by_lane_buffer(fmt):
    codes = all_codes(fmt).repeat(8)
    values, code = _written(lambda c: decode(c, fmt), codes)
    assert same(values, decode(codes, fmt)).all()
    assert "loadl_epi64" in code
    assert "tmpbuf" not in code
    again, code = _written(lambda x: encode(x, fmt), values)
    assert torch.equal(again.view(torch.uint8), encode(values, fmt).view(torch.uint8))
    assert "tmpbuf" not in code


@pytest.mark.parametrize("count", [1, 7, 8, 9, 15, 16, 17, 24, 31, 33, 40])
def test__loads__stay_within_the_tensor_and_in_order(count):
    """Whole vectors and tails of every kind, of each dtype that has bytes or int32."""
    assert _torch._write_whole_loads()
    raw = torch.arange(count, dtype=torch.int32) * 37 % 251

    def run(a, b, c, d, h):
        mixed = a.int() + b.int() + c
        return mixed, decode(d, E4M3FN), (mixed + h.int()).to(torch.bfloat16), a // (b.abs() + 1)

    eight = raw.to(torch.uint8)
    inputs = eight, (raw - 100).to(torch.int8), raw, eight.view(torch.float8_e4m3fn), raw.bfloat16()
    for got, want in zip(torch.compile(run, dynamic=False)(*inputs), run(*inputs), strict=True):
        assert torch.equal(got.nan_to_num(), want.nan_to_num())


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8])
def test__division_of_bytes__meets_no_zero_beyond_the_loaded_lanes(dtype):
    assert _torch._write_whole_loads()
    a, b = torch.arange(1, 65).to(dtype), torch.full((64,), 3, dtype=dtype)
    run = torch.compile(lambda a, b: torch.div(a, b, rounding_mode="trunc"), dynamic=False)
    assert torch.equal(run(a, b), a // b)


def test__a_torch_without_the_names__is_left_alone(monkeypatch):
    monkeypatch.setattr("torch.backends.cpu.get_cpu_capability", lambda: "AVX2")
    from torch._inductor.codegen import cpp

    monkeypatch.delattr(cpp.CppVecKernel, "_get_vec_load_line")
    assert not _torch._write_whole_loads()


@pytest.mark.parametrize("capability", ["AVX512", "DEFAULT", "NO AVX"])
def test__other_cpus__are_left_alone(monkeypatch, capability):
    from torch._inductor.codegen import cpp

    monkeypatch.setattr("torch.backends.cpu.get_cpu_capability", lambda: capability)
    before = vars(cpp.CppVecKernel)["_get_vec_load_line"]
    assert _torch._write_whole_loads()
    assert vars(cpp.CppVecKernel)["_get_vec_load_line"] is before
