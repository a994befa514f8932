"""A selection cut into parts, the same on every machine, and what a part's folder says of it.

Items of one group stay together.  Groups are dealt the largest first, those of one size in the
order of digests of their names, so that no part gets every second line of a matrix; no duration of
an earlier run has a say.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from shardproof.errors import Problem, SelectionError
from shardproof.files import DAMAGE, read_input

#: In the folder of a part: a line for every item of the selection that was cut.
FILE = "selection.jsonl"
_WRITTEN = re.compile(r"([0-9]{1,6})/([0-9]{1,6})", re.ASCII)


@dataclass(frozen=True)
class Shard:
    """Part ``index`` (from 1) of ``of``."""

    index: int
    of: int

    def __str__(self) -> str:
        return f"{self.index}/{self.of}"


def parse(text: str) -> Shard:
    """The value of ``--shard``.

    :raises SelectionError: no part.
    """
    written = _WRITTEN.fullmatch(text)
    index, of = map(int, written.groups()) if written else (0, 0)
    if not 1 <= index <= of:
        remedy = "write I/N with I from 1 to N: 1/4, 2/4, 3/4, 4/4"
        raise SelectionError(Problem("--shard is not of the form I/N", remedy, text))
    return Shard(index, of)


def name_of(line: Mapping[str, Any]) -> str:
    """The subject of a line of ``cases.jsonl``: the id of a case or comparison, a fault's name."""
    return str(line["name"] if line["kind"] == "kill" else line["id"])


def deal(groups: Mapping[str, str], of: int) -> dict[str, int]:
    """The part of each item, by its name; ``groups`` names its group."""
    sizes = Counter(groups.values())
    parts, held = {}, [0] * of
    for group in sorted(sizes, key=lambda name: (-sizes[name], _sha256(name))):
        least = held.index(min(held))
        held[least] += sizes[group]
        parts[group] = least + 1
    return {name: parts[group] for name, group in groups.items()}


@dataclass(frozen=True)
class Cut:
    """A selection that was cut: of each item its part, and the line of one that is left out."""

    rows: Sequence[tuple[int, dict[str, Any]]]

    @classmethod
    def of(cls, lines: Iterable[dict[str, Any]], groups: Mapping[str, str], shard: Shard) -> Cut:
        """``lines`` cut into parts.

        :raises SelectionError: there are more parts than groups.
        """
        if (count := len(set(groups.values()))) < shard.of:
            what = f"--shard: the selection is too small for {shard.of} parts"
            raise SelectionError(Problem(what, f"choose at most {count} parts", str(shard)))
        parts = deal(groups, shard.of)
        return cls([(parts[name_of(line)], line) for line in sorted(lines, key=name_of)])

    @classmethod
    def read(cls, folder: Path) -> Cut:
        """The selection that the run in ``folder`` is a part of.

        :raises SelectionError: the file is gone or damaged.
        """
        file = folder / FILE
        try:
            rows = [json.loads(line) for line in read_input(file).splitlines()]
            for row in rows:
                if not all(isinstance(row.get(key) or {}, dict) for key in ("case", "pair")):
                    raise ValueError(name_of(row))
            return cls([(int(row.pop("part")), row) for row in rows if name_of(row)])
        except (OSError, *DAMAGE):
            remedy = "copy the whole part again"
            raise SelectionError(Problem("is damaged or missing", remedy, file=str(file))) from None

    def text(self) -> str:
        return "".join(json.dumps({"part": part, **line}) + "\n" for part, line in self.rows)

    @cached_property
    def digest(self) -> str:
        """That of the items; in which file a case is written says nothing of what is run."""
        pairs = ((line, line.get("case")) for _, line in self.rows)
        bare = (ln | {"case": {**case, "source": ""}} if case else ln for ln, case in pairs)
        return _sha256("\n".join(json.dumps(line, sort_keys=True) for line in bare))

    @cached_property
    def parts(self) -> dict[str, int]:
        """The part of each item, by its name."""
        return {name_of(line): part for part, line in self.rows}

    @property
    def kind(self) -> str:
        """The kind of an item."""
        if any(line["kind"] == "kill" for _, line in self.rows):
            return "fault"
        return "comparison" if any(line.get("pair") for _, line in self.rows) else "case"

    def names(self, index: int) -> set[str]:
        """The items of one part."""
        return {name for name, part in self.parts.items() if part == index}


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
