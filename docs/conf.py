"""Settings of Sphinx, which `python docs/build_site.py` runs on the pages that it assembled."""

import dataclasses
import inspect
import sys
from pathlib import Path
from typing import Any

from sphinx.application import Sphinx

sys.path.insert(0, str(Path(__file__).parent))
from build_site import restructured

import scaledtensor as sct

project = "scaledtensor"
release = sct.__version__
copyright = ""
extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx_copybutton",
]

myst_heading_anchors = 4  # links to headings work as they do on GitHub
suppress_warnings = ["myst.header"]  # a page may begin with a comment

html_theme = "furo"
html_title = "scaledtensor"
html_show_sphinx = False
html_show_copyright = False
html_copy_source = False
html_favicon = "static/icon.svg"
pygments_style = "friendly"
pygments_dark_style = "github-dark"
html_static_path = ["static"]
html_css_files = ["site.css"]
_fonts = {
    "font-stack": "system-ui, -apple-system, 'Segoe UI', Roboto, 'DejaVu Sans', sans-serif",
    "font-stack--monospace": "ui-monospace, SFMono-Regular, Menlo, Consolas, "
    "'DejaVu Sans Mono', monospace",
}
html_theme_options = {
    "light_css_variables": {
        **_fonts,
        "color-brand-primary": "#16456f",
        "color-brand-content": "#0062a8",
    },
    "dark_css_variables": {
        **_fonts,
        "color-brand-primary": "#8ec7f2",
        "color-brand-content": "#6cb8f0",
    },
}

default_role = "code"  # in tables of docstrings
add_module_names = False
autodoc_inherit_docstrings = False
autodoc_member_order = "bysource"
autodoc_preserve_defaults = True
autodoc_class_signature = "mixed"
python_maximum_signature_line_length = 76
toc_object_entries_show_parents = "hide"
napoleon_use_rtype = False


def describe(app: Sphinx, what: str, name: str, value: Any, options: Any, lines: list[str]) -> None:
    """Docstrings as reStructuredText. A constant has no docstring of its own, but a class's."""
    of_class = inspect.getdoc(type(value)) or ""
    if what in ("data", "attribute") and lines and lines[0] == of_class.partition("\n")[0]:
        lines.clear()
    # Napoleon takes words before a colon in the first line of an attribute for its type. An empty
    # comment is a first line without one.
    first = ["..", ""] if lines and what in ("data", "attribute", "property") else []
    lines[:] = [*first, *restructured("\n".join(lines)), ""]


def fields(
    app: Sphinx, what: str, name: str, value: Any, options: Any, signature: str, returns: str
) -> tuple[str, str] | None:
    """The fields of a dataclass that takes them as keywords only, and says so nowhere."""
    if not dataclasses.is_dataclass(value) or not (signature or "").startswith("(*args"):
        return None
    made = []
    for field in dataclasses.fields(value):
        given = field.default is not dataclasses.MISSING
        default = field.default if given else inspect.Parameter.empty
        kind = inspect.Parameter.KEYWORD_ONLY
        made.append(inspect.Parameter(field.name, kind, default=default))
    return str(inspect.Signature(made)), returns


def setup(app: Sphinx) -> None:
    app.connect("autodoc-process-docstring", describe, priority=100)
    app.connect("autodoc-process-signature", fields)
