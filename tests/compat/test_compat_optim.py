"""Programs written to `unit_scaling.optim` find the groups, the states and the errors they know."""

import io

import pytest
import torch
from torch.nn import functional as F

import scaledtensor.compat.unit_scaling as uu
from scaledtensor.compat.unit_scaling import functional as U
from scaledtensor.compat.unit_scaling import optim
from scaledtensor.compat.unit_scaling.transforms import unit_scale
from scaledtensor.errors import ScaledTensorError

OPTIMIZERS = {
    "Adam": {"lr": 0.1, "weight_decay": 1e-4},
    "AdamW": {"lr": 0.1},
    "SGD": {"lr": 0.1, "momentum": 0.9},
}
TOKENS = torch.arange(18).view(2, 9) % 20


def decoder(of=uu):
    torch.manual_seed(0)
    return of.TransformerDecoder(hidden_size=32, vocab_size=20, layers=2, heads=2)


def test__scaled_parameters__has_one_group_for_each_parameter_in_its_order():
    first, second, last = (uu.Parameter(torch.zeros(4, 16), "weight") for _ in range(3))
    groups = optim.scaled_parameters(
        [first, {"params": [second, last], "lr": 0.3, "eps": 1e-6}],
        optim.lr_scale_func_adam,
        lr=0.1,
        weight_decay=0.01,
    )
    owners = [p for group in groups for (p,) in [group["params"]]]
    assert [id(p) for p in owners] == [id(first), id(second), id(last)]
    assert [group["lr"] for group in groups] == pytest.approx([0.025, 0.075, 0.075])
    decays = [group["weight_decay"] for group in groups]
    assert decays == pytest.approx([0.4, 0.01 / 0.075, 0.01 / 0.075])
    assert groups[1]["eps"] == 1e-6


@pytest.mark.parametrize("name", OPTIMIZERS)
def test__a_state_dict_of_the_published_optimizers__goes_on_here_and_there(name):
    published = pytest.importorskip("unit_scaling")
    theirs = pytest.importorskip("unit_scaling.optim")
    models = [decoder(published), decoder()]
    models[1].load_state_dict(models[0].state_dict())
    made = [getattr(o, name) for o in (theirs, optim)]
    optimizers = [m(d.parameters(), **OPTIMIZERS[name]) for m, d in zip(made, models, strict=True)]

    def run(i, steps):
        for _ in range(steps):
            optimizers[i].zero_grad()
            loss = models[i].loss(TOKENS)
            loss.backward()
            optimizers[i].step()
        return float(loss.detach())

    run(0, 2)
    file = io.BytesIO()
    torch.save([models[0].state_dict(), optimizers[0].state_dict()], file)
    file.seek(0)
    weights, states = torch.load(file)
    models[1].load_state_dict(weights)
    optimizers[1].load_state_dict(states)
    assert run(0, 2) == pytest.approx(run(1, 2), rel=1e-4)
    optimizers[0].load_state_dict(optimizers[1].state_dict())
    assert run(0, 1) == pytest.approx(run(1, 1), rel=1e-4)


REFUSED = {
    "dropout": lambda: U.dropout(torch.ones(2), inplace=True),
    "Dropout": lambda: uu.Dropout(inplace=True),
    "embedding": lambda: U.embedding(TOKENS, torch.ones(20, 4), scale_grad_by_freq=True),
    "Embedding": lambda: uu.Embedding(20, 4, scale_grad_by_freq=True),
    "mse_loss": lambda: U.mse_loss(torch.ones(2), torch.ones(2), size_average=True),
    "shapes": lambda: U.mse_loss(torch.ones(2, 3), torch.ones(1, 3)),
    "untagged": lambda: optim.SGD([torch.nn.Parameter(torch.ones(2))]),
    "no rate": lambda: optim.scaled_parameters(
        [uu.Parameter(torch.ones(2), "norm")], optim.lr_scale_func_adam
    ),
    "readout": lambda: optim.SGD(decoder().parameters(), readout_constraint="another"),
    "depth": lambda: uu.DepthSequential(torch.nn.Linear(2, 2)),
}


@pytest.mark.parametrize("name", REFUSED)
def test__what_the_published_library_refuses__is_a_value_error(name):
    with pytest.raises(ValueError) as caught:  # noqa: PT011 - of any words
        REFUSED[name]()
    assert isinstance(caught.value, ScaledTensorError)


def new_gelu(x):
    return 0.5 * x * (1 + torch.tanh(0.79788456 * (x + 0.044715 * x.pow(3))))


class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = torch.nn.Linear(256, 512), torch.nn.Linear(512, 256)

    def forward(self, x):
        return self.down(new_gelu(self.up(x)))


def test__replace__takes_a_function_of_torch_at_unit_scale():
    torch.manual_seed(0)
    model = unit_scale(Block(), replace={new_gelu: F.gelu})
    y = model(torch.randn(512, 256))
    assert float(y.std()) == pytest.approx(1, abs=0.2)
