"""`analyse_module` lists code with scales beside it."""

import re

import pytest
import torch
from torch import Tensor, nn
from tracked_models import Awkward, Stack

import scaledtensor as sct
from scaledtensor.errors import ModelError
from scaledtensor.inspect import analyse_module, tracking


def listed(text: str, code: str) -> tuple[str, str]:
    """The forward and backward scale stand beside the line of code."""
    (line,) = (line for line in text.splitlines() if line.strip().startswith(code))
    found = re.search(r"\(-> (\S+), <- (\S+)\)$", line)
    assert found, line
    return found[1], found[2]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        """This function is not listed."""
        h = self.fc(x)
        return h.tanh() * 2


def test__lines__have_the_scale_of_what_they_computed():
    model, x = Block(), torch.randn(64, 8, requires_grad=True)
    gradient = torch.randn(64, 8)
    text = analyse_module(model, x, gradient)
    with tracking(model) as scales:
        model(x).backward(gradient)
    metrics = {n.meta["clean_name"]: n.meta.get("metrics") for n in scales.scales_graph().nodes}
    for code, name in (
        ("h = self.fc(x)", "linear"),
        ("return h.tanh() * 2", "mul"),
        ("# fc.weight", "fc_weight"),
        ("def forward(self, x: Tensor)", "x"),
    ):
        data = metrics[name]
        assert listed(text, code) == (f"{data.fwd.std:.3g}", f"{data.bwd.std:.3g}")
    assert "Not listed" not in text


def test__classes__are_listed_once_with_the_range_over_their_modules():
    text = analyse_module(Stack(), torch.randn(8, 16))
    assert text.count("def forward") == 2
    assert "tracked_models.Mlp, 2 of it: blocks.0, blocks.1" in text
    assert ".." in listed(text, "h = self.fc1(x)")[0]
    assert ".." not in listed(text, "x = block(x)")[0]
    assert "torch.nn" not in text
    assert "return F.linear(" in analyse_module(Stack(), torch.randn(8, 16), library=True)


def test__another_metric__can_be_shown():
    text = analyse_module(Block(), torch.ones(4, 8), metric="numel")
    assert listed(text, "h = self.fc(x)") == ("32", "32")
    with pytest.raises(ModelError, match="metric is one of mean_abs"):
        analyse_module(Block(), torch.ones(4, 8), metric="median")


@pytest.mark.parametrize("build", [Stack, Awkward])
def test__looking__changes_nothing(build):
    model = build()
    shape = (8, 16) if build is Stack else (4, 5, 8)
    x = torch.randn(shape, requires_grad=True)
    model(x).backward()
    before = [p.grad.clone() for p in model.parameters()], x.grad.clone()
    state = torch.get_rng_state()
    analyse_module(model, x)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(map(torch.equal, before[0], (p.grad for p in model.parameters())))
    assert torch.equal(before[1], x.grad)


def test__a_scaled_model__and_a_compiled_one_are_listed():
    text = analyse_module(sct.scale_model(Stack()), torch.randn(64, 16))
    assert listed(text, "x = block(x)")
    assert listed(analyse_module(torch.compile(Block()), torch.ones(4, 8)), "h = self.fc(x)")


def test__an_instance_that_wraps_its_forward__is_listed_by_its_class():
    model = Block()
    own = model.forward
    model.forward = lambda x: own(x) + 0
    assert listed(analyse_module(model, torch.randn(4, 8)), "return h.tanh() * 2")


def test__a_result_without_gradients__is_refused():
    with pytest.raises(ModelError, match="requires a gradient"):
        analyse_module(nn.Flatten(), torch.randn(2, 3))
