"""Sphinx settings: Markdown pages, and the docstrings of the public names."""

project = "Spillway"
author = "The Spillway authors"
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
myst_heading_anchors = 2
exclude_patterns = ["_build"]
html_theme = "furo"
html_title = "Spillway"
autodoc_member_order = "bysource"
autodoc_typehints = "description"
nitpicky = False
