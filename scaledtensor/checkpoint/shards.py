"""Tensors, whole or sharded, as the plain tensors that `torch.distributed.checkpoint` moves."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from scaledtensor.checkpoint.fit import local, of_local
from scaledtensor.checkpoint.levels import as_it_was
from scaledtensor.checkpoint.parts import (
    dtype_of,
    facts_of,
    inner_names,
    inner_of,
    put_together,
    spelled_dtype,
)
from scaledtensor.coded import CodedTensor
from scaledtensor.errors import CheckpointError, UnsupportedError
from scaledtensor.tensor import ScaledTensor

__all__ = ["apart", "blank", "described", "imagined", "parts", "rebuilt"]


def apart(state: Mapping[str, Any]) -> dict[str, Any]:
    """A state dict with `name.qdata`, `name.scale`, ... in place of each ScaledTensor `name`.

    They are the tensors' own memory: what `torch.distributed.checkpoint.load` reads into them is
    read into the model, bit for bit, on any number of ranks and from any storage. Both sides must
    have the same formats; `save` and `load` of this module ask for less, and check more.

    Args:
        state: tensors and DTensors by name, in dicts of dicts; anything else passes.

    Raises:
        UnsupportedError: a shard of codes under scales of blocks.
    """
    found: dict[str, Any] = {}
    for name, x in state.items():
        if isinstance(x, Mapping):
            found[name] = apart(x)
        elif isinstance(x, Tensor):
            found |= parts(name, x)
        else:
            found[name] = x
    return found


def parts(name: str, x: Tensor) -> dict[str, Tensor]:
    """The plain tensors and DTensors of `x`, by name: its own memory."""
    held = local(x)
    if not isinstance(held, ScaledTensor):
        return {name: x.detach()}
    inner = inner_of(held)
    if isinstance(x, DTensor):
        _check_divisible(name, held)
        inner["qdata"] = of_local(inner["qdata"], x)
    return {f"{name}.{part}": t for part, t in inner.items()}


def described(x: Tensor) -> dict[str, Any]:
    """What JSON says of the whole of `x`: the facts of a ScaledTensor, and of each plain tensor."""
    held = local(x)
    if not isinstance(held, ScaledTensor):
        return _plain_facts(x)
    inner: dict[str, Tensor] = inner_of(held)
    told = {part: _plain_facts(t) for part, t in inner.items()}
    if not isinstance(x, DTensor):
        return facts_of(held) | {"parts": told}
    told["qdata"]["shape"] = list(x.shape)
    facts = facts_of(held) | {"shape": list(x.shape), "parts": told, "cut": layout(x)}
    facts.pop("nonnegative", None)  # one of the levels, which ranks may have of their own
    return facts


def imagined(name: str, facts: dict[str, Any]) -> Tensor:
    """The tensor that was described, on the meta device: shape, dtype, format and no numbers."""
    if "kind" not in facts:
        return _empty(facts, torch.device("meta"))
    inner = {part: _empty(told, torch.device("meta")) for part, told in facts["parts"].items()}
    return put_together(name, inner, facts)


def blank(name: str, facts: dict[str, Any], like: Tensor | None) -> dict[str, Tensor]:
    """Tensors to read the described one into, laid out as `like`, or whole."""
    device = torch.device("cpu") if like is None else like.device
    cut = like if isinstance(like, DTensor) and tuple(like.shape) == tuple(facts["shape"]) else None
    if "kind" not in facts:
        return {name: _cut(facts, cut, device)}
    found = {}
    for part in inner_names(facts):
        whole = part != "qdata" or _is_coded(facts)
        found[f"{name}.{part}"] = _cut(facts["parts"][part], None if whole else cut, device)
    return found


def rebuilt(name: str, facts: dict[str, Any], read: Mapping[str, Tensor], rank: int) -> Tensor:
    """The described tensor, or this rank's shard of it in a DTensor, of the tensors of `blank`."""
    if "kind" not in facts:
        return read[name]
    inner = {part: read[f"{name}.{part}"] for part in inner_names(facts)}
    qdata = inner["qdata"]
    if not isinstance(qdata, DTensor):
        return put_together(name, inner, facts)
    own = qdata.to_local()
    made = put_together(name, inner | {"qdata": own}, facts | {"shape": list(own.shape)})
    own_level = facts.get("levels", {}).get(str(rank))
    if own_level is not None and facts["cut"] == layout(qdata):
        as_it_was(made, own_level)
    return of_local(made, qdata)


def layout(x: DTensor) -> str:
    """How `x` is cut: equal where each rank has the same part."""
    return f"{x.placements} on {x.device_mesh.mesh.tolist()}"


def _check_divisible(name: str, held: ScaledTensor) -> None:
    if isinstance(held, CodedTensor):
        raise UnsupportedError(
            f"{name} is a shard of a {type(held).__name__}, whose scales are those of blocks of "
            "this shard and would not fit another cut: keep it whole, or widen it first"
        )


def _is_coded(facts: dict[str, Any]) -> bool:
    return "granularity" in facts


def _plain_facts(x: Tensor) -> dict[str, Any]:
    return {"shape": list(x.shape), "dtype": spelled_dtype(x.dtype)}


def _empty(facts: dict[str, Any], device: torch.device) -> Tensor:
    return torch.empty(facts["shape"], dtype=dtype_of(facts["dtype"]), device=device)


def _cut(facts: dict[str, Any], like: DTensor | None, device: torch.device) -> Tensor:
    if like is None:
        return _empty(facts, device)
    own = _empty(facts | {"shape": list(local(like).shape)}, device)
    if tuple(like.shape) != tuple(facts["shape"]):
        raise CheckpointError(f"shape {facts['shape']} cannot be cut as {tuple(like.shape)}")
    return of_local(own, like)
