"""Forged files with correct digests raise our error, which names the field; nothing changes."""

import copy
import json
import os
import pickle
import resource
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import scaledtensor as sct
from scaledtensor.checkpoint import files, manifest
from scaledtensor.errors import CheckpointError


class Code:
    def __reduce__(self) -> Any:
        return os.system, ("touch ran",)


def training(seed: int = 0) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = sct.scale_model(nn.Linear(8, 4))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(2, 8)).square().sum().backward()
    optimizer.step()
    return model, optimizer


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    sct.checkpoint.save(tmp_path / "run", *training(), extra={"step": 3})
    return tmp_path / "run"


def resign(path: Path, change: Any = None) -> None:
    told = json.loads((path / manifest.NAME).read_text())
    del told["sha256"], told["kind"], told["version"]
    names = [n for n in told["files"] if (path / n).is_file()]
    told["files"] = manifest.digests(path, names)
    if change is not None:
        change(told)
    manifest.write(path, told)


def refused(path: Path, match: str) -> None:
    model, optimizer = training(seed=1)
    before = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    with pytest.raises(CheckpointError, match=match) as caught:
        sct.checkpoint.load(path, model, optimizer)
    told = "".join(str(e) for e in (caught.value, caught.value.__cause__))
    assert "weights_only" not in told
    now = model.state_dict(), optimizer.state_dict()
    assert repr(now) == repr(before)
    assert not Path("ran").exists()


def put(*keys: Any) -> Any:
    """Change the manifest: the last value goes where the keys before it lead."""
    *path, last, value = keys

    def change(told: Any) -> None:
        for key in path:
            told = told[key]
        if value is None:
            del told[last]
        else:
            told[last] = value

    return change


MANIFESTS = {
    "no files": (put("files", None), "'files'"),
    "files in a list": (put("files", [1]), "'files'.*list"),
    "no model": (put("model", None), "'model'"),
    "a negative size": (put("model", "weight", "shape", [-4, 8]), "'shape' is"),
    "a shape of text": (put("model", "weight", "shape", "4x8"), "'shape' is a str"),
    "another shape": (put("model", "weight", "shape", [8, 4]), "weight"),
    "no dtype": (put("model", "weight", "dtype", None), "no field 'dtype'"),
    "a dtype that is none": (put("model", "weight", "dtype", "save"), "weight"),
    "no format": (put("model", "weight", "format", None), "format"),
    "a format of numbers": (put("model", "weight", "format", 3), "damaged"),
    "a kind that is none": (put("model", "weight", "kind", "Module"), "damaged"),
    "a part gone": (put("model", "weight", "parts", "scale", None), "scale"),
    "a part of another shape": (
        put("model", "weight", "parts", "qdata", "shape", [999999]),
        "damaged|qdata|saved or loaded",
    ),
    "a recipe of nothing": (put("model", "weight", "recipe", {"kind": "?"}), "damaged"),
    "tied to nothing": (put("tied", {"bias": "gone"}), "'gone'"),
    "a file outside": (
        put("files", "../secret", {"bytes": 1, "sha256": ""}),
        "not in its own folder",
    ),
    "an absolute file": (
        put("files", "/etc/passwd", {"bytes": 1, "sha256": ""}),
        "not in its own folder",
    ),
    "no objects": (put("files", {}), "'objects.pt'|missing|objects"),
    "states of a list": (put("optimizer", "weight", [1]), "holds no states"),
    "ranks of text": (put("ranks", "two"), "'ranks'"),
    "a negative number of bytes": (
        put("files", "objects.pt", {"bytes": -1, "sha256": ""}),
        "'bytes' is -1",
    ),
}


@pytest.mark.parametrize("name", MANIFESTS)
def test__a_forged_manifest__is_refused_by_field(name: str, saved: Path) -> None:
    change, match = MANIFESTS[name]
    resign(saved, change)
    refused(saved, match)


def test__deep_json__is_refused(saved: Path) -> None:
    (saved / manifest.NAME).write_text("[" * 100_000 + "]" * 100_000)
    refused(saved, "manifest.json is damaged")


OBJECTS: dict[str, tuple[Any, str]] = {
    "code": (Code(), "objects.pt.*asks for posix.system"),
    "a list": ([1], "objects.pt"),
    "nothing": ({}, "no field 'extra'"),
    "no groups": ({"extra": 1, "per_rank": [1], "values": {}}, "no field 'groups'"),
    "groups of text": (
        {"extra": 1, "per_rank": [1], "values": {}, "groups": ["a"]},
        "damaged|group",
    ),
    "a negative step": (
        {"extra": 1, "per_rank": [1], "groups": [], "values": {"weight": {"step": -1.0}}},
        r"values\['weight'\]",
    ),
}


@pytest.mark.parametrize("name", OBJECTS)
def test__forged_objects__are_refused_by_field(name: str, saved: Path, monkeypatch: Any) -> None:
    value, match = OBJECTS[name]
    torch.save(value, saved / "objects.pt")
    resign(saved)
    monkeypatch.chdir(saved.parent)
    refused(saved, match)


