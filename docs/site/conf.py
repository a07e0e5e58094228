"""Settings of Sphinx for the documentation site; `python -m docs.site` uses them."""

import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from docs.site.interface import escaped  # noqa: E402

project = "Bagua Kernels"
html_title = project
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
root_doc = "index"

myst_heading_anchors = 6
# A page may link an anchor that is no head. docs/site/links.py checks all anchors in the finished pages.
suppress_warnings = ["myst.xref_missing"]
highlight_language = "text"
# Furo's own style for dark pages underlines names in code, which then look like links.
pygments_dark_style = "github-dark"

# Docstrings have names in single backticks. Those of public objects become links.
default_role = "py:obj"
autodoc_member_order = "bysource"
autodoc_typehints = "none"
autodoc_preserve_defaults = True
autodoc_mock_imports = ["cupy", "triton"]
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_ivar = True
add_module_names = False
toc_object_entries_show_parents = "hide"

html_theme = "furo"
html_static_path = [str(Path(__file__).parent / "static")]
html_css_files = ["site.css"]
html_copy_source = False
html_show_copyright = False
html_show_sphinx = False


def _prepare(app: Any, what: str, name: str, value: Any, options: Any, lines: list[str]) -> None:
    """Escapes a docstring. A value has none: what autodoc finds is that of its class."""
    lines[:] = [] if what == "data" else escaped(lines)


def setup(app: Any) -> None:
    """Connects the preparation of docstrings, before that of Napoleon."""
    app.connect("autodoc-process-docstring", _prepare, priority=400)
