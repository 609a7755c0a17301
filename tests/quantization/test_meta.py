"""Quantised models on the meta device, which has shapes and no values."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.testing._internal.two_tensor import TwoTensor

import scaledtensor as sct
from scaledtensor import Dynamic, QuantizedTensor, WeightOnly
from scaledtensor.errors import ModelError, QuantizationError
from scaledtensor.quantization.configs import Config


def network() -> nn.Module:
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Conv1d(5, 6, 3), nn.Flatten(), nn.Linear(42, 32), nn.Linear(32, 8))
    return layers.eval()


@pytest.mark.parametrize(
    "config",
    [
        WeightOnly("int8"),
        WeightOnly("int4", 32),
        WeightOnly("e4m3fn", scale="least_error"),
        WeightOnly("fp8_block"),
        Dynamic("mxfp8"),
        Dynamic("nvfp4"),
    ],
    ids=str,
)
def test__a_model_on_meta__has_shapes_and_takes_codes(config: Config) -> None:
    x = torch.randn(2, 5, 9)
    held = sct.quantize_(network(), config)
    with torch.device("meta"):
        empty = network()
    sct.quantize_(empty, config)
    assert all(p.is_meta for p in empty.parameters())
    assert empty(x.to("meta")).shape == (2, 8)

    assigned = copy.deepcopy(empty)
    assigned.load_state_dict(held.state_dict(), assign=True)
    copied = copy.deepcopy(empty).to_empty(device="cpu")
    copied.load_state_dict(held.state_dict())
    with torch.no_grad():
        for model in (assigned, copied):
            assert isinstance(model[2].weight, QuantizedTensor)
            assert torch.equal(model(x), held(x))
    assert held.to("meta")(x.to("meta")).shape == (2, 8)


def test__training_for_few_bits__runs_on_meta() -> None:
    with torch.device("meta"):
        model = nn.Linear(32, 8)
    sct.quantize_(model, WeightOnly("int4", 32), train=True)
    model(torch.ones(3, 32, device="meta")).sum().backward()
    assert model.weight.grad is not None
    assert model.weight.grad.is_meta


def test__weights_that_are_no_plain_values__are_named() -> None:
    with torch.device("meta"):
        empty = nn.Linear(32, 8)
    batches = [torch.ones(3, 32, device="meta")]
    scripted = torch.jit.script(nn.Sequential(nn.Linear(32, 8)))
    theirs = nn.Sequential(nn.Linear(32, 8))
    weight = theirs[0].weight.detach()
    theirs[0].weight = nn.Parameter(TwoTensor(weight, weight))
    plain = torch.ones(8, 32)
    cases: list[tuple[Callable[[], Any], type[Exception], str]] = [
        (
            lambda: sct.quantize_(empty, sct.Static(), calibration=batches),
            ModelError,
            "weight is on the meta device.* load the weights first",
        ),
        (
            lambda: sct.quantize_(scripted, WeightOnly()),
            ModelError,
            r"0\.weight belongs to a module of torch\.jit\.script.* torch\.export",
        ),
        (
            lambda: sct.quantize_(theirs, WeightOnly()),
            ModelError,
            r"0\.weight is a TwoTensor of torch,.*dequantize",
        ),
        (lambda: QuantizedTensor(plain, requires_grad=False), QuantizationError, "cpu_offload"),
        (lambda: QuantizedTensor(plain, None, WeightOnly()), QuantizationError, "scales"),
    ]
    for call, error, message in cases:
        with pytest.raises(error, match=message):
            call()
