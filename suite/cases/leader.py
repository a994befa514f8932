"""One case in its leader process: load the system, run its ranks, train the oracle, measure.

:func:`run_case` is called with a :class:`CaseTask` of ``cases/runner.py`` in a process that does
nothing else meanwhile.  It never executes a step of the implementation itself: ``launch/ranks.py``
does.
"""

from __future__ import annotations

import functools
import time
import traceback
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardproof import backends, costs, registry, workloads
from shardproof.axes import cutting, parts
from shardproof.case import Case
from shardproof.cases import answers, called, checkpoint_runs
from shardproof.cases.rank_program import workload_facts
from shardproof.cases.training_run import Launcher, Run, records_of, without_oracle
from shardproof.cases.verdict import decide_case, measure_case, problem_of
from shardproof.checks import relations
from shardproof.checks.results import CaseResult
from shardproof.checks.schedule import announced
from shardproof.cluster.nodes.nodes import NodeGone, Nodes
from shardproof.contract import Implementation, Refused
from shardproof.costs import own
from shardproof.costs.expression import CaseFacts, facts_of
from shardproof.costs.model import CostModel, NoCostModel
from shardproof.costs.own import OwnCosts
from shardproof.evidence.account import Account, WholeTensor, whole_tensors
from shardproof.evidence.assembled import Beside, Evidence
from shardproof.evidence.records import RankRecord
from shardproof.launch import kept_ranks, process_control
from shardproof.launch.lease import Lease
from shardproof.launch.rank_keeper import KeeperTask
from shardproof.launch.ranks import Kept, root_cause, run_ranks
from shardproof.oracle import apart, members, replay, training, trajectories
from shardproof.oracle.rounded import Rounded
from shardproof.oracle.truth import Truth
from shardproof.registry.declaration import BrokenContract, Declaration
from shardproof.schedules import Schedule
from shardproof.workloads import Workload, untrained


@dataclass(frozen=True)
class CaseTask:
    """What a leader is given: ``workdir`` is made for this case, ``oracles`` are shared by all.

    ``world``: a kept one of MPI, whose ranks live on after this case; ``keeps_ranks``: so do the
    leader's own.  ``nodes``: where ranks that are processes run, if not in this machine's own.
    """

    case: Case
    workdir: Path
    oracles: Path
    world: KeeperTask | None = None
    keeps_ranks: bool = False
    nodes: Nodes | None = None

    @property
    def kept(self) -> Kept | None:
        """Where the ranks come from, if they are not started for this case."""
        if self.world is not None:
            return functools.partial(Lease, [self.world])
        return kept_ranks.OF_THIS_PROCESS if self.keeps_ranks else None

    @property
    def run(self) -> Run:
        """What runs the ranks."""
        start = self.nodes.start if self.nodes is not None else None
        return functools.partial(run_ranks, start=start)


def run_case(task: CaseTask) -> dict[str, Any]:
    """Task of the leader: run and judge one case; its ``result`` and ``account`` as JSON."""
    process_control.keep_freed_memory()
    task.workdir.mkdir(parents=True)
    account, result = judge_case(task.case, task.workdir, task.oracles, task.run, task.kept)
    return {"result": result.to_dict(), "account": account.to_dict()}


def judge_case(
    case: Case,
    workdir: Path,
    cache: Path,
    run: Run = run_ranks,
    kept: Kept | None = None,
) -> tuple[Account, CaseResult]:
    """Run one case: its account, and the result that ``cases.verdict.decide_case`` makes of it.

    Always returns both, whatever the implementation does.  ``run`` is called like
    ``launch.ranks.run_ranks``; where the ranks ran elsewhere it returns what they left.
    """
    started = time.monotonic()
    account = Account(case)
    try:
        evidence = _run_and_collect(account, workdir, cache, run, kept)
        began = time.monotonic()
        if evidence is not None:
            # Every check of suite/checks/ sees the tensors here; decide_case needs only figures.
            measure_case(evidence)
            account.figures = evidence  # a Figures: its stored form leaves the tensors out
        result = decide_case(account)
        if evidence is not None:
            account.whole = _failing_tensors(evidence, result)
            account.timings["judge"] = time.monotonic() - began
    except BrokenContract as error:
        account.refused = [type(error).__name__, str(error)]
        result = decide_case(account)
    except NodeGone as error:
        account.figures, account.whole = None, []
        account.fault = f"{error}, and this case needs it"
        result = decide_case(account)
    except Exception as error:  # noqa: BLE001 - the judge's own fault must become a verdict as well
        trace = "".join(traceback.format_exception(error)[-3:])
        account.figures, account.whole = None, []
        account.fault = f"the judge itself failed: {error!r}\n{trace}"
        result = decide_case(account)
    result.seconds = account.timings["all"] = time.monotonic() - started
    return account, result


def refusals(cases: Sequence[Case]) -> list[str]:
    """Task of a leader: why each of ``cases`` is refused for its options, before any rank starts;
    empty: it is not.
    """
    return [*map(_refusal, cases)]


