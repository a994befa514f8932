"""How a verdict looks on a page: one of a few styles, each with a sign of its own."""

from __future__ import annotations

from html import escape

from shardproof import verdicts
from shardproof.table import TableCell

#: Words that are no verdicts of cases, or look otherwise.
_LOOKS = {
    **dict.fromkeys(("working precision only", verdicts.WORKING_PRECISION_ONLY), "working"),
    **dict.fromkeys(("not run", "measured", ""), "none"),
    **dict.fromkeys(("holds", "faster", "same", "killed"), "pass"),
    **dict.fromkeys(("slower", "below", "small difference", "open"), "open"),
    "oversubscribed": "skip",
    "survives": "fail",
}


def head(verdict: object) -> str:
    """A verdict of a comparison without its cause."""
    return str(verdict).split("(", 1)[0].strip()


def look(verdict: object) -> str:
    for word in (str(verdict), head(verdict)):
        if word in _LOOKS:
            return _LOOKS[word]
    kind = verdicts.kind(str(verdict))
    return "fail" if kind in verdicts.RED else "open" if kind in verdicts.OPEN else kind


def chip(verdict: str) -> TableCell:
    """The verdict with its sign, for a cell of a table."""
    style = look(verdict)
    sign = f'<svg class="m" aria-hidden="true" focusable="false"><use href="#m-{style}"/></svg>'
    return TableCell(verdict, html=f'<span class="v v-{style}">{sign}{escape(verdict)}</span>')
