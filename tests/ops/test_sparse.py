"""Graph networks and embeddings with sparse gradients work as their users write them."""

import copy

import pytest
import torch
import torch.nn.functional as F
from assertions import assert_holds, assert_in_range, assert_shifted, dequantized
from tensors import gaussian, saved_and_loaded
from torch import nn

import scaledtensor as sct
from scaledtensor.errors import UnsupportedError
from scaledtensor.tensors.sparse import SparseTensor

NODES, WIDTH = 60, 8
LAYOUTS = ("coo", "csr", "csc")


def graph(nodes=NODES, degree=6, seed=0):
    """A row-normalised adjacency matrix with degrees that differ by more than a factor of ten."""
    generator = torch.Generator().manual_seed(seed)
    rank = torch.arange(1, nodes + 1) / nodes
    chance = (degree * rank.view(-1, 1) ** 2 * 3 / nodes).expand(-1, nodes)
    edges = (
        (torch.rand(nodes, nodes, generator=generator) < chance) | torch.eye(nodes).bool()
    ).float()
    return edges / edges.sum(1, keepdim=True)


def in_layout(a, layout):
    return {"coo": a.to_sparse, "csr": a.to_sparse_csr, "csc": a.to_sparse_csc}[layout]()


SPELLINGS = {
    "matmul": lambda a, h: a @ h,
    "torch.matmul": lambda a, h: torch.matmul(a, h),
    "mm": lambda a, h: torch.mm(a, h),
    "spmm": lambda a, h: torch.spmm(a, h),
    "sparse.mm": lambda a, h: torch.sparse.mm(a, h),
    "addmm": lambda a, h: torch.addmm(h, a, h, beta=0.5, alpha=2),
    "sparse.addmm": lambda a, h: torch.sparse.addmm(h, a, h, beta=0.5, alpha=2),
    "vector": lambda a, h: a @ h[:, 0],
    "right": lambda a, h: h.t() @ a,
    "linear": lambda a, h: F.linear(a, h.t()),
}


@pytest.mark.parametrize("spelling", SPELLINGS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test__a_product_with_a_graph__is_that_of_the_values(layout, spelling):
    dense, product = graph(), SPELLINGS[spelling]
    a = in_layout(dense, layout)
    h = sct.scaled(gaussian(NODES, WIDTH) * 2.0**-20).requires_grad_()
    plain = h.detach().dequantize().requires_grad_()
    y = product(a, h)
    want = SPELLINGS[spelling.replace("sparse.", "")](dense, plain)
    assert_holds(y, want, 2.0**-7)
    assert_in_range([y])
    with torch.no_grad():
        assert_holds(product(a, h), want, 2.0**-7)
    if layout == "csc" and spelling.startswith("sparse"):
        return  # torch has no derivative of the plain operator.
    seed = gaussian(*want.shape, seed=1)
    y.backward(sct.scaled(seed))
    want.backward(seed)
    assert_holds(h.grad, plain.grad, 2.0**-7)
    if spelling != "vector":  # Its gradient is one column's.
        assert_in_range([h.grad])


def test__degrees_that_differ__leave_the_expected_rms_at_its_closed_form():
    """The rule is r = ra rb sqrt(E / N), though the values depend on the degrees."""
    dense = graph(400, 12)
    a = dense.to_sparse()
    h = sct.scaled(gaussian(400, 512))
    y = torch.sparse.mm(a, h)
    values = a.values()
    expected = float(values.square().mean().sqrt() * (values.numel() / 400) ** 0.5)
    assert float(y.rms) == pytest.approx(expected, rel=0.05)
    assert float(dequantized(y).square().mean().sqrt()) == pytest.approx(expected, rel=0.05)


def test__a_graph_applied_again_and_again__stays_in_range():
    """Neighbours become alike; independent terms would be thousands of times smaller by now."""
    a = graph(400, 24).to_sparse()
    h = sct.scaled(gaussian(400, 16))
    for _ in range(10):
        h = a @ h
    assert_in_range([h])
    want = torch.linalg.matrix_power(a.to_dense().double(), 10) @ gaussian(400, 16).double()
    assert_holds(h, want, 2.0**-5)


class GCN(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, 16), nn.Linear(16, 3)

    def forward(self, a, x):
        h = torch.relu(torch.sparse.mm(a, self.first(x)))
        return a @ self.second(h)


def trained(model, a, x, y, multiplier=1.0, steps=30):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5 / multiplier)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(a, x), y)
        (loss * multiplier).backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


