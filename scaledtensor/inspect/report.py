"""`report`: the operators that ran in a model, the problems that the numbers show, and advice."""

import fnmatch
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from scaledtensor import _torch
from scaledtensor.errors import ModelError
from scaledtensor.inspect.advice import (
    Coverage,
    Finding,
    Setup,
    Suggestion,
    coverage,
    findings,
    spread,
    suggestions,
)
from scaledtensor.inspect.operators import OperatorRecorder
from scaledtensor.inspect.passes import differentiate, left_untouched, start_of_backward
from scaledtensor.inspect.places import Origins
from scaledtensor.inspect.rows import HELD, PROBLEMS, Row, aligned, fold
from scaledtensor.inspect.weights import (
    WeightRow,
    in_few_bits,
    other_bytes,
    weight_rows,
    weight_table,
)
from scaledtensor.ops.registry import observed, on_missing
from scaledtensor.recipes import Recipe
from scaledtensor.tensors.ruled import Ruled
from scaledtensor.tensors.shards import is_dtensor, part_of
from scaledtensor.tensors.steps import is_scaled
from scaledtensor.tensors.tensor import ScaledTensor

__all__ = ["Report", "Row", "report"]

#: How many of the worst places the summary has.
_WORST = 5


@dataclass
class Report:
    """One forward and backward pass of a model, or the weights of a quantised one. `str()` is a
    summary and a table."""

    records: list[Row] = field(default_factory=list)
    setup: Setup = field(default_factory=lambda: Setup({}, frozenset()))
    whole: "Report | None" = None
    """The report that this one is a part of."""
    weights: list[WeightRow] = field(default_factory=list)
    """The weights of a quantised model; empty for all other models."""
    others: int = 0
    """The bytes of the parameters and buffers that are not in `weights`."""

    def rows(self) -> list[Row]:
        """A row for each operator in each module, forward and backward, in the order in which they
        first ran. `pandas.DataFrame(report.rows())` makes a table of them."""
        return list(self.records)

    def where(self, module: str = "*", operator: str = "*", problem: str | None = None) -> "Report":
        """The part of the report with the rows that match all arguments.

        Args:
            module: the module's name; * and ? are wildcards, as in `blocks.*.mlp`. The name of the
                model itself is empty.
            operator: the operator's name, such as `aten.mm.default`, or a pattern: `*mm*`.
            problem: one of "saturated", "underflowed", "fallback", "drifted", "excluded" and
                "uncast"; "*" for any.

        The shares of FLOPs and of bytes are over the rows of the part. Suggestions are for the
        whole model.

        Raises:
            ModelError: `problem` has another value.
        """
        if problem not in (None, "*", *PROBLEMS):
            raise ModelError(
                f"a problem of a row is one of {', '.join(map(repr, PROBLEMS))}, or '*' for any; "
                f"got {problem!r}"
            )
        found = [
            r
            for r in self.records
            if fnmatch.fnmatchcase(r.module, module)
            and fnmatch.fnmatchcase(r.op, operator)
            and (problem is None or problem in r.problems or (problem == "*" and r.problems))
        ]
        weights = [
            w for w in self.weights if fnmatch.fnmatchcase(w.name.rpartition(".")[0], module)
        ]
        return replace(self, records=found, whole=self.whole or self, weights=weights)

    @property
    def missing(self) -> list[str]:
        """Operators without a rule, each once."""
        return sorted({r.op for r in self.records if r.ran == "fallback"})

    @property
    def out_of_range(self) -> list[Row]:
        """Rows with a result whose RMS(qdata) is outside [1/2, 2]."""
        return [r for r in self.records if not r.in_range]

    @cached_property
    def coverage(self) -> Coverage:
        """The shares of the FLOPs and of the elementwise traffic by how they ran."""
        return coverage(self.records)

    @cached_property
    def findings(self) -> list[Finding]:
        """Places with a problem, worst first."""
        return findings(self.records)

    @cached_property
    def suggestions(self) -> list[Suggestion]:
        """Changes that the measured numbers suggest. Each stands by itself, and follows from one
        batch and one state of the model."""
        return suggestions((self.whole or self).records, self.setup)

    def to_dict(self) -> dict[str, Any]:
        """The whole report in built-in types, for `json.dumps`. Recipes are in the form of
        `Recipe.to_json`, which `Recipe.from_json` reads."""
        return {
            "coverage": asdict(self.coverage),
            "missing": self.missing,
            "findings": [asdict(f) | {"operators": list(f.operators)} for f in self.findings],
            "suggestions": [
                {
                    "text": s.text,
                    "figures": s.figures,
                    "recipe": None if s.recipe is None else s.recipe.to_json(),
                }
                for s in self.suggestions
            ],
            "rows": [r.to_dict() for r in self.records],
            "weights": [asdict(w) for w in self.weights],
        }

    def __str__(self) -> str:
        if (self.whole or self).weights:
            others = self.others if self.whole is None else None
            return "\n".join(weight_table(self.weights, others))
        return "\n".join([*self._summary(), "", *self._table()])

    def _summary(self) -> Iterator[str]:
        told = self.coverage
        yield from aligned(
            [
                ("share of", "recipe's format", "rule, 16/32 bit", "no rule", "plain"),
                (f"{_count(told.flops)}FLOP of products", *_shares(told.products)),
                (f"{_count(told.bytes)}B read and written by others", *_shares(told.elementwise)),
            ]
        )
        if self.missing:
            yield "without a rule: " + ", ".join(self.missing)
        yield (
            f"RMS(qdata) outside [{HELD[0]:g}, {HELD[1]:g}] in {len(self.out_of_range)} of "
            f"{len(self.records)} rows (marked *)"
        )
        yield ""
        yield f"worst places ({min(_WORST, len(self.findings))} of {len(self.findings)}):"
        for i, f in enumerate(self.findings[:_WORST], 1):
            times = f" (x {f.count})" if f.count > 1 else ""
            yield f"  {i}. {f.module or 'the model itself'}{times}, {f.problem}: {f.figures}"
            yield f"     {_short(f.operators)}: {f.advice}"
        if self.suggestions:
            yield ""
            yield "suggestions, from this batch:"
        for s in self.suggestions:
            yield f"  - {s.text}"
            if s.recipe is not None:
                yield f"    {s.recipe}"
            yield f"    measured: {s.figures}"

    def _table(self) -> Iterator[str]:
        shown = [r for r in self.records if r.rule != "views" and (r.ran != "plain" or r.flops)]
        heads = ("module", "operator", "pass", "ran by", "hits", "RMS(qdata)", "sat.", "underfl.")
        folded = fold(shown)
        yield f"{len(self.records) - len(shown)} rows of views and of plain tensors are not shown"
        yield ""
        yield from aligned([heads, *(_cells(f.row, len(f.rows)) for f in folded)])


