"""Training for few bits: plain weights train, and results are the converted model's."""

import copy
import io
import pickle
from typing import Any

import pytest
import torch
from assertions import assert_each
from small_models import GPT
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import scaledtensor as sct
from scaledtensor.errors import ModelError, QuantizationError, UnsupportedError
from scaledtensor.models import interpose
from scaledtensor.quantization import QuantizedTensor, quantize_

CONFIGS = {
    "FP8 weights": sct.WeightOnly("e4m3fn"),
    "INT4 groups": sct.WeightOnly("int4", 16),
    "NVFP4": sct.Dynamic("nvfp4"),
    "MXFP4, rotated": sct.Dynamic("mxfp4", rotate=True),
    "INT8, tokens": sct.Dynamic("int8"),
}


class Conv1D(nn.Module):
    """transformers' layer of GPT-2, whose weight is (in, out)."""

    def __init__(self, nf: int, nx: int) -> None:
        super().__init__()
        self.nf = nf
        self.weight = nn.Parameter(torch.randn(nx, nf) * 0.1)
        self.bias = nn.Parameter(torch.zeros(nf))

    def forward(self, x: Tensor) -> Tensor:
        y = torch.addmm(self.bias, x.view(-1, x.shape[-1]), self.weight)
        return y.view(*x.shape[:-1], self.nf)


class Experts(nn.Module):
    """Experts in one parameter: all by einsum, and one by its index."""

    def __init__(self) -> None:
        super().__init__()
        self.up_proj = nn.Parameter(torch.randn(3, 48, 32) * 0.1)
        self.down_proj = nn.Parameter(torch.randn(3, 32, 48) * 0.1)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.einsum("btd,efd->betf", x, self.up_proj).relu()
        return sum(F.linear(h[:, i], self.down_proj[i]) for i in range(3))


class Tied(nn.Module):
    """A table that embeds tokens and gives the logits."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(40, 32, 0), nn.Linear(32, 40, False)
        self.head.weight = self.embed.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.embed((x.abs() * 13).long()[..., 0] % 40))


class Attention(nn.MultiheadAttention):
    def __init__(self) -> None:
        super().__init__(32, 4, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x, x, x, need_weights=False)[0]


class Spelled(nn.Module):
    """A weight in other spellings of a product."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(32, 32) * 0.1)

    def forward(self, x: Tensor) -> Tensor:
        w = self.weight
        return x @ w.t() + torch.matmul(x, w.mT) + F.linear(input=x, weight=w) + x @ w


MODELS: dict[str, Any] = {
    "linear layers": lambda: nn.Sequential(nn.Linear(32, 48), nn.GELU(), nn.Linear(48, 16)),
    "Conv1D": lambda: Conv1D(48, 32),
    "convolutions": lambda: nn.Sequential(nn.Conv1d(6, 16, 3, padding=1), nn.Conv1d(16, 4, 3)),
    "experts": Experts,
    "tied": Tied,
    "attention": Attention,
    "spelled": Spelled,
    "an encoder layer": lambda: nn.TransformerEncoderLayer(32, 4, 64, 0.0, batch_first=True),
}


def with_roles(config: Any, *roles: str) -> Any:
    values = {f: getattr(config, f) for f in ("format", "granularity", "scale", "rotate")}
    return type(config)(**values, roles=(*config.roles, *roles))


def outputs(y: Any) -> Tensor:
    return y[0] if isinstance(y, tuple) else y


def data() -> Tensor:
    return torch.randn(4, 6, 32, generator=torch.Generator().manual_seed(3))


# --- the results are the converted model's ---------------------------------------------------


def test__a_model_that_trains__computes_what_the_converted_model_does() -> None:
    def check(case: tuple[str, str]) -> None:
        torch.manual_seed(0)
        model, config = MODELS[case[0]](), CONFIGS[case[1]]
        if config.rotate and case[0] in ("convolutions", "tied"):
            model, config = MODELS["spelled"](), CONFIGS[case[1]]
        if case[0] == "tied":
            config = with_roles(config, "embedding")
        params = dict(model.named_parameters())
        quantize_(model, config, train=True)
        assert all(p is params[name] for name, p in model.named_parameters())
        x = data()
        y = model(x)
        y.square().sum().backward()
        assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())
        with torch.no_grad():
            assert torch.equal(model(x), y)
        with torch.autocast("cpu", torch.bfloat16):
            lower = model(x)
        converted = quantize_(model, config)
        assert any(isinstance(p, QuantizedTensor) for p in model.parameters())
        with torch.no_grad():
            assert torch.equal(converted(x), y)
            with torch.autocast("cpu", torch.bfloat16):
                assert torch.equal(converted(x), lower)

    assert_each([(m, c) for m in MODELS for c in CONFIGS], check)


