"""A run, shown: on the terminal, as Markdown, and as one self-contained page."""

from shardproof.report.page import html
from shardproof.report.tables import closing, medians, skips
from shardproof.report.terminal import show, show_kills
from shardproof.report.text import document, insert, markdown

__all__ = [
    "closing",
    "document",
    "html",
    "insert",
    "markdown",
    "medians",
    "show",
    "show_kills",
    "skips",
]
