"""Configuration of the documentation: pages in Markdown, reference pages made from the code."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent / "_ext"))

import regress

project = "regress"
author = "the regress developers"
copyright = "2026, the regress developers"
version = release = regress.__version__
extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx_click",
    "from_code",
    "llms",
    "objectives",
]
html_theme = "furo"
html_title = "regress"
exclude_patterns = ["_build", "_ext"]
myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 3
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_preserve_defaults = True
napoleon_google_docstring = True
napoleon_use_rtype = False
# a single backtick in a docstring marks code, as it does in Markdown
default_role = "code"
