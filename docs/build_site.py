"""Build the documentation site: `make docs`, or `python docs/build_site.py [--out FOLDER]`.

The Markdown of this folder reads well on its own. What only a site needs is added to a copy of it,
in build/docs, and Sphinx builds from this copy (conf.py has its settings):

- the order of the pages, `NAVIGATION`;
- the reference: a page for each public module, with an entry for each public name. The names come
  from `__all__` of the running package. A name that moves to another file keeps its entry;
- CONTRIBUTING.md and CHANGELOG.md, and links that lead to them or to files that no page shows;
- drawings: an SVG file becomes a part of its page, where it follows the page's colours.

Any warning fails the build: a broken link, a missing anchor, a name without an entry.
"""

import argparse
import ast
import importlib
import inspect
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

DOCS = Path(__file__).resolve().parent
ROOT = DOCS.parent
PACKAGE = "scaledtensor"
#: Public modules besides the package itself, in the order of the reference.
MODULES = (
    "formats",
    "formats.numpy",
    "recipes",
    "ops",
    "functional",
    "nn",
    "optim",
    "mup",
    "inspect",
    "checkpoint",
    "distributed",
    "exchange",
    "quantization",
    "testing",
    "errors",
    "integrations.transformers",
    "integrations.lightning",
    "compat.torchao.float8",
    "compat.unit_scaling",
)
#: Captions of the sidebar, with the pages below each.
NAVIGATION = {
    "Learn": ("quickstart", "concepts", "from_nothing", "unit_scaling"),
    "How to": (
        *("how_to/pre_train", "how_to/fine_tune", "how_to/lora", "how_to/transformers"),
        *("how_to/compile", "how_to/several_devices", "how_to/save_and_load"),
        *("how_to/quantize", "how_to/serve", "how_to/cache"),
        *("how_to/same_bits", "how_to/exchange", "how_to/export", "how_to/onnx"),
        *("how_to/simulate", "how_to/formats", "how_to/calibrate", "how_to/test_casts"),
    ),
    "Guide": (
        *("recipes", "formats", "format_pictures", "report", "optimizers"),
        *("checkpoints", "distributed", "modes", "ops"),
    ),
    "Reference": ("reference/index",),
    "Measured": ("benchmarks", "reliability"),
    "Contribute": ("architecture", "CONTRIBUTING", "CHANGELOG"),
}
#: Parts of other pages, which scripts write.
PARTS = ("recipes_measured.md",)
#: Pages of the folder above this one.
OUTSIDE = ("CONTRIBUTING.md", "CHANGELOG.md")
LINK = re.compile(r"(?<!!)\[([^\]]*)\]\((?!https?:|#)([^)\s#]+)(#[^)\s]*)?\)")
DRAWING = re.compile(r"^!\[([^\]]*)\]\(([^)]+\.svg)\)$", re.MULTILINE)


def full_name(module: str) -> str:
    return PACKAGE if module == PACKAGE else f"{PACKAGE}.{module}"


def load(module: str) -> ModuleType | None:
    """Import a module. Return None if the library that it plugs into is not installed."""
    try:
        return importlib.import_module(full_name(module))
    except ModuleNotFoundError as error:
        if (error.name or "").startswith(PACKAGE):
            raise
        return None


def source_of(module: str) -> ast.Module:
    return ast.parse((ROOT / full_name(module).replace(".", "/")).with_suffix(".py").read_text())


def public_names(module: str) -> list[str]:
    """Return `__all__` of a module. A module without that list gives the names that it defines."""
    running = load(module)
    if running is None:
        (names,) = (
            ast.literal_eval(node.value)
            for node in source_of(module).body
            if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__"
        )
    else:
        own = full_name(module)
        defined = [
            n
            for n, x in vars(running).items()
            if getattr(x, "__module__", "") == own and not n.startswith("_")
        ]
        names = getattr(running, "__all__", defined)
    return sorted(names, key=lambda name: name.strip("_").lower())


