"""Scales are numbers of the host until somebody reads them; outside, nothing shows the
difference."""

import copy
import pickle
from collections.abc import Callable

import pytest
import torch
from assertions import assert_holds, dequantized
from torch import Tensor

import scaledtensor as sct


def made() -> sct.ScaledTensor:
    """Return a rule's result for the values 0 to 15 times 2**20."""
    return sct.scaled(torch.arange(16.0)) * 2.0**20


def read_first(*tensors: sct.ScaledTensor) -> None:
    for x in tensors:
        assert x.scale.shape == x.rms.shape == ()


def nothing(*tensors: sct.ScaledTensor) -> None:
    """The scales stay numbers."""


READ = pytest.mark.parametrize("read", [nothing, read_first])


def test__eager_rules__make_no_tensors_of_scales() -> None:
    x, w = made(), sct.scaled(torch.randn(16, 16))
    results = [
        x + x,
        x * 3,
        x.view(4, 4).t(),
        w @ w,
        torch.relu(x),
        x.clone(),
        x.to(torch.bfloat16),
    ]
    x.mul_(0.5).add_(x)
    for y in (x, w, *results):
        assert not {"scale", "rms"} & vars(y).keys()


@READ
def test__a_view__shares_the_scale_of_its_base(read: Callable[..., None]) -> None:
    zeros = torch.zeros_like(made())
    view = zeros.view(4, 4)
    read(zeros)  # Either of them comes first.
    zeros.add_(made())
    assert_holds(view, torch.arange(16.0).view(4, 4) * 2.0**20, 0)
    view.copy_(made().view(4, 4) * 2.0**-40)
    assert zeros.scale is view.scale
    assert zeros.rms is view.rms
    assert_holds(zeros, torch.arange(16.0) * 2.0**-20, 0)


def test__what_is_written_into_a_scale_that_was_read__counts() -> None:
    x = made()
    assert x.scale is x.scale
    before = dequantized(x)
    x.scale.mul_(4)
    x.rms.mul_(4)
    for y in (x, x * 1.0, x + torch.zeros_like(x), x.view(4, 4).flatten()):
        assert_holds(y, before * 4, 0)


@READ
def test__inference_mode__reads_scales_that_are_written_outside_of_it(
    read: Callable[..., None],
) -> None:
    x = made()
    with torch.inference_mode():
        read(x)
        inner = x.view(4, 4) + 1.0
        read(inner)
    assert not x.scale.is_inference()
    x.mul_(2.0)
    assert_holds(x, torch.arange(16.0) * 2.0**21, 0)
    assert inner.is_inference()


@pytest.mark.parametrize("where", ["grad", "vmap", "functional", "fake"])
def test__a_scale_that_is_read_where_others_are_traced__is_a_real_tensor(where: str) -> None:
    x = made()

    def read(t: Tensor) -> Tensor:
        assert type(x.scale) is type(x.rms) is Tensor
        return t.sum()

    if where == "fake":
        with torch._subclasses.FakeTensorMode():
            read(torch.ones(2))
    else:
        transform = {"grad": torch.func.grad, "vmap": torch.func.vmap}.get(
            where, torch.func.functionalize
        )
        transform(read)(torch.ones(2, 2))
    assert_holds(x, torch.arange(16.0) * 2.0**20, 0)


@READ
@pytest.mark.parametrize(
    "copied",
    [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x)), torch.clone],
    ids=["deepcopy", "pickle", "clone"],
)
def test__a_copy__has_a_scale_of_its_own(
    read: Callable[..., None], copied: Callable[..., sct.ScaledTensor]
) -> None:
    x = made()
    read(x)
    other = copied(x)
    other.scale.mul_(2)
    assert float(other.scale) == 2 * float(x.scale)
    assert_holds(x, torch.arange(16.0) * 2.0**20, 0)