@pytest.mark.parametrize("layout", ["coo", "csr"])
def test__a_graph_network__trains_as_the_plain_one_does(layout):
    torch.manual_seed(0)
    plain = GCN()
    scaled = sct.scale_model(copy.deepcopy(plain))
    a, x = in_layout(graph(), layout), gaussian(NODES, WIDTH)
    y = (a @ x)[:, :3].argmax(1)
    want, got = trained(plain, a, x, y), trained(scaled, a, x, y)
    assert want[-1] < 0.7 * want[0]
    assert got[-1] == pytest.approx(want[-1], rel=0.03)


def test__a_graph_network__has_the_same_bits_under_any_power_of_two_of_the_loss():
    def run(k):
        torch.manual_seed(0)
        model = sct.scale_model(GCN())
        losses = trained(
            model, graph().to_sparse(), gaussian(NODES, WIDTH), torch.arange(NODES) % 3, 2.0**k, 5
        )
        return losses, [p.qdata.clone() for p in model.parameters()], model.first.weight.grad

    (losses, weights, grad), (other, others, moved) = run(0), run(-30)
    assert losses == other
    assert all(map(torch.equal, weights, others))
    assert_shifted(grad, moved, -30)


def test__sparse_features__have_a_weight_with_a_gradient_in_its_own_format():
    """The bag of words of a citation graph times the first weight is a sparse product."""
    x = (gaussian(NODES, 40) * (gaussian(NODES, 40, seed=1) > 1)).to_sparse()
    layer = sct.scale_model(nn.Linear(40, 5))
    plain = nn.Linear(40, 5)
    plain.load_state_dict({n: p.detach().dequantize() for n, p in layer.named_parameters()})
    y = torch.sparse.mm(x, layer.weight.t()) + layer.bias
    want = torch.sparse.mm(x, plain.weight.t()) + plain.bias
    assert_holds(y, want, 2.0**-6)
    y.square().sum().backward()
    want.square().sum().backward()
    assert layer.weight.grad.format == sct.formats.FP32
    assert_holds(layer.weight.grad, plain.weight.grad, 2.0**-5)


# --- values with a gradient ------------------------------------------------------------------


def places(a):
    return a.to_sparse().indices()


def attention(indices, score, h):
    """A layer of graph attention: scores of edges, normalised over the neighbours of a node."""
    weight = score(torch.cat([h[indices[0]], h[indices[1]]], -1)).squeeze(-1)
    weight = torch.nn.functional.leaky_relu(weight, 0.2).exp()
    edges = torch.sparse_coo_tensor(indices, weight, (NODES, NODES))
    return torch.sparse.mm(edges, h) / torch.sparse.mm(edges, torch.ones(NODES, 1))


def test__values_on_edges__have_their_gradient():
    torch.manual_seed(0)
    indices, score = places(graph()), nn.Linear(2 * WIDTH, 1)
    plain = gaussian(NODES, WIDTH).requires_grad_()
    scaled_score = sct.scale_model(copy.deepcopy(score))
    h = sct.scaled(gaussian(NODES, WIDTH)).requires_grad_()
    want = attention(indices, score, plain)
    got = attention(indices, scaled_score, h)
    assert_holds(got, want, 0.08)
    seed = gaussian(NODES, WIDTH, seed=1)
    want.backward(seed)
    got.backward(seed)
    assert float((dequantized(h.grad) - plain.grad).norm() / plain.grad.norm()) < 0.1
    error = dequantized(scaled_score.weight.grad) - score.weight.grad
    assert float(error.norm() / score.weight.grad.norm()) < 0.2


@pytest.mark.parametrize("layout", ["coo", "csr"])
@pytest.mark.parametrize("product", [torch.sparse.mm, torch.matmul])
def test__a_plain_graph_with_a_gradient__has_a_plain_one(layout, product):
    a = in_layout(graph(), layout).requires_grad_()
    dense = graph().requires_grad_()
    h = sct.scaled(gaussian(NODES, WIDTH))
    y, want = product(a, h), dense @ gaussian(NODES, WIDTH)
    assert_holds(y, want, 2.0**-7)
    y.sum().backward()
    want.sum().backward()
    assert type(a.grad) is torch.Tensor
    assert a.grad.layout == (
        torch.strided if (product, layout) == (torch.matmul, "coo") else a.layout
    )
    there = graph() != 0
    torch.testing.assert_close(
        a.grad.to_dense()[there], dense.grad[there], rtol=2.0**-6, atol=2.0**-6
    )


def made():
    values = sct.scaled(gaussian(5) * 2.0**-30)
    return torch.sparse_coo_tensor([[0, 2, 2, 1, 0], [1, 0, 0, 3, 2]], values, (3, 4)), values