def assemble(folder: Path) -> None:
    """Write the Markdown that Sphinx reads into `folder`."""
    shutil.rmtree(folder, ignore_errors=True)
    pages = {p.relative_to(DOCS).as_posix(): p for p in sorted(DOCS.rglob("*.md"))}
    pages = {name: p for name, p in pages.items() if name not in PARTS}
    pages |= {name: ROOT / name for name in OUTSIDE}
    pictures = [p for p in DOCS.rglob("*") if p.suffix in (".png", ".svg")]
    for picture in pictures:
        copied = folder / picture.relative_to(DOCS)
        copied.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(picture, copied)
    written = {name: prepared(path, pages) for name, path in pages.items()}
    written["index.md"] += "".join(
        toctree(entries, caption) for caption, entries in NAVIGATION.items()
    )
    written["reference/index.md"] += reference_index()
    written["reference/command_line.md"] = command_line()
    for module in (PACKAGE, *MODULES):
        written[f"reference/{module}.md"] = reference_page(module)
    for name, text in written.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def prepared(page: Path, pages: dict[str, Path]) -> str:
    """The text of a page with its drawings, and with links that the site has."""
    places = {path.resolve(): name for name, path in pages.items()}
    places[ROOT / "README.md"] = "index.md"
    place = places[page.resolve()]

    def linked(found: re.Match[str]) -> str:
        words, target, anchor = found.groups()
        path = (page.parent / target).resolve()
        if (path.is_relative_to(DOCS) and page.is_relative_to(DOCS)) or not path.exists():
            return found[0]  # if it is broken, Sphinx says so
        if path in places:
            return f"[{words}]({'../' * place.count('/')}{places[path]}{anchor or ''})"
        name = path.relative_to(ROOT).as_posix()
        return words if name in words else f"{words} (`{name}`)"

    def drawn(found: re.Match[str]) -> str:
        words, target = found.groups()
        drawing = (page.parent / target).read_text()
        if 'class="drawing"' not in drawing:
            return found[0]
        drawing = drawing[drawing.index("<svg") :]
        lines = [line for line in drawing.splitlines() if line.strip()]  # an empty one ends HTML
        return f'<div class="drawn" role="img" aria-label="{words}">\n' + "\n".join(
            [*lines, "</div>"]
        )

    return DRAWING.sub(drawn, LINK.sub(linked, raised(worded(page.read_text()))))


def worded(text: str) -> str:
    """A fence that names no language is text, and no Python."""
    return re.sub(
        r"^```(\w*)\n(.*?^```)$",
        lambda fence: f"```{fence[1] or 'text'}\n{fence[2]}",
        text,
        flags=re.MULTILINE | re.DOTALL,
    )


def raised(text: str) -> str:
    """`2^-9` in prose as a power; code, headings and other bases stay."""
    parts = re.split(r"(^```.*?^```|^(?: {4}|#).*?$|`[^`]*`|\]\([^)]*\))", text, flags=re.M | re.S)
    return "".join(
        part
        if i % 2
        else re.sub(r"\b(2|10)\^(-?(?:\d+|[a-z]+))(?!\w|[/.]\d)", r"\1<sup>\2</sup>", part)
        for i, part in enumerate(parts)
    )


def toctree(entries: tuple[str, ...], caption: str = "") -> str:
    lines = ["", "```{toctree}", ":hidden:", *([f":caption: {caption}"] if caption else [])]
    return "\n".join([*lines, "", *entries, "```", ""])


def reference_index() -> str:
    lines = ["", "| module | public names |", "|---|---|"]
    for module in (PACKAGE, *MODULES):
        names = ", ".join(
            f"{{py:obj}}`{name} <{full_name(module)}.{name}>`" for name in public_names(module)
        )
        words = module.replace(".", ".<wbr>")
        lines.append(f"| [{words}]({module}.md) | {names} |")
    return "\n".join([*lines, ""]) + toctree(
        (PACKAGE, *(f"{module} <{module}>" for module in MODULES), "command_line")
    )


def command_line() -> str:
    """Return the help of `scaledtensor` and of each command."""

    def helped(*command: str) -> str:
        program = [sys.executable, "-m", PACKAGE, *command, "--help"]
        environment = {**os.environ, "COLUMNS": "80", "NO_COLOR": "1"}
        return subprocess.run(
            program, capture_output=True, text=True, check=True, cwd=ROOT, env=environment
        ).stdout

    first = helped()
    lines = ["# The command line", "", "```text", first + "```", ""]
    for command in re.findall(r"^    ([a-z]+)  ", first, re.MULTILINE):
        lines += [f"## scaledtensor {command}", "", "```text", helped(command) + "```", ""]
    return "\n".join(lines)


def reference_page(module: str) -> str:
    """The module's docstring, and a directive of autodoc for each name."""
    running = load(module)
    # A narrow screen breaks the name after a dot.
    title = full_name(module).replace(".", ".<wbr>")
    lines = [f"# {title}", "", "```{eval-rst}"]
    if running is None:
        described = {
            node.name: ast.get_docstring(node) or ""
            for node in source_of(module).body
            if isinstance(node, ast.ClassDef | ast.FunctionDef)
        }
        lines += [f".. py:module:: {full_name(module)}", ""]
        for name in public_names(module):
            lines += [f".. py:class:: {name}", f"   :module: {full_name(module)}", ""]
            lines += ["   " + line for line in restructured(described[name])] + [""]
    else:
        lines += [f".. automodule:: {full_name(module)}", ""]
        pages = []
        for name in public_names(module):
            value = getattr(running, name)
            page = getattr(value, "__name__", "").removeprefix(PACKAGE + ".")
            if isinstance(value, ModuleType) and page in MODULES:
                pages.append(f"- :doc:`{full_name(page)} <{page}>`: {first_line(value)}")
            else:
                lines += [*directive(module, name, value), ""]
        lines += [".. rubric:: Modules", "", *pages] if pages else []
    return "\n".join([*lines, "```", ""])


