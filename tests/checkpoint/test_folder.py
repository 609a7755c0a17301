"""Checkpoints of a training in folders are whole or absent, and errors name the cause."""

import json
import os
import pickle
import shutil
import signal

import pytest
import torch
from killed import dies_at, ended, forked
from small_models import GPT
from tensors import bits
from torch import nn
from torch.distributed.checkpoint import filesystem

import scaledtensor as sct
from scaledtensor import checkpoint
from scaledtensor.checkpoint import folder, manifest
from scaledtensor.errors import CheckpointError

#: Vocabulary, context, layers, heads and width of a GPT.
SIZES = 16, 8, 1, 2, 16


def training(seed=0, recipe="unit", make=torch.optim.AdamW, **options):
    torch.manual_seed(seed)
    model = GPT(*SIZES)
    if recipe is not None:
        sct.scale_model(model, recipe)
    return model, make(model.parameters(), **{"lr": 1e-2} | options)


def steps(model, optimizer, n):
    torch.manual_seed(0)
    losses = []
    for _ in range(n):
        tokens = torch.randint(SIZES[0], (2, 9))
        optimizer.zero_grad()
        _, loss = model(tokens[:, :-1], tokens[:, 1:])
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


def contents(model, optimizer):
    found = {name: bits(x) for name, x in model.state_dict().items()}
    for i, state in enumerate(optimizer.state.values()):
        found |= {f"{i} {key}": bits(x) for key, x in state.items()}
    groups = [{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups]
    return found | {"groups": groups}


@pytest.fixture
def saved(tmp_path):
    model, optimizer = training()
    steps(model, optimizer, 2)
    checkpoint.save(tmp_path / "run", model, optimizer, extra={"step": 2})
    return tmp_path / "run"


OPTIMIZERS = {
    "sgd": (torch.optim.SGD, {"momentum": 0.9}),
    "adam": (torch.optim.Adam, {"amsgrad": True}),
    "adafactor": (torch.optim.Adafactor, {}),
    "ours": (sct.optim.AdamW, {"allow_non_unit_scaling_params": True}),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test__a_training__goes_on_bit_for_bit(name, tmp_path):
    make, options = OPTIMIZERS[name]
    model, optimizer = training(0, "unit", make, **options)
    steps(model, optimizer, 11)  # This is past the first rebalancing.
    checkpoint.save(tmp_path / "run", model, optimizer, per_rank=torch.get_rng_state())
    losses = steps(model, optimizer, 11)
    other, states = training(1, "unit", make, **options)
    loaded = checkpoint.load(tmp_path / "run", other, states)
    assert torch.equal(torch.get_rng_state(), torch.get_rng_state())
    assert loaded.extra is None
    assert len(loaded.per_rank) == 1
    assert steps(other, states, 11) == losses
    assert contents(other, states) == contents(model, optimizer)


def test__extra__comes_back_as_it_was(tmp_path):
    model, optimizer = training()
    extra = {
        "step": 7,
        "betas": (0.9, 0.95),
        "name": "run",
        "nothing": None,
        "weights": sct.scaled(torch.randn(4, 32), "e2m1fn", "amax", sct.PerBlock((1, 32))),
        "nan": float("nan"),
    }
    checkpoint.save(tmp_path / "run", model, extra=extra, per_rank=[torch.ones(2)])
    found = checkpoint.load(tmp_path / "run", model)
    assert {k: found.extra[k] for k in ("step", "betas", "name", "nothing")} == {
        k: extra[k] for k in ("step", "betas", "name", "nothing")
    }
    assert bits(found.extra["weights"]) == bits(extra["weights"])
    assert torch.equal(found.per_rank[0][0], torch.ones(2))
    with pytest.raises(CheckpointError, match="was saved without an optimizer"):
        checkpoint.load(tmp_path / "run", model, optimizer)


def test__codes_and_ties__are_saved_as_they_are(tmp_path):
    def made(seed):
        model, _ = training(seed)
        model.head.weight = model.token_embedding.weight
        codes = sct.scaled(torch.randn(4, 32), "e3m2fn", "amax", sct.PerBlock((1, 32)))
        model.register_buffer("table", codes)
        return model

    model, other = made(0), made(1)
    checkpoint.save(tmp_path / "run", model)
    checkpoint.load(tmp_path / "run", other)
    assert other.head.weight is other.token_embedding.weight
    for name, x in model.state_dict().items():
        assert bits(other.state_dict()[name]) == bits(x)
    untied, _ = training(2)
    untied.register_buffer("table", made(3).table)
    checkpoint.load(tmp_path / "run", untied)
    assert bits(untied.head.weight) == bits(model.head.weight)


# --- damage ----------------------------------------------------------------------------------


def refused(path, match, model=None, optimizer=None):
    """`load` raises, and changes nothing."""
    if model is None:
        model, optimizer = training(1)
        steps(model, optimizer, 1)
    before = contents(model, optimizer)
    with pytest.raises(CheckpointError, match=match):
        checkpoint.load(path, model, optimizer)
    assert contents(model, optimizer) == before


def files(path):
    return sorted(file for file in path.iterdir() if file.name != "manifest.json")


def test__a_missing_file__is_told_by_name(saved):
    assert len(files(saved)) == 3
    for file in files(saved):
        kept = file.read_bytes()
        file.unlink()
        refused(saved, f"is damaged: {file.name} is missing")
        with pytest.raises(CheckpointError, match="is missing"):
            checkpoint.verify(saved)
        file.write_bytes(kept)
    checkpoint.verify(saved)


def test__a_truncated_file__is_told_by_name(saved):
    for file in files(saved):
        kept = file.read_bytes()
        file.write_bytes(kept[:-1])
        refused(saved, f"{file.name} has {len(kept) - 1} bytes in place of {len(kept)}")
        file.write_bytes(kept)


def test__a_flipped_bit__is_told_anywhere(saved):
    for file in files(saved):
        kept = file.read_bytes()
        for place in range(0, len(kept), len(kept) // 2):
            wrong = bytearray(kept)
            wrong[place] ^= 1 << place % 8
            file.write_bytes(wrong)
            refused(saved, f"the contents of {file.name} have changed")
        file.write_bytes(kept)
    listed = saved / "manifest.json"
    kept = listed.read_text()
    for place in range(2, len(kept), len(kept) // 6):
        listed.write_text(kept[:place] + chr(ord(kept[place]) ^ 1) + kept[place + 1 :])
        refused(saved, "is damaged|is a '|no checkpoint")


def test__what_is_no_checkpoint__is_told(saved, tmp_path):
    model, optimizer = training()
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("")
    refused(tmp_path / "none", "none does not exist")
    refused(tmp_path / "file", "is a file; a checkpoint is a folder")
    refused(tmp_path / "empty", r"is no checkpoint: it has no manifest\.json")
    (saved / "manifest.json").unlink()
    refused(saved, "torch.distributed.checkpoint wrote it, and its own load reads it")
    (saved / "manifest.json").write_text("{}")
    refused(saved, "is damaged: it cannot be read")
    for name in ("file", "run"):
        if name == "run":
            (saved / "manifest.json").unlink()
        with pytest.raises(CheckpointError, match="is no checkpoint, and would be replaced"):
            checkpoint.save(tmp_path / name, model, optimizer)
    with pytest.raises(CheckpointError, match="is not a directory; create it"):
        checkpoint.save(tmp_path / "a" / "b", model, optimizer)


def test__a_folder_that_takes_no_files__is_told(tmp_path, monkeypatch):
    model, optimizer = training()
    monkeypatch.setattr(os, "access", lambda path, mode: False)  # root may write anywhere
    with pytest.raises(CheckpointError, match="is not writable"):
        checkpoint.save(tmp_path / "run", model, optimizer)


def test__code_in_the_metadata__is_not_run(saved):
    class Code:
        def __reduce__(self):
            return os.system, ("touch " + str(saved / "ran"),)

    metadata = saved / ".metadata"
    metadata.write_bytes(pickle.dumps(Code()))
    _sign(saved)
    refused(saved, "metadata asks for posix.system: not loaded")
    assert not (saved / "ran").exists()


def _sign(path):
    """Make the manifest match the folder, as a forger of a checkpoint would."""
    told = manifest.read(path)
    told["files"] = manifest.digests(path, list(told["files"]))
    manifest.write(path, told)


def test__another_model_or_optimizer__is_told(saved):
    torch.manual_seed(0)
    for sizes, message in (
        ((16, 8, 1, 2, 32), r"is \(16, 16\) there and \(16, 32\) here"),
        ((16, 8, 2, 2, 16), r"it has no blocks\.1\.norm1\.weight"),
    ):
        model = sct.scale_model(GPT(*sizes))
        refused(saved, message, model, torch.optim.AdamW(model.parameters()))
    refused(saved, "its group 0 has .* and no dampening", *training(1, make=torch.optim.SGD))
    model, _ = training(1)
    halves = [{"params": [p]} for p in model.parameters()]
    refused(saved, r"has 1 parameter groups, this one \d+", model, torch.optim.AdamW(halves))
    foreign = [nn.Parameter(torch.ones(3))]
    refused(saved, r"of shape \(3,\) that is not the model's", model, torch.optim.AdamW(foreign))


# --- being killed ----------------------------------------------------------------------------

#: A call during a save, its count, and whether the process is killed before or after it.
POINTS = {
    "as the first tensor is written": (filesystem, "_write_item", 1, False),
    "in the middle of the tensors": (filesystem, "_write_item", 40, True),
    "after the tensors": (folder, "write_tensors", 1, True),
    "before the manifest": (manifest, "write", 1, False),
    "before the first rename": (manifest, "install", 1, False),
    "between the renames": (os, "replace", 2, False),
    "before the old one goes": (os, "replace", 3, False),
    "before the folder is synced": (manifest, "sync_folder", 2, False),
}

#: The new folder has its name by then.
NAMED = [POINTS["before the old one goes"], POINTS["before the folder is synced"]]


def dies_saving(path, point, model, optimizer):
    dies_at(*point)
    checkpoint.save(path, model, optimizer, extra={"step": 3})


@pytest.mark.parametrize("point", POINTS)
def test__a_save_that_is_killed__leaves_a_whole_checkpoint(point, saved):
    model, optimizer = training()
    steps(model, optimizer, 2)
    two = contents(model, optimizer)
    steps(model, optimizer, 1)
    three = contents(model, optimizer)
    child = forked(dies_saving, saved, POINTS[point], model, optimizer)
    assert ended(child) == -signal.SIGKILL
    assert list(saved.parent.iterdir()) != [saved]
    step = 3 if POINTS[point] in NAMED else 2
    model, optimizer = training(1)
    assert checkpoint.load(saved, model, optimizer).extra == {"step": step}
    assert contents(model, optimizer) == {2: two, 3: three}[step]
    checkpoint.save(saved, model, optimizer, extra={"step": 4})
    assert list(saved.parent.iterdir()) == [saved]
    assert checkpoint.load(saved, model, optimizer).extra == {"step": 4}


def test__a_save_that_fails__leaves_nothing_behind(saved, monkeypatch):
    def full(*args, **kwargs):
        raise OSError(28, "No space left on device")

    model, optimizer = training()
    monkeypatch.setattr(folder, "write_tensors", full)
    with pytest.raises(CheckpointError, match="the disk is full"):
        checkpoint.save(saved, model, optimizer)
    assert list(saved.parent.iterdir()) == [saved]
    checkpoint.verify(saved)


# --- numbered by step ------------------------------------------------------------------------


def test__the_latest_whole_one__is_found__and_the_oldest_pruned(saved, tmp_path):
    assert checkpoint.latest(tmp_path) is None
    assert checkpoint.latest(tmp_path / "none") is None
    for step in (20, 100, 3, 1000000, 99):
        shutil.copytree(saved, checkpoint.step_folder(tmp_path, step))
    assert checkpoint.step_folder(tmp_path, 120).name == "step-000120"
    newest = checkpoint.latest(tmp_path)
    assert checkpoint.step_of(newest) == 1000000
    files(newest)[1].write_bytes(b"cut")
    assert checkpoint.step_of(checkpoint.latest(tmp_path)) == 100
    shutil.copytree(saved, tmp_path / ".step-000101.tmp")
    gone = checkpoint.prune(tmp_path, keep=2)
    assert [checkpoint.step_of(path) for path in gone] == [3, 20]
    left = {path.name for path in tmp_path.glob("*step*")}
    assert left == {"step-000099", "step-000100", "step-1000000", ".step-000101.tmp"}
    assert checkpoint.prune(tmp_path, keep=2) == []
    model, optimizer = training(1)
    checkpoint.save(checkpoint.step_folder(tmp_path, 101), model, optimizer)
    assert not (tmp_path / ".step-000101.tmp").exists()
    assert checkpoint.step_of(checkpoint.latest(tmp_path)) == 101


@pytest.mark.parametrize("step", [-1, 1.5, True, "3"])
def test__a_step_that_is_no_number__is_refused(step, tmp_path):
    with pytest.raises(CheckpointError, match="a step is a whole number from 0 on"):
        checkpoint.step_folder(tmp_path, step)
    with pytest.raises(CheckpointError, match="a whole number of checkpoints from 1 on"):
        checkpoint.prune(tmp_path, 0 if step == -1 else step)
    with pytest.raises(CheckpointError, match="is not named for a step"):
        checkpoint.step_of(tmp_path / f"step-{step}")


def test__the_manifest__is_json_that_says_what_is_in_the_files(saved):
    told = json.loads((saved / "manifest.json").read_text())
    weight = told["model"]["blocks.0.attention.qkv.weight"]
    assert weight["format"] == "fp32"
    assert weight["shape"] == [48, 16]
    assert weight["recipe"]["recipe"] == "unit"
    assert told["optimizer"]["head.weight"]["exp_avg"]["kind"] == "ScaledTensor"
    assert told["files"].keys() == {file.name for file in files(saved)}
