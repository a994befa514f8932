"""The pairs of a speed scenario on a page, seconds and bytes side by side.

shardproof bench words --results results/evidence/words
python -m tools.pairs results/evidence/words docs/measured-pairs.md     between its markers
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any

from shardproof.bench import lines as stored
from shardproof.bench.lines import PairLine
from shardproof.bench.subjects import LETTERS
from shardproof.bench.tables import HEADINGS, interval, rows
from shardproof.runs.run_folder import Run
from shardproof.table import Table
from tools import pages

BEGIN, END = "<!-- pairs:begin -->", "<!-- pairs:end -->"
#: Columns of ``bench`` that the page shows, by the page's headings.
COLUMNS = {
    "A / B [95 %]": "time A / B [95 %]",
    "A ms": "A, ms",
    "B ms": "B, ms",
    "peak A / B": "held, A / B",
    "sent A / B": "sent, A / B",
}


def section(run: Run) -> str:
    """The table of ``run``, what A and B are, and where it ran."""
    lines = stored.pairs(run)
    texts = [dict(zip(HEADINGS, row, strict=True)) for row in rows(lines)]
    body = [
        (line.pair.name, *(text[name] for name in COLUMNS), _twin(line), str(line.blocks))
        for line, text in zip(lines, texts, strict=True)
    ]
    table = Table("", ("pair", *COLUMNS.values(), "A / A [95 %]", "blocks"), body)
    sides = [(line.pair.name, *(_side(line, letter) for letter in LETTERS)) for line in lines]
    what = Table("", ("pair", "A", "B"), sides)
    return f"{table.markdown()}\n{what.markdown()}\n{run.provenance}\n"


def _twin(line: PairLine) -> str:
    figures = line.figures
    return "-" if figures is None or figures.aa is None else interval(figures.aa)


def _side(line: PairLine, letter: str) -> str:
    """Implementation, options and mesh."""
    side = line.pair.side(letter)
    options = ", ".join(_words(side.options))
    shape = " x ".join(f"{axis} {n}" for axis, n in line.meshes.get(letter, {}).items())
    return f"{side.implementation} on {shape}" + (f": {options}" if options else "")


def _words(options: Mapping[str, Any], above: str = "") -> list[str]:
    words: list[str] = []
    for key, value in options.items():
        inner = isinstance(value, Mapping)
        words += (
            _words(value, f"{key}.")
            if inner
            else [f"{above}{key}: {str(value).lower() if isinstance(value, bool) else value}"]
        )
    return words


def main(arguments: Sequence[str] | None = None) -> int:
    """Put the pairs of a run into a page; exit code 2 if it cannot be read."""
    return pages.main("pairs", "pairs", section, (BEGIN, END), arguments)


if __name__ == "__main__":
    sys.exit(main())
