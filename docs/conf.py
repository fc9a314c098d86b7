# SPDX-FileCopyrightText: 2026 The jaxfp8 Authors
# SPDX-License-Identifier: Apache-2.0
"""Sphinx: the documents of this folder and the API reference from docstrings (`make docs`)."""

import importlib.util
import re
from typing import Any

import jaxfp8

project = "jaxfp8"
author = "The jaxfp8 Authors"
copyright = "2026, The jaxfp8 Authors"
version = release = jaxfp8.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
source_suffix = {".md": "markdown", ".rst": "restructuredtext"}
myst_heading_anchors = 3
# Its docstrings cannot be read where torch is not installed.
exclude_patterns = [] if importlib.util.find_spec("torch") else ["api-torch.rst"]

# `name` in a docstring is code.
default_role = "code"
autodoc_member_order = "bysource"
# A dataclass documents its attributes in its docstring: they are not to be listed again.
napoleon_use_ivar = True
napoleon_google_docstring = True
napoleon_numpy_docstring = False

html_theme = "alabaster"
html_theme_options = {
    "description": "FP8 attention prefill for AMD gfx942 in JAX Pallas",
    "fixed_sidebar": True,
    "page_width": "1080px",
}
html_copy_source = False


def _as_text(app: Any, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
    """Docstrings are written as text: outside of `code`, a bar is a bar and a star is a star."""
    lines[:] = [
        line
        if line.lstrip().startswith((">>>", "..."))
        else re.sub(r"`[^`]*`|[|*]", lambda m: m[0] if m[0][0] == "`" else f"\\{m[0]}", line)
        for line in lines
    ]


def _skip_fields(app: Any, what: str, name: str, obj: Any, skip: bool, options: Any) -> bool | None:
    """Fields of a NamedTuple: its docstring describes them."""
    return True if type(obj).__name__ == "_tuplegetter" else None


def setup(app: Any) -> None:
    """Called by Sphinx."""
    app.connect("autodoc-skip-member", _skip_fields)
    app.connect("autodoc-process-docstring", _as_text, priority=400)  # before napoleon's
