"""Files that version 0.1 wrote, whose pickles name modules that have moved since."""

from pathlib import Path

import pytest
import torch

import scaledtensor as sct

HERE = Path(__file__).parent


@pytest.mark.parametrize("weights_only", [True, False])
def test__tensors_of_version_0_1__load_to_the_bit(weights_only):
    found = torch.load(HERE / "version_0_1.pt", weights_only=weights_only)
    objects, values = found["objects"], found["values"]
    assert type(objects["coded"]) is sct.CodedTensor
    assert objects["recipe"] == sct.recipes.get("unit")
    state = objects["optimizer"]["state"][0]["exp_avg"]
    for tensor, name in (
        (objects["scaled"], "scaled"),
        (objects["coded"], "coded"),
        (objects["model"]["0.weight"], "weight"),
        (state, "exp_avg"),
    ):
        assert torch.equal(tensor.dequantize(), values[name]), name


def test__a_module_of_version_0_1__loads_and_trains_on():
    found = torch.load(HERE / "version_0_1_module.pt", weights_only=False)
    model = found["module"]
    optimizer = sct.optim.AdamW(model.parameters(), lr=1e-3, state_format="e4m3fn")
    optimizer.load_state_dict(found["objects"]["optimizer"])
    before = model[0].weight.dequantize().clone()
    model(torch.ones(2, 32)).sum().backward()
    optimizer.step()
    assert not torch.equal(model[0].weight.dequantize(), before)
    assert "delayed" in str(model).lower()


def test__the_earlier_names__are_the_present_modules():
    from scaledtensor import interpose
    from scaledtensor.models import interpose as present

    assert interpose.remove is present.remove
    assert sct.interpose.remove is present.remove
    with pytest.raises(AttributeError, match="nothing_of_that_name"):
        interpose.nothing_of_that_name  # noqa: B018 - the access is the test
