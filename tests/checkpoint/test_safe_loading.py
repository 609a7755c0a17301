"""`torch.load(weights_only=True)`, the default, reads state dicts with every class.

tests/distributed/test_checkpoint_ranks.py does the same with shards.
"""

import pytest
import torch
from tensors import bits, gaussian, saved_and_loaded
from torch import nn

import scaledtensor as sct
from scaledtensor.formats import FORMATS
from scaledtensor.recipes.base import RECIPES
from scaledtensor.tensors.storable import is_storable


@pytest.mark.parametrize("fmt", [f for f in FORMATS.values() if f.has_zero], ids=str)
def test__every_format__is_read_safely(fmt):
    values = gaussian(4, 64)
    made = {"blocks": sct.scaled(values, fmt, "amax", sct.PerBlock((1, 32)))}
    if is_storable(fmt):
        made["whole"] = sct.scaled(values, fmt)
    found = saved_and_loaded(made)
    for name, x in made.items():
        assert found[name].__tensor_flatten__() == x.__tensor_flatten__()
        assert bits(found[name]) == bits(x)


@pytest.mark.parametrize("recipe", sorted(RECIPES))
def test__a_model_and_its_optimizer__are_read_safely(recipe):
    torch.manual_seed(0)
    model = sct.scale_model(nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)), recipe)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(16, 64)).square().mean().backward()
    optimizer.step()
    found = saved_and_loaded({"model": model.state_dict(), "optimizer": optimizer.state_dict()})
    for name, x in model.state_dict().items():
        if isinstance(x, sct.ScaledTensor):
            assert found["model"][name].recipe == x.recipe
            assert bits(found["model"][name]) == bits(x)
    for i, state in enumerate(optimizer.state.values()):
        assert bits(found["optimizer"]["state"][i]["exp_avg"]) == bits(state["exp_avg"])
