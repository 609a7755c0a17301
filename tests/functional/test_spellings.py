"""Torch's spellings of a function reach the unit-scaled one through torch's own signatures."""

import inspect

import pytest
import torch
import torch.nn.functional as F
from assertions import assert_each
from tensors import randn
from torch import Tensor, nn

import scaledtensor as sct
import scaledtensor.functional as U
from scaledtensor.errors import UnsupportedError
from scaledtensor.functional.spellings import COUNTERPARTS

A, B, C = randn(8, 16), randn(16, 4), randn(8, 4)
A3, B3, C3 = randn(2, 8, 16), randn(2, 16, 4), randn(2, 8, 4)
V, ROWS = randn(16), randn(8, 16, seed=9)
X1, W1, B1 = randn(2, 4, 16), randn(6, 4, 3), randn(6)
X2, W2 = randn(2, 4, 8, 8), randn(6, 4, 3, 3)
X3, W3 = randn(2, 4, 6, 6, 6), randn(6, 4, 3, 3, 3)
G4, G8, SUM = randn(4), randn(8), randn(8, 4, seed=3)
G, H = torch.rand(16) + 0.5, randn(16, seed=4)
Q, K, VALUE = (randn(2, 3, 8, 4, seed=i) for i in range(3))
TOKENS = torch.arange(8) % 4
ENDS = torch.tensor([3, 8], dtype=torch.int32)
TARGET = torch.rand(8, 4)

NETWORKS = {
    torch.lstm: torch.lstm_cell,
    torch.gru: torch.gru_cell,
    torch.rnn_tanh: torch.rnn_tanh_cell,
    torch.rnn_relu: torch.rnn_relu_cell,
}
GATES = {torch.lstm: 4, torch.gru: 3}
XT, HT, CT = randn(2, 5, 8), randn(5, 6), randn(5, 6, seed=3)


def rms_of(function):
    z = torch.linspace(-10, 10, 100_001, dtype=torch.float64)
    weight = (-z.square() / 2).exp()
    return float((weight * function(z).square()).sum() / weight.sum()) ** 0.5


def recurrent(network, steps=0):
    """Return arguments, keyword arguments and the expected call, for a cell or for a network of
    steps."""
    n = 6 * GATES.get(network, 1)
    w, u, b, d = randn(n, 8), randn(n, 6), randn(n), randn(n, seed=1)
    s, t = rms_of(torch.sigmoid), rms_of(torch.tanh)
    kept = {torch.lstm: 1.2, torch.gru: 1.1}.get(network, 1) * s * t / (1 - s * s) ** 0.5

    def step(x, h, c):
        x, y = U.linear(x, w) / 2**0.5 + b, U.linear(h, u) / 2**0.5 + d
        if network is torch.lstm:
            i, f, g, o = (x + y).chunk(4, -1)
            c = f.sigmoid() * c + i.sigmoid() * g.tanh() / kept
            return o.sigmoid() * (c * kept).tanh() / (s * rms_of(lambda z: (kept * z).tanh())), c
        if network is torch.gru:
            (r, z, n), (rh, zh, nh) = x.chunk(3, -1), y.chunk(3, -1)
            n, z = (n + (r + rh).sigmoid() / s * nh).tanh() / kept, (z + zh).sigmoid()
            return (1 - z) * n + z * h, c
        return ((x + y).tanh() / t if network is torch.rnn_tanh else (x + y).relu() * 2**0.5), c

    def expected():
        h, c, outputs = HT, CT, []
        for x in XT[: steps or 1]:
            h, c = step(x, h, c)
            outputs.append(h)
        states = (h, c) if network is torch.lstm else (h,)
        if not steps:
            return states if network is torch.lstm else h
        return torch.stack(outputs), *(state[None] for state in states)

    states = (HT, CT) if network is torch.lstm else HT
    if not steps:
        return (XT[0], states, w, u, b, d), {}, expected
    states = (HT[None], CT[None]) if network is torch.lstm else HT[None]
    return (XT, states, [w, u, b, d], True, 1, 0.0, True, False, False), {}, expected


