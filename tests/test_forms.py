"""Closed forms of scales in traced code have the arithmetic of `Single` everywhere."""

import math
import os
import re
import struct
import subprocess
import sys
import textwrap
from collections import Counter
from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch._inductor.async_compile import AsyncCompile
from torch._inductor.utils import run_and_get_code
from torch._inductor.virtualized import V

import scaledtensor as sct
from scaledtensor.scales import _inductor, powers
from scaledtensor.scales.formed import Tensors
from scaledtensor.scales.forms import Form, all_values, is_double, joined, program
from scaledtensor.scales.singles import Single, rounded

positive = st.floats(2.0**-60, 2.0**60, width=32)

#: A name, the number by `Single`s, and the same number as a form.
EXPRESSIONS = {
    "product": lambda x, y, z: x * y * 3.7,
    "sum": lambda x, y, z: (x + y) - z * 0.3,
    "quotient": lambda x, y, z: x / y / 7.0,
    "inverse": lambda x, y, z: 3.0 / x + 1.0 / y.sqrt(),
    "powers": lambda x, y, z: (x**0.5) * (y.clamp_max(1e3) ** 2),
    "rsqrt": lambda x, y, z: x.rsqrt() * y,
    "bounds": lambda x, y, z: x.clamp_max(2.5).clamp_min(0.3) * y,
    "quadrature": lambda x, y, z: powers.quadrature(x, y * 0.5, z),
    "exponential": lambda x, y, z: (-(x.clamp_max(20.0)) * 0.7).exp() * z,
    "larger": lambda x, y, z: powers.larger(x, y) * z,
    "power": lambda x, y, z: powers.settle(x * 1.3)[0],
    "ratio": lambda x, y, z: powers.settle(x, powers.product_of(y, z))[1],
    "quotient of scales": lambda x, y, z: powers.settle(x, powers.quotient_of(y, z))[1],
    "product of three": lambda x, y, z: powers.settle(x, powers.product_of(y, z) * 0.5)[1],
}


def bits(x: float) -> bytes:
    return struct.pack("f", x)


def leaves(*numbers: float) -> list[Form]:
    return [Form.of(torch.tensor(n, dtype=torch.float32)) for n in numbers]


@pytest.mark.parametrize("name", EXPRESSIONS)
@given(positive, positive, positive)
def test__a_form__is_what_numbers_are__to_the_bit(name, x, y, z):
    make = EXPRESSIONS[name]
    want = make(*map(Single, (x, y, z)))
    form = make(*leaves(x, y, z))
    assert isinstance(form, Form)
    assert bits(float(form.tensor())) == bits(want)


@pytest.mark.parametrize("name", EXPRESSIONS)
@given(positive, positive, positive)
def test__by_tensors__as_on_other_devices__it_is_the_same_but_for_roots(name, x, y, z):
    """The roots of a CPU's tensors may be the neighbour of the nearest number."""
    given, steps, _ = joined([spelled(EXPRESSIONS[name](*leaves(x, y, z)))])
    want = EXPRESSIONS[name](*map(Single, (x, y, z)))
    assert float(all_values(Tensors, given, steps)[-1]) == pytest.approx(float(want), rel=4e-7)


