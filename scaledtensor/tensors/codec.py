"""Writes a ScaledTensor as plain tensors and facts, and rebuilds it from them, bit for bit.

Files of tensors and messages between ranks carry plain tensors only. A tensor `weight` is therefore
written as its parts: the inner tensors that it lists in `INNER`, under the names `weight.qdata`,
`weight.scale` and so on. Its format, its recipe and its other attributes are facts, a dict that
JSON can hold. Folders of checkpoints, safetensors files and state dicts all use this one codec.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import fields
from typing import Any, NamedTuple

import torch
from torch import Tensor

import scaledtensor.tensors.coded  # noqa: F401 - a class that files contain
from scaledtensor.errors import CheckpointError, ScaledTensorError
from scaledtensor.formats import FORMATS, Format, Specials
from scaledtensor.formats import get as get_format
from scaledtensor.recipes import Recipe
from scaledtensor.tensors.storable import appearance
from scaledtensor.tensors.wrapper import Wrapper

__all__ = [
    "Facts",
    "dtype_from_name",
    "dtype_name",
    "empty_like_facts",
    "facts_of",
    "facts_of_plain",
    "part_names",
    "parts_of",
    "prefixed",
    "rebuilt",
]

Facts = dict[str, Any]


def parts_of(x: Wrapper) -> dict[str, Tensor]:
    """Return the inner tensors of `x` by their names in `INNER`. They are not copied."""
    return {part: getattr(x, part).detach() for part in x.INNER}


def prefixed(name: str, parts: Mapping[str, Any]) -> dict[str, Any]:
    """Return the parts of the tensor `name` under their full names, such as `weight.qdata`."""
    return {f"{name}.{part}": x for part, x in parts.items()}


def facts_of(x: Wrapper) -> Facts:
    """Return all attributes of `x` that are no tensors, as JSON has them.

    Raises:
        RecipeError: the class of its recipe is not registered, so nothing could read the recipe.
    """
    found: Facts = {
        "kind": x.kind,
        "shape": list(x.shape),
        "format": _written_format(x.format),
        "dtype": dtype_name(x.dtype),
    }
    if x.recipe is not None:
        recipe = x.recipe if x.site is None else x.site.corrected(x.recipe)
        found["recipe"] = json.loads(recipe.to_json())
    if x.nonnegative:
        found["nonnegative"] = True
    return found | x.facts()


def rebuilt(name: str, parts: Mapping[str, Tensor], facts: Facts) -> Wrapper:
    """Return the ScaledTensor that has these parts and facts.

    Args:
        name: the tensor's name in error messages.
        parts: the plain tensors by their names in `INNER`. The result keeps them without a copy.
        facts: the result of `facts_of`. For one shard, `shape` is the shape of that shard.

    Raises:
        CheckpointError: a part is missing, or parts and facts do not fit together.
    """
    try:
        return _rebuilt(parts, facts)
    except KeyError as error:
        raise CheckpointError(f"{name} is damaged: it has no {error.args[0]}") from error
    except (ScaledTensorError, ArithmeticError, TypeError, ValueError, RuntimeError) as error:
        raise CheckpointError(f"{name} is damaged: {error}") from error


def _rebuilt(parts: Mapping[str, Tensor], facts: Facts) -> Wrapper:
    kind, shape, fmt = _kind(facts), tuple(facts["shape"]), _read_format(facts["format"])
    recipe = Recipe.from_json(json.dumps(facts["recipe"])) if "recipe" in facts else None
    dtype, nonnegative = appearance(dtype_from_name(facts["dtype"])), bool(facts.get("nonnegative"))
    made: Wrapper = kind.cls.from_facts(parts, shape, (fmt, dtype, recipe, nonnegative), facts)
    return made


def part_names(facts: Facts | None = None) -> tuple[str, ...]:
    """Return the names of the parts of a tensor with these facts; by default of any tensor.

    Raises:
        CheckpointError: this release has no class of that name.
    """
    if facts is not None:
        return (*_kind(facts).inner, *facts.get("extras", ()))
    kinds = _kinds().values()
    return tuple(dict.fromkeys(part for kind in kinds for part in (*kind.inner, *kind.extras)))


class _Kind(NamedTuple):
    """The class of a tensor in a file, and the names of its inner tensors."""

    cls: Any
    inner: tuple[str, ...]
    extras: tuple[str, ...] = ()
    """Inner tensors that only some tensors of the kind have. Their facts name them."""


def _kind(facts: Facts) -> _Kind:
    kinds = _kinds()
    if facts["kind"] not in kinds:
        raise CheckpointError(
            f"it is a {facts['kind']}; this release has {', '.join(sorted(kinds))}"
        )
    return kinds[facts["kind"]]


def _kinds() -> dict[str, _Kind]:
    """Return the kinds of tensors by their names in files."""
    return {
        name: _Kind(cls, inner, cls._EXTRAS)
        for cls in _derived(Wrapper)
        if hasattr(cls, "INNER")  # the bases of classes have no tensors
        for name, inner in cls.kinds().items()
    }


def _derived(cls: type[Wrapper]) -> Iterator[type[Wrapper]]:
    for other in cls.__subclasses__():
        yield other
        yield from _derived(other)


# --- plain tensors, and attributes for which JSON has no type -------------------------------------


def facts_of_plain(x: Tensor) -> Facts:
    """Return the shape and the dtype of a plain tensor, as JSON has them."""
    return {"shape": list(x.shape), "dtype": dtype_name(x.dtype)}


def empty_like_facts(facts: Facts, device: torch.device) -> Tensor:
    """Return an uninitialized plain tensor with the shape and the dtype in `facts`."""
    return torch.empty(facts["shape"], dtype=dtype_from_name(facts["dtype"]), device=device)


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name of a dtype, such as `float32`."""
    return str(dtype).removeprefix("torch.")


def dtype_from_name(name: str) -> torch.dtype:
    """Return the dtype of that name.

    Raises:
        CheckpointError: this release of torch has no dtype of that name.
    """
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype):
        raise CheckpointError(f"torch {torch.__version__} has no dtype {name!r}")
    return found


def _written_format(fmt: Format) -> Any:
    """Return the name of a registered format; the fields of any other format."""
    if FORMATS.get(fmt.name) is fmt:
        return fmt.name
    facts = {f.name: getattr(fmt, f.name) for f in fields(fmt) if f.name != "ml_dtype"}
    return facts | {"specials": fmt.specials.value, "storage_dtype": dtype_name(fmt.storage_dtype)}


def _read_format(written: Any) -> Format:
    if isinstance(written, str):
        return get_format(written)
    storage = dtype_from_name(written["storage_dtype"])
    return Format(**written | {"specials": Specials(written["specials"]), "storage_dtype": storage})
