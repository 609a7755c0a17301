"""All forms of torch.nn's recurrent networks compute the results of plain tensors."""

import contextlib
import copy
from typing import Any

import pytest
import torch
from assertions import TOLERANCE, assert_holds, dequantized
from tensors import Looking, bits
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import scaledtensor as sct
from scaledtensor import native as loops
from scaledtensor.formats import FP32
from scaledtensor.ops.rules import recurrent_layer

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
    """The second step starts from the state of the first, whose gradient flows back."""
    torch.manual_seed(0)
    net = kind(6, 8)
    model = sct.scale_model(copy.deepcopy(net), EXACT)
    x, found = torch.randn(2, 3, 6), []
    for module in (model, net):
        state = module(x[1], module(x[0]))
        state = state if isinstance(state, tuple) else (state,)
        sum(s.square().sum() for s in state).backward()
        found.append([*state, *(p.grad for p in module.parameters())])
    for got, want in zip(*found, strict=True):
        assert_holds(got, want, TOLERANCE[torch.float32])


@pytest.mark.parametrize("kind", KINDS)
def test__gate_products__multiply_and_save_8_bit_operands(kind):
    torch.manual_seed(0)
    model = sct.scale_model(kind(16, 16))
    saved = []

    def pack(t: Tensor) -> Tensor:
        if isinstance(t, sct.ScaledTensor) and t.shape[-1] == 16 and t.dim() == 2:
            saved.append(t.format.name)
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t), Looking():
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


# --- the steps as one node -------------------------------------------------------------------

RECIPES = {
    "8 bits": sct.recipes.Unit(),
    "8 bits, float32 activations": sct.recipes.Unit(activation="fp32"),
    "8 bits, float16 activations": sct.recipes.Unit(activation="fp16"),
    "bfloat16": sct.recipes.Unit(forward="bf16", gradient="bf16"),
    "float16": sct.recipes.Unit("fp16", "fp16", "fp16"),
    "float32": EXACT,
}


@pytest.fixture
def nodes(monkeypatch):
    """Count the layers that run as one node."""
    ran = []
    run = recurrent_layer._Steps.apply
    monkeypatch.setattr(recurrent_layer._Steps, "apply", lambda *a: ran.append(True) or run(*a))
    return ran


def facts(x: Tensor) -> Any:
    return type(x), x.shape, x.dtype, x.format, x.recipe, x.nonnegative


def error(got: list[Tensor], want: list[Tensor]) -> float:
    """Return the largest distance, relative to the norm of the wanted tensor."""
    pairs = [(dequantized(a), dequantized(b).double()) for a, b in zip(got, want, strict=True)]
    return max(float((a.detach() - b.detach()).norm() / b.detach().norm()) for a, b in pairs)


@pytest.mark.parametrize("packed", [False, True], ids=["padded", "packed"])
@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
@pytest.mark.parametrize("kind", KINDS)
def test__alone__a_layer_is_one_node_with_the_casts_of_operators(kind, recipe, packed, nodes):
    """Casts to 8 bits change the result by several percent. With float32 activations, the node and
    the operators make the same casts, apart from a few ties. With other activations, the operators
    round more often than the node."""
    torch.manual_seed(0)
    net = kind(16, 32, num_layers=2, bidirectional=True)
    x, state = torch.randn(5, 3, 16), initial(net)
    if packed:
        x = nn.utils.rnn.pack_padded_sequence(x, [5, 3, 2], enforce_sorted=False)
    want = results(copy.deepcopy(net), x, state)
    alone = results(sct.scale_model(copy.deepcopy(net), recipe), x, state)
    assert len(nodes) == 4
    with Looking():
        watched = results(sct.scale_model(net, recipe), x, state)
    assert len(nodes) == 4
    assert [facts(t) for t in alone] == [facts(t) for t in watched]
    of_casts = error(watched, want) + 2.0**-18
    assert error(alone, want) < 1.25 * of_casts
    if recipe.activation is FP32:
        assert error(alone, watched) < 0.5 * of_casts
    for t in alone:
        assert_holds(t, dequantized(t), 0.0)
        assert 2.0**-4 < float(t.qdata.detach().float().square().mean().sqrt()) < 2.0**4


@pytest.mark.parametrize("kind", KINDS)
def test__without_loops_in_cpp__the_bits_are_the_same(kind):
    torch.manual_seed(0)
    model, x = sct.scale_model(kind(32, 32)), torch.randn(40, 8, 32)
    found = []
    for context in (contextlib.nullcontext(), loops.left_out()):
        with context:
            model.zero_grad()
            found.append([bits(t) for t in results(model, x, None)])
    assert found[0] == found[1]


@pytest.mark.parametrize("kind", KINDS)
def test__a_loss_times_a_power_of_two__changes_no_bit(kind):
    torch.manual_seed(0)
    model, x = sct.scale_model(kind(8, 8, bidirectional=True)), torch.randn(9, 4, 8)

    def gradients(power: int) -> list[Tensor]:
        model.zero_grad()
        output, last = model(x)
        last = last[0] if isinstance(last, tuple) else last
        ((output.square().mean() + last.sum()) * 2.0**power).backward()
        return [p.grad for p in model.parameters()]

    for a, b in zip(gradients(0), gradients(30), strict=True):
        assert torch.equal(a.qdata, b.qdata)
        assert float(b.scale) == float(a.scale) * 2.0**30


