"""Folders that `scaledtensor.exchange` reads, as `from_pretrained` of transformers loads them.

transformers gives the tensors of one module, by their names in the folder, to an operation
(`JoinForeign`), which makes the weight of them.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor
from transformers.core_model_loading import ConversionOps

from scaledtensor.errors import CheckpointError
from scaledtensor.exchange.folders import told_of
from scaledtensor.exchange.verbs import METHODS, reader_of, serialized_names

__all__ = ["Foreign", "JoinForeign", "dtype_of", "foreign_files", "is_foreign"]


@dataclass(frozen=True)
class Foreign:
    """How the files of a folder are read.

    Attributes:
        where: the file and the entry that say how weights are written.
        names: the names, relative to a module, of all tensors of quantised weights.
        weight: makes the weight of a module: from the module's name, the name of its class, its
            tensors by name, and the dtype of the weight.
    """

    where: str
    names: list[str]
    weight: Callable[[str, str, Mapping[str, Tensor], torch.dtype], Tensor]


def is_foreign(told: Any) -> bool:
    """Whether an entry `quantization_config` is of a method that `exchange` reads."""
    method = told.get("quant_method") if isinstance(told, dict) else None
    return str(getattr(method, "value", method)) in METHODS


def foreign_files(files: Sequence[str]) -> Foreign | None:
    """How the files of a checkpoint are read; None if they are not files of `exchange`."""
    first = Path(files[0]) if files else None
    if first is None or first.suffix != ".safetensors":
        return None
    where, told = told_of(first.parent)
    if not is_foreign(told):
        return None
    metadata: dict[str, str] = {}
    for file in files:
        with safe_open(file, framework="pt") as held:
            metadata |= held.metadata() or {}
    weight = reader_of(first.parent, where, told, metadata)
    return Foreign(where, serialized_names(), weight)


def dtype_of(model: Any, name: str) -> torch.dtype:
    """The dtype in which transformers loads a plain weight of this name: `from_pretrained(dtype=)`,
    or float32 in modules that the model keeps in float32."""
    dtype: torch.dtype = model.get_parameter(name).dtype
    for pattern, kept in model._get_dtype_plan(dtype).items():
        if re.search(pattern.replace("*", ".*"), name):
            dtype = kept
    return dtype


class JoinForeign(ConversionOps):  # type: ignore[misc]
    """Makes a quantised weight of its tensors in a folder of another library."""

    def __init__(self, hf_quantizer: Any) -> None:
        # An attribute of this name tells transformers not to cast the tensors.
        self.hf_quantizer = hf_quantizer

    def convert(
        self,
        input_dict: dict[str, Any],
        *args: Any,
        full_layer_name: str,
        model: Any,
        **kwargs: Any,
    ) -> dict[str, Tensor]:
        foreign: Foreign = self.hf_quantizer.foreign
        parts = {n: x[0] if isinstance(x, list) else x for n, x in input_dict.items()}
        module = full_layer_name.rpartition(".")[0]
        owner = model.get_submodule(module)
        dtype = dtype_of(model, f"{module}.weight")
        made = foreign.weight(module, type(owner).__name__, parts, dtype)
        if made.shape != owner.weight.shape:
            raise CheckpointError(
                f"{full_layer_name} has shape {tuple(made.shape)} in the folder of "
                f"{foreign.where}, and {tuple(owner.weight.shape)} in the model"
            )
        return {full_layer_name: made}
