"""Under `unit_scale`, gradients stay multiples of the true ones, at unit scale."""

from typing import Any

import pytest
import torch
from tensors import gaussian
from torch import Tensor, nn
from torch.nn import functional as F

import scaledtensor as sct
from scaledtensor.models import interpose
from scaledtensor.unit_scaling.plan import Plan, Step

CASES: dict[str, tuple[type[nn.Module], Any]] = {}
TOKENS = (torch.arange(36).reshape(2, 3, 6) * 7) % 11


def case(*inputs: Tensor) -> Any:
    def register(cls: type[nn.Module]) -> type[nn.Module]:
        CASES[cls.__name__] = cls, inputs
        return cls

    return register


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(8), nn.Linear(8, 32), nn.Linear(32, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


@case(*TOKENS)
class Language(nn.Module):
    """A layer of attention by one matrix, an activation, and residual sums."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.qkv = nn.Embedding(11, 8), nn.Linear(8, 24)
        self.block, self.norm = Block(), nn.LayerNorm(8)
        self.head = nn.Linear(8, 11, bias=False)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.embedding(tokens)
        q, k, v = self.qkv(x).chunk(3, dim=-1)
        x = x + F.scaled_dot_product_attention(q, k, v, is_causal=True)
        logits = self.head(self.norm(self.block(x)))
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


@case(*TOKENS)
class Tied(Language):
    """A model with one matrix for embedding and logits."""

    def __init__(self) -> None:
        super().__init__()
        self.head.weight = self.embedding.weight


@case(*TOKENS)
class Rotary(nn.Module):
    """A model with matrices for queries, keys and values, two heads, and a rotary embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 8)
        self.q, self.k, self.v, self.o = (nn.Linear(8, 8) for _ in range(4))
        self.head = nn.Linear(8, 11)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.embedding(tokens)
        angle = torch.arange(tokens.shape[1], dtype=x.dtype)[:, None] / torch.tensor([1.0, 3, 1, 3])
        q, k, v = (f(x).view(*x.shape[:2], 2, 4).transpose(1, 2) for f in (self.q, self.k, self.v))
        q, k = (
            y * angle.cos() + torch.cat((-y[..., 2:], y[..., :2]), -1) * angle.sin() for y in (q, k)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.o(y.transpose(1, 2).flatten(-2))
        return F.cross_entropy(self.head(x).flatten(0, 1), targets.flatten())


@case(gaussian(3, 5, 8), torch.arange(15) % 5)
class Normed(nn.Module):
    """A model with normalised and shifted queries, gated keys, and a cross attention."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.head = (nn.Linear(8, n) for n in (8, 8, 8, 5))
        self.norm, self.query_norm = nn.LayerNorm(8), nn.LayerNorm(8)
        self.gate, self.shift = nn.Linear(8, 8), nn.Parameter(torch.randn(8))

    def forward(self, x: Tensor, targets: Tensor) -> Tensor:
        y = self.norm(x)
        q = self.query_norm(self.q(y)) + self.shift
        k = self.k(y) * torch.sigmoid(self.gate(y))
        x = x + F.scaled_dot_product_attention(q, k, self.v(y))
        return F.cross_entropy(self.head(x).flatten(0, 1), targets)


@case(gaussian(3, 5, 8), torch.arange(15) % 5)
class InPlace(nn.Module):
    """A model that writes another tensor into the queries, by a call with an unused result."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.head = (nn.Linear(8, n, bias=n == 5) for n in (8, 8, 8, 5))
        self.norm = nn.LayerNorm(8)

    def forward(self, x: Tensor, targets: Tensor) -> Tensor:
        y = self.norm(x)
        q = self.q(y)
        q.add_(y)
        x = x + F.scaled_dot_product_attention(q, self.k(y), self.v(y))
        return F.cross_entropy(self.head(x).flatten(0, 1), targets)


@case(gaussian(3, 5, 8), torch.arange(15) % 5)
class Beside(InPlace):
    """A model with queries that are a sum with their own source: one call gives it all its
    gradient."""

    def forward(self, x: Tensor, targets: Tensor) -> Tensor:
        y = self.norm(x)
        q = self.q(y) + y
        x = x + F.scaled_dot_product_attention(q, self.k(y), self.v(y))
        return F.cross_entropy(self.head(x).flatten(0, 1), targets)


@case(*TOKENS)
class Positions(nn.Module):
    """A model with one table of positions for two batches."""

    def __init__(self) -> None:
        super().__init__()
        self.token, self.position = nn.Embedding(11, 8), nn.Embedding(6, 8)
        self.head = nn.Linear(8, 11)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        place = torch.arange(tokens.shape[1])
        x = self.token(tokens) + self.position(place)
        y = self.token(targets[:1]) + self.position(place)
        return F.cross_entropy(self.head(torch.tanh(x) * y).flatten(0, 1), targets.flatten())


@case(gaussian(3, 6, 8), TOKENS[0])
class Indexed(nn.Module):
    """A model that takes rows of the logits' matrix, which is no call of a function of torch's for
    that. One parameter is broadcast over one batch and not over the other."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.head = nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 11)
        self.position = nn.Parameter(torch.randn(6, 8))

    def forward(self, x: Tensor, tokens: Tensor) -> Tensor:
        x = self.first(x)
        y = torch.tanh(x[:1] + self.position)
        x = torch.tanh(x + self.head.weight[tokens] + self.position)
        return F.cross_entropy(self.head(self.norm(x * y)).flatten(0, 1), tokens.flatten())


@case(gaussian(3, 5, 8), torch.arange(15) % 5)
class Nested(nn.Module):
    """A residual sum in the branch of another one, with a start outside of that branch."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.head = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 5)
        self.up, self.down, self.out = nn.Linear(8, 16), nn.Linear(16, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor, targets: Tensor) -> Tensor:
        x, z = self.first(x), self.second(x)
        inner = z + self.down(torch.tanh(self.up(z) * self.up(x)))
        x = x + self.out(inner)
        return F.cross_entropy(self.head(x).flatten(0, 1), targets)


@case(gaussian(16, 8), torch.arange(16) % 5)
class Gated(nn.Module):
    """Two uses of one tensor meet again without a residual sum."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.gate = nn.Linear(8, 16), nn.Linear(16, 32)
        self.up, self.down = nn.Linear(16, 4), nn.Linear(4, 32)
        self.head = nn.Linear(32, 5)

    def forward(self, x: Tensor, targets: Tensor) -> Tensor:
        x = self.first(x)
        x = F.silu(self.gate(x)) * self.down(self.up(x))
        return F.cross_entropy(self.head(x), targets)


@case(gaussian(16, 8), torch.arange(16) % 5)
class Repeated(nn.Module):
    """A matrix multiplies twice in a chain."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.twice, self.head = nn.Linear(8, 16), nn.Linear(16, 16), nn.Linear(16, 5)

    def forward(self, x: Tensor, targets: Tensor) -> Tensor:
        x = F.relu(self.twice(F.relu(self.twice(self.first(x)))))
        return F.cross_entropy(self.head(x), targets)


@case(TOKENS[0], TOKENS[1, :, :2])
class Pair(nn.Module):
    """A model with one table, norm and matrix for two sequences of unequal lengths."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.norm, self.both = nn.Embedding(11, 8), nn.LayerNorm(8), nn.Linear(8, 8)
        self.q = nn.Linear(8, 8)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        x, y = (self.both(self.norm(self.embedding(t))) for t in (source, target))
        y = y + F.scaled_dot_product_attention(self.q(y), x, x)
        return F.cross_entropy(F.linear(y, self.embedding.weight).flatten(0, 1), target.flatten())


class Other(Block):
    """A second branch that starts where the first one did."""

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        return y + torch.tanh(self.down(self.up(x)))


class Masked(nn.Module):
    """A model with a learned bias of logits."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.kv = nn.Linear(8, 8), nn.Linear(8, 16)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        k, v = self.kv(x).chunk(2, -1)
        return x + F.scaled_dot_product_attention(self.q(x), k, v, attn_mask=mask)


@case(gaussian(3, 5, 8), torch.arange(15) % 5)
class Layers(nn.Module):
    """A model with a layer that is used twice, two branches with one start, and a bias of several
    layers."""

    def __init__(self) -> None:
        super().__init__()
        self.block, self.other, self.head = Block(), Other(), nn.Linear(8, 5)
        self.mask, self.attentions = nn.Embedding(9, 1), nn.ModuleList((Masked(), Masked()))

    def forward(self, x: Tensor, targets: Tensor) -> Tensor:
        distance = torch.arange(5) - torch.arange(5)[:, None] + 4
        mask = self.mask(distance).squeeze(-1)
        x = self.other(self.block(self.block(x)))
        for attention in self.attentions:
            x = attention(x, mask)
        return F.cross_entropy(self.head(x).flatten(0, 1), targets)


@case(gaussian(2, 128, 8), torch.arange(8) % 5)
class Looped(nn.Module):
    """One attention reads few tokens and then many, so its logits let different amounts pass."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.v, self.head = (nn.Linear(8, n) for n in (8, 8, 5))
        self.k, self.norm = nn.Linear(8, 8, bias=False), nn.LayerNorm(8)

    def attend(self, x: Tensor, memory: Tensor) -> Tensor:
        y = self.norm(x)
        k, v = self.k(memory), self.v(memory)
        return x + F.scaled_dot_product_attention(self.norm(self.q(y)), k, v)

    def forward(self, x: Tensor, targets: Tensor) -> Tensor:
        y = self.attend(x[:, :4], x[:, :4])
        y = self.attend(y, x)
        return F.cross_entropy(self.head(y).flatten(0, 1), targets)


@case(gaussian(2, 3, 16), torch.arange(2))
class Convolved(nn.Module):
    """A model with one convolution of two lengths."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.both, self.head = nn.Conv1d(3, 4, 3), nn.Conv1d(4, 4, 3), nn.Linear(4, 5)

    def forward(self, x: Tensor, targets: Tensor) -> Tensor:
        x = torch.tanh(self.both(F.avg_pool1d(torch.tanh(self.both(self.first(x))), 4)))
        return F.cross_entropy(self.head(x[..., 0]), targets)


@case(gaussian(3, 5, 8), torch.arange(3))
class Pooled(nn.Module):
    """A model with a loss that reads one token."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(Block(), Block())
        self.norm, self.head = nn.LayerNorm(8), nn.Linear(8, 5)

    def forward(self, x: Tensor, targets: Tensor) -> Tensor:
        x = self.norm(self.blocks(x))
        return F.cross_entropy(self.head(x[:, 0]), targets)


def built(name: str) -> tuple[nn.Module, Any, Plan]:
    torch.manual_seed(0)
    model_class, inputs = CASES[name]
    model = model_class().double()
    inputs = tuple(x.double() if x.is_floating_point() else x for x in inputs)
    sct.unit_scale(model, inputs)
    (transform,) = interpose.transforms(model)
    (plan,) = transform.plans.values()
    return model, inputs, plan


@pytest.mark.parametrize("name", CASES)
def test__every_gradient__is_a_multiple_of_the_true_one(name: str) -> None:
    """Check the derivative of the computed function along random directions, in float64."""
    model, inputs, _ = built(name)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.3 * torch.randn_like(parameter)
    model(*inputs).backward()
    for fqn, parameter in model.named_parameters():
        multiples = []
        for _ in range(4):
            direction = torch.randn_like(parameter)
            direction += parameter.grad / parameter.grad.std()  # No element is near zero then.
            ends = []
            for step in (1e-4, -1e-4):
                with torch.no_grad():
                    parameter += step * direction
                    ends.append(model(*inputs))
                    parameter -= step * direction
            true = (ends[0] - ends[1]) / 2e-4
            multiples.append(float((parameter.grad * direction).sum() / true))
        assert max(multiples) == pytest.approx(min(multiples), rel=1e-3), fqn


def steps(plan: Plan, name: str) -> list[Step]:
    return [step for (called, _), step in plan.steps.items() if called == name]


def test__gradients_of_queries_and_keys__are_delayed_up_to_their_matrices() -> None:
    _, _, plan = built("Rotary")
    (attention,) = steps(plan, "scaled_dot_product_attention")
    (q, q_factor), (k, k_factor) = attention.delays
    assert (q, k) == ((0, None), (1, None))
    assert q_factor == k_factor > 1
    linears = steps(plan, "linear")
    first = (0, None)
    assert [step.delays for step in linears] == [
        ((first, 1 / q_factor),),
        ((first, 1 / k_factor),),
        *((),) * 3,
    ]
    assert not any(step.undo for step in linears)


def test__those_of_one_matrix__are_delayed_up_to_where_it_is_cut() -> None:
    _, _, plan = built("Language")
    (attention,) = steps(plan, "scaled_dot_product_attention")
    factors = dict(attention.delays)
    (chunk,) = steps(plan, "chunk")
    assert {(u.output, None): 1 / u.factor for u in chunk.undo} == factors
    assert chunk.delays == ()


def test__a_gradient_of_two_uses__has_one_scale() -> None:
    """Only the edges into and out of the part with two uses are cut."""
    _, _, plan = built("Gated")
    assert [step.work.free for step in steps(plan, "linear")] == [True, False, False, False, True]
    _, _, plan = built("Repeated")
    assert [step.work.free for step in steps(plan, "linear")] == [True, True, False, True]


def test__a_loss_of_one_token__has_gradients_of_unit_scale_before_it() -> None:
    model, (x, targets), _ = built("Pooled")
    x.requires_grad_()
    seen = []
    hook = model.norm.register_forward_hook(
        lambda module, args, out: seen.append(args[0].register_hook(seen.append))
    )
    model(x, targets).backward()
    hook.remove()
    assert 0.8 < float(seen[-1].std()) < 1.25


#: These have attention and residual sums, a write in place, and tensors with two uses; AOTAutograd
#: compiles them as well.
DIFFERENTIATED = {"Language", "InPlace", "Layers", "Pair"}


@pytest.mark.parametrize("name", CASES)
def test__compiled__they_are_the_same(name: str) -> None:
    """Dynamo traces the plan, and the derivative of each call is compiled elsewhere
    (tests/functional). AOTAutograd takes longer than everything else here, so it has a few models.
    """
    torch.compiler.reset()
    model, inputs, _ = built(name)
    parameters = list(model.parameters())
    expected = torch.autograd.grad(model(*inputs), parameters)
    backend = "aot_eager" if name in DIFFERENTIATED else "eager"
    compiled = torch.compile(model, fullgraph=True, backend=backend)
    got = torch.autograd.grad(compiled(*inputs), parameters)
    torch.testing.assert_close(got, expected)


def test__a_plan__is_listed_in_the_order_of_its_calls() -> None:
    model, _, _ = built("Tied")
    (plan,) = sct.inspect.plans(model)
    lines = [line.split(maxsplit=2) for line in str(plan).splitlines()]
    assert [name for name, _, _ in lines] == [
        *("embedding", "linear", "chunk", "scaled_dot_product_attention", "add"),
        *("layer_norm", "linear", "gelu", "linear", "add", "layer_norm", "linear", "cross_entropy"),
    ]
    said = dict(
        zip(((n, int(i)) for n, i, _ in lines), (what for _, _, what in lines), strict=True)
    )
    assert said["embedding", 0].startswith("parameters of other calls; unit-scaled")
    assert said["chunk", 0] == "gradient of result 0 x 0.25; gradient of result 1 x 0.25"
    assert said["add", 0] == "residual sum 0, tau 1; branch 1 starts"
    assert said["cross_entropy", 0] == "unit-scaled, every gradient by itself"


def test__a_model_without_a_plan__has_none_to_list() -> None:
    for model in (nn.Linear(2, 2), sct.unit_scale(nn.Linear(2, 2))):
        with pytest.raises(sct.errors.ModelError, match="no plan of unit scaling"):
            sct.inspect.plans(model)
