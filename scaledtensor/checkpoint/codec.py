"""A ScaledTensor as plain tensors and facts, and back, bit for bit.

What keeps tensors in files, and what moves shards between ranks, knows torch's own tensors. So
`weight` is written as `weight.qdata`, `weight.scale` and whatever else its class lists as `INNER`,
and its format, recipe and the rest as facts that JSON can hold.
"""

import json
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path, PurePath
from typing import Any, cast

import torch
from torch import Tensor

from scaledtensor.errors import CheckpointError, ScaledTensorError
from scaledtensor.formats import FORMATS, Format, PerAxis, PerBlock, PerTensor, Specials
from scaledtensor.formats import get as get_format
from scaledtensor.formats.layouts import check_scale_shape, packed_shape
from scaledtensor.recipes import Recipe
from scaledtensor.tensors.coded import CodedTensor
from scaledtensor.tensors.storable import appearance
from scaledtensor.tensors.tensor import ScaledTensor

__all__ = [
    "blank_of",
    "check_name",
    "checked_tensor",
    "dtype_of",
    "facts_of",
    "inner_names",
    "inner_of",
    "is_count",
    "need",
    "plain_facts",
    "put_together",
    "read_torch",
    "refusal",
    "spelled_dtype",
    "told_parts",
    "understood",
]


