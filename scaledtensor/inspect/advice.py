"""The conclusions of a report from its rows: its coverage, its findings and its suggestions."""

import fnmatch
import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, get_args

from scaledtensor.formats import E4M3FN, E5M2
from scaledtensor.inspect.rows import HELD, LIMITS, Ran, Row, fold
from scaledtensor.recipes import Current, Recipe, Unit
from scaledtensor.recipes.casts import Amax, Carried

__all__ = [
    "Coverage",
    "Finding",
    "Setup",
    "Suggestion",
    "coverage",
    "findings",
    "spread",
    "suggestions",
]

#: Binades that E4M3FN spans with its subnormals. A drift by this many leaves nothing of a tensor.
_BINADES = 18

#: Share of a model's FLOPs below which a plain weight does not matter.
_NOTABLE = 0.01


@dataclass(frozen=True)
class Coverage:
    """The shares of a model that ran by the recipe, by rules, by the fallback and on plain
    tensors."""

    flops: int
    """FLOPs of all products, forward and backward."""
    products: dict[str, float]
    """Shares of `flops` by `Row.ran`."""
    bytes: int
    """Bytes of floats that operators other than products and views read and wrote."""
    elementwise: dict[str, float]
    """Shares of `bytes`. "recipe" is the share in elements of 8 bits or fewer."""


@dataclass(frozen=True)
class Finding:
    """A place with a problem."""

    problem: str
    """One of `inspect.rows.PROBLEMS`."""
    module: str
    """Name of the module. Repeated layers have one name, such as `blocks.0..11.mlp`."""
    operators: tuple[str, ...]
    count: int
    """The number of modules that have the problem."""
    size: float
    """Findings are ordered by size. It is 1 + the share of elements that saturate; the number of
    binades outside of the range, divided by E4M3FN's, for a drift; and a share for other
    problems."""
    figures: str
    """The measured numbers."""
    advice: str
    """A way to solve the problem."""


@dataclass(frozen=True)
class Suggestion:
    """A change of the recipe, and why."""

    text: str
    figures: str
    """The measured numbers from which it follows."""
    recipe: Recipe | None = None
    """A recipe for `scale_model`; None if the suggestion is not another recipe."""


@dataclass(frozen=True)
class Setup:
    """The way in which the model was wrapped."""

    recipes: Mapping[str, Recipe]
    """The name of a module that owns wrapped parameters -> its recipe."""
    plain: frozenset[str]
    """Names of the modules that own plain parameters of floats."""

    @property
    def base(self) -> Recipe | None:
        """The recipe of most modules."""
        common = Counter(self.recipes.values()).most_common(1)
        return common[0][0] if common else None

    def changed(self, base: Recipe, overrides: Mapping[str, Recipe | None]) -> Recipe:
        """`base` for the model, with overrides for modules that have another recipe or none now,
        and with `overrides` on top of these."""
        was = self.base
        kept: dict[str, Recipe | None] = {m: r for m, r in self.recipes.items() if r != was}
        kept |= dict.fromkeys(sorted(self.plain))
        every = [*self.recipes, *self.plain]
        pairs = (kept | dict(overrides)).items()
        wanted = {m: r for m, r in pairs if r is None or r != base}
        return replace(base, overrides=tuple(_patterns(wanted, every).items()))


def _patterns(
    wanted: Mapping[str, Recipe | None], every: Iterable[str]
) -> dict[str, Recipe | None]:
    """The same with a pattern for layers whose recipe does not depend on their number."""
    found: dict[str, Recipe | None] = {}
    for module, recipe in wanted.items():
        pattern = re.sub(r"(?<![^.])\d+(?![^.])", "*", module)
        matches = fnmatch.filter(every, pattern)
        same = all(m in wanted and wanted[m] == recipe for m in matches)
        found[pattern if same else module] = recipe
    return found


# --- coverage --------------------------------------------------------------------------------


def coverage(rows: Iterable[Row]) -> Coverage:
    """The coverage of these rows."""
    flops: Counter[str] = Counter()
    moved: Counter[str] = Counter()
    for r in rows:
        flops[r.ran] += r.flops
        if r.ran == "fallback":
            moved["fallback"] += r.bytes
            continue
        wide = "plain" if r.ran == "plain" else "rule"
        moved["recipe"] += r.narrow_bytes
        moved[wide] += r.bytes - r.narrow_bytes
    return Coverage(flops.total(), _shares(flops), moved.total(), _shares(moved))


def _shares(counts: Counter[str]) -> dict[str, float]:
    total = max(counts.total(), 1)
    return {ran: counts[ran] / total for ran in get_args(Ran)}


# --- findings --------------------------------------------------------------------------------


def findings(rows: list[Row]) -> list[Finding]:
    """Every place with a problem, worst first. The rows of a module with one problem are one
    place."""
    told = coverage(rows)
    places: dict[tuple[str, str, str], tuple[int, list[Row]]] = {}
    for folded in fold(rows):
        row = folded.row
        problems = row.problems
        if _loses(row):  # a drift leads to losses, which say more
            problems = [p for p in problems if p != "drifted"]
        for problem in problems:
            _, known = places.setdefault((problem, row.module, row.operand), (len(folded.rows), []))
            known.append(row)
    found = [
        Finding(problem, module, _names(own), count, *_told(problem, own, told))
        for (problem, module, _), (count, own) in places.items()
    ]
    return sorted(found, key=lambda f: -f.size)


