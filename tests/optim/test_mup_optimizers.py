"""Optimizers read the tags, make few groups, and respect the user's settings."""

import copy
import itertools
import pickle

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import scaledtensor as sct
from scaledtensor import mup, optim
from scaledtensor.errors import MupError

OPTIMIZERS = [optim.SGD, optim.Adam, optim.AdamW]
every_optimizer = pytest.mark.parametrize("make", OPTIMIZERS, ids=lambda c: c.__name__)


def parameters(depth=4):
    return [
        mup.Parameter(torch.randn(6, 16), "weight"),
        mup.Parameter(torch.randn(5, 16), "weight"),
        mup.Parameter(torch.randn(6, 16), "weight", depth),
        mup.Parameter(torch.randn(6), "bias"),
        mup.Parameter(torch.randn(6), "norm"),
        mup.Parameter(torch.randn(9, 16), "output"),
    ]


def rates(optimizer):
    return [(float(g["lr"]), len(g["params"])) for g in optimizer.param_groups]


def step(optimizer, ps):
    for p in ps:
        p.grad = torch.ones_like(p)
    optimizer.step()


@every_optimizer
def test__parameters_of_one_learning_rate__share_a_group(make):
    assert rates(make(parameters(), lr=0.5)) == [(0.125, 2), (0.0625, 1), (0.5, 3)]


TAGS = st.builds(
    mup.Tags,
    st.sampled_from(["weight", "bias", "norm", "output"]),
    st.none() | st.integers(1, 4),
    st.none() | st.integers(1, 8),
    st.just(1.0) | st.floats(2**-6, 2**6),
)


@given(st.lists(TAGS, min_size=1, max_size=12), st.floats(1e-3, 10), st.floats(0, 1))
def test__groups__part_the_parameters_by_learning_rate(all_tags, lr, decay):
    """Each parameter is in one group with its own learning rate and decay. No two groups are alike,
    and neither groups nor their parameters change order."""
    ps = [mup.tag(nn.Parameter(torch.ones(3, 5)), *vars(its).values()) for its in all_tags]
    groups = optim.scaled_parameters(ps, optim.lr_scale_func_adam, lr, decay)
    where = {id(p): i for i, p in enumerate(ps)}
    indices = [[where[id(p)] for p in g["params"]] for g in groups]
    assert sorted(itertools.chain(*indices)) == list(range(len(ps)))
    assert all(i == sorted(i) for i in [*indices, [i[0] for i in indices]])
    assert len({g["lr"] for g in groups}) == len(groups)
    for g in groups:
        own = {lr * (optim.lr_scale_func_adam(p) * p.mup_lr_mult) for p in g["params"]}
        assert own == {g["lr"]}
        assert g["lr"] * g["weight_decay"] == pytest.approx(decay)


@every_optimizer
def test__groups_of_the_user__keep_their_options_and_order(make):
    a, b, c, d, e, f = parameters()
    optimizer = make([{"params": [c, d], "lr": 0.25}, {"params": (p for p in (a, b))}, e, f], lr=2)
    assert rates(optimizer) == [(0.03125, 1), (0.25, 1), (0.5, 2), (2.0, 2)]
    optimizer = make([{"params": a, "weight_decay": 0.5}, {"params": [b], "foreach": True}], lr=2.0)
    assert [g["weight_decay"] for g in optimizer.param_groups] == [1.0, 0]
    assert [g["foreach"] for g in optimizer.param_groups] == [None, True]


@every_optimizer
def test__a_group_that_is_added_later__is_scaled_too(make):
    a, b, *_ = parameters()
    optimizer = make([a], lr=0.5, weight_decay=0.25)
    optimizer.add_param_group({"params": [b]})
    optimizer.add_param_group({"params": parameters(), "lr": 1.0})
    assert rates(optimizer) == [(0.125, 1), (0.125, 1), (0.25, 2), (0.125, 1), (1.0, 3)]
    assert [g["weight_decay"] for g in optimizer.param_groups] == [2, 2, 1, 2, 0.25]


