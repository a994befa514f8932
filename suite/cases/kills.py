"""The kill matrix: does every planted fault make its named check fail, where its parent passes?

A kill needs both halves.  A broken fixture fails clean code too, so a mutant's failure counts only
beside the same case passing on its unpatched parent; a crash or hang counts only if the mutant says
so, and the crash only with the words that it expects: another error may be the fixture's own.  A
survivor is a failure of the suite.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from typing import Any, Literal

from shardproof.case import Case
from shardproof.cases import kinds as workload_kinds
from shardproof.cases.kinds.kind import UntrainedKind
from shardproof.cases.runner import WHOLE, Course, OnAccount, OnResult, run_cases
from shardproof.checks import CHECKS, COSTLY, GENERAL
from shardproof.checks.overlap import SETTLING
from shardproof.checks.results import CaseResult, Kill, told
from shardproof.table import grouped
from shardproof.verdicts import JUDGE_ERROR, WORKING_PRECISION_ONLY

#: Verdicts that a mutant may declare as its killer, besides names of checks: the open ones are
#: those of faults in the judge itself, which must not be green.
VERDICT_KILLERS = ("crash", "hang", JUDGE_ERROR, "undecidable")
#: What kills without a memory ledger, which doubles the cost of a case: ``schedule`` and a relation
#: read activations off it, and faults of the judge may lie in the check ``memory`` itself.
UNWEIGHED = frozenset((*CHECKS, "crash", "hang")) - {"memory", "schedule", "relations"}


@dataclass(frozen=True)
class PlantedPair:
    """One mutant's case and the same case of its parent."""

    mutant: Any
    case: Case
    parent: Case


def pair(mutant: Any, weigh_all: bool = True, depth: Literal["", "family"] = "") -> PlantedPair:
    """The cases of ``mutant`` and of its parent, which differ in the implementation only.

    Mutants that are triggered by the same case share their parent's: its id is made of what it
    runs.  Unless ``weigh_all``, memory is weighed only where the kill may need it; ``overlap`` is
    asked where there are steps enough.  At ``depth`` family both are held to no more than that.
    """
    weighed = weigh_all or mutant.weighed or not UNWEIGHED.issuperset(mutant.killed_by)
    few = mutant.steps <= SETTLING
    left_out = {*(() if weighed else ("memory",)), *(("overlap",) if few else ())}
    checks = [name for name in GENERAL if name not in left_out]
    if isinstance(kind := workload_kinds.of(mutant.workload), UntrainedKind):
        checks = [kind.only_check]
    more = {
        "relations": "relation" in mutant.expect,
        "checkpoint": mutant.checkpoint is not None,
        "faults": mutant.fault is not None,
        "membership": bool(mutant.membership or mutant.deaths),
    } | {name: name in mutant.killed_by for name in COSTLY}
    names = ("backend", "workload", "optimizer", "lane", "dtype", "steps", "checkpoint", "fault")
    mappings = ("mesh", "precision", "expect", "membership")
    fields = {name: getattr(mutant, name) for name in names}
    fields |= {name: dict(getattr(mutant, name)) for name in mappings}
    mixed = {"precision": fields["precision"]} if mutant.precision else {}
    own = Case(
        id=f"mutants/{mutant.name}::{mutant.backend}" + (f"::{depth}" if depth else ""),
        scenario="mutants",
        implementation=f"mutants/{mutant.name}",
        checks=(*checks, *(name for name, asked in more.items() if asked)),
        options=dict(mutant.options) | mixed,
        deaths=tuple(mutant.deaths),
        depth=depth,
        **fields,
    )
    return PlantedPair(mutant, own, parent_case(own, mutant.parent))


def parent_case(own: Case, parent: str) -> Case:
    """The case of ``parent`` that a mutant's case is compared with."""
    fields = own.to_dict() | {"id": "", "implementation": parent}
    del fields["source"], fields["seal"]  # say nothing of what is run
    digest = hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()[:10]
    return replace(own, id=f"{parent}::parent-{digest}", implementation=parent)


