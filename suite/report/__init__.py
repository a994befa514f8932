"""A run, shown: on the terminal, as Markdown, and as one self-contained page.

tables, memory, kills, capability_matrix, limits, summary, environment   rows and sentences, pure
svg, bars, curves, forest, timelines, heat                    drawings from the same rows
terminal, text, page                                          the three forms
"""

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