def _shares(of: dict[str, float]) -> tuple[str, ...]:
    return tuple(f"{of[ran]:.1%}" for ran in ("recipe", "rule", "fallback", "plain"))


def _count(n: int) -> str:
    """A number with a prefix, such as `1.2 G`. A unit can follow it."""
    size = float(n)
    prefixes = iter("kMGTPE")
    prefix = ""
    while size >= 999.5:
        size, prefix = size / 1000, next(prefixes)
    return f"{size:.3g} {prefix}"


def _short(names: tuple[str, ...]) -> str:
    more = f" and {len(names) - 2} more" if len(names) > 2 else ""
    return ", ".join(names[:2]) + more


def _cells(r: Row, count: int) -> tuple[str, ...]:
    lost, flushed = (f"{s:.2%}" if r.elements else "" for s in (r.saturated, r.underflowed))
    held = spread(r.low, r.high) + ("" if r.in_range else " *")
    direction = "backward" if r.backward else "forward"
    module = f"{r.module} (x {count})" if count > 1 else r.module
    op = f"{r.op}, {r.operand}" if r.operand else r.op
    ran = {"fallback": "NONE", "plain": "plain"}.get(r.ran, r.rule)
    return module, op, direction, ran, str(r.hits), held, lost, flushed


class _Plain(_torch.DispatchMode):
    """Tells of operators without a ScaledTensor. The operators inside a rule run below this mode,
    so it does not see them."""

    def __init__(self, told: Any) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.told = told

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if not any(issubclass(t, Ruled) for t in types):
            self.told(func, args, result)
        return result


