"""Folders of safetensors files with a config.json, as the Hugging Face hub has them."""

import json
import sys
from collections.abc import Iterable, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from scaledtensor.checkpoint.files import check_writable, reason, replacing
from scaledtensor.checkpoint.safetensors import files_of, library, read_file
from scaledtensor.errors import CheckpointError, UnsupportedError
from scaledtensor.exchange import modelopt
from scaledtensor.tensors.codec import dtype_name
from scaledtensor.tensors.storable import APPEARANCES

__all__ = ["ENTRY", "Folder", "check_names", "config_of_model", "read", "told_of", "write"]

_CONFIG, _WEIGHTS, _INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"
ENTRY = "quantization_config"


class Folder(NamedTuple):
    """The contents of a folder."""

    tensors: dict[str, Tensor]
    metadata: dict[str, str]
    """The metadata of all its safetensors files."""
    where: str
    """The file and the entry that say how weights are written, for messages."""
    told: dict[str, Any] | None
    """This entry; None if there is none."""
    dtype: torch.dtype
    """The dtype of the model, by config.json."""


def read(path: Path, device: torch.device) -> Folder:
    """Read the files of a folder, or one safetensors file and the config beside it.

    Raises:
        CheckpointError: a file is missing or damaged.
    """
    tensors: dict[str, Tensor] = {}
    metadata: dict[str, str] = {}
    for file in files_of(path):
        found, own = read_file(file, device)
        tensors |= found
        metadata |= own
    folder = path if path.is_dir() else path.parent
    where, told = told_of(folder)
    config = _read_json(folder / _CONFIG) or {}
    return Folder(tensors, metadata, where, told, _dtype(config, folder / _CONFIG))


def told_of(folder: Path) -> tuple[str, dict[str, Any] | None]:
    """The entry that says how weights are written, after its file and name; None if there is none.

    Raises:
        CheckpointError: a file is damaged.
    """
    config, second = folder / _CONFIG, folder / modelopt.FILE
    where, told = f"{ENTRY} of {config}", (_read_json(config) or {}).get(ENTRY)
    if told is None and second.exists():
        where, told = str(second), {"quant_method": modelopt.METHOD, **(_read_json(second) or {})}
    if told is not None and not isinstance(told, dict):
        raise CheckpointError(f"{where} is damaged: it is no table of fields")
    return where, told


def _read_json(file: Path) -> dict[str, Any] | None:
    if not file.exists():
        return None
    try:
        told = json.loads(file.read_text())
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{file} is damaged or no JSON: {error}") from error
    if not isinstance(told, dict):
        raise CheckpointError(f"{file} is damaged: it holds no table of fields")
    return told


def _dtype(config: Mapping[str, Any], file: Path) -> torch.dtype:
    inner = config.get("text_config")
    tables = [config, inner] if isinstance(inner, dict) else [config]
    told = [table.get(key) for table in tables for key in ("dtype", "torch_dtype")]
    name = next((t for t in told if t is not None), "float32")
    found: Any = getattr(torch, str(name).removeprefix("torch."), None)
    if found not in APPEARANCES:
        raise CheckpointError(f"{file} is damaged: it says dtype {name!r}")
    return cast(torch.dtype, found)


# --- writing ---------------------------------------------------------------------------------


def write(
    folder: Path,
    tensors: Mapping[str, Tensor],
    metadata: Mapping[str, str],
    config: Mapping[str, Any],
    told: dict[str, Any],
) -> None:
    """Write a folder: weights first, and then the config that says how to read them.

    Raises:
        CheckpointError: a file cannot be written, or the folder holds a checkpoint of several
            files, which readers would take in place of the new one.
    """
    if folder.exists() and not folder.is_dir():
        raise CheckpointError(f"{folder} is a file; a checkpoint is a folder")
    check_writable(folder)
    if (folder / _INDEX).exists():
        raise CheckpointError(
            f"{folder} has {_INDEX} of another checkpoint, which readers take first: choose an "
            "empty folder"
        )
    folder.mkdir(exist_ok=True)
    held = {name: x.detach().contiguous() for name, x in tensors.items()}
    with replacing(folder / _WEIGHTS) as temporary:
        try:
            library().torch.save_file(held, temporary, {"format": "pt", **metadata})
        except library().SafetensorError as error:
            raise CheckpointError(f"{folder} could not be saved: {reason(error)}") from error
    _write_json(folder / _CONFIG, {**config, ENTRY: told})
    second = folder / modelopt.FILE
    if told["quant_method"] == modelopt.METHOD:
        _write_json(second, modelopt.second_file(told))
    else:
        second.unlink(missing_ok=True)


def _write_json(file: Path, told: Mapping[str, Any]) -> None:
    with replacing(file) as temporary:
        temporary.write_text(json.dumps(told, indent=2) + "\n")


def check_names(source: Any, names: Iterable[str]) -> None:
    """Check that a model of transformers has the names that its checkpoints have.

    Raises:
        UnsupportedError: transformers renames or merges some of these tensors while it loads them,
            as it merges the experts of a layer. Servers would look for other names.
    """
    if not _is_of_transformers(source):
        return
    loading = import_module("transformers.core_model_loading")
    mapping = import_module("transformers.conversion_mapping").get_model_conversion_mapping
    # A change of prefix is for checkpoints that were loaded, as in `revert_weight_conversion`.
    transforms = [
        t.reverse_transform()
        for t in reversed(mapping(source, add_legacy=False))
        if not isinstance(t, loading.PrefixChange)
    ]
    converters = [t for t in transforms if isinstance(t, loading.WeightConverter)]
    renamings = [t for t in transforms if isinstance(t, loading.WeightRenaming)]
    for name in names:
        _, converted = loading.apply_converters(name, converters)
        if converted is not None or loading.apply_renamings(name, renamings) != name:
            raise UnsupportedError(
                f"checkpoints of {type(source).__name__} have {name} under other names, or in "
                "pieces: transformers converts it while it loads. Such a model is exported to GGUF "
                "alone, under its own names"
            )


def _is_of_transformers(source: Any) -> bool:
    transformers = sys.modules.get("transformers")
    return transformers is not None and isinstance(source, transformers.PreTrainedModel)


def config_of_model(source: Any, folder: Path | None = None) -> dict[str, Any]:
    """The fields of config.json of a model of transformers; of any other model, its dtype; none for
    tensors by name.

    With a folder, the generation config of a model of transformers is written there.
    """
    if not isinstance(source, nn.Module):
        return {}
    dtype = dtype_name(next((p.dtype for p in source.parameters()), torch.float32))
    if not _is_of_transformers(source):
        return {"dtype": dtype}
    model: Any = source
    told: dict[str, Any] = json.loads(model.config.to_json_string(use_diff=True))
    told.pop(ENTRY, None)
    if folder is not None and getattr(model, "generation_config", None) is not None:
        model.generation_config.save_pretrained(folder)
    return told | {"architectures": [type(model).__name__], "dtype": dtype}
