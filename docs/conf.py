"""The documentation site: pages in Markdown (MyST) and an API reference from the docstrings.

``make docs`` builds it into ``build/docs`` with warnings as errors.
"""

from __future__ import annotations

import re
from pathlib import Path

from sphinx.application import Sphinx

import fanfold

_DOCS = Path(__file__).parent

project = "Fanfold"
author = "The Fanfold authors"
release = fanfold.__version__
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx.ext.viewcode"]
exclude_patterns = ["README.md"]

html_theme = "furo"
html_title = f"Fanfold {release}"

# Pages link to headings of other pages as on GitHub.
myst_heading_anchors = 4

autodoc_default_options = {"members": True, "member-order": "bysource"}
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
autodoc_preserve_defaults = True
# Classes have their arguments in their own docstrings.
autoclass_content = "class"
napoleon_numpy_docstring = False
napoleon_use_ivar = True

_LINK = re.compile(r"\[([^\]]+)\]\((\.\./[^)#\s]+)[^)]*\)")


def _unlink_what_is_elsewhere(app: Sphinx, page: str, source: list[str]) -> None:
    """Leaves the text of links to files of the repository that are no pages. Links to files that
    do not exist stay, and fail."""
    here = (_DOCS / page).parent

    def text(link: re.Match[str]) -> str:
        target = (here / link[2]).resolve()
        elsewhere = target.exists() and not target.is_relative_to(_DOCS)
        return link[1] if elsewhere else link[0]

    source[0] = _LINK.sub(text, source[0])


def setup(app: Sphinx) -> None:
    """Called by Sphinx."""
    app.connect("source-read", _unlink_what_is_elsewhere)