@contextmanager
def _recorded(model: nn.Module) -> Iterator[OperatorRecorder]:
    """Record every operator that runs within it, by module."""
    recorder, origins = OperatorRecorder(), Origins()

    def told(op: Any, args: tuple[Any, ...], result: Any) -> None:
        backward = _torch.is_within_backward()
        # A module that runs within a backward pass belongs to a checkpoint, which runs again.
        again = places.stack or not backward
        module = places.module if again else origins.running
        with torch.no_grad():
            recorder.operator(op, args, result, module, backward)

    with ExitStack() as stack:
        places = stack.enter_context(origins.followed(model))
        stack.enter_context(observed(told))
        stack.enter_context(_Plain(told))
        stack.enter_context(on_missing("warn"))
        yield recorder


def report(model: nn.Module, *inputs: Any, **options: Any) -> Report:
    """Run `model(*inputs, **options)` forward and backward once, and report on the operators.

        print(sct.report(model, tokens))

    The report begins with a summary. It shows how much of the model ran in the recipe's format, by
    rules in 16 or 32 bits, by the float32 fallback, and on plain tensors: in FLOPs of products, and
    in bytes of all other operators. It lists the worst places with advice for each, and recipes
    that the measured numbers suggest. Then a table has a row for each operator in each module: the
    rule it ran under, how often it ran, the RMS of the elements of its results, and the shares of
    elements that saturated and underflowed in casts to 8 bits. Layers that repeat with the same
    rows are folded into one. `report.where("blocks.*", problem="*")` is a part of the report,
    `report.rows()` are its rows, and `report.to_dict()` is the whole report for JSON.

    Operators without a rule run by the float32 fallback here, whatever `on_missing` says, and are
    listed. A row of the backward pass belongs to the module whose forward pass recorded it. The sum
    of a tensor's gradients belongs to the innermost module around all its uses. A compiled model
    runs as eager code here.

    The backward pass starts from the loss, if the result has one (its `loss`, its first element, or
    the result itself if 0-dim). Otherwise it starts from a Gaussian gradient of the first
    differentiable result. Buffers, gradients and the state of the random number generators are as
    before afterwards.

    The report on a quantised model is on its weights (`report.weights`), and runs nothing:
    `sct.report(model)`. For each weight it shows the config that stores it, its bytes now and
    before, or why it was left as it is.

    Raises:
        ModelError: no parameter is scaled or quantised, or no result is differentiable; or the
            model is quantised and inputs are given.
    """
    model = getattr(model, "_orig_mod", model)
    if not any(isinstance(p, ScaledTensor) for p in model.parameters()):
        if any(is_dtensor(p) for p in model.parameters()):
            raise ModelError(
                "parameters of this model are spread over ranks: report on it before fully_shard()"
            )
        if not in_few_bits(model):
            raise ModelError(
                "no parameter of this model is a ScaledTensor; scale_model(model) first, or "
                "quantize_(model, config) for a report on its weights"
            )
        if inputs or options:
            raise ModelError(
                "the report on a quantised model is on its weights, and it runs nothing: "
                "sct.report(model) without inputs"
            )
        return Report(weights=weight_rows(model), others=other_bytes(model))
    wanted: list[Tensor] = [p for p in model.parameters() if p.requires_grad]
    with left_untouched(model), _recorded(model) as recorder:
        out, seed = start_of_backward(model(*inputs, **options))
        differentiate(out, seed, wanted, only=True)
    setup, weights = _setup(model)
    rows = recorder.rows
    for row in rows:
        row.judge(row.module in weights)
    return Report(rows, setup)


def _setup(model: nn.Module) -> tuple[Setup, set[str]]:
    """The recipes of the model's modules, and the modules that own a plain weight."""
    recipes: dict[str, Recipe] = {}
    plain: set[str] = set()
    weights: set[str] = set()
    for name, module in model.named_modules():
        name = name.replace("._orig_mod", "")
        for p in module.parameters(recurse=False):
            if is_scaled(p):
                recipe = part_of(p).recipe
                recipes |= {} if recipe is None else {name: recipe}
            elif p.dtype.is_floating_point:
                plain.add(name)
                weights |= {name} if p.dim() > 1 else set()
    return Setup(recipes, frozenset(plain)), weights
