"""Writing under the chance of being killed: what is replaced stays whole until the last moment."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from scaledtensor.errors import CheckpointError

__all__ = ["check_writable", "clear", "replacing", "sync_file", "sync_folder"]


def check_writable(path: Path) -> None:
    """Refuse before hours of training what would fail at the first save.

    Raises:
        CheckpointError: the folder that `path` is to be in does not exist, or takes no files.
    """
    if not path.parent.is_dir():
        raise CheckpointError(
            f"{path.parent} is not a directory; create it to save {path.name} there"
        )
    if not os.access(path.parent, os.W_OK):
        raise CheckpointError(f"{path.parent} is not writable; {path.name} cannot be saved there")


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """The file to write in place of `path`, which takes its name once all of it is on the disk.

    In the same folder, because only within one file system is a rename atomic. What a killed
    process left there of the same file is removed: a file has one writer at a time.

    Raises:
        CheckpointError: the disk is full, or anything else that writing meets.
    """
    for left in path.parent.glob(f".{path.name}.*.tmp"):
        with suppress(OSError):
            left.unlink()
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        yield temporary
        sync_file(temporary)
        os.replace(temporary, path)
        sync_folder(path.parent)
    except (OSError, RuntimeError) as error:  # torch's writer turns a full disk into the latter
        raise CheckpointError(f"{path} could not be saved: {error}") from error
    finally:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)


def sync_file(path: Path) -> None:
    """Wait until what was written to `path` is on the disk."""
    with path.open("rb+") as file:
        os.fsync(file.fileno())


def sync_folder(folder: Path) -> None:
    """A rename reaches the disk with its folder; only POSIX has the call for it."""
    if os.name == "posix":
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def clear(folder: Path) -> None:
    """Remove a folder and all in it; one that is not there is fine.

    It loses its name first, so that a removal cut short leaves nothing that looks like a
    checkpoint.
    """
    if not folder.exists():
        return
    doomed = folder.with_name(f".{folder.name.lstrip('.')}.{os.getpid()}.gone")
    os.replace(folder, doomed)
    shutil.rmtree(doomed, ignore_errors=True)
