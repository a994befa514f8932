"""How a verdict looks on a page: one of a few styles, each with a sign of its own."""

from __future__ import annotations

from html import escape

from shardproof import verdicts
from shardproof.table import Cell


def head(verdict: object) -> str:
    """A verdict of a comparison without its cause."""
    return str(verdict).split("(", 1)[0].strip()


def look(verdict: object) -> str:
    """The style of a verdict of a case, a check, a cell of the matrix or a timing."""
    word = head(verdict)
    if verdict in ("working precision only", verdicts.WORKING_PRECISION_ONLY):
        return "working"
    if verdict in ("not run", ""):
        return "none"
    if word in ("holds", "faster", "same", "killed"):
        return "pass"
    if word in ("slower", "below", "small difference", "open"):
        return "open"
    if word == "oversubscribed":
        return "skip"
    if word == "survives":
        return "fail"
    kind = verdicts.kind(str(verdict))
    if kind in verdicts.RED:
        return "fail"
    return "open" if kind in verdicts.OPEN else kind


def chip(verdict: str) -> Cell:
    """The verdict with its sign, for a cell of a table."""
    style = look(verdict)
    sign = f'<svg class="m" aria-hidden="true" focusable="false"><use href="#m-{style}"/></svg>'
    return Cell(verdict, html=f'<span class="v v-{style}">{sign}{escape(verdict)}</span>')
