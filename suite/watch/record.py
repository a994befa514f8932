"""The record of one rank of a watched run: ``rank<k>.json``, written again and again."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, TypeVar

from shardproof.files import DAMAGE, Stored, fast_json, from_plain, write_whole
from shardproof.watch.calls import Total

T = TypeVar("T")

Kind = Literal[
    "hyperparameters",
    "initial parameters",
    "buffers",
    "non-finite",
    "gradients",
    "optimizer state",
    "parameters",
    "steps",
    "collectives",
    "rank",
    "shapes",
    "not compared",
]


@dataclass
class Finding(Stored):
    """One thing that was found; ``broken``: a fault, otherwise something that is not decided."""

    kind: Kind
    sentence: str
    broken: bool = True
    #: The step of the optimizer at which it was seen, and the last one known to be without it.
    step: int | None = None
    equal_at: int | None = None
    optimizer: int = 0
    #: Whether nothing but habit says that these ranks hold the same (:mod:`found`).
    assumed: bool = False
    #: The tensor, where every rank tells only of its own.
    name: str = ""


@dataclass
class Watched(Stored):
    """One optimizer as one rank saw it."""

    name: str
    steps: int = 0
    compared: list[int] = field(default_factory=list)
    tracked: int = 0
    tracked_bytes: int = 0
    #: What was compared, in words, and how many times.
    counts: dict[str, int] = field(default_factory=dict)
    not_compared: dict[str, str] = field(default_factory=dict)
    outside: list[str] = field(default_factory=list)
    every: int = 1
    #: Seconds of one comparison, and of one step without it.
    cost_seconds: float = 0.0
    step_seconds: float = 0.0
    #: The first compared step at which ranks had made other numbers of calls, after equal ones.
    behind_at: int = 0
    #: Optimizers of the script that are one here: made one after the other for the same tensors.
    made: int = 1


@dataclass
class RankRecord(Stored):
    """The file of one watched rank on disk."""

    rank: int
    world: int
    pid: int
    host: str
    script: str
    torch: str
    #: How many times this rank was started before.
    restarts: int = 0
    #: Arguments of the script; what was typed, as far as it is known; when the rank started (UTC).
    arguments: list[str] = field(default_factory=list)
    command: str = ""
    began: str = ""
    #: CPU and cores.
    machine: str = ""
    backend: str = ""
    initialised: bool = False
    optimizers: list[Watched] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)
    #: What cannot be seen, in sentences.
    unseen: list[str] = field(default_factory=list)
    totals: list[Total] = field(default_factory=list)
    #: Class -> largest number of bytes seen.
    memory: dict[str, int] = field(default_factory=dict)
    #: The exception that ended the script, and its innermost line of the script.
    error_type: str = ""
    error: str = ""
    place: str = ""
    #: Why the script did not take its arguments, as its parser said.
    refused: str = ""
    #: Whether the exception tells of another rank that is gone, or of calls that do not fit.
    consequence: bool = False
    is_comm_error: bool = False
    ended: bool = False

    def write(self, folder: Path) -> None:
        """Write the record into ``folder``, whole."""
        write_whole(folder / f"rank{self.rank}.json", fast_json(self.to_dict()) + b"\n")


@dataclass
class End(Stored):
    """How the process of a rank ended, as the launcher saw it."""

    rank: int
    exit_code: int | None = None
    signal: int | None = None
    #: Why the launcher ended it: ``standstill``, ``desync`` (a rank waits in a call that another
    #: made differently), ``grace`` (another had failed) or ``""``.
    reason: str = ""
    #: Where its stack stood then, and whether that was inside of a call.
    place: str = ""
    waits: bool = False
    last_call: str = ""
    calls: int = 0
    #: Seconds after the start.
    ended: float = 0.0
    stopped: bool = False


def read_ends(folder: Path) -> list[End]:
    """The record of the launcher; empty where the ranks were started by something else.

    :raises ValueError: it is damaged.
    """
    path = folder / "ends.json"
    return _stored(list[End], path) if path.exists() else []


def write_ends(folder: Path, ends: Sequence[End]) -> None:
    """Write how the ranks ended into ``folder``, whole."""
    write_whole(folder / "ends.json", fast_json([end.to_dict() for end in ends]) + b"\n")


def read(folder: Path) -> dict[int, RankRecord]:
    """The records in ``folder``, by rank.

    :raises ValueError: one is damaged.
    """
    found = [_stored(RankRecord, path) for path in folder.glob("rank*.json")]
    return {one.rank: one for one in sorted(found, key=lambda one: one.rank)}


def _stored(kind: type[T], path: Path) -> T:
    try:
        return from_plain(kind, json.loads(path.read_bytes()))
    except DAMAGE as error:
        raise ValueError(f"{path}: damaged: {error}") from error