# Checks of the fields of a file: an error names the file and the field.  A digest shows that a
# file is as somebody wrote it, and not that this library wrote it. So every field is compared
# with what it must be before anything is changed.
def need(where: Path | str, told: Any, field: str, kind: type | tuple[type, ...], what: str) -> Any:
    """`told[field]`, which is a `kind`; `what` says so in words.

    Raises:
        CheckpointError: `told` is no dict, has no such field, or the field holds something else.
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


def _kind_of_value(x: Any) -> str:
    return "number " + repr(x) if isinstance(x, int | float) else type(x).__name__


Facts = dict[str, Any]


def inner_of(x: ScaledTensor) -> dict[str, Tensor]:
    """The plain tensors that `x` consists of, themselves and not copies."""
    return {name: getattr(x, name).detach() for name in x.INNER}


def facts_of(x: ScaledTensor) -> Facts:
    """All of `x` that is no tensor, as JSON has it.

    Raises:
        RecipeError: its recipe is of a class that is not registered, so that nothing could read it.
    """
    found: Facts = {
        "kind": type(x).__name__,
        "shape": list(x.shape),
        "format": _spelled_format(x.format),
        "dtype": spelled_dtype(x.dtype),
    }
    if x.recipe is not None:
        site = x.site if isinstance(x, ScaledTensor) else None
        recipe = x.recipe if site is None else site.corrected(x.recipe)
        found["recipe"] = json.loads(recipe.to_json())
    if x.nonnegative:
        found["nonnegative"] = True
    if isinstance(x, CodedTensor):
        found["granularity"] = _spelled_granularity(x.granularity)
    return found


def plain_facts(x: Tensor) -> Facts:
    """What JSON says of a plain tensor."""
    return {"shape": list(x.shape), "dtype": spelled_dtype(x.dtype)}


def told_parts(x: ScaledTensor) -> Facts:
    """What JSON says of each of the tensors of `inner_of`."""
    return {part: plain_facts(t) for part, t in inner_of(x).items()}


def blank_of(facts: Facts, device: torch.device) -> Tensor:
    """Memory for the plain tensor that `plain_facts` told of."""
    return torch.empty(facts["shape"], dtype=dtype_of(facts["dtype"]), device=device)


def put_together(name: str, inner: Mapping[str, Tensor], facts: Facts) -> ScaledTensor:
    """The ScaledTensor of which `inner_of` and `facts_of` told. `name` is for messages.

    Args:
        inner: the plain tensors, which it keeps; those of a shard with that shard's shape in
            `facts`.

    Raises:
        CheckpointError: a part is missing, or parts and facts do not fit together.
    """
    try:
        return _put_together(inner, facts)
    except KeyError as error:
        raise CheckpointError(f"{name} is damaged: it has no {error.args[0]}") from error
    except (ScaledTensorError, TypeError, ValueError, RuntimeError) as error:
        raise CheckpointError(f"{name} is damaged: {error}") from error


def _put_together(inner: Mapping[str, Tensor], facts: Facts) -> ScaledTensor:
    kind, shape, fmt = _kind(facts), tuple(facts["shape"]), _format(facts["format"])
    recipe = Recipe.from_json(json.dumps(facts["recipe"])) if "recipe" in facts else None
    dtype, nonnegative = appearance(dtype_of(facts["dtype"])), bool(facts.get("nonnegative"))
    parts = [inner[part] for part in kind.INNER]
    if not issubclass(kind, CodedTensor):
        qdata, scale, rms = parts
        _check(qdata, fmt.storage_dtype, shape, "qdata")
        _check(scale, torch.float32, (), "scale")
        _check(rms, torch.float32, (), "rms")
        _check_positive(scale)
        return kind.make(qdata, scale, rms, fmt, dtype, recipe, nonnegative)
    granularity: Any = _granularity(facts["granularity"])
    packed = fmt.storage_dtype if fmt.bits >= 8 else torch.uint8
    _check(inner["qdata"], packed, packed_shape(fmt, shape), "qdata")
    _check(inner["tensor_scale"], torch.float32, (), "tensor_scale")
    made: CodedTensor = cast(Any, kind).keep(
        *parts, shape, fmt, dtype, recipe, nonnegative, granularity
    )
    if kind is CodedTensor:
        _check(inner["rms"], torch.float32, (), "rms")
        if made.scale.dtype not in (torch.float32, torch.float8_e4m3fn):
            raise CheckpointError(f"its scale is {made.scale.dtype}")
        check_scale_shape(made.scale, granularity, shape)
    else:
        made.dequantize()  # raises unless there is what reading takes
    return made


def inner_names(facts: Facts) -> tuple[str, ...]:
    """What the tensors of `inner_of` are called. Raises CheckpointError for an unknown class."""
    return _kind(facts).INNER


def _kind(facts: Facts) -> type[ScaledTensor]:
    kinds = {kind.__name__: kind for kind in _kinds()}
    if facts["kind"] not in kinds:
        raise CheckpointError(
            f"it is a {facts['kind']}; this release has {', '.join(sorted(kinds))}"
        )
    return kinds[facts["kind"]]


def _kinds(kind: type[ScaledTensor] = ScaledTensor) -> Iterator[type[ScaledTensor]]:
    yield kind
    for derived in kind.__subclasses__():
        yield from _kinds(derived)


def _check(x: Tensor, dtype: torch.dtype, shape: tuple[int, ...], part: str) -> None:
    if x.dtype != dtype or tuple(x.shape) != shape:
        raise CheckpointError(
            f"its {part} is {x.dtype} of shape {tuple(x.shape)}, in place of {dtype} of {shape}"
        )


def _check_positive(scale: Tensor) -> None:
    if not scale.is_meta and not 0 < float(scale) < float("inf"):
        raise CheckpointError(f"its scale is {float(scale)}; scales are positive and finite")


# --- what JSON has no word for ---------------------------------------------------------------


def spelled_dtype(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def dtype_of(name: str) -> torch.dtype:
    """Raises CheckpointError where torch has no such dtype."""
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype):
        raise CheckpointError(f"torch {torch.__version__} has no dtype {name!r}")
    return found


def _spelled_format(fmt: Format) -> Any:
    if FORMATS.get(fmt.name) is fmt:
        return fmt.name
    facts = {f.name: getattr(fmt, f.name) for f in fields(fmt) if f.name != "ml_dtype"}
    return facts | {
        "specials": fmt.specials.value,
        "storage_dtype": spelled_dtype(fmt.storage_dtype),
    }


def _format(spelled: Any) -> Format:
    if isinstance(spelled, str):
        return get_format(spelled)
    special = {"specials": Specials(spelled["specials"])}
    return Format(**spelled | special | {"storage_dtype": dtype_of(spelled["storage_dtype"])})


def _spelled_granularity(granularity: Any) -> Any:
    if isinstance(granularity, PerAxis):
        return {"axis": granularity.dim}
    if isinstance(granularity, PerBlock):
        return {"block": list(granularity.block)}
    return "tensor" if isinstance(granularity, PerTensor) else {"group": int(granularity)}


def _granularity(spelled: Any) -> Any:
    if spelled == "tensor":
        return PerTensor()
    ((word, number),) = spelled.items()
    return {"axis": PerAxis, "block": PerBlock, "group": int}[word](number)
