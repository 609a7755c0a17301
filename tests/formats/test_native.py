"""The C++ source of eager casts gives the bits of the Python that it repeats."""

import functools
import os
import subprocess
import sys

import pytest
import torch
from tensors import gaussian
from torch._subclasses import FakeTensorMode

from scaledtensor import native as loops
from scaledtensor.formats import (
    FORMATS,
    bits,
    custom,
    decode,
    encode,
    fake_quantize,
    native,
    random_key,
)
from scaledtensor.formats.bits import Mode, decode_bits, encode_bits, has_normals

pytestmark = pytest.mark.skipif(
    not loops.status().startswith("casts are C++"), reason=loops.status()
)

NARROW = {name: fmt for name, fmt in FORMATS.items() if fmt.storage_dtype.itemsize == 1} | {
    f.name: f
    for f in (
        custom(exponent_bits=5, mantissa_bits=1),
        custom(exponent_bits=1, mantissa_bits=3),
        custom(4, 3, has_nan=True, signed_zero=False),
    )
}


def numbers(dtype: torch.dtype) -> torch.Tensor:
    """Return every 16-bit pattern as the upper half of a float32, with lower halves of every kind.
    All bfloat16 numbers are among them."""
    upper = torch.arange(1 << 16, dtype=torch.int32) << 16
    if dtype is torch.bfloat16:
        return upper.view(torch.float32).bfloat16()
    lower = torch.tensor([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF], dtype=torch.int32)
    return (upper[:, None] | lower).view(torch.float32).flatten()


def modes(fmt):
    for overflow in ("saturate", "saturate_finite", "ieee"):
        yield Mode("nearest_even", overflow)
        for kept in (32, 3):
            yield Mode("stochastic", overflow, random_key(torch.Generator().manual_seed(1)), kept)


def raw(x: torch.Tensor) -> torch.Tensor:
    return x.view({1: torch.uint8, 2: torch.int16, 4: torch.int32}[x.dtype.itemsize])


def same_values(got: torch.Tensor, want: torch.Tensor) -> None:
    """Both have the same bits. NaNs, and zeros that NaNs became, may have any."""
    assert got.dtype == want.dtype
    known = ~(got.isnan() & want.isnan())
    assert torch.equal(got[known], want[known])
    assert torch.equal(got.isnan(), want.isnan())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", NARROW)
def test__casts__have_the_bits_of_the_python(name, dtype):
    fmt, x = NARROW[name], numbers(dtype)
    served = 0
    for mode in modes(fmt):
        if not native.serves(fmt, mode):
            assert native.encode(x, fmt, mode) is None
            continue
        served += 1
        want = encode_bits(x.float(), fmt, mode)
        codes = native.encode(x, fmt, mode)
        assert codes.dtype == fmt.storage_dtype
        assert torch.equal(raw(codes), raw(want))
        nan = x.isnan()
        values = decode_bits(want, fmt).to(dtype)
        same_values(native.fake_quantize(x, fmt, mode)[~nan], values[~nan])
    assert served == (9 if has_normals(fmt) or not fmt.signed else served)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", NARROW)
def test__decode__has_the_bits_of_the_python(name, dtype):
    fmt = NARROW[name]
    codes = torch.arange(256).to(torch.uint8).repeat(64).view(fmt.storage_dtype)
    same_values(native.decode(codes, fmt, dtype), decode_bits(codes, fmt).to(dtype))


