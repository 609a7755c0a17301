"""`unit_scale(replace=)`: functions of torch and Python functions, wherever the code finds them."""

import math
import pickle
import sys
import threading

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from scaledtensor import errors
from scaledtensor.compat.unit_scaling import functional as U
from scaledtensor.compat.unit_scaling.transforms import compile, simulate_fp8, unit_scale

HERE = sys.modules[__name__]


def new_gelu(x: Tensor) -> Tensor:
    inner = math.sqrt(2.0 / math.pi) * (x + 0.044715 * torch.pow(x, 3.0))
    return 0.5 * x * (1.0 + torch.tanh(inner))


def helper(x: Tensor) -> Tensor:
    return new_gelu(x)


def tenfold(x: Tensor) -> Tensor:
    return 10 * torch.sign(x)


class Global(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.l1 = nn.Linear(16, 16)
        self.l2 = nn.Linear(16, 16)

    def activation(self, x: Tensor) -> Tensor:
        return new_gelu(x)

    def forward(self, x: Tensor) -> Tensor:
        return self.l2(self.activation(self.l1(x)))


class Helped(Global):
    def activation(self, x: Tensor) -> Tensor:
        return helper(x)


class OfModule(Global):
    def activation(self, x: Tensor) -> Tensor:
        return HERE.new_gelu(x)


class Attribute(Global):
    def __init__(self) -> None:
        super().__init__()
        self.activation = new_gelu


def closed() -> nn.Module:
    def local_gelu(x: Tensor) -> Tensor:
        return new_gelu(x)

    class Closed(Global):
        def activation(self, x: Tensor) -> Tensor:
            return local_gelu(x)

    Closed.key = local_gelu
    return Closed()


PLACES = {"global": Global, "helper": Helped, "module": OfModule, "attribute": Attribute}


def by_hand(model: nn.Module, activation, x: Tensor) -> Tensor:
    x = U.linear(x, model.l1.weight, model.l1.bias, constraint=None)
    return U.linear(activation(x), model.l2.weight, model.l2.bias, constraint=None)


@pytest.mark.parametrize("replacement", [U.gelu, tenfold])
@pytest.mark.parametrize("make", PLACES.values(), ids=[*PLACES])
def test__a_python_function__is_replaced_where_the_code_finds_it(make, replacement):
    torch.manual_seed(0)
    model, x = make(), torch.randn(32, 16)
    before = model(x)
    scaled = unit_scale(model, replace={new_gelu: replacement})
    torch.testing.assert_close(scaled(x), by_hand(scaled, replacement, x))
    assert torch.equal(model(x), before)
    assert not torch.equal(unit_scale(model)(x), scaled(x))


def test__a_function_of_a_closure__is_replaced():
    torch.manual_seed(0)
    model, x = closed(), torch.randn(32, 16)
    for _ in range(2):  # the key still is the function that it was
        scaled = unit_scale(model, replace={type(model).key: tenfold})
        torch.testing.assert_close(scaled(x), by_hand(scaled, tenfold, x))


def test__a_replacement__has_its_own_gradient_and_is_not_scaled_again():
    torch.manual_seed(0)
    model = unit_scale(Global(), replace={new_gelu: lambda x: 3 * new_gelu(x)})
    x, seed = torch.randn(32, 16, requires_grad=True), torch.randn(32, 16)
    by_model = torch.autograd.grad(model(x), x, seed)
    hand = torch.autograd.grad(by_hand(model, lambda x: 3 * new_gelu(x), x), x, seed)
    torch.testing.assert_close(by_model, hand)


class Torchs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.l1 = nn.Linear(16, 16)
        self.l2 = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        x = F.gelu(self.l1(x))
        return x + self.l2(F.gelu(x))


def test__a_function_of_torch__is_replaced_where_a_residual_branch_starts():
    torch.manual_seed(0)
    model, x = Torchs(), torch.randn(32, 16, requires_grad=True)
    scaled = unit_scale(model, replace={F.gelu: U.gelu})
    (l1, l2), tau = (scaled.l1, scaled.l2), U.transformer_residual_scaling_rule()(0, 1)
    branch, skip = U.residual_split(U.gelu(U.linear(x, l1.weight, l1.bias)), tau)
    branch = U.linear(U.gelu(branch), l2.weight, l2.bias)
    by_hand, by_model = U.residual_add(branch, skip, tau), scaled(x)
    torch.testing.assert_close(by_model, by_hand)
    seed = torch.randn(32, 16)
    ours, theirs = (torch.autograd.grad(out, x, seed) for out in (by_model, by_hand))
    torch.testing.assert_close(ours, theirs)
    assert not torch.equal(model(x), by_model)


@pytest.mark.parametrize(("make", "key"), [(Global, new_gelu), (Torchs, F.gelu)])
def test__compiled__it_is_replaced_too(make, key, monkeypatch):
    made = torch.compile
    monkeypatch.setattr(torch, "compile", lambda m: made(m, backend="aot_eager", fullgraph=True))
    torch.compiler.reset()
    torch.manual_seed(0)
    model, x = make(), torch.randn(32, 16)
    scaled = unit_scale(model, replace={key: tenfold})
    torch.testing.assert_close(compile(scaled)(x), scaled(x))
    plain = compile(model)(x)  # of the same code, and not replaced
    torch.testing.assert_close(plain, model(x))


def test__products_inside_a_replacement__are_rounded():
    torch.manual_seed(0)
    model = unit_scale(Global(), replace={new_gelu: lambda x: x @ torch.eye(16)})
    x = torch.randn(8, 16)
    torch.manual_seed(0)
    first = simulate_fp8(model)(x)
    seen = []
    inner = unit_scale(Global(), replace={new_gelu: lambda x: seen.append(x @ torch.eye(16)) or x})
    torch.manual_seed(0)
    simulate_fp8(inner)(x)
    assert first.shape == x.shape
    values = seen[-1].detach().abs()
    steps = values / 2 ** (values.log2().floor() - 3)
    assert torch.equal(steps, steps.round())  # four significant bits


def test__other_threads__see_the_function():
    torch.manual_seed(0)
    model, x = Global(), torch.randn(8, 16)
    expected, found = model(x), []

    def replacement(y: Tensor) -> Tensor:
        thread = threading.Thread(target=lambda: found.append(model(x)))
        thread.start()
        thread.join()
        return y

    unit_scale(model, replace={new_gelu: replacement})(x)
    assert torch.equal(found[-1], expected)


def test__another_process__finds_the_function_again(monkeypatch):
    torch.manual_seed(0)
    scaled, x = unit_scale(Global(), replace={new_gelu: tenfold}), torch.randn(8, 16)
    expected, saved = scaled(x), pickle.dumps(scaled)
    monkeypatch.setattr(HERE, "new_gelu", getattr(new_gelu, "__wrapped__", new_gelu))
    assert torch.equal(pickle.loads(saved)(x), expected)


def test__what_cannot_be_replaced__is_named():
    with pytest.raises(errors.UnsupportedError, match="found no call of new_gelu"):
        unit_scale(nn.Linear(2, 2), replace={new_gelu: U.gelu})
    with pytest.raises(errors.UnsupportedError, match="Python functions"):
        unit_scale(nn.Linear(2, 2), replace={nn.GELU(): U.gelu})
    with pytest.raises(errors.ModelError, match="functions to functions"):
        unit_scale(Global(), replace={new_gelu: 2.0})


@pytest.mark.parametrize("key", [new_gelu, F.gelu], ids=["python", "torch"])
@pytest.mark.parametrize("function", [F.silu, F.mish], ids=["a counterpart", "a formula"])
def test__a_function_of_torch_in_its_place__is_scaled_as_if_the_model_called_it(key, function):
    class Called(Torchs):
        def forward(self, x: Tensor) -> Tensor:
            x = function(self.l1(x))
            return x + self.l2(function(x))

    torch.manual_seed(0)
    model = Torchs() if key is F.gelu else Pythons()
    scaled = unit_scale(model, replace={key: function})
    expected = Called()
    expected.load_state_dict(model.state_dict())
    expected = unit_scale(expected)
    x, seed = torch.randn(256, 16, requires_grad=True), torch.randn(256, 16)
    ours, theirs = scaled(x), expected(x)
    torch.testing.assert_close(ours, theirs)
    ours, theirs = (torch.autograd.grad(out, x, seed) for out in (ours, theirs))
    torch.testing.assert_close(ours, theirs)


class Pythons(Torchs):
    def forward(self, x: Tensor) -> Tensor:
        x = new_gelu(self.l1(x))
        return x + self.l2(new_gelu(x))


def test__two_functions_of_torch__may_change_places():
    torch.manual_seed(0)
    scaled = unit_scale(Torchs(), replace={F.gelu: torch.tanh, torch.tanh: F.gelu})
    again = unit_scale(Torchs(), replace={F.gelu: torch.tanh})
    again.load_state_dict(scaled.state_dict())
    x = torch.randn(8, 16)
    assert torch.equal(scaled(x), again(x))
