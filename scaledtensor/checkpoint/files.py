"""Files: written whole or not at all, locked, and read without trust in their contents.

1. Writing: the process may be killed at any moment. A new file or folder therefore has a temporary
   name until all of it is on the disk, and then replaces the old one by a rename.
2. Locking: one training at a time saves under one name.
3. Reading: a file may be damaged or forged. Reading it never runs code that the file names.
4. Checking fields: a digest shows that a file did not change after it was written, but not that
   this library wrote it. So each field is checked before anything is changed.
"""

import errno
import importlib
import os
import pickle
import re
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path, PurePath
from typing import IO, Any

import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from scaledtensor.errors import CheckpointError, ScaledTensorError

__all__ = [
    "TensorReader",
    "as_damage",
    "check_name",
    "check_random_state",
    "check_writable",
    "clear",
    "is_count",
    "locked",
    "need",
    "read_torch",
    "real",
    "reason",
    "refusal",
    "replacing",
    "sync_file",
    "sync_folder",
]


# --- writing ---------------------------------------------------------------------------------


def real(path: Path) -> Path:
    """Return the path to replace: the target of a link, so that the link stays, or `path`."""
    return Path(os.path.realpath(path)) if path.is_symlink() else path


def check_writable(path: Path) -> None:
    """Check before a training starts that its first save can write `path`.

    Raises:
        CheckpointError: the folder of `path` does not exist, or takes no files.
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
    """A context that gives a temporary path to write to. At its end the new file replaces `path`.

    The temporary file is in the same folder, because a rename is atomic only within one file
    system. Temporary files that a killed process left for `path` are removed, since a file has one
    writer at a time.

    Raises:
        CheckpointError: the disk is full, or writing failed for another reason.
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
    except (OSError, RuntimeError) as error:  # torch's writer raises RuntimeError for a full disk
        raise CheckpointError(f"{path} could not be saved: {reason(error)}") from error
    finally:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)


def sync_file(path: Path) -> None:
    """Wait until the contents of `path` are on the disk."""
    with path.open("rb+") as file:
        os.fsync(file.fileno())


def sync_folder(folder: Path) -> None:
    """Wait until the renames in `folder` are on the disk. Only POSIX has a call for this."""
    if os.name == "posix":
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def clear(folder: Path) -> None:
    """Remove a folder with its contents; do nothing if it does not exist.

    The folder is renamed first, so that an interrupted removal leaves nothing that looks like a
    checkpoint.
    """
    if not folder.exists():
        return
    doomed = folder.with_name(f".{folder.name.lstrip('.')}.{os.getpid()}.gone")
    os.replace(folder, doomed)
    shutil.rmtree(doomed, ignore_errors=True)


#: The number of a system error -> its text in messages.
_NO_ROOM = {
    errno.ENOSPC: "the disk is full",
    errno.EDQUOT: "the quota of disk space is used up",
    errno.EFBIG: "the file is larger than the limit on the size of files allows (ulimit -f)",
}


def reason(error: BaseException) -> str:
    """Return the cause of a failed write in words. torch's writers wrap the system's error."""
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


# --- locking ---------------------------------------------------------------------------------


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """A context in which no other process can lock `path`.

    Two trainings that save under one name would replace each other's checkpoints. The operating
    system holds the lock, and releases it whenever the process ends.

    Raises:
        CheckpointError: another process holds the lock.
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
        # Its last owner may have removed the file after we opened it and before we locked it.
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
    """Lock an open file. Raises OSError if another process holds the lock."""
    if sys.platform == "win32":
        import msvcrt

        msvcrt.locking(stream.fileno(), msvcrt.LK_NBLCK, 1)
    else:
        import fcntl

        fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)


# --- reading ---------------------------------------------------------------------------------


def read_torch(file: Any, name: Path | str, device: torch.device | str = "cpu") -> Any:
    """Read a file of torch.save, only by safe loading.

    Args:
        file: a path or a stream.
        name: the name of the file in error messages.
        device: the device of the tensors.

    Raises:
        CheckpointError: the file cannot be read, is damaged, or asks for code to be run.
    """
    try:
        return torch.load(file, map_location=device, weights_only=True)
    except OSError as error:
        raise CheckpointError(f"{name} cannot be read: {error.strerror or error}") from error
    except Exception as error:  # damaged bytes can make pickle raise any error
        # Without torch's error: its text advises to switch safe loading off.
        raise CheckpointError(
            f"{name} is damaged or no checkpoint at all: {refusal(error)}"
        ) from None


def refusal(error: Exception) -> str:
    """Return why safe loading refused a file, without torch's advice to load it unsafely."""
    text = str(error)
    asked = re.search(r"GLOBAL ([\w.]+)", text)
    if asked is not None:
        return f"it asks for {asked[1]}, which safe loading does not run"
    if "weights_only" in text or "Weights only" in text:
        return "it holds something else than numbers, strings, tensors and containers of them"
    return text.partition("\n")[0] or type(error).__name__