#: Maps a spelling to arguments, keyword arguments and the expected call.
CALLS = {
    F.linear: ((A, ROWS, randn(8)), {}, lambda: U.linear(A, ROWS, randn(8))),
    torch.matmul: ((A, B), {}, lambda: U.matmul(A, B)),
    torch.linalg.matmul: ((A, B), {}, lambda: U.matmul(A, B)),
    Tensor.matmul: ((A3, B), {}, lambda: U.matmul(A3, B)),
    Tensor.__matmul__: ((A, V), {}, lambda: U.matmul(A, V)),
    Tensor.__rmatmul__: ((B, A), {}, lambda: U.matmul(A, B)),
    torch.mm: ((A,), {"mat2": B}, lambda: U.matmul(A, B)),
    Tensor.mm: ((A, B), {}, lambda: U.matmul(A, B)),
    torch.mv: ((A,), {"vec": V}, lambda: U.matmul(A, V)),
    Tensor.mv: ((A, V), {}, lambda: U.matmul(A, V)),
    torch.bmm: ((A3,), {"mat2": B3}, lambda: U.bmm(A3, B3)),
    Tensor.bmm: ((A3, B3), {}, lambda: U.bmm(A3, B3)),
    torch.einsum: (("ij,jk", A, B), {}, lambda: U.matmul(A, B)),
    torch.functional.einsum: (("ij,jk", [A, B]), {}, lambda: U.matmul(A, B)),
    torch.addmm: ((C, A, B), {}, lambda: U.add(C, U.matmul(A, B))),
    Tensor.addmm: ((C, A, B), {"beta": 0, "alpha": 2}, lambda: 2 * U.matmul(A, B)),
    torch.baddbmm: ((C3, A3, B3), {}, lambda: U.add(C3, U.bmm(A3, B3))),
    Tensor.baddbmm: ((C3, A3, B3), {"beta": 2}, lambda: U.add(C3 * 2, U.bmm(A3, B3))),
    Tensor.addmm_: ((C, A, B), {"alpha": 2}, lambda: U.add(C, 2 * U.matmul(A, B))),
    Tensor.baddbmm_: ((C3, A3, B3), {}, lambda: U.add(C3, U.bmm(A3, B3))),
    F.grouped_mm: ((A, B3), {"offs": ENDS}, lambda: U.grouped_linear(A, B3, ENDS)),
    torch._grouped_mm: ((A, B3), {"offs": ENDS}, lambda: U.grouped_linear(A, B3, ENDS)),
    torch.inner: ((A,), {"other": B.mT}, lambda: U.matmul(A, B)),
    Tensor.inner: ((A, V), {}, lambda: U.matmul(A, V)),
    torch.tensordot: ((A, B, 1), {}, lambda: U.matmul(A, B)),
    torch.functional.tensordot: ((A, B), {"dims": ([1], [0])}, lambda: U.matmul(A, B)),
    torch.linalg.multi_dot: (
        ([A, B, B.mT],),
        {},
        lambda: U.matmul(U.matmul(A, B), B.mT),
    ),
    torch.chain_matmul: ((A, B, B.mT), {}, lambda: U.matmul(U.matmul(A, B), B.mT)),
    torch.functional.chain_matmul: ((A, B), {}, lambda: U.matmul(A, B)),
    F.bilinear: (
        (A, A, randn(4, 16, 16), G4),
        {},
        lambda: U.einsum("ni,nj,oij->no", A, A, randn(4, 16, 16)) + G4,
    ),
    torch.addmv: ((G8, A), {"vec": V}, lambda: U.add(G8, U.matmul(A, V))),
    Tensor.addmv: ((G8, A, V), {"alpha": 2}, lambda: U.add(G8, 2 * U.matmul(A, V))),
    Tensor.addmv_: ((G8, A, V), {}, lambda: U.add(G8, U.matmul(A, V))),
    **{
        f: ((SUM, A3, B3), {}, lambda: U.add(SUM, U.einsum("bij,bjk->ik", A3, B3)))
        for f in (torch.addbmm, Tensor.addbmm, Tensor.addbmm_)
    },
    torch.convolution: (
        (X2, W2, None, [2, 2], [0, 0], [1, 1], False, [0, 0], 1),
        {},
        lambda: U.conv2d(X2, W2, stride=2),
    ),
    torch.conv_tbc: (
        (X1.permute(2, 0, 1).contiguous(), W1.permute(2, 1, 0).contiguous(), B1, 1),
        {},
        lambda: U.conv1d(X1, W1, B1, padding=1).permute(2, 0, 1),
    ),
    torch.add: ((A, ROWS), {"alpha": 2}, lambda: U.add(A, ROWS, alpha=2)),
    Tensor.add: ((A, ROWS), {}, lambda: U.add(A, ROWS)),
    Tensor.__add__: ((A, 2), {}, lambda: A + 2),
    Tensor.__iadd__: ((A, ROWS), {}, lambda: U.add(A, ROWS)),
    Tensor.__radd__: ((A, 2), {}, lambda: A + 2),
    torch.sub: ((A, ROWS), {"alpha": 2}, lambda: U.add(A, ROWS, alpha=-2)),
    torch.subtract: ((A, ROWS), {}, lambda: U.add(A, -ROWS)),
    Tensor.sub: ((A, ROWS), {}, lambda: U.add(A, -ROWS)),
    Tensor.subtract: ((A, ROWS), {}, lambda: U.add(A, -ROWS)),
    Tensor.__sub__: ((A, ROWS), {}, lambda: U.add(A, -ROWS)),
    Tensor.__isub__: ((A, ROWS), {}, lambda: U.add(A, -ROWS)),
    Tensor.__rsub__: ((A, 2), {}, lambda: 2 - A),
    torch.mul: ((A, ROWS), {}, lambda: U.mul(A, ROWS)),
    torch.multiply: ((A, ROWS), {}, lambda: U.mul(A, ROWS)),
    Tensor.mul: ((A, ROWS), {}, lambda: U.mul(A, ROWS)),
    Tensor.multiply: ((A, ROWS), {}, lambda: U.mul(A, ROWS)),
    Tensor.__mul__: ((A, A), {}, lambda: U.mul(A, A)),
    Tensor.__imul__: ((A, ROWS), {}, lambda: U.mul(A, ROWS)),
    Tensor.__rmul__: ((A, 3.0), {}, lambda: 3 * A),
    F.gelu: ((A,), {"approximate": "tanh"}, lambda: U.gelu(A, approximate="tanh")),
    F.silu: ((A, True), {}, lambda: U.silu(A)),
    F.relu: ((A,), {"inplace": True}, lambda: U.relu(A)),
    torch.relu: ((A,), {}, lambda: U.relu(A)),
    Tensor.relu: ((A,), {}, lambda: U.relu(A)),
    torch.relu_: ((A,), {}, lambda: U.relu(A)),
    Tensor.relu_: ((A,), {}, lambda: U.relu(A)),
    F.leaky_relu: ((A, 0.1, True), {}, lambda: U.leaky_relu(A, 0.1)),
    **{
        f: ((A,), {}, lambda: U.tanh(A))
        for f in (torch.tanh, Tensor.tanh, F.tanh, torch.tanh_, Tensor.tanh_)
    },
    **{
        f: ((A,), {}, lambda: U.sigmoid(A))
        for f in (
            *(torch.sigmoid, Tensor.sigmoid, F.sigmoid, torch.special.expit),
            *(torch.sigmoid_, Tensor.sigmoid_),
        )
    },
    F.softmax: ((A, -1), {"_stacklevel": 5}, lambda: U.softmax(A, -1)),
    torch.softmax: ((A,), {"dim": 0}, lambda: U.softmax(A, 0)),
    torch.special.softmax: ((A, 0), {}, lambda: U.softmax(A, 0)),
    Tensor.softmax: ((A, -1, torch.float64), {}, lambda: U.softmax(A, -1, torch.float64)),
    F.log_softmax: ((A, -1), {}, lambda: U.log_softmax(A, -1)),
    torch.log_softmax: ((A,), {"dim": 0}, lambda: U.log_softmax(A, 0)),
    torch.special.log_softmax: ((A, 0), {}, lambda: U.log_softmax(A, 0)),
    Tensor.log_softmax: ((A, -1), {}, lambda: U.log_softmax(A, -1)),
    F.dropout: ((A, 0.5, False), {}, lambda: A),
    torch.dropout: ((A, 0.5, False), {}, lambda: A),
    torch.dropout_: ((A, 0.5, False), {}, lambda: A),
    torch.conv1d: ((X1, W1, B1), {"padding": 1}, lambda: U.conv1d(X1, W1, B1, padding=1)),
    torch.conv2d: ((X2, W2, None, 2), {}, lambda: U.conv2d(X2, W2, stride=2)),
    torch.conv3d: ((X3, W3), {"dilation": 2}, lambda: U.conv3d(X3, W3, dilation=2)),
    torch.conv_transpose1d: (
        (X1, W1.transpose(0, 1)),
        {"stride": 2},
        lambda: U.conv_transpose1d(X1, W1.transpose(0, 1), stride=2),
    ),
    torch.conv_transpose2d: (
        (X2, W2.transpose(0, 1), None, 2, 1, 1),
        {},
        lambda: U.conv_transpose2d(X2, W2.transpose(0, 1), stride=2, padding=1, output_padding=1),
    ),
    torch.conv_transpose3d: (
        (X3, W3.transpose(0, 1)),
        {},
        lambda: U.conv_transpose3d(X3, W3.transpose(0, 1)),
    ),
    F.avg_pool1d: ((X1, 4, 2, 1), {}, lambda: U.avg_pool1d(X1, 4, 2, 1)),
    F.avg_pool2d: (
        (X2, (2, 4)),
        {"stride": [], "divisor_override": 3},
        lambda: U.avg_pool2d(X2, (2, 4), divisor_override=3),
    ),
    F.avg_pool3d: ((X3, [2], 1), {}, lambda: U.avg_pool3d(X3, 2, 1)),
    F.adaptive_avg_pool1d: ((X1, 4), {}, lambda: U.adaptive_avg_pool1d(X1, [4])),
    F.adaptive_avg_pool2d: ((X2, (None, 1)), {}, lambda: U.adaptive_avg_pool2d(X2, (8, 1))),
    F.adaptive_avg_pool3d: ((X3, 2), {}, lambda: U.adaptive_avg_pool3d(X3, (2, 2, 2))),
    torch.mean: ((X2, (2, 3), True), {}, lambda: U.mean(X2, (2, 3), True)),
    Tensor.mean: ((X2, -1), {"dtype": torch.float64}, lambda: U.mean(X2, -1, dtype=torch.float64)),
    **{network: recurrent(network, steps=2) for network in NETWORKS},
    **{cell: recurrent(network) for network, cell in NETWORKS.items()},
    F.layer_norm: ((A, [16], G, H), {}, lambda: U.layer_norm(A, [16], G, H)),
    torch.layer_norm: ((A, [16], G, H, 1e-3, False), {}, lambda: U.layer_norm(A, [16], G, H, 1e-3)),
    F.rms_norm: ((A, [16], G), {}, lambda: U.rms_norm(A, [16], G, None)),
    torch.rms_norm: ((A, [16], G, 1e-2), {}, lambda: U.rms_norm(A, [16], G, 1e-2)),
    F.group_norm: ((A, 4, G, H), {}, lambda: U.group_norm(A, 4, G, H)),
    torch.group_norm: ((A, 4, G, H, 1e-3), {}, lambda: U.group_norm(A, 4, G, H, 1e-3)),
    F.batch_norm: ((A, H, G), {}, lambda: U.batch_norm(A, H, G)),
    torch.batch_norm: (
        (A, G, H, None, None, True, 0.1, 1e-5, False),
        {},
        lambda: U.batch_norm(A, None, None, G, H, True),
    ),
    F.embedding: ((TOKENS, ROWS, 1), {}, lambda: U.embedding(TOKENS, ROWS)),
    torch.embedding: ((ROWS, TOKENS, 1), {}, lambda: U.embedding(TOKENS, ROWS)),
    F.scaled_dot_product_attention: (
        (Q, K, VALUE),
        {"is_causal": True, "scale": 4.0},
        lambda: U.scaled_dot_product_attention(Q, K, VALUE, is_causal=True, mult=8.0),
    ),
    F.cross_entropy: ((C, TOKENS), {}, lambda: U.cross_entropy(C, TOKENS)),
    F.nll_loss: ((C, TOKENS), {}, lambda: U.nll_loss(C, TOKENS)),
    F.mse_loss: ((C, TARGET), {"reduction": "sum"}, lambda: U.mse_loss(C, TARGET, reduction="sum")),
    F.l1_loss: ((C, TARGET), {}, lambda: U.l1_loss(C, TARGET)),
    F.smooth_l1_loss: ((C, TARGET), {"beta": 2.0}, lambda: U.smooth_l1_loss(C, TARGET, beta=2.0)),
    F.binary_cross_entropy_with_logits: (
        (C, TARGET),
        {},
        lambda: U.binary_cross_entropy_with_logits(C, TARGET),
    ),
    F.kl_div: (
        (C, TARGET),
        {"reduction": "batchmean"},
        lambda: U.kl_div(C, TARGET, reduction="batchmean"),
    ),
}


