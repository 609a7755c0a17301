"""torch.func and forward-mode derivatives give the functions of the plain model.

Inside a transform torch hides the class of its wrapped tensors, so products take their operands as
they are, without a cast. All other rules work as outside. See docs/modes.md.
"""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from assertions import assert_holds, assert_in_range, assert_shifted
from modes_models import (
    EXACT,
    UNIT,
    Gradients,
    Recipe,
    assert_identical,
    assert_near,
    assert_sane,
    distance,
    gpt,
    gradients,
    gradients_of,
    loss_of,
    plain_gpt,
    tokens,
)
from plain_models import STYLES
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.func import (
    functional_call,
    grad,
    grad_and_value,
    hessian,
    jacfwd,
    jacrev,
    jvp,
    linearize,
    stack_module_state,
    vjp,
    vmap,
)

import scaledtensor as sct
from scaledtensor.errors import MissingRuleError

# torch warns that vmap runs its own fused attention sample by sample.
pytestmark = pytest.mark.filterwarnings("ignore:There is a performance drop")

Parameters = dict[str, Tensor]


def detached(model: nn.Module) -> Parameters:
    return {name: p.detach() for name, p in model.named_parameters()}


def loss_by(model: nn.Module) -> Callable[[Parameters, Tensor], Tensor]:
    """Return a function of parameters and tokens that gives the loss."""
    return lambda p, t: functional_call(model, p, (t[:, :-1], t[:, 1:]))[1]


def test__functional_call__is_the_call() -> None:
    """Outside a transform, products are FP8, with the same bits and gradients of the given
    parameters."""
    model, t = gpt(), tokens()
    want = gradients_of(model, t)
    given = {name: p.clone().requires_grad_() for name, p in detached(model).items()}
    loss = loss_by(model)(given, t)
    assert torch.equal(loss, loss_of(model, t))
    loss.backward()
    assert_identical({name: p.grad for name, p in given.items()}, want)


@pytest.mark.parametrize(("recipe", "tolerance"), [(UNIT, 0.05), (EXACT, 1e-5)])
def test__grad__is_the_gradient(recipe: Recipe, tolerance: float) -> None:
    model, reference, t = gpt(recipe), plain_gpt(), tokens()
    got, loss = grad_and_value(loss_by(model))(detached(model), t)
    want, exact = grad_and_value(loss_by(reference))(detached(reference), t)
    torch.testing.assert_close(loss, exact, rtol=tolerance / 10, atol=0)
    assert_near(got, want, tolerance)
    assert_sane(got)
    if recipe is EXACT:
        assert_near(got, gradients_of(model, t), 1e-6)


def test__inside_a_transform__products_are_not_cast() -> None:
    """The gradient is nearer to float32 than the gradient of backward(), which has FP8 operands."""
    model, reference, t = gpt(), plain_gpt(), tokens()
    want = gradients_of(reference, t)

    inside = grad(loss_by(model))(detached(model), t)
    assert distance(inside, want) < distance(gradients_of(model, t), want) / 4


@pytest.mark.parametrize(("recipe", "tolerance"), [(UNIT, 0.05), (EXACT, 1e-5)])
def test__per_sample_gradients__are_those_of_each_sample(recipe: Recipe, tolerance: float) -> None:
    model, reference, t = gpt(recipe), plain_gpt(), tokens()

    def each(m: nn.Module) -> Gradients:
        return vmap(grad(loss_by(m)), in_dims=(None, 0))(detached(m), t[:, None])

    got = each(model)
    assert_near(got, each(reference), tolerance)
    assert_sane(got)
    for i in range(len(t)):
        own = gradients_of(reference, t[i : i + 1])
        assert_near({name: g[i] for name, g in got.items()}, own, tolerance)


def loss_of_style(model: nn.Module, one: bool) -> Callable[[Parameters, Tensor, Tensor], Tensor]:
    def loss(p: Parameters, x: Tensor, y: Tensor) -> Tensor:
        x, y = (x[None], y[None]) if one else (x, y)
        out = functional_call(model, p, (x,))
        return F.cross_entropy(out.transpose(1, 2) if out.dim() == 3 else out, y)

    return loss


def test__per_sample_gradients_of_a_convnet__add_up() -> None:
    style = STYLES["unet"]
    torch.manual_seed(0)
    model = sct.scale_model(style.build(), EXACT)
    style.loss(model).backward()
    each = vmap(grad(loss_of_style(model, True)), in_dims=(None, 0, 0))
    got = each(detached(model), *style.batch(0))
    for key, g in got.items():
        assert isinstance(g, sct.ScaledTensor), key
    assert_near({key: g.mean(0) for key, g in got.items()}, gradients(model), 1e-4)


def test__grad_of_a_recurrent_network__is_the_gradient() -> None:
    """torch runs the parts of an LSTM without oneDNN's fused layer, which has no rule."""
    style = STYLES["lstm"]
    torch.manual_seed(0)
    model = sct.scale_model(style.build(), EXACT)
    style.loss(model).backward()
    with torch.backends.mkldnn.flags(enabled=False):
        got = grad(loss_of_style(model, False))(detached(model), *style.batch(0))
    assert_near(got, gradients(model), 1e-5)
    assert_sane(got)


def test__a_fused_recurrent_layer_in_a_transform__says_its_name() -> None:
    model = sct.scale_model(nn.LSTM(4, 4))
    x = torch.randn(3, 2, 4)
    with pytest.raises(MissingRuleError, match="mkldnn_rnn_layer"):
        grad(lambda p: functional_call(model, p, (x,))[0].square().sum())(detached(model))


