"""Safetensors files: a ScaledTensor is `name.qdata`, `name.scale`, ..., its facts are metadata.

Other libraries write a ScaledTensor with `name.facts` in place of metadata (`models.state_dicts`);
`load_safetensors` reads both.
"""

import importlib
import json
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from scaledtensor.checkpoint.files import (
    as_damage,
    check_name,
    check_writable,
    need,
    reason,
    replacing,
)
from scaledtensor.checkpoint.fit import tensors_of
from scaledtensor.errors import CheckpointError
from scaledtensor.models.state_dicts import FACTS, assembled
from scaledtensor.tensors.codec import (
    dtype_from_name,
    dtype_name,
    facts_of,
    part_names,
    parts_of,
    prefixed,
    rebuilt,
)
from scaledtensor.tensors.wrapper import is_wrapper

__all__ = ["files_of", "library", "load_safetensors", "read_file", "save_safetensors"]

#: The entry of a file's metadata that this library writes.
KEY = "scaledtensor"
VERSION = 1

#: These dtypes have no name in safetensors, so their tensors are written as bytes.
_NAMELESS = (torch.float8_e8m0fnu,)


def save_safetensors(
    source: nn.Module | Mapping[str, Tensor], path: str | Path, *, dequantized: bool = False
) -> None:
    """Write a model, or its state dict, to a safetensors file, whole or not at all.

    A ScaledTensor is written as its inner tensors: `name.qdata`, `name.scale`, `name.rms` and, for
    codes under two levels of scales, `name.tensor_scale`. Its format, recipe and other attributes
    are in the metadata, under "scaledtensor". Tied tensors are written once.

    Args:
        source: a module, or tensors by name.
        path: the path of the file, in a folder that exists. An older file stays until the new one
            is complete.
        dequantized: writes plain values instead, which any library reads.

    Raises:
        CheckpointError: the file cannot be written; or the source has a shard of a tensor, or
            something else than tensors.
        RecipeError: a recipe of a class that is not registered.
    """
    path = Path(path)
    state = tensors_of(source) if isinstance(source, nn.Module) else dict(source)
    _check_whole(state)
    if path.is_dir():
        raise CheckpointError(f"{path} is a directory; safetensors are one file")
    check_writable(path)
    tensors: dict[str, Tensor] = {}
    described: dict[str, Any] = {}
    tied: dict[str, str] = {}
    first: dict[Any, str] = {}
    for name, x in state.items():
        same = first.setdefault(_identity(name, x), name)
        if same != name:
            tied[name] = same
        elif dequantized or not is_wrapper(x):
            plain = x.detach().dequantize() if is_wrapper(x) else x.detach()
            _add(tensors, name, plain)
        else:
            described[name] = facts_of(x)
            for part, t in prefixed(name, parts_of(x)).items():
                _add(tensors, part, t)
    held = {name: _writable(x) for name, x in tensors.items()}
    metadata = {"format": "pt"}
    if not dequantized:
        others = {n: dtype_name(x.dtype) for n, x in tensors.items() if x.dtype in _NAMELESS}
        sums = {name: _checksum(x) for name, x in held.items()}
        index = {"version": VERSION, "tensors": described, "tied": tied}
        metadata[KEY] = json.dumps(index | {"dtypes": others, "crc32": sums})
    with replacing(path) as temporary:
        try:
            library().torch.save_file(held, temporary, metadata)
        except library().SafetensorError as error:
            raise CheckpointError(f"{path} could not be saved: {reason(error)}") from error


def load_safetensors(
    path: str | Path, *, dequantized: bool = False, device: str | torch.device = "cpu"
) -> dict[str, Tensor]:
    """Return the tensors of a safetensors file by name; ScaledTensors as saved, bit for bit.

    Tied names share one tensor. `load_into(model, ...)` puts the tensors into a model.

    Args:
        path: a file that `save_safetensors` or any other library wrote, such as transformers by
            `save_pretrained`; or a folder with `model.safetensors`, or with the
            `model.safetensors.index.json` of several files.
        dequantized: returns plain tensors of the same values instead.
        device: the device of the tensors.

    Raises:
        CheckpointError: the file does not exist, is damaged, or is from a later release.
    """
    found: dict[str, Tensor] = {}
    for file in files_of(Path(path)):
        found |= _load(file, dequantized, torch.device(device))
    _check_described(path, found)
    whole = assembled(found)
    if dequantized:
        return {n: x.dequantize() if is_wrapper(x) else x for n, x in whole.items()}
    return whole


def files_of(path: Path) -> list[Path]:
    """Return the safetensors files of a checkpoint: one file, or the files of a folder.

    Raises:
        CheckpointError: there are none, or one that the folder's index names is missing.
    """
    if not path.is_dir():
        if not path.exists():
            raise CheckpointError(f"{path} does not exist")
        return [path]
    single, index = path / "model.safetensors", path / "model.safetensors.index.json"
    if not index.exists():
        if not single.exists():
            raise CheckpointError(f"{path} has neither {single.name} nor {index.name}")
        return [single]
    try:
        told = json.loads(index.read_text())
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{index} is damaged or no index: {error}") from error
    named = need(index, told, "weight_map", dict, "files by the names of tensors").values()
    for name in named:
        check_name(index, name)
    names = sorted(set(named))
    files = [path / name for name in names]
    missing = [file.name for file in files if not file.exists()]
    if missing:
        raise CheckpointError(f"{path} is incomplete: {', '.join(missing)} of its index is missing")
    return files