class TensorReader(FileSystemReader):
    """Reads files of `torch.distributed.checkpoint` without running code that they name.

    torch's own reader unpickles the metadata, and each entry that is no tensor, as Python does.
    Unpickling runs any code that the file asks for. Checkpoints of this library hold only tensors
    there, and the metadata of tensors needs few classes.

    Raises:
        CheckpointError: the metadata is damaged, or names an entry that is no tensor.
    """

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        file = Path(self.path) / ".metadata"
        try:
            with file.open("rb") as stream:
                found = _Unpickler(stream).load()
        except CheckpointError:
            raise
        except Exception as error:  # damaged bytes can make pickle raise any error
            raise CheckpointError(f"{file} is damaged: {error}") from error
        if not isinstance(found, Metadata):
            raise CheckpointError(f"{file} is damaged: it holds a {type(found).__name__}")
        for name, told in found.state_dict_metadata.items():
            if not isinstance(told, TensorStorageMetadata):
                raise CheckpointError(f"{file} has {name}, which is no tensor")
        for stored in (found.storage_data or {}).values():
            check_name(file, getattr(stored, "relative_path", None))
        if found.storage_meta is not None:
            found.storage_meta.load_id = self.load_id
        return found


#: The modules that define the classes, functions and enumerations in the metadata.
_MODULES = ("torch.distributed.checkpoint.metadata", "torch.distributed.checkpoint.filesystem")
_OTHERS = {("torch", "Size"), ("torch.serialization", "_get_layout")}


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if dtype or (module, name) in _OTHERS:
            return getattr(importlib.import_module(module), name)
        if module in _MODULES and "." not in name:
            found = getattr(importlib.import_module(module), name)
            if getattr(found, "__module__", None) == module:
                return found
        if module.startswith("pathlib") and name in ("PosixPath", "WindowsPath", "PurePosixPath"):
            return Path
        raise CheckpointError(f"the checkpoint's metadata asks for {module}.{name}: not loaded")


# --- checking fields -------------------------------------------------------------------------


def need(where: Path | str, told: Any, field: str, kind: type | tuple[type, ...], what: str) -> Any:
    """Return `told[field]`, which must be an instance of `kind`; `what` describes `kind` in words.

    Raises:
        CheckpointError: `told` is no dict, lacks the field, or has another type in it. The message
            names `where` and the field.
    """
    if not isinstance(told, dict):
        raise CheckpointError(
            f"{where} is damaged: it holds a {_kind_of_value(told)} in place of fields"
        )
    if field not in told:
        raise CheckpointError(f"{where} is damaged: it has no field {field!r}")
    found = told[field]
    if not isinstance(found, kind) or (isinstance(found, bool) and kind is int):
        raise CheckpointError(
            f"{where} is damaged: its field {field!r} is a {_kind_of_value(found)}; "
            f"it must be {what}"
        )
    return found


def is_count(x: Any) -> bool:
    """Return whether `x` is a whole number, 0 or greater."""
    return isinstance(x, int) and not isinstance(x, bool) and x >= 0


def check_name(where: Path | str, name: Any) -> None:
    """Check that `name`, which the file `where` holds, is a file in the folder of `where`.

    Raises:
        CheckpointError: it is another place, or no name at all.
    """
    inside = isinstance(name, str) and bool(name) and "\\" not in name and "\0" not in name
    if not inside or PurePath(name).is_absolute() or ".." in PurePath(name).parts:
        raise CheckpointError(
            f"{where} is damaged: it names a file {name!r}, which is not in its own folder"
        )


def check_random_state(
    where: Path | str, told: Any, field: str, setter: Callable[[Any], Any]
) -> None:
    """Check `told[field]`, the state of a random generator, by setting a spare generator to it."""
    state = need(where, told, field, torch.Tensor, "the state of a random generator")
    try:
        setter(state.cpu())
    except (RuntimeError, TypeError) as error:
        raise CheckpointError(
            f"{where} is damaged: its field {field!r} is no state of a random generator"
        ) from error


@contextmanager
def as_damage(where: Path | str, *, named: bool = False) -> Iterator[None]:
    """A context that turns the errors of a senseless field into a CheckpointError naming `where`.

    Args:
        where: the file, and the field in it.
        named: leaves CheckpointErrors as they are, because they already name the file.
    """
    try:
        yield
    except CheckpointError as error:
        if named:
            raise
        raise CheckpointError(f"{where} is damaged: {error}") from error
    except KeyError as error:
        raise CheckpointError(f"{where} is damaged: it has no {error.args[0]!r}") from error
    except (ScaledTensorError, ArithmeticError, AttributeError, IndexError) as error:
        raise CheckpointError(f"{where} is damaged: {error}") from error
    except (TypeError, ValueError, RuntimeError) as error:  # RecursionError is a RuntimeError
        raise CheckpointError(f"{where} is damaged: {error}") from error


def _kind_of_value(x: Any) -> str:
    return "number " + repr(x) if isinstance(x, int | float) else type(x).__name__
