"""Checkpointed and LoRA models compile to one graph, with the eager bits, dynamic sizes and two
products."""

import copy
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from assertions import assert_shifted
from modes_models import (
    Checkpointed,
    assert_identical,
    assert_sane,
    gpt,
    gradients,
    lora_gpt,
    loss_of,
    tokens,
)
from small_models import LoRA
from tensors import gaussian
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils.checkpoint import checkpoint

import scaledtensor as sct


def test__a_checkpointed_model__compiles_to_the_eager_bits() -> None:
    model, eager, t = gpt(layers=1), gpt(layers=1), tokens()
    model.blocks = nn.ModuleList(Checkpointed(b, reentrant=True) for b in model.blocks)
    loss = torch.compile(loss_of, fullgraph=True, backend="aot_eager")(model, t)
    loss.backward()
    want = loss_of(eager, t)
    want.backward()
    assert torch.equal(loss, want)
    got = {name.replace(".block.", "."): g for name, g in gradients(model).items()}
    assert_identical(got, gradients(eager))
    assert_sane(got)


def attention(x: Tensor, block: nn.Module) -> Tensor:
    return block.attention(block.norm1(x))


def checkpointed_mlp_with_lora(x: Tensor, block: nn.Module) -> Tensor:
    return checkpoint(block.mlp, x, use_reentrant=False)


@pytest.mark.parametrize("part", [attention, checkpointed_mlp_with_lora])
def test__sizes_that_change__are_one_graph(part: Callable[[Tensor, nn.Module], Tensor]) -> None:
    """Rules compute with sizes and never ask for their values."""
    make = gpt if part is attention else lora_gpt
    model, eager = (make(layers=1).blocks[0] for _ in range(2))
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(
        lambda x, block: part(x, block).square().mean(),
        fullgraph=True,
        dynamic=True,
        backend=counter,
    )
    graphs = []
    for batch, length in ((4, 9), (3, 7), (6, 4)):
        x = gaussian(batch, length, 16, seed=batch)
        model.zero_grad()
        eager.zero_grad()
        loss, want = compiled(x, model), part(x, eager).square().mean()
        loss.backward()
        want.backward()
        assert torch.equal(loss, want)
        assert_identical(gradients(model), gradients(eager))
        assert_sane(gradients(model))
        graphs.append(counter.frame_count)
    assert graphs == graphs[:1] * 3


#: Functions of a batch of sequences that calculate with their length.
OF_LENGTH: dict[str, Callable[[Tensor], Tensor]] = {
    "mean": lambda h: h.mean(1),
    "mean of all": lambda h: h.mean((0, 1)),
    "centred": lambda h: h - h.mean(1, keepdim=True),
    "var": lambda h: h.var(1),
    "std": lambda h: h.std(1),
    "times": lambda h: h * h.shape[1] ** -0.5,
    "plus": lambda h: h + h.shape[1],
    "divided": lambda h: h.sum(1) / h.shape[1],
    "tril": lambda h: (h @ h.mT).tril() @ h,
    "triu": lambda h: (h @ h.mT).triu(1) @ h,
}


@pytest.mark.parametrize("name", OF_LENGTH)
def test__lengths_that_a_function_reads__are_one_graph(name: str) -> None:
    """A number that follows from a size stays symbolic, forward and backward."""
    torch.compiler.reset()
    torch.manual_seed(0)
    model = sct.scale_model(nn.Linear(8, 8))
    eager, counter = copy.deepcopy(model), CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(
        lambda m, x: OF_LENGTH[name](m(x)).square().mean(),
        fullgraph=True,
        dynamic=True,
        backend=counter,
    )
    for length in (7, 9, 26):
        x = torch.randn(3, length, 8)
        model.zero_grad()
        eager.zero_grad()
        loss, want = compiled(model, x), OF_LENGTH[name](eager(x)).square().mean()
        loss.backward()
        want.backward()
        assert torch.equal(loss, want)
        assert_identical(gradients(model), gradients(eager))
    assert counter.frame_count == 1


def test__tokens_that_pass_the_rows_of_a_table__are_one_graph() -> None:
    torch.compiler.reset()
    torch.manual_seed(0)
    model = sct.scale_model(nn.Embedding(32, 8))
    eager, counter = copy.deepcopy(model), CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(
        lambda m, x: m(x).square().sum(), fullgraph=True, dynamic=True, backend=counter
    )
    graphs = []
    for count in (7, 31, 64, 100):
        x = torch.randint(0, 32, (count,))
        model.zero_grad()
        eager.zero_grad()
        compiled(model, x).backward()
        eager(x).square().sum().backward()
        assert_identical(gradients(model), gradients(eager))
        graphs.append(counter.frame_count)
    assert graphs == graphs[:1] * 4


