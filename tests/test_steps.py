"""Hooks of optimizers' steps come, act and go at the right times."""

import copy
import gc
import io
import time

import pytest
import torch
from torch import nn
from torch.optim import optimizer as torch_optimizer

import scaledtensor as sct
from scaledtensor.errors import UnsupportedError
from scaledtensor.models.rebalance import COUNT
from scaledtensor.tensors import steps

EVERY = sct.recipes.Unit(rebalance=2)


COMMON = (
    torch_optimizer._global_optimizer_pre_hooks,
    torch_optimizer._global_optimizer_post_hooks,
)


def hooks() -> int:
    """Return the number of hooks that all optimizers share."""
    return sum(map(len, COMMON))


@pytest.fixture(autouse=True)
def _as_if_nothing_were_alive(monkeypatch):
    """Put hooks aside for parameters that other tests of this process may have kept."""
    aside = [dict(common) for common in COMMON]
    for common in COMMON:
        common.clear()
    monkeypatch.setattr(steps, "_handles", [])
    monkeypatch.setattr(steps, "_kept", steps._nothing)
    yield
    gc.collect()
    assert hooks() == 0
    for common, before in zip(COMMON, aside, strict=True):
        common.update(before)


def model(recipe=EVERY) -> nn.Module:
    torch.manual_seed(0)
    return sct.scale_model(nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4)), recipe)


def train(net, optimizer, steps=1):
    for _ in range(steps):
        optimizer.zero_grad()
        net(torch.ones(2, 8)).square().mean().backward()
        optimizer.step()


def counts(optimizer):
    return [group.get(COUNT, 0) for group in optimizer.param_groups]


# --- there, and gone -------------------------------------------------------------------------


def test__hooks__come_with_the_first_parameter_and_go_with_the_last():
    plain = nn.Linear(4, 4)
    assert hooks() == 0
    first = model()
    assert hooks() == 2
    second = model()
    optimizer = torch.optim.SGD(second.parameters(), 0.1)
    train(second, optimizer)
    assert hooks() == 2
    del first
    gc.collect()
    assert hooks() == 2
    del second
    gc.collect()
    assert hooks() == 2, "the optimizer holds the parameters"
    del optimizer
    gc.collect()
    assert hooks() == 0
    del plain


def test__hooks__come_again():
    for _ in range(2):
        net = model()
        assert hooks() == 2
        del net
        gc.collect()
        assert hooks() == 0


def test__unscale_model__takes_them():
    net = sct.unscale_model(model())
    gc.collect()
    assert hooks() == 0
    assert not any(steps.MARK in vars(p) for p in net.parameters())


def test__a_parameter_without_a_recipe__needs_none():
    p = nn.Parameter(sct.scaled(torch.ones(4)))
    assert p.recipe is None
    assert hooks() == 0


@pytest.mark.parametrize("made", ["parameter", "requires_grad_", "unpickled", "deep-copied"])
def test__parameters_made_by_hand__are_rebalanced_and_bring_the_hooks(made):
    x = sct.scaled(torch.randn(8, 8), recipe=EVERY)
    assert hooks() == 0
    if made == "parameter":
        p = nn.Parameter(x)
    elif made == "requires_grad_":
        p = x.requires_grad_()
    elif made == "deep-copied":
        p = copy.deepcopy(nn.Parameter(x))
    else:
        file = io.BytesIO()
        torch.save(nn.Parameter(x), file)
        file.seek(0)
        p = torch.load(file)
    del x
    gc.collect()
    assert hooks() == 2
    optimizer = torch.optim.SGD([p], 1.0)
    p.grad = -8 * p.detach()
    optimizer.step()
    assert p.scale < 4
    optimizer.step()
    assert p.scale > 4, "rebalanced after two steps"
    assert counts(optimizer) == [2]


def test__a_leaf_that_became_one_otherwise__is_known_after_its_first_step():
    x = sct.scaled(torch.randn(8, 8), recipe=EVERY)
    x.requires_grad = True
    optimizer = torch.optim.SGD([x], 0.1)
    x.grad = torch.ones_like(x).detach()
    optimizer.step()
    optimizer.step()
    assert counts(optimizer) == [2]


def test__a_model_that_is_moved__keeps_them():
    """`Module.to` swaps parameters, and refuses if anything holds a weak reference to them."""
    net = model().to(torch.float16)
    gc.collect()
    assert hooks() == 2
    assert all(steps.MARK in vars(p) for p in net.parameters())