def _names(rows: list[Row]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(r.op for r in rows))


def _told(problem: str, rows: list[Row], whole: Coverage) -> tuple[float, str, str]:
    """(size, figures, advice)."""
    first = rows[0]
    what = f"the {first.operand}" if first.operand else "the result"
    match problem:
        case "saturated" | "underflowed":
            worst = max(rows, key=lambda r: getattr(r, problem))
            share: float = getattr(worst, problem)
            lost = "is beyond" if problem == "saturated" else "goes to zero in"
            figures = f"{share:.2%} of {what} {lost} {worst.format.upper()}; "
            figures += f"its largest element is {worst.reach:.2g} times the largest value"
            return share + (problem == "saturated"), figures, _of_cast(worst)
        case "fallback":
            of_flops = sum(r.flops for r in rows) / max(whole.flops, 1)
            of_bytes = sum(r.bytes for r in rows) / max(whole.bytes, 1)
            figures = f"{of_flops:.1%} of the FLOPs and {of_bytes:.1%} of the bytes in float32"
            advice = (
                "register a rule with scaledtensor.ops.rule (CONTRIBUTING.md), or use operators "
            )
            return max(of_flops, of_bytes), figures, advice + "that have one (docs/ops.md)"
        case "drifted":
            worst = max(rows, key=_drift)
            figures = f"RMS(qdata) of {what} {spread(worst.low, worst.high)}"
            cure = "sct.rebalance(model) moves a weight back"
            if worst.operand != "weight":
                cure = f"{_measuring(worst.module)} measures it"
            advice = f"nothing is lost while its cast saturates and underflows nothing; {cure}"
            return _drift(worst) / _BINADES, figures, advice
        case _:
            share = sum(r.flops for r in rows) / max(whole.flops, 1)
            figures = f"{share:.1%} of the FLOPs in 16 or 32 bits"
            if problem == "excluded":
                return (
                    share,
                    figures,
                    (
                        "its weight is plain: take the module out of filter_fn, of the recipe's "
                        "overrides or its min_size"
                    ),
                )
            return (
                share,
                figures,
                (
                    "this recipe casts no operands of such a product; one of one scale a tensor, "
                    "as Unit() or Current(), casts those of every product"
                ),
            )


def _of_cast(r: Row) -> str:
    if r.operand == "weight":
        return "sct.rebalance(model) gives the weight the scale of its present values"
    if not _is_carried(r):
        return "its scale is the recipe's: another exponent or margin, or Current(), which measures"
    if r.amax_underflowed <= LIMITS["underflowed"]:
        return f"measure it: {_measuring(r.module)}"
    return (
        f"one scale does not hold it ({r.amax_underflowed:.1%} underflow by its amax): scales by "
        "block (MXFP8()), or E5M2 for this operand"
    )


def _measuring(module: str) -> str:
    """The override for a module as code, or in words if several modules are folded into one."""
    if ".." in module or "{" in module:
        return "Current() for these modules in the recipe's overrides"
    return f"overrides={{{module!r}: Current()}}"


def _is_carried(r: Row) -> bool:
    return r.op == "scaledtensor.to_format.default"


def _drift(r: Row) -> float:
    """The number of binades by which a row's RMS(qdata) is outside of the range."""
    if r.low is None or r.high is None:
        return 0.0
    return max(math.log2(HELD[0] / r.low), math.log2(r.high / HELD[1]), 0.0)


def spread(low: float | None, high: float | None) -> str:
    """A range in words, such as `0.5..2`; empty if there is none."""
    if low is None or high is None:
        return ""
    ends = f"{low:.2g}", f"{high:.2g}"
    return ends[0] if ends[0] == ends[1] else "..".join(ends)


# --- suggestions -----------------------------------------------------------------------------


def suggestions(rows: list[Row], setup: Setup) -> list[Suggestion]:
    """Changes that the measured numbers suggest. Each stands by itself."""
    base = setup.base
    if base is None:
        return []
    found = (_rebalanced(rows), _measured(rows, setup, base), _wider(rows, setup, base))
    return [s for s in (*found, _finer(rows, setup, base), _unmeasured(rows, setup, base)) if s]


def _rebalanced(rows: list[Row]) -> Suggestion | None:
    own = [r for r in rows if r.operand == "weight" and _is_carried(r) and _loses(r)]
    if not own:
        return None
    worst = max(own, key=lambda r: r.saturated + r.underflowed)
    return Suggestion(
        "sct.rebalance(model): weights have left the scale that they were wrapped with",
        f"{_modules(own)}; RMS(qdata) {spread(worst.low, worst.high)} and {worst.saturated:.2%} "
        f"saturated, {worst.underflowed:.2%} underflowed in {worst.module!r}",
    )


