"""The machine decides the dtype in which products are computed; their meaning stays the same."""

import os
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
from assertions import assert_shifted, dequantized
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import scaledtensor as sct
from scaledtensor import _torch, backends
from scaledtensor.__main__ import main
from scaledtensor.backends import cpu
from scaledtensor.errors import HardwareError
from scaledtensor.ops.algebra import elements
from scaledtensor.ops.products import dtype as products
from scaledtensor.ops.products import linear
from scaledtensor.recipes.casts import GEMMS

CPU = torch.device("cpu")
BOTH = ("float32", "bfloat16")

#: ATen operators that multiply matrices; a bfloat16 operand would take the slow path in them.
PRODUCTS = (
    *("mm", "bmm", "addmm", "baddbmm", "addmv", "mv", "dot", "convolution", "_grouped_mm"),
    *("convolution_backward", "_scaled_dot_product_flash_attention_for_cpu", "linear", "matmul"),
    "_scaled_dot_product_flash_attention_for_cpu_backward",
)


# --- the choice ------------------------------------------------------------------------------


ALONE = {"avx512_bf16": True}


@pytest.mark.parametrize(
    ("facts", "capability", "environment", "dtype", "word"),
    [
        ({"avx2": True}, "AVX2", {}, torch.float32, "neither"),
        ({"avx512_f": True}, "AVX512", {}, torch.float32, "neither"),
        ({"avx512_bf16": True}, "AVX2", {}, torch.float32, "AVX2"),
        ({"amx_bf16": True, "avx512_bf16": True}, "AVX512", {}, torch.bfloat16, "AMX"),
        ({"amx_bf16": True}, "AVX2", {}, torch.float32, "AVX2"),
        ({"amx_bf16": True}, "AVX512", {"ONEDNN_MAX_CPU_ISA": "AVX2"}, torch.float32, "ONEDNN"),
        ({"amx_bf16": True}, "AVX512", {"DNNL_MAX_CPU_ISA": "avx2"}, torch.float32, "avx2"),
        ({"amx_bf16": True}, "AVX512", {"ONEDNN_MAX_CPU_ISA": "ALL"}, torch.bfloat16, "AMX"),
        ({**ALONE, "cpu_name": "AMD EPYC"}, "AVX512", {}, torch.bfloat16, "AMD"),
        ({**ALONE, "cpu_name": "AMD EPYC"}, "AVX2", {}, torch.float32, "AVX2"),
        ({**ALONE, "cpu_name": "Intel Xeon"}, "AVX512", {}, torch.float32, "Intel"),
        ({**ALONE, "amx_bf16": True, "cpu_name": "Intel"}, "AVX512", {}, torch.bfloat16, "has AMX"),
    ],
)
def test__an_x86_cpu__multiplies_bfloat16_where_it_has_units(
    facts, capability, environment, dtype, word
):
    found = cpu._of_x86(facts, capability, environment)
    assert found.dtype == dtype
    assert word in found.reason


def test__avx512_bf16_without_amx_of_an_unknown_make__is_measured(monkeypatch):
    # A Xeon with a virtual machine that hides AMX multiplies bfloat16 half as fast as float32, and
    # an EPYC multiplies it twice as fast. Both report avx512_bf16.
    facts = {"architecture": "x86_64", "avx512_bf16": True}
    assert cpu._of_x86(facts, "AVX512", {}) is None
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: facts)
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX512")
    for name in ("ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA", products.VARIABLE):
        monkeypatch.delenv(name, raising=False)
    for seconds, dtype in [((1.9, 1.0), torch.float32), ((0.4, 1.0), torch.bfloat16)]:
        monkeypatch.setattr(cpu, "_probed", lambda seconds=seconds: seconds)
        monkeypatch.setattr(products, "_choices", {})
        assert products.choice(CPU).dtype == dtype
        assert "AVX512_BF16 without AMX" in products.choice(CPU).reason