def named(spelling):
    return f"{getattr(spelling, '__module__', '')}.{getattr(spelling, '__name__', spelling)}"


def test__every_spelling__is_tested():
    assert set(CALLS) == set(COUNTERPARTS)


@pytest.mark.parametrize("spelling", CALLS, ids=named)
def test__a_spelling__is_the_unit_scaled_function(spelling):
    arguments, keywords, expected = CALLS[spelling]
    given = [x.clone() if isinstance(x, Tensor) else x for x in arguments]
    if spelling in (Tensor.__mul__,):
        given[1] = given[0]  # A square has one tensor as both operands.
    torch.testing.assert_close(COUNTERPARTS[spelling](*given, **keywords), expected())
    for x, before in zip(given, arguments, strict=True):
        if isinstance(x, Tensor):
            assert torch.equal(x, before)
    # torch takes these calls too, so a model may contain them.
    spelling(*(x.clone() if isinstance(x, Tensor) else x for x in arguments), **keywords)


def test__every_spelling__has_the_parameters_of_torch():
    assert_each(CALLS, _has_the_parameters_of_torch, named)


def _has_the_parameters_of_torch(spelling):
    try:
        wanted = inspect.signature(spelling).parameters
    # The function is in C++, and the call above spells its arguments out.
    except (TypeError, ValueError):
        return
    if list(wanted) in (["self", "args", "kwargs"], ["args", "kwargs"]):
        return
    found = inspect.signature(COUNTERPARTS[spelling]).parameters
    renamed = {"self": "input"}
    kinds = [p for p in wanted.values() if p.kind is p.POSITIONAL_OR_KEYWORD]
    for own, theirs in zip(found.values(), kinds, strict=False):
        assert own.name == renamed.get(theirs.name, theirs.name) or own.name == theirs.name
    assert {renamed.get(p.name, p.name) for p in kinds} <= {*found, "self", "input"}


