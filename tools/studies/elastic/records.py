"""The records that ranks of ``python -m tools.studies elastic`` write, and their reader.

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
    """Whether the process ``pid`` that started at ``created`` still runs."""
    try:
        process = psutil.Process(pid)
        return process.create_time() == created and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def new_generation(folder: Path) -> Path:
    """A new folder for the next generation."""
    for number in itertools.count(1):
        path = folder / f"generation-{number:03}"
        with contextlib.suppress(FileExistsError):
            path.mkdir()
            return path
    raise AssertionError("numbers do not end")


def append(path: Path, line: Mapping[str, Any]) -> None:
    """Add a line, which is in the file on return."""
    with path.open("a") as file:
        file.write(json.dumps(line) + "\n")


@dataclass
class Rank:
    """One rank of one generation: its identity and its progress."""

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
        """Whether its process still runs."""
        return is_alive(self.began["pid"], self.began["created"])


@dataclass
class Generation:
    """A group that met once: its ranks that have written so far."""

    path: Path
    ranks: dict[int, Rank]

    @property
    def number(self) -> int:
        """Its position in the order of starts."""
        return int(self.path.name.rpartition("-")[2])

    @property
    def world(self) -> int:
        """The number of ranks that its members report; 0 if none has reported."""
        return max((rank.began["world"] for rank in self.ranks.values()), default=0)

    @property
    def members(self) -> tuple[int, ...]:
        """The members with workers here once all are present; else empty."""
        if len(self.ranks) != self.world:
            return ()
        return tuple(sorted(rank.member for rank in self.ranks.values()))

    @property
    def loaded(self) -> int:
        """The steps committed at its start."""
        return int(next(iter(self.ranks.values())).began["loaded"])

    def has_made(self, step: int) -> bool:
        """Whether all of its ranks have made ``step``."""
        made = [step in rank.steps for rank in self.ranks.values()]
        return len(made) == self.world and all(made)

    def saw_committed(self, step: int) -> bool:
        """Whether one of its ranks has seen ``step`` committed."""
        return any(step in rank.committed for rank in self.ranks.values())


def generations(folder: Path) -> list[Generation]:
    """All generations that started, in order."""
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