def test__other_cpus__are_measured():
    assert cpu._of_probe(1.0, 2.0).dtype == torch.bfloat16
    assert cpu._of_probe(2.0, 1.0).dtype == torch.float32
    seconds = cpu._probed()
    assert all(0 < s < 60 for s in seconds)


def test__the_probe__runs_inside_a_tracer(monkeypatch):
    facts = {"architecture": "aarch64"}
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: facts)
    monkeypatch.setattr(products, "_choices", {})
    from torch._subclasses import FakeTensorMode

    with FakeTensorMode():
        found = products.choice(CPU)
    assert "times as long" in found.reason


@pytest.mark.parametrize(
    ("capability", "dtype"), [((7, 5), torch.float32), ((8, 0), torch.bfloat16)]
)
def test__a_cuda_device__multiplies_bfloat16_where_it_has_units(monkeypatch, capability, dtype):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.version, "hip", None)
    assert backends.CUDA.products(torch.device("cuda", 0)).dtype == dtype


def test__products_in__is_a_setting_and_a_context():
    before = products.product_dtype(CPU)
    with sct.products_in("bfloat16"):
        assert products.product_dtype(CPU) == torch.bfloat16
        with sct.products_in("float32"):
            assert products.product_dtype(CPU) == torch.float32
        assert products.product_dtype(CPU) == torch.bfloat16
    assert products.product_dtype(CPU) == before


@pytest.mark.parametrize("name", ["fp32", "float16", "", None])
def test__products_in__names_what_it_takes(name):
    before = products.choice(CPU)
    with pytest.raises(HardwareError, match="'auto', 'bfloat16', 'float32'"):
        sct.products_in(name)
    assert products.choice(CPU) == before


#: The dtype that this machine does not choose.
OTHER = {torch.float32: "bfloat16", torch.bfloat16: "float32"}[products.product_dtype(CPU)]


@pytest.mark.parametrize("name", [OTHER, "half"], ids=["other", "half"])
def test__the_environment__overrides(name):
    code = "import scaledtensor as sct; print(sct.hardware(['unit']).devices[0].dtype)"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "SCALEDTENSOR_PRODUCTS": name},
        capture_output=True,
        text=True,
        check=False,
    )
    if name in BOTH:
        assert done.stdout.split()[-1] == f"torch.{name}"
    else:
        assert "SCALEDTENSOR_PRODUCTS takes one of" in done.stderr


def test__compiled_code__is_kept_apart_by_the_choice():
    x = sct.scaled(torch.randn(4))
    keys = set()
    for name in BOTH:
        with sct.products_in(name):
            keys.add(x._stable_hash_for_caching())
    assert len(keys) == 2


# --- the report ------------------------------------------------------------------------------


def test__hardware__says_what_each_recipe_runs_on():
    for name in BOTH:
        with sct.products_in(name):
            (found, *_) = sct.hardware().devices
            assert found.device == CPU
            assert found.dtype == getattr(torch, name)
            runs = {(p.recipe, p.product): p.runs_on for p in found.products}
        assert set(runs) == {(r, g) for r in sct.recipes.base.RECIPES for g in GEMMS}
        assert runs["unit", "dgrad"] == runs["mxfp8", "wgrad"] == name
        assert runs["nvfp4", "forward"] == name
        # Scales of blocks that are no powers of two leave bfloat16.
        assert runs["blockwise", "forward"] == "float32"
    assert "unit" in str(sct.hardware())
    assert str(sct.hardware(["unit"])).count("e4m3fn carried") == 4


def test__the_command__prints_the_report(capsys):
    assert main(["hardware", "unit", "--products", "bfloat16"]) == 0
    printed = capsys.readouterr().out
    assert "computed in bfloat16" in printed
    assert printed.count("e4m3fn carried") == 4
    assert main(["hardware", "unknown"]) == 2
    assert "unknown recipe" in capsys.readouterr().err


