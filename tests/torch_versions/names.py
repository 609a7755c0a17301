"""The names of torch that the package uses, and the ones among them that other versions lack.

    python tests/torch_versions/names.py write FILE      # every name of the torch of this Python
    python tests/torch_versions/names.py compare FILE OTHERS...

`make torch-names` runs both for each version that pyproject.toml allows. `compare` writes a file
VERSION.json for each other version. It lists the names of the first version that the other one
lacks, and its additional names: of operators, and of every module and class that the package takes
names from.
"""

import ast
import importlib
import inspect
import json
import re
import sys
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

HERE = Path(__file__).parent
PACKAGE = HERE.parents[1] / "scaledtensor"

#: The version of torch that the tests are pinned to.
(PINNED,) = re.findall(r"TORCH \?= torch==(\S+)", (PACKAGE.parent / "Makefile").read_text())

#: Modules of torch that define operators with rules, or that load at their first use.
DEFINING = ("torch.distributed.tensor", "torch.distributed.fsdp", "torch._prims")
NAMESPACES = ("aten", "prims", "c10d", "_c10d_functional", "fsdp")

#: Owners of private attributes, such as `x._version`: maps a class to an object of it.
HOLDERS = {
    "torch.Tensor": lambda: torch.zeros(()),
    "torch.nn.Module": torch.nn.Module,
    "torch._ops.OpOverload": lambda: torch.ops.aten.add.Tensor,
    "torch.distributed.tensor.DTensor": lambda: resolve("torch.distributed.tensor.DTensor"),
}

# --- what the package uses -------------------------------------------------------------------


@cache
def used(package: Path = PACKAGE) -> frozenset[str]:
    """Return dotted names of torch in the code, `torch.nn.functional.gelu`, in any spelling.

    Operators are left out, because their rules name them.
    """
    files = [Reader(ast.parse(file.read_text())) for file in sorted(package.rglob("*.py"))]
    own = set().union(*(file.defined for file in files))
    names = (name for file in files for name in file.names(own))
    return frozenset(n for n in names if n.startswith("torch.") and n.split(".")[1] != "ops")


class Reader:
    """Return the names in a module's code."""

    def __init__(self, tree: ast.Module) -> None:
        self.imported: dict[str, str] = {}
        """Map a name here to its name in torch, or to `torch.ops.` and a namespace."""
        self.aliases: dict[str, list[str]] = {}
        """Follow assignments such as `frames = torch._C._dynamo.eval_frame`, and later uses of
        `frames`."""
        self.defined: set[str] = set()
        """Return the value that the code assigns to a name or an attribute."""
        self.read: list[tuple[list[str], frozenset[str]]] = []
        """Return the longest dotted names, each with the variables of the functions around it."""
        self._visit(tree, frozenset())

    def names(self, own: set[str]) -> Iterator[str]:
        yield from self.imported.values()
        for (root, *rest), variables in self.read:
            first, *more = self.aliases.get(root, [root])
            if first in self.imported and first != root:
                root, rest, variables = first, more + rest, frozenset()
            private = [part for part in rest if part.startswith("_") and part[-2:] != "__"]
            if root in self.imported and root not in variables:
                yield ".".join([self.imported[root], *rest])
            elif private and private[0] not in own:
                yield from held(private[0])

    def _visit(self, node: ast.AST, variables: frozenset[str]) -> None:
        if isinstance(node, ast.Import | ast.ImportFrom):
            self._import(node)
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            self.aliases[node.targets[0].id] = _dotted(node.value) or ["?"]
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            self.defined.add(node.name)
        if isinstance(node, ast.FunctionDef | ast.Lambda):
            variables |= {n.arg for n in ast.walk(node) if isinstance(n, ast.arg)} | {
                n.id
                for n in ast.walk(node)
                if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)
            }
        dotted = _dotted(node)
        if dotted:
            if isinstance(node.ctx, ast.Store):  # type: ignore[attr-defined]
                self.defined.add(dotted[-1])
            else:
                self.read.append((dotted, variables))
        if not dotted or dotted[0] == "?":
            for child in ast.iter_child_nodes(node):
                self._visit(child, variables)

    def _import(self, node: ast.Import | ast.ImportFrom) -> None:
        module = f"{node.module}." if isinstance(node, ast.ImportFrom) else ""
        for a in node.names:
            name = module + a.name
            if module == "scaledtensor.ops.operators.":
                self.imported[a.asname or a.name] = f"torch.ops.{a.name}"
            if name.split(".")[0] == "torch":
                here = a.asname or (a.name if module else "torch")
                self.imported[here] = name if module or a.asname else "torch"


