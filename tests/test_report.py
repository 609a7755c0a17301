"""report: every operator by module, its rule, its range; nothing changed by looking."""

import pytest
import torch
from torch import Tensor, nn

import scaledtensor as sct
from scaledtensor.errors import MissingRuleWarning, ModelError


@torch.library.custom_op("scaledtensor_test::odd", mutates_args=())
def odd(x: Tensor) -> Tensor:
    return x.clone()


class Odd(nn.Module):
    """An operator that has no rule beside one that has."""

    def forward(self, x: Tensor) -> Tensor:
        return x + odd(x.detach())


def model() -> nn.Module:
    torch.manual_seed(0)
    return sct.scale_model(
        nn.Sequential(
            nn.Linear(16, 32), nn.GELU(), nn.Sequential(nn.LayerNorm(32)), nn.Linear(32, 8)
        )
    )


def test__rows__name_module_operator_and_rule_in_both_passes():
    found = sct.report(model(), torch.randn(64, 16))
    rows = {(r.module, r.op, r.backward): r for r in found.rows}
    assert rows["0", "aten.mm.default", False].rule == "matmul"
    assert rows["1", "aten.gelu.default", False].hits == 1
    assert rows["2.0", "aten.native_layer_norm.default", False].in_range
    assert rows["1", "aten.gelu_backward.default", True].rule == "activation"
    assert rows["0", "scaledtensor.to_format.default", False].elements == 64 * 16 + 16 * 32
    assert found.missing == []
    assert found.out_of_range == []


def test__an_operator_without_a_rule__is_listed():
    with pytest.warns(MissingRuleWarning):
        found = sct.report(nn.Sequential(model(), Odd()), torch.randn(4, 16))
    assert found.missing == ["scaledtensor_test.odd.default"]
    assert "without a rule: " in str(found)
    assert "NONE" in str(found)


def test__range_and_shares__are_measured():
    net = model()
    with torch.no_grad():  # under a scale of 1: far out of range, and beyond E4M3
        net[0].weight.qdata.mul_(2.0**12)
        net[3].weight.qdata.mul_(2.0**-12)
    found = sct.report(net, torch.randn(64, 16))
    rows = {(r.module, r.op, r.backward): r for r in found.rows}
    assert rows["0", "scaledtensor.to_format.default", False].saturated > 0.1
    assert rows["3", "scaledtensor.to_format.default", False].underflowed > 0.1
    assert rows["0", "aten.mm.default", False] in found.out_of_range
    assert "*" in str(found)


def test__memory_that_nothing_was_written_to__has_no_range():
    class Padded(nn.Module):
        def forward(self, x):
            room = x.new_empty(x.shape[0], x.shape[1] + 1)
            room.qdata.fill_(1e6)  # as fresh memory may be
            return torch.cat((x, room.zero_()), 1)

    found = sct.report(nn.Sequential(model(), Padded()), torch.randn(4, 16))
    (row,) = (r for r in found.rows if r.op == "aten.new_empty.default")
    assert row.hits == 1
    assert row.in_range


def test__looking__changes_nothing():
    net = nn.Sequential(model(), nn.Dropout(0.5))
    net.register_buffer("steps", torch.zeros(()))
    net.register_forward_hook(lambda m, i, o: m.steps.add_(1) and None)
    before = {k: v.clone() for k, v in net.state_dict().items()}
    random = torch.random.get_rng_state()
    sct.report(net, torch.randn(4, 16, generator=torch.Generator().manual_seed(0)))
    assert torch.equal(torch.random.get_rng_state(), random)
    assert all(p.grad is None for p in net.parameters())
    for name, value in net.state_dict().items():
        assert torch.equal(torch.as_tensor(value.tolist()), torch.as_tensor(before[name].tolist()))
    assert sct.ops.observe.observers == []


class WithLoss(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = model()

    def forward(self, x: Tensor, kind: str) -> object:
        y = self.inner(x)
        loss = y.square().mean()
        return {"tuple": (y, loss), "dict": {"out": y, "loss": loss}, "plain": y.detach()}[kind]


class GivesItsParameter(nn.Module):
    """As DeBERTa gives its layers a table of positions."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(16))
        self.norm = nn.LayerNorm(16)
        self.unused = nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.norm(self.table)


def test__a_parameter_given_to_a_module__is_no_obstacle():
    net = sct.scale_model(GivesItsParameter())
    kept = net.table.grad = sct.scaled(torch.ones(16))
    x = torch.randn(4, 16, requires_grad=True)
    rows = sct.report(net, x).rows
    assert any(r.op == "aten.native_layer_norm_backward.default" and r.backward for r in rows)
    assert net.table.grad is kept
    assert x.grad is None


def test__an_optimizer_in_the_backward_pass__does_not_step():
    net = model()
    before = net[0].weight.dequantize()

    def step(p: Tensor) -> None:
        raise AssertionError("accumulated")

    net[0].weight.register_post_accumulate_grad_hook(step)
    assert sct.report(net, torch.randn(4, 16)).rows
    assert torch.equal(net[0].weight.dequantize(), before)


@pytest.mark.parametrize("kind", ["tuple", "dict"])
def test__the_backward_pass__starts_from_a_loss_where_there_is_one(kind):
    found = sct.report(WithLoss(), torch.randn(4, 16), kind=kind)
    assert any(r.backward and "mm" in r.op for r in found.rows)


def test__models_that_cannot_be_looked_at__say_why():
    with pytest.raises(ModelError, match="scale_model"):
        sct.report(nn.Linear(2, 2), torch.randn(2, 2))
    with pytest.raises(ModelError, match="requires a gradient"):
        sct.report(WithLoss(), torch.randn(4, 16), kind="plain")


def test__casts_under_a_measured_scale__saturate_nothing_and_are_compared_in_their_own_units():
    net = nn.Sequential(nn.Linear(16, 32), nn.Linear(32, 8))
    found = sct.report(sct.scale_model(net, "current"), torch.randn(64, 16))
    rows = {(r.module, r.op, r.backward): r for r in found.rows}
    cast = rows["0", "scaledtensor.quantize.default", False]
    assert cast.elements == 64 * 16 + 16 * 32
    assert cast.saturated == 0
    assert cast.in_range
    net = nn.Sequential(nn.Linear(16, 32))
    small = sct.recipes.Constant(input_exponent=-12)
    found = sct.report(sct.scale_model(net, small), torch.randn(64, 16))
    rows = {(r.module, r.op, r.backward): r for r in found.rows}
    assert rows["0", "scaledtensor.quantize.default", False].saturated > 0.5
