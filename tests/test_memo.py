"""The memo of a tensor: which writes and copies end which of its fields."""

import copy
import pickle

import pytest
import torch
from tensors import gaussian

import scaledtensor as sct
from scaledtensor.tensors.memo import NOTHING, Memo, Source, after_write, note

FULL = Memo(
    decoded=torch.ones(4, 4),
    passing=True,
    source=Source(torch.ones(4, 4)),
    copies=("codes", "scale"),
    towards="y",
    whole_amax=torch.ones(()),
    agreed=True,
    traced_lent=torch.ones(2),
    viewed_lent=torch.ones(2),
)
ELEMENTS = {"decoded", "passing", "source", "copies", "towards", "whole_amax"}
LENT = {"traced_lent", "viewed_lent"}


def kept(x: sct.ScaledTensor) -> set[str]:
    """Return the fields that the memo of `x` still has."""
    return {name for name in Memo._fields if getattr(x.memo, name) is getattr(FULL, name)}


def noted() -> sct.ScaledTensor:
    x = sct.scaled(gaussian(4, 4))
    note(x, **FULL._asdict())
    assert kept(x) == set(Memo._fields)
    return x


def test__a_new_tensor__has_the_empty_memo():
    x = sct.scaled(gaussian(4, 4))
    assert x.memo is NOTHING
    assert (x + x).memo is NOTHING
    after_write(x)
    assert x.memo is NOTHING


@pytest.mark.parametrize(
    "write",
    [
        lambda x: x.add_(1),
        lambda x: x.mul_(x),
        lambda x: x.zero_(),
        lambda x: torch.add(x, x, out=x),
        lambda x: x.t_(),
    ],
)
def test__a_write_by_an_operator__ends_the_facts_about_elements(write):
    x = noted()
    write(x)
    assert kept(x) == {"agreed"} | LENT


@pytest.mark.parametrize(
    "overwrite",
    [
        lambda x: x.copy_(gaussian(4, 4)),
        lambda x: x.copy_(sct.scaled(gaussian(4, 4))),
        lambda x: setattr(x, "data", sct.scaled(gaussian(4, 4))),
    ],
)
def test__an_overwrite__ends_the_agreement_on_the_scale_too(overwrite):
    x = noted()
    overwrite(x)
    assert kept(x) == LENT


@pytest.mark.parametrize(
    "other",
    [
        torch.clone,
        copy.deepcopy,
        lambda x: pickle.loads(pickle.dumps(x)),
        lambda x: x.bfloat16().float(),
        lambda x: x + 0,
    ],
)
def test__another_tensor__begins_without_facts(other):
    assert kept(other(noted())) <= LENT
    assert other(sct.scaled(gaussian(4, 4))).memo is NOTHING


def test__a_memo__is_of_one_tensor():
    x, y = noted(), noted()
    note(x, agreed=False)
    assert y.memo.agreed
    assert not NOTHING.agreed
    with pytest.raises(AttributeError):
        NOTHING.agreed = True  # type: ignore[misc]
