"""One case in its leader process: load the system, run its ranks, train the oracle, measure.

:func:`run_case` is called with a :class:`CaseTask` of ``cases/runner.py`` in a process that does
nothing else meanwhile.  It never executes a step of the implementation itself: ``launch/ranks.py``
does.  The steps are the same for every kind of workload (``cases/kinds/``), every plan of a case
(``cases/plans/``) and every oracle (``oracle/kinds.py``).
"""

from __future__ import annotations

import shutil
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from shardproof import registry, verdicts
from shardproof.backends import BACKENDS
from shardproof.case import Case
from shardproof.cases import ambiguous, kinds, room
from shardproof.cases.kinds.kind import Schedules
from shardproof.cases.launcher import Launcher
from shardproof.cases.plans import plans_of
from shardproof.cases.verdict import decide_case, measure_case, problem_of
from shardproof.checks import COSTLY
from shardproof.checks.results import CaseResult
from shardproof.contract import Implementation, Refused
from shardproof.evidence.account import Account, WholeTensor, whole_tensors
from shardproof.evidence.assembled import Evidence
from shardproof.launch import process_control
from shardproof.launch.machine_faults import fault_of_machine
from shardproof.launch.nodes import NodeGone
from shardproof.launch.ranks import Forked, RankHost, root_cause
from shardproof.launch.workspace import TASK_BYTES
from shardproof.oracle import apart
from shardproof.registry.declaration import BrokenContract, Declaration
from shardproof.registry.stand_ins import named_in_options, needed, stand_ins
from shardproof.verdicts import WORKING_PRECISION_ONLY

#: Verdicts after which the ranks of a case may serve another.
_HELD = ("pass", WORKING_PRECISION_ONLY)


@dataclass(frozen=True)
class CaseTask:
    """The input of a leader: ``workdir`` is made for this case, ``oracles`` are shared by all.

    ``host``: where its ranks run.
    """

    case: Case
    workdir: Path
    oracles: Path
    host: RankHost = field(default_factory=Forked)


def run_case(task: CaseTask) -> dict[str, Any]:
    """Task of the leader: run and judge one case; its ``result`` and ``account`` as JSON."""
    process_control.keep_freed_memory()
    task.workdir.mkdir(parents=True)
    # Faults of the judge spoil it on purpose; anything else must not reach a shared oracle.
    planted = task.case.implementation.startswith(registry.MUTANTS)
    walled = needed(task.case) and ":" not in task.case.workload.name
    needs_trainer = not planted and not walled and not leaves_no_trace(task.case)
    with apart.clean(needs_trainer, task.workdir):
        account, result = judge_case(task.case, task.workdir, task.oracles, task.host)
    task.host.settle(held=result.verdict in _HELD)
    # What the system left there may fill the disk on which this is to be written.
    shutil.rmtree(task.workdir, ignore_errors=True)
    return {"result": result.to_dict(), "account": account.to_dict()}


def leaves_no_trace(case: Case) -> bool:
    """Whether the leader of a case may judge another afterwards: it loads the suite's code only.

    It never runs a step of the system; but what others wrote (``module:name``) may change a process
    by being loaded.
    """
    relation = case.expect.get("relation")
    other = relation.get("same_as", {}) if isinstance(relation, Mapping) else {}
    loaded = case.implementation, other.get("implementation", case.implementation)
    named = ":" in case.workload.name or named_in_options(case)
    # A costly check runs steps of the system in the leader.
    return (
        not named and not {*COSTLY} & {*case.checks} and all(map(registry.changes_nothing, loaded))
    )


def judge_case(
    case: Case, workdir: Path, cache: Path, host: RankHost | None = None
) -> tuple[Account, CaseResult]:
    """Run one case: its account, and the result that ``cases.verdict.decide_case`` makes of it.

    Always returns both, whatever the implementation does.  ``host``: where its ranks run (default:
    they are forked).
    """
    started = time.monotonic()
    host = host or Forked()
    account, launcher = Account(case), Launcher(workdir, host, cache)
    try:
        # What a user wrote is imported by another process, which answers for it.
        with stand_ins(case, partial(host.informant, workdir)):
            evidence = _evidence(account, launcher)
            began = time.monotonic()
            if evidence is not None:
                for record in evidence.records:  # those of another launcher's ranks have none
                    record.seal = record.seal or case.seal
                # All checks see the tensors here; decide_case needs only figures.
                measure_case(evidence)
                ambiguous.tell_apart(evidence, partial(_again, workdir / "again", cache, host))
                account.figures = evidence  # a Figures: its stored form leaves the tensors out
        result = decide_case(account)
        if evidence is not None:
            account.whole = _failing_tensors(evidence, result)
            account.timings["judge"] = time.monotonic() - began
    except Exception as error:  # noqa: BLE001 - the judge's own fault must become a verdict as well
        _note_end(account, error)
        result = decide_case(account)
    since = time.time() - (time.monotonic() - started)
    if why := _fault_of_machine(account, result, launcher, since):
        account.machine, account.figures, account.whole = why, None, []
        result = decide_case(account)
    result.seconds = account.timings["all"] = time.monotonic() - started
    return account, result


