"""`track_scales` and `tracking` record every tensor in both passes and change nothing."""

import copy
import csv
import io
import itertools
import json
import pickle
import weakref
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.fx import Node
from tracked_models import BUILDERS, DOORS, Awkward, Stack, same, step

import scaledtensor as sct
from scaledtensor.errors import ModelError
from scaledtensor.inspect import Data, Scales, measure, track_scales, tracking

every_model = pytest.mark.parametrize("name", BUILDERS)
every_door = pytest.mark.parametrize("door", DOORS)


def nodes(scales: Scales) -> dict[str, Node]:
    return {n.meta["clean_name"]: n for n in scales.scales_graph().nodes}


def built(name: str) -> tuple[nn.Module, tuple[Tensor, ...]]:
    torch.manual_seed(0)
    return BUILDERS[name]()


# --- nothing changes -------------------------------------------------------------------------


@every_door
@every_model
def test__results_gradients_and_buffers__are_the_same_bits(name, door):
    model, args = built(name)
    plain, _ = step(model, args)
    tracked, scales = step(model, args, door)
    assert all(map(same, plain, tracked))
    scales.scales_graph().lint()


@every_door
@pytest.mark.parametrize("name", ["mlp", "encoder", "resnet"])
def test__a_scaled_model__computes_the_same_bits(name, door):
    model, args = built(name)
    sct.scale_model(model)
    plain, _ = step(model, args)
    tracked, _ = step(model, args, door)
    assert all(map(same, plain, tracked))


def test__afterwards__nothing_is_left_on_the_model():
    model, args = built("awkward")
    before = {n: dict(vars(m)) for n, m in model.named_modules()}
    with tracking(model) as scales:
        loss = model(*args)
    loss.backward()
    for name, module in model.named_modules():
        assert vars(module).keys() == before[name].keys()
        assert not module._forward_hooks
        assert not module._forward_pre_hooks
    assert not any(p._backward_hooks for p in model.parameters())
    assert nodes(scales)["a_weight"].meta["metrics"].bwd is None  # The backward pass came too late.


def test__close__gives_the_model_back():
    model, args = built("mlp")
    tracked = track_scales(model)
    tracked(*args).backward()
    assert tracked.close() is model
    assert not any(p._backward_hooks for p in model.parameters())
    assert tracked.scales_graph() is not None


@every_door
def test__an_error_in_the_model__passes_through_and_leaves_it_usable(door):
    model, (x, y) = built("mlp")
    scales = Scales()
    if door == "with":
        with tracking(model) as scales:
            with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
                model(x[:, :3], y)
            model(x, y)
    else:
        tracked = track_scales(model)
        with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
            tracked(x[:, :3], y)
        tracked(x, y)
        scales = tracked.scales
    assert nodes(scales)["cross_entropy"].meta["shape"] == ()
    assert not any(m._forward_hooks for m in model.modules())


def test__no_tensor__is_kept_alive():
    model, args = built("mlp")
    alive: list[weakref.ref[Tensor]] = []
    model.blocks[0].fc1.register_forward_hook(lambda m, a, r: alive.append(weakref.ref(r)))
    with tracking(model), torch.no_grad():
        model(*args)
        assert alive[0]() is None
    with tracking(model):
        model(*args).backward()
        assert alive[1]() is None


# --- numbers ---------------------------------------------------------------------------------


class Known(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((4, 2), 0.5))

    def forward(self, x: Tensor) -> Tensor:
        return (x @ self.weight).relu()


def test__ones__give_known_numbers_forward_and_backward():
    x = torch.ones(3, 4, requires_grad=True)
    with tracking(model := Known()) as scales:
        model(x).backward(torch.full((3, 2), 2.0))
    found = nodes(scales)
    expected = {"x": (1, 2), "weight": (0.5, 6), "matmul": (2, 2), "relu": (2, 2)}
    for name, (forward, backward) in expected.items():
        metrics = found[name].meta["metrics"]
        assert metrics.fwd.rms == metrics.fwd.abs_max == metrics.fwd.mean_abs == forward, name
        assert metrics.bwd.rms == metrics.bwd.abs_max == metrics.bwd.mean_abs == backward, name
    assert found["weight"].meta["requires_grad"]
    assert not found["matmul"].meta["requires_grad"]


@pytest.mark.parametrize("name", ["mlp", "encoder", "resnet"])
def test__gradients__are_measured_as_autograd_has_them(name):
    model, args = built(name)
    with tracking(model) as scales:
        result = model(*args)
        result.square().mean().backward()
    attributes = [n for n in scales.scales_graph().nodes if n.op == "get_attr"]
    found = {n.target: n.meta["metrics"] for n in attributes if "metrics" in n.meta}
    for path, parameter in model.named_parameters():
        assert parameter.grad is not None
        assert found[path].bwd == measure(parameter.grad, scales.backward), path
        assert found[path].fwd == measure(parameter, scales.forward), path


