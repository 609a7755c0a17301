"""`unit_scale` plans for a model, which stays itself."""

import copy
import math
import pickle
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from small_models import GPT
from tensors import gaussian
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint

import scaledtensor as sct
import scaledtensor.functional as U
from scaledtensor import errors, mup
from scaledtensor.errors import CheckpointError, ModelWarning
from scaledtensor.models import interpose
from scaledtensor.unit_scaling.plan import Plan, Residual, Scaled

WIDTH = 32


class Block(nn.Module):
    def __init__(self, activation: Any = F.gelu, width: int = WIDTH) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.activation = activation

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.activation(self.up(self.norm(x))))


class Stack(nn.Module):
    def __init__(self, *blocks: nn.Module) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)
        self.head = nn.Linear(WIDTH, 8)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def built(model: nn.Module, x: Tensor) -> tuple[nn.Module, Plan]:
    sct.unit_scale(model, (x,))
    (transform,) = interpose.transforms(model)
    (plan,) = transform.plans.values()
    return model, plan


def rms(x: Tensor) -> float:
    return float(x.detach().double().square().mean().sqrt())


def gelu_of_gpt2(x: Tensor) -> Tensor:
    return 0.5 * x * (1.0 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * torch.pow(x, 3))))


def quick_gelu(x: Tensor) -> Tensor:
    return x * torch.sigmoid(1.702 * x)


def squared_relu(x: Tensor) -> Tensor:
    return torch.relu(x).square()


ACTIVATIONS = {
    "gelu": F.gelu,
    "silu": F.silu,
    "relu": F.relu,
    "tanh": torch.tanh,
    "sigmoid": torch.sigmoid,
    "elu": F.elu,
    "mish": F.mish,
    "softplus": F.softplus,
    "hardswish": F.hardswish,
    "gpt2's": gelu_of_gpt2,
    "quick": quick_gelu,
    "squared": squared_relu,
    "module": nn.GELU("tanh"),
}


@pytest.mark.parametrize("activation", ACTIVATIONS.values(), ids=list(ACTIVATIONS))
def test__an_activation_in_any_spelling__is_of_unit_scale(activation: Any) -> None:
    model, _ = built(nn.Sequential(nn.Linear(64, 512), _Called(activation)), gaussian(64, 64))
    # Named activations have unit standard deviation, as published, and others unit RMS.
    assert 0.8 < rms(model(gaussian(256, 64, seed=1))) < 1.25


class _Called(nn.Module):
    def __init__(self, function: Any) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


def test__a_model__is_the_one_written_by_hand() -> None:
    torch.manual_seed(0)
    model, _ = built(Stack(Block(), Block()), gaussian(4, WIDTH))
    rule = U.transformer_residual_scaling_rule()
    x = gaussian(16, WIDTH, seed=1).requires_grad_()
    y = x
    for i, block in enumerate(model.blocks):
        tau = rule(i, 2)
        # The first residual sum starts at the input, which no function of the model made.
        branch, skip = (y, y) if i == 0 else U.residual_split(y, tau)
        h = U.layer_norm(branch, (WIDTH,), block.norm.weight, block.norm.bias)
        h = U.gelu(U.linear(h, block.up.weight, block.up.bias))
        h = U.linear(h, block.down.weight, block.down.bias)
        whole = math.sqrt(1 + tau**2)
        y = h * (tau / whole) + skip / whole if i == 0 else U.residual_add(h, skip, tau)
    y = U.linear(y, model.head.weight, model.head.bias, constraint=None)
    grad = gaussian(16, 8, seed=2)
    expected = torch.autograd.grad(y, [x, *model.parameters()], grad)
    got_y = model(x)
    got = torch.autograd.grad(got_y, [x, *model.parameters()], grad)
    torch.testing.assert_close(got_y, y)
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test__residual_sums__are_those_of_a_branch_with_parameters() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            x = self.a(x)
            x = x + x.pow(3) * 0.1  # This is an activation.
            x = self.b(x) + x  # This is the only one.
            return self.a(x) + self.b(x)  # Neither starts at the other.

    _, plan = built(Model(), gaussian(8, WIDTH))
    assert plan.residuals == [f"add of (8, {WIDTH})"]
    (step,) = (s.work for s in plan.steps.values() if isinstance(s.work, Residual))
    assert step.skip == 1