@pytest.mark.parametrize("kind", KINDS)
def test__derivatives__of_checkpoints_batches_and_second_order(kind, nodes):
    torch.manual_seed(0)
    net = kind(5, 7)
    model = sct.scale_model(copy.deepcopy(net), EXACT)
    x = torch.randn(6, 3, 5, requires_grad=True)

    def slopes(module: nn.Module, **how: Any) -> Tensor:
        output = module(x)[0].dequantize() if module is model else module(x)[0]
        return torch.autograd.grad(output.square().sum(), x, **how)[0]

    first = slopes(model)
    assert nodes
    again = checkpoint(lambda t: model(t)[0].dequantize(), x, use_reentrant=False)
    assert torch.equal(torch.autograd.grad(again.square().sum(), x)[0], first)
    rows = model(x)[0].dequantize().square().sum((1, 2))
    (each,) = torch.autograd.grad(rows, x, torch.eye(6), is_grads_batched=True)
    torch.testing.assert_close(each.sum(0), first)
    with torch.backends.mkldnn.flags(enabled=False):  # oneDNN's layer has no second derivative
        second = [
            torch.autograd.grad(slopes(m, create_graph=True).square().sum(), x)[0]
            for m in (net, model)
        ]
    torch.testing.assert_close(second[1], second[0], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test__saved_tensors__are_terms_states_and_no_gates(kind):
    torch.manual_seed(0)
    model, steps, rows = sct.scale_model(kind(16, 16)), 10, 4
    taken: dict[int, int] = {}

    def pack(t: Tensor) -> Tensor:
        for q in [t.qdata] if isinstance(t, sct.ScaledTensor) else [t]:
            taken[q.untyped_storage().data_ptr()] = q.untyped_storage().nbytes()
        return t

    x = torch.randn(steps, rows, 16)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        model(x)
    gates = {nn.LSTM: 4, nn.GRU: 3, nn.RNN: 1}[kind]
    held = 1 + 2 if kind is nn.LSTM else 2  # codes of states and cells, or states
    input_in_codes, weights = steps * rows * 16, 16 * 16 * gates * (1 + 1)
    small = 4 * 16 * gates * 2 + 2 * 4 * rows * 16  # biases and the initial state
    most = input_in_codes + weights + small + steps * rows * 16 * (2 * gates + held)
    assert sum(taken.values()) <= most


@pytest.mark.parametrize("seen", [False, True], ids=["alone", "watched"])
@pytest.mark.parametrize(("kind", "gain"), [(nn.LSTM, 5.0), (nn.GRU, 5.0), (nn.RNN, 1.5)])
def test__a_gradient_through_many_steps__keeps_its_direction(kind, gain, seen):
    """The rules take the terms of a product for independent, and expect that these gradients
    explode. Gates that saturate bound them: under a scale for 2^40, a cast to E5M2 gave zeros."""
    torch.manual_seed(0)
    net = kind(64, 64)
    with torch.no_grad():
        net.weight_hh_l0.mul_(gain)
    x, found = 4 * torch.randn(200, 4, 64), []
    model = sct.scale_model(copy.deepcopy(net))
    for module in (net, model):
        with Looking() if seen else contextlib.nullcontext():
            module(x)[0][-1].sum().backward()
        found.append(dequantized(module.weight_hh_l0.grad))
    want, got = found
    assert torch.cosine_similarity(got.flatten(), want.flatten(), 0) > 0.8
    assert 0.8 < float(got.norm() / want.norm()) < 1.25


@pytest.mark.parametrize("kind", KINDS)
def test__a_graph_of_a_gradient__stops_at_the_layer(kind):
    """Two calls share parameters. The gradient of the second runs operators, and counts none of the
    first, whose hooks run once."""
    torch.manual_seed(0)
    net = kind(6, 6)
    x, found = torch.randn(10, 3, 6), []
    for module in (net, sct.scale_model(copy.deepcopy(net), EXACT)):
        module.bias_hh_l0.register_hook(lambda g: 10 * g)
        with torch.backends.mkldnn.flags(enabled=False):
            _, state = module(x[:5])
            y, _ = module(x[5:], state)
            y.sum().backward(create_graph=True)
        found.append([dequantized(p.grad).detach() for p in module.parameters()])
    for want, got in zip(*found, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test__outputs__are_the_callers_to_write_into(kind):
    torch.manual_seed(0)
    model, x, found = sct.scale_model(kind(8, 8)), torch.randn(5, 3, 8), []
    for in_place in (False, True):
        model.zero_grad()
        y, _ = model(x)
        y = torch.relu_(y) if in_place else torch.relu(y)
        y.square().sum().backward()
        found.append([bits(p.grad) for p in model.parameters()])
    assert found[0] == found[1]


def test__no_time_step__is_an_error():
    model = sct.scale_model(nn.LSTM(4, 4))
    with pytest.raises(sct.errors.ShapeError, match="at least one time step; got \\[0, 2, 4\\]"):
        model(torch.randn(0, 2, 4))