def test__static_scales__are_chosen_once_and_kept() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 48), nn.GELU(), Conv1D(16, 48))
    config = {"0": sct.Static("e4m3fn"), "2": sct.Static("int8", rotate=True)}
    quantize_(model, config, calibration=[data()], train=True)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(2):
        optimizer.zero_grad()
        model(data() * 2).square().mean().backward()
        optimizer.step()
    y = copy.deepcopy(model)(data())
    scales = {m.weight.input_scale for m in (quantize_(model, config)[0], model[2])}
    assert len(scales) == 2
    assert all(float(s) > 0 for s in scales)
    assert torch.equal(model(data()), y)


def test__gradients__pass_through_the_casts() -> None:
    """They are the gradients of the product of the cast operands."""

    def check(name: str) -> None:
        config = CONFIGS[name]
        torch.manual_seed(0)
        for layer in (nn.Linear(32, 16), Conv1D(16, 32)):
            x, g = data().requires_grad_(), torch.randn(4, 6, 16)
            y = quantize_(layer, config, train=True)(x)
            of_x, of_w, of_b = torch.autograd.grad(y, (x, layer.weight, layer.bias), g)
            weight = layer.weight.detach().clone()
            quantize_(layer, config)
            held: Any = layer.weight
            value = held.dequantize() if held.order == "rows" else held.dequantize().mT
            assert not torch.equal(value, weight if held.order == "rows" else weight.mT)
            torch.testing.assert_close(of_x, g @ value, rtol=1e-5, atol=1e-5)
            torch.testing.assert_close(of_b, g.sum((0, 1)))
            # A product with the identity shows the values of the cast input.
            cast = x.detach().flatten(0, 1)
            if config.input is not None and not config.rotate:
                eye = torch.eye(32)
                unit = sct.quantization.inputs.cast_values(cast, config, None, -1)
                assert not torch.equal(unit, cast)
                cast = unit @ eye
            expected = g.flatten(0, 1).mT @ cast
            expected = expected if held.order == "rows" else expected.mT
            # A rotated input is cast between two orthogonal matrices.
            close = 0.2 if config.rotate else 1e-5
            assert (of_w - expected).norm() <= close * expected.norm()

    assert_each(CONFIGS, check)


