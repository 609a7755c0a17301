"""In-place writes count: after any of them, autograd refuses the saved tensor, as in torch.

The cases come from the schemas of torch's in-place operators. torch's fused kernels for the CPU
count no write. Here they do, since a backward pass after them would read the new values.
"""

from typing import Any

import pytest
import torch
from assertions import assert_each
from torch import Tensor, nn

import scaledtensor as sct
from scaledtensor.ops.operators import Overload
from scaledtensor.ops.registry import rule_of

aten = torch.ops.aten


def overloads() -> list[Overload]:
    """Return operators that write into their first argument, or into the tensors of a first
    list."""
    found = []
    for name in sorted({n for place in (torch, Tensor) for n in dir(place)}):
        if not name.endswith("_") or name.endswith("__") or not hasattr(aten, name):
            continue
        for key in getattr(aten, name).overloads():
            op = getattr(getattr(aten, name), key)
            first = op._schema.arguments[0] if op._schema.arguments else None
            if first is not None and first.alias_info is not None and first.alias_info.is_write:
                found.append(op)
    return found


LISTS = {"_foreach_", "_fused_", "_amp_foreach_"}
NUMBERS = {"beta1": 0.9, "beta2": 0.99, "eps": 1e-8, "lr": 0.1, "lr_decay": 0.0, "p": 0.5}


def argument(a: Any, i: int, scaled: bool) -> Any:
    """Return some argument of the type in the schema."""
    kind = str(a.type)
    numbers = torch.rand(3, 3, generator=torch.Generator().manual_seed(i)) * 0.5 + 0.25
    made = sct.scaled(numbers) if scaled else numbers
    if a.name in ("state_steps", "found_inf", "inv_scale", "grad_scale"):
        step = torch.ones(())
        return [step] if kind.startswith("List") else step
    if kind == "List[Tensor]":
        return [made]
    if kind == "Tensor":
        return torch.tensor(0.5) if a.name in ("lr", "scalars", "scalar") else made
    if kind in ("number", "float"):
        return NUMBERS.get(a.name, 0.5)
    if kind == "List[number]":
        return [0.5]
    return {"bool": False, "int": 0}[kind]


def given(op: Overload, scaled: bool) -> tuple[list[Any], dict[str, Any]]:
    args: list[Any] = []
    kwargs: dict[str, Any] = {}
    for i, a in enumerate(op._schema.arguments):
        if a.has_default_value():
            continue
        value = argument(a, i, scaled)
        if a.name == "max_exp_avg_sqs":
            value = []
        if a.kwarg_only:
            kwargs[a.name] = value
        else:
            args.append(value)
    return args, kwargs


def writes(op: Overload, scaled: bool) -> list[bool] | None:
    """Return whether a call counts a write, for each written tensor of the schema."""
    try:
        args, kwargs = given(op, scaled)
    except KeyError:  # The schema asks for a dtype, a generator or a shape.
        return None
    targets: list[Tensor] = []
    for a, value in zip(op._schema.arguments, args, strict=False):
        if a.alias_info is not None and a.alias_info.is_write:
            targets += value if isinstance(value, list) else [value]
    before = [t._version for t in targets]
    with torch.no_grad():
        op(*args, **kwargs)
    return [t._version > v for t, v in zip(targets, before, strict=True)]


def called(op: Overload) -> list[bool] | None:
    try:
        return writes(op, scaled=False)
    except (RuntimeError, TypeError, IndexError, ValueError, NotImplementedError):
        return None  # torch itself does not take these arguments.


@pytest.mark.filterwarnings("ignore")
def test__what_torch_counts__is_counted() -> None:
    cases = {op: want for op in overloads() if (want := called(op))}
    names = [str(op) for op in cases]
    assert len([name for name in names if "_foreach_" in name]) > 60
    assert len([name for name in names if "_fused_" in name]) >= 4
    assert len(names) > 150
    checked = [op for op in cases if rule_of(op) or any(s in str(op) for s in LISTS)]

    def check(op: Overload) -> None:
        got = writes(op, scaled=True)
        assert got is not None
        assert all(mine or not theirs for mine, theirs in zip(got, cases[op], strict=True))
        if any(s in str(op) for s in ("_foreach_", "_fused_")) and "_amp_" not in str(op):
            assert got[0]

    assert_each(checked, check)


@pytest.mark.parametrize("kind", [{"foreach": False}, {"foreach": True}, {"fused": True}], ids=str)
def test__a_backward_pass_after_a_step__raises(kind: dict[str, bool]) -> None:
    gain = nn.Parameter(sct.scaled(torch.randn(4)))
    optimizer = torch.optim.SGD([gain], lr=0.1, **kind)
    x = torch.randn(3, 4, requires_grad=True)
    (x * gain).sum().backward()
    y = (x * gain).sum()
    optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.backward()


@pytest.mark.parametrize("name", ["AdamW", "SGD", "Lion"])
@pytest.mark.parametrize("options", [{}, {"state_format": "e4m3fn"}], ids=str)
def test__our_optimizers__count_the_write(name: str, options: dict[str, Any]) -> None:
    gain = nn.Parameter(sct.scaled(torch.randn(32)))
    plain = nn.Parameter(torch.randn(32))
    optimizer = getattr(sct.optim, name)([gain, plain], lr=0.1, **options)
    x = torch.randn(3, 32, requires_grad=True)
    (x * gain * plain).sum().backward()
    before = [p._version for p in (gain, plain)]
    optimizer.step()
    assert all(p._version > v for p, v in zip((gain, plain), before, strict=True))