def test__metadata_that_reads_other_files__is_refused(saved: Path) -> None:
    raw = (saved / ".metadata").read_bytes()
    metadata = pickle.loads(raw)
    for info in metadata.storage_data.values():
        info.relative_path = "../secret"
    (saved / ".metadata").write_bytes(pickle.dumps(metadata))
    resign(saved)
    refused(saved, "not in its own folder")


# --- safetensors -----------------------------------------------------------------------------


def rewritten(path: Path, change: Any) -> None:
    """Return a safetensors file with a change in our metadata."""
    raw = path.read_bytes()
    (size,) = struct.unpack("<Q", raw[:8])
    header = json.loads(raw[8 : 8 + size])
    index = json.loads(header["__metadata__"]["scaledtensor"])
    told = change(index)
    header["__metadata__"]["scaledtensor"] = json.dumps(index) if told is None else told
    body = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(body)) + body + raw[8 + size :])


INDEXES = {
    "no checksums": (put("crc32", None), "'crc32'"),
    "tensors in a list": (put("tensors", []), "'tensors'"),
    "no format": (put("tensors", "weight", "format", None), "weight"),
    "a shape of text": (put("tensors", "weight", "shape", "ab"), "weight"),
    "a kind of a number": (put("tensors", "weight", "kind", 3), r"tensors\['weight'\]"),
    "facts that are none": (put("tensors", "weight", [1]), r"tensors\['weight'\]"),
    "a dtype of nothing": (put("dtypes", {"gone": "float32"}), r"dtypes\['gone'\]"),
    "tied to nothing": (put("tied", {"a": "gone"}), r"tied\['a'\]"),
    "deep": (lambda index: "[" * 100_000, "its metadata cannot be read"),
}


@pytest.mark.parametrize("name", INDEXES)
def test__forged_safetensors__are_refused_by_field(name: str, tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    sct.checkpoint.save_safetensors(training()[0], path)
    change, match = INDEXES[name]
    rewritten(path, change)
    with pytest.raises(CheckpointError, match=match):
        sct.checkpoint.load_safetensors(path)


@pytest.mark.parametrize(
    "name", ["../m.safetensors", "/etc/passwd", "a/../../m.safetensors", 3, ""]
)
def test__an_index_of_other_folders__is_refused(name: Any, tmp_path: Path) -> None:
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"weight": name}}))
    with pytest.raises(CheckpointError, match=r"index\.json.*not in its own folder"):
        sct.checkpoint.load_safetensors(tmp_path)


# --- links, room, locks ----------------------------------------------------------------------


def test__a_link__stays_a_link(tmp_path: Path) -> None:
    (tmp_path / "far").mkdir()
    for name in ("run", "model.safetensors"):
        (tmp_path / name).symlink_to(tmp_path / "far" / name)
    for _ in range(2):  # a link that leads nowhere yet, and one that leads to a checkpoint
        sct.checkpoint.save(tmp_path / "run", *training())
        sct.checkpoint.save_safetensors(training()[0], tmp_path / "model.safetensors")
    for name in ("run", "model.safetensors"):
        assert (tmp_path / name).is_symlink()
        assert (tmp_path / "far" / name).exists()
        assert not (tmp_path / "far" / name).is_symlink()
    sct.checkpoint.load(tmp_path / "run", *training(seed=1))


_LIMITED = """
import resource, sys, torch
import scaledtensor as sct
from scaledtensor.errors import CheckpointError
resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))
model = sct.scale_model(torch.nn.Linear(128, 128))
for save, name in (
    (sct.checkpoint.save, "run"),
    (lambda path, m: sct.checkpoint.save_safetensors(m, path), "model.safetensors"),
):
    try:
        save(name, model)
    except CheckpointError as error:
        assert name in str(error) and "limit on the size of files" in str(error), error
    else:
        raise SystemExit("saved")
"""


def test__a_limit_on_the_size_of_files__is_told(tmp_path: Path) -> None:
    if not hasattr(resource, "RLIMIT_FSIZE"):
        pytest.skip("no such limit here")
    subprocess.run([sys.executable, "-c", _LIMITED], check=True, cwd=tmp_path)
    assert not [f for f in tmp_path.iterdir() if not f.name.startswith(".")]


def test__a_lock__has_one_owner_and_goes_with_it(tmp_path: Path) -> None:
    path = tmp_path / "run.pt"
    hold = (
        "import sys, pathlib, time; from scaledtensor.checkpoint.files import locked\n"
        "with locked(pathlib.Path(sys.argv[1])): print('held', flush=True); time.sleep(60)"
    )
    other = subprocess.Popen(
        [sys.executable, "-c", hold, str(path)], stdout=subprocess.PIPE, text=True
    )
    assert other.stdout is not None
    assert other.stdout.readline() == "held\n"
    link = tmp_path / "link.pt"
    link.symlink_to(path)
    for name in (path, link):
        told = pytest.raises(CheckpointError, match=f"in use by process {other.pid}")
        with told, files.locked(name):
            pass
    other.kill()
    other.wait()
    with files.locked(path):
        pass
    assert [f.name for f in tmp_path.iterdir()] == ["link.pt"]
