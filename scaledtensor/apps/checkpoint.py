"""Checkpoints of a `Trainer`, in one file. A checkpoint is written whole or not at all, and is read
whole or not at all.

It names everything on which the training depends. So a resumed training gives the same bits as an
uninterrupted one, on the same machine with as many threads.
"""

from __future__ import annotations

import dataclasses
import zipfile
import zlib
from pathlib import Path
from typing import Any

import torch

from scaledtensor.apps.training import OPTIONS, Trainer
from scaledtensor.checkpoint import files
from scaledtensor.checkpoint.files import check_random_state, is_count, need, read_torch
from scaledtensor.errors import CheckpointError

KIND = "scaledtensor train"
VERSION = 1


def check_writable(path: Path) -> None:
    """Raises CheckpointError now if the first save would fail."""
    if path.is_dir():
        raise CheckpointError(f"{path} is a directory; --checkpoint takes a file")
    files.check_writable(path)


def save(trainer: Trainer, path: Path) -> None:
    """Replace `path` by the trainer's state. The old file stays whole until the new one is
    whole."""
    state = {
        "kind": KIND,
        "version": VERSION,
        "identity": identity(trainer),
        "step": trainer.steps_done,
        "model": trainer.model.state_dict(),
        "optimizer": trainer.optimizer.state_dict(),
        "batches": trainer.batches.get_state(),
        "random": torch.get_rng_state(),  # dropout draws from it
    }
    with files.replacing(path) as temporary, temporary.open("wb") as file:
        torch.save(state, file)


def load(trainer: Trainer, path: Path) -> None:
    """Continue `trainer` from `path`. If a part does not fit, this raises and changes nothing."""
    state = read(path, trainer.device)
    compare(path, need(path, state, "identity", dict, "a table of settings"), identity(trainer))
    _fits(path, need(path, state, "model", dict, "tensors by name"), trainer.model.state_dict())
    step = need(path, state, "step", int, "a whole number")
    if not is_count(step):
        raise CheckpointError(f"{path} is damaged: its field 'step' is {step}")
    for name in ("batches", "random"):
        check_random_state(path, state, name, torch.Generator().set_state)
    _check_optimizer(path, need(path, state, "optimizer", dict, "an optimizer's state"), trainer)
    # `assign` keeps the tensors of the file, with everything that they hold beside their values.
    trainer.model.load_state_dict(state["model"], assign=True)
    trainer.optimizer = trainer.new_optimizer()
    trainer.optimizer.load_state_dict(state["optimizer"])
    trainer.batches.set_state(state["batches"].cpu())
    torch.set_rng_state(state["random"].cpu())
    trainer.steps_done = state["step"]


def identity(trainer: Trainer) -> dict[str, Any]:
    """The settings that a training and its checkpoint have in common."""
    return {
        "recipe": trainer.precision.name,
        **dataclasses.asdict(trainer.model.config),
        **dataclasses.asdict(trainer.settings),
        "vocabulary": trainer.corpus.vocabulary,
        "text_sha256": trainer.corpus.digest,
    }


def read(path: Path, device: torch.device) -> dict[str, Any]:
    """Read a file of `save` and check it. Raises CheckpointError."""
    if not path.exists():
        raise CheckpointError(f"{path} does not exist, so there is nothing to resume")
    try:
        # torch.save writes checksums. zipfile compares them, and torch.load does not.
        with zipfile.ZipFile(path) as archive:
            damaged = archive.testzip()
        if damaged is not None:
            raise zipfile.BadZipFile(f"the checksum of {damaged} is wrong")
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error
    except (zipfile.BadZipFile, EOFError, ValueError, RuntimeError, zlib.error) as error:
        raise CheckpointError(f"{path} is damaged or no checkpoint at all: {error}") from error
    state = read_torch(path, path, device)
    if not isinstance(state, dict) or state.get("kind") != KIND:
        raise CheckpointError(f"{path} is a torch file, but not one that `{KIND}` saved")
    if need(path, state, "version", int, "a whole number") != VERSION:
        raise CheckpointError(
            f"{path} has checkpoint version {state['version']}; this release reads {VERSION}"
        )
    return state


def compare(path: Path, found: dict[str, Any], expected: dict[str, Any]) -> None:
    """Raises CheckpointError unless two trainings have the same settings."""
    different = [name for name, value in expected.items() if found.get(name) != value]
    if not different:
        return
    told = [
        f"{OPTIONS.get(name, name)} is {_short(found.get(name))} there and "
        f"{_short(expected[name])} here"
        for name in different
    ]
    again = [f"{OPTIONS[name]} {found.get(name)}" for name in different if name in OPTIONS]
    advice = f". To resume, give the options of its training again: {' '.join(again)}"
    raise CheckpointError(
        f"{path} belongs to another training: {'; '.join(told)}{advice if again else ''}"
    )


def _fits(path: Path, found: dict[str, Any], expected: dict[str, Any]) -> None:
    for name, x in found.items():
        if not isinstance(x, torch.Tensor):
            raise CheckpointError(
                f"{path} is damaged: model[{name!r}] is a {type(x).__name__}, and no tensor"
            )

    def facts(state: dict[str, Any]) -> dict[str, tuple[Any, ...]]:
        return {name: (type(t).__name__, tuple(t.shape), t.dtype) for name, t in state.items()}

    there, here = facts(found), facts(expected)
    for name in here.keys() | there.keys():
        if there.get(name) != here.get(name):
            raise CheckpointError(
                f"{path} belongs to another model: "
                f"{name} is {there.get(name)} there and {here.get(name)} here"
            )


def _check_optimizer(path: Path, found: dict[str, Any], trainer: Trainer) -> None:
    """Raises CheckpointError unless every state belongs to a parameter and has its shape."""
    own = trainer.optimizer.state_dict()["param_groups"]
    groups = need(path, found, "param_groups", list, "the optimizer's groups")
    states = need(path, found, "state", dict, "states by number")
    where = f"{path}, its optimizer,"
    if [need(where, g, "params", list, "numbers") for g in groups] != [g["params"] for g in own]:
        raise CheckpointError(f"{where} is damaged: its field 'params' names other parameters")
    for group, mine in zip(groups, own, strict=True):
        for name in mine:
            need(where, group, name, object, "an option")
    parameters = list(trainer.model.parameters())
    for i, state in states.items():
        if not is_count(i) or i >= len(parameters):
            raise CheckpointError(f"{where} is damaged: state[{i!r}] is of no parameter")
        for name in ("step", "exp_avg", "exp_avg_sq"):
            x = need(f"{where} state[{i}]", state, name, torch.Tensor, "a tensor")
            shape = () if name == "step" else parameters[i].shape
            if tuple(x.shape) != tuple(shape) or (name == "step" and not float(x) >= 0):
                told = float(x) if x.dim() == 0 else f"of shape {tuple(x.shape)}"
                raise CheckpointError(f"{where} is damaged: state[{i}][{name!r}] is {told}")


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 24 else f"{text[:20]}...{text[-1]}"