@pytest.mark.parametrize(
    "call",
    [
        lambda x, w: COUNTERPARTS[torch.matmul](x, w),
        lambda x, w: COUNTERPARTS[Tensor.__matmul__](x, w.t().contiguous().t()),
        lambda x, w: COUNTERPARTS[torch.addmm](torch.zeros(4), x, w),
    ],
)
def test__a_product_with_a_parameter__is_a_linear_layer(call):
    """The gradient is divided by the root of the batch size under every constraint."""
    x, w = randn(256, 16), nn.Parameter(randn(16, 4))
    w_used = w.view(16, 4)
    for weight in (w, w_used):
        out = COUNTERPARTS[torch.matmul](x, weight)
        (g,) = torch.autograd.grad(out, w, randn(256, 4))
        torch.testing.assert_close(out, U.linear(x, w.mT))
        assert 0.7 < float(g.std()) < 1.3
    out = call(x, w)
    torch.testing.assert_close(out, U.linear(x, w.mT))


def test__gains_and_biases__have_gradients_over_the_root_of_their_use():
    x, p = randn(256, 64), nn.Parameter(torch.ones(64))
    seed = randn(256, 64, seed=5)
    for spelling, expected in ((torch.mul, x * 1), (torch.add, x + 1), (Tensor.__radd__, x + 1)):
        out = COUNTERPARTS[spelling](x, p)
        torch.testing.assert_close(out, expected)
        assert 0.7 < float(torch.autograd.grad(out, p, seed)[0].std()) < 1.3
    table = nn.Parameter(randn(16, 64, seed=3))
    out = COUNTERPARTS[Tensor.__add__](x.view(16, 16, 64), table)
    assert 0.9 < float(out.std()) < 1.1
    assert 0.7 < float(torch.autograd.grad(out, table, seed.view(16, 16, 64))[0].std()) < 1.3