def _refusal(case: Case) -> str:
    account = Account(case)
    try:
        found = _declared(account)
    except BrokenContract:
        return ""  # no fault of an option: its cases tell it
    if found is None and (account.refused or account.cannot_fit):
        result = decide_case(account)
        return result.reason if result.verdict == "refused" else ""
    return ""


def _declared(account: Account) -> tuple[type[Implementation], dict[int, Schedule]] | None:
    """The class, and the schedules that it announces; ``None``: ``account`` tells why not."""
    case = account.case
    try:
        implementation = registry.load(case.implementation)
        declaration = account.declaration = Declaration.of(implementation, case.options)
    except registry.BrokenImplementation as error:
        account.broken = str(error)
        return None
    except Refused as error:
        account.refused = [type(error).__name__, str(error)]
        if (
            case.is_borrowed and case.precision
        ):  # what it is without the cell's policy says whether the cell fits
            with suppress(Refused):
                account.declaration = Declaration.of(implementation, {})
                account.missing = account.declaration.missing_here(case.backend, case.world)
        return None
    account.missing = declaration.missing_here(case.backend, case.world)
    if problem_of(declaration) or declaration.excludes_case(case, account.missing):
        return None
    if untrained.of(case.workload) is not None:
        return implementation, {}
    account.cannot_fit = _why_not_in_this_lane(case, declaration)
    if account.cannot_fit:
        return None
    try:
        return implementation, _announced_schedules(case, implementation)
    except announced.NoSchedule as error:
        account.broken = str(error)
    except BrokenContract as error:
        account.refused = [type(error).__name__, str(error)]
    except Refused as error:  # of options that are defaults as well: the mesh does not suit them
        account.cannot_fit = str(error)
    return None


def _run_and_collect(
    account: Account, workdir: Path, cache: Path, run: Run, kept: Kept | None
) -> Evidence | None:
    """Fill ``account`` as far as the case gets; evidence, if every rank did its work."""
    case = account.case
    if case.skip or (found := _declared(account)) is None:
        return None
    implementation, schedules = found
    assert account.declaration is not None
    declaration = account.declaration
    if untrained.of(case.workload) is not None:
        return called.run_called(account, implementation, workdir, run, kept)
    try:
        workload = workloads.for_case(case)
        account.cannot_fit = _why_it_has_no_stages(case, workload)
        account.data_digest = workload.digest
    except workloads.WorkloadError as error:  # a user's own, which nobody has tried before
        account.cannot_fit = str(error)
    if account.cannot_fit:
        return None
    facts = facts_of(case, workload)
    account.cannot_fit = _why_it_cannot_fit(case, schedules, facts, workload)
    account.unsound_schedules = announced.unsound_schedules(
        case, implementation.strategy, schedules
    )
    if account.cannot_fit or account.unsound_schedules:
        return None
    began = time.monotonic()
    launcher = Launcher(workdir, run, kept, case.world)
    outcomes = launcher.train(checkpoint_runs.first_run(case, workdir), workload, declaration)
    account.timings["ranks"] = time.monotonic() - began
    account.outcomes = outcomes
    if "refuses" in case.expect:
        return None
    if root_cause(outcomes) is not None:
        return checkpoint_runs.run_after_fault(case, launcher, cache) if case.fault else None
    if declaration.oracle == "plain":
        account.no_oracle_because = training.no_oracle_because(workload, case.precision)
        if account.no_oracle_because:
            return None
    records = records_of(outcomes)
    began = time.monotonic()
    train = functools.partial(
        _train_oracle, case, implementation, declaration, workload, records, cache
    )
    truth = apart.trained(case, train)
    account.timings["oracle"] = time.monotonic() - began
    evidence = Evidence(case, records, truth, workload_facts(workload), facts, schedules)
    if declaration.trains_alone:
        evidence.meeting = answers.Meets(implementation, case.options)
    elif declaration.oracle == "emulated":
        fold = Rounded(answers.Emulated(implementation, case.options))
        train = functools.partial(_train_emulated, case, declaration, workload, fold)
        evidence.train_rounded = functools.partial(apart.trained, case, train)
    evidence.own_costs = _own_costs(implementation, evidence)
    began = time.monotonic()
    if "relations" in case.checks:
        _run_related(evidence, launcher)
    if case.checkpoint is not None:
        outcomes = checkpoint_runs.run_beside(evidence, launcher, cache)
        account.outcomes = outcomes or account.outcomes
    account.timings["ranks"] += time.monotonic() - began
    return evidence


def _own_costs(implementation: type[Implementation], evidence: Evidence) -> OwnCosts | None:
    """What the cost model that the class brings promises in this case, at depth ``own``.

    :raises BrokenContract: it brings none, or it raised.
    """
    facts = evidence.model_facts
    if evidence.depth != "own" or facts is None:
        return None
    name, cost_model = implementation.__name__, implementation.cost_model
    if not (isinstance(cost_model, type) and issubclass(cost_model, CostModel)):
        raise BrokenContract(f"{name}.cost_model is {cost_model!r}, no subclass of CostModel")
    skipped = [any(r.steps[step].skipped for r in evidence.records) for step in evidence.steps]
    try:
        return own.answers(cost_model, facts, skipped)
    except NoCostModel:
        return None  # it promises nothing here
    except Exception as error:
        raise BrokenContract(f"{name}.cost_model raised {error!r}") from error


