"""The optimizers match the published library's step by step, and differ in the listed points."""

import pytest
import torch

from scaledtensor import mup, optim

published = pytest.importorskip("unit_scaling")

SHAPES = [
    ("weight", (6, 16)),
    ("weight", (5, 16)),
    ("weight", (6, 4, 3)),
    ("bias", (6,)),
    ("norm", (8,)),
    ("output", (9, 16)),
]
CALLS = {
    "sgd": ("SGD", {"lr": 0.1}),
    "sgd_momentum": ("SGD", {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01}),
    "sgd_readout": ("SGD", {"lr": 0.01, "readout_constraint": "to_output_scale"}),
    "adam": ("Adam", {"lr": 0.1, "weight_decay": 0.01}),
    "adamw": ("AdamW", {"lr": 0.1, "weight_decay": 0.01}),
    "adamw_dependent": (
        "AdamW",
        {"lr": 0.1, "weight_decay": 0.01, "independent_weight_decay": False},
    ),
    "adamw_amsgrad": ("AdamW", {"lr": 0.1, "amsgrad": True, "betas": (0.8, 0.9)}),
    "adamw_tensor_lr": ("AdamW", {"lr": torch.tensor(0.1), "weight_decay": 0.01}),
}


def train(parameter, library, name, options, grouped):
    rng = torch.Generator().manual_seed(0)
    ps = [
        parameter(torch.randn(shape, generator=rng), mup_type, mup_scaling_depth=depth)
        for depth in (None, 3)
        for mup_type, shape in SHAPES
    ]
    params = [{"params": ps[:4], "lr": 0.05}, {"params": ps[4:], "weight_decay": 0.03}]
    optimizer = getattr(library, name)(params if grouped else ps, **options)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    for _ in range(6):
        for p in ps:
            p.grad = torch.randn(p.shape, generator=rng)
        optimizer.step()
        scheduler.step()
    return ps, optimizer


@pytest.mark.parametrize("grouped", [False, True])
@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test__training__is_that_of_the_published_optimizers(call, grouped):
    got, ours = train(mup.Parameter, optim, *call, grouped)
    want, theirs = train(published.Parameter, published.optim, *call, grouped)
    for p, q in zip(got, want, strict=True):
        torch.testing.assert_close(p.detach(), q.detach(), rtol=1e-6, atol=1e-6)
    assert len(theirs.param_groups) == len(got)
    assert len(ours.param_groups) < len(got)


def test__positional_options__are_those_of_torch_and_not_the_learning_rate():
    """The published optimizers take the first positional option after lr for lr."""
    p = mup.Parameter(torch.ones(4, 4), "output")
    (group,) = optim.Adam([p], 0.5, (0.7, 0.8)).param_groups
    assert (group["lr"], group["betas"]) == (0.5, (0.7, 0.8))


def test__later_groups__are_scaled():
    """The published optimizers train a group that is added later at the plain learning rate."""
    ps = [mup.Parameter(torch.ones(4, 4), "weight") for _ in range(2)]
    optimizer = optim.AdamW(ps[:1], lr=0.5)
    optimizer.add_param_group({"params": ps[1:]})
    assert [g["lr"] for g in optimizer.param_groups] == [0.25, 0.25]
