"""``run.json``: what ran, where, with which versions; one invocation after the other.

Keys that other versions wrote are kept; those that were never given are not written.
"""

from __future__ import annotations

import json
from pathlib import Path

from pydantic import BaseModel, ConfigDict, JsonValue

from shardproof import VERSION, wings
from shardproof.errors import Problem, SelectionError
from shardproof.files import read_input
from shardproof.launch.nodes import cap_in_words

NAME = "run.json"
#: The evidence format that is written and read (docs/evidence.md).
FORMAT = 9


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
    """The values that two runs must share to be compared: version, cells, data sets.

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


def _caps(declared: JsonValue) -> dict[str, float] | None:
    if not isinstance(declared, dict):
        return None
    return {name: float(cap) for name, cap in declared.items() if isinstance(cap, int | float)}


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
    planned: list[str] = []
    kills: list[str] = []
    key: ComparisonKey | None = None
    benches: list[str] = []
    #: The containers that ranks ran in, which node had which, and what they were made of; or the
    #: nodes of Ray that judged.
    cluster: dict[str, JsonValue] | None = None
    part: PartOf | None = None
    run: str | None = None
    reproduces: str | None = None
    #: Drawn when it began: what the seals of its cases are made with (``Case.seal_of``).
    nonce: str = ""
    #: A line that a kill had cut off was dropped before it began: a result of before is lost.
    mended: bool = False
    #: Of classes of the user's own the digest of the file that the name leads to.
    code: dict[str, str] = {}

    @property
    def caps(self) -> dict[str, float] | None:
        """The declared limits of containers as nodes; ``None``: there were none."""
        return _caps((self.cluster or {}).get("declared"))

    @property
    def slow_nodes(self) -> dict[str, dict[str, float]]:
        """By the name of a node what it had instead."""
        told = (self.cluster or {}).get("slow_nodes")
        found = told if isinstance(told, dict) else {}
        return {name: caps for name, own in found.items() if (caps := _caps(own))}

    @property
    def hardware(self) -> str:
        """One name for what it ran on: the machine and, where ranks were on several nodes, these.

        Nodes are containers, or the hosts of the roll call; those of Ray have each case whole.

        How many ranks shared a node is a part of times, not of figures that are exact.
        """
        hosts = [node for node in self.nodes if isinstance(node, dict) and "ranks" in node]
        if self.caps is None and len(hosts) < 2:
            return self.fingerprint.label
        cluster, text = self.cluster or {}, f"{self.fingerprint.label}, as {len(self.nodes)} nodes"
        words = [cap_in_words(name, cap) for name, cap in (self.caps or {}).items()]
        if self.benches and cluster.get("ranks_per_node") not in (1, None):
            words.insert(0, f"{cluster['ranks_per_node']} ranks")
        if cluster.get("delayed_by") == "ranks":
            words.append("delayed by ranks")
        text += f" of {', '.join(words)}" if words else ""
        for node, own in self.slow_nodes.items():
            text += f", {node} of {', '.join(cap_in_words(*item) for item in own.items())}"
        return text

    def judges(self, system: str) -> tuple[object, ...]:
        """The judge, and the code of ``system``, as far as the run records them."""
        return self.suite, self.commit, self.packages.get("torch"), self.code.get(system)

    @property
    def run_command(self) -> str:
        """The beginning of a command that runs a case as this one did."""
        return wings.first(lambda wing: wing.run_command(self)) or "shardproof run"

    @property
    def nodes(self) -> list[JsonValue]:
        """Facts of each node; empty: there were none."""
        nodes = (self.cluster or {}).get("nodes")
        return nodes if isinstance(nodes, list) else []


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
        """The part of a selection that the run is; ``None``: none, or merged from parts."""
        if self.merged is not None:
            return None
        return next((one.part for one in self.invocations if one.part is not None), None)

    @property
    def keys(self) -> list[ComparisonKey]:
        """Those of all commands, the one that put parts together included."""
        commands = [*self.invocations, self.merged]
        return [one.key for one in commands if one is not None and one.key is not None]

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
        remedy = "choose another folder, or copy the whole run again"
        raise SelectionError(Problem("is damaged", remedy, file=str(folder / NAME)))
    if header.format != FORMAT:
        commit = f" (commit {header.last.commit})" if header.last.commit else ""
        what = f"evidence format {header.format!r}; this version ({VERSION}) reads format {FORMAT}"
        remedy = f"repeat the run, or use the version that wrote it: shardproof {header.last.suite}"
        raise OtherFormat(Problem(what, f"{remedy}{commit}", file=str(folder / NAME)))
    return header
