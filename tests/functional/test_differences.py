"""The published library is wrong in these points. Each test shows one point and the behaviour
here."""

import pytest
import torch
import torch.nn.functional as F
from tensors import randn

import scaledtensor.functional as U

published = pytest.importorskip("unit_scaling.functional")
constraints = pytest.importorskip("unit_scaling.constraints")


def gradients(out, *leaves):
    seed = randn(*out.shape, seed=5) if out.dim() else torch.ones(())
    return torch.autograd.grad(out, leaves, seed)


def test__linear__does_not_shrink_its_bias():
    """The published library computes (x w + b) / sqrt(K), so a bias of 1 adds 1/sqrt(K). Its
    gradient is the same."""
    x, w, b = (t.requires_grad_() for t in (randn(8, 64), randn(4, 64), randn(4)))
    ours, theirs = U.linear(x, w, b), published.linear(x, w, b)
    torch.testing.assert_close(ours, U.linear(x, w, None) + b)
    torch.testing.assert_close(theirs, U.linear(x, w, None) + b / 8)
    for mine, other in zip(gradients(ours, x, w, b), gradients(theirs, x, w, b), strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-5, atol=1e-5)


def test__conv1d__does_not_shrink_its_bias():
    x, w, b = (t.requires_grad_() for t in (randn(2, 8, 32), randn(4, 8, 2), randn(4)))
    ours, theirs = U.conv1d(x, w, b), published.conv1d(x, w, b)
    torch.testing.assert_close(ours, U.conv1d(x, w) + b[:, None])
    torch.testing.assert_close(theirs, U.conv1d(x, w) + b[:, None] / 4)
    for mine, other in zip(gradients(ours, x, w, b), gradients(theirs, x, w, b), strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-5, atol=1e-5)


def test__cross_entropy__does_not_count_ignored_tokens():
    """The published mean divides by all tokens, and the gradient has RMS sqrt(share of the
    others)."""
    x, target = randn(256, 32).requires_grad_(), torch.arange(256) % 32
    target[::2] = -100
    ours, theirs = U.cross_entropy(x, target), published.cross_entropy(x, target)
    torch.testing.assert_close(ours, F.cross_entropy(x, target))
    torch.testing.assert_close(theirs, ours / 2)
    (mine,), (other,) = gradients(ours, x), gradients(theirs, x)
    torch.testing.assert_close(mine, other * 2**0.5, rtol=1e-5, atol=1e-5)
    assert float(mine.square().mean().sqrt()) == pytest.approx(1, rel=0.1)


def test__cross_entropy__takes_images_weights_and_smoothing():
    """The published functions raise here."""
    x, target = randn(8, 32, 5).requires_grad_(), torch.arange(40).view(8, 5) % 32
    options = {"weight": torch.rand(32) + 0.1, "label_smoothing": 0.3}
    with pytest.raises(AssertionError):
        published.cross_entropy(x, target)
    with pytest.raises(ValueError, match="Support"):
        published.cross_entropy(x[..., 0], target[:, 0], **options)
    loss = U.cross_entropy(x, target, **options)
    torch.testing.assert_close(loss, F.cross_entropy(x, target, **options))
    assert float(gradients(loss, x)[0].square().mean().sqrt()) == pytest.approx(1, rel=0.1)


def test__dropout_in_evaluation__is_the_identity():
    """The published dropout still multiplies by sqrt(1 - p)."""
    x = randn(8)
    assert torch.equal(U.dropout(x, 0.5, training=False), x)
    torch.testing.assert_close(published.dropout(x, 0.5, training=False), x / 2**0.5)


def test__matmul__counts_how_often_an_operand_is_used():
    """In the published library, the gradient of a matrix that a batch shares counts the rows of one
    member."""
    a, b = randn(16, 8, 32).requires_grad_(), randn(32, 64).requires_grad_()
    ours = gradients(U.matmul(a, b, constraint=None), b)[0]
    theirs = gradients(published.matmul(a, b, constraint=None), b)[0]
    torch.testing.assert_close(theirs, ours * 4, rtol=1e-5, atol=1e-5)
    assert float(ours.std()) == pytest.approx(1, rel=0.1)


def test__matmul__takes_vectors():
    """The published functions raise here."""
    a, b = randn(8, 32), randn(32)
    with pytest.raises(IndexError):
        published.matmul(b, a.mT)
    torch.testing.assert_close(U.matmul(b, a.mT), b @ a.mT / 32**0.5)
    torch.testing.assert_close(U.matmul(a, b), a @ b / 32**0.5)


def test__conv1d__takes_sequences_and_padding_by_name():
    """The published functions raise here."""
    x, w = randn(2, 8, 32), randn(4, 8, 3)
    with pytest.raises(TypeError):
        published.conv1d(x, w, padding="same")
    torch.testing.assert_close(U.conv1d(x, w, padding="same"), U.conv1d(x, w, padding=(1,)))


def test__constraints__are_those_of_a_table():
    """The published library takes any name that the module happens to import."""
    assert constraints.apply_constraint("prod", (4.0, 0.5)) == (2.0,)
    with pytest.raises(ValueError, match="allowed are amean"):
        U.gelu(randn(4), constraint="prod")
