"""All forms of torch.nn's recurrent networks compute the results of plain tensors."""

import copy
from typing import Any

import pytest
import torch
from assertions import TOLERANCE, assert_holds, dequantized
from torch import Tensor, nn

import scaledtensor as sct

EXACT = sct.recipes.Unit("fp32", "fp32", "fp32")
KINDS = [nn.LSTM, nn.GRU, nn.RNN]
FORMS: dict[str, dict[str, Any]] = {
    "plain": {},
    "deep both ways": {"bidirectional": True, "num_layers": 2},
    "without bias by batch": {"batch_first": True, "bias": False},
}
CASES = [(k, f) for k in KINDS for f in FORMS.values()] + [(nn.RNN, {"nonlinearity": "relu"})]
CASES += [(nn.LSTM, {"proj_size": 3, "bidirectional": True})]
every_case = pytest.mark.parametrize(("kind", "form"), CASES, ids=str)


def results(net: nn.Module, x: Any, state: Any) -> list[Tensor]:
    """Return outputs, final states, and the gradients of all parameters."""
    output, final = net(x, state)
    output = output.data if isinstance(output, nn.utils.rnn.PackedSequence) else output
    found = [output, *(final if isinstance(final, tuple) else (final,))]
    rng = torch.Generator().manual_seed(1)
    loss = sum((t * torch.randn(t.shape, generator=rng)).sum() for t in found)
    loss.backward()
    return found + [p.grad for p in net.parameters()]


def initial(net: nn.RNNBase) -> Any:
    rng = torch.Generator().manual_seed(2)
    rows = net.num_layers * (2 if net.bidirectional else 1)
    h = torch.randn(rows, 3, net.proj_size or net.hidden_size, generator=rng)
    if not isinstance(net, nn.LSTM):
        return h
    return h, torch.randn(rows, 3, net.hidden_size, generator=rng)


@pytest.mark.parametrize("given", [False, True], ids=["from zero", "from a state"])
@pytest.mark.parametrize("packed", [False, True], ids=["padded", "packed"])
@every_case
def test__network__is_that_of_plain_tensors(kind, form, packed, given):
    torch.manual_seed(0)
    net = kind(6, 8, **form)
    model = sct.scale_model(copy.deepcopy(net), EXACT)
    x = torch.randn(5, 3, 6)
    if packed:
        x = nn.utils.rnn.pack_padded_sequence(x, [5, 3, 2], enforce_sorted=False)
    elif form.get("batch_first"):
        x = x.transpose(0, 1)
    state = initial(net) if given else None
    for got, want in zip(results(model, x, state), results(net, x, state), strict=True):
        assert isinstance(got, sct.ScaledTensor)
        assert_holds(got, want, TOLERANCE[torch.float32])


@pytest.mark.parametrize("kind", [nn.LSTMCell, nn.GRUCell, nn.RNNCell])
def test__cell__is_that_of_plain_tensors(kind):
    torch.manual_seed(0)
    net = kind(6, 8)
    model = sct.scale_model(copy.deepcopy(net), EXACT)
    x = torch.randn(3, 6)
    got, want = model(x), net(x)
    for a, b in zip(*(r if isinstance(r, tuple) else (r,) for r in (got, want)), strict=True):
        assert_holds(a, b, TOLERANCE[torch.float32])


@pytest.mark.parametrize("kind", KINDS)
def test__gate_products__multiply_and_save_8_bit_operands(kind):
    torch.manual_seed(0)
    model = sct.scale_model(kind(16, 16))
    saved = []

    def pack(t: Tensor) -> Tensor:
        if isinstance(t, sct.ScaledTensor) and t.shape[-1] == 16 and t.dim() == 2:
            saved.append(t.format.name)
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        output, _ = model(torch.randn(4, 3, 16))
    weights = [f for f in saved if f == "e4m3fn"]
    assert len(weights) >= 4  # These are the operands of the recurrent product of each step.
    output.square().sum().backward()
    for p in model.parameters():
        assert dequantized(p.grad).isfinite().all()


def test__dropout__falls_between_the_layers_in_training_alone():
    torch.manual_seed(0)
    model = sct.scale_model(nn.LSTM(8, 8, num_layers=2, dropout=0.5), EXACT)
    x = torch.randn(4, 3, 8)
    first, second = (dequantized(model(x)[0]) for _ in range(2))
    assert not torch.equal(first, second)
    model.eval()
    first, second = (dequantized(model(x)[0]) for _ in range(2))
    assert torch.equal(first, second)


def test__elements_of_a_long_run__stay_in_range():
    """Over 64 steps, the elements behind a gate neither grow nor fade."""
    torch.manual_seed(0)
    model = sct.scale_model(nn.LSTM(32, 32))
    output, (h, c) = model(torch.randn(64, 8, 32))
    output.backward(sct.scaled(torch.randn(output.shape).bfloat16()))
    for t in (output, h, c, *(p.grad for p in model.parameters())):
        rms = float(t.qdata.detach().float().square().mean().sqrt())
        assert 0.1 < rms < 8, rms
