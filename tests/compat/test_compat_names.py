"""Every public name of the published package is here, or on a list with the reason."""

import ast
import importlib
import inspect
from pathlib import Path

import pytest
from assertions import assert_each

from scaledtensor.compat import unit_scaling as uu

published = pytest.importorskip("unit_scaling")

ROOT = Path(published.__file__).parent
MODULES = sorted(
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix("__init__").strip(".")
    for path in ROOT.rglob("*.py")
    if "tests" not in path.parts and (path.name == "__init__.py" or not path.name.startswith("_"))
)

#: Modules and names that are not here, each with its reason.
ABSENT = {
    "docs": "decorators by which the published package writes its docstrings",
    "transforms.utils": "edits graphs of Dynamo's; transforms are modes here, see interpose",
    "utils.ScaleTrackingInterpreter": "runs a traced graph; here the model itself runs",
}


def public_names(module: str) -> list[str]:
    """Read the names from the source, as some modules import packages that are not installed."""
    path = ROOT.joinpath(*module.split(".")) if module else ROOT
    path = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    tree = ast.parse(path.read_text())
    names = []
    for node in tree.body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            names.append(node.name)
        elif ast.unparse(node).startswith("__all__ = ["):
            names += ast.literal_eval(node.value)
    return [n for n in names if not n.startswith("_") or n == "__version__"]


def ours(module: str):
    return importlib.import_module(f"{uu.__name__}.{module}".rstrip("."))


PRESENT = [
    (module, name)
    for module in MODULES
    for name in public_names(module)
    if module not in ABSENT and f"{module}.{name}" not in ABSENT
]


def test__the_published_modules__are_found():
    assert {"", "analysis", "core.functional", "formats", "functional", "transforms"} <= {*MODULES}
    assert len(PRESENT) > 80


def test__every_published_name__is_here():
    assert [(m, n) for m, n in PRESENT if not hasattr(ours(m), n)] == []
    assert [(m, n) for m, n in PRESENT if n not in ours(m).__all__] == []


def test__the_list_of_what_is_absent__is_true():
    for entry in ABSENT:
        if entry in MODULES:
            with pytest.raises(ModuleNotFoundError):
                ours(entry)
        else:
            module, _, name = entry.rpartition(".")
            assert name in public_names(module)
            assert not hasattr(ours(module), name)


def functions():
    for module, name in PRESENT:
        try:
            theirs = getattr(importlib.import_module(f"unit_scaling.{module}".rstrip(".")), name)
        except ImportError:  # The module needs an optional package.
            continue
        if inspect.isfunction(theirs) or inspect.isclass(theirs):
            yield theirs, getattr(ours(module), name)


#: `track_scales` makes these; users do not call them. One is an autograd function.
NOT_CALLED = {"Metrics", "ScaleTracker"}
#: These take scales only, or one parameter, and their operands have other names here.
BY_POSITION = {"to_grad_input_scale", "to_left_grad_scale", "to_right_grad_scale"}
BY_POSITION |= {"lr_scale_for_depth", "lr_scale_func_adam"}


def test__a_call_of_a_published_function__is_a_call_here():
    """Positional parameters are in the published order, and all have the published names."""
    pairs = list(functions())
    assert len(pairs) > 70
    assert_each(pairs, lambda pair: _takes_the_calls(*pair))


def _takes_the_calls(theirs, mine):
    if mine.__name__ in NOT_CALLED:
        return
    named = [p for p in inspect.signature(theirs).parameters.values() if p.kind != p.VAR_KEYWORD]
    here = inspect.signature(mine).parameters
    if mine.__name__ in BY_POSITION:
        assert len(named) == len(here)
        return
    if any(p.kind == p.VAR_POSITIONAL for p in named):  # constraints, optimizers
        named = [p for p in named if p.kind == p.KEYWORD_ONLY]
    positional = [p.name for p in named if p.kind == p.POSITIONAL_OR_KEYWORD]
    assert list(here)[: len(positional)] == positional
    assert {p.name for p in named} <= {*here}
    assert all(here[p.name].default is not p.empty for p in named if p.default is not p.empty)