def test__a_converted_model__has_second_derivatives_of_inputs() -> None:
    """A penalty of the gradient goes through two products with each weight."""
    torch.manual_seed(0)
    model = quantize_(
        nn.Sequential(nn.Linear(32, 48), nn.Tanh(), nn.Linear(48, 2)), CONFIGS["FP8 weights"]
    )
    plain = sct.unscale_model(copy.deepcopy(model))

    def penalty(model: nn.Module) -> Tensor:
        x = data().requires_grad_()
        (first,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
        (second,) = torch.autograd.grad(first.square().sum(), x)
        return second

    torch.testing.assert_close(penalty(model), penalty(plain), rtol=1e-4, atol=1e-6)
    trains = quantize_(nn.Sequential(nn.Linear(32, 2)), CONFIGS["FP8 weights"], train=True)
    x = data().requires_grad_()
    (first,) = torch.autograd.grad(trains(x).square().sum(), x, create_graph=True)
    first.sum().backward()  # of the weight through `linear_gradient`: the first derivative has it
    assert trains[0].weight.grad is not None


# --- the loop of a training ------------------------------------------------------------------


def gpt() -> tuple[GPT, Tensor]:
    torch.manual_seed(0)
    model = GPT(vocabulary=32, context=16, layers=2, heads=2, width=32)
    return model, torch.randint(32, (4, 17), generator=torch.Generator().manual_seed(1))


def step(run: Any, tokens: Tensor) -> Tensor:
    loss = run(tokens[:, :-1], tokens[:, 1:])[1]
    loss.backward()
    return loss.detach()


def test__a_training__goes_on_as_before() -> None:
    """The optimizer is older than the config, gradients accumulate, and checkpoints agree."""
    model, tokens = gpt()
    optimizer = torch.optim.AdamW(model.parameters(), 3e-3)
    step(model, tokens)
    optimizer.step()
    quantize_(model, sct.Dynamic("mxfp4"), train=True)  # scales of parts are the batch's
    losses = []
    for _ in range(6):
        optimizer.zero_grad()
        losses.append(sum(step(model, part) for part in tokens.chunk(2)))
        optimizer.step()
    assert losses[-1] < losses[0]
    optimizer.zero_grad()
    step(model, tokens)
    whole = {n: p.grad.clone() for n, p in model.named_parameters()}
    optimizer.zero_grad()
    for part in tokens.chunk(2):
        (model(part[:, :-1], part[:, 1:])[1] / 2).backward()
    for n, p in model.named_parameters():
        torch.testing.assert_close(p.grad, whole[n], rtol=1e-4, atol=1e-5)
    optimizer.zero_grad()
    checkpoint(model, tokens[:, :-1], tokens[:, 1:], use_reentrant=False)[1].backward()
    for n, p in model.named_parameters():
        torch.testing.assert_close(p.grad, whole[n])


def test__a_compiled_training__equals_an_eager_one() -> None:
    torch.manual_seed(0)
    torch.compiler.reset()
    model = nn.Sequential(nn.Linear(32, 32), nn.GELU(), nn.Linear(32, 8))
    config = {"0": sct.Dynamic("e4m3fn"), "2": sct.WeightOnly("int4", 16)}
    eager, traced = (quantize_(copy.deepcopy(model), config, train=True) for _ in range(2))
    run = torch.compile(traced, fullgraph=True, backend="aot_eager")
    x = data()
    torch._dynamo.utils.counters.clear()
    for m, call in ((eager, eager), (traced, run)):
        optimizer = torch.optim.SGD(m.parameters(), 0.1)
        for _ in range(3):
            optimizer.zero_grad()
            call(x).square().sum().backward()
            optimizer.step()
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
    for p, q, before in zip(
        eager.parameters(), traced.parameters(), model.parameters(), strict=True
    ):
        assert not torch.equal(p, before)
        torch.testing.assert_close(p, q)
    with torch.no_grad():
        assert torch.equal(run(x), quantize_(traced, config)(x))


def test__the_model__prints_copies_pickles_and_is_restored() -> None:
    model, tokens = gpt()
    plain = model(tokens[:, :-1])[0]
    keys, before = list(model.state_dict()), str(model)
    config = {"*.attention.*": sct.WeightOnly("int4", 16), "*": sct.Dynamic("nvfp4")}
    quantize_(model, config, train=True)
    text = str(model)
    assert "trains for WeightOnly(int4 amax 1x16)" in text
    assert "trains for Dynamic(e2m1fn two_level 1x16, input e2m1fn two_level 1x16)" in text
    y = model(tokens[:, :-1])[0]
    assert not torch.equal(y, plain)
    assert list(model.state_dict()) == keys
    assert all(type(x) is Tensor for x in model.state_dict().values())

    copied, pickled = copy.deepcopy(model), pickle.loads(pickle.dumps(model))
    saved = io.BytesIO()
    torch.save(model.state_dict(), saved)
    saved.seek(0)
    loaded = quantize_(gpt()[0], config, train=True)
    loaded.load_state_dict(torch.load(saved, weights_only=True))
    for other in (copied, pickled, loaded):
        assert str(other) == text
        assert torch.equal(other(tokens[:, :-1])[0], y)
    with torch.no_grad():
        copied.blocks[0].mlp[0].weight.mul_(-1)
    assert not torch.equal(copied(tokens[:, :-1])[0], y)
    assert torch.equal(model(tokens[:, :-1])[0], y)

    for restore in (sct.unscale_model, interpose.remove):
        other = restore(copy.deepcopy(model))
        assert str(other) == before
        assert torch.equal(other(tokens[:, :-1])[0], plain)
        quantize_(other, config, train=True)
        assert torch.equal(other(tokens[:, :-1])[0], y)
    assert torch.equal(quantize_(model, config)(tokens[:, :-1])[0], y)
    assert "forward" not in model.__dict__
    assert "trains for" not in str(model)


def test__training_for_4_bits__loses_less_than_rounding_afterwards() -> None:
    """Three regressions that 4 bits can hardly hold, each from the weights of a float32 training.
    The order of a product's additions decides the loss of a single one to a third."""

    def trained(model: nn.Module, x: Tensor, y: Tensor, steps: int, lr: float) -> nn.Module:
        optimizer = torch.optim.AdamW(model.parameters(), lr, weight_decay=0.0)
        for i in range(steps):
            optimizer.param_groups[0]["lr"] = lr * (1 - i / steps)
            optimizer.zero_grad()
            F.mse_loss(model(x), y).backward()
            optimizer.step()
        return model

    tasks = []
    for seed in range(3):
        torch.manual_seed(seed)
        x = torch.randn(128, 32)
        y = torch.sin(2 * x @ torch.randn(32, 8) / 32**0.5)
        plain = nn.Sequential(nn.Linear(32, 32), nn.GELU(), nn.Linear(32, 8))
        tasks.append((trained(plain, x, y, 400, 1e-2), x, y))

    def check(config: Any) -> None:
        within = after = 0.0
        for base, x, y in tasks:
            model = quantize_(copy.deepcopy(base), config, train=True)
            of_few_bits = quantize_(trained(model, x, y, 60, 1e-3), config)
            with torch.no_grad():
                after += float(F.mse_loss(quantize_(copy.deepcopy(base), config)(x), y))
                within += float(F.mse_loss(of_few_bits(x), y))
        assert within < 0.8 * after, f"trained {within:.4f}, rounded afterwards {after:.4f}"

    assert_each((sct.WeightOnly("int4", 32), sct.WeightOnly("nvfp4")), check)


def test__ranks__train_alike(tmp_path: Any) -> None:
    torch.distributed.init_process_group("gloo", f"file://{tmp_path}/f", rank=0, world_size=1)
    try:
        model, tokens = gpt()
        alone = quantize_(copy.deepcopy(model), sct.Dynamic("mxfp8"), train=True)
        step(alone, tokens)
        ranks = DistributedDataParallel(
            quantize_(copy.deepcopy(model), sct.Dynamic("mxfp8"), train=True)
        )
        step(ranks, tokens)
        for p, q in zip(alone.parameters(), ranks.parameters(), strict=True):
            torch.testing.assert_close(p.grad, q.grad)

        from torch.distributed.fsdp import fully_shard

        mesh = torch.distributed.init_device_mesh("cpu", (1,))
        parts = quantize_(copy.deepcopy(model), sct.Dynamic("mxfp8"), train=True)
        for block in parts.blocks:
            fully_shard(block, mesh=mesh)
        with pytest.raises(UnsupportedError, match="spread over ranks"):
            step(fully_shard(parts, mesh=mesh), tokens)
        whole = quantize_(copy.deepcopy(model), sct.Dynamic("mxfp8"), train=True)
        step(fully_shard(whole, mesh=mesh), tokens)
        for p, q in zip(alone.parameters(), whole.parameters(), strict=True):
            torch.testing.assert_close(p.grad, q.grad.full_tensor())
    finally:
        torch.distributed.destroy_process_group()


# --- refusals --------------------------------------------------------------------------------


class Recomputed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(32, 32), nn.Linear(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(checkpoint(self.a, x, use_reentrant=False))


def test__what_cannot_train__is_refused_by_name() -> None:
    fp8, nvfp4 = sct.WeightOnly("e4m3fn"), sct.WeightOnly("nvfp4")

    def model() -> nn.Module:
        return nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 8))

    def trains() -> nn.Module:
        return quantize_(model(), fp8, train=True)

    cases: dict[str, tuple[Any, type[Exception], str]] = {
        "Static without data": (
            lambda: quantize_(model(), sct.Static(), train=True),
            QuantizationError,
            "needs data",
        ),
        "data once more": (
            lambda: quantize_(trains(), fp8, calibration=[data()]),
            QuantizationError,
            "with which they train",
        ),
        "error feedback": (
            lambda: quantize_(
                model(), sct.WeightOnly("int4", rounding="error_feedback"), train=True
            ),
            QuantizationError,
            "rounding='nearest'",
        ),
        "a shape": (
            lambda: quantize_(nn.Linear(24, 8), sct.WeightOnly("int4", rotate=True), train=True),
            QuantizationError,
            "rotate mixes 16",
        ),
        "twice": (lambda: quantize_(trains(), nvfp4, train=True), QuantizationError, "already"),
        "another config": (
            lambda: quantize_(trains(), nvfp4),
            QuantizationError,
            "0.weight trains for WeightOnly.*e4m3fn",
        ),
        "one of two": (
            lambda: quantize_(trains(), fp8, lambda m, fqn: fqn == "0"),
            QuantizationError,
            "1.weight trains",
        ),
        "quantised": (
            lambda: quantize_(quantize_(model(), fp8), fp8, train=True),
            ModelError,
            "quantised already",
        ),
        "scaled": (lambda: sct.scale_model(trains()), ModelError, "trains for few bits"),
        "simulated": (lambda: sct.simulate_fp8(trains()), ModelError, "Training already"),
        "a part recomputed": (
            lambda: quantize_(Recomputed(), fp8, train=True)(data().requires_grad_()),
            UnsupportedError,
            "checkpointed",
        ),
        "sparse": (
            lambda: quantize_(
                nn.Sequential(nn.Embedding(9, 32, sparse=True), nn.Linear(32, 2)),
                with_roles(fp8, "embedding"),
                train=True,
            )(torch.tensor([1, 2])),
            UnsupportedError,
            "sparse=True",
        ),
    }

    def check(name: str) -> None:
        call, kind, text = cases[name]
        with pytest.raises(kind, match=text):
            call()

    assert_each(cases, check)
    untouched = trains()
    with pytest.raises(QuantizationError):
        quantize_(untouched, nvfp4)
    assert "trains for" in str(untouched)
    assert all(type(p) is nn.Parameter for p in untouched.parameters())
