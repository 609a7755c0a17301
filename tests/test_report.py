"""`report` lists every operator by module, with its rule and its range, and changes nothing."""

import json
import re
import runpy
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
from tensors import gaussian
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

import scaledtensor as sct
from scaledtensor.errors import MissingRuleWarning, ModelError


@torch.library.custom_op("scaledtensor_test::odd", mutates_args=())
def odd(x: Tensor) -> Tensor:
    return x.clone()


class Odd(nn.Module):
    """A module with an operator without a rule, beside one with a rule."""

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
    rows = {(r.module, r.op, r.backward): r for r in found.rows()}
    assert rows["0", "aten.mm.default", False].rule == "matmul"
    assert rows["1", "aten.gelu.default", False].hits == 1
    assert rows["2.0", "aten.native_layer_norm.default", False].in_range
    assert rows["1", "aten.gelu_backward.default", True].rule == "activation"
    cast = {r.operand: r for r in found.rows() if r.module == "0" and r.format == "e4m3fn"}
    assert (cast["input"].elements, cast["weight"].elements) == (64 * 16, 16 * 32)
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
    with torch.no_grad():  # The scale is 1: the values are far out of range, and beyond E4M3.
        net[0].weight.qdata.mul_(2.0**12)
        net[3].weight.qdata.mul_(2.0**-12)
    found = sct.report(net, torch.randn(64, 16))
    rows = {(r.module, r.operand): r for r in found.where(operator="*to_format*").rows()}
    assert rows["0", "weight"].saturated > 0.1
    assert rows["0", "input"].saturated == 0
    assert rows["3", "weight"].underflowed > 0.1
    (product,) = (r for r in found.where("0", "aten.mm*").rows() if not r.backward)
    assert product in found.out_of_range
    assert "*" in str(found)


def test__memory_that_nothing_was_written_to__has_no_range():
    class Padded(nn.Module):
        def forward(self, x):
            room = x.new_empty(x.shape[0], x.shape[1] + 1)
            room.qdata.fill_(1e6)  # Fresh memory may look like this.
            return torch.cat((x, room.zero_()), 1)

    found = sct.report(nn.Sequential(model(), Padded()), torch.randn(4, 16))
    (row,) = (r for r in found.rows() if r.op == "aten.new_empty.default")
    assert row.hits == 1
    assert row.in_range


def test__looking__changes_nothing():
    net = nn.Sequential(model(), nn.Dropout(0.5))
    net.register_buffer("steps", torch.zeros(()))
    net.register_forward_hook(lambda m, i, o: m.steps.add_(1) and None)
    before = {k: v.clone() for k, v in net.state_dict().items()}
    random = torch.random.get_rng_state()
    sct.report(net, gaussian(4, 16))
    assert torch.equal(torch.random.get_rng_state(), random)
    assert all(p.grad is None for p in net.parameters())
    for name, value in net.state_dict().items():
        assert torch.equal(torch.as_tensor(value.tolist()), torch.as_tensor(before[name].tolist()))
    assert sct.ops.registry.observers == []


