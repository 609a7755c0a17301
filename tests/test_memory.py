"""Programs that assign, copy and write memory as they do with plain tensors.

A ScaledTensor has no memory of its own, and torch does not ask for it everywhere.
"""

import copy
import pickle
from typing import Any

import pytest
import torch
from tensors import saved_and_loaded
from torch import Tensor, nn

import scaledtensor as sct
from scaledtensor.errors import DTypeError, UnsupportedError

VIEWS = {
    "whole": lambda x: x,
    "row": lambda x: x[1],
    "transposed": lambda x: x.t(),
    "part, transposed": lambda x: x[1:3, ::2].t(),
    "expanded": lambda x: x[:, :1].expand(4, 6),
    "empty": lambda x: x[:0],
    "0-dim": lambda x: x[1, 2],
}


def value(x: Any) -> Tensor:
    held: Tensor = x.dequantize() if isinstance(x, sct.ScaledTensor) else x
    return held.detach()


def layer() -> Any:
    torch.manual_seed(0)
    return sct.scale_model(nn.Linear(6, 4))


# --- a plain tensor takes the data of a scaled one -------------------------------------------


@pytest.mark.parametrize("fmt", ["fp32", "bf16", "e4m3fn"])
@pytest.mark.parametrize("view", VIEWS)
def test__data_of_a_plain_tensor__becomes_the_values(view: str, fmt: str) -> None:
    x = VIEWS[view](sct.scaled(torch.randn(4, 6), fmt, 4.0))
    p = nn.Parameter(torch.zeros(x.shape))
    p.data = x
    assert type(p.data) is Tensor
    assert torch.equal(p.detach(), value(x))
    assert p.stride() == x.stride()
    if view != "expanded":
        with torch.no_grad():
            p.add_(1.0)  # in memory of its own
        assert torch.equal(p.detach(), value(x) + 1.0)


def test__data_of_a_plain_tensor__becomes_the_values_of_a_quantized_weight() -> None:
    held = sct.quantize_(nn.Linear(32, 32), sct.WeightOnly("e4m3fn")).weight
    p = torch.zeros(32, 32)
    p.data = held.data
    assert torch.equal(p, held.dequantize())


def test__a_target_network__follows_by_data() -> None:
    """The target was made before `scale_model`, so it is plain."""
    torch.manual_seed(0)
    online = nn.Linear(6, 4)
    target, wanted = copy.deepcopy(online), online.weight.detach().clone()
    sct.scale_model(online)
    with torch.no_grad():
        online.weight.mul_(3.0)
    for mine, theirs in zip(target.parameters(), online.parameters(), strict=True):
        mine.data = 0.5 * mine.data + 0.5 * theirs.data
    assert type(target.weight.data) is Tensor
    torch.testing.assert_close(target.weight.detach(), 2.0 * wanted)


def test__running_statistics__by_data_of_a_buffer() -> None:
    center, y = torch.ones(4), layer()(torch.randn(8, 6))
    wanted = 0.9 * center + 0.1 * value(y).mean(0)
    center.data = 0.9 * center.data + 0.1 * y.data.mean(0)
    torch.testing.assert_close(center, wanted, rtol=2**-7, atol=2**-9)


def test__data_of_other_subclasses__is_assigned_as_before() -> None:
    from torch.testing._internal.two_tensor import TwoTensor

    x = TwoTensor(torch.zeros(3), torch.zeros(3))
    x.data = TwoTensor(torch.ones(3), torch.ones(3))
    assert type(x) is TwoTensor
    p = torch.zeros(3)
    p.data = torch.ones(3)
    assert torch.equal(p, torch.ones(3))


def test__a_part_of_a_plain_buffer_as_data__is_told_to_be_a_copy() -> None:
    weight, flat = layer().weight, torch.arange(48.0)
    with pytest.warns(UserWarning, match="copies the values of x, here a part of a larger"):
        weight.data = flat[:24].view(4, 6)
    assert torch.equal(value(weight), flat[:24].view(4, 6))
    weight.data = torch.zeros(4, 6)  # a tensor of its own: no warning, which would be an error


# --- writes ----------------------------------------------------------------------------------