def first_line(value: Any) -> str:
    paragraph = (inspect.getdoc(value) or "").partition("\n\n")[0]
    return " ".join(restructured(paragraph))


def directive(module: str, name: str, value: Any) -> list[str]:
    path = f"{full_name(module)}::{name}"
    elsewhere = next((m for m in before(module) if has(m, name, value)), None)
    if elsewhere is not None and not isinstance(value, ModuleType):
        kind = "class" if inspect.isclass(value) else "data"
        same = f"The same as :py:obj:`{full_name(elsewhere)}.{name}`."
        return [f".. py:{kind}:: {name}", f"   :module: {full_name(module)}", "", f"   {same}"]
    if isinstance(value, ModuleType):
        names = ", ".join(f"``{n}``" for n in sorted(getattr(value, "__all__", ())))
        named = [f"   Names: {names}."] if names else []
        return [f".. automodule:: {value.__name__}", "", *named]
    if inspect.isclass(value):
        kind = "exception" if issubclass(value, BaseException) else "class"
        # A tensor's docstring describes its public fields; all others are its own.
        # The methods of a base without a public name are listed with the class's own. A property
        # that the docstring describes has its entry there.
        described = re.findall(r"^    (\w+): ", inspect.getdoc(value) or "", re.MULTILINE)
        bases = [c for c in value.__bases__ if c.__module__.partition(".")[0] == PACKAGE]
        own = [value, *(c for c in bases if not hasattr(load(PACKAGE), c.__name__))]
        methods = {
            n: None
            for c in own
            for n, x in vars(c).items()
            if not n.startswith("_")
            and n not in described
            and (inspect.isroutine(x) or isinstance(x, property))
        }
        members = ", ".join(methods) if issubclass(value, torch.Tensor) else ""
        return [f".. auto{kind}:: {path}", f"   :members: {members}".rstrip()]
    return [f".. auto{'function' if inspect.isroutine(value) else 'data'}:: {path}"]


def before(module: str) -> list[str]:
    """The modules that the reference has before this one."""
    order = [PACKAGE, *MODULES]
    return order[: order.index(module)]


def has(module: str, name: str, value: Any) -> bool:
    return name in public_names(module) and getattr(load(module), name, None) is value


def restructured(docstring: str) -> list[str]:
    """A docstring of this package, which is nearly Markdown, as reStructuredText.

    Words between backticks are code, and so is an indented block below an empty line. Tables stay
    as they are. Every other sign that has a meaning there stands for itself.
    """
    source, lines = docstring.splitlines(), list[str]()
    rulers = [i for i, line in enumerate(source) if re.fullmatch(r"\s*=+( +=+)+", line)]
    table = range(rulers[0], rulers[-1] + 1) if rulers else range(0)
    margin: int | None = None  # of the code
    above = 0
    for part, line in enumerate(escaped(docstring, source)):
        depth = len(line) - len(line.lstrip())
        if margin is not None and line and depth < margin:
            margin = None
        if margin is None and line and lines and not lines[-1] and depth >= above + 4:
            lines += [" " * above + "::", ""]
            margin = depth
        above = depth if line and margin is None else above
        lines.append(line if margin is None and part not in table else source[part])
    return lines


def escaped(text: str, source: list[str]) -> list[str]:
    parts = re.split(r"(`[^`]+`)", text)
    made = "".join(
        f"\\ `{part}`\\ " if i % 2 else re.sub(r"([*|\\]|(?<=\w)_(?!\w))", r"\\\1", part)
        for i, part in enumerate(parts)
    )
    # `\ ` parts code from a letter beside it, and is nothing elsewhere, but not at a line's start.
    made = re.sub(r"(?<![^\s('\"\[/:])\\ (?=``)|(?<=``)\\ (?![^\s)'\"\]/:.,;-])", "", made)
    lines = made.splitlines()
    assert len(lines) == len(source)
    return lines


def main() -> int:
    parser = argparse.ArgumentParser(description="build the documentation site")
    parser.add_argument("--out", type=Path, default=ROOT / "site", help="folder of the site")
    out = parser.parse_args().out.resolve()
    from sphinx.cmd.build import main as sphinx

    sys.path.insert(0, str(ROOT))
    source = ROOT / "build" / "docs"
    assemble(source)
    shutil.rmtree(out, ignore_errors=True)
    options = ["--fail-on-warning", "--fresh-env", "--quiet", "--conf-dir", str(DOCS)]
    doctrees = ["--doctree-dir", str(ROOT / "build" / "doctrees")]
    failed = sphinx([*options, *doctrees, str(source), str(out)])
    if not failed:
        print(f"{len(list(out.rglob('*.html')))} pages: {out / 'index.html'}")
    return failed


if __name__ == "__main__":
    sys.exit(main())
