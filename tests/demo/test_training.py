from dataclasses import replace

import pytest
import torch
from torch import nn

from scaledtensor.apps import precision
from scaledtensor.apps.gpt import GPTConfig
from scaledtensor.apps.precision import UnscaledFP8Linear
from scaledtensor.apps.text import Corpus, load
from scaledtensor.apps.training import Settings, train_run
from scaledtensor.errors import RecipeError
from scaledtensor.formats import E4M3FN, E5M2, fake_quantize

CPU = torch.device("cpu")
SMALL = Settings(batch_size=4, loss_multiplier=2.0**-18)


@pytest.fixture
def corpus(words) -> Corpus:
    return load(words, block_size=8)


def train(corpus, name, settings=SMALL, steps=5, **options):
    config = GPTConfig(len(corpus.vocabulary), block_size=8, n_layer=1, n_head=2, n_embd=16)
    how = precision.get(name)
    return train_run(config, how, corpus, settings, steps=steps, device=CPU, **options)


@pytest.mark.parametrize("name", ["fp32", "bf16", "fp8", "unit"])
def test__run__repeats_to_the_last_bit_and_learns(corpus, name):
    settings = Settings(batch_size=16, learning_rate=1e-2)
    first, second = (train(corpus, name, settings, steps=30) for _ in range(2))
    assert first.identical_to(second)
    assert first.losses[-1] < first.losses[0] - 0.3
    assert first.held_out_loss < first.losses[0]


@pytest.mark.parametrize("name", ["fp32", "bf16", "unit"])
def test__power_of_two_on_the_loss__changes_no_bit_where_no_range_is_left(corpus, name):
    small = train(corpus, name)
    assert small.identical_to(train(corpus, name, replace(SMALL, loss_multiplier=1.0)))


def test__power_of_two_on_the_loss__silences_fp8_without_scales(corpus):
    small = train(corpus, "fp8")
    assert not small.identical_to(train(corpus, "fp8", replace(SMALL, loss_multiplier=1.0)))


def test__identical__sees_one_bit(corpus):
    run = train(corpus, "fp32")
    name, parameter = next(iter(run.parameters.items()))
    changed = parameter.clone()
    changed[0, 0] = changed[0, 0].nextafter(torch.tensor(torch.inf))
    assert not run.identical_to(replace(run, parameters={**run.parameters, name: changed}))
    assert not run.identical_to(replace(run, losses=[*run.losses[:-1], run.losses[-1] + 1e-6]))


def test__gradients__are_those_of_every_linear_and_scale_with_the_loss(corpus):
    run = train(corpus, "fp32", gradients_at=(1.0, 2.0**-18))
    linears = (3 + 1 + 4 + 1) * 16 + len(corpus.vocabulary)  # qkv, proj, mlp up and down, head
    assert run.gradients[1.0].numel() == 4 * 8 * linears
    assert torch.equal(run.gradients[1.0] * 2.0**-18, run.gradients[2.0**-18])


def test__gradients__of_a_scaled_model_are_its_stored_elements(corpus):
    stored = train(corpus, "unit", gradients_at=(1.0, 2.0**-18)).gradients
    assert torch.equal(stored[1.0], stored[2.0**-18])
    assert 0.25 < stored[1.0].square().mean().sqrt() < 4


def test__unscaled_linear__is_the_fp8_products_of_its_cast_operands():
    torch.manual_seed(0)
    layer, x = nn.Linear(16, 8), (1000 * torch.randn(5, 3, 16)).requires_grad_()
    model = nn.Sequential(layer)
    precision.get("fp8").prepare(model)
    assert type(layer) is UnscaledFP8Linear
    y = model(x)
    grad = (1e-4 * torch.randn(5, 3, 8)).to(y.dtype)
    y.backward(grad)

    cast_x, cast_w = fake_quantize(x.detach(), E4M3FN), fake_quantize(layer.weight.detach(), E4M3FN)
    cast_g = fake_quantize(grad.float(), E5M2)
    assert cast_x.abs().max() == 448  # saturated, not NaN
    bf16 = {"rtol": 2**-7, "atol": 1e-6}
    torch.testing.assert_close(y.float(), cast_x @ cast_w.T + layer.bias, rtol=2**-7, atol=0.1)
    torch.testing.assert_close(x.grad, cast_g @ cast_w, **bf16)
    expected = cast_g.flatten(0, 1).T @ cast_x.flatten(0, 1)
    torch.testing.assert_close(layer.weight.grad, expected, rtol=2**-7, atol=1e-4)
    torch.testing.assert_close(layer.bias.grad, grad.float().sum((0, 1)), **bf16)


def test__unknown_precision__names_the_known():
    with pytest.raises(RecipeError, match=r"'int3'.*unit.*fp32, bf16, fp8"):
        precision.get("int3")