def _announced_schedules(case: Case, implementation: type[Implementation]) -> dict[int, Schedule]:
    """The schedule that is announced for each size of window; empty: none."""
    if cutting("layers") not in case.mesh:
        return {}
    ranks = parts(case.mesh, "layers")
    cut = case.workload.cut(case.data_coordinates)
    schedules = {}
    for size in sorted({len(window) for share in cut for window in share}):
        claimed = announced.claimed(implementation, case.options, ranks, size)
        if claimed is not None:
            schedules[size] = claimed
    return schedules


def _why_not_in_this_lane(case: Case, declaration: Declaration) -> str:
    """Why a system that is compared with an emulation cannot be judged in the lane; empty: it can.

    Elsewhere it would be held to what one device computes, which loses nothing.
    """
    if declaration.oracle != "emulated" or case.lane == "fp64":
        return ""
    in_order = backends.BACKENDS[case.backend].adds_like_one(case.world)
    exact = declaration.exactness == "bitwise" and in_order and cutting("layers") not in case.mesh
    if case.lane == "bitwise" and (exact or case.world == 1):
        return ""
    return (
        f"lane {case.lane!r}: what {case.system} loses is emulated, and compared in lane fp64 (in "
        "lane bitwise where it declares equal bits); write lane: fp64"
    )


def _why_it_has_no_stages(case: Case, workload: Workload) -> str:
    """Why a pipeline cannot cut a user's own model; empty: it can."""
    axis = cutting("layers")
    reason = workload.family.unstaged(workload.params) if axis in case.mesh else ""
    return f"axis {axis!r} of {case.mesh[axis]} ranks: {reason}" if reason else ""


def _why_it_cannot_fit(
    case: Case, schedules: Mapping[int, Schedule], facts: CaseFacts, workload: Workload
) -> str:
    """Why the axes cannot share the stages or the layers of a model; empty: they can."""
    if odd := costs.cannot_fit(facts.model_facts):
        return odd
    claimed = next(iter(schedules.values()), None)
    axis, units = cutting("layers"), len(workload.units)
    stages = claimed.stages if claimed else case.mesh.get(axis, 0)
    if stages <= units:
        return ""
    return (
        f"axis {axis!r} of {case.mesh[axis]} ranks asks for {stages} stages, but "
        f"{case.workload.name} has {units} units (layers): a stage needs one at "
        f"least; valid: up to {units} stages"
    )


def _run_related(evidence: Evidence, launcher: Launcher) -> None:
    """Run the case that a relation derives from this one, and put it beside this one."""
    try:
        case, skip = relations.derive(evidence)
    except (Refused, registry.BrokenImplementation) as error:
        evidence.beside["relation"] = Beside(problem=f"the second run cannot be made: {error}")
        return
    if case is None:
        evidence.beside["relation"] = Beside(skip=skip)
        return
    evidence.beside["relation"], _ = launcher.beside(
        case, "derived", "the second run", without_oracle(evidence)
    )


def _train_oracle(
    case: Case,
    implementation: type[Implementation],
    declaration: Declaration,
    workload: Workload,
    records: list[RankRecord],
    cache: Path,
) -> Truth:
    """Train the kind of oracle that the implementation names, or load it from the cache."""
    if declaration.oracle == "replay":
        shares = {record.steps[0].share for record in records} - {None}
        events = [event for record in records for event in record.history]
        fed = replay.fed(case.options, case.steps, len(shares))
        by_worker = declaration.optimizer_state == "by_worker"
        return replay.truth(workload, case.optimizer, fed, events, by_worker)
    if declaration.trains_alone:
        # Neither of the two is cached: these numbers depend on the implementation's own code.
        meeting = answers.Meets(implementation, case.options)
        return trajectories.train_apart(
            workload, case.optimizer, case.data_coordinates, case.steps, meeting
        )
    if declaration.oracle == "emulated":
        fold = answers.Emulated(implementation, case.options)
        return _train_emulated(case, declaration, workload, fold)
    return training.load_or_train(case, declaration.buffers, cache, declaration.batch)


def _train_emulated(
    case: Case, declaration: Declaration, workload: Workload, fold: training.Fold
) -> Truth:
    return training.train(
        workload,
        case.optimizer,
        case.data_coordinates,
        case.steps,
        declaration.buffers,
        fold=fold,
        by_round=declaration.emulates == "round",
        members=members.of(case, declaration.batch) if case.changes_members else (),
    )


def _failing_tensors(evidence: Evidence, result: CaseResult) -> list[WholeTensor]:
    tensors: list[WholeTensor] = []
    for outcome in result.checks:
        worst = outcome.worst
        if outcome.status == "fail" and worst is not None:
            named = whole_tensors(evidence, worst.step, worst.phase, worst.name)
            tensors += [tensor for tensor in named if tensor not in tensors]
    return tensors