VERBS = {
    "coalesce": lambda x: x.coalesce(),
    "t": lambda x: x.t(),
    "to_dense": lambda x: x.to_dense(),
    "mul": lambda x: x * 3.0,
    "div": lambda x: x / torch.tensor(3.0),
    "neg": lambda x: -x,
    "add": lambda x: x + x.coalesce(),
    "sub": lambda x: x.sub(x * 0.5),
    "dense": lambda x: torch.ones(3, 4) * 2.0**-30 + x,
    "values": lambda x: x.coalesce().values(),
    "clone": lambda x: x.clone(),
    "copy": lambda x: copy.deepcopy(x.detach()),
    "bfloat16": lambda x: x.to(torch.bfloat16).to(torch.float32),
    "double": lambda x: x.to(torch.float64),
    "mul_": lambda x: x.clone().mul_(3.0),
    "add_": lambda x: x.clone().add_(x.t().t(), alpha=2),
    "zero_": lambda x: x.clone().zero_(),
    "mask": lambda x: (torch.arange(12.0).view(3, 4) * 2.0**-30 + x).sparse_mask(x.coalesce()),
}


@pytest.mark.parametrize("verb", VERBS)
def test__a_sparse_tensor_of_scaled_values__computes_as_the_plain_one(verb):
    x, values = made()
    assert isinstance(x, SparseTensor)
    plain = torch.sparse_coo_tensor(x._indices(), values.dequantize(), (3, 4))
    got, want = VERBS[verb](x), VERBS[verb](plain)
    assert got.layout == want.layout
    assert got.dtype == want.dtype
    if got.layout == torch.sparse_coo:
        got, want = got.to_dense(), want.to_dense()
    assert_holds(got, want.float(), 2.0**-6)


def test__a_sparse_tensor__says_what_it_is_and_is_saved():
    x, _ = made()
    assert x.is_sparse
    assert repr(x).startswith("SparseTensor(indices=")
    assert "scale=2**-3" in repr(x)
    back = saved_and_loaded(x)
    assert isinstance(back, SparseTensor)
    assert torch.equal(back.to_dense().dequantize(), x.to_dense().dequantize())


REFUSED = {
    "function": (lambda x, h: torch.relu(x), r"values\(\)"),
    "elements": (lambda x, h: x * torch.ones(3, 4), "0-dim"),
    "plain": (lambda x, h: h * torch.eye(4).to_sparse(), "sparse_coo_tensor"),
    "two": (lambda x, h: torch.sparse.mm(x, torch.eye(4).to_sparse()), "two sparse"),
    "csr": (lambda x, h: torch.sparse_csr_tensor([0, 1], [0], h[0, :1], (1, 1)), "sparse_coo"),
    "layout": (lambda x, h: h.to_sparse_csr(), "sparse_coo"),
    "made": (lambda x, h: SparseTensor(h), "sparse_coo_tensor"),
}


@pytest.mark.parametrize("name", REFUSED)
def test__what_a_sparse_tensor_does_not_do__is_said(name):
    run, words = REFUSED[name]
    x, _ = made()
    with pytest.raises(UnsupportedError, match=words):
        run(x, sct.scaled(gaussian(4, 4)))


# --- embeddings ------------------------------------------------------------------------------

OPTIMIZERS = {
    "SGD": {"lr": 0.5},
    "SGD momentum": {"lr": 0.2, "momentum": 0.9},
    "SparseAdam": {"lr": 0.05},
    "Adagrad": {"lr": 0.2},
}
TABLES = {
    "embedding": lambda: nn.Embedding(40, WIDTH, padding_idx=1, sparse=True),
    "bag": lambda: nn.EmbeddingBag(40, WIDTH, sparse=True),
}


def steps(table, name, multiplier=1.0):
    optimizer = getattr(torch.optim, name.split()[0])(
        table.parameters(), **OPTIMIZERS[name] | ({"eps": 1e-30} if "A" in name else {})
    )
    for t in range(6):
        optimizer.zero_grad()
        chosen = torch.randint(30, (6, 4), generator=torch.Generator().manual_seed(t))
        y = table(chosen)
        loss = (y - gaussian(*y.shape, seed=t)).square().mean() * multiplier
        loss.backward()
        optimizer.step()
    return optimizer


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("table", TABLES)
def test__a_sparse_gradient__is_one_of_its_rows_and_trains_as_plain(table, name):
    torch.manual_seed(0)
    plain = TABLES[table]()
    scaled = sct.scale_model(copy.deepcopy(plain))
    before = scaled.weight.detach().dequantize().clone()
    steps(plain, name)
    steps(scaled, name)
    assert isinstance(scaled.weight.grad, SparseTensor)
    assert scaled.weight.grad._nnz() == plain.weight.grad._nnz() == 24
    after = scaled.weight.detach().dequantize()
    assert torch.equal(after[30:], before[30:])  # These tokens are in no batch.
    moved = (plain.weight.detach() - before).norm()
    assert float((after - plain.weight.detach()).norm() / moved) < 0.03


