"""Parts of a selection that was cut (``--shard``), put together into one run.

Evidence is copied byte for byte: lines, records and raw times; the manifest is made anew over it.
What no part has a result for is left out, with the reason.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from shardproof.errors import Problem, SelectionError
from shardproof.files import lines_of, read_input
from shardproof.runs import run_folder
from shardproof.runs.header import Invocation, PartOf, read_header
from shardproof.runs.integrity import require_unedited
from shardproof.runs.records import Manifest
from shardproof.runs.run_folder import RunFolder
from shardproof.runs.shard import Cut, name_of
from shardproof.table import number
from shardproof.wings import line_kinds


def _is_item(line: Mapping[str, Any]) -> bool:
    """Whether a line is about an item of a selection; cases behind a fault are none, nor is what a
    wing says of all its results.
    """
    if line["kind"] in ("case", "kill", "left out"):
        return True
    kind = line_kinds().get(line["kind"])
    return kind is not None and kind.is_result


@dataclass(frozen=True)
class Part:
    """A part as read: ``name`` is what it was called, ``done`` the items that have a result.

    ``left``: why each of the others was left out, where a line says so.
    """

    name: str
    path: Path
    run: str
    place: PartOf
    invocations: Sequence[Invocation]
    done: frozenset[str]
    left: Mapping[str, str]

    @property
    def torch(self) -> str:
        return str(self.invocations[-1].packages.get("torch"))

    @property
    def kernels(self) -> str:
        """The kernels of torch, and the variables that chose them."""
        kernels = self.invocations[-1].fingerprint.kernels
        return " ".join(v if k == "torch" else f"{k}={v}" for k, v in kernels.items()) or "unknown"

    @property
    def hardware(self) -> str:
        return self.invocations[-1].hardware

    def sentence(self) -> str:
        """The system and machine of the run."""
        on = f"torch {self.torch}, kernels {self.kernels}, {self.hardware}"
        return f"{self.name}: {self.place}, {number(len(self.done), 'result')}, {on}"


@dataclass(frozen=True)
class Merge:
    """Parts that belong together, in order, and what none of them has: a line and its reason."""

    whole: Cut
    parts: Sequence[Part]
    lacking: Sequence[tuple[dict[str, Any], str]]

    @property
    def gaps(self) -> list[str]:
        """The missing parts, in sentences."""
        counts = Counter(why for _, why in self.lacking)
        kind = self.whole.kind
        return [f"{why}: {number(n, kind)} left out" for why, n in sorted(counts.items())]

    @property
    def differences(self) -> Iterator[str]:
        """The differences between the machines of the parts; ``run.json`` has each."""
        for what in ("torch", "kernels", "hardware"):
            values = dict.fromkeys(getattr(part, what) for part in self.parts)
            if len(values) > 1:
                yield f"the parts ran with different {what}: {', '.join(values)}"


def read_part(name: str, path: Path) -> Part:
    """The part in the folder ``path``, called ``name``.

    :raises SelectionError: no run, of another format, edited, or no part.
    """
    header = read_header(path)
    if header is None:
        remedy = "name a run that --shard made"
        raise SelectionError(Problem("this is not a run folder", remedy, name))
    if (place := header.part) is None:
        what = "the run is not a part" if header.merged is None else "the run is merged already"
        remedy = "name runs that were made with --shard I/N"
        raise SelectionError(Problem(what, remedy, name))
    require_unedited(path)
    for file in _files(path):
        if not (path / file).is_file():
            raise SelectionError(Problem("is missing", "copy the whole run", file=str(path / file)))
    run_folder.read(path, strict=True)  # what is damaged is told by its line
    whole = Cut.read(path)
    own = whole.names(place.index)
    lines = [line for line in run_folder.lines(path) if _is_item(line)]
    done = frozenset(name_of(line) for line in lines if not run_folder.is_left_out(line))
    left = {name_of(line): _why(line) for line in lines if run_folder.is_left_out(line)}
    left = {name: why for name, why in left.items() if name not in done}
    told = done | left.keys()
    if whole.digest != place.digest or not told <= own:
        what = f"the run does not match the plan of {place}"
        raise SelectionError(Problem(what, "copy the whole run again, or rerun this part", name))
    if whole.kind == "fault" and told < own:
        done = frozenset()  # faults are weighed when all of their cases have ended
    return Part(name, path, header.id, place, header.invocations, done, left)


def plan(parts: Iterable[Part]) -> Merge:
    """The result of merging ``parts``.

    :raises SelectionError: they do not belong together, and which; or none has a result.
    """
    ordered = sorted(parts, key=lambda part: part.place.index)
    first = ordered[0]
    _require_alike(ordered, "selections", _selection)
    _require_alike(ordered, "versions of the suite", _judges)
    for one, other in pairwise(ordered):
        if one.place.index == other.place.index:
            what = f"{one.place} is given twice: {one.name} and {other.name}"
            raise SelectionError(Problem(what, "name only one of these runs"))
    whole = Cut.read(first.path)
    if whole.kind == "comparison":
        # What stands beside ratios (resident memory, modelled figures) is of one machine a run.
        _require_alike(ordered, "machines", lambda part: part.hardware)
        _require_alike(ordered, "versions of torch", lambda part: part.torch)
    if not any(part.done for part in ordered):
        remedy = "continue the cases of a part: `shardproof run --resume --results PART`"
        raise SelectionError(Problem("no part has a result", remedy, first.name))
    there = {part.place.index: part for part in ordered}
    lacking = []
    for index, line in whole.rows:
        of = f"part {index} of {first.place.of}"
        if index not in there:
            lacking.append((line, f"{of} is missing"))
        elif (name := name_of(line)) not in there[index].done:
            why = there[index].left.get(name)
            lacking.append((line, f"{of}: {why}" if why else f"{of} did not end"))
    return Merge(whole, ordered, lacking)


def copy(merge: Merge, folder: RunFolder) -> None:
    """Write into the new ``folder`` what the parts have, and what they lack as left out.

    :raises SelectionError: two parts have a file of one name.
    """
    ended = [part for part in merge.parts if part.done]
    pairs = ((part, one) for part in ended for one in part.invocations)
    copied = [one.model_copy(update={"run": part.run}) for part, one in pairs]
    folder.put_together(copied, merge.whole)
    for part in ended:
        for name in _files(part.path):
            folder.copy_file(name, read_input(part.path / name))
        for raw in lines_of(part.path / run_folder.LINES):
            fields = json.loads(raw) if raw.endswith(b"\n") else None  # cut off by a kill
            if not isinstance(fields, dict) or fields.get("kind") is None:
                continue
            if _is_item(fields) or fields["kind"] == "mutant case":
                folder.copy_line(raw[:-1])
    told = {name for part in ended for name in part.left}
    for line, why in merge.lacking:
        if name_of(line) in told:
            continue  # its own line, and reason, were copied
        is_kill = line["kind"] == "kill"
        reason = {"why_not": f"left out: {why}"} if is_kill else {"reason": why}
        folder.add(line | reason, "kill" if is_kill else "left out")


def _why(line: dict[str, Any]) -> str:
    """The reason of an item that was left out."""
    return str(line["why_not" if line["kind"] == "kill" else "reason"]).removeprefix("left out: ")


def _files(run: Path) -> list[str]:
    """Records and raw times of a run, as its manifest has them."""
    return [name for name, line in Manifest(run).read() if line is None and "/" in name]


def _require_alike(parts: Sequence[Part], what: str, of: Callable[[Part], str]) -> None:
    """:raises SelectionError: ``of`` is not the same of all ``parts``."""
    first = parts[0]
    for part in parts:
        if of(part) != of(first):
            both = f"{first.name} ({of(first)}) and {part.name} ({of(part)})"
            differ = f"the parts have different {what}: {both}"
            raise SelectionError(Problem(differ, "merge parts that agree"))


def _selection(part: Part) -> str:
    place = part.place
    return f"{place.selected:,} items in {place.of} parts, digest {place.digest[:12]}"


def _judges(part: Part) -> str:
    """Versions and commits that judged it."""
    judges = (f"{one.suite}, commit {one.commit or 'unknown'}" for one in part.invocations)
    return " and ".join(dict.fromkeys(judges))
