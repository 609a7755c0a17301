"""`torch.load(weights_only=True)`, which is the default, of state dicts with every class.

Of shards: tests/distributed/test_checkpoint_ranks.py."""

import io

import pytest
import torch
from torch import nn

import scaledtensor as sct
from scaledtensor.formats import FORMATS
from scaledtensor.recipes.base import RECIPES
from scaledtensor.storable import is_storable


def again(state):
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def same_bits(x, y):
    return all(
        torch.equal(*(getattr(t, name).reshape(-1).view(torch.uint8) for t in (x, y)))
        for name in x.INNER
    )


@pytest.mark.parametrize("fmt", [f for f in FORMATS.values() if f.has_zero], ids=str)
def test__every_format__is_read_safely(fmt):
    values = torch.randn(4, 64, generator=torch.Generator().manual_seed(0))
    made = {"blocks": sct.scaled(values, fmt, "amax", sct.PerBlock((1, 32)))}
    if is_storable(fmt):
        made["whole"] = sct.scaled(values, fmt)
    found = again(made)
    for name, x in made.items():
        assert found[name].__tensor_flatten__() == x.__tensor_flatten__()
        assert same_bits(found[name], x)


@pytest.mark.parametrize("recipe", sorted(RECIPES))
def test__a_model_and_its_optimizer__are_read_safely(recipe):
    torch.manual_seed(0)
    model = sct.scale_model(nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)), recipe)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(16, 64)).square().mean().backward()
    optimizer.step()
    found = again({"model": model.state_dict(), "optimizer": optimizer.state_dict()})
    for name, x in model.state_dict().items():
        if isinstance(x, sct.ScaledTensor):
            assert found["model"][name].recipe == x.recipe
            assert same_bits(found["model"][name], x)
    for i, state in enumerate(optimizer.state.values()):
        assert same_bits(found["optimizer"]["state"][i]["exp_avg"], state["exp_avg"])