def test__two_sums_from_one_tensor__both_keep_the_scale() -> None:
    """Neither branch is compensated at its start, as the other starts there too."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            x = self.a(x)
            return (x + self.b(x)) * (x + self.a(x))

    model, plan = built(Model(), gaussian(8, WIDTH))
    assert [s.work.waiting for s in plan.steps.values() if isinstance(s.work, Residual)] == [
        False,
        False,
    ]
    # This is a product of two tensors that share a term.
    assert 0.7 < rms(model(gaussian(512, WIDTH, seed=1))) < 3


def test__arguments_by_name__are_the_same_call() -> None:
    class Model(nn.Module):
        def __init__(self, by_name: bool) -> None:
            super().__init__()
            self.embedding, self.by_name = nn.Embedding(8, WIDTH), by_name

        def forward(self, tokens: Tensor) -> Tensor:
            w = self.embedding.weight
            if self.by_name:
                x = F.embedding(input=tokens, weight=w)
                return F.linear(input=torch.add(x, other=x.sin()), weight=w)
            x = F.embedding(tokens, w)
            return F.linear(torch.add(x, x.sin()), w)

    torch.manual_seed(0)
    model = Model(False)
    twin = copy.deepcopy(model)
    twin.by_name = True
    tokens = torch.randint(8, (2, 16))
    a, b = (built(m, tokens)[0](tokens) for m in (model, twin))
    torch.testing.assert_close(a, b)
    a.square().sum().backward()
    b.square().sum().backward()
    torch.testing.assert_close(model.embedding.weight.grad, twin.embedding.weight.grad)


def test__a_sum_with_a_factor__is_no_residual_one() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            x = self.a(x)
            return torch.add(x, self.b(x), alpha=0.5)

    model, plan = built(Model(), gaussian(64, WIDTH))
    assert not plan.residuals
    assert 0.8 < rms(model(gaussian(512, WIDTH, seed=1))) < 1.25


def test__an_in_place_sum__changes_what_it_is_called_on() -> None:
    class Model(nn.Module):
        def __init__(self, in_place: bool) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
            self.in_place = in_place

        def forward(self, x: Tensor) -> Tensor:
            x = self.a(x)
            y = self.b(x)
            if self.in_place:
                y.add_(x)
                return y
            return y + x

    torch.manual_seed(0)
    model = Model(False)
    twin = copy.deepcopy(model)
    twin.in_place = True
    x = gaussian(8, WIDTH)
    a, b = (built(m, x)[0](x) for m in (model, twin))
    torch.testing.assert_close(a, b)
    a.sum().backward()
    b.sum().backward()
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad)


def test__logits_of_attention__keep_the_models_temperature() -> None:
    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.qkv = nn.Linear(WIDTH, 3 * WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            q, k, v = self.qkv(x).chunk(3, dim=-1)
            scores = (q @ k.mT) / math.sqrt(WIDTH)
            mask = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
            return scores.masked_fill(mask, -math.inf).softmax(-1) @ v

    model, plan = built(Attention(), gaussian(4, 64, WIDTH))
    assert not any(isinstance(s.work, Scaled) and s.work.scale != 1.0 for s in plan.steps.values())
    assert {name for name, _ in plan.steps} == {"linear", "matmul", "softmax"}
    model(gaussian(4, 64, WIDTH)).sum().backward()
    assert model.qkv.weight.grad.isfinite().all()


def test__attention_and_recurrent_modules__are_entered() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = nn.MultiheadAttention(WIDTH, 4, batch_first=True)
            self.recurrent, self.head = nn.GRU(WIDTH, WIDTH, batch_first=True), nn.Linear(WIDTH, 8)

        def forward(self, x: Tensor) -> Tensor:
            x = x + self.attention(x, x, x, need_weights=False)[0]
            return self.head(self.recurrent(x)[0])

    model, plan = built(Model(), gaussian(4, 16, WIDTH))
    assert len(plan.residuals) == 1
    assert ("scaled_dot_product_attention", 0) in plan.steps
    y = model(gaussian(4, 16, WIDTH))
    y.sum().backward()
    assert 0.2 < rms(y) < 2  # A GRU's states are within one.
    assert all(p.grad.isfinite().all() for p in model.parameters())


def test__a_single_number__is_what_the_model_says() -> None:
    model = sct.unit_scale(_Called(lambda x: x.square().sum()))
    x = gaussian(8, 8)
    assert model(x) == x.square().sum()


def test__a_causal_mask__has_the_scale_of_is_causal() -> None:
    class Attention(nn.Module):
        def __init__(self, masked: bool) -> None:
            super().__init__()
            self.qkv, self.masked = nn.Linear(WIDTH, 3 * WIDTH), masked

        def forward(self, x: Tensor) -> Tensor:
            q, k, v = self.qkv(x).chunk(3, dim=-1)
            n = x.shape[-2]
            if self.masked:
                mask = torch.ones(n, n, dtype=torch.bool).tril()
                return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
            return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    torch.manual_seed(0)
    model = Attention(True)
    twin = copy.deepcopy(model)
    twin.masked = False
    x = gaussian(2, 16, WIDTH)
    torch.testing.assert_close(built(model, x)[0](x), built(twin, x)[0](x))


def test__a_rotary_embedding__keeps_its_scale() -> None:
    class Rotary(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.q = nn.Linear(WIDTH, WIDTH)
            angle = torch.arange(16)[:, None] * 10.0 ** -torch.linspace(0, 3, WIDTH // 2)
            self.register_buffer("cos", angle.cos().repeat(1, 2))
            self.register_buffer("sin", angle.sin().repeat(1, 2))

        def forward(self, x: Tensor) -> Tensor:
            q = self.q(x)
            a, b = q.chunk(2, dim=-1)
            return q * self.cos + torch.cat((-b, a), dim=-1) * self.sin

    model, plan = built(Rotary(), gaussian(8, 16, WIDTH))
    assert list(plan.steps) == [("linear", 0)]
    assert 0.9 < rms(model(gaussian(64, 16, WIDTH, seed=1))) < 1.1


def test__parameters__are_of_unit_variance_and_tagged() -> None:
    torch.manual_seed(0)
    model, _ = built(Stack(Block(), Block(), Block()), gaussian(4, WIDTH))
    for name, p in model.named_parameters():
        data = mup.tags(p)
        kind = "bias" if "bias" in name else "norm" if "norm" in name else "weight"
        assert data.mup_type == kind
        assert data.mup_scaling_depth == (3 if "blocks" in name else None)
        assert data.mup_lr_mult == (1.0 if kind == "weight" else 2**-5)
        assert rms(p) == pytest.approx({"bias": 0.0, "norm": 1.0, "weight": 1.0}[kind])


def test__a_matrix_kept_as_in_by_out__has_the_learning_rate_of_its_inputs() -> None:
    class Transposed(nn.Module):  # GPT-2 has such layers.
        def __init__(self) -> None:
            super().__init__()
            self.weight, self.bias = nn.Parameter(torch.randn(8, 32)), nn.Parameter(torch.ones(32))

        def forward(self, x: Tensor) -> Tensor:
            return torch.addmm(self.bias, x, self.weight)

    assert mup.fan_in(sct.unit_scale(Transposed()).weight) == 8
    assert mup.fan_in(sct.unit_scale(nn.Linear(8, 32)).weight) == 8


def test__the_given_parameters__stay_on_request() -> None:
    model = Block()
    before = copy.deepcopy(model.state_dict())
    sct.unit_scale(model, initialize=False)
    assert all(torch.equal(model.state_dict()[k], v) for k, v in before.items())
    assert not any(mup.has_parameter_data(p) for p in model.parameters())


def test__a_state_dict__belongs_to_the_function_that_it_was_saved_from(tmp_path: Path) -> None:
    model, x = sct.unit_scale(Stack(Block(), Block())), gaussian(4, WIDTH)
    want, plain = model(x), Stack(Block(), Block())
    torch.save(model.state_dict(), tmp_path / "state.pt")
    sct.checkpoint.save_safetensors(model, tmp_path / "model.safetensors")
    sct.checkpoint.save(tmp_path / "folder", model)
    saved = {
        "torch": torch.load(tmp_path / "state.pt"),
        "safetensors": sct.checkpoint.load_safetensors(tmp_path / "model.safetensors"),
    }
    for state in saved.values():
        with pytest.raises(RuntimeError, match=r'Unexpected key.*"unit_scaled"'):
            plain.load_state_dict(state)
        with pytest.raises(CheckpointError, match=r"no unit_scaled; call scaledtensor\.unit_scale"):
            sct.checkpoint.load_into(plain, state)
    with pytest.raises(CheckpointError, match=r"no unit_scaled; call scaledtensor\.unit_scale"):
        sct.checkpoint.load(tmp_path / "folder", plain)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for load in (
            lambda m: m.load_state_dict(saved["torch"]),
            lambda m: m.load_state_dict(saved["torch"], assign=True),
            lambda m: sct.checkpoint.load_into(m, saved["safetensors"]),
            lambda m: sct.checkpoint.load(tmp_path / "folder", m),
        ):
            again = sct.unit_scale(Stack(Block(), Block()))
            load(again)
            assert torch.equal(again(x), want)


def test__a_state_dict_of_another_function__is_loaded_with_a_warning() -> None:
    model, state = sct.unit_scale(Block()), Block().state_dict()
    for held in (model, copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        for load in (
            lambda m: m.load_state_dict(state),
            lambda m: sct.checkpoint.load_into(m, state),
        ):
            with pytest.warns(ModelWarning, match="no 'unit_scaled'"):
                load(held)
            assert all(torch.equal(held.state_dict()[name], x) for name, x in state.items())
    inner = nn.Sequential(model)
    with pytest.warns(ModelWarning, match=r"no '0\.unit_scaled'"):
        inner.load_state_dict({f"0.{name}": x for name, x in state.items()})
    interpose.remove(model)
    assert model.state_dict().keys() == state.keys()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model.load_state_dict(state)


def test__a_residual_rule__is_the_callers() -> None:
    model = Stack(Block(), Block())
    sct.unit_scale(model, (gaussian(2, WIDTH),), residual_rule=_half)
    (transform,) = interpose.transforms(model)
    (plan,) = transform.plans.values()
    assert [s.work.tau for s in plan.steps.values() if isinstance(s.work, Residual)] == [0.5, 0.5]


def _half(index: int, total: int) -> float:
    return 0.5


def test__recording__leaves_no_trace() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.linear = nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, WIDTH)
            self.dropout = nn.Dropout(0.5)

        def forward(self, x: Tensor, cache: list[Tensor]) -> Tensor:
            cache.append(x)
            return self.dropout(self.linear(self.norm(x)))

    model = Model()
    buffers = copy.deepcopy(dict(model.named_buffers()))
    x, cache = gaussian(8, WIDTH), []
    state = torch.get_rng_state()
    sct.unit_scale(model, (x, cache))
    assert torch.equal(torch.get_rng_state(), state)
    assert cache == []
    assert all(torch.equal(model.get_buffer(k), v) for k, v in buffers.items())
    assert all(p.grad is None for p in model.parameters())


def test__recording_within_a_mode__is_not_seen_by_it() -> None:
    class Counting(TorchFunctionMode):
        calls = 0

        def __torch_function__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            Counting.calls += func is torch.addmm
            return func(*args, **(kwargs or {}))

    model = sct.unit_scale(nn.Linear(WIDTH, WIDTH))
    with Counting():
        model(gaussian(2, WIDTH))
    assert Counting.calls == 1


def test__copies__are_models_of_their_own() -> None:
    model, _ = built(Stack(Block(), Block()), gaussian(4, WIDTH))
    x = gaussian(4, WIDTH, seed=1)
    y = model(x)
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(twin(x), y)
        with torch.no_grad():
            twin.head.weight.zero_()
        assert torch.equal(model(x), y)
        assert all(mup.has_parameter_data(p) for p in twin.parameters())


def test__compiled__a_gpt_is_the_same() -> None:
    torch.manual_seed(0)
    torch.compiler.reset()
    model = GPT(vocabulary=50, context=16, layers=2, heads=2, width=32)
    tokens, targets = torch.randint(50, (2, 3, 16))
    sct.unit_scale(model, (tokens, targets))
    loss = torch.compile(model, fullgraph=True, backend="aot_eager")(tokens, targets)[1]
    grads = torch.autograd.grad(loss, list(model.parameters()))
    expected_loss = model(tokens, targets)[1]
    expected = torch.autograd.grad(expected_loss, list(model.parameters()))
    torch.testing.assert_close(loss, expected_loss)
    for a, b in zip(grads, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("given", [True, False], ids=["inputs given", "recorded when compiled"])
def test__a_compiled_model__is_the_same(given: bool) -> None:
    torch.manual_seed(0)
    torch.compiler.reset()
    model = Stack(Block(gelu_of_gpt2), Block())
    x = gaussian(4, WIDTH)
    sct.unit_scale(model, (x,) if given else None)
    y = torch.compile(model, fullgraph=given, backend="aot_eager")(x)
    grads = torch.autograd.grad(y.square().sum(), list(model.parameters()))
    expected_y = model(x)
    expected = torch.autograd.grad(expected_y.square().sum(), list(model.parameters()))
    torch.testing.assert_close(y, expected_y)
    for a, b in zip(grads, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


def test__a_graph_break_inside__is_an_error_and_no_other_result() -> None:
    class Broken(Block):
        def forward(self, x: Tensor) -> Tensor:
            x = super().forward(x)
            torch._dynamo.graph_break()
            return super().forward(x)

    torch.compiler.reset()  # At its limit of recompilations Dynamo runs the code without compiling.
    model, _ = built(nn.Sequential(Broken()), gaussian(4, WIDTH))
    with pytest.raises(torch._dynamo.exc.Unsupported):
        torch.compile(model, backend="eager")(gaussian(4, WIDTH))


def test__an_exported_model__is_the_same() -> None:
    model, _ = built(Stack(Block()).eval(), gaussian(4, WIDTH))
    x = gaussian(4, WIDTH, seed=1)
    torch.testing.assert_close(torch.export.export(model, (x,)).module()(x), model(x))


def test__other_shapes_and_modes__are_planned_when_they_come() -> None:
    model, _ = built(Stack(Block()), gaussian(4, WIDTH))
    assert model(gaussian(7, 3, WIDTH)).shape == (7, 3, 8)
    model.eval()
    with torch.inference_mode():
        assert model(gaussian(2, WIDTH)).shape == (2, 8)
    (transform,) = interpose.transforms(model)
    assert len(transform.plans) == 2


def test__another_path__is_an_error() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            for _ in range(x.shape[0]):
                x = self.linear(x)
            return x

    model, _ = built(Twice(), gaussian(2, WIDTH))
    model(gaussian(2, WIDTH))
    with pytest.raises(errors.ModelError, match="it called linear where it did not"):
        model(gaussian(3, WIDTH))
    with pytest.raises(errors.ModelError, match="it did not call linear"):
        model(gaussian(1, WIDTH))


def test__another_skip_of_the_same_calls__is_an_error() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
            self.other = False

        def forward(self, x: Tensor) -> Tensor:
            y = self.a(x)
            z = self.b(y)
            return z + y if self.other else y + z

    model, _ = built(Model(), gaussian(2, WIDTH))
    model.other = True
    with pytest.raises(errors.ModelError, match="something else than what it started at"):
        model(gaussian(2, WIDTH))


def test__in_low_precision__products_are_rounded_in_either_order() -> None:
    torch.manual_seed(0)
    model, twin = Stack(Block()), None
    twin = copy.deepcopy(model)
    sct.simulate_fp8(sct.unit_scale(model))
    sct.unit_scale(sct.simulate_fp8(twin))
    x = gaussian(16, WIDTH)
    y = model(x)
    assert torch.equal(y, twin(x))
    exact = interpose.remove(model)
    off = rms(sct.unit_scale(exact, initialize=False)(x) - y) / rms(y)
    assert 0.01 < off < 0.1


def test__wrapped_parameters__keep_their_scales_near_one() -> None:
    torch.manual_seed(0)
    model = sct.scale_model(built(Stack(Block(), Block()), gaussian(4, WIDTH))[0])
    y = model(gaussian(256, WIDTH))
    (y * gaussian(256, 8, seed=2)).sum().backward()
    for name, p in model.named_parameters():
        # The head's bias has the plain gradient of a plain sum.
        grad = p.grad.qdata if isinstance(p.grad, sct.ScaledTensor) else p.grad
        assert 0.25 < rms(grad) < 4, name
        assert mup.has_parameter_data(p)


def test__removing__gives_the_function_back() -> None:
    model = Stack(Block())
    x = gaussian(4, WIDTH)
    y = model(x)
    sct.unit_scale(model, (x,), initialize=False)
    assert not torch.allclose(model(x), y)
    assert torch.equal(interpose.remove(model)(x), y)


def by_function(block: nn.Module) -> Any:
    return lambda x: x + F.linear(F.gelu(x), block.down.weight[:, :WIDTH])


@pytest.mark.parametrize("transform", [sct.unit_scale, sct.simulate_fp8])
@pytest.mark.parametrize("call", [lambda block: block, by_function], ids=["module", "function"])
@pytest.mark.parametrize("reentrant", [True, False])
def test__checkpointing_a_part__is_an_error_and_no_other_gradient(
    transform: Any, call: Any, reentrant: bool
) -> None:
    class Checkpointed(Stack):
        def forward(self, x: Tensor) -> Tensor:
            for block in self.blocks:
                x = checkpoint(call(block), x, use_reentrant=reentrant)
            return self.head(x)

    model = transform(Checkpointed(Block(), Block()))
    x = gaussian(4, WIDTH).requires_grad_()
    with pytest.raises(errors.UnsupportedError, match="checkpointed"):
        model(x)
    with torch.no_grad():
        model(x)  # Nothing runs again.
    interpose.remove(model)(x).sum().backward()


@pytest.mark.parametrize("reentrant", [True, False])
def test__checkpointing_the_whole__gives_the_same_gradients(reentrant: bool) -> None:
    model = sct.simulate_fp8(built(Stack(Block(), Block()), gaussian(4, WIDTH))[0])
    x = gaussian(4, WIDTH).requires_grad_()
    expected = torch.autograd.grad(model(x).square().sum(), list(model.parameters()))
    checkpoint(model, x, use_reentrant=reentrant).square().sum().backward()
    for parameter, grad in zip(model.parameters(), expected, strict=True):
        assert torch.equal(parameter.grad, grad)


def test__bad_input__is_named() -> None:
    with pytest.raises(errors.ModelError, match=r"nn\.Module"):
        sct.unit_scale(lambda x: x)
    model = sct.unit_scale(nn.Linear(2, 2))
    with pytest.raises(errors.ModelError, match="already"):
        sct.unit_scale(model)
    with pytest.raises(errors.ModelError, match="compiled"):
        sct.unit_scale(torch.compile(nn.Linear(2, 2)))


def test__a_tensor_in_place_of_inputs__is_refused_and_the_model_stays_as_it_was():
    model = nn.Linear(4, 4)
    weight = model.weight.detach().clone()
    with pytest.raises(errors.ModelError, match=r"unit_scale\(model, \(x,\)\); got a tensor"):
        sct.unit_scale(model, torch.ones(2, 4))
    assert torch.equal(model.weight, weight)
    assert not interpose.transforms(model)