def why_not_killed(pair: PlantedPair, own: CaseResult | None, parent: CaseResult | None) -> str:
    """Why the mutant's result is no kill, given its parent's; empty: it is one.

    At depth family any check that fails is a kill: those of exact bytes and layouts are not asked.
    Of the mutant this needs what a line of its kill has, too.
    """
    fails = failing(own) if own else ()
    killed_by, crash_says = pair.mutant.killed_by, pair.mutant.crash_says
    if own is None or parent is None:
        return "left out: no budget"
    if parent.verdict not in ("pass", WORKING_PRECISION_ONLY):
        return f"its parent is {parent.verdict}: {parent.reason}"
    if pair.case.depth == "family":
        return "" if fails else f"survives there [{own.verdict}: {own.reason}]"
    passed = (*VERDICT_KILLERS, *(o.check for o in parent.checks if o.status == "pass"))
    if skipped := [name for name in killed_by if name not in passed]:
        return f"{', '.join(skipped)} does not judge the parent here"
    if silent := [name for name in killed_by if name not in fails]:
        seen = f"; failing: {', '.join(fails)}" if fails else ""
        return f"survives {', '.join(silent)}{seen} [{own.verdict}: {own.reason}]"
    if own.verdict == "crash" and crash_says not in own.reason:
        return f"crashes, but does not say {crash_says!r} [{own.reason}]"
    return ""


def judge_kill(pair: PlantedPair, own: CaseResult | None, parent: CaseResult | None) -> Kill:
    """Compare the mutant's result with its parent's (``None``: left out, hence not killed)."""
    why_not = why_not_killed(pair, own, parent)
    as_declared = own is not None and not why_not and pair.case.depth != "family"
    how = told(pair.mutant.says, own.reason) if own and as_declared else None
    return Kill(
        name=pair.mutant.name,
        parent=pair.mutant.parent,
        killed_by=tuple(pair.mutant.killed_by),
        failing=failing(own) if own else (),
        killed=not why_not,
        why_not=why_not,
        verdict=own.verdict if own else "left out",
        reason=own.reason if own else "",
        lane=pair.case.lane,
        margin=_margin(own) if own else None,
        seconds=own.seconds if own else 0.0,
        crash_says=pair.mutant.crash_says,
        depth=pair.case.depth or None,
        named=None if how is None else how == "exact",
        told=how,
    )


def failing(result: CaseResult) -> tuple[str, ...]:
    """The checks that fail, and the verdict where that kills; empty: nothing speaks against it."""
    names = (outcome.check for outcome in result.checks if outcome.status == "fail")
    return (*names, *([result.verdict] if result.verdict in VERDICT_KILLERS else []))


def _margin(result: CaseResult) -> float | None:
    """How far beyond its bound the worst tensor is (error / bound); ``None`` where not numeric."""
    failed = (outcome.worst for outcome in result.checks if outcome.status == "fail")
    return next((worst.error / worst.bound for worst in failed if worst and worst.bound), None)


# ----------------------------------------------------------------------------------------- running


def mutant_cases(pairs: Sequence[PlantedPair]) -> list[Case]:
    """Every parent's case once, before those of its mutants."""
    cases: list[Case] = []
    for item in pairs:
        cases += [case for case in (item.parent, item.case) if case not in cases]
    return cases


def kinds(mutant: Any) -> set[tuple[str, str]]:
    """Pairs of a check that kills ``mutant`` and its class: the folder that declares it."""
    folder = mutant.implementation.__module__.split(".")[-2]
    return {(check, folder) for check in mutant.killed_by}


def _in_turn(pairs: Sequence[PlantedPair]) -> list[PlantedPair]:
    """A fault for every pair of check and class, of few ranks; then one of each file in turn."""
    left = set().union(*(kinds(item.mutant) for item in pairs))
    order: list[PlantedPair] = []
    while left:
        order.append(max(pairs, key=lambda p: (len(kinds(p.mutant) & left), -p.case.world)))
        left -= kinds(order[-1].mutant)
    files = grouped((item.mutant.implementation.__module__, item) for item in pairs)
    turns = [p for turn in zip_longest(*files.values()) for p in turn if p is not None]
    return [*order, *(item for item in turns if item not in order)]


def run_mutants(
    pairs: Sequence[PlantedPair],
    jobs: int,
    on_result: OnResult,
    on_account: OnAccount | None = None,
    course: Course = WHOLE,
) -> list[Kill]:
    """Run every mutant and its parent, and return which were killed; the rest as ``run_cases``.

    Where time may run out every pair of check and class comes first.
    """
    order = pairs if course.stop_after is None else _in_turn(pairs)
    results, _ = run_cases(mutant_cases(order), jobs, on_result, on_account, course)
    by_id = {result.id: result for result in results}
    return [judge_kill(p, by_id.get(p.case.id), by_id.get(p.parent.id)) for p in pairs]
