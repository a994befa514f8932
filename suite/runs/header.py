"""``run.json``: what ran, where, with which versions; one invocation after the other.

Keys that other versions wrote are kept; those that were never given are not written.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, BeforeValidator, ConfigDict, JsonValue

from shardproof import VERSION, old_words
from shardproof.errors import Problem, SelectionError
from shardproof.files import read_input

NAME = "run.json"
#: The evidence format that is written (docs/evidence.md), and those whose lines can be read.
#: Records of others are judged by the suite that wrote them: messages of checks (1) and records of
#: evaluations (2) differ, sentences on norms, replicas and crashes (3), places of pieces (4), and
#: lines without loss factors or cases that save (5).
FORMAT = 6
READABLE = (1, 2, 3, 4, 5, FORMAT)


class _Part(BaseModel):
    model_config = ConfigDict(extra="allow")


class Gpu(_Part):
    """One GPU, as its driver tells."""

    name: str = "GPU"
    memory: str = ""
    driver: str = ""


class Fingerprint(_Part):
    """The allow-listed facts about a machine."""

    cpu: str | None = None
    cores: int | None = None
    memory_bytes: int | None = None
    system: str = ""
    machine: str = ""
    gpus: list[Gpu] = []
    kernels: dict[str, str] = {}

    @property
    def label(self) -> str:
        """One name for the hardware: accelerators first, then processor and cores."""
        names = [gpu.name for gpu in self.gpus]
        cores = "?" if self.cores is None else self.cores
        processor = f"{self.cpu or 'unknown processor'}, {cores} cores"
        return ", ".join([*(f"{names.count(n)} x {n}" for n in dict.fromkeys(names)), processor])


class ComparisonKey(_Part):
    """What two runs must share to be compared: version, cells, data sets.

    ``data`` is known at the end only.
    """

    suite: str
    scenarios: str
    data: str | None = None


class PartOf(_Part):
    """Part ``index`` of ``of``, cut from ``selected`` items; ``digest`` is that of their list."""

    index: int
    of: int
    selected: int
    digest: str

    def __str__(self) -> str:
        return f"part {self.index} of {self.of}"


Name = Annotated[str, BeforeValidator(lambda name: old_words.renamed_name(str(name)))]


class Invocation(_Part):
    """One command that wrote into the run; ``planned``, ``kills`` and ``benches`` are ids.

    ``part``: what it ran is a part of a selection that was cut; ``run``: the id of the run that it
    was copied from; ``reproduces``: the id of the run whose cases it ran again.
    """

    command: list[str]
    started: str = ""
    ended: str | None = None
    exit_code: int | None = None
    pid: int | None = None
    suite: str
    commit: str | None = None
    python: str
    packages: dict[str, str | None]
    fingerprint: Fingerprint
    planned: list[Name] = []
    kills: list[str] = []
    key: ComparisonKey | None = None
    benches: list[str] = []
    #: The containers that ranks ran in, which node had which, and what they were made of; or the
    #: nodes of Ray that judged.
    cluster: dict[str, JsonValue] | None = None
    part: PartOf | None = None
    run: str | None = None
    reproduces: str | None = None


class Header(_Part):
    """``run.json``; every header that was read has an invocation.

    ``merged``: the command that put the run together of parts; the invocations are theirs.
    """

    format: JsonValue = None
    id: str = ""
    invocations: list[Invocation]
    merged: Invocation | None = None

    @property
    def part(self) -> PartOf | None:
        """What part of a selection the run is; ``None``: none, or put together of parts."""
        if self.merged is not None:
            return None
        return next((one.part for one in self.invocations if one.part is not None), None)

    @property
    def keys(self) -> list[ComparisonKey]:
        """Those of all commands, the one that put parts together included."""
        commands = [*self.invocations, *([self.merged] if self.merged is not None else [])]
        return [command.key for command in commands if command.key is not None]

    @property
    def key_of_whole(self) -> ComparisonKey | None:
        """Of parts, which share it: that of the selection, before its data are known."""
        return next((key.model_copy(update={"data": None}) for key in self.keys), None)

    @property
    def last(self) -> Invocation:
        return self.invocations[-1]

    def text(self) -> str:
        return json.dumps(self.model_dump(exclude_unset=True), indent=1) + "\n"


class OtherFormat(SelectionError):
    """A run whose evidence has a format that cannot be used here."""


def read_header(folder: Path) -> Header | None:
    """The header of the run in ``folder``; ``None``: there is none.

    :raises SelectionError: it is damaged, or of another format.
    """
    try:
        header = Header.model_validate_json(read_input(folder / NAME))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, RecursionError):
        header = None
    if header is None or not header.invocations:
        remedy = "choose another folder, or a whole copy of it"
        raise SelectionError(Problem("is damaged", remedy, file=str(folder / NAME)))
    if header.format not in READABLE:
        raise other_format(header, folder)
    return header


def other_format(header: Header, folder: Path) -> OtherFormat:
    """Why the run in ``folder`` cannot be used, and which suite can."""
    commit = f" (commit {header.last.commit})" if header.last.commit else ""
    what = f"evidence format {header.format!r}; this version ({VERSION}) reads {FORMAT}"
    remedy = f"use the suite that wrote it: shardproof {header.last.suite}{commit}"
    return OtherFormat(Problem(what, remedy, file=str(folder / NAME)))
