"""Quantised models are copied, converted, saved and loaded; adapters train on them; forged files
are refused."""

import copy
import io
import json
import os
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from assertions import assert_each
from small_models import GPT, LoRA
from torch import Tensor, nn

import scaledtensor as sct
from scaledtensor.checkpoint import load, load_into, load_safetensors, save, save_safetensors
from scaledtensor.errors import CheckpointError, ScaledTensorError, UnsupportedError
from scaledtensor.quantization import QuantizedTensor, quantize_
from scaledtensor.tensors.codec import facts_of, parts_of, rebuilt

PLAN = {
    "*.attention.*": sct.WeightOnly("int4", 16),
    "*.mlp.0": sct.Dynamic("nvfp4"),
    "*.mlp.2": sct.Dynamic("e4m3fn", rotate=True),
    "*": sct.WeightOnly("mxfp8", roles=("linear", "head", "embedding")),
}
TOKENS = torch.randint(64, (2, 8), generator=torch.Generator().manual_seed(0))


def plain(seed: int = 0) -> GPT:
    torch.manual_seed(seed)
    model = GPT(vocabulary=64, context=16, layers=1, heads=2, width=32)
    model.head.weight = model.token_embedding.weight
    return model


def made(seed: int = 0) -> GPT:
    return quantize_(plain(seed), PLAN)


@torch.no_grad()
def logits(model: nn.Module) -> Tensor:
    return model(TOKENS)[0]