def spelled(form: Form) -> tuple[list[torch.Tensor], str]:
    """Return the leaves and steps that the operator gets."""
    found: list[tuple[list[torch.Tensor], str]] = []

    class Seen(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if func is torch.ops.scaledtensor.form.default:
                found.append(args)
            return func(*args, **(kwargs or {}))

    with Seen():
        form.fresh()
    return found[-1]


@pytest.mark.parametrize("few", [0, 10**6], ids=["one call", "in kernels"])
def test__inductor__writes_the_same_numbers(few, monkeypatch):
    monkeypatch.setattr(_inductor, "_FEW", few)
    numbers = [(0.3, 7.0, 1e-3), (1e20, 3e-30, 2.0), (1.4142135, 0.70710678, 1e8)]

    def run(x, y, z, q):
        forms = [Form.of(t) for t in (x, y, z)]
        made = [make(*forms) for make in EXPRESSIONS.values()]
        return [y for form in made for y in (form.times(q), q * form.tensor())]

    torch._dynamo.reset()
    compiled = torch.compile(run, fullgraph=False)
    q = torch.tensor([1.0, 2.0, -4.0] * 30)
    for three in numbers:
        found = compiled(*map(torch.tensor, three), q)
        for name, *both in zip(EXPRESSIONS, found[::2], found[1::2], strict=True):
            want = EXPRESSIONS[name](*(Single(rounded(n)) for n in three))
            for y in both:
                assert torch.equal(y, q * torch.tensor(want)), (name, three)


@pytest.mark.parametrize("few", [0, 10**6], ids=["one call", "in kernels"])
def test__inductor__writes_the_nodes_that_multiply_by_numbers_as_eager_code_does(few, monkeypatch):
    monkeypatch.setattr(_inductor, "_FEW", few)
    ops = torch.ops.scaledtensor

    def run(x, y, a, b):
        ratio = Form("quadrature", Form.of(a), Form.of(b))
        power = Form("power", ratio)
        one, both = program(ratio), program(power, Form("power", Form.of(b)))
        return [
            ops.pair(*both),
            ops.times(x, *one, None),
            ops.times(x, *one, torch.bfloat16),
            ops.times(y, *one, torch.float32),
            ops.total(x, y, *both, -2.0, torch.float32),
            ops.total(x, y, *both, 1.0, torch.bfloat16),
            ops.rounded(x, *program(power), "e4m3fn", torch.bfloat16),
            ops.encoded(x, *program(power), "e5m2", "saturate_finite").float(),
        ]

    generator = torch.Generator().manual_seed(0)
    x = torch.randn(5, 40, generator=generator)
    y = torch.randn(40, generator=generator).bfloat16()
    given = x, y, torch.tensor(3.0), torch.tensor(7e-3)
    torch._dynamo.reset()
    found, want = torch.compile(run, fullgraph=True)(*given), run(*given)
    assert want[0].tolist() == [4, 2**-7]
    assert torch.equal(want[4], torch.add(x * 4, y * 2**-7, alpha=-2))
    assert torch.equal(want[6], sct.formats.fake_quantize(x * 4, "e4m3fn").bfloat16())
    for one, other in zip(found, want, strict=True):
        assert one.dtype == other.dtype
        torch.testing.assert_close(
            one, other, rtol=1e-2 if one.dtype == torch.bfloat16 else 0, atol=0
        )


def test__a_large_form__lets_the_rms_that_it_is_made_of_rest():
    """The scale, the ratio and the next RMS follow from one node."""
    a, b = torch.tensor(1.5), torch.tensor(0.5)
    rms = Form("quadrature", Form.of(a), Form.of(b))
    for _ in range(30):
        rms = Form("mul", rms, 1.25)
    chain = [Form("quadrature", rms, Form.of(b))]
    for _ in range(4):
        chain.append(Form("ratio", Form.of(a), Form("power", chain[-1])))
    nodes: list[str] = []

    class Seen(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            nodes.append(str(func))
            return func(*args, **(kwargs or {}))

    with Seen():
        found = [float(form.fresh()) for form in chain]
    own = sum(name == "scaledtensor.form.default" for name in nodes)
    assert own == len(chain) + 1
    last = Single(rounded((1.5**2 + 0.5**2) ** 0.5))
    for _ in range(30):
        last = last * 1.25
    assert found[0] == pytest.approx((float(last) ** 2 + 0.25) ** 0.5)


def test__joined__forms_share_steps_and_follow_from_one_another():
    a, b = torch.tensor(2.0), torch.tensor(3.0)
    first, second = ([a, b], "mul t0 t1;sqrt s0"), ([a, b], "mul t0 t1;neg s0")
    third = ([("form", 0), b], "add t0 t1")
    given, steps, places = joined([first, second, third])
    assert places == [[0, 1], [0, 2], [3]]
    wanted = [own[-1] for own in places]
    assert given == [a, b]
    assert steps == "mul t0 t1;sqrt s0;neg s0;add s1 t1"
    found = all_values(Tensors, given, steps)
    assert [float(found[n]) for n in wanted] == pytest.approx([6**0.5, -6.0, 6**0.5 + 3])
    together, alone = torch.ops.scaledtensor.numbers(given, steps, wanted[:2], [2], wanted[2:], [])
    assert [*map(float, together), float(alone)] == pytest.approx([6**0.5, -6.0, 6**0.5 + 3])


def test__one_call__sees_a_scale_that_changed_in_place():
    leaf = torch.tensor(2.0)
    square = [leaf], "mul t0 t0", [0], [1], [0], []
    for _ in range(2):
        assert [float(x) for x in torch.ops.scaledtensor.numbers(*square)] == [4, 4]
    leaf.fill_(3.0)
    first, second = (torch.ops.scaledtensor.numbers(*square) for _ in range(2))
    for one, other in zip(first, second, strict=True):
        assert float(one) == 9
        one.fill_(1.0)  # This result is a tensor of its own.
        assert float(other) == 9
    assert [float(x) for x in torch.ops.scaledtensor.numbers(*square)] == [9, 9]
    nan = torch.tensor(math.nan)
    assert math.isnan(torch.ops.scaledtensor.numbers([nan], "mul t0 t0", [0], [1], [], [])[0])


def test__doubles__are_told_from_singles():
    assert is_double("product t0 t1")
    assert is_double("mul d0 t1")
    assert is_double("product t0 t1;mul s0 0x1p+0")
    assert not is_double("product t0 t1;power t2;ratio s0 s1")


def test__a_form_that_is_older_than_a_write__is_read_from_its_tensor():
    """In one graph, y's scale stays when the weight's scale moves."""
    w, v = sct.scaled(torch.randn(8, 8)), sct.scaled(torch.ones(8, 8) * 2.0**20)

    def run(w, v):
        y = w * 3.0
        w.copy_(v)
        return y * 5.0, w * 1.0

    eager = run(w.clone(), v)
    torch._dynamo.reset()
    found = torch.compile(run, backend="aot_eager", fullgraph=True)(w.clone(), v)
    for a, b in zip(eager, found, strict=True):
        assert torch.equal(a.dequantize(), b.dequantize())
        assert float(a.scale) == float(b.scale)


def test__an_expectation_that_is_a_number__settles_beside_forms():
    power, ratio, other = powers.settle(Single(3.0), *leaves(0.5), Single(8.0))
    assert (power, other) == (4.0, 2.0)
    assert float(ratio.tensor()) == 0.125


TWICE = """
    import sys
    import torch
    import scaledtensor as sct
    from scaledtensor.scales import forms

    x = sct.scaled(torch.randn(16, 16), "bf16")
    for digest in ("one", "one", "two"):
        forms.source_digest = lambda: digest
        torch.compiler.reset()
        with torch._functorch.config.patch(enable_autograd_cache=False):
            torch.compile(lambda x: torch.nn.functional.gelu(x + x) * 3.0)(x)
        print(torch._dynamo.utils.counters["inductor"]["fxgraph_cache_hit"])
"""


@pytest.mark.skipif(
    torch.__version__ < (2, 13),
    reason="torch before 2.13 does not say that it compiles while it traces: there are no forms",
)
def test__inductors_cache__serves_no_code_of_another_version(tmp_path):
    """Inductor's cache knows a graph by its text, not by the code that this package makes Inductor
    write."""
    environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(tmp_path)}
    command = [sys.executable, "-c", textwrap.dedent(TWICE)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.split() == ["0", "1", "1"]


def test__a_cast_to_codes__is_written_once_though_it_reads_its_input_five_times(monkeypatch):
    from torch._inductor.codegen import cpp

    written = Counter()
    bound = cpp.CppOverrides.erf, cpp.CppVecOverrides.erf

    def counting(write):
        def erf(x):
            written[type(V.kernel)] += 1
            return write(x)

        return staticmethod(erf)

    for overrides, write in zip((cpp.CppOverrides, cpp.CppVecOverrides), bound, strict=True):
        monkeypatch.setattr(overrides, "erf", counting(write))
    x = torch.randn(8, 64)

    def cast(x):
        return torch.ops.scaledtensor.encoded(torch.special.erf(x), [], "", "e4m3fn", "saturate")

    with torch._inductor.config.patch(force_disable_caches=True):
        got = torch.compile(cast, fullgraph=True)(x)
    assert torch.equal(got.view(torch.uint8), cast(x).view(torch.uint8))
    assert set(written.values()) <= {1, 2}, "once in each loop: for vectors, for the rest of a row"
    assert written


def written(function, *given):
    """The result of compiled code, and its only kernel."""
    torch._dynamo.reset()
    with torch._inductor.config.patch(force_disable_caches=True):
        compiled = torch.compile(function, fullgraph=True)
        found, (code,) = torch._inductor.utils.run_and_get_code(compiled, *given)
    return found, code


def test__a_sum_times_a_number__is_one_loop():
    x = torch.randint(-8, 9, (32, 64)).float()  # their sums are exact in any order, in bfloat16 too
    number = torch.tensor(0.25)

    def twice(total, number):
        return torch.ops.scaledtensor.times(total, [number], "mul t0 0x1p+1")

    def alone(x, number):
        return twice(x.sum(0), number)

    def beside_the_sum(x, number):
        total = x.sum(0)
        return twice(total, number), total

    found, code = written(alone, x, number)
    assert torch.equal(found, x.sum(0) * 0.5)
    assert code.count(".store(") == 1
    (product, total), code = written(beside_the_sum, x, number)
    assert torch.equal(product, total * 0.5)
    assert torch.equal(total, x.sum(0))
    assert code.count(".store(") == 2
    found, _ = written(alone, x.bfloat16(), number)
    assert found.dtype is torch.bfloat16
    assert torch.equal(found.float(), x.sum(0) * 0.5)


def test__a_cast_to_values__is_one_operation_of_a_kernel():
    x = torch.randn(8, 64)

    def cast(x):
        return torch.ops.scaledtensor.rounded(x, [], "", "e4m3fn", torch.float32)

    found, code = written(cast, x)
    assert torch.equal(found, cast(x))
    assert "auto tmp1 = [](auto x)" in code, "tmp0 is the input"
    assert "auto tmp2" not in code


@pytest.fixture
def unbuilt(monkeypatch):
    """Kernels write zeros, for tests that read the code and not the results: g++ takes a second or
    two for each kernel."""

    def not_built(self, argtypes, source):
        outputs = [i for i, kind in enumerate(argtypes) if "*" in kind and "const" not in kind]

        def run(*given):
            for i in outputs:
                given[i].zero_()

        return run

    monkeypatch.setattr(AsyncCompile, "cpp_pybinding", not_built)


class Residual(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = torch.nn.LayerNorm(16)
        self.up, self.down = torch.nn.Linear(16, 32), torch.nn.Linear(32, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.nn.functional.gelu(self.up(self.norm(x))))


class Turned(torch.nn.Module):
    """Layers whose keys are turned by angles, as in Llama. The angles are measured once, so the
    first layer has more numbers than the others. The norm is written out."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.keys = torch.nn.ModuleList(torch.nn.Linear(16, 16) for _ in range(layers))
        self.gates = torch.nn.ModuleList(torch.nn.Linear(16, 32) for _ in range(layers))
        self.downs = torch.nn.ModuleList(torch.nn.Linear(32, 16) for _ in range(layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        angles = torch.arange(x.shape[0])[:, None] * torch.logspace(0, -2, 16)
        cos, sin = angles.cos(), angles.sin()
        for key, gate, down in zip(self.keys, self.gates, self.downs, strict=True):
            h = key(x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6))
            a, b = h.chunk(2, -1)
            x = x + h * cos + torch.cat([-b, a], -1) * sin
            x = x + down(torch.nn.functional.silu(gate(x)))
        return x


def chain_of(layers: int) -> torch.nn.Module:
    return torch.nn.Sequential(*[Residual() for _ in range(layers)])


def kernels_of(make: Callable[[int], torch.nn.Module], layers: int) -> tuple[int, int]:
    """How many kernels the code of a training step has, and how many it calls."""
    torch.manual_seed(0)
    model = sct.scale_model(make(layers))
    compiled, x = torch.compile(model), torch.randn(4, 16)
    with torch._inductor.config.patch(force_disable_caches=True):
        _, codes = run_and_get_code(lambda: compiled(x).square().mean().backward())
    code = "\n".join(codes)
    called = re.findall(r"^\s+cpp_fused\w*\(", code, re.MULTILINE)
    return code.count("cpp_pybinding("), len(called)


@pytest.mark.usefixtures("unbuilt")
@pytest.mark.parametrize("make", [chain_of, Turned])
def test__layers_that_are_alike__share_their_kernels(make):
    """The source of a kernel has the places of its numbers in memory. With places that differed
    between layers, each layer had its own kernels, and compilation took twice as long."""
    (few, calls), (more, more_calls) = kernels_of(make, 4), kernels_of(make, 6)
    assert more_calls - calls >= 8
    assert more - few <= 2


def test__numbers_of_layers__serve_sizes_that_are_symbols():
    torch.compiler.reset()
    torch.manual_seed(0)
    model = sct.scale_model(torch.nn.Sequential(Residual(), Residual(), Residual()))
    compiled = torch.compile(model, dynamic=True)
    for rows in (4, 6, 9):
        x = torch.randn(rows, 16)
        made = compiled(x)
        made.square().mean().backward()
        assert (made.dequantize() - model(x).dequantize()).norm() <= 0.02 * made.dequantize().norm()


@pytest.mark.usefixtures("unbuilt")
@pytest.mark.parametrize("rounding", ["nearest_even", "stochastic"])
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test__a_convolution__reads_the_cast_that_a_site_looks_at(layout, rounding):
    """Inductor's convolutions take images with channels last. The site looked at a cast with
    channels first, and each convolution read a copy."""
    conv, relu = torch.nn.Conv2d, torch.nn.ReLU
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        *(conv(3, 16, 3, padding=1), relu()),
        *(conv(16, 8, 1), relu()),
        *(conv(8, 16, 3, padding=1, groups=2), relu()),
    )
    recipe = sct.recipes.Unit(gradient_rounding=rounding)
    model = sct.scale_model(model, recipe).to(memory_format=layout)
    compiled, x = torch.compile(model), torch.randn(2, 3, 16, 16).to(memory_format=layout)
    with torch._inductor.config.patch(force_disable_caches=True):
        _, codes = run_and_get_code(lambda: compiled(x).square().mean().backward())
    for code in codes:
        looked_at = re.findall(r"\.look\.default\((\w+),", code)
        read = re.findall(r" = .*\bconvolution(?:_backward\.default)?\((\w+),", code)
        assert len(read) == 3
        assert read == looked_at
