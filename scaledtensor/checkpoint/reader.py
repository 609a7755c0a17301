"""Reading `torch.distributed.checkpoint`'s files without running what may be in them.

Its own reader unpickles the file of metadata, and every entry that is no tensor, as Python does,
which runs whatever code the file asks for. A checkpoint of ours has tensors alone, and the metadata
of tensors is made of few classes.
"""

import importlib
import pickle
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from scaledtensor.checkpoint.fields import check_name
from scaledtensor.errors import CheckpointError

__all__ = ["TensorReader"]

#: Modules of which the metadata has classes, functions and enumerations.
_MODULES = ("torch.distributed.checkpoint.metadata", "torch.distributed.checkpoint.filesystem")
_OTHERS = {("torch", "Size"), ("torch.serialization", "_get_layout")}


class TensorReader(FileSystemReader):
    """Raises CheckpointError for metadata that is damaged, or of anything else than tensors."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        file = Path(self.path) / ".metadata"
        try:
            with file.open("rb") as stream:
                found = _Unpickler(stream).load()
        except CheckpointError:
            raise
        except Exception as error:  # pickle raises whatever the bytes lead to
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