@pytest.mark.parametrize("chunk", [None, 2])
def test__vmap_of_a_model__is_its_batch(chunk: int | None) -> None:
    model, t = gpt(EXACT), tokens()[:, :-1]
    want, _ = model(t)
    got = vmap(lambda row: model(row[None])[0][0], chunk_size=chunk)(t)
    assert isinstance(got, sct.ScaledTensor)
    assert_holds(got, want.dequantize(), 1e-5)
    assert_in_range([got], 0.25, 4)


def test__an_ensemble__is_its_members() -> None:
    torch.manual_seed(0)
    models = [sct.scale_model(nn.Linear(8, 8), EXACT) for _ in range(3)]
    x = torch.randn(4, 8)
    stacked, _ = stack_module_state(models)
    base = copy.deepcopy(models[0]).to("meta")
    got = vmap(lambda p: functional_call(base, p, (x,)))(stacked)
    assert_holds(got, torch.stack([m(x).dequantize() for m in models]), 1e-5)
    assert_in_range([got])


# --- Jacobians -------------------------------------------------------------------------------


def mlp() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4), nn.Softmax(-1))


def by_vjp(f: Callable[[Tensor], Tensor], x: Tensor, v: Tensor) -> Any:
    y, pull = vjp(f, x)
    return pull(y)[0]


def by_dual(f: Callable[[Tensor], Tensor], x: Tensor, v: Tensor) -> Any:
    with forward_ad.dual_level():
        return forward_ad.unpack_dual(f(forward_ad.make_dual(x, v))).tangent


DERIVATIVES: dict[str, Callable[[Callable[[Tensor], Tensor], Tensor, Tensor], Any]] = {
    "vjp": by_vjp,
    "jvp": lambda f, x, v: jvp(f, (x,), (v,))[1],
    "forward mode": by_dual,
    "jacrev": lambda f, x, v: jacrev(f)(x),
    "jacfwd": lambda f, x, v: jacfwd(f)(x),
    "grad of grad": lambda f, x, v: grad(
        lambda x: grad(lambda y: f(y).square().sum())(x).square().sum()
    )(x),
    "jacrev of jacrev": lambda f, x, v: jacrev(jacrev(lambda y: f(y).square().sum()))(x),
}


@pytest.mark.parametrize("entry", ["plain", "scaled"])
@pytest.mark.parametrize("name", DERIVATIVES)
def test__derivatives__are_those_of_float32(name: str, entry: str) -> None:
    reference = mlp()
    model, x, v = sct.scale_model(copy.deepcopy(reference)), torch.randn(8), torch.randn(8)
    want = DERIVATIVES[name](reference, x, v)
    given = [sct.scaled(z, "fp32") if entry == "scaled" else z for z in (x, v)]
    got = DERIVATIVES[name](model, *given)
    assert isinstance(got, sct.ScaledTensor)
    assert_holds(got, want, 1e-4)
    assert_in_range([got], 0.05, 20)


@pytest.mark.parametrize("entry", ["plain", "scaled"])
def test__hessian__is_that_of_float32(entry: str) -> None:
    """Forward over reverse mode splits derivatives into operators of torch below ATen."""
    reference, x = mlp(), torch.randn(8)
    model = sct.scale_model(copy.deepcopy(reference))
    given = sct.scaled(x, "fp32") if entry == "scaled" else x
    got = hessian(lambda y: model(y).square().sum())(given)
    want = hessian(lambda y: reference(y).square().sum())(x)
    assert isinstance(got, sct.ScaledTensor)
    assert_holds(got, want, 1e-4)
    assert_in_range([got], 0.03, 20)


def test__linearize__is_refused_by_torch() -> None:
    with pytest.raises(RuntimeError, match="tracing tensor"):
        linearize(sct.scale_model(mlp()), torch.randn(8))


def test__transforms__leave_nothing_behind() -> None:
    """Products are cast again as soon as the transform is over."""
    model, t = gpt(), tokens()
    want = gradients_of(model, t)
    want = {name: g.clone() for name, g in want.items()}
    grad(loss_by(model))(detached(model), t)
    with pytest.raises(ZeroDivisionError):
        grad(lambda p: 1 / 0)(detached(model))
    got = gradients_of(model, t)
    for name, g in got.items():
        assert_shifted(g, want[name], 0)


@pytest.mark.parametrize(
    ("transform", "tolerance"),
    [
        (lambda f: grad(f), 0.0),
        # torch's own decomposition of a batched product multiplies below the transform. There
        # operands are seen and cast, gradients too.
        (lambda f: vmap(grad(f), in_dims=(None, 0)), 0.2),
    ],
    ids=["grad", "per sample"],
)
def test__a_compiled_transform__is_the_eager_one(transform: Any, tolerance: float) -> None:
    reference, x = mlp(), torch.randn(5, 8)
    for recipe in (EXACT, UNIT):
        torch._dynamo.reset()
        model = sct.scale_model(copy.deepcopy(reference), recipe)
        f = transform(lambda p, x, m=model: functional_call(m, p, (x,)).square().sum())
        want = f(detached(model), x)
        got = torch.compile(f, fullgraph=True, backend="aot_eager")(detached(model), x)
        assert_sane(got)
        assert_near(got, want, 1e-6 if recipe is EXACT else tolerance)