@pytest.mark.parametrize("recipe", ["unit", "current"])
def test__apply__writes_what_the_function_returns(recipe: str) -> None:
    torch.manual_seed(0)
    weight = sct.scale_model(nn.Linear(6, 4), recipe).weight
    before = value(weight)
    assert weight.data.apply_(lambda w: 0.0 if abs(w) < 0.2 else w) is not None
    assert torch.equal(value(weight), before.where(before.abs() >= 0.2, 0.0))


@pytest.mark.parametrize("dtype", [torch.int64, torch.uint8, torch.bool])
def test__copy__takes_integers(dtype: torch.dtype) -> None:
    module, eye = layer(), torch.eye(4, 6).to(dtype)
    with torch.no_grad():
        module.weight.copy_(eye)
        assert torch.equal(value(module.weight), eye.float())
        module.weight.data[1] = torch.arange(6)
        assert torch.equal(value(module.weight)[1], torch.arange(6.0))
    module.load_state_dict({"weight": eye, "bias": torch.ones(4, dtype=dtype)})
    assert torch.equal(value(module.weight), eye.float())


OUTPUTS = {
    "gt": lambda x, out: torch.gt(x, 2, out=out(x.shape, torch.bool)),
    "eq": lambda x, out: torch.eq(x, x, out=out(x.shape, torch.bool)),
    "argmax": lambda x, out: torch.argmax(x, 1, out=out((2,), torch.long)),
    "max": lambda x, out: torch.max(x, 1, out=(out((2,), x.dtype), out((2,), torch.long))),
    "topk": lambda x, out: torch.topk(x, 1, out=(out((2, 1), x.dtype), out((2, 1), torch.long))),
    "sort": lambda x, out: torch.sort(x, out=(out((2, 3), x.dtype), out((2, 3), torch.long))),
    "inv": lambda x, out: torch.linalg.inv(x[:, :2], out=out((2, 2), x.dtype)),
}


@pytest.mark.parametrize("made", ["of the shape", "empty"])
@pytest.mark.parametrize("name", OUTPUTS)
def test__out__takes_plain_results(name: str, made: str) -> None:
    plain = torch.tensor([[3.0, 1.0, 2.0], [1.0, 5.0, 4.0]])

    def out(shape: Any, dtype: torch.dtype) -> Tensor:
        return torch.empty(shape if made == "of the shape" else 0, dtype=dtype)

    results = []
    for x in (plain, sct.scaled(plain)):
        found = OUTPUTS[name](x, out)
        results.append(found if isinstance(found, tuple) else (found,))
    for wanted, found in zip(*results, strict=True):
        torch.testing.assert_close(value(found), wanted)


def test__out_of_integers__takes_no_numbers() -> None:
    x = sct.scaled(torch.ones(3))
    with pytest.raises(DTypeError, match=r"does not fit into a tensor of torch\.int64"):
        torch.add(x, x, out=torch.zeros(3, dtype=torch.long))


def test__a_plain_sparse_term__is_added_to_a_scaled_tensor() -> None:
    torch.manual_seed(0)
    places, values = torch.tensor([[0, 1], [2, 3]]), torch.tensor([0.5, 2.0])
    with torch.sparse.check_sparse_tensor_invariants(enable=True):
        delta = torch.sparse_coo_tensor(places, values, (4, 6))
    weight = layer().weight.detach()
    wanted = value(weight) + delta.to_dense()
    for found in (weight + delta, weight.clone().add_(delta), weight - (-1 * delta)):
        torch.testing.assert_close(value(found), wanted)


# --- copies and files ------------------------------------------------------------------------


def test__a_deep_copy__has_no_gradient_of_a_parameter() -> None:
    module, x = layer(), torch.randn(3, 6)
    module(x).sum().backward()
    first = value(module.weight.grad)
    again = copy.deepcopy(module)
    assert again.weight.grad is None
    again(x).sum().backward()
    assert torch.equal(value(again.weight.grad), first)
    leaf = sct.scaled(torch.ones(3)).requires_grad_()
    (2 * leaf).sum().backward()
    assert torch.equal(value(copy.deepcopy(leaf).grad), torch.full((3,), 2.0))  # as in torch


