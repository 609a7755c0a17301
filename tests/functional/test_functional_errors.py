"""Functions refuse wrong calls with a message that names the mistake."""

import pytest
import torch
from tensors import gaussian

import scaledtensor.functional as U
from scaledtensor.errors import ScaleError, ShapeError, UnsupportedError

X = gaussian(4, 8)
W = gaussian(6, 8, seed=1)
TOKENS = torch.arange(4)

REFUSED = {
    "constraint": (lambda: U.gelu(X, constraint="gmaen"), ScaleError, "gmean"),
    "constraint of a norm": (lambda: U.rms_norm(X, (8,), constraint="no"), ScaleError, "unknown"),
    "constraint of a product": (
        lambda: U.matmul(X, W.mT, constraint="to_grad_input_scale"),
        ScaleError,
        "among 2 scales",
    ),
    "constraint of an activation": (
        lambda: U.gelu(X, constraint="to_left_grad_scale"),
        ScaleError,
        "among 3 scales",
    ),
    "add out": (lambda: U.add(X, X, out=X), UnsupportedError, "assign"),
    "gelu of mult 0": (lambda: U.tanh(X, mult=0.0), ScaleError, "positive"),
    "relu in place": (lambda: U.relu(X, inplace=True), UnsupportedError, "assign"),
    "silu in place": (lambda: U.silu(X, inplace=True), UnsupportedError, "assign"),
    "dropout in place": (lambda: U.dropout(X, inplace=True), UnsupportedError, "assign"),
    "dropout p": (lambda: U.dropout(X, 1.5), ValueError, "probability"),
    "bmm": (lambda: U.bmm(X, W), ShapeError, "three dimensions"),
    "einsum of one": (lambda: U.einsum("ij->ji", X, X), ShapeError, "1 terms; got 2"),
    "einsum of a trace": (lambda: U.einsum("ii,ij->j", X, X), ShapeError, "once"),
    "embedding norm": (
        lambda: U.embedding(TOKENS, W, max_norm=1.0),
        UnsupportedError,
        "max_norm",
    ),
    "mse shapes": (lambda: U.mse_loss(X, X[:1]), ShapeError, r"\(4, 8\) and \(1, 8\)"),
    "l1 shapes": (lambda: U.l1_loss(X, X[:1]), ShapeError, "one shape"),
    "bce shapes": (
        lambda: U.binary_cross_entropy_with_logits(X, X[:1]),
        ShapeError,
        "one shape",
    ),
    "kl shapes": (lambda: U.kl_div(X, X[:1]), ShapeError, "one shape"),
    "cross_entropy of a number": (
        lambda: U.cross_entropy(X.sum(), TOKENS),
        ShapeError,
        "takes logits",
    ),
    "cross_entropy reduce": (
        lambda: U.cross_entropy(X, TOKENS, reduce=False),
        UnsupportedError,
        "reduction=",
    ),
    "cross_entropy reduction": (
        lambda: U.cross_entropy(X, TOKENS, reduction="average"),
        ValueError,
        "average",
    ),
    "moe_route": (lambda: U.moe_route(X, 9), ShapeError, "8 experts"),
    "grouped_linear": (lambda: U.grouped_linear(X, W, TOKENS), ShapeError, "offsets"),
}


@pytest.mark.parametrize("name", REFUSED)
def test__a_mistake__is_named(name):
    call, error, words = REFUSED[name]
    with pytest.raises(error, match=words):
        call()


def test__an_empty_batch__has_an_empty_result():
    """A sum of zero terms is an error, as in torch: it has no scale to choose."""
    w = W.clone().requires_grad_()
    y = U.linear(X[:0], w, w[:, 0])
    assert y.shape == (0, 6)
    y.sum().backward()
    assert not w.grad.any()
    assert U.embedding(TOKENS[:0], W).shape == (0, 8)
    assert U.matmul(X[:0], W.mT).shape == (0, 6)
    assert U.layer_norm(X[:0], (8,), W[0], W[1]).shape == (0, 8)
    assert U.add(X[:0], X[:0]).shape == (0, 8)


def test__where_all_targets_are_ignored__the_gradient_is_zero():
    x = X.clone().requires_grad_()
    loss = U.cross_entropy(x, torch.full((4,), -100), reduction="sum")
    loss.backward()
    assert float(loss) == 0
    assert not x.grad.any()
