"""`torch.set_default_dtype` changes nothing: every tensor that the library makes says its dtype."""

import ast
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from tensors import bits
from torch import nn

import scaledtensor as sct

PACKAGE = Path(sct.__file__).parent
#: Makers of tensors whose dtype is the default one.
MAKERS = {"empty", "eye", "full", "linspace", "ones", "rand", "randn", "scalar_tensor", "zeros"}
#: Their tensors have no elements.
EMPTY = {("apps/generate.py", "torch.empty(0)"), ("apps/training.py", "torch.empty(0, device")}


def makers(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)):
            continue
        home = node.func.value
        if isinstance(home, ast.Name) and home.id == "torch" and node.func.attr in MAKERS:
            yield node


def test__every_tensor_that_is_made__says_its_dtype():
    found = []
    for path in PACKAGE.rglob("*.py"):
        for node in makers(path):
            named = {k.arg for k in node.keywords}
            place = str(path.relative_to(PACKAGE)), ast.unparse(node)
            known = any(place[0] == p and place[1].startswith(start) for p, start in EMPTY)
            if not named & {"dtype", None} and not known:
                found.append(place)
    assert found == []


@contextmanager
def default(dtype):
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def trained(dtype, recipe, compiled):
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(16, 64), nn.LayerNorm(64), nn.GELU(), nn.Linear(64, 16))
    x = torch.randn(96, 16)
    with default(dtype):
        model = sct.scale_model(plain, recipe)
        run = torch.compile(model, backend="aot_eager") if compiled else model
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        for _ in range(3):
            optimizer.zero_grad()
            (run(x) - x).square().mean().backward()
            optimizer.step()
    return [bits(p.dequantize()) for p in model.parameters()]


@pytest.mark.parametrize("recipe", ["unit", "current", "mxfp8"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64], ids=str)
def test__training__has_the_same_bits(dtype, recipe):
    assert trained(dtype, recipe, False) == trained(torch.float32, recipe, False)


def test__compiled_training__has_the_same_bits():
    assert trained(torch.float64, "unit", True) == trained(torch.float32, "unit", True)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=str)
def test__operators_of_many_elements__have_the_same_bits(dtype):
    torch.manual_seed(0)
    x = sct.scaled(torch.randn(64, 512)).bfloat16()

    def results():
        made = x.sum(0), x.softmax(-1), torch.zeros_like(x), x.std(0), x @ x.t(), x.logsumexp(0)
        return [bits(y.dequantize()) for y in made]

    expected = results()
    with default(dtype):
        assert [results() for _ in range(20)] == [expected] * 20


@pytest.mark.parametrize("config", [sct.WeightOnly("int4"), sct.Dynamic("e4m3fn")], ids=str)
def test__quantize__has_the_same_values(config):
    torch.manual_seed(0)
    model, x = nn.Linear(64, 32), torch.randn(4, 64)

    def quantized():
        held = nn.Linear(64, 32, dtype=torch.float32)
        held.load_state_dict(model.state_dict())
        with torch.no_grad():
            return bits(sct.quantize_(held, config)(x).float())

    expected = quantized()
    with default(torch.float64):
        assert quantized() == expected
