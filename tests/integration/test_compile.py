"""`torch.compile(fullgraph=True)` gives the values and scales of eager code, and uses no stale
cache."""

import copy
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch._dynamo.testing
import torch.nn.functional as F
from assertions import assert_shifted
from small_models import GPT
from torch import Tensor, nn

import scaledtensor as sct


class LlamaBlock(nn.Module):
    """RMSNorm, RoPE, grouped queries and a gated MLP, in their usual spellings."""

    def __init__(self, width: int = 32, heads: int = 4) -> None:
        super().__init__()
        self.heads = heads
        self.norm = nn.RMSNorm(width)
        self.q = nn.Linear(width, width, bias=False)
        self.kv = nn.Linear(width, width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.gate = nn.Linear(width, 2 * width, bias=False)
        self.up = nn.Linear(width, 2 * width, bias=False)
        self.down = nn.Linear(2 * width, width, bias=False)

    def rope(self, x: Tensor) -> Tensor:
        d = x.shape[-1] // 2
        angle = torch.arange(x.shape[-2])[:, None] / 100.0 ** (torch.arange(d) / d)
        cos, sin = angle.cos().repeat(1, 2), angle.sin().repeat(1, 2)
        return x * cos + torch.cat((-x[..., d:], x[..., :d]), -1) * sin

    def forward(self, x: Tensor) -> Tensor:
        B, T, C = x.shape
        h = self.norm(x)
        q = self.q(h).view(B, T, self.heads, -1).transpose(1, 2)
        k, v = (
            t.view(B, T, self.heads // 2, -1).transpose(1, 2).repeat_interleave(2, 1)
            for t in self.kv(h).chunk(2, -1)
        )
        y = F.scaled_dot_product_attention(self.rope(q), self.rope(k), v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(B, T, C))
        h = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


def gpt(layers: int = 2) -> tuple[nn.Module, Callable[[nn.Module], Tensor]]:
    model = GPT(vocabulary=64, context=32, layers=layers, heads=2, width=64)
    tokens = torch.randint(0, 64, (4, 33))
    return model, lambda m: m(tokens[:, :-1], tokens[:, 1:])[1]


def one_layer() -> tuple[nn.Module, Callable[[nn.Module], Tensor]]:
    """Inductor compiles one layer, as each layer takes as long again."""
    return gpt(1)


def llama() -> tuple[nn.Module, Callable[[nn.Module], Tensor]]:
    model = nn.Sequential(nn.Embedding(64, 32), LlamaBlock(), nn.Linear(32, 64))
    tokens = torch.randint(0, 64, (4, 17))
    return model, lambda m: F.cross_entropy(
        m(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten()
    )


BF16 = sct.recipes.Unit(forward="bf16", gradient="bf16")


@pytest.mark.parametrize(
    ("make", "recipe", "backend", "tolerance"),
    [
        (gpt, sct.recipes.Unit(), "aot_eager", 0.0),
        (llama, sct.recipes.Unit(), "aot_eager", 0.0),
        # Inductor fuses operators between which eager code rounds to bfloat16. In FP8 that flips
        # roundings, and test__compiled_block__moves_only_scales_too measures them against float32.
        (one_layer, BF16, "inductor", 0.03),
    ],
)
def test__forward_and_backward_equal_eager(
    make: Callable[[], tuple[nn.Module, Callable[[nn.Module], Tensor]]],
    recipe: sct.recipes.Recipe,
    backend: str,
    tolerance: float,
) -> None:
    torch.manual_seed(0)
    model, loss_of = make()
    eager = sct.scale_model(model, recipe)
    compiled = copy.deepcopy(eager)
    expected = loss_of(eager)
    expected.backward()
    loss = torch.compile(loss_of, fullgraph=True, backend=backend)(compiled)
    loss.backward()
    torch.testing.assert_close(loss, expected, rtol=tolerance / 10, atol=0)
    for (name, p), q in zip(eager.named_parameters(), compiled.parameters(), strict=True):
        assert isinstance(q.grad, sct.ScaledTensor), name
        assert torch.equal(p.grad.scale, q.grad.scale), name
        assert p.grad.format == q.grad.format, name
        expected_grad = p.grad.dequantize()
        error = (expected_grad - q.grad.dequantize()).norm() / expected_grad.norm()
        assert error <= tolerance, f"{name}: {error:.3f}"


def test__scaled_logits_cross_the_border_with_their_gradient() -> None:
    """The loss is computed outside: the compiled region returns a ScaledTensor and receives one.
    Inductor has this model in test__a_step__is_the_same_bits_under_loss_scaling."""
    torch.manual_seed(0)
    eager = sct.scale_model(nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 8)))
    compiled = copy.deepcopy(eager)
    x, y = sct.scaled(torch.randn(4, 16)), torch.randint(0, 8, (4,))
    logits = torch.compile(compiled, fullgraph=True, backend="aot_eager")(x)
    assert isinstance(logits, sct.ScaledTensor)
    assert torch.equal(logits.scale, eager(x).scale)
    F.cross_entropy(logits, y).backward()
    F.cross_entropy(eager(x), y).backward()
    for p, q in zip(eager.parameters(), compiled.parameters(), strict=True):
        assert torch.equal(p.grad.scale, q.grad.scale)
        torch.testing.assert_close(p.grad.dequantize(), q.grad.dequantize(), rtol=0.02, atol=1e-4)


class Turned(nn.Module):
    """Activations of transposed elements, which linear layers multiply, as between a convolution
    and a mixer."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(16, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(F.silu(x.transpose(1, 2)))
        return self.second(F.gelu(y.view(2, 3, 2, 8).permute(0, 2, 1, 3)))


def by_node() -> tuple[nn.Module, Callable[[nn.Module], Tensor]]:
    """A softmax over the edges of each node of a graph, under the largest of their logits. The
    derivative of the maximum looks for the elements that are equal to it."""
    node, x = torch.arange(40) % 8, torch.randn(40, 16)

    def loss_of(layer: nn.Module) -> Tensor:
        logits = layer(x).squeeze(-1)
        largest = torch.full((8,), -1e9).scatter_reduce(0, node, logits, "amax")
        loss: Tensor = (logits - largest[node]).exp().sum()
        return loss

    return nn.Linear(16, 1, bias=False), loss_of


def turned() -> tuple[nn.Module, Callable[[nn.Module], Tensor]]:
    x = torch.randn(2, 16, 6)
    return Turned(), lambda m: m(x).square().mean()


class Extremes(nn.Module):
    """Functions whose derivatives look for the elements that are equal to the result."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        y = F.silu(self.first(x))
        largest = y == y.max(-1, keepdim=True).values
        found = [
            *(y.amax(-1), y.exp().amin(-1), y.norm(p=float("inf"), dim=-1)),
            (largest * y).sum(-1),
            y.median().expand(len(y)),
        ]
        return torch.stack(found)


def extremes() -> tuple[nn.Module, Callable[[nn.Module], Tensor]]:
    x, weights = torch.randn(32, 16), torch.randn(5, 32)
    return Extremes(), lambda m: (m(x) * weights).sum()


@pytest.mark.parametrize(("make", "tolerance"), [(turned, 0.05), (by_node, 1e-3), (extremes, 0.1)])
def test__inductor_reads_the_elements_that_eager_code_reads(
    make: Callable[[], tuple[nn.Module, Callable[[nn.Module], Tensor]]], tolerance: float
) -> None:
    """Inductor chooses the strides of an intermediate, and leaves out roundings between operators
    of a kernel. Products are in bfloat16 on each CPU. After a float32 product it would leave out
    the rounding of the logits too, and the bounds are for the others."""
    torch.manual_seed(0)
    torch.compiler.reset()
    model, loss_of = make()
    eager = sct.scale_model(model)
    compiled = copy.deepcopy(eager)
    with sct.products_in("bfloat16"):
        loss_of(eager).backward()
        torch.compile(loss_of, fullgraph=True)(compiled).backward()
    for p, q in zip(eager.parameters(), compiled.parameters(), strict=True):
        want, got = p.grad.dequantize(), q.grad.dequantize()
        assert (got - want).norm() <= tolerance * want.norm()


def test__no_graph_per_scale() -> None:
    """The scale is data: another loss multiplier or other weights compile nothing."""
    torch.manual_seed(0)
    model = sct.scale_model(nn.Linear(16, 16))
    x = sct.scaled(torch.randn(4, 16))
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(lambda m, x, c: (m(x) * c).sum(), backend=counter, fullgraph=True)
    grads = []
    for k in (0, -18, 20):
        model.zero_grad()
        compiled(model, x, torch.tensor(2.0**k)).backward()
        grads.append(model.weight.grad)
    assert counter.frame_count == 1
    assert all(torch.equal(g.qdata, grads[0].qdata) for g in grads)
    assert [float(g.scale / grads[0].scale) for g in grads] == [1.0, 2.0**-18, 2.0**20]


PROGRAM = '''
import sys, torch, scaledtensor as sct
from torch._dynamo.utils import counters

sinh = torch.ops.aten.sinh.default
del sct.ops.RULES[sinh]

@sct.ops.rule(sinh)
def rule(x):
    """Not a real rule: what it returns tells which version ran. Products alone, which Inductor
    calls: it has no kernel to build here."""
    y = x.qdata
    for _ in range({products}):
        y = y @ x.qdata
    return sct.ops.Raw(y, x.scale, x.rms, settled=True)

x = sct.scaled(torch.ones(4, 4))
y = torch.compile(torch.sinh, fullgraph=True)(x)
print(y.dequantize()[0, 0].item(), counters["aot_autograd"]["autograd_cache_hit"])
'''


RUN = """
import runpy, sys, torch
from torch._dynamo.utils import counters

for path in sys.argv[1:]:
    torch._dynamo.reset()
    counters.clear()
    runpy.run_path(path)
"""


def test__a_changed_rule_is_not_served_from_the_cache(tmp_path: Path) -> None:
    """Processes share a cache directory: the same rule hits it, and a changed rule misses it."""
    scripts = []
    for name, products in (("first", 1), ("changed", 2)):
        scripts.append(tmp_path / f"{name}.py")
        scripts[-1].write_text(PROGRAM.format(products=products))
    env = os.environ | {
        "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache"),
        "TORCHINDUCTOR_FX_GRAPH_CACHE": "1",
        "TORCHINDUCTOR_AUTOGRAD_CACHE": "1",
    }
    made = [sys.executable, "-c", RUN, *map(str, scripts)]
    printed = [
        subprocess.run(made, env=env, capture_output=True, text=True, check=True).stdout.split()
        for process in ("first", "again")
    ]
    assert printed == [["4.0", "0", "16.0", "0"], ["4.0", "1", "16.0", "1"]]