PRODUCTS = {
    "linear": lambda x, w: torch.nn.functional.linear(x, w),
    "mm": lambda x, w: x @ w,
    "bmm": lambda x, w: torch.bmm(x[None], w[None]),
    "einsum": lambda x, w: torch.einsum("bi,oi->bo", x, w),
    "conv": lambda x, w: torch.nn.functional.conv1d(x[..., None], w[..., None]),
}
UNCAST = {
    "fp32": sct.recipes.Unit("fp32", "fp32", "fp32"),
    "bf16 master": sct.recipes.Unit("bf16", "bf16", "bf16", master="bf16"),
}


@pytest.mark.parametrize("recipe", UNCAST.values(), ids=UNCAST)
@pytest.mark.parametrize("product", PRODUCTS.values(), ids=PRODUCTS)
def test__a_weight_that_no_product_casts__is_not_written_before_the_backward_pass(
    product: Any, recipe: Any
) -> None:
    layer = sct.scale_model(nn.Linear(8, 8, bias=False), recipe)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    x = torch.randn(4, 8, requires_grad=True)
    product(x, layer.weight).sum().backward()
    y = product(x, layer.weight).sum()
    optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.backward()


def by_ours(p: Tensor) -> None:
    p.grad = torch.ones_like(p)
    sct.optim.AdamW([p], lr=0.1, state_format="e4m3fn").step()


def by_torchs(p: Tensor) -> None:
    p.grad = torch.ones_like(p)
    torch.optim.AdamW([p], lr=0.1).step()


WRITES: dict[str, Any] = {
    "mul_": lambda p: p.mul_(2.0),
    "a part": lambda p: p[0].mul_(2.0),
    "copy_": lambda p: p.copy_(p * 2.0),
    "load": lambda p: p.copy_(torch.randn(8, 8)),
    "detached": lambda p: p.detach().mul_(2.0),
    "foreach": lambda p: torch._foreach_mul_([p], 2.0),
    "torch's optimizer": by_torchs,
    "an optimizer": by_ours,
}


CASES = [(name, False) for name in WRITES] + [("mul_", True), ("load", True)]


@pytest.mark.parametrize(("write", "frozen"), CASES)
def test__compiled_code__refuses_a_weight_that_was_written(write: str, frozen: bool) -> None:
    """It saves the elements of a weight, so the version of the weight is not enough."""
    model = sct.scale_model(nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8, bias=False)))
    weight = model[2].weight.requires_grad_(not frozen)
    y = torch.compile(model, fullgraph=True)(torch.randn(4, 8)).square().sum()
    with torch.no_grad():
        WRITES[write](weight)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.backward()


@pytest.mark.parametrize("recipe", ["mxfp8", "blockwise"])
def test__compiled_code__refuses_a_weight_whose_scale_was_written(recipe: str) -> None:
    """Under these recipes it saves the scale of a weight, and codes in place of the elements. The
    backend runs the traced operators: the check is before them."""
    model = sct.scale_model(nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)), recipe)
    compiled = torch.compile(lambda x: model(x) * 1.5, backend="aot_eager")
    y = compiled(torch.randn(4, 8)).square().sum()
    with torch.no_grad():
        model[2].weight.mul_(64.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.backward()


@pytest.mark.parametrize("part", [False, True])
def test__compiled_code__refuses_an_input_that_was_written(part: bool) -> None:
    norm = sct.scale_model(nn.RMSNorm(8))
    table = sct.scale_model(nn.Embedding(4, 8))
    x = table(torch.arange(4)).detach()
    y = torch.compile(norm)(x).square().sum()
    (x[:2] if part else x).mul_(8.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.backward()


@pytest.mark.parametrize(
    ("recipe", "backend"), [("unit", "inductor"), ("current", "aot_eager"), ("mxfp8", "aot_eager")]
)
def test__a_step__leaves_the_numbers_of_other_weights_to_their_backward_pass(
    recipe: str, backend: str
) -> None:
    """A rebalance measures the weights that its optimizer has stepped, and no others."""
    stepped, other = sct.scale_model(nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 8)]), recipe)
    optimizer = torch.optim.SGD([*stepped.parameters(), *other.parameters()], lr=0.1)
    compiled = torch.compile(other, backend=backend)
    x = torch.randn(4, 8, requires_grad=True)
    for _ in range(11):
        optimizer.zero_grad()
        loss = compiled(x).square().mean()
        stepped(x).sum().backward()
        optimizer.step()
        loss.backward()
    assert stepped.weight._rebalanced_after == stepped.weight._version - 1
    assert not hasattr(other.weight, "_rebalanced_after")


def test__compiled_code__reads_what_a_program_wrote_into_data() -> None:
    """PyTorch allows such a write, for which the program is responsible."""
    layer = sct.scale_model(nn.Linear(8, 8, bias=False))
    x = torch.randn(4, 8, requires_grad=True)
    y = torch.compile(layer, fullgraph=True)(x).sum()
    layer.weight.data.zero_()
    y.backward()
    assert not x.grad.any()
