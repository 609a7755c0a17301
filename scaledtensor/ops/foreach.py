"""Operators over lists of tensors, of which torch's optimizers are made."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from scaledtensor.errors import MissingRuleError

__all__ = ["foreach", "written"]


def written(*lists: Sequence[Tensor]) -> None:
    """Count a write into each tensor of `lists`, so that autograd refuses what it saved of them.

    For an operator on a single tensor, torch counts the write before it dispatches to a subclass.
    For an operator on lists, torch counts in its own kernel, which does not run for a subclass.
    Torch's fused kernels for the CPU count nothing: a later backward pass reads the new values.
    """
    if not torch.compiler.is_compiling():  # a compiled graph counts for itself what it writes
        torch.autograd.graph.increment_version([x for tensors in lists for x in tensors])


def foreach(op: torch._ops.OpOverload, *args: Any, **kwargs: Any) -> Any:
    """`_foreach_<name>` over lists is `<name>` over their elements, called through torch."""
    name = op._schema.name.split("::")[1].removeprefix("_foreach_")
    call = _FOREACH.get(name) or getattr(Tensor, name, None)
    if call is None:
        raise MissingRuleError(f"{op}: torch.Tensor has no method {name} to apply to each element")
    # addcmul and addcdiv take their factor by keyword only; the list form calls it `scalars`.
    spelling = {"scalars": "value"} if name.startswith("addc") else {}
    by_keyword = {"alpha", "value", "dtype", *spelling}
    given = dict(zip((a.name for a in op._schema.arguments), args, strict=False)) | kwargs
    results = []
    for i in range(len(args[0])):
        each = {k: v[i] if isinstance(v, (list, tuple)) else v for k, v in given.items()}
        named = {spelling.get(k, k): v for k, v in each.items() if k in by_keyword}
        results.append(call(*(v for k, v in each.items() if k not in by_keyword), **named))
    if not op._schema.is_mutable:
        return results
    written(args[0])
    return None


def _maximum(x: Tensor, other: Any) -> Tensor:
    return torch.maximum(x, other) if isinstance(other, Tensor) else x.clamp_min(other)


def _minimum(x: Tensor, other: Any) -> Tensor:
    return torch.minimum(x, other) if isinstance(other, Tensor) else x.clamp_max(other)


def _maximum_(x: Tensor, other: Any) -> Tensor:
    return x.copy_(torch.maximum(x, other)) if isinstance(other, Tensor) else x.clamp_min_(other)


def _minimum_(x: Tensor, other: Any) -> Tensor:
    return x.copy_(torch.minimum(x, other)) if isinstance(other, Tensor) else x.clamp_max_(other)


#: Where the per-tensor form is no method of the same name.
_FOREACH: dict[str, Callable[..., Any]] = {
    "norm": torch.linalg.vector_norm,
    "maximum": _maximum,
    "minimum": _minimum,
    "maximum_": _maximum_,
    "minimum_": _minimum_,
}
