"""Trainings under a factor of the loss have the same bits, with the guard and all rebalancing
on."""

import pytest
import torch
from torch import nn

import scaledtensor as sct
from scaledtensor.recipes import Unit

WIDE = Unit(rebalance=3)
NARROW = Unit(gradient="e4m3fn", rebalance=3)
KS = (-60, -40, -18, 18, 40, 60)


def transformer(dropout):
    layer = nn.TransformerEncoderLayer(32, 4, 64, dropout, batch_first=True, norm_first=True)
    return nn.Sequential(nn.Embedding(64, 32), layer, nn.Linear(32, 64))


def tokens():
    return torch.randint(64, (4, 16)), torch.randint(64, (4, 16))


def convnet(dropout):
    return nn.Sequential(
        *(nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Dropout(dropout)),
        nn.Linear(32 * 16, 10),
    )


def images():
    return torch.randn(8, 3, 8, 8), torch.randint(10, (8,))


class Recurrent(nn.Module):
    def __init__(self, dropout):
        super().__init__()
        self.embedding = nn.Embedding(64, 32)
        self.lstm = nn.LSTM(32, 32, 2, dropout=dropout, batch_first=True)
        self.head = nn.Linear(32, 64)

    def forward(self, x):
        return self.head(self.lstm(self.embedding(x))[0])


def adamw(parameters):
    return torch.optim.AdamW(parameters, 1e-2)


def sgd(parameters):
    return torch.optim.SGD(parameters, 1e-1, momentum=0.9)


RUNS = {
    "transformer-adamw-dropout-clip": (transformer, tokens, adamw, 0.1, 1.0, WIDE),
    "transformer-adamw-e4m3fn": (transformer, tokens, adamw, 0.0, None, NARROW),
    "transformer-sgd-e4m3fn-clip": (transformer, tokens, sgd, 0.1, 0.5, NARROW),
    "convnet-adamw-dropout": (convnet, images, adamw, 0.2, None, WIDE),
    "convnet-sgd-e4m3fn-clip": (convnet, images, sgd, 0.0, 1.0, NARROW),
    "lstm-adamw-e4m3fn-dropout": (Recurrent, tokens, adamw, 0.1, None, NARROW),
    "lstm-sgd-clip": (Recurrent, tokens, sgd, 0.0, 1.0, WIDE),
}


def trained(run, k):
    make, batch, optimizer_of, dropout, clip, recipe = RUNS[run]
    torch.manual_seed(0)
    model = sct.scale_model(make(dropout), recipe)
    with torch.no_grad():
        # Some layers break the assumptions of the rules, so that sites have something to correct.
        list(model.modules())[-1].weight.abs_()
    optimizer = optimizer_of(model.parameters())
    losses = []
    for _ in range(8):
        x, y = batch()
        optimizer.zero_grad()
        out = model(x)
        loss = nn.functional.cross_entropy(out.reshape(-1, out.shape[-1]), y.reshape(-1))
        (loss * 2.0**k).backward()
        for p in model.parameters():
            p.grad *= 2.0**-k
        if clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        losses.append(loss.item())
    return losses, {name: p.detach() for name, p in model.named_parameters()}


@pytest.fixture(scope="module")
def plain():
    found = {}

    def of(run):
        if run not in found:
            found[run] = trained(run, 0)
        return found[run]

    return of


CASES = [
    pytest.param(run, k, marks=() if k == KS[i % len(KS)] else pytest.mark.slow)
    for i, run in enumerate(RUNS)
    for k in KS
]


@pytest.mark.parametrize(("run", "k"), CASES)
def test__a_factor_of_the_loss__changes_no_bit_of_a_training(run, k, plain):
    losses, values = plain(run)
    found, others = trained(run, k)
    assert found == losses
    for name, p in others.items():
        assert torch.equal(p.qdata, values[name].qdata), name
        assert torch.equal(p.scale, values[name].scale), name
        assert p.recipe == values[name].recipe, name