STATISTICS = {
    "sum": lambda y: y.sum(),
    "mean": lambda y: torch.mean(y),
    "of a view": lambda y: y[:, -1].sum(),
    "dequantized": lambda y: y.dequantize().square().sum(),
}


@pytest.mark.parametrize("name", STATISTICS)
def test__a_plain_statistic_of_what_was_compiled__goes_back_into_it(name):
    """Its gradient is plain, although the compiled backward pass was made for scaled ones."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    layer, x = sct.scale_model(torch.nn.Linear(16, 8)), torch.randn(4, 16)
    found = []
    for run in (layer, torch.compile(layer, backend="aot_eager", fullgraph=True)):
        layer.zero_grad()
        STATISTICS[name](run(x)).backward()
        found.append(layer.weight.grad)
    assert_shifted(*found, 0)


class Experts(nn.Module):
    """A mixture of experts: each token takes two out of four. It has a loss of their balance."""

    def __init__(self) -> None:
        super().__init__()
        self.router, self.head = nn.Linear(32, 4, bias=False), nn.Linear(32, 10)
        self.up = nn.Parameter(torch.randn(4, 32, 64) * 32**-0.5)
        self.down = nn.Parameter(torch.randn(4, 64, 32) * 64**-0.5)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        logits = self.router(x)
        weights, chosen = logits.topk(2, -1)
        gates = torch.zeros_like(logits).scatter(-1, chosen, weights.softmax(-1))
        hidden = F.gelu(torch.einsum("td,edh->teh", x, self.up))
        mixed = torch.einsum("ted,te->td", torch.einsum("teh,ehd->ted", hidden, self.down), gates)
        balance = (gates.gt(0).float().mean(0) * logits.softmax(-1).mean(0)).sum()
        return self.head(x + mixed), 0.04 * balance


def test__a_gradient_that_is_written_in_place__is_read_after_the_write() -> None:
    """The gradient of `topk` is written into zeros. Inductor ran the sum with the gradient of the
    balance before that write (pytorch/pytorch#185509), and the router's gradient was the latter
    alone."""
    torch.manual_seed(0)
    model = sct.scale_model(Experts(), sct.recipes.Unit("fp32", "fp32", "fp32"))
    x, labels = torch.randn(64, 32), torch.randint(0, 10, (64,))
    gradients = []
    torch.compiler.reset()
    for run in (model, torch.compile(model, fullgraph=True)):
        model.zero_grad()
        y, balance = run(x)
        (F.cross_entropy(y, labels) + balance).backward()
        gradients.append(model.router.weight.grad.dequantize().clone())
    eager, compiled = gradients
    assert float((compiled - eager).norm() / eager.norm()) < 1e-4