def _again(folder: Path, cache: Path, host: RankHost, other: Case) -> Evidence | None:
    """The evidence of another run of the system, for a sentence alone: no check decides by it."""
    folder.mkdir(exist_ok=True)
    return _evidence(Account(other), Launcher(folder, host, cache))


def _note_end(account: Account, error: Exception) -> None:
    """Note why the case ended early: by the system's fault, its node's or the judge's."""
    if isinstance(error, BrokenContract):
        account.refused = [type(error).__name__, str(error)]
        return
    account.figures, account.whole = None, []
    account.fault = f"{error}, and this case needs it"
    if not isinstance(error, NodeGone):
        trace = "".join(traceback.format_exception(error)[-3:])
        account.fault = f"the judge itself failed: {error!r}\n{trace}"


def _fault_of_machine(
    account: Account, result: CaseResult, launcher: Launcher, since: float
) -> str:
    """The fault of this machine, not of the system, that broke the case; empty: none is known.

    ``since``: when the case began.

    Not asked where the case ended well, where all that it ran was measured, or where it takes from
    a node on purpose what is looked for.
    """
    case, cause, found = account.case, root_cause(account.outcomes), account.figures
    # Ranks that left whole records lacked nothing: what is wrong in them is the system's.
    is_measured = isinstance(found, Evidence) and not any(b.problem for b in found.beside.values())
    red = not is_measured and verdicts.kind(result.verdict) in verdicts.RED
    broke = cause is not None or account.fault or red
    if not broke or (case.fault is not None and case.fault.strikes_nodes):
        return ""
    backend, needed = BACKENDS[case.backend], max(TASK_BYTES, room.bytes_of(case, {}))
    return fault_of_machine(cause, launcher.workdir, backend, needed, since)


def refusals(cases: Sequence[Case]) -> list[str]:
    """Task of a leader: why each of ``cases`` is refused for its options, before any rank starts;
    empty: it is not.
    """
    reasons = []
    for account in map(Account, cases):
        result = None
        with suppress(BrokenContract):  # no fault of an option: its cases tell it
            if _announced(account) is None and (account.refused or account.cannot_fit):
                result = decide_case(account)
        reasons.append(result.reason if result and result.verdict == "refused" else "")
    return reasons


def _evidence(account: Account, launcher: Launcher) -> Evidence | None:
    """Fill ``account`` as far as the case gets; evidence, if there is something to measure."""
    case = account.case
    # 1. Load the system, and hold what it declares and announces against the case.
    if case.skip or (found := _announced(account)) is None:
        return None
    if (work := kinds.of(case.workload).work(account, *found)) is None:
        return None
    # 2. Run the ranks, as the plans of the case want the first run.
    own_plans, first = plans_of(case), case
    for plan in own_plans:
        first = plan.first(first, launcher)
    with _timed(account, "ranks"):
        left = work.run(first, launcher)
    account.outcomes = left.outcomes
    if "refuses" in case.expect:
        return None
    if root_cause(left.outcomes) is not None:
        rest = (plan.after_fault(case, launcher) for plan in own_plans if case.fault)
        return next((evidence for evidence in rest if evidence is not None), None)
    # 3. Train the oracle.
    account.no_oracle_because = work.no_oracle_because
    if account.no_oracle_because:
        return None
    with _timed(account, "oracle"):
        truth = work.train_oracle(left, launcher.oracles)
    # 4. Put the runs beside it that plans ask for.  The caller measures all of them.
    evidence = work.evidence(left, truth)
    with _timed(account, "ranks"):
        for plan in own_plans:
            account.outcomes = plan.after(evidence, launcher) or account.outcomes
    return evidence


def _announced(account: Account) -> tuple[type[Implementation], Schedules] | None:
    """The class, and the schedules that it announces; ``None``: ``account`` says why not."""
    case = account.case
    try:
        system = registry.load(case.implementation)
        declaration = account.declaration = Declaration.of(system, case.options)
    except registry.BrokenImplementation as error:
        account.broken = str(error)
        return None
    except Refused as error:
        account.refused = [type(error).__name__, str(error)]
        # What it is without the cell's policy says whether the cell fits.
        if case.is_borrowed and case.precision:
            with suppress(Refused):
                account.declaration = Declaration.of(system, {})
                account.missing = account.declaration.missing_here(case.backend, case.world)
        return None
    account.missing = declaration.missing_here(case.backend, case.world)
    kind = kinds.of(case.workload)
    if problem_of(declaration) or kind.excludes(declaration, case, account.missing):
        return None
    schedules = kind.announce(account, system)
    return None if schedules is None else (system, schedules)


@contextmanager
def _timed(account: Account, what: str) -> Iterator[None]:
    """Add the seconds that the block takes to ``account``."""
    began = time.monotonic()
    yield
    account.timings[what] = account.timings.get(what, 0.0) + time.monotonic() - began


def _failing_tensors(evidence: Evidence, result: CaseResult) -> list[WholeTensor]:
    tensors: list[WholeTensor] = []
    for worst in (outcome.worst for outcome in result.checks if outcome.status == "fail"):
        named = whole_tensors(evidence, worst.step, worst.phase, worst.name) if worst else ()
        tensors += [tensor for tensor in named if tensor not in tensors]
    return tensors