@every_optimizer
def test__named_parameters__keep_their_names(make):
    names = "abcdef"
    optimizer = make(list(zip(names, parameters(), strict=True)), lr=0.5)
    assert [g["param_names"] for g in optimizer.param_groups] == [
        ["a", "b"],
        ["c"],
        ["d", "e", "f"],
    ]


@pytest.mark.parametrize("make", [optim.SGD, optim.AdamW])
def test__independent_weight_decay__decays_by_itself_at_every_learning_rate(make):
    """Without a gradient, a step multiplies by 1 - weight_decay."""
    for lr, p in itertools.product((0.1, 0.5), parameters()):
        before = p.detach().clone()
        optimizer = make([p], lr=lr, weight_decay=0.125)
        p.grad = torch.zeros_like(p)
        optimizer.step()
        torch.testing.assert_close(p.detach(), before * 0.875)


@every_optimizer
def test__dependent_weight_decay__is_passed_on(make):
    optimizer = make(parameters(), lr=0.5, weight_decay=0.25, independent_weight_decay=False)
    assert {g["weight_decay"] for g in optimizer.param_groups} == {0.25}


@every_optimizer
def test__schedulers__scale_every_group(make):
    ps = parameters()
    optimizer = make(ps, lr=0.5)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: 0.5**n)
    for k in range(3):
        assert rates(optimizer) == [(0.125 / 2**k, 2), (0.0625 / 2**k, 1), (0.5 / 2**k, 3)]
        step(optimizer, ps)
        scheduler.step()


@every_optimizer
def test__a_tensor_learning_rate__steps_as_a_number_does(make):
    one, other = parameters(), parameters()
    for p, q in zip(one, other, strict=True):
        q.data.copy_(p)
    lr = torch.tensor(0.25)
    options = {"foreach": False, "weight_decay": 0.125}
    step(make(one, lr=0.25, **options), one)
    optimizer = make(other, lr=lr, **options)
    step(optimizer, other)
    torch.testing.assert_close(other, one)
    held = [g["lr"] for g in optimizer.param_groups]
    assert all(isinstance(x, torch.Tensor) for x in held)
    assert len({id(x) for x in (*held, lr)}) == len(held) + 1
    assert float(lr) == 0.25


@every_optimizer
@pytest.mark.parametrize("restore", [copy.deepcopy, lambda o: pickle.loads(pickle.dumps(o))])
def test__a_copied_optimizer__still_scales_new_groups(make, restore):
    optimizer = restore(make(parameters(), lr=0.5))
    optimizer.add_param_group({"params": parameters()})
    assert rates(optimizer)[3:] == rates(optimizer)[:3]


@every_optimizer
def test__a_state_dict__resumes(make):
    ps = parameters()
    optimizer = make(ps, lr=0.5, weight_decay=0.01)
    step(optimizer, ps)
    clones = [mup.copy_tags(p, nn.Parameter(p.detach().clone())) for p in ps]
    resumed = make(clones, lr=0.125)
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    step(optimizer, ps)
    step(resumed, clones)
    torch.testing.assert_close(clones, ps, rtol=0, atol=0)


@every_optimizer
def test__parameters_without_tags__beside_tagged_ones__are_an_error_unless_allowed(make):
    plain = nn.Parameter(torch.ones(2, 3))
    for params, says in (
        ([*parameters(), plain], r"a parameter of shape \(2, 3\) has no u-muP tags"),
        ([*parameters(), ("encoder.weight", plain)], r"encoder.weight, of shape \(2, 3\)"),
    ):
        with pytest.raises(MupError, match=says):
            make(params)
    optimizer = make([*parameters(), plain], lr=0.5, allow_non_unit_scaling_params=True)
    assert rates(optimizer)[-1] == (0.5, 4)
    optimizer = make(parameters(), lr=0.5)
    with pytest.raises(MupError, match="has no u-muP tags"):
        optimizer.add_param_group({"params": [plain]})


@every_optimizer
def test__parameters_without_tags__alone__are_an_error_where_that_is_asked_for(make):
    plain = nn.Parameter(torch.ones(2, 3))
    with pytest.raises(MupError, match=r"encoder.weight, of shape \(2, 3\)"):
        make([("encoder.weight", plain)], allow_non_unit_scaling_params=False)


