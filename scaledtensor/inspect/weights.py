"""The weights of a quantised model: their configs and bytes, and why others were left as they
are."""

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from scaledtensor.inspect.rows import Row, aligned, fold
from scaledtensor.models.scale_model import TRAINS_AS
from scaledtensor.quantization.tensor import QuantizedTensor
from scaledtensor.quantization.verb import adapters_of, output_layer, role_of

__all__ = ["WeightRow", "in_few_bits", "other_bytes", "weight_rows", "weight_table"]


@dataclass(frozen=True)
class WeightRow:
    """One weight: a parameter with two dimensions or more. Fields are built-in types only."""

    name: str
    """The name of the parameter; of a tied one, the first."""
    role: str
    """The role for which a config chooses it; empty if `quantize_` never converts it. A tied weight
    has several roles, joined by " + "."""
    config: str
    """How it is stored, or trains; empty if it was left as it is."""
    elements: int
    bytes: int
    """The bytes that it has, with scales."""
    plain_bytes: int
    """The bytes of its value in its dtype."""
    why: str
    """Why it was left as it is; empty if it was not."""


def in_few_bits(model: nn.Module) -> bool:
    """Whether a weight of the model is quantised, or trains for few bits."""
    return any(
        TRAINS_AS in m.__dict__
        or any(isinstance(p, QuantizedTensor) for p in m._parameters.values())
        for m in model.modules()
    )


def weight_rows(model: nn.Module) -> list[WeightRow]:
    """A row for each weight of a model, in the order of its parameters."""
    head, adapters = output_layer(model), adapters_of(model)
    owners: dict[int, list[tuple[str, str]]] = defaultdict(list)
    found: dict[int, tuple[Tensor, Any]] = {}
    roles: set[str] = set()
    for fqn, module in model.named_modules():
        for name, p in module._parameters.items():
            if p is None or not _is_weight(p):
                continue
            full = f"{fqn}.{name}" if fqn else name
            owners[id(p)].append((full, role_of(module, fqn, name, p, head) or ""))
            how = module.__dict__.get(TRAINS_AS, {}).get(name) or getattr(p, "config", None)
            found.setdefault(id(p), (p, how))
            if how is not None:
                roles |= set(how.roles)
    return [
        _row(p, how, owners[key], "" if how is not None else _reason(owners[key], roles, adapters))
        for key, (p, how) in found.items()
    ]


def other_bytes(model: nn.Module) -> int:
    """The bytes of the parameters and buffers of a model that have no row."""
    params = (p for p in model.parameters() if not is_lazy(p) and not _is_weight(p))
    return sum(x.nbytes for x in (*params, *model.buffers()))


def _is_weight(p: Tensor) -> bool:
    return not is_lazy(p) and p.dtype.is_floating_point and p.dim() > 1


def _row(p: Tensor, how: Any, owners: list[tuple[str, str]], why: str) -> WeightRow:
    name, kinds = owners[0][0], list(dict.fromkeys(role for _, role in owners))
    plain = p.numel() * p.dtype.itemsize
    told = "" if how is None else str(how)
    return WeightRow(name, " + ".join(filter(None, kinds)), told, p.numel(), p.nbytes, plain, why)


def _reason(owners: list[tuple[str, str]], roles: set[str], adapters: set[str]) -> str:
    if any(full.rpartition(".")[0] in adapters for full, _ in owners):
        return "an adapter of peft, which stays in full precision"
    for full, role in owners:
        if role in roles:
            continue
        if not role:
            what = "no layer that quantize_ knows multiplies matrices by it"
        elif len(owners) == 1:
            what = f"the role {role!r} is not among the roles of a config"
        else:
            what = f"{full} has the role {role!r}, which is not among the roles of a config"
        return what if len(owners) == 1 else f"tied: {what}"
    return "the plan or filter_fn leaves its module out"


def weight_table(rows: list[WeightRow], others: int | None) -> Iterator[str]:
    """The lines of a table, with repeated layers as one. `others` are the bytes of the parameters
    and buffers that are no weights; None if the rows are a part of a model."""
    ours = [r for r in rows if r.config]
    now, before = (sum(getattr(r, name) for r in ours) for name in ("bytes", "plain_bytes"))
    count = f"{len(ours)} of {len(rows)} weights"
    if any(r.bytes < r.plain_bytes for r in ours):
        bits = 8 * now / max(sum(r.elements for r in ours), 1)
        figures = f"{now:,} bytes in place of {before:,} ({bits:.2f} bits for each element)"
        yield f"{count} in few bits: {figures}"
        if others is not None:
            more = others + sum(r.bytes for r in rows if not r.config)
            yield f"the whole model: {now + more:,} bytes in place of {before + more:,}"
    else:
        yield f"{count} train for few bits, and are plain until quantize_(model, config)"
    yield ""
    table: list[tuple[str, ...]] = [("weight", "role", "stored as", "bits", "bytes", "before")]
    for f in fold(map(_as_row, rows)):
        r, n = f.row, len(f.rows)
        name = f"{r.module} (x {n})" if n > 1 else r.module
        each = f"{8 * r.bytes / max(r.elements, 1):.2f}"
        table.append((name, r.operand, r.op, each, f"{r.bytes:,}", f"{r.narrow_bytes:,}"))
    yield from aligned(table)


def _as_row(r: WeightRow) -> Row:
    """The row that folds as this one does. Its `narrow_bytes` are the plain bytes."""
    told = r.config or f"as it was: {r.why}"
    row = Row(r.name, told, False, "plain", operand=r.role, bytes=r.bytes)
    row.elements, row.narrow_bytes = r.elements, r.plain_bytes
    return row