def _dotted(node: ast.AST) -> list[str]:
    """Return parts such as ["torch", "nn", "Linear"], with "?" for an expression, or [] if it is no
    name."""
    if isinstance(node, ast.Name):
        return [node.id]
    if isinstance(node, ast.Attribute):
        return [*(_dotted(node.value) or ["?"]), node.attr]
    return []


def held(attribute: str) -> Iterator[str]:
    """Return a private attribute of an object as an attribute of the class of torch that has it."""
    for name, make in HOLDERS.items():
        if hasattr(make(), attribute):
            yield f"{name}.{attribute}"
            return


# --- what a torch has ------------------------------------------------------------------------


def resolve(name: str) -> Any:
    """Return the object of a dotted name.

    Raises:
        AttributeError: this torch has no such name.
    """
    first, *rest = name.split(".")
    found, path = importlib.import_module(first), first
    for part in rest:
        path = f"{path}.{part}"
        if isinstance(found, ModuleType) and not hasattr(found, part):
            try:
                found = importlib.import_module(path)
            except ImportError as error:
                raise AttributeError(path) from error
        elif not hasattr(found, part) and path.rpartition(".")[0] in HOLDERS:
            found = getattr(HOLDERS[path.rpartition(".")[0]](), part)
        else:
            found = getattr(found, part)
    return found


def has(name: str) -> bool:
    try:
        resolve(name)
    except AttributeError:
        return False
    return True


def operators() -> list[str]:
    """Return overloads of the libraries that have rules, by `str` of each."""
    for module in DEFINING:
        importlib.import_module(module)
    found = set()
    for schema in torch._C._jit_get_all_schemas():
        namespace, _, name = schema.name.partition("::")
        if namespace in NAMESPACES:
            found.add(f"{namespace}.{name}.{schema.overload_name or 'default'}")
    return sorted(found)


def members() -> dict[str, list[str] | None]:
    """Map each module or class that the package takes names from to its names, or to None if it is
    missing."""
    found: dict[str, list[str] | None] = {}
    for name in sorted(used()):
        parts = name.split(".")
        for n in range(1, len(parts) + 1):
            owner = ".".join(parts[:n])
            if owner not in found:
                thing = resolve(owner) if has(owner) else None
                if n < len(parts) or isinstance(thing, ModuleType):
                    found[owner] = None if thing is None else _own_names(owner, thing)
    return found


def _own_names(owner: str, thing: Any) -> list[str]:
    """Return names without modules, which exist once imported, and without names of other
    libraries."""
    of = HOLDERS[owner]() if owner in HOLDERS else thing
    given = {n: inspect.getattr_static(of, n, None) for n in dir(of) if n[:2] != "__"}
    return sorted(
        name
        for name, value in given.items()
        if not isinstance(value, ModuleType)
        and (getattr(value, "__module__", None) or "torch").split(".")[0] == "torch"
    )


# --- the files -------------------------------------------------------------------------------


def recorded() -> dict[str, dict[str, Any]]:
    """Map each version to its differences from the version that the tests are pinned to."""
    return {file.stem: json.loads(file.read_text()) for file in sorted(HERE.glob("*.json"))}


def lacking(version: str, names: Iterable[str]) -> list[str]:
    """Return the names that a version was recorded to lack, and the names in them."""
    lacks = recorded()[version]["lacks"]
    gone = {f"{owner}.{name}" for owner, words in lacks.items() for name in words.split()}
    parts = ((name, name.split(".")) for name in names)
    return sorted(n for n, p in parts if any(".".join(p[:i]) in gone for i in range(2, len(p) + 1)))


def difference(first: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    """Return the content of the file of `other`, from the outputs of `write` for both."""
    lacks: dict[str, set[str]] = {}
    for owner, names in first["members"].items():
        theirs = other["members"].get(owner)
        if names is not None and theirs is not None:
            lacks.setdefault(owner, set()).update(set(names) - set(theirs))
        elif names is not None:
            parent, _, name = owner.rpartition(".")
            lacks.setdefault(parent, set()).add(name)
    mine, theirs = set(first["operators"]), set(other["operators"])
    return {
        "lacks": {owner: " ".join(sorted(gone)) for owner, gone in sorted(lacks.items()) if gone},
        "lacks operators": " ".join(sorted(mine - theirs)),
        "adds operators": " ".join(sorted(theirs - mine)),
    }


def main(verb: str, *files: str) -> None:
    if verb == "write":
        version = torch.__version__.partition("+")[0]
        told = {"version": version, "members": members(), "operators": operators()}
        Path(files[0]).write_text(json.dumps(told))
        return
    first, *others = (json.loads(Path(file).read_text()) for file in files)
    for other in others:
        text = json.dumps(difference(first, other), indent=1)
        (HERE / f"{other['version']}.json").write_text(text + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
