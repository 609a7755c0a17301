"""Writes docs/ops.md from the registry of rules and the lists of tests/ops/opinfo.py.

    python docs/write_ops.py > docs/ops.md

A test fails when the page is not what this prints.
"""

import importlib
import inspect
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "ops"))

import torch._inductor.inductor_prims
import torch.distributed.fsdp
import torch.distributed.tensor  # both define operators that have rules
from opinfo import NO_VALUE, OUT_OF_SCOPE, in_scope

from scaledtensor.ops import RULES, registry
from scaledtensor.ops.operators import Absent
from scaledtensor.sparse import TABLE

HEAD = """\
# Operators

<!-- Written by `python docs/write_ops.py`; a test compares. Edit the docstrings of the rules. -->

Every rule, by family: the operators it serves, and in words how the scale of the result follows.
In the formulas r is the expected RMS of a value (rx, ra: of an operand; r_g: of a gradient), m the
RMS of the input, n the number of elements folded into one. In-place, `out=` and foreach forms
follow from the functional form that is listed; composites run as their parts. {rules} rules serve
{overloads} overloads, of which torch {torch} lacks {absent} that other versions have.

**{passed} of PyTorch's operator samples pass** (torch {torch}): of each operator that has them
(`torch.testing._internal.common_methods_invocations`), values and gradients on ScaledTensors are
those of the plain tensors, eager and in inference mode (`tests/ops/test_opinfo.py`; `-m slow`
compiles each in one graph). Ranges and equivariance are tested by the case tables beside it.

Out of scope, each with an error that says so: {refused}.

Nothing to compare: {valueless}.
"""


def page() -> str:
    functions = set(rows())
    names = sorted({family(f) for f in functions})
    refused = ", ".join(f"`{name}` ({words})" for name, (_, words) in OUT_OF_SCOPE.items())
    reasons: dict[str, list[str]] = {}
    for name, why in NO_VALUE.items():
        reasons.setdefault(why, []).append(f"`{name}`")
    valueless = "; ".join(f"{', '.join(ops)} ({why})" for why, ops in reasons.items())
    head = HEAD.format(
        rules=len(functions),
        overloads=sum(map(len, rows().values())),
        absent=len(registry.absent()),
        torch=torch.__version__.partition("+")[0],
        passed=len(in_scope()),
        refused=refused,
        valueless=valueless,
    )
    return head + "".join(section(name) for name in names)


def rows() -> dict[Callable[..., Any], list[str]]:
    """Rule -> the operators that it serves, those of other versions of torch last."""
    found: dict[Callable[..., Any], list[str]] = {}
    registry.absent()  # registers the rules of what the modules above define
    waiting = ((Absent(name), function) for name, (function, _) in registry._waiting.items())
    for op, function in (*((op, r.function) for op, r in RULES.items()), *waiting):
        found.setdefault(function, []).append(f"`{str(op).removesuffix('.default')}`")
    return found


def family(function: Callable[..., Any]) -> str:
    return function.__module__.rpartition(".")[2]


def section(name: str) -> str:
    module = importlib.import_module(f"scaledtensor.ops.{name}")
    title = (module.__doc__ or "").strip().split("\n")[0]
    lines = [f"\n## {name}\n\n{title}\n\n| operators | rule |\n| --- | --- |\n"]
    served = rows()
    if name == "sparse":  # what these do that is no rule of a dense tensor
        for op, function in TABLE.items():
            if not isinstance(function, partial):
                served.setdefault(function, []).append(f"`{str(op).removesuffix('.default')}`")
    for function, ops in served.items():
        if family(function) == name:
            words = " ".join(inspect.cleandoc(function.__doc__ or "").split()).replace("|", "\\|")
            lines.append(f"| {', '.join(ops)} | {words} |\n")
    return "".join(lines)


if __name__ == "__main__":
    print(page(), end="")