def read_file(path: Path, device: torch.device) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Return the tensors of one safetensors file by name, as they are, and its metadata.

    Raises:
        CheckpointError: the file is damaged.
    """
    try:
        with library().safe_open(path, framework="pt", device=str(device)) as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            return tensors, file.metadata() or {}
    except (OSError, library().SafetensorError) as error:
        raise CheckpointError(f"{path} is damaged or no safetensors file: {error}") from error


def _load(path: Path, dequantized: bool, device: torch.device) -> dict[str, Tensor]:
    tensors, metadata = read_file(path, device)
    if KEY not in metadata:
        return tensors
    try:
        index = json.loads(metadata[KEY])
        version = index["version"]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise CheckpointError(f"{path} is damaged: its metadata cannot be read") from error
    if version != VERSION:
        raise CheckpointError(f"{path} has version {version}; this release reads {VERSION}")
    for field in ("crc32", "dtypes", "tensors", "tied"):
        need(f"the metadata of {path}", index, field, dict, "a table by the names of tensors")
    for name, expected in index["crc32"].items():
        if name not in tensors:
            raise CheckpointError(f"{path} is damaged: {name} is missing")
        if _checksum(tensors[name]) != expected:
            raise CheckpointError(f"{path} is damaged: the checksum of {name} is wrong")
    for name, dtype in index["dtypes"].items():
        with as_damage(f"the metadata of {path}, dtypes[{name!r}],"):
            tensors[name] = tensors[name].view(dtype_from_name(dtype))
    for name, facts in index["tensors"].items():
        with as_damage(f"the metadata of {path}, tensors[{name!r}],"):
            present = [part for part in part_names(facts) if f"{name}.{part}" in tensors]
        parts = {part: tensors.pop(f"{name}.{part}") for part in present}
        made = rebuilt(f"{name} of {path}", parts, facts)
        tensors[name] = made.dequantize() if dequantized else made
    for name, same in index["tied"].items():
        with as_damage(f"the metadata of {path}, tied[{name!r}],"):
            tensors[name] = tensors[same]
    return tensors


def _check_described(path: str | Path, tensors: Mapping[str, Tensor]) -> None:
    """Raise CheckpointError if the parts of a tensor came without facts.

    All files are checked together: transformers divides a model into files by size, so the parts
    of one weight can be in two files.
    """
    owners = {name.removesuffix(".qdata") for name in tensors if name.endswith(".qdata")}
    lost = [n for n in owners if f"{n}.rms" in tensors and f"{n}.{FACTS}" not in tensors]
    if lost:
        raise CheckpointError(
            f"{path} is damaged: {min(lost)} is in parts, as a ScaledTensor is written, and "
            f"neither {KEY!r} in the metadata nor {min(lost)}.{FACTS} says what the parts are"
        )


def _check_whole(state: Mapping[str, Any]) -> None:
    for name, x in state.items():
        if isinstance(x, DTensor):
            raise CheckpointError(
                f"{name} is a shard of a tensor: save with scaledtensor.checkpoint.save, load that "
                "into a model of one process and write safetensors from there"
            )
        if not isinstance(x, Tensor):
            raise CheckpointError(f"safetensors hold tensors; {name} is a {type(x).__name__}")


def _identity(name: str, x: Tensor) -> Any:
    """Return a key that is equal for tensors with the same memory, shape and strides."""
    q = x.qdata if is_wrapper(x) else x
    if not q.numel() or q.is_meta:
        return name
    own = getattr(x, x.INNER[1]).data_ptr() if is_wrapper(x) else 0
    return (q.data_ptr(), own, q.dtype, tuple(q.shape), q.stride())


def _add(tensors: dict[str, Tensor], name: str, x: Tensor) -> None:
    if name in tensors:
        raise CheckpointError(f"two tensors would be called {name} in the file")
    tensors[name] = x


def _writable(x: Tensor) -> Tensor:
    """Return a copy of a part of a larger tensor, since safetensors refuses shared memory."""
    whole = x.is_contiguous() and x.untyped_storage().nbytes() == x.nbytes
    held = x if whole else x.clone(memory_format=torch.contiguous_format)
    return held.view(torch.uint8) if x.dtype in _NAMELESS else held


def _checksum(x: Tensor) -> int:
    raw = x.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return zlib.crc32(raw.numpy())  # type: ignore[arg-type]  # an array is a buffer


def library() -> Any:
    """Return the package of safetensors, with its module for torch.

    Raises:
        CheckpointError: it is not installed.
    """
    try:
        importlib.import_module("safetensors.torch")
        return importlib.import_module("safetensors")
    except ImportError as error:
        raise CheckpointError(
            "safetensors is not installed: pip install 'scaledtensor[safetensors]'"
        ) from error