@pytest.mark.parametrize(
    ("part", "free"),
    [
        (lambda x: F.max_pool2d(x, 2), True),
        (lambda x: F.interpolate(x, scale_factor=2.0, mode="bilinear"), False),
        (lambda x: F.adaptive_avg_pool2d(x, 3), False),
    ],
    ids=["pooling", "interpolation", "adaptive pooling"],
)
def test__images_that_change__are_the_eager_bits(part: Any, free: bool) -> None:
    """The rules of interpolation and adaptive pooling count windows, which specializes the
    sizes."""
    torch.manual_seed(0)
    model = sct.scale_model(nn.Conv2d(3, 4, 3, padding=1))
    eager, counter = copy.deepcopy(model), CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(
        lambda m, x: part(m(x)).square().mean(), fullgraph=True, dynamic=True, backend=counter
    )
    graphs = []
    for batch, size in ((4, 8), (3, 12)):
        x = torch.randn(batch, 3, size, size + 2)
        model.zero_grad()
        eager.zero_grad()
        loss, want = compiled(model, x), part(eager(x)).square().mean()
        loss.backward()
        want.backward()
        assert torch.equal(loss, want)
        assert_identical(gradients(model), gradients(eager))
        graphs.append(counter.frame_count)
    assert (graphs[0] == graphs[1]) == free


def products_in(graphs: Counter[str], kind: str) -> Any:
    """A compiler that counts matrix products and leaves the graph as it is."""

    def count(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        called = [node.target for node in graph.graph.nodes if node.op == "call_function"]
        graphs[kind] += called.count(torch.ops.aten.mm.default)
        return graph.forward

    return count


@pytest.mark.parametrize(
    ("make", "forward", "backward"),
    [
        (lambda: nn.Linear(16, 32), 1, 2),
        (lambda: nn.Linear(16, 32).requires_grad_(False), 1, 1),
        (lambda: LoRA(nn.Linear(16, 32)), 3, 5),
    ],
    ids=["trained", "frozen", "LoRA"],
)
def test__a_frozen_layer_compiled__has_two_products(make: Any, forward: int, backward: int) -> None:
    torch.manual_seed(0)
    layer, x = sct.scale_model(make()), torch.randn(8, 16, requires_grad=True)
    layer(x).square().sum().backward()
    want, x_grad = gradients(layer), x.grad
    layer.zero_grad()
    x.grad = None
    found: Counter[str] = Counter()
    backend = aot_autograd(
        fw_compiler=products_in(found, "forward"), bw_compiler=products_in(found, "backward")
    )
    compiled = torch.compile(lambda x: layer(x).square().sum(), fullgraph=True, backend=backend)
    compiled(x).backward()
    assert dict(found) == {"forward": forward, "backward": backward}
    assert torch.equal(x.grad, x_grad)
    assert gradients(layer).keys() == want.keys()
    for name, g in gradients(layer).items():
        assert_shifted(g, want[name], 0)


class Residual(nn.Module):
    """A block that adds to its input in place."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(16, 16)

    def forward(self, x):
        x += self.linear(x.relu())
        return x


def test__a_compiled_block__writes_into_its_input():
    torch.compiler.reset()

    def gradients(compiled):
        torch.manual_seed(0)
        model = sct.scale_model(nn.Sequential(nn.Linear(16, 16), Residual(), Residual()))
        if compiled:
            for block in model[1:]:
                block.compile(backend="aot_eager")
        model(torch.randn(4, 16)).float().square().mean().backward()
        return [p.grad.dequantize() for p in model.parameters()]

    for ours, eager in zip(gradients(True), gradients(False), strict=True):
        torch.testing.assert_close(ours, eager, rtol=2e-2, atol=2e-3)


def test__correlated_factors_in_a_loop__make_no_infinite_scale():
    torch.compiler.reset()

    def logistic(x):
        h = x.sigmoid()
        for _ in range(10):
            h = 3.2 * h * (1 - h)
        return h

    torch.manual_seed(0)
    p = torch.randn(16, 16)
    x = sct.scaled(p).requires_grad_()
    y = torch.compile(logistic, backend="aot_eager")(x)
    torch.testing.assert_close(y.dequantize(), logistic(p), rtol=1e-4, atol=1e-4)
    y.mean().backward()
    assert x.grad.dequantize().isfinite().all()
