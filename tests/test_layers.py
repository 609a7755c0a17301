"""Lower floors never import higher ones, and private torch names stay in one module."""

import ast
import re
import runpy
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from floors import FLOORS

import scaledtensor as sct

PACKAGE = Path(sct.__file__).parent
ROOT = Path(__file__).parent.parent
FILES = sorted(PACKAGE.rglob("*.py"))

#: Private torch names without a public spelling, which any module may use.
ALLOWED = ("torch._ops.OpOverload", "torch.utils._pytree")
OF_COMPILERS = (
    "torch._inductor.",
    "torch._functorch.partitioners.",
    "torch.compiler._is_compiling_flag",
)


def floor(part: str) -> int:
    found = [i for i, parts in enumerate(FLOORS) if part in parts]
    assert found, f"{part} has no floor yet: add it to tests/floors.py"
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


def imports_from_above(file: Path) -> set[str]:
    own = floor(file.relative_to(PACKAGE).parts[0].removesuffix(".py"))
    return {part for part in imports(ast.parse(file.read_text())) if floor(part) > own}


def forbidden_torch_names(file: Path) -> set[str]:
    if file.name == "_torch.py":
        return set()
    allowed = (*ALLOWED, *OF_COMPILERS) if file.name.startswith("_inductor") else ALLOWED
    names = private_torch_names(ast.parse(file.read_text()))
    return {n for n in names if not n.startswith(allowed) and not "torch._ops".startswith(n)}


def lines_above_500(file: Path) -> int:
    return max(0, len(file.read_text().splitlines()) - 500)


def offending(check: Callable[[Path], object]) -> dict[str, object]:
    """Files of the package for which a check finds something, each with its findings."""
    found = {str(file.relative_to(PACKAGE)): check(file) for file in FILES}
    return {file: findings for file, findings in found.items() if findings}


def test__every_module__imports_from_its_own_floor_or_below():
    assert offending(imports_from_above) == {}


def test__private_torch_names__are_in_one_module__and_names_of_inductor_in_another():
    assert offending(forbidden_torch_names) == {}


def test__no_module__is_longer_than_a_reader_holds():
    assert offending(lines_above_500) == {}


def test__these_checks__can_fail():
    code = "import scaledtensor.models.scale_model\nfrom scaledtensor import ops\nimport torch\n"
    code += "x: torch._C.Graph = torch._C.nothing\nfrom torch._inductor import config\n"
    assert imports(ast.parse(code)) == {"models", "ops"}
    assert {"torch._C.nothing", "torch._inductor."} <= private_torch_names(ast.parse(code))
    assert "torch._C.Graph" not in private_torch_names(ast.parse(code))
    assert private_torch_names(ast.parse((PACKAGE / "_torch.py").read_text()))
    assert len(offending(lambda file: "everything")) == len(FILES) > 100


def test__every_floor__names_modules_that_exist__each_once():
    named = [part for parts in FLOORS for part in parts]
    there = {file.relative_to(PACKAGE).parts[0].removesuffix(".py") for file in FILES}
    assert sorted(named) == sorted(there)


def test__only_backends__compare_kinds_of_devices():
    """All other code asks `backend_of(x)` for a fact."""
    branch = re.compile(r"\.is_cpu\b|\.is_cuda\b|\bdevice\.type (?:[!=]=|in|not in) ")
    found = {
        str(file.relative_to(PACKAGE))
        for file in FILES
        if branch.search(file.read_text()) and file.parent.name != "backends"
    }
    assert not found


def test__modules_of_the_tests__have_names_of_their_own():
    """pytest puts every folder of tests on `sys.path`: one of two with one name is hidden."""
    names = Counter(file.stem for file in ROOT.glob("tests/**/*.py"))
    assert len(names) > 100
    assert {name for name, n in names.items() if n > 1} <= {"conftest", "__main__"}


def test__architecture_md__lists_these_floors():
    script = runpy.run_path(str(ROOT / "docs" / "write_floors.py"))
    page = (ROOT / "docs" / "architecture.md").read_text()
    assert page == script["written"](page), "python docs/write_floors.py"