def _measured(rows: list[Row], setup: Setup, base: Recipe) -> Suggestion | None:
    """Amax scales for operands that lose elements under the rules' scale, and would not under an
    amax scale."""
    casts = [r for r in rows if _is_carried(r) and r.operand in ("input", "gradient")]
    own = [
        r
        for r in casts
        if _loses(r) and r.module in setup.recipes and r.amax_underflowed <= LIMITS["underflowed"]
    ]
    if not own:
        return None
    worst = max(own, key=lambda r: r.saturated + r.underflowed)
    modules = list(dict.fromkeys(r.module for r in own))
    every = {r.module for r in casts}
    current = Current(**_shared(base))
    if len(modules) > len(every) / 2:
        recipe = setup.changed(current, {})
    else:
        recipe = setup.changed(base, dict.fromkeys(modules, current))
    return Suggestion(
        "measure what the rules do not know",
        f"{_modules(own)}; in {worst.module!r} {worst.saturated:.2%} saturate and "
        f"{worst.underflowed:.2%} underflow, by the amax 0% and {worst.amax_underflowed:.2%}",
        recipe,
    )


def _wider(rows: list[Row], setup: Setup, base: Recipe) -> Suggestion | None:
    """Wrapping plain weights that take a notable share of the FLOPs."""
    total = max(sum(r.flops for r in rows), 1)
    spent: Counter[str] = Counter()
    for r in rows:
        if "excluded" in r.problems:
            spent[r.module] += r.flops
    modules = [m for m, n in spent.most_common() if n / total >= _NOTABLE]
    if not modules:
        return None
    was = coverage(rows).products["recipe"]
    gain = sum(spent[m] for m in modules) / total
    return Suggestion(
        f"wrap the weights of {_listed(modules)} too",
        f"{gain:.1%} of the FLOPs: {was:.1%} of them would become {was + gain:.1%} in the "
        "recipe's format",
        setup.changed(base, dict.fromkeys(modules, replace(base, min_size=0))),
    )


def _finer(rows: list[Row], setup: Setup, base: Recipe) -> Suggestion | None:
    """E4M3FN, with a third mantissa bit, for gradients that fit into it."""
    once = base.gemms.once
    if once is None or once[2].format != E5M2 or not isinstance(once[2].scale, Carried):
        return None
    own = [r for r in rows if r.operand == "gradient" and r.format == E5M2.name]
    wide = [r for r in own if _is_over(r.e4m3fn_saturated, r.e4m3fn_underflowed)]
    modules = {r.module for r in wide}
    if not own or len(modules) > len({r.module for r in own}) / 2:
        return None
    held = [r for r in own if r.module not in modules]
    lost = max(r.e4m3fn_saturated for r in held), max(r.e4m3fn_underflowed for r in held)
    figures = f"as E4M3FN at most {lost[0]:.2%} of a gradient saturate and {lost[1]:.2%} underflow"
    if wide:
        most = max(wide, key=lambda r: r.e4m3fn_saturated + r.e4m3fn_underflowed)
        figures += f"; not in {_listed(sorted(modules))}: {most.e4m3fn_saturated:.2%} and "
        figures += f"{most.e4m3fn_underflowed:.2%}"
    finer = replace(base, gradient=E4M3FN)
    return Suggestion(
        "gradients in E4M3FN, with a third mantissa bit",
        figures,
        setup.changed(finer, dict.fromkeys(sorted(modules), base)),
    )


def _unmeasured(rows: list[Row], setup: Setup, base: Recipe) -> Suggestion | None:
    """The scales of the rules in place of amax scales, if they lose nothing either."""
    once = base.gemms.once
    if once is None or not all(isinstance(c.scale, Amax) for c in once):
        return None
    own = [r for r in rows if r.elements and not _is_carried(r)]
    if not own or any(_is_over(r.carried_saturated, r.carried_underflowed) for r in own):
        return None
    lost = max(r.carried_saturated for r in own), max(r.carried_underflowed for r in own)
    return Suggestion(
        "the scales of the rules, which need no pass over the data",
        f"under them at most {lost[0]:.2%} of an operand saturate and {lost[1]:.2%} underflow",
        setup.changed(Unit(**_shared(base)), {}),
    )


def _shared(recipe: Recipe) -> dict[str, Any]:
    """The settings of a recipe that every recipe has: its formats, and a few others."""
    names = ("forward", "gradient", "weight", "activation", "master", "rebalance", "saved")
    return {name: getattr(recipe, name) for name in (*names, "gradient_rounding", "emulate")}


def _loses(r: Row) -> bool:
    return "saturated" in r.problems or "underflowed" in r.problems


def _is_over(saturated: float, underflowed: float) -> bool:
    return saturated > LIMITS["saturated"] or underflowed > LIMITS["underflowed"]


def _modules(rows: list[Row]) -> str:
    names = list(dict.fromkeys(r.module for r in rows))
    return f"{len(names)} module{'s' if len(names) > 1 else ''}"


def _listed(names: list[str]) -> str:
    shown = [repr(n) for n in names[:3]]
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(shown) + more
