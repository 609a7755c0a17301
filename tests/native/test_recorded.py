"""Loops in C++ write memory that no recording of operators sees, so they do not run under one."""

import pytest
import torch
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx

import scaledtensor as sct
from scaledtensor import Dynamic, Static, WeightOnly, formats, native
from tests.assertions import assert_each

CONFIGS = [
    WeightOnly(),
    WeightOnly("nvfp4"),
    Dynamic(),
    Dynamic("int8"),
    Dynamic("mxfp8"),
    Dynamic("nvfp4"),
    Static(),
]


def inputs(seed: int) -> torch.Tensor:
    return torch.randn(64, 128, generator=torch.Generator().manual_seed(seed)) * (1 + seed)


@pytest.mark.parametrize("gradients", [False, True])
def test__a_graph_of_make_fx__has_the_results_of_eager_code_for_other_inputs(gradients):
    def check(config):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(128, 96), nn.GELU(), nn.Linear(96, 32))
        batches = [inputs(0)] if config.needs_data else None
        sct.quantize_(model, config, calibration=batches)
        with torch.set_grad_enabled(gradients):
            model(inputs(0))  # loads the library
            graph = make_fx(model)(inputs(0))
            assert torch.equal(graph(inputs(3)), model(inputs(3)))

    assert_each(CONFIGS, check)


def test__casts__are_recorded_as_operators():
    def cast(x: torch.Tensor) -> torch.Tensor:
        return formats.decode(formats.encode(x, formats.E4M3FN), formats.E4M3FN)

    def by_blocks(x: torch.Tensor) -> torch.Tensor:
        return formats.dequantize_blocks(
            *formats.quantize_blocks(x, formats.E2M1FN, 32, "e8m0"), formats.E2M1FN, 32
        )

    native.library()
    for function in (cast, by_blocks):
        graph = make_fx(function)(inputs(0))
        assert torch.equal(graph(inputs(3)), function(inputs(3)))


def test__a_scaled_model__is_not_recorded_with_scales_as_constants():
    model = sct.scale_model(nn.Linear(128, 96), "current")
    model(inputs(0))
    with pytest.raises(RuntimeError, match="tracing tensor"):
        make_fx(model)(inputs(0))
