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
from torch import Tensor, nn
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from scaledtensor.checkpoint import shards
from scaledtensor.checkpoint.codec import check_name
from scaledtensor.checkpoint.fit import matched, put, tensors_of
from scaledtensor.checkpoint.pieces import Assembly
from scaledtensor.checkpoint.shards import Reading, imagined
from scaledtensor.errors import CheckpointError

__all__ = ["Plan", "TensorReader"]


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


# What a rank reads of a checkpoint, into what, and where it goes from there.
class Plan:
    """Made only if all of the checkpoint fits; nothing is changed before `apply`."""

    def __init__(
        self,
        path: Path,
        told: dict[str, Any],
        objects: dict[str, Any],
        model: nn.Module,
        optimizer: Optimizer | None,
        rank: int,
    ) -> None:
        self.rank = rank
        self.reads: dict[str, Tensor] = {}
        self.readings: dict[str, Reading | Assembly] = {}
        self.values: dict[str, dict[str, Any]] = {}
        targets = tensors_of(model)
        sources = {name: imagined(name, facts) for name, facts in told["model"].items()}
        sources |= {name: sources[same] for name, same in told["tied"].items()}
        self.pairs = [
            (target, f"model.{told['tied'].get(name, name)}")
            for name, (target, _) in matched(path, targets, sources).items()
        ]
        for target, source in self.pairs:
            self._read(source, told["model"][source.removeprefix("model.")], target)
        self.states: list[tuple[Tensor, str, str, Tensor]] = []
        self.optimizer, self.restore = optimizer, None  # type: Any, Any
        if optimizer is not None:
            if told["optimizer"] is None:
                raise CheckpointError(f"{path} was saved without an optimizer")
            self.restore = shards.restore(path, model, optimizer, objects["groups"])
            self._plan_states(told, objects, model, optimizer, sources)

    def _plan_states(
        self,
        told: dict[str, Any],
        objects: dict[str, Any],
        model: nn.Module,
        optimizer: Optimizer,
        sources: dict[str, Tensor],
    ) -> None:
        parameters = shards.named_parameters(model)
        own = {id(p) for group in optimizer.param_groups for p in group["params"]}
        for name, p in parameters.items():
            if id(p) not in own:
                continue
            self.values[name] = dict(objects["values"].get(name, {}))
            for key, facts in told["optimizer"].get(name, {}).items():
                present = optimizer.state[p].get(key) if p in optimizer.state else None
                like = shards.template(p, present, key, tuple(facts["shape"]))
                self._read(f"optimizer.{name}.{key}", facts, like)
                self.states.append((p, name, key, sources[name]))

    def _read(self, name: str, facts: dict[str, Any], like: Tensor | None) -> None:
        if name not in self.readings:
            cut = name[0] == "o" and isinstance(like, DTensor) and "granularity" in facts
            kind = Assembly if cut or "pieces" in facts else Reading
            self.readings[name] = kind(name, facts, like, self.rank)
            self.reads |= self.readings[name].blanks()

    def rebuild(self) -> None:
        """All that was read, as it goes into its place; nothing has changed yet."""
        self.found = {name: of.build(self.reads) for name, of in self.readings.items()}
        self.reads = {}
        for p, name, key, saved in self.states:
            found = self.found.pop(f"optimizer.{name}.{key}")
            self.values[name][key] = shards.as_parameter(self.optimizer, p, found, saved)

    def apply(self) -> None:
        if self.restore is not None:
            self.restore({name: own for name, own in self.values.items() if own})
        for target, source in self.pairs:
            put(target, self.found[source])
