"""The functions compute the published library's numbers where it is right, and a named difference
otherwise. Output and every gradient are compared in float32."""

import pytest
import torch
from tensors import randn

import scaledtensor.functional as U

published = pytest.importorskip("unit_scaling.functional")


def run(function, tensors, seed=9):
    """Return the output and the gradients of every floating-point tensor."""
    leaves = [t.clone().requires_grad_() if t.is_floating_point() else t for t in tensors]
    torch.manual_seed(0)  # Dropout draws from it.
    out = function(*leaves)
    outs = out if isinstance(out, tuple) else (out,)
    gradients = [randn(*o.shape, seed=seed + i) for i, o in enumerate(outs)]
    wanted = [t for t in leaves if t.is_floating_point()]
    return [*outs, *torch.autograd.grad(outs, wanted, gradients)]


def assert_same(ours, theirs, *tensors):
    for a, b in zip(run(ours, tensors), run(theirs, tensors), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


MULTS = [0.25, 1.0, 4.0]
BINARY = [None, "", "gmean", "hmean", "amean", "to_output_scale", "to_grad_input_scale"]
TERNARY = [*BINARY[:-1], "to_left_grad_scale", "to_right_grad_scale"]


@pytest.mark.parametrize("constraint", BINARY)
@pytest.mark.parametrize("mult", MULTS)
@pytest.mark.parametrize("name", ["gelu", "silu", "softmax"])
def test__an_activation__is_the_published_one(name, mult, constraint):
    options = {"mult": mult, "constraint": constraint} | ({"dim": 1} if name == "softmax" else {})
    ours, theirs = getattr(U, name), getattr(published, name)
    assert_same(lambda x: ours(x, **options), lambda x: theirs(x, **options), randn(64, 16))


@pytest.mark.parametrize("mult", MULTS)
def test__silu_glu__is_the_published_one(mult):
    x, gate = randn(64, 16), randn(64, 16, seed=1)
    assert_same(lambda *t: U.silu_glu(*t, mult), lambda *t: published.silu_glu(*t, mult), x, gate)


@pytest.mark.parametrize("p", [0.1, 0.5])
def test__dropout_in_training__is_the_published_one(p):
    assert_same(lambda x: U.dropout(x, p), lambda x: published.dropout(x, p), randn(64, 16))


@pytest.mark.parametrize("constraint", TERNARY)
@pytest.mark.parametrize("shapes", [((8, 32), (32, 4)), ((3, 8, 32), (3, 32, 4))])
def test__matmul__is_the_published_one(shapes, constraint):
    a, b = (randn(*s) for s in shapes)
    assert_same(
        lambda *t: U.matmul(*t, constraint), lambda *t: published.matmul(*t, constraint), a, b
    )


@pytest.mark.parametrize("constraint", BINARY)
@pytest.mark.parametrize("power", [(0.5, 0.5, 0.5), (1.0, 0.5, 0.25)])
def test__linear__is_the_published_one(constraint, power):
    options = {"bias": None, "constraint": constraint, "scale_power": power}
    assert_same(
        lambda *t: U.linear(*t, **options),
        lambda *t: published.linear(*t, **options),
        randn(2, 8, 32),
        randn(16, 32),
    )


@pytest.mark.parametrize("constraint", BINARY)
def test__linear_readout__is_the_published_one(constraint):
    options = {"bias": None, "constraint": constraint}
    assert_same(
        lambda *t: U.linear_readout(*t, **options),
        lambda *t: published.linear_readout(*t, **options),
        randn(2, 8, 32),
        randn(16, 32),
    )


@pytest.mark.parametrize("constraint", BINARY)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"stride": 2, "padding": 1},
        {"dilation": 2},
        {"groups": 2, "scale_power": (0.25, 1.0, 0.5)},
    ],
)
def test__conv1d__is_the_published_one(options, constraint):
    options = options | {"constraint": constraint}
    assert_same(
        lambda *t: U.conv1d(*t, **options),
        lambda *t: published.conv1d(*t, **options),
        randn(4, 8, 16),
        randn(6, 8 // options.get("groups", 1), 3),
    )


def test__layer_norm__is_the_published_one():
    tensors = randn(4, 8, 32), randn(32), randn(32, seed=1)
    assert_same(
        lambda x, w, b: U.layer_norm(x, (32,), w, b),
        lambda x, w, b: published.layer_norm(x, (32,), w, b),
        *tensors,
    )


@pytest.mark.parametrize("eps", [1e-5, 0.1])
def test__rms_norm__is_the_published_one(eps):
    assert_same(
        lambda x, w: U.rms_norm(x, (32,), w, eps),
        lambda x, w: published.rms_norm(x, (32,), w, eps),
        randn(4, 8, 32),
        randn(32),
    )


@pytest.mark.parametrize("constraint", TERNARY)
@pytest.mark.parametrize("shapes", [((8, 4), (8, 4)), ((8, 4), (4,)), ((8, 1), (1, 4))])
def test__add__is_the_published_one(shapes, constraint):
    a, b = (randn(*s, seed=i) for i, s in enumerate(shapes))
    assert_same(lambda *t: U.add(*t, constraint), lambda *t: published.add(*t, constraint), a, b)


def test__add_of_a_number__is_the_published_one():
    assert_same(lambda x: U.add(x, 2.5), lambda x: published.add(x, 2.5), randn(8, 4))
    assert_same(U.add, published.add, randn(8, 4), randn(1))


@pytest.mark.parametrize("tau", [0.2, 1.0, 3.0])
def test__residuals__are_the_published_ones(tau):
    x, y = randn(8, 4), randn(8, 4, seed=1)
    for name in ("residual_split", "residual_add", "residual_apply"):
        first = {"residual_apply": (torch.tanh,)}.get(name, ())
        tensors = (x, y) if name == "residual_add" else (x,)
        ours, theirs = getattr(U, name), getattr(published, name)
        assert_same(
            lambda *t, f=ours, a=first: f(*a, *t, tau=tau),
            lambda *t, f=theirs, a=first: f(*a, *t, tau=tau),
            *tensors,
        )


def test__transformer_rule__is_the_published_one():
    core = pytest.importorskip("unit_scaling.core.functional")
    for arguments in ((), (0.5,), (2.0, 0.3)):
        ours = U.transformer_residual_scaling_rule(*arguments)
        theirs = core.transformer_residual_scaling_rule(*arguments)
        for layers in (2, 12):
            for i in range(layers):
                assert ours(i, layers) == pytest.approx(theirs(i, layers), rel=1e-12)


def test__embedding__is_the_published_one():
    tokens = torch.randint(0, 32, (4, 16), generator=torch.Generator().manual_seed(0))
    for padding in (None, 3):
        assert_same(
            lambda w, p=padding: U.embedding(tokens, w, p),
            lambda w, p=padding: published.embedding(tokens, w, p),
            randn(32, 8),
        )


@pytest.mark.parametrize("mult", MULTS)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("p", [0.0, 0.2])
def test__attention__is_the_published_one(mult, causal, p):
    options = {"is_causal": causal, "mult": mult, "dropout_p": p}
    assert_same(
        lambda *t: U.scaled_dot_product_attention(*t, **options),
        lambda *t: published.scaled_dot_product_attention(*t, **options),
        *(randn(2, 3, 16, 8, seed=i) for i in range(3)),
    )


@pytest.mark.parametrize("mult", MULTS)
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test__cross_entropy__is_the_published_one(mult, reduction):
    options = {"mult": mult, "reduction": reduction}
    target = torch.randint(0, 32, (16,), generator=torch.Generator().manual_seed(0))
    assert_same(
        lambda x: U.cross_entropy(x, target, **options),
        lambda x: published.cross_entropy(x, target, **options),
        randn(16, 32),
    )
    assert_same(
        lambda x: U.cross_entropy(x, target[0], **options),
        lambda x: published.cross_entropy(x, target[0], **options),
        randn(32),
    )


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test__mse_loss__is_the_published_one(reduction):
    assert_same(
        lambda *t: U.mse_loss(*t, reduction=reduction),
        lambda *t: published.mse_loss(*t, reduction=reduction),
        randn(16, 8),
        randn(16, 8, seed=1),
    )
