"""Records that ranks left in a folder, from wherever they ran, and the verdicts on them.

``cluster.torchrun`` writes the folder; here it becomes results, by the judge that judges local
runs; ``cluster.judge`` makes a run folder of them.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from shardproof.case import Case
from shardproof.checks.results import CaseResult
from shardproof.errors import Problem, SelectionError
from shardproof.evidence.account import Account
from shardproof.files import DAMAGE, Stored, write_whole
from shardproof.launch.outcome import RankOutcome, mark_consequences
from shardproof.launch.rank_process import RankLaunch
from shardproof.launch.ranks import RankHost
from shardproof.runs.machine import image

#: What the stacks of a rank begin with that computed too much, or that stood still with all others.
OVER_BUDGET, STANDSTILL = "over its budget", "standstill"
#: Among the records: the clock ended the job.
OUT_OF_TIME = "out_of_time"


def case_folder(records: Path, number: int) -> Path:
    """Where the ranks leave what belongs to the plan's case ``number``."""
    return records / f"case{number:04d}"


@dataclass(frozen=True)
class Host(Stored):
    """A machine or container by its host name, and the ranks on it."""

    name: str
    ranks: list[int]


@dataclass(frozen=True)
class Plan(Stored):
    """The plan of a launch elsewhere: all that is needed to judge it. ``began`` is Unix time.

    ``image``: what the image tells of itself that rank 0 runs in (``runs.machine.image``).
    """

    began: float
    world: int
    cases: list[Case]
    nodes: list[Host] = field(default_factory=list)
    image: dict[str, str] = field(default_factory=dict)


def write_plan(
    records: Path, cases: Sequence[Case], world: int, nodes: Sequence[Host] = ()
) -> None:
    """Begin a launch in ``records``: what an earlier one left there would pass for this one's.

    Files go and folders stay: another node may hold a folder in its cache.
    """
    records.mkdir(parents=True, exist_ok=True)
    for name in ("plan.json", OUT_OF_TIME):
        (records / name).unlink(missing_ok=True)
    for path in records.glob("case[0-9]*/rank[0-9]*.*"):
        path.unlink()
    plan = Plan(time.time(), world, list(cases), list(nodes), image())
    write_whole(records / "plan.json", json.dumps(plan.to_dict()))


def plan_digest(records: Path) -> str:
    """Digest of the plan in ``records``; empty if there is none."""
    try:
        return hashlib.sha256((records / "plan.json").read_bytes()).hexdigest()
    except FileNotFoundError:
        return ""


def read_plan(records: Path) -> Plan:
    """The plan that :func:`write_plan` wrote.

    :raises SelectionError: no plan there.
    """
    try:
        return Plan.from_dict(json.loads((records / "plan.json").read_text()))
    except (OSError, *DAMAGE) as error:
        remedy = "name a folder that shardproof.cluster.torchrun wrote"
        raise SelectionError(
            Problem(f"no records in this folder: {error}", remedy, str(records))
        ) from None


def outcomes_of(folder: Path, world: int) -> list[RankOutcome] | None:
    """How the ranks of one case ended; ``None`` if none of them came to it."""
    began = [rank for rank in range(world) if (folder / f"rank{rank}.began").exists()]
    if not began:
        return None
    return mark_consequences([_outcome(folder, rank, rank in began) for rank in range(world)])


def _outcome(folder: Path, rank: int, began: bool) -> RankOutcome:
    try:
        outcome = RankOutcome.stored(folder / f"rank{rank}.end")
        if outcome.rank != rank:
            raise ValueError("the file belongs to another rank")
    except (OSError, *DAMAGE):
        return _silent(folder, rank, began)
    path = folder / f"rank{rank}.rec"
    return replace(outcome, record=path if outcome.status == "ok" and path.exists() else None)


def _out_of_time(records: Path, number: int, world: int) -> bool:
    """Whether the clock ended the job before or in that case: time is no evidence."""
    if not (records / OUT_OF_TIME).exists():
        return False
    outcomes = outcomes_of(case_folder(records, number), world)
    return outcomes is None or any(o.status == "killed" and not o.consequence for o in outcomes)


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


class LeftRanks(RankHost):
    """Ranks that another launcher started; how they ended is known."""

    cannot_again = "these ranks were started elsewhere: they cannot run a second time"

    def __init__(self, outcomes: Sequence[RankOutcome]) -> None:
        self._outcomes = outcomes

    def run(self, launch: RankLaunch) -> list[RankOutcome]:
        """How they ended."""
        return [*self._outcomes]


def results_of(
    records: Path, cache: Path, bind: Callable[[Sequence[Case]], Sequence[Case]] = tuple
) -> Iterator[tuple[Case, tuple[Account, CaseResult] | None]]:
    """Judge every case of the plan, as ``bind`` gives it; ``None`` for what no rank came to."""
    from shardproof.cases.leader import judge_case

    plan = read_plan(records)
    for number, case in enumerate(bind(plan.cases)):
        folder = case_folder(records, number)
        outcomes = outcomes_of(folder, plan.world)
        if _out_of_time(records, number, plan.world):
            outcomes = None
        if outcomes is None and not case.skip:
            yield case, None
            continue
        account, result = judge_case(case, folder, cache, LeftRanks(outcomes or []))
        if outcomes:
            result.seconds = max(outcome.ended for outcome in outcomes)
        yield case, (account, result)
