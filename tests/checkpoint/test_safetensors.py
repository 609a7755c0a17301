"""ScaledTensors go into safetensors files and come back."""

import json
import os
import signal

import pytest
import safetensors
import torch
from assertions import assert_each
from killed import dies_at, ended, forked
from safetensors.torch import load_file, load_model, save_file, save_model
from small_models import GPT
from tensors import gaussian
from torch import nn

import scaledtensor as sct
from scaledtensor import checkpoint
from scaledtensor.errors import CheckpointError
from scaledtensor.formats import FORMATS, custom
from scaledtensor.recipes import MXFP4, Current, Delayed, PerGemm, Unit
from scaledtensor.tensors.storable import is_storable


def gpt(seed=0, recipe=None):
    torch.manual_seed(seed)
    model = GPT(vocabulary=16, context=8, layers=1, heads=2, width=16)
    model.head.weight = model.token_embedding.weight
    return model if recipe is None else sct.scale_model(model, recipe)


def assert_same(x, y):
    """Both tensors have the same class, facts and bits."""
    assert type(x) is type(y)
    if not isinstance(x, sct.ScaledTensor):
        assert x.dtype == y.dtype
        assert torch.equal(x, y)
        return
    assert x.__tensor_flatten__()[1] == y.__tensor_flatten__()[1]
    assert x.recipe == y.recipe
    assert x.shape == y.shape
    for name in x.INNER:
        a, b = (getattr(t, name).contiguous() for t in (x, y))
        assert a.dtype == b.dtype
        assert a.shape == b.shape
        assert torch.equal(a.reshape(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8)), name


FORMS = {
    **{f"{f.name} whole": (f, sct.PerTensor()) for f in FORMATS.values() if f.has_zero},
    **{f"{f.name} blocks": (f, sct.PerBlock((1, 32))) for f in FORMATS.values() if f.has_zero},
    "rows": (FORMATS["e4m3fn"], sct.PerAxis(0)),
    "custom": (custom(3, 1), sct.PerBlock((4, -1))),
}


@pytest.mark.parametrize("form", FORMS)
def test__every_format_under_every_scale__comes_back_to_the_bit(form, tmp_path):
    fmt, granularity = FORMS[form]
    scale = "rms" if isinstance(granularity, sct.PerTensor) and is_storable(fmt) else "amax"

    def check(shape):
        x = sct.scaled(gaussian(*shape) * 100, fmt, scale, granularity, recipe=Unit())
        checkpoint.save_safetensors({"x": x}, tmp_path / "x.safetensors")
        assert_same(checkpoint.load_safetensors(tmp_path / "x.safetensors")["x"], x)
        plain = checkpoint.load_safetensors(tmp_path / "x.safetensors", dequantized=True)["x"]
        assert_same(plain, x.dequantize())

    # A block of a whole dimension needs elements in it.
    empty = [] if form == "custom" else [(0, 32)]
    assert_each([(6, 70), (3, 2, 33), *empty], check)


def test__both_levels_of_nvfp4__come_back(tmp_path):
    x = sct.scaled(gaussian(4, 64) * 100, "e2m1fn", "nvfp4", sct.PerBlock((1, 16)))
    checkpoint.save_safetensors({"x": x}, tmp_path / "x.safetensors")
    assert_same(checkpoint.load_safetensors(tmp_path / "x.safetensors")["x"], x)
    names = set(load_file(tmp_path / "x.safetensors"))
    assert names == {"x.qdata", "x.scale", "x.rms", "x.tensor_scale"}


@pytest.mark.parametrize(
    "recipe",
    [
        Unit(master="bf16"),
        Delayed(history=4),
        Current(store_frozen=True),
        MXFP4(),
        Unit(overrides={"blocks.*": Current(gradient="e4m3fn"), "head": None}),
        PerGemm(),
    ],
    ids=lambda r: r.name,
)
def test__a_model__comes_back_with_its_recipes_and_ties(recipe, tmp_path):
    model = gpt()
    model.blocks[0].mlp.requires_grad_(False)
    sct.scale_model(model, recipe)
    checkpoint.save_safetensors(model, tmp_path / "m.safetensors")
    found = checkpoint.load_safetensors(tmp_path / "m.safetensors")
    for name, x in model.state_dict().items():
        assert_same(found[name], x)
    assert found["head.weight"] is found["token_embedding.weight"]
    other = gpt(seed=1)
    other.blocks[0].mlp.requires_grad_(False)
    sct.scale_model(other, recipe)
    checkpoint.load_into(other, found)
    for name, x in model.state_dict().items():
        assert_same(other.state_dict()[name], x)