@pytest.mark.parametrize("name", ["SparseAdam", "Adagrad"])
def test__a_sparse_gradient__has_the_same_bits_under_any_power_of_two_of_the_loss(name):
    tables = []
    for k in (0, -20):
        torch.manual_seed(0)
        table = sct.scale_model(nn.Embedding(40, WIDTH, sparse=True))
        steps(table, name, 2.0**k)
        tables.append(table.weight)
    assert_shifted(tables[0].detach(), tables[1].detach(), 0)
    first, second = (t.grad.coalesce() for t in tables)
    assert_shifted(first.values(), second.values(), -20)
    assert torch.equal(first.indices(), second.indices())


def test__sparse_gradients__accumulate_and_are_cleared():
    table = sct.scale_model(nn.Embedding(10, 4, sparse=True))
    plain = nn.Embedding(10, 4, sparse=True)
    plain.weight.data = table.weight.detach().dequantize()
    for t in range(3):
        for m in (table, plain):
            m(torch.tensor([t, 1, 1])).square().sum().backward()
    assert_holds(table.weight.grad.to_dense(), plain.weight.grad.to_dense(), 2.0**-6)
    table.zero_grad(set_to_none=False)
    assert not table.weight.grad.to_dense().dequantize().any()


def test__the_states_of_sparse_gradients__go_through_a_checkpoint():
    table = sct.scale_model(nn.Embedding(40, WIDTH, sparse=True))
    optimizer = steps(table, "SGD momentum")
    other = torch.optim.SGD(table.parameters(), **OPTIMIZERS["SGD momentum"])
    other.load_state_dict(saved_and_loaded(optimizer.state_dict()))
    (was,), (now,) = optimizer.state.values(), other.state.values()
    assert isinstance(now["momentum_buffer"], SparseTensor)
    assert_shifted(
        was["momentum_buffer"].to_dense().detach(), now["momentum_buffer"].to_dense().detach(), 0
    )


def test__a_model_with_sparse_gradients__is_scaled_and_unscaled_with_them():
    table = nn.Embedding(10, 4, sparse=True)
    table(torch.tensor([1, 1, 3])).square().sum().backward()
    want = table.weight.grad.to_dense()
    sct.scale_model(table)
    assert isinstance(table.weight.grad, SparseTensor)
    assert_holds(table.weight.grad.to_dense(), want, 2.0**-20)
    sct.unscale_model(table)
    assert table.weight.grad.is_sparse
    torch.testing.assert_close(table.weight.grad.to_dense(), want)


def test__rebalance__leaves_a_sparse_state_as_it_is():
    table = sct.scale_model(nn.Embedding(40, WIDTH, sparse=True))
    optimizer = steps(table, "SGD momentum")
    (state,) = optimizer.state.values()
    before = state["momentum_buffer"].to_dense().dequantize()
    sct.rebalance(optimizer)
    assert torch.equal(state["momentum_buffer"].to_dense().dequantize(), before)


def test__a_gradient_scaler__unscales_sparse_gradients():
    table = sct.scale_model(nn.Embedding(10, 4, sparse=True))
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12)
    optimizer = torch.optim.SGD(table.parameters(), lr=0.1)
    loss = table(torch.tensor([1, 3])).square().sum()
    scaler.scale(loss).backward()
    scaled_up = table.weight.grad.coalesce().values()
    scaler.unscale_(optimizer)
    assert_shifted(scaled_up, table.weight.grad.coalesce().values(), -12)
    scaler.step(optimizer)


def test__a_compiled_embedding__has_a_sparse_gradient():
    torch._dynamo.reset()
    table = sct.scale_model(nn.Embedding(10, 4, sparse=True))
    loss = torch.compile(lambda i: table(i).square().sum(), fullgraph=True, backend="aot_eager")
    loss(torch.tensor([1, 3, 3])).backward()
    assert isinstance(table.weight.grad, SparseTensor)
    want = torch.zeros(10, 4)
    rows = table.weight.detach().dequantize()[[1, 3]]
    want[1], want[3] = 2 * rows[0], 4 * rows[1]
    assert_holds(table.weight.grad.to_dense(), want, 2.0**-6)
