"""Checkpoints of a `Trainer`: written whole or not at all, read whole or not at all.

A checkpoint names everything the training depends on, so a resumed training continues as if it had
never stopped, to the last bit on the same machine and thread count.
"""

from __future__ import annotations

import dataclasses
import zipfile
from pathlib import Path
from typing import Any

import torch

from scaledtensor.checkpoint import atomic
from scaledtensor.demo.training import Trainer
from scaledtensor.errors import CheckpointError

KIND = "scaledtensor train"
VERSION = 1


def check_writable(path: Path) -> None:
    """Refuse before the first step what would fail at the first save."""
    if path.is_dir():
        raise CheckpointError(f"{path} is a directory; --checkpoint takes a file")
    atomic.check_writable(path)


def save(trainer: Trainer, path: Path) -> None:
    """Replace `path` by the trainer's state; until the last moment the old file stays whole."""
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
    with atomic.replacing(path) as temporary, temporary.open("wb") as file:
        torch.save(state, file)


def load(trainer: Trainer, path: Path) -> None:
    """Continue `trainer` from `path`. Whatever does not fit raises before anything is changed."""
    state = read(path, trainer.device)
    compare(path, state["identity"], identity(trainer))
    _fits(path, state["model"], trainer.model.state_dict())
    # assign: the tensors themselves come back, with whatever they carry beside their values.
    trainer.model.load_state_dict(state["model"], assign=True)
    trainer.optimizer = trainer.new_optimizer()
    trainer.optimizer.load_state_dict(state["optimizer"])
    trainer.batches.set_state(state["batches"].cpu())
    torch.set_rng_state(state["random"].cpu())
    trainer.steps_done = state["step"]


def identity(trainer: Trainer) -> dict[str, Any]:
    """Everything that must agree for a checkpoint to belong to a training."""
    return {
        "recipe": trainer.precision.name,
        **dataclasses.asdict(trainer.model.config),
        **dataclasses.asdict(trainer.settings),
        "vocabulary": trainer.corpus.vocabulary,
        "text_sha256": trainer.corpus.digest,
    }


def read(path: Path, device: torch.device) -> dict[str, Any]:
    """What `save` wrote, checked. Raises CheckpointError."""
    if not path.exists():
        raise CheckpointError(f"{path} does not exist, so there is nothing to resume")
    try:
        # torch.load does not compare the checksums that torch.save writes, zipfile does.
        with zipfile.ZipFile(path) as archive:
            damaged = archive.testzip()
        if damaged is not None:
            raise zipfile.BadZipFile(f"the checksum of {damaged} is wrong")
        state = torch.load(path, map_location=device, weights_only=True)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error
    except Exception as error:  # torch.load raises at least four kinds for a damaged file
        reason = str(error).partition("\n")[0]
        raise CheckpointError(f"{path} is damaged or no checkpoint at all: {reason}") from error
    if not isinstance(state, dict) or state.get("kind") != KIND:
        raise CheckpointError(f"{path} is a torch file, but not one that `{KIND}` saved")
    if state["version"] != VERSION:
        raise CheckpointError(
            f"{path} has checkpoint version {state['version']}; this release reads {VERSION}"
        )
    return state


def compare(path: Path, found: dict[str, Any], expected: dict[str, Any]) -> None:
    """Raises CheckpointError unless two trainings are one."""
    differences = [
        f"{name} is {_short(found.get(name))} there and {_short(value)} here"
        for name, value in expected.items()
        if found.get(name) != value
    ]
    if differences:
        raise CheckpointError(f"{path} belongs to another training: {'; '.join(differences)}")


def _fits(path: Path, found: dict[str, Any], expected: dict[str, Any]) -> None:
    def facts(state: dict[str, Any]) -> dict[str, tuple[Any, ...]]:
        return {name: (type(t).__name__, tuple(t.shape), t.dtype) for name, t in state.items()}

    there, here = facts(found), facts(expected)
    for name in here.keys() | there.keys():
        if there.get(name) != here.get(name):
            raise CheckpointError(
                f"{path} belongs to another model: "
                f"{name} is {there.get(name)} there and {here.get(name)} here"
            )


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 24 else f"{text[:20]}...{text[-1]}"