def test__what_a_spelling_cannot_do__is_named():
    with pytest.raises(UnsupportedError, match="out="):
        COUNTERPARTS[torch.matmul](A, B, out=C)
    with pytest.raises(UnsupportedError, match="as a string"):
        COUNTERPARTS[torch.einsum](A, [0, 1], B, [1, 2])
    with pytest.raises(UnsupportedError, match="dim="):
        COUNTERPARTS[F.softmax](A)
    with pytest.raises(UnsupportedError, match="weight"):
        COUNTERPARTS[F.mse_loss](C, TARGET, weight=TARGET)


# --- 8-bit operands --------------------------------------------------------------------------

PRODUCTS = {
    "linear": (U.linear, (8, 16), (4, 16), (4,)),
    "linear_readout": (U.linear_readout, (8, 16), (4, 16)),
    "matmul": (U.matmul, (8, 16), (16, 4)),
    "bmm": (U.bmm, (2, 8, 16), (2, 16, 4)),
    "einsum": (lambda a, b: U.einsum("ij,jk->ik", a, b), (8, 16), (16, 4)),
    "conv1d": (U.conv1d, (2, 4, 16), (6, 4, 3), (6,)),
    "conv2d": (U.conv2d, (2, 4, 8, 8), (6, 4, 3, 3), (6,)),
    "conv3d": (U.conv3d, (2, 4, 6, 6, 6), (6, 4, 3, 3, 3), (6,)),
    "conv_transpose1d": (U.conv_transpose1d, (2, 4, 16), (4, 6, 3), (6,)),
    "conv_transpose2d": (U.conv_transpose2d, (2, 4, 8, 8), (4, 6, 3, 3), (6,)),
    "conv_transpose3d": (U.conv_transpose3d, (2, 4, 4, 4, 4), (4, 6, 3, 3, 3)),
    "grouped_linear": (lambda x, w: U.grouped_linear(x, w, ENDS), (8, 16), (2, 16, 4)),
}


@pytest.mark.parametrize("name", PRODUCTS)
def test__products_of_scaled_tensors__save_8_bit_operands(name):
    function, *shapes = PRODUCTS[name]
    tensors = [sct.scaled(randn(*s), recipe="unit").requires_grad_() for s in shapes]
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x) or x, lambda x: x):
        out = function(*tensors)
    large = [x for x in saved if x.numel() > 16 and x.dtype.is_floating_point]
    assert len(large) == 2
    assert {x.format.name for x in large} == {"e4m3fn"}
    grads = torch.autograd.grad(out, tensors, sct.scaled(torch.randn(out.shape)))
    assert all(isinstance(g, sct.ScaledTensor) for g in grads)
