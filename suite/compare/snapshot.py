"""What is compared of a run: verdicts, exact figures, and ratios of times; no seconds.

A :class:`Snapshot` is made from a run's folder (:func:`of_run`) or read from a baseline
(:mod:`shardproof.compare.baseline`), which keeps the same in little space.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from shardproof import verdicts
from shardproof.bench import lines as timed
from shardproof.bench.lines import CellLine, Estimate, Memory, PairLine, Twin
from shardproof.bench.model.step_time import Scorecard
from shardproof.bench.subjects import LETTERS
from shardproof.compare import exact_figures
from shardproof.compare.exact_figures import JsonObject
from shardproof.errors import Problem, SelectionError
from shardproof.runs.run_folder import Run

#: Keys of a case that say how it is run but not what is run; the rest of it is in its id.
_CELL = (
    *("workload", "optimizer", "options", "dtype", "precision", "steps", "membership"),
    *("shares", "reload_at"),
)
_TIMED_CELL = ("workload", "base", "optimizer", "dtype", "size", "mode")
#: Verdicts of a timed line without a ratio that means anything.
_NO_RATIO = frozenset({"fail", "crash", "hang", "precondition", "refused"})
_FORMULA = re.compile(r"([a-z][a-z0-9_]*)\.payload_bytes\Z")
_DIGEST_CHARACTERS = 16
#: How implementations of the suite are named: family, then strategy.
_NAMED = ("reference/", "pytorch/", "deepspeed/")
#: How the id of a planted fault begins.
FAULTS = "mutants/"
#: Verdict of a comparison that has a ratio: which side is faster is for the ratio to say.
TIMED = "timed"


@dataclass(frozen=True)
class Sample:
    """Mean and standard deviation of the log ratios of ``blocks`` blocks."""

    mean: float
    sd: float
    blocks: int

    @property
    def error(self) -> float:
        """Standard error of the mean, in log units."""
        return self.sd / math.sqrt(self.blocks)

    @property
    def ratio(self) -> float:
        """The ratio whose log is the mean."""
        return math.exp(self.mean)


@dataclass(frozen=True)
class Version:
    """What judged: versions of the suite and of what it computes with."""

    suite: str
    torch: str
    python: str = ""
    commit: str = ""


@dataclass(frozen=True)
class Entry:
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
    figures: Mapping[str, exact_figures.Scalar]
    cell: JsonObject
    data: str = ""
    source: str = ""
    reason: str = ""
    deep: JsonObject = field(default_factory=dict, compare=False)
    samples: Mapping[str, Sample] = field(default_factory=dict)
    same: Sample | None = None
    #: Figures of a timed result that belong to its machine: modelled, scorecard, resident memory.
    beside: Mapping[str, float] = field(default_factory=dict)


@dataclass
class Snapshot:
    """A run as it is compared; ``hardware`` is one label for its machine."""

    name: str
    hardware: str
    machine: JsonObject
    taken: str
    versions: Sequence[Version]
    cases: dict[str, Entry]
    timed: dict[str, Entry]
    kills: dict[str, bool]
    left_out: dict[str, str] = field(default_factory=dict)
    #: Digests of what was planned and of its data sets, as ``run.json`` has them.
    keys: Sequence[JsonObject] = ()

    @property
    def ids(self) -> set[str]:
        """Every id that it says something about."""
        faults = (FAULTS + name for name in self.kills)
        return {*self.cases, *self.timed, *self.left_out, *faults}


def of_run(run: Run) -> Snapshot:
    """The snapshot of a run that was read back.

    :raises SelectionError: a line that is damaged or lacks what this version needs.
    """
    invocations = run.header["invocations"]
    try:
        versions = [_version(told) for told in invocations]
        machines = [told["fingerprint"] for told in invocations]
        hardware = list(dict.fromkeys(label(machine) for machine in machines))
    except (KeyError, TypeError, AttributeError) as error:
        raise _damaged(run.path / "run.json", "", error) from None
    by_id = _invocation_of(invocations)
    last = len(versions) - 1
    snapshot = Snapshot(
        name=run.path.resolve().name,
        hardware=" and ".join(hardware),
        machine=machines[-1],
        taken=str(invocations[-1].get("started", ""))[:10],
        versions=list(dict.fromkeys(versions)),
        cases={},
        timed={},
        kills={},
        keys=[told["key"] for told in invocations if told.get("key")],
    )
    for pair in timed.pairs(run):
        version = versions[by_id.get(pair.id, last)]
        snapshot.timed[pair.id] = _bench(pair, version)
    for cell in timed.cells(run):
        version = versions[by_id.get(cell.id, last)]
        snapshot.timed[cell.id] = _scaling(cell, version)
    line: Mapping[str, Any] = {}
    try:
        for line in run.cases:
            version = versions[by_id.get(line["id"], last)]
            snapshot.cases[line["id"]] = _case(line, version)
        for line in run.kills:
            if line["verdict"] == "left out":
                snapshot.left_out[FAULTS + line["name"]] = str(line["why_not"])
            else:
                snapshot.kills[line["name"]] = bool(line["killed"])
        for line in run.left_out:
            snapshot.left_out[line["id"]] = str(line["reason"])
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        name = line.get("id") or line.get("name") if isinstance(line, Mapping) else ""
        raise _damaged(run.path / "cases.jsonl", str(name or "a line"), error) from None
    return snapshot


def _damaged(file: Path, what: str, error: Exception) -> SelectionError:
    where = f" in {what}" if what else ""
    why = f"cannot be compared: {type(error).__name__} {error}{where}"
    remedy = "it is damaged or of another version; `shardproof verify` says which"
    return SelectionError(Problem(why, remedy, None, str(file)))


def _version(told: Mapping[str, Any]) -> Version:
    return Version(
        str(told["suite"]),
        str(told["packages"]["torch"]),
        str(told.get("python") or ""),
        str(told.get("commit") or "")[:12],
    )


def label(machine: Mapping[str, Any]) -> str:
    """One name for the hardware of a fingerprint: accelerators first, then processor and cores."""
    told = []
    names = [
        str(gpu.get("name", "GPU")) if isinstance(gpu, Mapping) else str(gpu)
        for gpu in machine.get("gpus") or ()
    ]
    for name in dict.fromkeys(names):
        told.append(f"{names.count(name)} x {name}")
    told.append(f"{machine.get('cpu') or 'unknown processor'}, {machine.get('cores', '?')} cores")
    return ", ".join(told)


def _invocation_of(invocations: Sequence[Mapping[str, Any]]) -> dict[str, int]:
    """Id -> the last invocation that planned it."""
    found: dict[str, int] = {}
    for index, told in enumerate(invocations):
        for planned in told.values():
            if isinstance(planned, list):
                found.update((name, index) for name in planned if isinstance(name, str))
    return found


def _case(line: Mapping[str, Any], version: Version) -> Entry:
    case = line["case"]
    found, deep = exact_figures.of_checks(line["checks"], case["mesh"].get("pipe", 1))
    return Entry(
        id=line["id"],
        implementation=_titled(case["implementation"], case.get("label")),
        strategy=strategy_of(case["implementation"], _claimed(found)),
        backend=case["backend"],
        world=math.prod(case["mesh"].values()),
        verdict=verdicts.kind(line["verdict"]),
        version=version,
        figures=found,
        cell=_cell(case, _CELL),
        data=str(line.get("data") or "")[:_DIGEST_CHARACTERS],
        source=str(case.get("source") or ""),
        reason=str(line.get("reason") or ""),
        deep=deep,
    )


def _bench(line: PairLine, version: Version) -> Entry:
    pair, figures = line.pair, line.figures
    known = figures is not None and _means_something(line)
    beside: dict[str, float] = {}
    exact: dict[str, exact_figures.Scalar] = {}
    if isinstance(line.memory, Memory):
        for letter, peak in (("a", line.memory.a), ("b", line.memory.b)):
            if line.memory.kind == "ledger":
                exact[f"memory.ledger_bytes_{letter}"] = peak
            else:
                beside[f"resident_bytes_{letter}"] = float(peak)
    for letter, card in (line.scorecard or {}).items():
        if isinstance(card, Scorecard):
            scores = _numbers(asdict(card))
            beside |= {f"{name}, {letter.upper()}": value for name, value in scores.items()}
    cell = _cell(pair.to_dict(), _TIMED_CELL)
    cell["sides"] = {letter: {"options": pair.side(letter).options} for letter in LETTERS}
    cell["meshes"] = {letter: line.meshes.get(letter, {}) for letter in LETTERS}
    return Entry(
        id=line.id,
        implementation=pair.versus,
        strategy=strategy_of(pair.a.implementation),
        backend=pair.backend,
        world=pair.world,
        verdict=TIMED if known else line.verdict,
        version=version,
        figures=exact,
        cell=_cell(cell, tuple(cell)),
        reason=line.reason,
        samples={"time": _sample(figures.log)} if known and figures is not None else {},
        same=_same(figures.aa if figures is not None else None),
        beside=beside,
    )


def _scaling(line: CellLine, version: Version) -> Entry:
    samples = {}
    for base, efficiency in (line.efficiency or {}).items():
        if _means_something(line):
            samples[f"efficiency ({base})"] = _sample(efficiency.log)
    # A cell that was refused repeats what its source measured.
    if samples and line.wrapping is not None:
        samples["time (wrapped / plain)"] = _sample(line.wrapping.log)
    beside: dict[str, object] = {"modelled efficiency": line.modelled_efficiency}
    if line.scorecard is not None:
        beside |= asdict(line.scorecard)
    return Entry(
        id=line.id,
        implementation=line.title,
        strategy=strategy_of(line.implementation),
        backend=line.backend,
        world=line.world,
        verdict=line.verdict,
        version=version,
        figures={},
        cell=_cell(line.cell.to_dict(), (*_TIMED_CELL, "system")),
        reason=line.reason,
        samples=samples,
        beside=_numbers(beside),
    )


def _numbers(figures: Mapping[str, object]) -> dict[str, float]:
    return {
        name: float(value)
        for name, value in figures.items()
        if isinstance(value, (int, float)) and not isinstance(value, bool)
    }


def _means_something(line: PairLine | CellLine) -> bool:
    """Whether the ratios of a timed line are those of sides that train the same."""
    return line.verdict not in _NO_RATIO and bool(line.trained_alike)


def _sample(log: Estimate) -> Sample:
    return Sample(log.mean, log.sd, log.blocks)


def _same(twin: Twin | None) -> Sample | None:
    return None if twin is None else Sample(math.log(twin.ratio), twin.sd, twin.blocks)


def _titled(implementation: str, more: str | None) -> str:
    return implementation + (f"+{more}" if more else "")


def strategy_of(implementation: str, claimed: str = "") -> str:
    """The one name of what ``implementation`` is (its label left out).

    Those of the suite are called what they are named, whatever a check compares them with; another
    is what it claims to be, or else its own name.
    """
    name = implementation.split("+", 1)[0]
    if claimed and not name.startswith(_NAMED) and name != "plain":
        return claimed
    return re.split("[/:.]", name)[-1]


def _claimed(found: Mapping[str, exact_figures.Scalar]) -> str:
    """What the memory check took it for, or the formula of its bytes."""
    told = found.get("memory.strategy")
    if told is None and (formula := _FORMULA.match(str(found.get("traffic.formula")))):
        told = formula[1]
    return str(told or "")


def _cell(told: Mapping[str, Any], keys: Iterable[str]) -> dict[str, Any]:
    """``keys`` of ``told``; what is empty, off or absent is all the same."""
    return {key: kept for key in keys if (kept := _kept(told.get(key)))}


def _kept(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: kept for key, item in value.items() if (kept := _kept(item)) or kept == 0}
    if isinstance(value, (list, tuple)):
        return list(value)
    return value
