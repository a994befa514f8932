"""The record of planted faults under random clean cases: how many die in N of them."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from shardproof.errors import SelectionError
from shardproof.files import DAMAGE, Stored, damage_of, read_input
from shardproof.table import Table, number

#: The file in a run's folder.
FILE = "kills-by-n.json"
#: Numbers of cases that the table tells, and the largest.
_ROWS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000)


@dataclass(frozen=True)
class RandomKill(Stored):
    """One fault: how many ``cases`` it was planted in; of a killed one, what the last one said."""

    name: str
    parent: str
    cases: int
    case: str = ""
    verdict: str = ""
    failing: tuple[str, ...] = ()

    @property
    def killed(self) -> bool:
        return bool(self.failing)


@dataclass(frozen=True)
class RandomKills(Stored):
    """All ``faults`` that were decided in at most ``most`` cases of ``seed``.

    ``left_out``: the budget had no room for these.  ``not_drawn``: no campaign draws their parents.
    ``alarms``: cases that parents did not pass, which kill nothing.
    """

    seed: int
    most: int
    faults: tuple[RandomKill, ...]
    left_out: tuple[str, ...] = ()
    not_drawn: tuple[str, ...] = ()
    alarms: tuple[str, ...] = ()

    def killed_by(self, cases: int) -> int:
        """How many faults the first ``cases`` kill."""
        return sum(one.killed and one.cases <= cases for one in self.faults)

    def table(self) -> Table:
        """A row a number of cases."""
        counts = (*(n for n in _ROWS if n < self.most), self.most) if self.faults else ()
        killed = ((n, self.killed_by(n)) for n in counts)
        rows = [(f"{n:,}", f"{dead:,}", f"{dead / len(self.faults):.0%}") for n, dead in killed]
        heads = ("random cases", "faults killed", "share")
        return Table("Planted faults under random cases", heads, rows, align="rrr")

    def sentence(self) -> str:
        """The numbers of faults planted, killed and not planted."""
        faults, killed = number(len(self.faults), "fault"), self.killed_by(self.most)
        told = f"{faults} in up to {number(self.most, 'case')} of seed {self.seed}: {killed} killed"
        if self.left_out:
            told += f"; {len(self.left_out)} left out by the budget"
        if self.not_drawn:
            told += f"; {len(self.not_drawn)} of systems that no campaign draws"
        return told

    def text(self) -> str:
        """The content of the file: the counts first, for people."""
        by_n = {row[0]: int(str(row[1]).replace(",", "")) for row in self.table().rows}
        return json.dumps({"killed by N": by_n, **self.to_dict()}, indent=1) + "\n"


def read(folder: Path) -> RandomKills | None:
    """The record of the run in ``folder``; ``None``: it planted none this way.

    :raises SelectionError: the file is damaged.
    """
    file = folder / FILE
    if not file.exists():
        return None
    try:
        told = json.loads(read_input(file))
        del told["killed by N"]
        return RandomKills.from_dict(told)
    except DAMAGE as error:
        raise SelectionError(damage_of(error, file)) from None