def loop(fmt, overflow="saturate", dtype=torch.float32):
    return native.value_loop(fmt, Mode("nearest_even", overflow), dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", NARROW)
def test__codes_with_values__are_those_of_two_casts(name, dtype):
    fmt, x = NARROW[name], numbers(dtype)
    for overflow in ("saturate", "saturate_finite", "ieee"):
        codes, made = encode(x, fmt, overflow=overflow), loop(fmt, overflow)
        if not native.serves(fmt, Mode("nearest_even", overflow)):
            assert made is None
            continue
        both = made.codes_and_values(x)
        assert torch.equal(raw(both[0]), raw(codes))
        same_values(both[1], decode(codes, fmt))
        same_values(made.values(x), both[1])
        half = loop(fmt, overflow, torch.bfloat16)
        halves = half.codes_and_values(x)
        assert torch.equal(raw(halves[0]), raw(codes))
        same_values(halves[1], decode(codes, fmt, torch.bfloat16))
        same_values(half.values(x), halves[1])
        assert loop(fmt, overflow, torch.float16) is None


@pytest.mark.parametrize("rounding", ["nearest_even", "stochastic"])
@pytest.mark.parametrize(
    "view",
    [
        lambda x: x,
        lambda x: x.mT,
        lambda x: x[:, 1:],
        lambda x: x[::2],
        lambda x: x.view(8, 16, 8, 128).to(memory_format=torch.channels_last),
        lambda x: x[:1].expand(64, -1),
        lambda x: x.view(128, 1, 1024).transpose(0, 1),
    ],
    ids=["rows", "columns", "cut", "strided", "channels last", "expanded", "one"],
)
def test__strides__change_no_element(view, rounding):
    fmt = FORMATS["e4m3fn"]
    x = view(gaussian(128, 1024))
    key = random_key(torch.Generator().manual_seed(0)) if rounding == "stochastic" else None
    for cast in (encode, fake_quantize):
        got = cast(x, fmt, rounding=rounding, generator=key)
        want = cast(x.contiguous(), fmt, rounding=rounding, generator=key)
        assert got.shape == x.shape
        assert torch.equal(raw(got.contiguous()), raw(want))
    codes = encode(x, fmt)
    assert torch.equal(decode(codes, fmt), fake_quantize(x, fmt))


@pytest.mark.parametrize("threads", [1, 2, 5])
def test__threads__change_no_bit(threads):
    x = gaussian((1 << 20) + 77)
    key, fmt = random_key(torch.Generator().manual_seed(0)), FORMATS["e5m2"]
    before = torch.get_num_threads()
    want = encode_bits(x, fmt, Mode("stochastic", "saturate", key))
    try:
        torch.set_num_threads(threads)
        got = encode(x, fmt, rounding="stochastic", generator=key)
    finally:
        torch.set_num_threads(before)
    assert torch.equal(raw(got), raw(want))


def test__denormals_that_are_flushed__change_no_bit_from_the_python():
    x = torch.cat([numbers(torch.float32), numbers(torch.float32) * 2.0**-100])
    assert torch.set_flush_denormal(True)
    try:
        for fmt in NARROW.values():
            for mode in modes(fmt):
                if native.serves(fmt, mode):
                    want = encode_bits(x, fmt, mode)
                    assert torch.equal(raw(native.encode(x, fmt, mode)), raw(want)), (fmt, mode)
    finally:
        torch.set_flush_denormal(False)


def test__what_has_no_memory__is_left_to_operators():
    x, fmt = torch.randn(128, 128), FORMATS["e4m3fn"]
    want = fake_quantize(x, fmt)
    mapped = torch.func.vmap(lambda row: fake_quantize(row, fmt))(x)
    assert torch.equal(mapped, want)
    with FakeTensorMode(allow_non_fake_inputs=True):
        assert fake_quantize(x, fmt).shape == x.shape
        assert encode(torch.empty(128, 128), fmt).dtype == torch.float8_e4m3fn
    assert encode(x.to("meta"), fmt).is_meta


CODE = """
import torch
from scaledtensor import native
from scaledtensor.formats import encode, E4M3FN
codes = encode(torch.linspace(-500, 500, 10_000), E4M3FN).view(torch.uint8)
print(native.status()); print(codes.int().sum().item())
"""


def compiler(folder, *lines: str) -> str:
    """A compiler that builds fast, after these lines of a shell."""
    path = folder / "compiler"
    path.write_text("\n".join(("#!/bin/sh", *lines, 'exec c++ "$@" -O0')))
    path.chmod(0o755)
    return str(path)


@functools.cache
def run(code: str = CODE, **environment: str) -> list[str]:
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout.splitlines()


@pytest.mark.kinds
def test__a_machine_without_a_compiler__has_the_same_codes(tmp_path):
    built, total = run(CXX=compiler(tmp_path), XDG_CACHE_HOME=str(tmp_path))
    assert built.startswith("casts are C++")
    (library,) = (tmp_path / "scaledtensor").iterdir()
    assert library.name.startswith("loops-")
    left_out, same = run(SCALEDTENSOR_NATIVE="0")
    assert (left_out, same) == ("casts are PyTorch operators: SCALEDTENSOR_NATIVE=0", total)
    broken, same = run(CXX="false", XDG_CACHE_HOME=str(tmp_path))
    assert broken.startswith("casts are PyTorch operators: false did not build")
    assert same == total
    none, same = run(PATH="", XDG_CACHE_HOME=str(tmp_path))
    assert "there is no C++ compiler" in none
    assert same == total


@pytest.mark.kinds
def test__a_compiler_without_openmp__builds_it_for_one_thread(tmp_path):
    single = os.path.relpath(compiler(tmp_path, 'case "$*" in *-fopenmp*) exit 1;; esac'))
    built, total = run(CXX=single, XDG_CACHE_HOME=str(tmp_path))
    assert built == f"casts are C++, built by {single}"
    assert total == run(SCALEDTENSOR_NATIVE="0")[1]


SMALL = """
import torch
import scaledtensor as sct
from scaledtensor import native
torch.manual_seed(0)
model = sct.scale_model(torch.nn.Linear(8, 8))
for _ in range(native.LOOK_AFTER):
    model(torch.ones(2, 8)).square().mean().backward()
print(native._found is not None, model.weight.grad.dequantize().abs().sum().item())
"""


@pytest.mark.kinds
def test__a_program_of_small_tensors__takes_the_library_that_is_there_and_builds_none(tmp_path):
    environment = {"CXX": compiler(tmp_path), "XDG_CACHE_HOME": str(tmp_path)}
    without, found = run(SMALL, **environment)[0].split()
    assert without == "False"
    assert not list((tmp_path / "scaledtensor").iterdir())
    many = f"from scaledtensor import native; native.BUILD_AFTER = 2 * native.LOOK_AFTER\n{SMALL}"
    assert run(many, **environment) == [f"True {found}"]
    (library,) = (tmp_path / "scaledtensor").iterdir()
    built = library.stat().st_mtime_ns
    assert run(f"{SMALL}# again", **environment) == [f"True {found}"]
    assert library.stat().st_mtime_ns == built


@pytest.mark.kinds
def test__a_folder_that_others_can_write_to__is_not_used(tmp_path):
    folder = tmp_path / "scaledtensor"
    folder.mkdir()
    folder.chmod(0o777)
    built, _ = run(CXX=compiler(tmp_path), XDG_CACHE_HOME=str(tmp_path))
    assert built.startswith("casts are C++")
    assert not list(folder.iterdir())


on_avx2 = pytest.mark.skipif(not bits.ON_AVX2, reason="Inductor's own code is as fast")


@on_avx2
@pytest.mark.parametrize("dynamic", [False, True])
def test__compiled_code__calls_it_for_what_inductor_does_slowly(dynamic):
    """The result has the bits of eager code for all strides. Inductor handles symbolic sizes."""
    torch.compiler.reset()
    fmt = FORMATS["e4m3fn"]
    key = random_key(torch.Generator().manual_seed(0))

    def run(x):
        codes = encode(x, fmt, rounding="stochastic", generator=key)
        return (
            codes,
            decode(codes, fmt),
            fake_quantize(x.mT, fmt, rounding="stochastic", generator=key),
        )

    x = gaussian(96, 160)
    compiled = torch.compile(run, fullgraph=True, dynamic=dynamic)
    got, code = torch._inductor.utils.run_and_get_code(compiled, x)
    assert ("scaledtensor.cast" in "".join(code)) is not dynamic
    for a, b in zip(got, run(x), strict=True):
        assert a.stride() == b.stride()
        assert torch.equal(raw(a.contiguous()), raw(b.contiguous()))


@on_avx2
def test__compiled_transforms_and_exports__hold_nothing_of_this_machine():
    fmt = FORMATS["e4m3fn"]
    codes = encode(torch.randn(64, 128), fmt)
    torch.compiler.reset()
    mapped = torch.compile(torch.func.vmap(lambda c: decode(c, fmt)), dynamic=False)(codes)
    assert torch.equal(mapped, decode(codes, fmt))

    class Decoder(torch.nn.Module):
        def forward(self, codes):
            return decode(codes, fmt)

    program = torch.export.export(Decoder(), (codes,))
    assert not any("scaledtensor" in str(node.target) for node in program.graph.nodes)
    assert torch.equal(program.module()(codes), decode(codes, fmt))


@pytest.mark.parametrize("count", [5, 5000])
@pytest.mark.parametrize("fmt", ["e4m3fn", "e2m1fn"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test__what_a_bit_of_the_tensor_negates__has_its_sign(count, fmt, dtype):
    """The tensor is the imaginary part of a conjugate: its memory has the opposite signs."""
    x = gaussian(count).to(dtype)
    negated = torch._neg_view(x)
    assert negated.is_neg()
    assert torch.equal(raw(encode(negated, fmt)), raw(encode(-x, fmt)))
    assert torch.equal(fake_quantize(negated, fmt), fake_quantize(-x, fmt))


@pytest.mark.parametrize("count", [1, 5000])
@pytest.mark.parametrize("name", [n for n, f in FORMATS.items() if f.signed and not f.has_nan])
def test__the_zero_of_a_nan__has_the_sign_of_its_code(count, name):
    x = torch.tensor([float("nan"), -float("nan"), -0.0, 1.0]).repeat(count)
    values = fake_quantize(x, name)
    assert torch.equal(values.signbit(), decode(encode(x, name), name).signbit())
    assert torch.equal(values, decode(encode(x, name), name))