def test__intermediate_gradients__are_those_of_retain_grad():
    model = Stack()
    kept: list[Tensor] = []

    def keep(module: nn.Module, args: Any, result: Tensor) -> None:
        result.retain_grad()
        kept.append(result)

    model.blocks[0].fc1.register_forward_hook(keep)
    with tracking(model) as scales:
        model(torch.randn(8, 16)).backward()
    metrics = nodes(scales)["linear"].meta["metrics"]
    assert metrics.bwd == measure(kept[0].grad, scales.backward)


def test__a_scaled_model__shows_elements_and_scales():
    torch.manual_seed(0)
    model = sct.scale_model(Stack())
    with tracking(model) as scales:
        model(torch.randn(64, 16)).backward()
    linear = nodes(scales)["linear"].meta["metrics"]
    for data in (linear.fwd, linear.bwd):
        assert isinstance(data, Data)
        assert 0.5 <= data.qdata.rms <= 2
        assert data.rms == pytest.approx(data.qdata.rms * data.scale)
    assert "RMS(q)" in str(scales)


def test__formats__set_the_shares():
    x = torch.full((2, 4), 300.0)
    for fmt, expected in (("e4m3fn", 0.0), ("e4m3fnuz", 1.0)):
        tracked = track_scales(Known(), fmt, "e5m2")
        tracked(x)
        assert nodes(tracked.scales)["x"].meta["metrics"].fwd.saturated == expected


# --- the graph -------------------------------------------------------------------------------


def test__nodes__know_module_source_and_shape():
    model, args = built("mlp")
    with tracking(model) as scales:
        model(*args).backward()
    linear = nodes(scales)["linear"]
    assert linear.target is F.linear
    assert linear.meta["module"] == "blocks.0.fc1"
    assert linear.meta["shape"] == (8, 64)
    file, _, line = linear.meta["source"].rpartition(":")
    with open(file) as source:
        assert source.readlines()[int(line) - 1].strip() == "h = self.fc1(x)"
    names = [n.meta["clean_name"] for n in linear.all_input_nodes]
    assert names == ["x", "blocks_0_fc1_weight", "blocks_0_fc1_bias"]