def test__hardware__of_a_cuda_device(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a device")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(products, "_choices", {})
    _, found = sct.hardware(["unit", "mxfp8", sct.recipes.Unit(keep=("dgrad",))]).devices
    runs = [(p.recipe, p.product, p.runs_on) for p in found.products]
    assert ("unit", "forward", "FP8 units") in runs
    assert ("mxfp8", "forward", "bfloat16") in runs
    assert runs[-2] == ("unit", "dgrad", "bfloat16")
    assert "compute capability of 10.0" in found.products[3].reason


# --- the products ----------------------------------------------------------------------------


class Multiplied(_torch.DispatchMode):
    """Records the dtypes of the operands of every product that torch itself gets."""

    def __init__(self, dtypes):
        super().__init__()
        self.dtypes = dtypes

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func._schema.name.removeprefix("aten::") in PRODUCTS and not any(
            isinstance(a, sct.ScaledTensor) for a in args
        ):
            self.dtypes |= {a.dtype for a in args if isinstance(a, torch.Tensor) and a.dim() > 1}
        return func(*args, **(kwargs or {}))


@pytest.fixture
def multiplied(monkeypatch):
    """Return the dtypes of products below a ScaledTensor, which a mode around the model does not
    see."""
    engine, dtypes = sct.ScaledTensor._engine, set()

    def seen(function):
        def call(*args):
            with Multiplied(dtypes):
                return function(*args)

        return call

    dispatch = seen(engine.dispatch)
    monkeypatch.setattr(sct.ScaledTensor, "_engine", engine._replace(dispatch=dispatch))
    monkeypatch.setattr(linear, "_multiplied", seen(linear._multiplied))
    return dtypes


def by_attention(x):
    w = torch.softmax(x @ x.mT, -1)
    return torch.einsum("bij,bjk->bik", w, x)


def grouped(x):
    experts = sct.scaled(torch.randn(2, 16, 16), recipe="unit")
    return torch.nn.functional.grouped_mm(x[0], experts, offs=torch.tensor([3, 8]).int())


class Twice(nn.Module):
    def __init__(self):
        super().__init__()
        self.product = scaled_model(nn.Bilinear(16, 16, 4))

    def forward(self, x):
        return self.product(x, x)


def scaled_model(module, recipe="unit"):
    return sct.scale_model(module, recipe)


MODELS = {
    "linear": lambda: scaled_model(nn.Linear(16, 16)),
    "blockwise": lambda: scaled_model(nn.Linear(16, 16), "mxfp8"),
    "nvfp4": lambda: scaled_model(nn.Linear(16, 16), "nvfp4"),
    "current": lambda: scaled_model(nn.Linear(16, 16), "current"),
    "kept high": lambda: scaled_model(nn.Linear(16, 16), sct.recipes.Unit(keep=("wgrad",))),
    "frozen": lambda: scaled_model(
        nn.Linear(16, 16).requires_grad_(False), sct.recipes.Unit(store_frozen=True)
    ),
    "convolution": lambda: scaled_model(nn.Conv1d(8, 8, 3, padding=1)),
    "transposed convolution": lambda: scaled_model(nn.ConvTranspose1d(8, 8, 3, padding=1)),
    "LSTM": lambda: scaled_model(nn.LSTM(16, 16, batch_first=True)),
    "attention": lambda: scaled_model(nn.TransformerEncoderLayer(16, 2, 16, 0.0)),
    "attention by hand": lambda: by_attention,
    "bilinear": lambda: Twice(),
    "grouped": lambda: grouped,
}


def run(name):
    """Return output and gradients of a model, from the same numbers each time."""
    torch.manual_seed(0)
    model = MODELS[name]()
    x = sct.scaled(torch.randn(2, 8, 16), "bf16", recipe="unit").requires_grad_()
    out = model(x)
    out = out[0] if isinstance(out, tuple) else out
    out.backward(sct.scaled(torch.randn(out.shape), "bf16"))
    parameters = model.parameters() if isinstance(model, nn.Module) else ()
    return [out, x.grad, *(p.grad for p in parameters if p.grad is not None)]


IN_FLOAT32 = {
    "unit": sct.recipes.Unit(activation="fp32"),
    "current": sct.recipes.Current(activation="fp32"),
    "by block": sct.recipes.MXFP8(activation="fp32"),
}


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("name", IN_FLOAT32)
def test__a_float32_result__is_a_float32_product_on_every_machine(name, compiled, bias):
    """The format of activations decides it. A bfloat16 product would round the result."""

    def run():
        torch.manual_seed(0)
        recipe = IN_FLOAT32[name]
        layer = scaled_model(nn.Linear(64, 32, bias=bias), recipe)
        x = sct.scaled(torch.randn(16, 64), "fp32", recipe=recipe).requires_grad_()
        step = torch.compile(layer, backend="aot_eager", fullgraph=True) if compiled else layer
        y = step(x)
        y.backward(sct.scaled(torch.randn(16, 32), "fp32", recipe=recipe))
        return [y, x.grad, layer.weight.grad]

    with sct.products_in("float32"):
        wanted = run()
    with sct.products_in("bfloat16"):
        got = run()
    for a, b in zip(got, wanted, strict=True):
        assert a.format.name == "fp32"
        assert torch.equal(a.qdata, b.qdata)
        assert torch.equal(a.scale, b.scale)


def test__a_float32_convolution__is_computed_in_float32_on_every_machine():
    recipe = IN_FLOAT32["unit"]

    def run():
        torch.manual_seed(0)
        layer = scaled_model(nn.Conv1d(8, 8, 3, padding=1), recipe)
        x = sct.scaled(torch.randn(2, 8, 16), "fp32", recipe=recipe).requires_grad_()
        y = layer(x)
        y.backward(sct.scaled(torch.randn(2, 8, 16), "fp32", recipe=recipe))
        return [y, x.grad, layer.weight.grad]

    with sct.products_in("float32"):
        wanted = run()
    with sct.products_in("bfloat16"):
        got = run()
    assert all(torch.equal(a.qdata, b.qdata) for a, b in zip(got, wanted, strict=True))


@pytest.mark.parametrize("rows", [4, 200])  # the loop in C++ takes few rows
@pytest.mark.parametrize("config", [sct.Dynamic(), sct.Dynamic("int8"), sct.WeightOnly("e4m3fn")])
def test__a_quantised_float32_layer__has_the_same_result_on_every_machine(config, rows):
    layer = sct.quantize_(nn.Linear(64, 32), config)
    x = torch.randn(rows, 64)
    with sct.products_in("float32"):
        wanted = layer(x)
    with sct.products_in("bfloat16"):
        assert torch.equal(layer(x), wanted)


@pytest.mark.filterwarnings("ignore::scaledtensor.errors.RecipeWarning")
@pytest.mark.parametrize("name", MODELS)
def test__every_product__is_computed_in_what_was_chosen(name, multiplied):
    with sct.products_in("float32"):
        in_float32 = run(name)
    assert multiplied == {torch.float32}
    multiplied.clear()
    with sct.products_in("bfloat16"):
        in_bfloat16 = run(name)
    assert torch.bfloat16 in multiplied
    for a, b in zip(in_float32, in_bfloat16, strict=True):
        assert a.format == b.format
        assert torch.equal(a.scale, b.scale)
        spread = dequantized(a).square().mean().sqrt()
        assert (dequantized(a) - dequantized(b)).square().mean().sqrt() <= 2.0**-5 * spread


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("masked", [False, True])
def test__attention__is_as_exact_in_every_dtype_of_products(masked, compiled):
    """The operands and the results are bfloat16."""
    torch.manual_seed(0)
    parts = [torch.randn(2, 4, 100, 32).bfloat16() for _ in range(3)]
    gradient = torch.randn(2, 4, 100, 32).bfloat16()
    mask = torch.randn(100, 100) if masked else None

    def attended(*operands, mask=mask):
        return nn.functional.scaled_dot_product_attention(*operands, mask)

    def run(function, operands, gradient):
        y = function(*operands)
        return [y, *torch.autograd.grad(y, operands, gradient)]

    exact = [x.double().requires_grad_() for x in parts]
    wide = None if mask is None else mask.double()
    wanted = run(lambda *x: attended(*x, mask=wide), exact, gradient.double())
    step = torch.compile(attended, backend="aot_eager", fullgraph=True) if compiled else attended
    errors = {}
    for name in BOTH:
        operands = [sct.scaled(x, "bf16").requires_grad_() for x in parts]
        with sct.products_in(name):
            made = run(step, operands, sct.scaled(gradient, "bf16"))
        errors[name] = [
            float((dequantized(a.detach()) - b).square().mean().sqrt() / b.square().mean().sqrt())
            for a, b in zip(made, wanted, strict=True)
        ]
        torch.compiler.reset()
    for narrow, best in zip(errors["bfloat16"], errors["float32"], strict=True):
        assert best < 0.003
        assert narrow < 1.5 * best


FORMATS = ("e4m3fn", "e5m2", "e4m3fnuz", "bf16")
SIZES = st.integers(1, 40)


@given(SIZES, SIZES, SIZES, st.sampled_from(FORMATS), st.sampled_from(FORMATS), st.integers(0, 99))
def test__a_product_of_codes__is_that_of_their_values(m, k, n, of_a, of_b, seed):
    """In both dtypes the result is the exact sum rounded to bfloat16, up to the order of float32
    sums."""
    rng = torch.Generator().manual_seed(seed)
    a, b = torch.randn(m, k, generator=rng), torch.randn(k, n, generator=rng)
    a, b = sct.scaled(a, of_a), sct.scaled(b, of_b)
    exact = dequantized(a) @ dequantized(b)
    sizes = dequantized(a).abs() @ dequantized(b).abs()
    found = []
    for name in BOTH:
        with sct.products_in(name):
            found.append(a @ b)
        got = dequantized(found[-1])
        assert ((got - exact).abs() <= 2.0**-8 * exact.abs() + 2.0**-21 * sizes).all()
    assert torch.equal(found[0].scale, found[1].scale)
    assert found[0].format == found[1].format == sct.formats.BF16


@pytest.mark.parametrize("path", ["eager", "compiled"])
@pytest.mark.parametrize("name", BOTH)
def test__a_step__is_the_same_bits_under_loss_scaling(name, path):
    torch.compiler.reset()
    torch.manual_seed(0)
    model = scaled_model(nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 8)))
    x, y = torch.randn(4, 16), torch.randn(4, 8)

    def loss(factor):
        return F.mse_loss(model(x), y) * factor

    call = loss if path == "eager" else torch.compile(loss, fullgraph=True)

    def gradients(k):
        model.zero_grad()
        call(torch.tensor(2.0**k)).backward()
        return [p.grad for p in model.parameters()]

    with sct.products_in(name):
        plain, small = gradients(0), gradients(-18)
    for a, b in zip(plain, small, strict=True):
        assert_shifted(a, b, -18)


def test__a_kernel_of_one_pixel__keeps_its_strides():
    """With its channels last beside an image that has them first, torch's float32 convolution
    writes beyond its memory on AVX2."""
    layer = scaled_model(nn.Conv2d(3, 8, 1, stride=2, bias=False))
    codes = layer.weight.detach().to_format("e4m3fn")
    for name in BOTH:
        with sct.products_in(name):
            assert elements(codes).stride() == codes.stride() == (3, 1, 1, 1)
            layer(sct.scaled(torch.randn(4, 3, 16, 16), "bf16", recipe="unit")).sum().backward()
    image = sct.scaled(torch.randn(2, 4, 6, 5).to(memory_format=torch.channels_last), "e4m3fn")
    assert elements(image).is_contiguous(memory_format=torch.channels_last)