TORCHS = {
    optim.SGD: torch.optim.SGD,
    optim.Adam: torch.optim.Adam,
    optim.AdamW: torch.optim.AdamW,
    optim.Muon: torch.optim.Muon,
}


@pytest.mark.parametrize("make", TORCHS, ids=lambda c: c.__name__)
def test__parameters_without_tags__are_taken_as_torch_takes_them(make):
    """Every default is torch's, the weight decay of AdamW and Muon too."""
    trained = []
    for optimizer_of in (make, TORCHS[make]):
        torch.manual_seed(0)
        ps = [nn.Parameter(torch.randn(4, 6)) for _ in range(2)]
        optimizer = optimizer_of([{"params": ps[:1], "lr": 0.5}, {"params": iter(ps[1:])}])
        for seed in range(3):
            torch.manual_seed(seed)
            for p in ps:
                p.grad = torch.randn(4, 6)
            optimizer.step()
        trained.append((ps, [g["weight_decay"] for g in optimizer.param_groups]))
    (ours, decays), (theirs, expected) = trained
    assert decays == expected
    assert all(torch.equal(p, q) for p, q in zip(ours, theirs, strict=True))


@every_optimizer
def test__a_tagged_parameter__is_no_part_of_an_optimizer_of_plain_ones(make):
    optimizer = make([nn.Parameter(torch.ones(2, 3))])
    with pytest.raises(MupError, match="needs an optimizer of its own"):
        optimizer.add_param_group({"params": parameters()[:1]})
    assert len(optimizer.param_groups) == 1


def test__independent_weight_decay__may_be_asked_for_without_tags():
    p = nn.Parameter(torch.ones(8))
    optimizer = optim.AdamW([p], lr=0.5, weight_decay=0.125, independent_weight_decay=True)
    p.grad = torch.zeros(8)
    optimizer.step()
    assert torch.equal(p.detach(), torch.full((8,), 0.875))


def test__scaled_parameters__serve_any_optimizer():
    ps = parameters()
    groups = optim.scaled_parameters(ps, optim.lr_scale_func_adam, lr=0.5, weight_decay=0.25)
    assert [g["weight_decay"] for g in groups] == [2, 4, 0.5]
    optimizer = torch.optim.RAdam(groups)
    assert rates(optimizer) == [(0.125, 2), (0.0625, 1), (0.5, 3)]
    step(optimizer, ps)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: optim.scaled_parameters(parameters(), lambda p: 1.0), "no learning rate"),
        (lambda: optim.AdamW(parameters(), lr=0.0, weight_decay=0.1), "warm up by a scheduler"),
        (lambda: optim.AdamW([{"params": set(parameters())}]), "got a set"),
        (
            lambda: optim.scaled_parameters(torch.ones(2), optim.lr_scale_func_adam, lr=1.0),
            "got one tensor",
        ),
        (lambda: optim.SGD(parameters(), readout_constraint="gmean"), "readout_constraint"),
    ],
)
def test__a_wrong_call__is_an_error_that_says_what_to_do(call, message):
    with pytest.raises(MupError, match=message):
        call()


@pytest.mark.parametrize("foreach", [False, True])
@every_optimizer
def test__scaled_tensors__step_as_plain_parameters(make, foreach):
    plain = parameters()
    held = [mup.copy_tags(p, nn.Parameter(sct.scaled(p.detach()))) for p in plain]
    pair = [make(ps, lr=0.1, weight_decay=0.01, foreach=foreach) for ps in (plain, held)]
    for _ in range(3):
        for p, q in zip(plain, held, strict=True):
            g = torch.randn_like(p)
            p.grad, q.grad = g, sct.scaled(g)
        for optimizer in pair:
            optimizer.step()
    for p, q in zip(plain, held, strict=True):
        assert isinstance(q, sct.ScaledTensor)
        torch.testing.assert_close(q.detach().dequantize(), p.detach(), rtol=1e-5, atol=1e-5)