class WithLoss(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = model()

    def forward(self, x: Tensor, kind: str) -> object:
        y = self.inner(x)
        loss = y.square().mean()
        return {"tuple": (y, loss), "dict": {"out": y, "loss": loss}, "plain": y.detach()}[kind]


class GivesItsParameter(nn.Module):
    """The layers get a table of positions, as in DeBERTa."""

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
    rows = sct.report(net, x).rows()
    assert any(r.op == "aten.native_layer_norm_backward.default" and r.backward for r in rows)
    assert net.table.grad is kept
    assert x.grad is None


def test__an_optimizer_in_the_backward_pass__does_not_step():
    net = model()
    before = net[0].weight.dequantize()

    def step(p: Tensor) -> None:
        raise AssertionError("accumulated")

    net[0].weight.register_post_accumulate_grad_hook(step)
    assert sct.report(net, torch.randn(4, 16)).rows()
    assert torch.equal(net[0].weight.dequantize(), before)


@pytest.mark.parametrize("kind", ["tuple", "dict"])
def test__the_backward_pass__starts_from_a_loss_where_there_is_one(kind):
    found = sct.report(WithLoss(), torch.randn(4, 16), kind=kind)
    assert any(r.backward and "mm" in r.op for r in found.rows())


def test__models_that_cannot_be_looked_at__say_why():
    with pytest.raises(ModelError, match="scale_model"):
        sct.report(nn.Linear(2, 2), torch.randn(2, 2))
    with pytest.raises(ModelError, match="requires a gradient"):
        sct.report(WithLoss(), torch.randn(4, 16), kind="plain")


def test__casts_under_a_measured_scale__saturate_nothing_and_are_compared_in_their_own_units():
    net = nn.Sequential(nn.Linear(16, 32), nn.Linear(32, 8))
    found = sct.report(sct.scale_model(net, "current"), torch.randn(64, 16))
    casts = found.where("0", "scaledtensor.quantize.default").rows()
    elements = {r.operand: r.elements for r in casts}
    assert elements == {"input": 64 * 16, "weight": 16 * 32, "gradient": 64 * 32}
    assert all(r.saturated <= 1e-4 and r.in_range and not r.problem for r in casts)
    net = nn.Sequential(nn.Linear(16, 32))
    small = sct.recipes.Constant(input_exponent=-12)
    found = sct.report(sct.scale_model(net, small), torch.randn(64, 16))
    (worst, *_) = found.findings
    assert (worst.problem, worst.module) == ("saturated", "0")
    assert worst.size > 1.5
    assert "exponent" in worst.advice


# --- the module of a row of the backward pass --------------------------------------------------


class Block(nn.Module):
    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


class Blocks(nn.Module):
    """Two blocks between an embedding, with an input without gradient, and a head. The head runs
    last, so its result is the model's."""

    def __init__(self, layers: int = 2) -> None:
        super().__init__()
        self.embedding = nn.Embedding(10, 16)
        self.blocks = nn.ModuleList(Block() for _ in range(layers))
        self.head = nn.Linear(16, 10, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def blocks(layers: int = 2, **options: object) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    return sct.scale_model(Blocks(layers), **options), torch.randint(0, 10, (4, 8))


def test__backward_rows__belong_to_the_module_whose_forward_pass_made_them():
    found = sct.report(*blocks())
    by_module: dict[str, set[str]] = {}
    for r in found.rows():
        if r.backward and r.rule not in ("views", "casts"):
            by_module.setdefault(r.module, set()).add(r.op)
    linear = {"aten.mm.default", "aten.sum.dim_IntList"}
    block = {
        # These are the two ways back from the sum.
        "": {"aten.gelu_backward.default", "aten.add.Tensor"},
        ".norm": {"aten.native_layer_norm_backward.default"},
        ".up": linear,
        ".down": linear,
    }
    assert by_module == {
        "embedding": {"aten.embedding_dense_backward.default"},
        **{f"blocks.{i}{name}": ops for i in (0, 1) for name, ops in block.items()},
        "head": {"aten.mm.default"},
    }


class Aside(nn.Module):
    """A module that keeps a loss without returning it, and multiplies by an autograd.Function."""

    class Twice(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 2

        @staticmethod
        def backward(ctx, gradient):
            return gradient.neg() * -2

    def forward(self, x: Tensor) -> Tensor:
        self.loss = x.sigmoid().sum()
        return self.Twice.apply(x)


def test__what_a_module_keeps_or_computes_by_itself__is_its_own_in_the_backward_pass():
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.aside, self.last = nn.Linear(16, 16), Aside(), nn.Linear(16, 16)

        def forward(self, x: Tensor) -> Tensor:
            return self.last(self.aside(self.inner(x)).tanh()).sum() + self.aside.loss

    found = sct.report(sct.scale_model(Net()), torch.randn(4, 16))
    modules = {r.op: r.module for r in found.rows() if r.backward}
    assert modules["aten.neg.default"] == "aside"
    assert modules["aten.sigmoid_backward.default"] == "aside"
    assert modules["aten.tanh_backward.default"] == ""


def test__what_a_checkpoint_runs_again__belongs_to_its_module():
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.block = nn.Linear(16, 16), Block()

        def forward(self, x: Tensor) -> Tensor:
            run = torch.utils.checkpoint.checkpoint
            return run(self.block, self.first(x), use_reentrant=False)

    found = sct.report(sct.scale_model(Net()), torch.randn(4, 16))
    again = [r for r in found.rows() if r.backward and r.op == "aten.native_layer_norm.default"]
    assert [r.module for r in again] == ["block.norm"]
    assert {r.module for r in found.where(operator="*gelu_backward*").rows()} == {"block"}


# --- how much is covered -----------------------------------------------------------------------


def test__covered_flops__are_those_that_torch_counts():
    net, tokens = blocks()
    found = sct.report(net, tokens)
    with FlopCounterMode(display=False) as counter:
        Blocks()(tokens).sum().backward()
    assert found.coverage.flops == counter.get_total_flops()
    assert found.coverage.products == {"recipe": 1, "rule": 0, "fallback": 0, "plain": 0}
    assert sum(found.coverage.elementwise.values()) == pytest.approx(1)
    assert 0 < found.coverage.elementwise["recipe"] < 0.5
    assert not found.findings


@pytest.mark.parametrize("recipe", ["mxfp8", "current"])
def test__products_of_other_recipes__count_the_same(recipe):
    net = nn.Sequential(nn.Linear(32, 64), nn.Linear(64, 32))
    x = torch.randn(32, 32)
    with FlopCounterMode(display=False) as counter:
        net(x).sum().backward()
    found = sct.report(sct.scale_model(net, recipe), x).coverage
    assert (found.flops, found.products["recipe"]) == (counter.get_total_flops(), 1)


def test__plain_layers__are_counted_told_and_taken_in_by_the_suggestion():
    chosen = {"filter_fn": lambda module, name: name not in ("0", "3")}
    net = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 32), nn.Linear(32, 8))
    found = sct.report(sct.scale_model(net, **chosen), torch.randn(64, 16))
    parts = found.coverage.products
    assert min(parts["plain"], parts["rule"], parts["recipe"]) > 0.1
    assert {(f.module, f.problem) for f in found.findings} == {("0", "excluded"), ("3", "excluded")}
    (wider,) = (s for s in found.suggestions if s.text.startswith("wrap"))
    assert wider.recipe == sct.recipes.Unit()
    again = sct.scale_model(sct.unscale_model(net), wider.recipe)
    assert sct.report(again, torch.randn(64, 16)).coverage.products["recipe"] == 1


def test__the_fallback__has_its_share():
    sct.ops.registry.missing.clear()
    with pytest.warns(MissingRuleWarning):
        found = sct.report(nn.Sequential(model(), Odd()), torch.randn(4, 16))
    assert found.coverage.elementwise["fallback"] > 0
    (place,) = (f for f in found.findings if f.problem == "fallback")
    assert (place.module, place.operators) == ("1", ("scaledtensor_test.odd.default",))
    assert "scaledtensor.ops.rule" in place.advice


# --- what to do --------------------------------------------------------------------------------


def too_large() -> Tensor:
    """The input has a scale that its elements have left."""
    x = gaussian(64, 16)
    x = sct.scaled(x, recipe=sct.recipes.Unit())
    x.qdata.mul_(2.0**12)
    return x


def test__an_input_that_saturates__is_measured_by_the_suggested_recipe():
    net = model()
    found = sct.report(net, too_large())
    assert found.findings[0].problem == "saturated"
    assert "'0': Current()" in found.findings[0].advice
    (suggestion,) = (s for s in found.suggestions if s.text.startswith("measure"))
    assert [pattern for pattern, _ in suggestion.recipe.overrides] == ["0"]
    assert "by the amax 0%" in suggestion.figures
    again = sct.report(sct.scale_model(sct.unscale_model(net), suggestion.recipe), too_large())
    assert not again.where(problem="saturated").rows()


def test__a_weight_that_saturates__is_cured_by_the_suggested_rebalance():
    net, x = model(), torch.randn(64, 16)
    net[0].weight.detach().qdata.mul_(2.0**12)
    found = sct.report(net, x)
    assert found.findings[0].advice.startswith("sct.rebalance(model)")
    assert [s.recipe for s in found.suggestions if "rebalance" in s.text] == [None]
    sct.rebalance(net)
    assert not sct.report(net, x).where(problem="saturated").rows()


def test__gradients__are_offered_a_third_mantissa_bit_where_e4m3fn_holds_them():
    net, x = model(), torch.randn(64, 16)
    (finer,) = sct.report(net, x).suggestions
    assert finer.recipe == sct.recipes.Unit(gradient="e4m3fn")
    again = sct.report(sct.scale_model(sct.unscale_model(net), finer.recipe), x)
    casts = [r for r in again.rows() if r.operand == "gradient"]
    assert {r.format for r in casts} == {"e4m3fn"}
    assert not again.where(problem="*").rows()


def test__an_amax_that_finds_nothing__is_offered_the_scales_of_the_rules():
    net = nn.Sequential(nn.Linear(16, 32), nn.Linear(32, 8))
    found = sct.report(sct.scale_model(net, "current"), torch.randn(64, 16))
    (unmeasured,) = found.suggestions
    assert unmeasured.recipe == sct.recipes.Unit(gradient="e4m3fn")


# --- folded, filtered, as data -----------------------------------------------------------------


class Experts(nn.Module):
    """A module of numbered layers with numbered parts."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(16, 16) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        return x + sum(expert(x) for expert in self.experts)


def test__layers_with_the_same_rows__are_one_line_with_a_count():
    net = sct.scale_model(nn.Sequential(nn.Linear(16, 16), *(Experts() for _ in range(4))))
    lines = str(sct.report(net, torch.randn(8, 16))).splitlines()
    _, line = (x for x in lines if "aten.mm" in x and "forward" in x)
    assert line.startswith("1..4.experts.0..2 (x 12)  aten.mm.default")
    assert re.search(r"matmul +12 +[\d.]+\.\.[\d.]+$", line)


def test__a_layer_that_differs__stands_alone():
    net, tokens = blocks(4, filter_fn=lambda module, name: name != "blocks.2.up")
    text = str(sct.report(net, tokens))
    assert "blocks.{0,1,3}.up (x 3)" in text
    assert "1. blocks.2.up, excluded" in text


def test__parts_of_a_report__are_chosen_by_module_operator_and_problem():
    net, tokens = blocks(2, filter_fn=lambda module, name: name != "head")
    found = sct.report(net, tokens)
    part = found.where("blocks.?.up", "aten.mm*")
    assert {(r.module, r.op) for r in part.rows()} == {
        (f"blocks.{i}.up", "aten.mm.default") for i in (0, 1)
    }
    assert part.coverage.products["recipe"] == 1 > found.coverage.products["recipe"]
    assert part.suggestions == found.suggestions
    excluded = found.where(problem="excluded")
    assert {r.module for r in excluded.rows()} == {"head"}
    assert excluded.where("blocks.*").rows() == []
    assert "head" in str(excluded)
    with pytest.raises(ModelError, match="'saturated'"):
        found.where(problem="large")


def test__a_report__is_data():
    net, tokens = blocks(2, filter_fn=lambda module, name: name != "head")
    found = sct.report(net, tokens)
    told = json.loads(json.dumps(found.to_dict(), allow_nan=False))
    assert told["rows"] == [asdict(r) for r in found.rows()]
    assert all(isinstance(v, int | float | str | None) for r in told["rows"] for v in r.values())
    assert told["coverage"]["flops"] == found.coverage.flops
    assert told["findings"][0]["module"] == "head"
    recipe = sct.recipes.Recipe.from_json(told["suggestions"][0]["recipe"])
    assert recipe == found.suggestions[0].recipe
    pandas = pytest.importorskip("pandas")
    frame = pandas.DataFrame(found.rows())
    assert set(frame.columns) == set(told["rows"][0])
    assert frame.flops.sum() == found.coverage.flops


def test__the_page__shows_what_a_report_prints():
    docs = Path(__file__).parent.parent / "docs"
    script = runpy.run_path(str(docs / "write_report.py"))
    try:
        written = script["page"](script["printed"]())
    finally:  # Only torch still knows the page's operator.
        sct.ops.registry.missing.clear()

    # Numbers, and therefore the widths of columns, differ by machine.
    def words(text: str) -> list[str]:
        return re.sub(r"[\d.]+(e[+-]\d+)?", "#", text.replace("-", " ")).split()

    command = "python docs/write_report.py > docs/report.md"
    assert words((docs / "report.md").read_text()) == words(written), command
