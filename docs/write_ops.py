"""Writes docs/ops.md from the registry of rules and the lists of tests/ops/opinfo.py.

    python docs/write_ops.py > docs/ops.md

A test fails when the page differs from the output of this program.
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
from scaledtensor.tensors.sparse import TABLE

HEAD = """\
# Operators

<!-- Written by `python docs/write_ops.py`; a test compares. Edit the docstrings of the rules. -->

This page lists every rule by family: its operators, and the expected RMS of their result. {rules}
rules serve {overloads} overloads; torch {torch} lacks {absent} of these, which other versions have.
In-place, `out=` and foreach forms follow from the functional form that is listed. Composites run as
their parts.

{contents}
The formulas have these letters and words:

- r is the RMS of the operand. rx, ra, rb, rw are the RMS of operands x, a, b, w, and r_g is the RMS
  of the incoming gradient of a backward operator. `r =` begins the formula of the result.
- m is the RMS of logits, and n the number of elements that are reduced to one.
- z is a Gaussian number of RMS 1, E f(z) the mean of f, and P a probability.
- *Measured* means that the RMS is read from the elements of the result.
- *Plain* means a `torch.Tensor` without a scale.

**{passed} of PyTorch's operator samples pass** (torch {torch}). For each operator with samples in
`torch.testing._internal.common_methods_invocations`, values and gradients on ScaledTensors equal
the values and gradients on plain tensors, eager and in inference mode (`tests/ops/test_opinfo.py`;
`-m slow` compiles each in one graph). The case tables beside that file test ranges and
equivariance.

These are out of scope, and raise an error that says so: {refused}.

These have nothing to compare: {valueless}.
"""


#: Group -> its families, in the order of the page.
GROUPS = {
    "Layers": "matmul convolution embedding attention softmax norm activation loss",
    "Elementwise functions": "arithmetic powers elementary special derivatives",
    "Sums, order and linear algebra": "reduction order linalg",
    "Shapes, places and new tensors": "views scatter resample creation sparse",
    "Casts": "casts quantize delayed counted by_gemm saved",
    "Training": "optimizer collectives",
    "Without a scaled result": "unsupported",
}


def page() -> str:
    functions = set(rows())
    modules = {family(f).rpartition(".")[2]: family(f) for f in functions}
    groups = {title: [n for n in names.split() if n in modules] for title, names in GROUPS.items()}
    missing = set(modules) - {name for names in groups.values() for name in names}
    assert not missing, f"GROUPS lacks {missing}"
    refused = ", ".join(f"`{name}` ({words})" for name, (_, words) in OUT_OF_SCOPE.items())
    reasons: dict[str, list[str]] = {}
    for name, why in NO_VALUE.items():
        reasons.setdefault(why, []).append(f"`{name}`")
    valueless = "; ".join(f"{', '.join(ops)} ({why})" for why, ops in reasons.items())
    contents = "".join(
        f"- {title}: {', '.join(f'[{name}](#{name})' for name in names)}\n"
        for title, names in groups.items()
    )
    head = HEAD.format(
        contents=contents,
        rules=len(functions),
        overloads=sum(map(len, rows().values())),
        absent=len(registry.absent()),
        torch=torch.__version__.partition("+")[0],
        passed=len(in_scope()),
        refused=refused,
        valueless=valueless,
    )
    for title, names in groups.items():
        head += f"\n## {title}\n" + "".join(section(modules[name]) for name in names)
    return head


def rows() -> dict[Callable[..., Any], list[str]]:
    """Return the operators of each rule; operators of other versions of torch come last."""
    found: dict[Callable[..., Any], list[str]] = {}
    registry.absent()  # registers the rules of the operators that the modules above define
    waiting = ((Absent(name), function) for name, (function, *_) in registry._waiting.items())
    for op, function in (*((op, r.function) for op, r in RULES.items()), *waiting):
        found.setdefault(function, []).append(f"`{str(op).removesuffix('.default')}`")
    return found


def family(function: Callable[..., Any]) -> str:
    """Return the name of the module of a rule."""
    return function.__module__


def section(name: str) -> str:
    module = importlib.import_module(name)
    title = (module.__doc__ or "").strip().partition("\n\n")[0]
    short = name.rpartition(".")[2]
    lines = [f"\n### {short}\n\n{title}\n\n| operators | rule |\n| --- | --- |\n"]
    served = rows()
    if short == "sparse":  # operators that have no rule for dense tensors
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
