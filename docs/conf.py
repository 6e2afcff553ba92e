"""Sphinx's configuration: `python -m sphinx -W -b html docs build/docs`.

Loads nothing from the network.
"""

from __future__ import annotations

import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

import cupykern  # noqa: E402

project = "cupykern"
author = "the cupykern authors"
project_copyright = "the cupykern authors, Apache-2.0"
version = release = cupykern.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "docstrings", "generated"]
source_suffix = {".md": "markdown"}
exclude_patterns = ["results.html"]
default_role = "code"
smartquotes = False  # "bhsd" is code
highlight_language = "python"

myst_heading_anchors = 4
myst_enable_extensions = ["colon_fence", "deflist"]

autodoc_typehints = "none"  # the docstrings say types, shapes and dtypes
autodoc_member_order = "bysource"
add_module_names = False

html_theme = "furo"
html_title = f"cupykern {release}"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_show_sphinx = False
html_copy_source = False
html_theme_options = {
    "light_css_variables": {"color-brand-primary": "#1f5fbf", "color-brand-content": "#1f5fbf"},
    "dark_css_variables": {"color-brand-primary": "#86b4f5", "color-brand-content": "#86b4f5"},
}