def reread(x: Any) -> Any:
    file = io.BytesIO()
    torch.save(x, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def test__a_copy_and_a_file__hold_the_same_codes(tmp_path: Path) -> None:
    model = made()
    y = logits(model)

    def by_folder() -> GPT:
        save(tmp_path / "folder", model)
        other = made(1)
        load(tmp_path / "folder", other)
        return other

    def by_safetensors() -> GPT:
        save_safetensors(model, tmp_path / "model.safetensors")
        other = made(1)
        load_into(other, load_safetensors(tmp_path / "model.safetensors"))
        return other

    def by_state_dict(assign: bool) -> GPT:
        other = plain(1) if assign else made(1)
        other.load_state_dict(reread(model.state_dict()), assign=assign)
        return other

    ways: dict[str, Any] = {
        "deepcopy": lambda: copy.deepcopy(model),
        "pickle": lambda: pickle.loads(pickle.dumps(model)),
        "a state dict": lambda: by_state_dict(False),
        "a state dict, assigned": lambda: by_state_dict(True),
        "a folder": by_folder,
        "safetensors": by_safetensors,
        "through half and back": lambda: copy.deepcopy(model).half().float(),
    }

    def check(way: str) -> None:
        other = ways[way]()
        assert torch.equal(logits(other), y)
        for name, p in other.named_parameters():
            assert type(p) is type(model.get_parameter(name))

    assert_each(ways, check)


def test__other_dtypes__keep_the_codes() -> None:
    y = logits(made())

    def check(dtype: torch.dtype) -> None:
        model = made().to(dtype)
        z = logits(model)
        assert z.dtype == dtype
        torch.testing.assert_close(z.float(), y, rtol=0.05, atol=0.05)
        for p, q in zip(model.parameters(), made().parameters(), strict=True):
            assert p.dtype == dtype
            if isinstance(p, QuantizedTensor):
                assert torch.equal(p.qdata.view(torch.uint8), q.qdata.view(torch.uint8))
                assert p.scale.dtype == q.scale.dtype

    assert_each((torch.bfloat16, torch.float16, torch.float64), check)


def test__values__load_into_a_plain_model(tmp_path: Path) -> None:
    model = made()
    values = {name: x.dequantize() for name, x in model.state_dict().items()}
    save_safetensors(model, tmp_path / "plain.safetensors", dequantized=True)
    by_copy, by_file = plain(1), plain(1)
    by_copy.load_state_dict(model.state_dict())
    load_into(by_file, load_safetensors(tmp_path / "plain.safetensors"))
    for other in (by_copy, by_file, sct.unscale_model(copy.deepcopy(model))):
        for name, x in other.state_dict().items():
            assert type(x) is Tensor
            assert torch.equal(x, values[name])
        assert other.head.weight is other.token_embedding.weight


def test__a_fresh_process__loads_safely(tmp_path: Path) -> None:
    torch.save(made().state_dict(), tmp_path / "model.pt")
    code = (
        "import torch, scaledtensor, sys\n"
        "found = torch.load('model.pt', weights_only=True)\n"
        "held = [x for x in found.values() if isinstance(x, scaledtensor.QuantizedTensor)]\n"
        "print(len(held), float(sum(x.dequantize().double().sum() for x in held)))\n"
    )
    env = {**os.environ, "PYTHONPATH": str(Path(sct.__file__).parents[1])}
    run = [sys.executable, "-c", code]
    done = subprocess.run(run, cwd=tmp_path, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    held = [x for x in made().state_dict().values() if isinstance(x, QuantizedTensor)]
    assert done.stdout.split() == [
        str(len(held)),
        str(float(sum(x.dequantize().double().sum() for x in held))),
    ]


def test__adapters__train_on_a_quantised_base() -> None:
    """A hand-written LoRA, whose adapters are saved alone."""

    def model() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(LoRA(nn.Linear(32, 32)), nn.Tanh(), LoRA(nn.Linear(32, 8)))

    x, y = torch.randn(2, 64, 32, generator=torch.Generator().manual_seed(1))
    y = y[:, :8].tanh()

    def check(config: Any) -> None:
        tuned = quantize_(model(), {"*.base": config})
        trainable = [p for p in tuned.parameters() if p.requires_grad]
        assert len(trainable) == 4
        codes = [m.base.weight.qdata.clone() for m in (tuned[0], tuned[2])]
        optimizer = torch.optim.AdamW(trainable, 1e-2)
        losses = []
        for _ in range(20):
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(tuned(x), y)
            loss.backward()
            losses.append(float(loss.detach()))
            optimizer.step()
        assert losses[-1] < 0.9 * losses[0]
        for m, before in zip((tuned[0], tuned[2]), codes, strict=True):
            assert torch.equal(m.base.weight.qdata, before)
            assert m.base.weight.grad is None
        adapters = {n: p for n, p in tuned.state_dict().items() if "base" not in n}
        assert all(type(p) is Tensor for p in adapters.values())
        again = quantize_(model(), {"*.base": config})
        again.load_state_dict(reread(adapters), strict=False)
        assert torch.equal(again(x), tuned(x))
        # An adapter is merged into the plain value, and not into codes.
        layer = tuned[0]
        delta = layer.up.weight @ layer.down.weight
        with pytest.raises(UnsupportedError, match="unscale_model"), torch.no_grad():
            layer.base.weight.add_(delta)
        with pytest.raises(UnsupportedError, match="unscale_model"), torch.no_grad():
            layer.base.weight += delta
        if config.input is None:
            wanted = layer(x)
            sct.unscale_model(layer)
            with torch.no_grad():
                layer.base.weight += delta
            torch.testing.assert_close(layer.base(x), wanted, rtol=1e-4, atol=1e-5)

    assert_each((sct.WeightOnly("nvfp4"), sct.WeightOnly("int4", 16), sct.Dynamic("mxfp8")), check)


# --- forged files ----------------------------------------------------------------------------


def forged() -> dict[str, tuple[dict[str, Any], dict[str, Tensor], str]]:
    w = quantize_(nn.Linear(32, 16), sct.WeightOnly("nvfp4")).weight
    facts, parts = facts_of(w), parts_of(w)

    def changed(**new: Any) -> dict[str, Any]:
        return {**facts, **new}

    def config(**new: Any) -> dict[str, Any]:
        return changed(config=json.dumps({**json.loads(facts["config"]), **new}))

    columns = {**parts, "columns": torch.ones(32)}
    return {
        "an unknown config": (config(config="magic"), parts, "weight_only"),
        "a config that is none": (changed(config="magic"), parts, "weight is damaged"),
        "an unknown field": (config(x=1), parts, "'x'"),
        "another format": (config(format="e4m3fn"), parts, "codes in e2m1fn"),
        "an unknown scale": (config(scale="magic"), parts, "scale is one of"),
        "an unknown order": (changed(order="x"), parts, "'x'"),
        "no order": ({k: v for k, v in facts.items() if k != "order"}, parts, "no order"),
        "columns that are missing": (changed(extras=["columns"]), parts, "no columns"),
        "columns twice": (changed(extras=["columns", "columns"]), columns, "does not know"),
        "columns of zero": (
            changed(extras=["columns"]),
            {**parts, "columns": torch.zeros(32)},
            "not positive",
        ),
        "short columns": (
            changed(extras=["columns"]),
            {**parts, "columns": torch.ones(31)},
            r"shape \(32,\)",
        ),
        "another attribute": (
            changed(extras=["config"]),
            {**parts, "config": torch.ones(())},
            "does not know",
        ),
        "another shape": (changed(shape=[16, 64]), parts, r"\(16, 64\)"),
        "no dimension": (changed(shape=[], order="kernel"), parts, "two dimensions"),
        "a negative shape": (changed(shape=[-16, -32]), parts, "two dimensions or more"),
        "fewer codes": (facts, {**parts, "qdata": parts["qdata"][:, :3]}, r"\(16, 3\)"),
        "codes of int32": (facts, {**parts, "qdata": parts["qdata"].int()}, "int32"),
        "fewer scales": (facts, {**parts, "scale": parts["scale"][:, :1]}, "scales"),
        "scales of float32": (facts, {**parts, "scale": torch.ones(16, 2)}, "float32"),
        "an infinite scale": (
            facts,
            {**parts, "tensor_scale": torch.tensor(float("inf"))},
            "tensor_scale",
        ),
        "no scale": (facts, {k: v for k, v in parts.items() if k != "scale"}, "no scale"),
    }


def test__a_forged_tensor__is_refused_by_name(tmp_path: Path) -> None:
    cases = forged()

    def check(name: str) -> None:
        facts, parts, text = cases[name]
        with pytest.raises(CheckpointError, match=text) as caught:
            rebuilt("layer.weight", parts, facts)
        assert "layer.weight is damaged" in str(caught.value)

    assert_each(cases, check)


def test__a_forged_pickle__is_refused_by_name() -> None:
    """Safe loading calls `rebuild` with whatever the file says."""
    w = quantize_(nn.Linear(32, 16), sct.WeightOnly("nvfp4")).weight
    call, (kind, inner, shape, (fmt, dtype, config, order, extras), *flags) = w.__reduce_ex__(2)
    cases: dict[str, Any] = {
        "an unknown config": (inner, shape, (fmt, dtype, '{"config":"x"}', order, extras)),
        "another attribute": (
            (*inner, torch.ones(())),
            shape,
            (fmt, dtype, config, order, ("config",)),
        ),
        "another shape": (inner, (16, 64), (fmt, dtype, config, order, extras)),
        "another order": (inner, shape, (fmt, dtype, config, "x", extras)),
        "fewer codes": (
            (inner[0][:3], *inner[1:]),
            shape,
            (fmt, dtype, config, order, extras),
        ),
    }

    def check(name: str) -> None:
        with pytest.raises(ScaledTensorError):
            call(kind, *cases[name], *flags)

    assert_each(cases, check)
    assert torch.equal(
        call(kind, inner, shape, (fmt, dtype, config, order, extras), *flags).dequantize(),
        w.dequantize(),
    )


def test__codes_of_another_config__do_not_load(tmp_path: Path) -> None:
    model, other = made(), quantize_(plain(1), sct.WeightOnly("e4m3fn"))
    before = logits(other)
    name = "blocks.0.mlp.0.weight"
    with pytest.raises(RuntimeError, match="same shape and config"):
        other.load_state_dict({name: model.state_dict()[name]}, strict=False)
    with pytest.raises(CheckpointError, match=r"WeightOnly.*e4m3fn.* here"):
        load_into(other, model.state_dict())
    save(tmp_path / "folder", model)
    with pytest.raises(CheckpointError, match=r"WeightOnly.*e4m3fn.* here"):
        load(tmp_path / "folder", other)
    with pytest.raises(CheckpointError, match=r"WeightOnly.*e4m3fn.* here"):
        load_into(other, plain().state_dict())
    assert torch.equal(logits(other), before)
