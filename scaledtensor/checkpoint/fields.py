"""Checks of the fields of a file: an error names the file and the field.

A digest shows that a file is as somebody wrote it, and not that this library wrote it. So every
field is compared with what it must be before anything is changed.
"""

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path, PurePath
from typing import Any

import torch

from scaledtensor.errors import CheckpointError, ScaledTensorError

__all__ = [
    "check_name",
    "checked_tensor",
    "is_count",
    "need",
    "read_torch",
    "refusal",
    "understood",
]


def need(where: Path | str, told: Any, field: str, kind: type | tuple[type, ...], what: str) -> Any:
    """`told[field]`, which is a `kind`; `what` says so in words.

    Raises:
        CheckpointError: `told` is no dict, has no such field, or the field holds something else.
    """
    if not isinstance(told, dict):
        raise CheckpointError(f"{where} is damaged: it holds a {_kind(told)} in place of fields")
    if field not in told:
        raise CheckpointError(f"{where} is damaged: it has no field {field!r}")
    found = told[field]
    if not isinstance(found, kind) or (isinstance(found, bool) and kind is int):
        raise CheckpointError(
            f"{where} is damaged: its field {field!r} is a {_kind(found)}; it must be {what}"
        )
    return found


def is_count(x: Any) -> bool:
    """Whether `x` is a whole number from 0 on."""
    return isinstance(x, int) and not isinstance(x, bool) and x >= 0


def check_name(where: Path | str, name: Any) -> None:
    """Raises CheckpointError unless `name` is a file within the folder that `where` is in."""
    inside = isinstance(name, str) and bool(name) and "\\" not in name and "\0" not in name
    if not inside or PurePath(name).is_absolute() or ".." in PurePath(name).parts:
        raise CheckpointError(
            f"{where} is damaged: it names a file {name!r}, which is not in its own folder"
        )


@contextmanager
def understood(where: Path | str, *, named: bool = False) -> Iterator[None]:
    """Whatever a field that makes no sense leads to, as a CheckpointError that names `where`;
    `named` leaves errors of this library as they are, since they say where already."""
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
    except (TypeError, ValueError, RuntimeError) as error:  # RecursionError is the last
        raise CheckpointError(f"{where} is damaged: {error}") from error


def read_torch(file: Any, name: Path | str, device: torch.device | str = "cpu") -> Any:
    """Read a file that torch.save wrote, by safe loading alone.

    Args:
        file: a path, or a stream.
        name: what errors call it.
        device: where its tensors go.

    Raises:
        CheckpointError: it cannot be read, is damaged, or asks for code to be run.
    """
    try:
        return torch.load(file, map_location=device, weights_only=True)
    except OSError as error:
        raise CheckpointError(f"{name} cannot be read: {error.strerror or error}") from error
    except Exception as error:  # pickle raises whatever the bytes lead to
        # Without torch's error: its text advises to switch safe loading off.
        raise CheckpointError(
            f"{name} is damaged or no checkpoint at all: {refusal(error)}"
        ) from None


def refusal(error: Exception) -> str:
    """Why safe loading refused a file, without torch's advice to load it unsafely."""
    text = str(error)
    asked = re.search(r"GLOBAL ([\w.]+)", text)
    if asked is not None:
        return f"it asks for {asked[1]}, which safe loading does not run"
    if "weights_only" in text or "Weights only" in text:
        return "it holds something else than numbers, strings, tensors and containers of them"
    return text.partition("\n")[0] or type(error).__name__


def checked_tensor(where: Path | str, told: Any, field: str, setter: Callable[[Any], Any]) -> None:
    """Compare `told[field]`, the state of a random generator, by giving it to a spare one."""
    state = need(where, told, field, torch.Tensor, "the state of a random generator")
    try:
        setter(state.cpu())
    except (RuntimeError, TypeError) as error:
        raise CheckpointError(
            f"{where} is damaged: its field {field!r} is no state of a random generator"
        ) from error


def _kind(x: Any) -> str:
    return "number " + repr(x) if isinstance(x, int | float) else type(x).__name__