def test__the_file__is_what_any_library_reads(tmp_path):
    model = gpt(recipe="unit")
    checkpoint.save_safetensors(model, tmp_path / "m.safetensors")
    with safetensors.safe_open(tmp_path / "m.safetensors", framework="pt") as file:
        facts = json.loads(file.metadata()["scaledtensor"])["tensors"][
            "blocks.0.attention.qkv.weight"
        ]
        q, scale = (
            file.get_tensor(f"blocks.0.attention.qkv.weight.{part}") for part in ("qdata", "scale")
        )
    assert facts["format"] == "fp32"
    assert torch.equal(q * scale, model.blocks[0].attention.qkv.weight.dequantize())
    stored = sum(t.nbytes for t in load_file(tmp_path / "m.safetensors").values())
    weights = sum(p.qdata.nbytes + 8 for p in model.parameters())
    assert stored == weights  # Tied weights are counted once, with one scale and one RMS each.


def test__dequantized__is_a_plain_checkpoint_of_the_values(tmp_path):
    model, plain = gpt(recipe="unit"), gpt()
    checkpoint.save_safetensors(model, tmp_path / "m.safetensors", dequantized=True)
    found = load_file(tmp_path / "m.safetensors")
    assert "head.weight" not in found or "token_embedding.weight" not in found
    for name, x in found.items():
        assert_same(x, plain.state_dict()[name])
    other = gpt(1)
    other.load_state_dict(found | {"head.weight": found["token_embedding.weight"]})


def test__a_plain_file__goes_into_a_scaled_model_as_scale_model_would_make_it(tmp_path):
    state = gpt().state_dict()
    state.pop("head.weight")  # transformers leaves tied weights out in the same way.
    save_file(state, tmp_path / "model.safetensors")
    model, expected = gpt(1, "unit"), gpt(0, "unit")
    checkpoint.load_into(model, checkpoint.load_safetensors(tmp_path))
    for name, x in expected.state_dict().items():
        assert_same(model.state_dict()[name], x)


def test__a_file_in_shards_with_an_index__is_read_whole__or_told_what_is_missing(tmp_path):
    state = {"a": gaussian(3) * 100, "b": gaussian(4) * 100, "c": gaussian(2) * 100}
    names = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    where = {"a": names[0], "b": names[1], "c": names[0]}
    for name in names:
        save_file({k: v for k, v in state.items() if where[k] == name}, tmp_path / name)
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": where}))
    found = checkpoint.load_safetensors(tmp_path)
    assert all(torch.equal(found[name], x) for name, x in state.items())
    (tmp_path / names[1]).unlink()
    with pytest.raises(CheckpointError, match=r"00002-of-00002\.safetensors of its index"):
        checkpoint.load_safetensors(tmp_path)


@pytest.mark.parametrize("whole", [True, False])
def test__parts_in_several_files__are_put_together__or_told_what_is_missing(whole, tmp_path):
    """transformers splits a model into files by size, also between the parts of one weight."""
    model = sct.scale_model(nn.Linear(4, 6))
    save_model(model, tmp_path / "one.safetensors")
    state = load_file(tmp_path / "one.safetensors")
    if not whole:
        state.pop("weight.facts")
    where = {name: f"model-{i}.safetensors" for i, name in enumerate(state)}
    for name, file in where.items():
        save_file({name: state[name]}, tmp_path / file)
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": where}))
    if whole:
        assert_same(checkpoint.load_safetensors(tmp_path)["weight"], model.weight.detach())
        return
    with pytest.raises(CheckpointError, match=r"nor weight\.facts says"):
        checkpoint.load_safetensors(tmp_path)


