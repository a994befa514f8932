"""Badges: one SVG per strategy x backend x capability, one overall, and an index of them.

A badge is two boxes of text; its words say all that its colour says.  Colours keep apart under
every colour blindness and have the contrast of WCAG 2.1 AA (4.5 to 1) with their text.  Nothing is
loaded: widths come from a table of the widths of Verdana's letters, and ``textLength`` makes any
other font of the reader's machine fit them.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Mapping
from itertools import groupby
from pathlib import Path
from xml.sax.saxutils import escape, quoteattr

from shardproof import verdicts
from shardproof.checks.results import CaseResult, LeftOut
from shardproof.errors import Problem, SelectionError, printable
from shardproof.files import write_whole
from shardproof.report.capability_matrix import CapabilityCell, State, cells
from shardproof.runs.run_folder import Run

INDEX, OVERALL = "badges.md", "overall.svg"

#: State of a cell -> fill and text.
COLOURS: dict[State, tuple[str, str]] = {
    "fail": ("#c23a00", "#ffffff"),
    "open": ("#f0c000", "#111111"),
    "xfail": ("#5b2a86", "#ffffff"),
    "working precision only": ("#8ec5ff", "#111111"),
    "pass": ("#00694d", "#ffffff"),
    "skip": ("#b4bac2", "#111111"),
    "not run": ("#f1f3f5", "#111111"),
}
_LABEL = ("#24292f", "#ffffff")

#: How every badge begins: what ends in .svg and begins otherwise is not ours.
_BEGIN = '<svg xmlns="http://www.w3.org/2000/svg" class="shardproof-badge"'
_SIZE, _PADDING, _HEIGHT = 11, 6, 20

#: Widths of Verdana's letters from " " to "~" in thousandths of the size of the font; 1000 is the
#: widest.
_VERDANA = """
    352 394 459 818 636 1000 727 269 454 454 636 818 364 454 364 454
    636 636 636 636 636 636 636 636 636 636 454 454 818 818 818 545
    1000 684 686 698 771 632 575 775 751 421 454 693 557 843 748 787
    603 787 695 684 616 732 684 989 685 615 685 454 454 454 818 636
    636 601 623 521 623 596 352 623 633 274 274 592 274 973 633 607
    623 623 427 521 394 633 592 818 592 592 525 635 454 635 818
