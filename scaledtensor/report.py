"""report: what ran in a model, under which rule, and where the range is not held."""

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.module_tracker import ModuleTracker

from scaledtensor import verbs
from scaledtensor.errors import ModelError
from scaledtensor.ops.algebra import elements
from scaledtensor.ops.observe import observed
from scaledtensor.ops.registry import is_missing, on_missing, rule_of
from scaledtensor.tensor import ScaledTensor

__all__ = ["Report", "Row", "report"]

HELD = (0.5, 2.0)


@dataclass
class Row:
    """One operator in one module, forward or backward."""

    module: str
    op: str
    backward: bool
    rule: str
    """The family that the rule is in (a module of scaledtensor.ops); empty where there is none."""
    hits: int = 0
    low: float = math.inf
    """The least RMS(qdata) of a result; inf where no result was scaled, or all were zero."""
    high: float = 0.0
    elements: int = 0
    """Elements that were cast to 8 bits, for the shares below."""
    saturated: float = 0.0
    """Share of the elements cast to 8 bits that were beyond the largest value."""
    underflowed: float = 0.0
    """Share of them that were not zero and became zero."""

    @property
    def in_range(self) -> bool:
        return not self.high or (self.low >= HELD[0] and self.high <= HELD[1])


@dataclass
class Report:
    """Rows in the order in which they first ran. `str()` is the table."""

    rows: list[Row] = field(default_factory=list)

    @property
    def missing(self) -> list[str]:
        """Operators without a rule, each once."""
        return sorted({r.op for r in self.rows if not r.rule})

    @property
    def out_of_range(self) -> list[Row]:
        """Rows with a result whose RMS(qdata) is outside [1/2, 2]."""
        return [r for r in self.rows if not r.in_range]

    def __str__(self) -> str:
        hits = sum(r.hits for r in self.rows)
        covered = sum(r.hits for r in self.rows if r.rule)
        lines = [f"{covered} of {hits} operator calls ran under a rule"]
        if self.missing:
            lines.append("without a rule: " + ", ".join(self.missing))
        lines.append(
            f"RMS(qdata) outside [{HELD[0]:g}, {HELD[1]:g}] in {len(self.out_of_range)} of "
            f"{len(self.rows)} rows (marked *)"
        )
        heads = ("module", "operator", "pass", "rule", "hits", "RMS(qdata)", "sat.", "underfl.")
        shown = [r for r in self.rows if r.rule != "views"]
        table = [heads, *(_cells(r) for r in shown)]
        widths = [max(len(row[i]) for row in table) for i in range(len(heads))]
        lines += [f"{len(self.rows) - len(shown)} rows of views are not shown", ""]
        for row in table:
            cells = (c.ljust(w) for c, w in zip(row, widths, strict=True))
            lines.append("  ".join(cells).rstrip())
        return "\n".join(lines)


def _cells(r: Row) -> tuple[str, str, str, str, str, str, str, str]:
    spread = (
        "" if not r.high else f"{r.low:.2g}" if r.low == r.high else f"{r.low:.2g}..{r.high:.2g}"
    )
    lost, flushed = (f"{s:.2%}" if r.elements else "" for s in (r.saturated, r.underflowed))
    spread += "" if r.in_range else " *"
    direction = "backward" if r.backward else "forward"
    return r.module, r.op, direction, r.rule or "NONE", str(r.hits), spread, lost, flushed


class _Recorder:
    """Turns what runs into rows."""

    def __init__(self, tracker: ModuleTracker) -> None:
        self.tracker = tracker
        self.rows: dict[tuple[str, str, bool], Row] = {}
        self.families: dict[Any, str | None] = {}

    def __call__(self, op: Any, args: tuple[Any, ...], result: Any) -> None:
        if op not in self.families:
            self.families[op] = _family(op)
        family = self.families[op]
        if family is None:
            return
        module, backward = self.place()
        key = (module, str(op), backward)
        row = self.rows.setdefault(key, Row(*key, rule=family))
        row.hits += 1
        with torch.no_grad():
            if op is verbs.quantize:  # its scale fills the format, and keeps no RMS
                self.compare(row, args[0], result)
                return
            for x in result if isinstance(result, (list, tuple)) else [result]:
                if isinstance(x, ScaledTensor):
                    self.measure(row, x)
            if op is verbs.to_format and result.qdata.dtype.itemsize == 1:
                self.compare(row, args[0], result)

    def place(self) -> tuple[str, bool]:
        """The innermost module that runs, and whether it runs backward."""
        names = [n for n in self.tracker.parents if n != "Global"]
        deepest = max(names, key=lambda n: n.count("."), default="")
        return deepest.partition(".")[2], bool(self.tracker.is_bw)

    def measure(self, row: Row, x: ScaledTensor) -> None:
        if not x.rms:
            return  # zeros, or memory that nothing was written to yet
        q = _values(x)
        finite = q[q.isfinite()]
        rms = float(finite.square().mean().sqrt()) if finite.numel() else 0.0
        if rms:
            row.low, row.high = min(row.low, rms), max(row.high, rms)

    def compare(self, row: Row, before: ScaledTensor, after: ScaledTensor) -> None:
        ratio = float(before.scale.double() / after.scale.double())
        source, target = _values(before).abs() * ratio, _values(after)
        n = row.elements + source.numel()
        for share, count in (
            ("saturated", (source > after.format.max).sum()),
            ("underflowed", ((source > 0) & (target == 0)).sum()),
        ):
            total = getattr(row, share) * row.elements + int(count)
            setattr(row, share, total / max(n, 1))
        row.elements = n


