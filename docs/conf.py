"""Sphinx settings of the documentation site, which ``make docs`` builds.

The source folder is the repository, so that links between pages and into the source work as they do
on the host of the repository.  Linked source files become pages of their own.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

from docutils import nodes
from pygments import highlight
from pygments.formatters import HtmlFormatter
from pygments.lexers import get_lexer_for_filename
from pygments.util import ClassNotFound
from sphinx import addnodes
from sphinx.application import Sphinx
from sphinx.util.osutil import relative_uri

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "docs"))
from reference import filled  # noqa: E402

project = "Shardproof"
author = "The Shardproof developers"
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx_copybutton"]
root_doc = "docs/index"
include_patterns = [
    "docs/**.md",
    "results/README.md",
    "results/evidence/**.md",
    "scenarios/conformance/quick.md",
    "deploy/**.md",
    "CHANGELOG.md",
    "CONTRIBUTING.md",
    "SECURITY.md",
]
exclude_patterns = ["results/evidence/*/*"]  # runs that pages are generated from
myst_heading_anchors = 4
autodoc_member_order = "bysource"
autodoc_typehints = "description"
html_theme = "furo"
html_title = "Shardproof"
html_copy_source = False
smartquotes = False  # it makes a dash of the "--" of options
copybutton_prompt_text = r"\$ "
copybutton_prompt_is_regexp = True


def adapt_page(app: Sphinx, name: str, source: list[str]) -> None:
    """Write what the repository's host shows, and Sphinx does not, in the words of MyST.

    Anchors in HTML become targets (a number alone is none), links to folders lose their link, and
    parts that are generated are filled in.
    """
    folder = Path(app.env.doc2path(name)).parent

    def without_folder(found: re.Match[str]) -> str:
        return found[1] if (folder / found[2]).is_dir() else found[0]

    text = re.sub(r'<a id="(\d+)"></a>', r"(finding-\1)=", filled(source[0]))
    text = re.sub(r'<a id="([a-z][a-z0-9-]*)"></a>', r"(\1)=\n", text)
    text = re.sub(r"\[([^\]]+)\]\(([\w./-]+)\)", without_folder, text)
    source[0] = re.sub(r"\]\(((?:\S*findings\.md)?)#(\d+)\)", r"](\1#finding-\2)", text)


class SourcePages:
    """Pages with the text of source files, for the links that lead out of the documentation."""

    def __init__(self) -> None:
        self.linked: set[str] = set()

    def link(self, app: Sphinx, tree: nodes.document) -> None:
        """Replace each link to a source file by a link to its page."""
        here = app.builder.get_target_uri(app.env.current_document.docname)
        for reference in [*tree.findall(addnodes.download_reference)]:
            target = (
                Path(app.env.doc2path(app.env.current_document.docname)).parent
                / reference["reftarget"]
            ).resolve()
            name = target.relative_to(ROOT).as_posix()
            self.linked.add(name)
            link = nodes.reference(
                "", "", internal=True, refuri=relative_uri(here, f"source/{name}.html")
            )
            link += reference.children
            reference.replace_self(link)

    def write(self, app: Sphinx, error: Exception | None) -> None:
        """Write a page for every file that was linked, and a start page that leads to ours."""
        if error is not None or app.builder.format != "html":
            return
        start = Path(app.outdir) / "index.html"
        start.write_text('<meta http-equiv="refresh" content="0; url=docs/index.html">')
        for name in sorted(self.linked):
            page = Path(app.outdir) / "source" / f"{name}.html"
            page.parent.mkdir(parents=True, exist_ok=True)
            text = (ROOT / name).read_text()
            try:
                lexer = get_lexer_for_filename(name)
            except ClassNotFound:
                lexer = get_lexer_for_filename("plain.txt")
            formatter = HtmlFormatter(
                full=True, title=name, linenos="inline", lineanchors="L", anchorlinenos=True
            )
            page.write_text(highlight(text, lexer, formatter))


def setup(app: Sphinx) -> dict[str, Any]:
    """Connect the two steps above to the build."""
    pages = SourcePages()
    app.connect("source-read", adapt_page)
    app.connect("doctree-read", pages.link)
    app.connect("build-finished", pages.write)
    return {"parallel_read_safe": False}
