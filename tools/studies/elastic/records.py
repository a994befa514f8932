"""What ranks of ``python -m tools.studies elastic`` write, and how it is read.

torchrun has no number of a generation that all its workers know, so rank 0 takes the next one, by
making its folder::

    plan.json                      the history, and who watches over it
    checkpoints/                   what all generations save into and load from
    halts/<n>.reached, <n>.go      a rank halts for event n; it may go on
          <n>.over                 of two halves the old one has ended
    generation-<n>/go              all its members are there: it may begin
                   rank<k>.jsonl   a line for the beginning, each step and each commit
                   rank<k>.end     what the rank holds after the last step
"""

from __future__ import annotations

import contextlib
import itertools
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

PLAN, CHECKPOINTS, HALTS, GO = "plan.json", "checkpoints", "halts", "go"


def is_alive(pid: int, created: float) -> bool:
    """Whether the process ``pid`` that began at ``created`` has not ended."""
    try:
        process = psutil.Process(pid)
        return process.create_time() == created and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def new_generation(folder: Path) -> Path:
    """The folder of the next generation, which nobody else has."""
    for number in itertools.count(1):
        path = folder / f"generation-{number:03}"
        with contextlib.suppress(FileExistsError):
            path.mkdir()
            return path
    raise AssertionError("numbers do not end")


def append(path: Path, line: Mapping[str, Any]) -> None:
    """Add a line, which is in the file when this returns."""
    with path.open("a") as file:
        file.write(json.dumps(line) + "\n")


@dataclass
class Rank:
    """One rank of one generation: who it is, and what it has done."""

    began: dict[str, Any] = field(default_factory=dict)
    steps: dict[int, dict[str, Any]] = field(default_factory=dict)
    committed: list[int] = field(default_factory=list)
    refused: str = ""

    @property
    def member(self) -> int:
        """The number that its agent was given."""
        return int(self.began["member"])

    @property
    def is_alive(self) -> bool:
        """Whether its process has not ended."""
        return is_alive(self.began["pid"], self.began["created"])


@dataclass
class Generation:
    """A group that met once: its ranks, as far as they have written."""

    path: Path
    ranks: dict[int, Rank]

    @property
    def number(self) -> int:
        """Its place in the order of beginnings."""
        return int(self.path.name.rpartition("-")[2])

    @property
    def world(self) -> int:
        """How many ranks it has, as these say; 0: none has said anything."""
        return max((rank.began["world"] for rank in self.ranks.values()), default=0)

    @property
    def members(self) -> tuple[int, ...]:
        """Whose workers are here, once all are; else nobody's."""
        if len(self.ranks) != self.world:
            return ()
        return tuple(sorted(rank.member for rank in self.ranks.values()))

    @property
    def loaded(self) -> int:
        """Steps that were committed when it began."""
        return int(next(iter(self.ranks.values())).began["loaded"])

    def has_made(self, step: int) -> bool:
        """Whether all of its ranks have made ``step``."""
        made = [step in rank.steps for rank in self.ranks.values()]
        return len(made) == self.world and all(made)

    def saw_committed(self, step: int) -> bool:
        """Whether one of its ranks has seen ``step`` committed."""
        return any(step in rank.committed for rank in self.ranks.values())


def generations(folder: Path) -> list[Generation]:
    """All that began, in that order."""
    found = []
    for path in sorted(folder.glob("generation-*")):
        ranks = {int(file.stem.removeprefix("rank")): _rank(file) for file in path.glob("*.jsonl")}
        found.append(Generation(path, {k: ranks[k] for k in sorted(ranks) if ranks[k].began}))
    return found


def _rank(file: Path) -> Rank:
    rank = Rank()
    for text in file.read_text().splitlines(keepends=True):
        if not text.endswith("\n"):  # being written, or its writer was killed
            break
        line = json.loads(text)
        if "member" in line:
            rank.began = line
        elif "committed" in line:
            rank.committed.append(line["committed"])
        elif "refused" in line:
            rank.refused = line["refused"]
        else:
            rank.steps[line["step"]] = line
    return rank