"""
_WIDTHS = [int(number) for number in _VERDANA.split()]


def width(text: str) -> int:
    """Width of ``text`` in pixels, rounded up; letters beyond the table count as the widest."""
    places = (ord(letter) - ord(" ") for letter in text)
    widths = (_WIDTHS[n] if 0 <= n < len(_WIDTHS) else 1000 for n in places)
    return -(-sum(widths) * _SIZE // 1000)


def badge(label: str, message: str, state: State, about: str) -> str:
    """An SVG: ``label`` on the left, ``message`` in the colour of ``state``, titled ``about``.

    Control characters, which XML cannot hold, become ``?``.
    """
    label, message, about = (
        re.sub("[^ -\ud7ff\ue000-\ufffd]", "?", text) for text in (label, message, about)
    )
    left, right = (width(text) + 2 * _PADDING for text in (label, message))
    whole, high, down = left + right, _HEIGHT, f"v{_HEIGHT - 6}"
    fill, ink = COLOURS[state]
    boxes = (
        f'<path fill="{_LABEL[0]}" d="M{left} 0H3a3 3 0 0 0-3 3{down}a3 3 0 0 0 3 3h{left - 3}z"/>'
        f'<path fill="{fill}" d="M{left} 0h{right - 3}a3 3 0 0 1 3 3{down}a3 3 0 0 1-3 3H{left}z"/>'
    )
    texts = "".join(
        f'<text x="{x}" y="14" fill="{colour}" textLength="{width(text)}" '
        f'lengthAdjust="spacingAndGlyphs">{escape(text)}</text>'
        for x, text, colour in ((_PADDING, label, _LABEL[1]), (left + _PADDING, message, ink))
    )
    return (
        f'{_BEGIN} width="{whole}" height="{high}" viewBox="0 0 {whole} {high}" role="img" '
        f"aria-label={quoteattr(about)}><title>{escape(about)}</title>{boxes}"
        f'<g font-family="Verdana,Geneva,DejaVu Sans,sans-serif" font-size="{_SIZE}" '
        f'aria-hidden="true">{texts}</g></svg>\n'
    )


def of_cell(cell: CapabilityCell) -> str:
    parts = [part for part in (cell.implementation, cell.backend, cell.capability) if part]
    return badge(" ".join(parts) or "shardproof", cell.text, cell.state, cell.sentence)


def file_names(cells: Iterable[CapabilityCell]) -> dict[str, CapabilityCell]:
    """File name -> cell: ``reference-zero3_gloo_checkpoint.svg``; names are never shared."""
    names: dict[str, CapabilityCell] = {}
    for cell in cells:
        parts = (cell.implementation, cell.backend, cell.capability)
        stem = "_".join(re.sub(r"[^A-Za-z0-9.]+", "-", part).strip("-.") for part in parts)
        if f"{stem}.svg" in names:
            stem += f"-{hashlib.sha256('|'.join(parts).encode()).hexdigest()[:8]}"
        names[f"{stem}.svg"] = cell
    return names


def index(run: Run, names: Mapping[str, CapabilityCell], whole: CapabilityCell) -> str:
    """The index in Markdown: every badge with its sentence as the text for who cannot see it."""
    last = run.header.last
    lines = [
        f"# Badges of run {_plain(run.name)}",
        "",
        f"Commit {(last.commit or 'unknown')[:12]}, shardproof {last.suite}, "
        f"torch {last.packages.get('torch')}, {last.started}. "
        "Each badge is the worst of its cases.",
        "",
        _image(OVERALL, whole),
    ]
    rows = sorted(names.items(), key=lambda item: (item[1].implementation, item[1].backend))
    for implementation, members in groupby(rows, key=lambda item: item[1].implementation):
        lines += ["", f"## {_plain(implementation)}"]
        for backend, row in groupby(members, key=lambda item: item[1].backend):
            lines += ["", f"{_plain(backend)}:", *(_image(name, cell) for name, cell in row)]
    return "\n".join(lines) + "\n"


def _image(name: str, cell: CapabilityCell) -> str:
    return f"![{_plain(cell.sentence)}]({name})"


def _plain(text: str) -> str:
    """``text`` on one line, without what Markdown takes for a link, an image or HTML."""
    return re.sub(r"([][<\\])", r"\\\1", " ".join(text.split()))


def overall(results: Iterable[CaseResult], left_out: Iterable[LeftOut] = ()) -> CapabilityCell:
    """All cases of a run as one cell."""
    cell = CapabilityCell("", "", "")
    for result in results:
        cell.add(result, verdicts.kind(result.verdict))
    cell.left_out = sum(line.case is not None for line in left_out)
    return cell


def write(run: Run, folder: Path) -> list[str]:
    """Write the badges of ``run`` and their index into ``folder``; the names of the badges.

    Badges of before are replaced or removed, other files left alone.

    :raises SelectionError: a folder that cannot be written.
    """
    whole = overall(run.cases, run.left_out)
    names = file_names(cells(run.cases, run.left_out))
    texts = {name: of_cell(cell) for name, cell in names.items()} | {OVERALL: of_cell(whole)}
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in {**texts, INDEX: index(run, names, whole)}.items():
            write_whole(folder / name, printable(text))
        for path in folder.glob("*.svg"):
            with path.open("rb") as stream:
                is_ours = stream.read(len(_BEGIN)) == _BEGIN.encode()
            if path.name not in texts and is_ours:
                path.unlink()
    except OSError as error:
        why = f"badges cannot be written: {error.strerror or error}"
        raise SelectionError(Problem(why, "name another --output", str(folder))) from None
    return sorted(texts)
