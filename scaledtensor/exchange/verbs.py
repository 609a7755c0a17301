"""save, load and load_into: models of quantised weights in the files of other libraries."""

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from scaledtensor.checkpoint.files import check_writable
from scaledtensor.checkpoint.fit import matched, put, tensors_of
from scaledtensor.errors import CheckpointError, QuantizationError, UnsupportedError
from scaledtensor.exchange import compressed_tensors, fine_grained, folders, gguf, modelopt, torchao
from scaledtensor.exchange.inputs import measured_inputs
from scaledtensor.exchange.layouts import Layout, parts_of_weight, weight_of_parts
from scaledtensor.exchange.table import family_of, layout_for, rows
from scaledtensor.quantization.configs import Config
from scaledtensor.quantization.tensor import QuantizedTensor
from scaledtensor.quantization.verb import place
from scaledtensor.tensors.shards import is_dtensor
from scaledtensor.tensors.wrapper import Wrapper

__all__ = ["METHODS", "load", "load_into", "reader_of", "save", "serialized_names"]

#: quant_method -> the module that reads and writes its entry of config.json.
METHODS: dict[str, Any] = {
    m.METHOD: m for m in (compressed_tensors, fine_grained, modelopt, torchao)
}
METHODS["modelopt_fp4"] = modelopt  # the name of files of 2025

_KEPT = {nn.Linear: "Linear", nn.Embedding: "Embedding"}


def save(
    source: nn.Module | Mapping[str, Tensor],
    path: str | Path,
    format: str = "compressed-tensors",
    *,
    calibration: Iterable[Any] | None = None,
) -> None:
    """Write a model of quantised weights as another library does.

    Weights that `quantize_` converted are written in the layout of their config. All other tensors
    are written as they are, tied ones once.

    Args:
        source: a model, or tensors by name. The folder of a model of transformers has its whole
            config.json, so that transformers and servers open it.
        path: the folder; for GGUF the file.
        format: a name of `FORMATS`.
        calibration: batches as `quantize_` takes them, for weights of `Dynamic("nvfp4")`. Their
            files keep a scale of the inputs, which `save` then measures.

    Raises:
        QuantizationError: the batches reach no such weight, or show no finite inputs.
        UnsupportedError: the format is unknown, or it has no place for a weight. Nothing is
            written then.
        CheckpointError: the source has no quantised weight, a shard of a tensor, or something else
            than tensors; or a file cannot be written.
    """
    family, path = family_of(format), Path(path)
    state = _state_of(source)
    layouts = {
        name: layout_for(family, x.config, name)
        for name, x in state.items()
        if isinstance(x, QuantizedTensor)
    }
    if not layouts:
        raise CheckpointError(
            "the model has no quantised weight: quantize_(model, config) comes before save"
        )
    if calibration is not None:
        state |= _calibrated(source, state, layouts, calibration)
    if family.name == gguf.METHOD:
        if path.suffix != ".gguf":
            raise CheckpointError(f"{path} is to be a file of GGUF: give it a name with .gguf")
        check_writable(path)
        gguf.save({name: (layouts.get(name), x) for name, x in state.items()}, path)
        return
    folders.check_names(source, state)
    tensors: dict[str, Tensor] = {}
    for name, x in state.items():
        if not isinstance(x, QuantizedTensor):
            tensors[name] = x
            continue
        module, _, own = name.rpartition(".")
        if own != "weight":
            raise UnsupportedError(
                f"{name} is quantised, and files of {family.library} have quantised parameters "
                "with the name 'weight' alone: leave its module out of quantize_"
            )
        parts = parts_of_weight(layouts[name], x, name)
        if family.name == torchao.METHOD:
            parts |= torchao.extra_parts(layouts[name], x)
        tensors |= {f"{module}.{part}" if module else part: t for part, t in parts.items()}
    kinds = _kinds_of(source, state)
    found = {_module(name): (layouts[name], state[name].config) for name in layouts}  # type: ignore[attr-defined]
    left = [name for name in kinds if name not in found]
    told = METHODS[family.method].entry(found, kinds, left)
    metadata = torchao.metadata(state, layouts) if family.name == torchao.METHOD else {}
    config = folders.config_of_model(source)
    folders.write(path, tensors, metadata, config, told)
    folders.config_of_model(source, path)


def _calibrated(
    source: nn.Module | Mapping[str, Tensor],
    state: Mapping[str, Tensor],
    layouts: Mapping[str, Layout],
    calibration: Iterable[Any],
) -> Mapping[str, Tensor]:
    wanting = [
        name
        for name, layout in layouts.items()
        if layout.input_scale and getattr(state[name], "input_scale", None) is None
    ]
    if not wanting or not isinstance(source, nn.Module):
        raise QuantizationError(
            "calibration is for a model with weights whose file keeps a scale of inputs that they "
            'do not have, such as Dynamic("nvfp4")'
        )
    return measured_inputs(source, wanting, calibration)


def _module(name: str) -> str:
    return name.rpartition(".")[0]