def test__parts_of_one_memory__are_written_apart(tmp_path):
    whole = gaussian(4, 6) * 100
    state = {"rows": whole[:2], "all": whole, "t": whole.t(), "scaled": sct.scaled(whole).t()}
    checkpoint.save_safetensors(state, tmp_path / "x.safetensors")
    found = checkpoint.load_safetensors(tmp_path / "x.safetensors")
    for name, x in state.items():
        assert_same(found[name], x)


# --- what is refused -------------------------------------------------------------------------


def test__damage__is_told(tmp_path):
    path = tmp_path / "m.safetensors"
    checkpoint.save_safetensors(gpt(recipe="unit"), path)
    raw = path.read_bytes()
    flipped = bytearray(raw)
    flipped[-5] ^= 1  # This byte is in the data, which safetensors does not check.
    for wrong, message in (
        (flipped, "the checksum of .* is wrong"),
        (raw[: len(raw) // 2], "damaged or no safetensors file"),
        (raw[:5], "damaged or no safetensors file"),
        (b"", "damaged or no safetensors file"),
        (raw.replace(b'"version', b'"versiom').replace(b'\\"version', b'\\"versiom'), "metadata"),
        (raw.replace(b'"scaledtensor"', b'"scaledtensos"'), r"m\.safetensors is damaged: .* part"),
        (raw.replace(b'\\"format\\": \\"fp32\\"', b'\\"format\\": \\"fp31\\"'), "fp31"),
        (raw.replace(b'\\"recipe\\": \\"unit\\"', b'\\"recipe\\": \\"uniq\\"'), "uniq"),
        (raw.replace(b'\\"version\\": 1', b'\\"version\\": 9'), "version 9; this release reads 1"),
    ):
        path.write_bytes(wrong)
        with pytest.raises(CheckpointError, match=message):
            checkpoint.load_safetensors(path)


def test__what_cannot_be_written__is_told_before_anything_is(tmp_path):
    x = sct.scaled(gaussian(3) * 100)
    for state, path, message in (
        ({"x": x, "n": 3}, "x", "n is a int"),
        ({"x": x, "x.qdata": gaussian(2) * 100}, "x", "two tensors would be called x.qdata"),
        ({"x": x}, "none/x", "create it to save"),
        ({"x": x}, ".", "is a directory"),
    ):
        with pytest.raises(CheckpointError, match=message):
            checkpoint.save_safetensors(state, tmp_path / path)
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(CheckpointError, match="does not exist"):
        checkpoint.load_safetensors(tmp_path / "x")
    with pytest.raises(CheckpointError, match=r"has neither model\.safetensors nor"):
        checkpoint.load_safetensors(tmp_path)


def saves_on_and_on(path, x):
    while True:
        checkpoint.save_safetensors({"x": x}, path)


@pytest.mark.parametrize("written", [1, 2**24, 2**26 - 2**20])
def test__a_save_that_is_killed__leaves_the_file_before_it(written, tmp_path):
    path = tmp_path / "x.safetensors"
    x = sct.ScaledTensor(torch.full((2**24,), 3.0), 2.0, "fp32")
    small = sct.ScaledTensor(torch.full((8, 8), 1.0), 2.0, "fp32")
    for _ in range(20):
        checkpoint.save_safetensors({"x": small}, path)
        child = forked(saves_on_and_on, path, x)
        # The process is killed while it writes the first file, which takes a while.
        while not any(part.stat().st_size >= written for part in tmp_path.glob(".*.tmp")):
            assert os.waitpid(child, os.WNOHANG) == (0, 0)
        os.kill(child, signal.SIGKILL)
        assert ended(child) == -signal.SIGKILL
        if path.stat().st_size < 2**20:
            break
    assert list(tmp_path.glob(".*.tmp"))
    assert_same(checkpoint.load_safetensors(path)["x"], small)
    checkpoint.save_safetensors({"x": small}, path)
    assert [file.name for file in tmp_path.iterdir()] == ["x.safetensors"]


def dies_renaming(path, x, after):
    dies_at(os, "replace", after=after)
    checkpoint.save_safetensors({"x": x}, path)


@pytest.mark.parametrize("after", [False, True])
def test__the_name_passes_on__in_one_step(after, tmp_path):
    path = tmp_path / "x.safetensors"
    old, new = (sct.ScaledTensor(torch.full((8, 8), n), 2.0, "fp32") for n in (1.0, 3.0))
    checkpoint.save_safetensors({"x": old}, path)
    assert ended(forked(dies_renaming, path, new, after)) == -signal.SIGKILL
    assert_same(checkpoint.load_safetensors(path)["x"], new if after else old)


def test__a_module_with_other_things_in_its_state__is_refused_by_name(tmp_path):
    class Counts(nn.Module):
        def get_extra_state(self):
            return {"n": 1}

    with pytest.raises(
        CheckpointError, match=r"0\._extra_state in the model's state dict is a dict"
    ):
        checkpoint.save_safetensors(nn.Sequential(Counts()), tmp_path / "x")


# --- files by safetensors itself -------------------------------------------------------------


@pytest.mark.parametrize("recipe", ["unit", "delayed", Unit(master="bf16")], ids=str)
def test__save_model_and_load_model__keep_every_bit(recipe, tmp_path):
    """A tied model works too: its file has one name for both weights."""
    model, other = gpt(0, recipe), gpt(1, recipe)
    save_model(model, tmp_path / "file.safetensors")
    load_model(other, tmp_path / "file.safetensors")
    assert other.head.weight is other.token_embedding.weight
    for x, y in zip(model.state_dict().values(), other.state_dict().values(), strict=True):
        assert_same(x, y)
    stored = load_file(tmp_path / "file.safetensors")
    assert {type(x) for x in stored.values()} == {torch.Tensor}
    with pytest.raises(RuntimeError, match="qdata"):
        load_model(gpt(1), tmp_path / "file.safetensors")


def test__frozen_weights_in_8_bits__are_saved_and_loaded_so(tmp_path):
    def make(seed):
        torch.manual_seed(seed)
        return sct.scale_model(nn.Linear(8, 8).requires_grad_(False), Unit(store_frozen=True))

    model, other = make(0), make(1)
    save_model(model, tmp_path / "file.safetensors")
    load_model(other, tmp_path / "file.safetensors")
    assert_same(model.weight, other.weight)
    assert load_file(tmp_path / "file.safetensors")["weight.qdata"].dtype == torch.float8_e4m3fn


@pytest.mark.parametrize("of", [sct.scaled, lambda x: sct.scaled(x, "e2m1fn", granularity=32)])
def test__save_file__names_what_saves(of, tmp_path):
    with pytest.raises(sct.errors.StorageError, match="save_safetensors"):
        save_file({"weight": of(torch.randn(4, 32))}, tmp_path / "file.safetensors")
    with pytest.raises(sct.errors.StorageError, match="save_safetensors"):
        of(torch.randn(4, 32)).data_ptr()
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("missing", ["facts", "scale", "qdata"])
def test__parts__are_refused_unless_all_are_there(missing, tmp_path):
    path = tmp_path / "file.safetensors"
    save_model(sct.scale_model(nn.Linear(4, 4)), path)
    parts = load_file(path)
    del parts[f"weight.{missing}"]
    with pytest.raises(CheckpointError, match=f"weight.*{missing}"):
        sct.scale_model(nn.Linear(4, 4)).load_state_dict(parts)
    save_file(parts, path)
    with pytest.raises(CheckpointError, match=r"weight"):
        checkpoint.load_into(sct.scale_model(nn.Linear(4, 4)), checkpoint.load_safetensors(path))


def test__facts__that_are_no_json__are_refused(tmp_path):
    path = tmp_path / "file.safetensors"
    save_model(sct.scale_model(nn.Linear(4, 4)), path)
    parts = load_file(path)
    parts["weight.facts"] = parts["weight.facts"].flip(0)
    with pytest.raises(CheckpointError, match=r"weight\.facts is damaged"):
        sct.scale_model(nn.Linear(4, 4)).load_state_dict(parts)


def test__whoever_else_asks__gets_the_tensors_themselves():
    model = sct.scale_model(nn.Linear(4, 4))
    assert list(model.state_dict()) == ["weight", "bias"]
    assert isinstance(model.state_dict()["weight"], sct.ScaledTensor)
    sct.unscale_model(model)
    assert not model._state_dict_hooks
    assert not model._load_state_dict_pre_hooks
