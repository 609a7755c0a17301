"""The checkpoints of one training, numbered by step: finding the latest, removing the oldest."""

import re
from pathlib import Path

from scaledtensor.checkpoint.atomic import clear
from scaledtensor.checkpoint.manifest import is_whole, present
from scaledtensor.errors import CheckpointError

__all__ = ["latest", "prune", "step_folder", "step_of"]

_NAME = re.compile(r"step-(\d{6,})")


def step_folder(folder: str | Path, step: int) -> Path:
    """Where the checkpoint of a step goes: `folder/step-000120`.

    Raises:
        CheckpointError: `step` is not a whole number from 0 on.
    """
    if not isinstance(step, int) or isinstance(step, bool) or step < 0:
        raise CheckpointError(f"a step is a whole number from 0 on; got {step!r}")
    return Path(folder) / f"step-{step:06d}"


def step_of(path: str | Path) -> int:
    """The step of a folder that `step_folder` named.

    Raises:
        CheckpointError: it has another name.
    """
    found = _NAME.fullmatch(Path(path).name)
    if found is None:
        raise CheckpointError(f"{path} is not named for a step, as step-000120 is")
    return int(found[1])


def latest(folder: str | Path) -> Path | None:
    """The checkpoint of the highest step in `folder` that is whole; None where there is none.

    Whole has all files of its manifest in their sizes; `load` compares their contents too.
    """
    whole = _whole(Path(folder))
    return whole[-1] if whole else None


def prune(folder: str | Path, keep: int) -> list[Path]:
    """Remove all but the last `keep` whole checkpoints in `folder`. What is not whole is left: it
    may be being written, and is nothing to count on.

    One rank calls it, after `save` has returned on it.

    Returns:
        What was removed.

    Raises:
        CheckpointError: `keep` is under 1.
    """
    if not isinstance(keep, int) or isinstance(keep, bool) or keep < 1:
        raise CheckpointError(f"prune keeps a whole number of checkpoints from 1 on; got {keep!r}")
    doomed = _whole(Path(folder))[:-keep]
    for path in doomed:
        clear(path)
    return doomed


def _whole(folder: Path) -> list[Path]:
    if not folder.is_dir():
        return []
    names = {path.name.removeprefix(".").removesuffix(".old") for path in folder.iterdir()}
    found = [folder / name for name in names if _NAME.fullmatch(name)]
    return sorted((path for path in found if is_whole(present(path))), key=step_of)
