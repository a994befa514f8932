"""The compared part of a run: verdicts, exact figures, and ratios of times; no seconds.

A :class:`Snapshot` is made from a run's folder (:func:`of_run`) or read from a baseline
(:mod:`shardproof.compare.baseline`), which keeps the same in little space.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, NamedTuple

from pydantic import Field

from shardproof import verdicts
from shardproof.axes import parts
from shardproof.checks.results import CaseResult
from shardproof.compare import exact_figures
from shardproof.compare.exact_figures import Json, JsonObject
from shardproof.errors import Problem, SelectionError
from shardproof.files import Form, Stored
from shardproof.runs.header import Invocation
from shardproof.runs.run_folder import Run
from shardproof.wings import wings_of

#: Keys of a case that say how it is run but not what is run; the rest of it is in its id.
_CELL = (
    *("workload", "optimizer", "options", "dtype", "precision", "steps", "membership"),
    "deaths",
    *("shares", "reload_at", "checkpoint"),
)
_FORMULA = re.compile(r"([a-z][a-z0-9_]*)\.payload_bytes\Z")
_DIGEST_CHARACTERS = 16
#: How implementations of the suite are named: family, then strategy.
_NAMED = ("reference/", "pytorch/", "deepspeed/")
#: How the id of a planted fault begins.
FAULTS = "mutants/"
#: Verdict of a comparison that has a ratio: which side is faster is for the ratio to say.
TIMED = "timed"
_Finite = Annotated[float, Field(allow_inf_nan=False)]
#: What is stored as it is.
_Object = Annotated[JsonObject, Form(dict)]


class Sample(NamedTuple):
    """Mean and standard deviation of the log ratios of ``blocks`` blocks."""

    #: No ratio is further from 1 than this, in log units.
    mean: Annotated[float, Field(gt=-50, lt=50)]
    sd: Annotated[float, Field(ge=0, lt=50)]
    blocks: Annotated[int, Field(gt=0)]

    @property
    def error(self) -> float:
        """Standard error of the mean, in log units."""
        return self.sd / math.sqrt(self.blocks)

    @property
    def ratio(self) -> float:
        return math.exp(self.mean)


@dataclass(frozen=True)
class Version(Stored):
    """The judge: versions of the suite and of the packages that it computes with."""

    suite: str
    torch: str
    python: str = ""
    commit: str = ""


@dataclass(frozen=True)
class Entry(Stored):
    """One result.  ``cell`` is what it ran, ``data`` a digest of its data set (empty: unknown).

    ``deep`` holds the lists and mappings that digests among ``figures`` stand for (a baseline does
    not keep them).  ``source`` is ``file:line`` of the scenario; ``samples`` and ``same`` (an A/A
    pair) are those of timed results, by name of the ratio.
    """

    id: str
    implementation: str
    strategy: str
    backend: str
    world: int
    verdict: str
    version: Version
    figures: Mapping[str, str | int | _Finite | bool | None]
    cell: _Object
    data: str = ""
    source: str = ""
    reason: str = ""
    deep: _Object = field(default_factory=dict, compare=False)
    #: The command that runs a case again; a baseline does not keep it.
    rerun: str = field(default="", compare=False)
    samples: Mapping[str, Sample] = field(default_factory=dict)
    same: Sample | None = None
    #: Figures of a timed result that belong to its machine: modelled, scorecard, resident memory.
    beside: Mapping[str, float] = field(default_factory=dict)


@dataclass
class Snapshot(Stored):
    """A run as it is compared; ``hardware`` is one label for its machine."""

    name: str
    hardware: str
    machine: _Object
    taken: str
    versions: Sequence[Version]
    cases: dict[str, Entry]
    timed: dict[str, Entry]
    kills: dict[str, bool]
    left_out: dict[str, str] = field(default_factory=dict)
    #: Digests of what was planned and of its data sets, as ``run.json`` has them.
    keys: Sequence[_Object] = ()

    @property
    def results(self) -> dict[str, Entry]:
        return {**self.cases, **self.timed}

    @property
    def ids(self) -> set[str]:
        faults = (FAULTS + name for name in self.kills)
        return {*self.results, *self.left_out, *faults}


def of_run(run: Run) -> Snapshot:
    """The snapshot of a run that was read back.

    :raises SelectionError: a line that is damaged or lacks what this version needs.
    """
    invocations = run.header.invocations
    versions = [_version(invocation, run) for invocation in invocations]
    by_id = {
        name: version
        for invocation, version in zip(invocations, versions, strict=True)
        for name in (*invocation.planned, *invocation.benches)
    }
    last = versions[-1]
    timed = (
        e for wing in wings_of(run) for e in wing.entries(run, lambda name: by_id.get(name, last))
    )
    return Snapshot(
        name=run.path.resolve().name,
        hardware=" and ".join(dict.fromkeys(one.hardware for one in invocations)),
        machine=invocations[-1].fingerprint.model_dump(exclude_unset=True),
        taken=run.header.last.started[:10],
        versions=list(dict.fromkeys(versions)),
        cases={r.id: _case(r, by_id.get(r.id, last)) for r in run.cases},
        timed={entry.id: entry for entry in timed},
        kills={kill.name: kill.killed for kill in run.kills if not kill.left_out},
        left_out={FAULTS + kill.name: kill.why_not for kill in run.kills if kill.left_out}
        | {line.id: line.reason for line in run.left_out},
        keys=[key.model_dump(exclude_unset=True) for key in run.header.keys],
    )


def _version(invocation: Invocation, run: Run) -> Version:
    torch = invocation.packages.get("torch")
    if torch is None:
        remedy = "run `shardproof verify`: the run is damaged or of another version"
        what = "the run cannot be compared: packages has no version of torch"
        raise SelectionError(Problem(what, remedy, None, str(run.path / "run.json")))
    return Version(invocation.suite, torch, invocation.python, (invocation.commit or "")[:12])


def _case(result: CaseResult, version: Version) -> Entry:
    case = result.case
    figures, deep = exact_figures.of_checks(result.checks, parts(case.mesh, "layers"))
    told = {exact_figures.DEPTH: result.depth, exact_figures.LOSS_FACTOR: result.loss_factor}
    figures |= {name: value for name, value in told.items() if value is not None}
    return Entry(
        id=result.id,
        implementation=case.system,
        strategy=strategy_of(case.implementation, _claimed(figures)),
        backend=case.backend,
        world=case.world,
        verdict=verdicts.kind(result.verdict),
        version=version,
        figures=figures,
        cell=cell_of(case.to_dict(), _CELL),
        data=(result.data or "")[:_DIGEST_CHARACTERS],
        source=case.source,
        reason=result.reason,
        deep=deep,
        rerun=result.rerun,
    )


def strategy_of(implementation: str, claimed: str = "") -> str:
    """The one name of what ``implementation`` is (its label left out).

    Those of the suite are called what they are named, whatever a check compares them with; another
    is what it claims to be, or else its own name.
    """
    name = implementation.split("+", 1)[0]
    if claimed and not name.startswith(_NAMED) and name != "plain":
        return claimed
    return re.split("[/:.]", name)[-1]


def _claimed(figures: Mapping[str, exact_figures.Scalar]) -> str:
    """The strategy of the memory check, or the formula of its bytes."""
    strategy = figures.get("memory.strategy")
    if strategy is None and (formula := _FORMULA.match(str(figures.get("traffic.formula")))):
        strategy = formula[1]
    return str(strategy or "")


def cell_of(fields: JsonObject, keys: Iterable[str]) -> dict[str, Json]:
    """``keys`` of ``fields``; what is empty, off or absent is all the same."""
    return {key: kept for key in keys if (kept := _kept(fields.get(key)))}


def _kept(value: Json) -> Json:
    if isinstance(value, Mapping):
        return {key: kept for key, item in value.items() if (kept := _kept(item)) or kept == 0}
    if isinstance(value, (list, tuple)):
        return list(value)
    return value