def test__attributes_of_parameters__are_in_files() -> None:
    module = layer()
    module.weight.no_decay, module.weight.place = True, {"dim": (0, 1), "name": "up"}
    module.bias.helper = object()  # safe loading would refuse it
    again = pickle.loads(pickle.dumps(module))
    for kept in (saved_and_loaded(module.weight), again.weight):
        assert kept.no_decay is True
        assert kept.place == {"dim": (0, 1), "name": "up"}
    assert not hasattr(saved_and_loaded(module.bias), "helper")


@pytest.mark.parametrize("recipe", ["unit", "delayed", "current"])
def test__a_trained_parameter__has_no_attributes_to_keep(recipe: str) -> None:
    """The library's own attributes are not in the list."""
    module = sct.scale_model(nn.Sequential(nn.Linear(6, 4), nn.LayerNorm(4)), recipe)
    optimizer = sct.optim.AdamW(module.parameters(), state_format="e4m3fn")
    for _ in range(3):
        module(torch.randn(3, 6)).square().sum().backward()
        optimizer.step()
    torch.compile(module, backend="aot_eager")(torch.randn(3, 6)).sum().backward()
    assert [p._tags() for p in module.parameters()] == [{}] * 4  # type: ignore[operator]


def test__a_forged_attribute__changes_nothing_of_a_tensor() -> None:
    weight = layer().weight
    weight.place = 3
    function, (*arguments, history, tags) = weight.__reduce_ex__(2)
    forged = {**tags, "qdata": 1, "format": "e5m2", "requires_grad": False, "__class__": 2}
    again = function(*arguments, history, forged)
    assert again.place == 3
    assert again.requires_grad
    assert again.format is weight.format
    assert torch.equal(value(again), value(weight))


def test__a_parameter_without_attributes__pickles_as_older_releases_read_it() -> None:
    function, arguments = layer().weight.__reduce_ex__(2)
    assert function.__name__ == "rebuild"
    assert len(arguments) == 6


PRODUCTS_WITH_OUT = {
    "mm": lambda a, b, out: torch.mm(a, b, out=out),
    "matmul": lambda a, b, out: torch.matmul(a, b, out=out),
    "mv": lambda a, b, out: torch.mv(a, b[:, 0], out=out),
    "bmm": lambda a, b, out: torch.bmm(a[None], b[None], out=out),
    "addmm": lambda a, b, out: torch.addmm(b[0], a, b, beta=0.5, out=out),
    "multi_dot": lambda a, b, out: torch.linalg.multi_dot([a, b], out=out),
}


@pytest.mark.parametrize("plain_out", [False, True])
@pytest.mark.parametrize("name", PRODUCTS_WITH_OUT)
def test__a_product__writes_into_its_out(name, plain_out):
    torch.manual_seed(0)
    a, b = torch.randn(8, 16), torch.randn(16, 4)
    want = PRODUCTS_WITH_OUT[name](a, b, torch.empty(0))
    x, y = sct.scaled(a), sct.scaled(b)
    out = torch.empty(want.shape) if plain_out else torch.zeros_like(sct.scaled(want))
    with torch.no_grad():
        made = PRODUCTS_WITH_OUT[name](x, y, out)
    assert made is out
    found = out if plain_out else out.dequantize()
    torch.testing.assert_close(found, want, rtol=2e-2, atol=2e-2)


def test__out_of_a_product__is_refused_where_autograd_records():
    x = sct.scaled(torch.randn(4, 4)).requires_grad_()
    with pytest.raises(UnsupportedError, match="autograd has no out="):
        torch.mm(x, x, out=torch.empty(4, 4))


@pytest.mark.parametrize("name", ["maximum", "minimum", "fmax", "fmin"])
def test__the_larger_of_two__is_found_in_fp16(name):
    torch.manual_seed(0)
    a, b = torch.randn(8, 8).half(), torch.randn(8, 8).half()
    made = getattr(torch, name)(sct.scaled(a, "fp16"), sct.scaled(b, "fp16"))
    assert made.dequantize().tolist() == getattr(torch, name)(a, b).tolist()
