"""The runs of a site, oldest first: run folders, bundles, baselines, and folders of a series.

A baseline keeps verdicts and exact figures and no records.  :func:`as_run` gives it the shape of a
run, so that the tables of reports serve both.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, get_args

from shardproof import axes
from shardproof.case import Case, Lane
from shardproof.checks import OF_UNTRAINED, Outcome, Status
from shardproof.checks.results import CaseResult, Kill, rerun
from shardproof.compare import baseline
from shardproof.compare.exact_figures import DEPTH, LOSS_FACTOR, STATUS
from shardproof.compare.snapshot import Entry, Snapshot, of_run
from shardproof.errors import Problem, SelectionError
from shardproof.files import DAMAGE, from_plain
from shardproof.runs import run_folder
from shardproof.runs.header import FORMAT, Fingerprint, Header, Invocation
from shardproof.runs.integrity import damage_is_bad_input, require_unedited
from shardproof.runs.run_folder import Run
from shardproof.site import series

_AXIS = re.compile(rf"({'|'.join(axes.names())})(\d+)")


@dataclass(frozen=True)
class ShownRun:
    """A run, the part of it that is compared, and whether it is a baseline."""

    run: Run
    snapshot: Snapshot
    is_kept: bool


@dataclass(frozen=True)
class RunName:
    """How pages name a run: ``slug`` in addresses, ``label`` where there is little room."""

    slug: str
    snapshot: Snapshot

    @property
    def label(self) -> str:
        """The machine, and the versions that judged."""
        return f"{self.snapshot.hardware}; {self.versions}"

    @cached_property
    def versions(self) -> str:
        """Torch, suite and commit of the last invocation."""
        last = self.snapshot.versions[-1]
        commit = f", commit {last.commit}" if last.commit else ""
        return f"torch {last.torch}, suite {last.suite}{commit}"


def expanded(names: Sequence[str]) -> list[str]:
    """``names``, with the runs of a series in place of its folder."""
    return [
        str(found)
        for name in names
        for found in (series.files(Path(name)) if series.is_series(Path(name)) else [name])
    ]


@contextmanager
def opened(name: str) -> Iterator[ShownRun]:
    """The run or baseline ``name``; records of a bundle can be read until the context ends.

    :raises SelectionError: nothing of that name, or a run that is damaged or was edited.
    """
    with baseline.opened(name) as folder:
        if folder is None:
            snapshot = baseline.read(Path(name))
            try:
                run = as_run(snapshot)
            except DAMAGE as error:
                what = f"cannot be shown: {type(error).__name__} {error}"
                raise SelectionError(Problem(what, baseline.AGAIN, file=name)) from error
            yield ShownRun(run, snapshot, is_kept=True)
            return
        with damage_is_bad_input(folder):
            run = run_folder.read(folder, strict=True)
            require_unedited(folder)
            yield ShownRun(run, of_run(run), is_kept=False)


def as_run(snapshot: Snapshot) -> Run:
    """A baseline as a run without a folder: no errors, seconds, reasons or records."""
    invocations = [
        Invocation(
            command=[],
            started=snapshot.taken,
            suite=version.suite,
            python=version.python,
            commit=version.commit or None,
            packages={"torch": version.torch},
            fingerprint=Fingerprint.model_validate(dict(snapshot.machine)),
        )
        for version in snapshot.versions
    ]
    # A result without figures does not tell what was asked: of workloads that train nothing, others
    # with the same workload do.
    untrained = {
        _workload(entry): check
        for entry in snapshot.cases.values()
        for check in OF_UNTRAINED
        if check + STATUS in entry.figures
    }
    return Run(
        Path(snapshot.name),
        Header(format=FORMAT, id=snapshot.name, invocations=invocations),
        cases=[_result(entry, untrained) for entry in snapshot.cases.values()],
        kills=[_kill(name, killed) for name, killed in snapshot.kills.items()],
    )


def _result(entry: Entry, untrained: Mapping[str, str]) -> CaseResult:
    """The result that ``entry`` was reduced from, as far as its figures and its id tell it."""
    checks = _outcomes(entry.figures)
    asked = [outcome.check for outcome in checks]
    if not asked and _workload(entry) in untrained:
        asked = [untrained[_workload(entry)]]
    parts = entry.id.split("::")
    implementation, _, label = entry.implementation.partition("+")
    lane = next((part for part in parts if part in get_args(Lane)), "fp64")
    relation = entry.figures.get("relations.relation")
    told = {
        "id": entry.id,
        "scenario": re.split(r"\[|::", entry.id)[0],
        "implementation": implementation,
        "label": label,
        "backend": entry.backend,
        "mesh": _mesh(parts, entry.world),
        "lane": lane,
        "checks": tuple(asked),
        "expect": {"refuses": ""} if "refusals" in asked else {"relation": relation},
        "source": entry.source,
    }
    case = from_plain(Case, told | dict(entry.cell))
    sent, expected = (_bytes(entry.figures.get(f"traffic.bytes_{n}")) for n in ("sent", "expected"))
    depth, factor = entry.figures.get(DEPTH), entry.figures.get(LOSS_FACTOR)
    return CaseResult(
        entry.id,
        case,
        entry.verdict,
        checks=checks,
        bytes_sent=sent if expected else None,
        bytes_expected=expected if sent else None,
        rerun=rerun(case),
        depth=depth,  # type: ignore[arg-type]
        loss_factor=None if factor is None else str(factor),
    )


def _workload(entry: Entry) -> str:
    cell: Any = entry.cell
    return str(cell["workload"]["name"])


def _outcomes(figures: Mapping[str, Any]) -> list[Outcome]:
    """The checks whose status stands among ``figures``, each with its own; without digests."""
    found = []
    for name, status in figures.items():
        if name.endswith(STATUS) and status in get_args(Status):
            check = name.removesuffix(STATUS)
            own = {
                key.removeprefix(f"{check}."): value
                for key, value in figures.items()
                if key.startswith(f"{check}.") and key != name and not str(value).startswith("#")
            }
            found.append(Outcome(check, status, figures=own))
    return found


def _mesh(parts: Sequence[str], world: int) -> dict[str, int]:
    """The mesh that a part of an id spells, such as ``pipe2xshard2``; else one axis."""
    for part in parts:
        sizes = dict(_AXIS.findall(part))
        if sizes and "x".join(map("".join, sizes.items())) == part and {*sizes} <= {*axes.names()}:
            return {name: int(ranks) for name, ranks in sizes.items()}
    return axes.replicas(world)


def _bytes(value: object) -> str | None:
    return value if isinstance(value, str) and re.fullmatch(r"\d+(/[1-9]\d*)?", value) else None


def _kill(name: str, killed: bool) -> Kill:
    why = "" if killed else "a baseline keeps no reason"
    return Kill(name, "", (), (), killed, why, "", "", "", None, 0.0)


def slugs(names: Sequence[str]) -> list[str]:
    """Names for files of pages: lower case, different from each other on any file system."""
    found: list[str] = []
    for name in names:
        slug = re.sub(r"[^a-z0-9.]+", "-", name.lower()).strip("-.")[:60] or "run"
        number, unique = 1, slug
        while unique in found:
            number += 1
            unique = f"{slug}-{number}"
        found.append(unique)
    return found