def test__in_place_and_several_outputs__keep_the_flow_of_data():
    class Model(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            y = x + 1
            y[0] = 0
            a, b = y.mul_(2).chunk(2)
            return a + b

    x = torch.randn(4, 3, requires_grad=True)
    with tracking(model := Model()) as scales:
        model(x).sum().backward()
    found = nodes(scales)
    chain = ["add_1", "chunk_0", "chunk", "mul", "setitem", "add", "x"]
    for after, before in itertools.pairwise(chain):
        assert found[before] in found[after].all_input_nodes
    assert found["mul"].meta["metrics"].bwd.mean_abs == 1
    assert found["add"].meta["metrics"].bwd.numel == 12


def test__a_view_that_is_written_to__is_followed():
    """A hook on such a view ends the process, unless somebody asked for its history before."""

    class Model(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            whole = x * 1
            flat, turned = whole.view(12), whole.view(3, 4)
            flat[:3] = 0
            turned[0, 0] = 1
            flat[5:].mul_(2)
            return flat.sum() + turned.sum() + whole.sum()

    x = torch.randn(4, 3, requires_grad=True)
    model = Model()
    plain, _ = step(model, (x,))
    for door in DOORS:
        tracked, scales = step(model, (x,), door)
        assert all(map(same, plain, tracked))
        gradient = nodes(scales)["x"].meta["metrics"].bwd
        assert gradient == measure(tracked[-1], scales.backward)


def test__a_part_used_twice_and_tied_weights__are_one_parameter():
    model = Awkward()
    with tracking(model) as scales:
        model(torch.randn(4, 5, 8, requires_grad=True)).backward()
    attributes = [n.target for n in scales.scales_graph().nodes if n.op == "get_attr"]
    assert len(attributes) == len(set(attributes))
    assert "a.weight" in attributes
    assert "b.weight" not in attributes


def test__a_function_of_ones_own__has_a_gradient():
    """The returned tensor was computed where nothing requires a gradient."""
    with tracking(model := Awkward()) as scales:
        model(torch.randn(4, 5, 8, requires_grad=True)).backward()
    linears = [n for n in scales.scales_graph().nodes if n.target is F.linear]
    (doubled,) = (u for u in linears[-1].users if u.target == "mul")
    assert doubled.meta["metrics"].bwd.numel == 160


def test__the_last_of_several_calls__is_kept():
    model, (x, y) = built("mlp")
    with tracking(model) as scales:
        for n in (8, 4):
            model(x[:n], y[:n]).backward()
    assert nodes(scales)["x"].meta["shape"] == (4, 16)
    placeholders = [n for n in scales.scales_graph().nodes if n.op == "placeholder"]
    assert len(placeholders) == 2


def test__the_loss__is_recorded_and_the_optimizer_is_not():
    model = nn.Linear(4, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    with tracking(model) as scales:
        F.cross_entropy(model(torch.randn(3, 4)), torch.tensor([0, 1, 0])).backward()
        optimizer.step()
    assert list(nodes(scales))[-2:] == ["cross_entropy", "output"]


def test__without_gradients__there_are_values_alone():
    model, args = built("mlp")
    for context in (torch.no_grad(), torch.inference_mode()):
        with context, tracking(model) as scales:
            model(*args)
        assert all(
            n.meta["metrics"].bwd is None
            for n in scales.scales_graph().nodes
            if "metrics" in n.meta
        )
        assert " | " not in str(scales)


def test__gradients_of_inputs__are_found_on_demand():
    model, (x, _) = built("mlp")
    tracked = track_scales(model, input_gradients=True)
    tracked(x).backward()
    assert nodes(tracked.scales)["x"].meta["metrics"].bwd is not None
    assert not x.requires_grad
    assert x.grad is None


def test__inside_a_transform_of_torch_func__nothing_is_read():
    tracked = track_scales(nn.Linear(3, 2))
    parameters = dict(tracked.named_parameters())

    def loss(p: dict[str, Tensor], x: Tensor) -> Tensor:
        return torch.func.functional_call(tracked, p, (x,)).sum()

    per_sample = torch.func.vmap(torch.func.grad(loss), (None, 0))(parameters, torch.ones(5, 3))
    assert per_sample["weight"].shape == (5, 2, 3)


# --- the module ------------------------------------------------------------------------------


def test__a_tracked_module__is_another_face_of_the_model():
    model = Stack()
    model.blocks[0].eval()
    tracked = track_scales(model)
    assert list(tracked.state_dict()) == list(model.state_dict())
    assert [n for n, _ in tracked.named_parameters()] == [n for n, _ in model.named_parameters()]
    assert not model.blocks[0].training
    assert tracked.head is model.head
    tracked.eval()
    assert not model.training
    tracked.load_state_dict(Stack().state_dict())
    tracked.double()
    assert model.head.weight.dtype == torch.float64
    with pytest.raises(AttributeError):
        _ = tracked.nothing


def test__copies_and_pickles__have_recordings_of_their_own():
    model, args = built("mlp")
    tracked = track_scales(model, "e5m2")
    tracked(*args).backward()
    for other in (copy.deepcopy(tracked), pickle.loads(pickle.dumps(tracked))):
        assert other.scales.forward.name == "e5m2"
        with pytest.raises(ModelError, match="nothing was recorded"):
            other.scales_graph()
        assert other.head is other.module.head
        assert same(other(*args), tracked(*args))


def test__bad_arguments__are_named():
    with pytest.raises(ModelError, match="a module can be tracked; got function"):
        track_scales(lambda x: x)  # type: ignore[arg-type]
    with pytest.raises(ModelError, match="tracked already"):
        track_scales(track_scales(Stack()))
    with pytest.raises(ModelError, match="'eager' or 'dynamo'"):
        track_scales(Stack(), capture="jit")  # type: ignore[arg-type]
    with pytest.raises(ModelError, match="nothing was recorded yet"):
        track_scales(Stack()).scales_graph()
    assert str(Scales()) == "nothing recorded"


# --- data ------------------------------------------------------------------------------------


def test__table_dictionary_and_csv__tell_the_same():
    model, args = built("mlp")
    with tracking(sct.scale_model(model)) as scales:
        model(*args).backward()
    told = json.loads(json.dumps(scales.to_dict()))
    assert (told["forward_format"], told["backward_format"]) == ("e4m3fn", "e5m2")
    (linear,) = (t for t in told["tensors"] if t["name"] == "linear")
    assert linear["inputs"] == ["x", "blocks_0_fc1_weight", "blocks_0_fc1_bias"]
    assert linear["operator"] == "torch.nn.functional.linear"
    rows = list(csv.DictReader(io.StringIO(scales.to_csv())))
    (row,) = (r for r in rows if r["name"] == "linear" and r["direction"] == "backward")
    assert float(row["qdata_rms"]) == linear["backward"]["qdata"]["rms"]
    assert row["shape"] == "8x64"
    assert "blocks.0.fc1: linear" in scales.table()
    assert f"{linear['forward']['rms']:.3g}" in scales.table()


def test__what_is_not_finite__is_told_below_the_table():
    x = torch.ones(2, 4)
    x[0, 0] = float("nan")
    tracked = track_scales(Known())
    tracked(x)
    assert "x: 1 NaN, 0 infinite" in str(tracked.scales)
