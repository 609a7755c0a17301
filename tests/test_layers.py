"""Lower floors never import higher ones, and private torch names stay behind one door."""

import ast
from pathlib import Path

import pytest

import scaledtensor as sct

PACKAGE = Path(sct.__file__).parent
FLOORS = [
    {"_start", "_version", "_torch", "engine", "errors", "formats", "native", "setting"},
    {"_inductor", "cast_nodes", "formed", "forms", "measure", "scale", "singles", "storable"},
    {"recipes"},
    {"site"},
    {"tensor"},
    {"verbs"},
    {"coded", "sparse"},
    {"expanded"},
    {"wrap"},
    {"ops", "shards", "steps"},
    {"functional", "mup"},
    {"nn", "optim"},
    {"interpose"},
    {"simulate"},
    {"histories", "state_dicts"},
    {"guard", "inspect", "machine", "model", "rebalance", "report", "unit_scale"},
    {"checkpoint", "distributed"},
    {"__init__"},
    {"commands", "compat", "demo", "integrations", "testing", "__main__"},
]
FILES = sorted(PACKAGE.rglob("*.py"))
ids = [str(f.relative_to(PACKAGE)) for f in FILES]

#: Private torch names without a public spelling that other modules than _torch.py may use.
ALLOWED = ("torch._ops.OpOverload", "torch.utils._pytree")
OF_COMPILERS = (
    "torch._inductor.",
    "torch._functorch.partitioners.",
    "torch.compiler._is_compiling_flag",
)


def floor(part: str) -> int:
    found = [i for i, parts in enumerate(FLOORS) if part in parts]
    assert found, f"{part} has no floor yet: add it to FLOORS"
    return found[0]


def imports(tree: ast.AST) -> set[str]:
    """Parts of the package that a module imports: `scaledtensor.<part>`."""
    found = set()
    for node in ast.walk(tree):
        names = []
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative import"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        for name in names:
            package, _, rest = name.partition(".")
            if package == "scaledtensor":
                part = rest.partition(".")[0]
                is_part = (PACKAGE / part).is_dir() or (PACKAGE / f"{part}.py").exists()
                found.add(part if part and is_part else "__init__")
    return found


def private_torch_names(tree: ast.AST) -> set[str]:
    """Dotted names below `torch` with a private component, outside annotations."""
    annotations = {
        id(n)
        for node in ast.walk(tree)
        for field in ("annotation", "returns")
        if isinstance(getattr(node, field, None), ast.AST)
        for n in ast.walk(getattr(node, field))
    }
    found = set()
    for node in ast.walk(tree):
        name = ""
        if isinstance(node, ast.Attribute) and id(node) not in annotations:
            name = ast.unparse(node)
        elif isinstance(node, ast.ImportFrom):
            name = f"{node.module}."
        if not name.startswith("torch.") or name.startswith("torch.ops."):
            continue
        if any(part.startswith("_") and not part.endswith("__") for part in name.split(".")):
            found.add(name)
    return found


@pytest.mark.parametrize("file", FILES, ids=ids)
def test__a_module__imports_from_its_own_floor_or_below(file):
    own = floor(file.relative_to(PACKAGE).parts[0].removesuffix(".py"))
    above = {part for part in imports(ast.parse(file.read_text())) if floor(part) > own}
    assert not above


@pytest.mark.parametrize("file", FILES, ids=ids)
def test__private_torch_names__are_in_one_module__and_those_of_inductor_in_another(file):
    if file.name == "_torch.py":
        return
    allowed = (*ALLOWED, *OF_COMPILERS) if file.name == "_inductor.py" else ALLOWED
    names = private_torch_names(ast.parse(file.read_text()))
    assert not {n for n in names if not n.startswith(allowed) and not "torch._ops".startswith(n)}


def test__these_checks__can_fail():
    code = "import scaledtensor.model\nfrom scaledtensor import ops\nimport torch\n"
    code += "x: torch._C.Graph = torch._C.nothing\nfrom torch._inductor import config\n"
    assert imports(ast.parse(code)) == {"model", "ops"}
    assert {"torch._C.nothing", "torch._inductor."} <= private_torch_names(ast.parse(code))
    assert "torch._C.Graph" not in private_torch_names(ast.parse(code))
    assert private_torch_names(ast.parse((PACKAGE / "_torch.py").read_text()))


@pytest.mark.parametrize("file", FILES, ids=ids)
def test__no_module__is_longer_than_a_reader_holds(file):
    assert len(file.read_text().splitlines()) <= 500