def test__a_model_collected_within_a_step__takes_them_later(monkeypatch):
    """torch iterates over the hooks then, so removing one would break the step."""
    cycle = [model()]
    cycle.append(cycle)
    other = torch.optim.SGD(nn.Linear(4, 4).parameters(), 0.1)
    seen = []

    def collect(*_):
        gc.collect()
        seen.append(hooks())

    after = torch_optimizer.register_optimizer_step_pre_hook(collect)
    last = torch_optimizer.register_optimizer_step_pre_hook(lambda *_: None)
    del cycle
    try:
        other.step()
    finally:
        after.remove()
        last.remove()
    assert seen == [4], "both hooks of ours, and the two of this test"
    gc.collect()
    assert hooks() == 0


def test__a_model_made_while_they_wait_to_go__has_one_pair():
    net = model()
    other = torch.optim.SGD(nn.Linear(4, 4).parameters(), 0.1)

    def swap(*_):
        nonlocal net
        net = None
        gc.collect()
        net = model()

    with_handle = other.register_step_pre_hook(swap)
    other.step()
    with_handle.remove()
    gc.collect()
    assert hooks() == 2
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    train(net, optimizer)
    assert counts(optimizer) == [1]


# --- on whom they act ------------------------------------------------------------------------


def test__a_plain_optimizer__is_let_alone():
    net = model()
    plain = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(plain.parameters(), 0.1)
    plain(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    assert steps.held(optimizer) == []
    assert counts(optimizer) == [0]
    assert not optimizer._optimizer_step_pre_hooks
    assert not optimizer._optimizer_step_post_hooks
    del net


def test__a_plain_step__takes_no_longer_beside_a_scaled_model():
    """A hook takes 15 us for 1,000 parameters, out of milliseconds. Noise does not reach this
    bound."""
    plain = torch.optim.SGD([nn.Parameter(torch.ones(4)) for _ in range(1000)], 0.1)
    net = model()
    start = time.process_time()
    for _ in range(50):
        steps._before(plain, (), {})
        steps._after(plain, (), {})
    assert (time.process_time() - start) / 50 < 1e-3
    del net


def test__an_optimizer_made_before__acts_once_it_is_given_the_new_parameters():
    torch.manual_seed(0)
    net = nn.Linear(8, 4)
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    sct.scale_model(net, EVERY)
    optimizer.param_groups[0]["params"] = list(net.parameters())
    train(net, optimizer, 3)
    assert counts(optimizer) == [3]


def test__a_group_added_later__counts_from_then_on():
    net = model()
    plain = nn.Parameter(torch.ones(4))
    optimizer = torch.optim.SGD([plain], 0.1)
    plain.grad = torch.ones(4)
    optimizer.step()
    optimizer.add_param_group({"params": list(net.parameters())})
    train(net, optimizer, 2)
    assert counts(optimizer) == [0, 2]


def test__copies_and_states_of_optimizers__go_on_counting():
    net = model()
    optimizer = torch.optim.AdamW(net.parameters(), 0.01)
    train(net, optimizer, 1)
    copied_net, copied = copy.deepcopy((net, optimizer))
    train(copied_net, copied, 1)
    assert counts(copied) == [2]
    other = model()
    restored = torch.optim.AdamW(other.parameters(), 0.01)
    restored.load_state_dict(optimizer.state_dict())
    train(other, restored, 2)
    assert (counts(optimizer), counts(restored)) == ([1], [3])
    file = io.BytesIO()
    torch.save((net, optimizer), file)
    file.seek(0)
    read_net, read = torch.load(file, weights_only=False)
    train(read_net, read, 1)
    assert counts(read) == [2]


def test__schedulers_averages_and_grad_scalers__go_with_them():
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    average = torch.optim.swa_utils.AveragedModel(net)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    for _ in range(2):
        optimizer.zero_grad()
        scaler.scale(net(torch.ones(2, 8)).square().mean()).backward()
        scaler.step(optimizer)
        scaler.update()
        scheduler.step()
        average.update_parameters(net)
    assert counts(optimizer) == [2]
    assert sct.statistics(next(average.parameters())).amax > 0


def test__histories__advance_with_each_step_of_the_optimizer_that_holds_the_weights():
    net = model("delayed")
    history = net[0].weight_amax
    other = torch.optim.SGD(model("delayed").parameters(), 0.1)
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    net(torch.ones(2, 8)).square().mean().backward()
    seen = history.clone()
    other.step()
    assert torch.equal(history, seen)
    optimizer.step()
    assert not torch.equal(history, seen)


def test__stored_weights__are_refused_before_they_are_changed():
    net = nn.Linear(8, 8).requires_grad_(False)
    sct.scale_model(net, sct.recipes.Unit(store_frozen=True))
    net.weight.requires_grad_()
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    before = net.weight.dequantize()
    net.weight.grad = torch.ones_like(before)
    with pytest.raises(UnsupportedError, match="store_frozen"):
        optimizer.step()
    assert torch.equal(net.weight.dequantize(), before)
