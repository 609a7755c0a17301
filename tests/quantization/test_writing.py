"""Writes into quantised weights: an error wherever a write would be lost."""

import copy
import io
import pickle

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.utils import vector_to_parameters

import scaledtensor as sct
from scaledtensor import Dynamic, QuantizedTensor, WeightOnly
from scaledtensor.errors import UnsupportedError
from tests.assertions import assert_each

MODES = [torch.enable_grad, torch.no_grad, torch.inference_mode]


def layer(config=None) -> nn.Linear:
    torch.manual_seed(0)
    return sct.quantize_(nn.Linear(32, 24), config or WeightOnly())


def assigned(model):
    model.weight.data = torch.zeros(24, 32)


def assigned_another_config(model):
    model.weight.data = layer(WeightOnly("int8")).weight


def set_elements(model):
    model.weight[0] = 7.0


def set_elements_of_data(model):
    model.weight.data[0] = 7.0


def set_by_a_mask(model):
    model.weight[model.weight > 0] = 0.0


def set_in_the_transpose(model):
    model.weight.T[0] = 1.0


def added(model):
    part = model.weight[:4]
    part += 1.0


def written_by_out(model):
    torch.add(torch.ones(4, 32), 1, out=model.weight[:4])


WRITES = [
    assigned,
    assigned_another_config,
    set_elements,
    set_elements_of_data,
    set_by_a_mask,
    set_in_the_transpose,
    added,
    written_by_out,
    lambda m: vector_to_parameters(torch.zeros(24 * 32 + 24), m.parameters()),
    lambda m: m.weight.zero_(),
    lambda m: m.weight[:4].zero_(),
    lambda m: m.weight[0, :4].zero_(),
    lambda m: m.weight[:4].data.zero_(),
    lambda m: m.weight[:4].detach().zero_(),
    lambda m: m.weight.data[:4].mul_(2),
    lambda m: nn.init.zeros_(m.weight[4:8]),
    lambda m: nn.init.normal_(m.weight[4:8]),
    lambda m: nn.init.trunc_normal_(m.weight[4:8]),
    lambda m: m.weight.view(-1).fill_(3.0),
    lambda m: m.weight.view(-1)[3:][:2].fill_(3.0),
    lambda m: m.weight.chunk(2)[0].copy_(torch.zeros(12, 32)),
    lambda m: m.weight.unbind()[0].add_(1),
    lambda m: torch._foreach_zero_([m.weight[:4]]),
    lambda m: nn.functional.relu(m.weight[:4], inplace=True),
]


@pytest.mark.parametrize("mode", MODES)
def test__a_write_that_would_be_lost__is_an_error__that_names_the_way_out(mode):
    def check(write):
        model = layer()
        before = model.weight.dequantize()
        with mode(), pytest.raises(UnsupportedError, match=r"unscale_model\(model\)"):
            write(model)
        assert torch.equal(model.weight.dequantize(), before)

    assert_each(WRITES, check)


def test__arrays__are_read_only__unless_they_are_copies():
    weight = layer().weight
    for array in (weight.numpy(), weight.detach().numpy(), np.asarray(weight), weight[:4].numpy()):
        with pytest.raises(ValueError, match="read-only"):
            array[:] = 0
    assert np.array(weight).flags.writeable
    assert np.array_equal(np.array(weight), weight.dequantize().numpy())


def test__data__takes_codes_of_the_same_config_and_equal_values():
    def check(config):
        weight, other = layer(config).weight, layer(config).weight
        value = weight.dequantize()
        weight.data = weight.data
        weight.data = value.clone()
        assert torch.equal(weight.dequantize(), value)
        changed = sct.quantize_(nn.Linear(32, 24), config).weight
        product = torch.nn.functional.linear(torch.ones(1, 32), weight)
        weight.data = changed.data
        assert torch.equal(weight.dequantize(), changed.dequantize())
        assert not torch.equal(torch.nn.functional.linear(torch.ones(1, 32), weight), product)
        weight.data = other.data.to(torch.bfloat16)
        assert weight.dtype == weight.dequantize().dtype == torch.bfloat16

    assert_each([WeightOnly(), WeightOnly("nvfp4"), Dynamic("mxfp8")], check)


def test__parts__are_copied_into_plain_tensors():
    buffer = torch.zeros(24, 32)
    buffer[:2] = layer().weight[:2]
    buffer[2:] = layer().weight[2:]
    assert torch.equal(buffer, layer().weight.dequantize())


@pytest.mark.parametrize("mode", MODES)
def test__a_part__reads_as_a_plain_tensor(mode):
    weight, x = layer().weight, torch.randn(3, 32)
    with mode():
        part, wanted = weight[:4], weight.dequantize()[:4]
        assert isinstance(part, torch.Tensor)
        for made, plain in (
            (part + 1, wanted + 1),
            (part.clone(), wanted),
            (part.clone().zero_(), torch.zeros(4, 32)),
            (x @ part.T, x @ wanted.T),
            (torch.cat([part, part]), torch.cat([wanted, wanted])),
            (copy.deepcopy(part), wanted),
            (torch.nn.functional.linear(part, weight), None),
        ):
            assert type(made) is torch.Tensor
            assert plain is None or torch.equal(made, plain)
        assert torch.equal(torch.zeros(4, 32).copy_(part).add_(part), 2 * wanted)
    kept = io.BytesIO()
    torch.save(part, kept)
    kept.seek(0)
    assert torch.equal(torch.load(kept), wanted)
    assert type(pickle.loads(pickle.dumps(part))) is torch.Tensor
    codes = sct.formats.encode(part, sct.formats.E4M3FN)
    assert torch.equal(
        codes.view(torch.uint8),
        sct.formats.encode(wanted, sct.formats.E4M3FN).view(torch.uint8),
    )
    assert torch.equal(sct.scaled(part).dequantize(), wanted)


def test__compiled_code__reads_parts_as_eager_code_does():
    class Halves(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = layer()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            a, b = self.inner.weight.chunk(2)
            return x @ a.T + x @ b.T + self.inner.weight[0].sum()

    model, x = Halves(), torch.randn(3, 32)
    with torch.no_grad():
        compiled = torch.compile(model, fullgraph=True)(x)
    torch.testing.assert_close(compiled, model(x).detach())


def test__a_gradient__cannot_be_required__and_the_error_names_what_trains():
    model = layer()

    def assign():
        model.weight.requires_grad = True

    for require in (
        assign,
        model.requires_grad_,
        model.weight.requires_grad_,
    ):
        with pytest.raises(UnsupportedError, match=r"train=True.*filter_fn"):
            require()
    model.requires_grad_(False)
    model.weight.requires_grad = False
    assert isinstance(nn.Parameter(model.weight, requires_grad=False), QuantizedTensor)


def test__two_configs_for_one_weight__are_an_error_that_names_both_modules():
    model = nn.ModuleDict({"a": nn.Linear(32, 32), "b": nn.Linear(32, 32), "c": nn.Linear(32, 32)})
    model["c"].weight = model["a"].weight
    plan = {"a": WeightOnly("int8"), "c": WeightOnly("nvfp4"), "*": WeightOnly()}
    with pytest.raises(sct.errors.QuantizationError, match=r"a\.weight and c\.weight are one") as e:
        sct.quantize_(model, plan)
    assert "int8" in str(e.value)
    assert "e2m1fn" in str(e.value)
    assert not any(isinstance(p, QuantizedTensor) for p in model.parameters())
    sct.quantize_(model, plan | {"c": WeightOnly("int8")})
    assert model["c"].weight is model["a"].weight
    assert model["a"].weight.config == WeightOnly("int8")
