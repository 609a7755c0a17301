"""Writing under the chance of being killed: what is replaced stays whole until the last moment."""

import errno
import os
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

from scaledtensor.errors import CheckpointError

__all__ = [
    "check_writable",
    "clear",
    "locked",
    "real",
    "reason",
    "replacing",
    "sync_file",
    "sync_folder",
]


def real(path: Path) -> Path:
    """The file to replace: the target of `path` where that is a link, so that the link stays."""
    return Path(os.path.realpath(path)) if path.is_symlink() else path


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Within, no other process that asks for it has `path`: two trainings that save under one name
    would replace each other's checkpoints.

    The operating system holds the lock, so that it goes with the process, however that ends.

    Raises:
        CheckpointError: another process has it.
    """
    path = real(path)
    file = path.with_name(f".{path.name}.lock")
    while True:
        stream = file.open("a+")
        try:
            _lock(stream)
        except OSError as error:
            stream.seek(0)
            owner = stream.read().strip()
            stream.close()
            if error.errno not in (errno.EAGAIN, errno.EACCES, errno.EWOULDBLOCK, errno.EDEADLK):
                raise CheckpointError(f"{file} cannot be locked: {error.strerror}") from error
            by = f"process {owner}" if owner else "another process"
            raise CheckpointError(
                f"{path} is in use by {by}, which saves its training there: wait until it ends, or "
                "choose another --checkpoint"
            ) from None
        # Its last owner may have removed the file between our opening it and our locking it.
        with suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(stream.fileno()), file.stat()):
                break
        stream.close()
    try:
        stream.truncate(0)
        stream.write(str(os.getpid()))
        stream.flush()
        yield
    finally:
        with suppress(OSError):
            file.unlink()
        stream.close()


def _lock(stream: IO[str]) -> None:
    """Raises OSError where another process has it."""
    if sys.platform == "win32":
        import msvcrt

        msvcrt.locking(stream.fileno(), msvcrt.LK_NBLCK, 1)
    else:
        import fcntl

        fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)


#: What a system says in short where there is no room -> what to say.
_NO_ROOM = {
    errno.ENOSPC: "the disk is full",
    errno.EDQUOT: "the quota of disk space is used up",
    errno.EFBIG: "the file is larger than the limit on the size of files allows (ulimit -f)",
}


def reason(error: BaseException) -> str:
    """The cause of a failed write, in words. torch's writers wrap the error of the system."""
    cause: BaseException | None = error
    while cause is not None:
        known = _NO_ROOM.get(cause.errno or 0) if isinstance(cause, OSError) else None
        if known is not None:
            return known
        cause = cause.__cause__ or cause.__context__
    text = str(error).partition("\n")[0]
    for number, known in _NO_ROOM.items():
        if os.strerror(number) in text:
            return known
    return text


def check_writable(path: Path) -> None:
    """Refuse before hours of training what would fail at the first save.

    Raises:
        CheckpointError: the folder that `path` is to be in does not exist, or takes no files.
    """
    path = real(path)
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
    path = real(path)
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
        raise CheckpointError(f"{path} could not be saved: {reason(error)}") from error
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
