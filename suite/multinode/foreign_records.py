"""Records that ranks left in a folder, from wherever they ran: verdicts and comparisons.

``multinode.torchrun`` writes the folder; here it becomes results, by the judge that judges local
runs.  Digests of two folders of the same cases show, tensor by tensor, whether containers or
machines compute the same bits as processes on one machine.
"""

from __future__ import annotations

import hashlib
import json
import math
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from shardproof.case import Case
from shardproof.checks.results import CaseResult
from shardproof.errors import Problem, SelectionError
from shardproof.evidence.account import Account
from shardproof.evidence.records import Pieces, RankRecord
from shardproof.files import DAMAGE, Stored, write_whole
from shardproof.launch.outcome import RankOutcome, mark_consequences
from shardproof.tensor_bytes import digest, dtype_name

#: Lanes that promise equal bits wherever the same ranks run on the same backend.
EXACT_LANES = ("bitwise", "dyadic")
#: What the stacks of a rank begin with that computed too much, or that stood still with all others.
OVER_BUDGET, STANDSTILL = "over its budget", "standstill"
#: Among the records: the clock ended the job.
OUT_OF_TIME = "out_of_time"


def case_folder(records: Path, number: int) -> Path:
    """Where the ranks leave what belongs to the plan's case ``number``."""
    return records / f"case{number:04d}"


@dataclass(frozen=True)
class Plan(Stored):
    """What was about to be run: all that is needed to judge it.  ``began`` is Unix time."""

    began: float
    world: int
    torch: str
    capability: str
    cases: list[Case]


def write_plan(records: Path, cases: Sequence[Case], world: int) -> None:
    records.mkdir(parents=True, exist_ok=True)
    capability = torch.backends.cpu.get_cpu_capability()
    plan = Plan(time.time(), world, torch.__version__, capability, list(cases))
    write_whole(records / "plan.json", json.dumps(plan.to_dict()))


def plan_digest(records: Path) -> str:
    """Digest of the plan in ``records``; empty if there is none."""
    try:
        return hashlib.sha256((records / "plan.json").read_bytes()).hexdigest()
    except FileNotFoundError:
        return ""


def read_plan(records: Path) -> Plan:
    """What :func:`write_plan` wrote.

    :raises SelectionError: no plan there.
    """
    try:
        return Plan.from_dict(json.loads((records / "plan.json").read_text()))
    except (OSError, *DAMAGE) as error:
        remedy = "name a folder that shardproof.multinode.torchrun wrote"
        raise SelectionError(Problem(f"no records: {error}", remedy, str(records))) from None


@dataclass(frozen=True)
class RankEnd(Stored):
    """How one rank ended a case, and a digest of each tensor that it observed."""

    outcome: RankOutcome
    digests: dict[str, str]


def write_end(folder: Path, end: RankEnd) -> None:
    text = json.dumps(end.to_dict(), default=str)
    write_whole(folder / f"rank{end.outcome.rank}.end", text)


# ----------------------------------------------------------------------------------- digests


def digests(record: RankRecord) -> dict[str, str]:
    """Dtype, shape and SHA-256 of the bytes of every tensor that a rank observed.

    Keys are ``step<s>/<point>/<kind>/<name>``; what was there after ``setup`` is ``initial/...``;
    of several pieces with one name the later ones get a number.
    """
    by_place: dict[str, str] = {}

    def note(prefix: str, kinds: Pieces) -> None:
        for kind, pieces in kinds.items():
            for piece in pieces:
                key, copy = f"{prefix}/{kind}/{piece.name}", 1
                while key in by_place:
                    copy += 1
                    key = f"{prefix}/{kind}/{piece.name}#{copy}"
                by_place[key] = _digest(piece.tensor)

    note("initial", record.initial)
    for step in record.steps:
        for point, kinds in step.observed.items():
            note(f"step{step.step}/{point}", kinds)
        loss = torch.tensor(math.nan if step.loss is None else step.loss, dtype=torch.float64)
        by_place[f"step{step.step}/loss"] = _digest(loss)
    return by_place


def _digest(tensor: torch.Tensor) -> str:
    return f"{dtype_name(tensor)} {list(tensor.shape)} {digest(tensor)}"


@dataclass
class Comparison:
    """How many digests two folders share; ``differing`` are places, at most a few per case."""

    lane: str
    cases: int = 0
    equal: int = 0
    differing: list[str] = field(default_factory=list)
    unequal: int = 0

    def sentence(self) -> str:
        total = self.equal + self.unequal
        if not self.unequal:
            return f"{self.lane}: all {total} tensor digests of {self.cases} cases identical"
        shown = "; ".join(self.differing[:3])
        return (
            f"{self.lane}: {self.unequal} of {total} tensor digests of {self.cases} cases "
            f"differ: {shown}"
        )


def compare(records: Path, others: Path) -> list[Comparison]:
    """Compare the digests of two folders case by case and rank by rank, a row per lane.

    A tensor, rank or case that only one folder has counts as differing; skipped cases do not count.
    """
    numbers = {case.id: n for n, case in enumerate(read_plan(others).cases)}
    world = read_plan(records).world
    rows: dict[str, Comparison] = {}
    for number, case in enumerate(read_plan(records).cases):
        if case.skip:
            continue
        row = rows.setdefault(case.lane, Comparison(case.lane))
        row.cases += 1
        if case.id not in numbers:
            row.unequal += 1
            row.differing.append(f"{case.id} ran only once")
            continue
        for rank in range(world):
            here = _digests_of(case_folder(records, number), rank)
            there = _digests_of(case_folder(others, numbers[case.id]), rank)
            places = [key for key in {**here, **there} if here.get(key) != there.get(key)]
            row.equal += len({**here, **there}) - len(places)
            row.unequal += len(places)
            row.differing += [f"{case.id} rank {rank} {key}" for key in places[:2]]
    return list(rows.values())