def _state_of(source: nn.Module | Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors to write, by name: quantised ones, and plain ones of all others."""
    given = tensors_of(source) if isinstance(source, nn.Module) else dict(source)
    found: dict[str, Tensor] = {}
    first: dict[int, str] = {}
    for name, x in given.items():
        if not isinstance(x, Tensor):
            raise CheckpointError(f"files hold tensors; {name} is a {type(x).__name__}")
        if is_dtensor(x):
            raise CheckpointError(
                f"{name} is a shard of a tensor: gather the model on one process to export it"
            )
        same = first.setdefault(id(x), name)
        if same != name and isinstance(x, QuantizedTensor):
            raise UnsupportedError(
                f"{name} and {same} are one quantised weight, which other libraries do not tie: "
                "leave it out of quantize_"
            )
        if same == name:
            quantised = isinstance(x, QuantizedTensor)
            found[name] = x.detach() if quantised or not isinstance(x, Wrapper) else x.dequantize()
    return found


def _kinds_of(
    source: nn.Module | Mapping[str, Tensor], state: Mapping[str, Tensor]
) -> dict[str, str | None]:
    """The class of each module that has a weight which a file may quantise; None if it is
    unknown.

    Raises:
        UnsupportedError: a quantised weight is in a module of another class.
    """
    if not isinstance(source, nn.Module):
        matrices = (name for name, x in state.items() if name.endswith("weight") and x.dim() == 2)
        return {_module(name): None for name in matrices}
    found: dict[str, str | None] = {}
    for name, module in source.named_modules():
        kind = next((k for cls, k in _KEPT.items() if isinstance(module, cls)), None)
        if kind is not None:
            found[name] = kind
        elif isinstance(module._parameters.get("weight"), QuantizedTensor):
            raise UnsupportedError(
                f"{name} is a {type(module).__name__}, and files of other libraries have quantised "
                "weights of nn.Linear and nn.Embedding alone: leave it out of quantize_"
            )
    return found


# --- reading ---------------------------------------------------------------------------------


def load(path: str | Path, *, device: str | torch.device = "cpu") -> dict[str, Tensor]:
    """Return the tensors of a checkpoint of another library by name.

    Args:
        path: a folder with config.json and safetensors files, a safetensors file of torchao, or a
            file that ends in .gguf.
        device: the device of the tensors.

    Returns:
        A `QuantizedTensor` for each quantised weight, whose `config` says what the file says, and
        all other tensors as they are.

    Raises:
        CheckpointError: a file is missing or damaged, or a scale is missing, has another shape or
            dtype, or is NaN. The message names the file and the tensor.
        UnsupportedError: the file has a scheme that no layout of `FORMATS` covers.
    """
    return _load(Path(path), torch.device(device), {})


def _load(path: Path, device: torch.device, kinds: Mapping[str, str | None]) -> dict[str, Tensor]:
    if path.suffix == ".gguf":
        return {name: x.to(device) for name, x in gguf.load(path).items()}
    folder = folders.read(path, device)
    weight = reader_of(path, folder.where, folder.told, folder.metadata)
    found: dict[str, Tensor] = {}
    for module, parts in _by_module(folder.tensors).items():
        left = parts
        if _is_quantised(parts):
            own = {leaf: x for leaf, x in parts.items() if leaf in _OWN}
            found[_joined(module, "weight")] = weight(module, kinds.get(module), own, folder.dtype)
            left = {leaf: x for leaf, x in parts.items() if leaf not in _OWN}
        found |= {_joined(module, leaf): x for leaf, x in left.items()}
    if folder.metadata and "tensor_names" in folder.metadata:
        _check_complete(path, folder.metadata, found)
    return found


#: Makes the weight of a module from the module's name, the name of its class if it is known, its
#: tensors by their names in the module, and the dtype of the weight.
Reader = Callable[[str, str | None, Mapping[str, Tensor], torch.dtype], Tensor]


def reader_of(
    path: Path, where: str, told: Mapping[str, Any] | None, metadata: Mapping[str, str]
) -> Reader:
    """How the weights of a folder are read.

    Args:
        path: the folder.
        where: the file and the entry that say how weights are written.
        told: this entry; None if there is none.
        metadata: the metadata of the safetensors files.

    Raises:
        CheckpointError: the entry is damaged.
        UnsupportedError: there is none, or it is of a method or a scheme that no layout covers.
    """
    method = str((told or {}).get("quant_method") or "")
    if method == torchao.METHOD or (told is None and "tensor_names" in metadata):
        described = torchao.described(str(path), metadata)
        return partial(_weight_of_torchao, path, described)
    if told is None or method not in METHODS:
        has = f"has the quant_method {method!r}" if method else f"has no {folders.ENTRY}"
        raise UnsupportedError(
            f"{path} {has}; known are {', '.join(METHODS)} and files of GGUF. "
            "checkpoint.load_safetensors reads a plain checkpoint"
        )
    module = METHODS[method]
    return partial(_weight_of, path, where, module.FOREIGN, module.scheme_reader(where, told))


def _weight_of(
    path: Path,
    told_by: str,
    foreign: Mapping[str, str],
    scheme: Callable[[str, str | None], tuple[Layout, Config] | None],
    module: str,
    kind: str | None,
    parts: Mapping[str, Tensor],
    dtype: torch.dtype,
) -> Tensor:
    """The weight of one module, quantised or plain."""
    where = f"{module} of {path}"
    if not _is_quantised(parts):
        return parts["weight"].to(dtype)
    for leaf, meaning in foreign.items():
        if leaf in parts:
            raise UnsupportedError(f"{where} has {leaf}, {meaning}: not supported")
    chosen = scheme(module, kind)
    if chosen is None:
        raise CheckpointError(
            f"{where} has {', '.join(sorted(parts))}, and {told_by} does not say that this module "
            "is quantised"
        )
    layout, config = chosen
    if strange := sorted(parts.keys() - {*layout.names, layout.input_scale}):
        raise CheckpointError(
            f"{where} has {', '.join(strange)}, for which weights of {layout.name} have no place"
        )
    return weight_of_parts(layout, config, parts, where, dtype)


def _weight_of_torchao(
    path: Path,
    described: Mapping[str, torchao.Described],
    module: str,
    kind: str | None,
    parts: Mapping[str, Tensor],
    dtype: torch.dtype,
) -> Tensor:
    name = _joined(module, "weight")
    where = f"{name} of {path}"
    if not _is_quantised(parts):
        return parts["weight"].to(dtype)
    if name not in described:
        raise CheckpointError(f"{where} has {', '.join(sorted(parts))}, and no metadata of them")
    layout, config, own = torchao.config_of(where, described[name], parts)
    return weight_of_parts(layout, config, parts, where, own)


def _check_complete(path: Path, metadata: Mapping[str, str], found: Mapping[str, Tensor]) -> None:
    for name in torchao.described(str(path), metadata):
        if name not in found:
            raise CheckpointError(f"{path} is damaged: {name} is missing")


#: The names of all tensors that only quantised weights have.
_VOCABULARY = {
    leaf
    for _, layout in rows()
    for leaf in (layout.codes, layout.scale, layout.tensor_scale, layout.input_scale, layout.size)
} - {"", "weight"}
#: The names of tensors that no layout covers.
_STRANGERS = {leaf for module in METHODS.values() for leaf in module.FOREIGN}
_OWN = {"weight"} | _VOCABULARY | _STRANGERS

_SHORT = (torch.int8, torch.uint8, torch.float8_e4m3fn, torch.float8_e5m2)


def serialized_names() -> list[str]:
    """The names, relative to a module, of all tensors of quantised weights."""
    return sorted(_OWN)


def _is_quantised(parts: Mapping[str, Tensor]) -> bool:
    short = "weight" in parts and parts["weight"].dtype in _SHORT
    return short or not _VOCABULARY.isdisjoint(parts)


def _by_module(tensors: Mapping[str, Tensor]) -> dict[str, dict[str, Tensor]]:
    found: dict[str, dict[str, Tensor]] = {}
    for name, x in tensors.items():
        module, _, leaf = name.rpartition(".")
        found.setdefault(module, {})[leaf] = x
    return found


def _joined(module: str, leaf: str) -> str:
    return f"{module}.{leaf}" if module else leaf


def load_into(model: nn.Module, path: str | Path) -> None:
    """Put a checkpoint of another library into a plain model. Its quantised weights become
    `QuantizedTensor` parameters, as `quantize_` makes them.

    Everything is read and compared before the model is changed.

    Args:
        model: a plain module with the names of the checkpoint.
        path: as `load` takes it.

    Raises:
        CheckpointError, UnsupportedError: as `load`; or a name is missing or unknown, or a tensor
            has another shape. The model is then unchanged.
    """
    kinds = {
        name: next((k for c, k in _KEPT.items() if isinstance(m, c)), type(m).__name__)
        for name, m in model.named_modules()
    }
    tensors = _load(Path(path), torch.device("cpu"), kinds)
    put_into(model, tensors, str(path))


def put_into(model: nn.Module, tensors: Mapping[str, Tensor], where: str) -> None:
    """Put tensors that `load` returned into a plain model. `where` names them in messages."""
    targets = tensors_of(model)
    for name, x in targets.items():
        if isinstance(x, Wrapper) or is_dtensor(x) or x.is_meta:
            raise CheckpointError(
                f"{name} of the model is no plain tensor with data: make the model anew, on one "
                "process, and load into it before anything else"
            )
    pairs = matched(where, targets, tensors)
    made: dict[int, QuantizedTensor] = {}
    for name, (target, source) in pairs.items():
        if isinstance(source, QuantizedTensor):
            if not isinstance(target, nn.Parameter):
                raise CheckpointError(f"{name} of the model is no parameter, and {where} has codes")
            moved: Any = source.to(device=target.device, dtype=target.dtype)
            made[id(target)] = moved
    for target, source in pairs.values():
        if id(target) not in made:
            put(target, source)
    place(model, made)