def _family(op: Any) -> str | None:
    """Empty for an operator without a rule; None for a composite, whose parts came before it."""
    rule = rule_of(op)
    if rule is None:
        return "" if is_missing(op) else None
    return rule.family


def _values(x: ScaledTensor) -> Tensor:
    return elements(x).detach().double()


def report(model: nn.Module, *inputs: Any, **options: Any) -> Report:
    """Run `model(*inputs, **options)` forward and backward once and say what ran.

    Every operator on a ScaledTensor, by module: the rule it ran under, how often, the RMS of the
    elements of its results and, of casts to 8 bits, the shares that saturated and underflowed.
    Operators without a rule run by the float32 fallback here, whatever `on_missing` says, and are
    listed.

    The backward pass starts from the loss, where the result has one (its `loss`, its first element
    or itself, if 0-dim), else from a Gaussian gradient of the first differentiable result. Buffers,
    gradients and the state of the random number generators are as before afterwards.

    Raises:
        ModelError: no parameter is a ScaledTensor, or no result is differentiable.
    """
    if not any(isinstance(p, ScaledTensor) for p in model.parameters()):
        raise ModelError("no parameter of this model is a ScaledTensor; scale_model(model) first")
    tracker = ModuleTracker()
    recorder = _Recorder(tracker)
    with left_untouched(model), tracker, observed(recorder), on_missing("warn"):
        _differentiate(*start_of_backward(model(*inputs, **options)), model)
    return Report(list(recorder.rows.values()))


def _differentiate(out: Tensor, seed: Tensor | None, model: nn.Module) -> None:
    wanted = [p for p in model.parameters() if p.requires_grad]
    if any(getattr(p, "_post_accumulate_grad_hooks", None) for p in wanted):
        # Such hooks step optimizers. They run when gradients are accumulated, which this does not.
        torch.autograd.grad(out, wanted, seed, allow_unused=True)
        return
    # It also serves where a module is given a parameter as its input, which torch's tracker of
    # modules does not do within autograd.grad.
    held = [p.grad for p in wanted]
    for p in wanted:
        p.grad = None
    try:
        torch.autograd.backward(out, seed, inputs=wanted)
    finally:
        for p, grad in zip(wanted, held, strict=True):
            p.grad = grad


@contextmanager
def left_untouched(model: nn.Module) -> Iterator[None]:
    """What a forward pass changes, changed back: buffers and random numbers."""
    before = {name: b.detach().clone() for name, b in model.named_buffers()}
    devices = list(range(torch.cuda.device_count()))
    with torch.random.fork_rng(devices):
        try:
            yield
        finally:
            with torch.no_grad():
                for name, b in model.named_buffers():
                    if name in before:
                        b.copy_(before[name])


def start_of_backward(result: Any) -> tuple[Tensor, Tensor | None]:
    """Where the backward pass begins, and with which gradient."""
    loss = getattr(result, "loss", None)
    found = [loss] if isinstance(loss, Tensor) else list(_tensors(result))
    found = [t for t in found if t.requires_grad]
    if not found:
        raise ModelError("no result of this model is a tensor that requires a gradient")
    out = next((t for t in found if t.dim() == 0), found[0])
    if out.dim() == 0:
        return out, None
    gradient = torch.randn(out.shape, device=out.device)
    if isinstance(out, ScaledTensor):
        return out, verbs.promote(gradient.to(out.dtype), out.detach())
    return out, gradient.to(out.dtype)


def _tensors(result: Any) -> Iterator[Tensor]:
    if isinstance(result, Tensor):
        yield result
    elif isinstance(result, Mapping):
        for value in result.values():
            yield from _tensors(value)
    elif isinstance(result, (list, tuple)):
        for value in result:
            yield from _tensors(value)