# ---------------------------------------------------------------------------------- verdicts


def outcomes_of(folder: Path, world: int) -> list[RankOutcome] | None:
    """How the ranks of one case ended; ``None`` if none of them came to it."""
    began = [rank for rank in range(world) if (folder / f"rank{rank}.began").exists()]
    if not began:
        return None
    outcomes = []
    for rank in range(world):
        end = _end(folder, rank)
        if end is not None:
            path = folder / f"rank{rank}.rec"
            record = path if end.outcome.status == "ok" and path.exists() else None
            outcomes.append(replace(end.outcome, record=record))
        else:
            outcomes.append(_silent(folder, rank, rank in began))
    return mark_consequences(outcomes)


def _silent(folder: Path, rank: int, began: bool) -> RankOutcome:
    """The outcome of a rank that left no account: its alarm ended it, or something from outside."""
    stacks = folder / f"rank{rank}.stacks"
    text = stacks.read_text(errors="replace").strip() if stacks.exists() else ""
    if text.startswith(OVER_BUDGET):
        message = f"computes in {_top_frame(text)}: {text.splitlines()[0]}"
        return RankOutcome(rank, "over budget", message=message, traceback=text)
    if text:
        message = f"still in {_top_frame(text)} when no rank computed, entered or left a call"
        return RankOutcome(rank, "hung", message=message, traceback=text)
    # Who left its stacks has ended the job, and so its peers.
    peer = any(folder.glob("rank*.stacks"))
    what = "its process exited without reporting" if began else "it was gone before this case"
    return RankOutcome(rank, "killed", message=what, consequence=peer)


def _top_frame(stacks: str) -> str:
    """The innermost frame of the main thread, which faulthandler prints last."""
    frames = [line.strip() for line in stacks.split("hread 0x")[-1].splitlines() if "File " in line]
    return frames[0] if frames else "native code"


def _end(folder: Path, rank: int) -> RankEnd | None:
    try:
        return RankEnd.from_dict(json.loads((folder / f"rank{rank}.end").read_text()))
    except (OSError, *DAMAGE):
        return None


def _digests_of(folder: Path, rank: int) -> dict[str, str]:
    end = _end(folder, rank)
    return {} if end is None else end.digests


def results_of(
    records: Path, cache: Path
) -> Iterator[tuple[Case, tuple[Account, CaseResult] | None]]:
    """Judge every case of the plan; ``None`` for what no rank came to."""
    from shardproof.cases.leader import judge_case

    plan = read_plan(records)
    out_of_time = (records / OUT_OF_TIME).exists()
    for number, case in enumerate(plan.cases):
        folder = case_folder(records, number)
        outcomes = outcomes_of(folder, plan.world)
        if out_of_time and any(o.status == "killed" and not o.consequence for o in outcomes or ()):
            outcomes = None  # the clock ended it, and time is no evidence
        if outcomes is None and not case.skip:
            yield case, None
            continue
        account, result = judge_case(case, folder, cache, run=lambda *_, o=outcomes, **__: o or [])
        if outcomes:
            result.seconds = max(outcome.ended for outcome in outcomes)
        yield case, (account, result)


def judge(records: Path, results: Path, against: Path | None = None, prune: bool = False) -> int:
    """Judge ``records`` into the run folder ``results`` and print it; returns the exit code.

    With ``against``, digests that differ in an exact lane count as broken, too.  ``prune`` removes
    the tensors of cases that held; whole tensors are kept for failures only.
    """
    from shardproof import verdicts
    from shardproof.runs.run_folder import RunFolder

    counted, left = [], 0
    code = verdicts.BROKEN
    torch.set_num_threads(1)
    with RunFolder(results, sys.argv) as run, tempfile.TemporaryDirectory() as cache:
        run.plan(read_plan(records).cases)
        for case, judged in results_of(records, Path(cache)):
            if judged is None:
                left += 1
                run.leave_out(case, "the ranks ended before they came to it")
                print(f"{'left out':<10} {case.id}", flush=True)
                continue
            account, result = judged
            counted.append(result)
            run.keep(result, json.loads(json.dumps(account.to_dict(), default=str)))
            run.add(result)
            print(_line(result), flush=True)
            if prune and verdicts.kind(result.verdict) in verdicts.GREEN:
                _drop_tensors(records, case)
        counts = verdicts.count(counted)
        code = verdicts.exit_code(counts)
        print(verdicts.summary(counts, left))
        if left and code == verdicts.HELD:
            code = verdicts.NOT_DECIDED
        if against is not None:
            rows = compare(records, against)
            for row in rows:
                print(f"digests against local processes, {row.sentence()}")
            if any(row.unequal and row.lane in EXACT_LANES for row in rows):
                code = verdicts.BROKEN
            lanes = [{"lane": r.lane, "equal": r.equal, "unequal": r.unequal} for r in rows]
            (results / "digests.json").write_text(json.dumps(lanes, indent=1) + "\n")
        run.close(code)
    return code


def _drop_tensors(records: Path, case: Case) -> None:
    for number, planned in enumerate(read_plan(records).cases):
        if planned.id == case.id:
            for path in case_folder(records, number).glob("*.rec"):
                path.unlink()


def _line(result: CaseResult) -> str:
    error, bound = result.worst_error, result.bound
    figures = (
        f"  error {error:.1e} of {bound:.1e}" if error is not None and bound is not None else ""
    )
    reason = f"  {result.reason}" if result.reason else ""
    return f"{result.verdict:<10} {result.id}{figures}  {result.seconds:.2f} s{reason}"
