"""A case that trains: what is announced, prepared and run, and the evidence that it leaves."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardproof import backends, costs, registry, workloads
from shardproof.axes import cutting, parts
from shardproof.case import Case
from shardproof.cases.kinds.kind import Schedules
from shardproof.cases.launcher import Launcher, Left, Work, records_of
from shardproof.cases.rank_program import run_rank, workload_facts
from shardproof.checks.schedule import announced
from shardproof.contract import Implementation, LossTerm, Refused
from shardproof.costs.expression import CaseFacts, facts_of
from shardproof.costs.own import OwnCosts
from shardproof.evidence.account import Account
from shardproof.evidence.assembled import Beside, Evidence
from shardproof.evidence.records import RankRecord
from shardproof.launch.ranks import RankOutcome, root_cause
from shardproof.oracle.kinds import Oracle, Ran, oracle_of
from shardproof.oracle.truth import Truth
from shardproof.registry.declaration import BrokenContract, Declaration
from shardproof.registry.stand_ins import import_now, own_costs
from shardproof.workloads import Workload

#: Makes evidence of the records of a run beside the first.
Collect = Callable[[Case, Workload, list[RankRecord]], Evidence]


# --------------------------------------------------------------------------- before ranks start


def announce(account: Account, system: type[Implementation]) -> Schedules | None:
    """The pipeline schedules that ``system`` announces; ``None``: ``account`` says why it stops."""
    case, declaration = account.case, account.declaration
    assert declaration is not None
    account.cannot_fit = _why_not_in_this_lane(case, declaration)
    if account.cannot_fit:
        return None
    try:
        return _announced_schedules(case, system)
    except announced.NoSchedule as error:
        account.broken = str(error)
    except BrokenContract as error:
        account.refused = [type(error).__name__, str(error)]
    except Refused as error:  # of options that are defaults as well: the mesh does not suit them
        account.cannot_fit = str(error)
    return None


def prepare(
    account: Account, system: type[Implementation], schedules: Schedules
) -> TrainingWork | None:
    """The work of a case whose axes can share its model; ``None``: ``account`` says why not."""
    case, declaration = account.case, account.declaration
    assert declaration is not None
    try:
        workload, axis = workloads.for_case(case), cutting("layers")
        # A pipeline may be unable to cut a user's own model.
        if axis in case.mesh and (why := workload.family.unstaged(workload.params)):
            account.cannot_fit = f"axis {axis!r} of {case.mesh[axis]} ranks: {why}"
        odd = [t for t in workload.family.terms(workload.params) if not _adds(declaration, t, case)]
        if odd:
            term = odd[0]
            what = f"the loss term {term.name!r} of {case.workload.name} spans {term.scope!r}"
            account.cannot_fit = f"{what}, which the system does not sum (Capabilities.scopes)"
        account.data_digest = workload.digest
    except workloads.WorkloadError as error:  # a user's own, which nobody has tried before
        account.cannot_fit = str(error)
    if account.cannot_fit:
        return None
    facts = facts_of(case, workload)
    account.cannot_fit = _why_it_cannot_fit(system.strategy, case, schedules, facts, workload)
    account.unsound_schedules = announced.unsound_schedules(case, system.strategy, schedules)
    if account.cannot_fit or account.unsound_schedules:
        return None
    oracle = oracle_of(case, system, declaration, workload)
    if unusable := oracle.follows.unusable(case.steps):
        account.broken = unusable
        return None
    return TrainingWork(case, system, declaration, workload, schedules, facts, oracle)


def _adds(declaration: Declaration, term: LossTerm, case: Case) -> bool:
    """Whether the system adds ``term`` to the loss; ``Build.loss`` has those of a micro-batch that
    a rank has whole.
    """
    is_whole = parts(case.mesh, "positions") == 1
    return (term.scope == "micro-batch" and is_whole) or term.scope in declaration.scopes


def _announced_schedules(case: Case, system: type[Implementation]) -> Schedules:
    """The schedule that is announced for each size of window; empty: none."""
    if cutting("layers") not in case.mesh:
        return {}
    ranks = parts(case.mesh, "layers")
    cut = case.workload.cut(case.data_coordinates)
    sizes = sorted({len(window) for share in cut for window in share})
    claimed = {size: announced.claimed(system, case.options, ranks, size) for size in sizes}
    return {size: schedule for size, schedule in claimed.items() if schedule is not None}


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
    lanes = "lane fp64 (or bitwise, if it declares equal bits): write lane: fp64"
    return f"lane {case.lane!r}: {case.system} is compared with an emulation, which needs {lanes}"


def _why_it_cannot_fit(
    strategy: str, case: Case, schedules: Schedules, facts: CaseFacts, workload: Workload
) -> str:
    """Why the axes cannot share the stages or the layers of a model; empty: they can."""
    if odd := costs.cannot_fit(facts.model_facts, strategy):
        return odd
    claimed = next(iter(schedules.values()), None)
    axis, units = cutting("layers"), len(workload.units)
    stages = claimed.stages if claimed else case.mesh.get(axis, 0)
    if stages <= units:
        return ""
    asks = f"axis {axis!r} of {case.mesh[axis]} ranks asks for {stages} stages"
    has = f"{case.workload.name} has {units} units (layers)"
    return f"{asks}, but {has}: each stage needs at least one; valid: up to {units} stages"


# ----------------------------------------------------------------------------------- the case


@dataclass
class TrainingWork(Work):
    """One training run on the ranks, its oracle, and what is known of both."""

    case: Case
    system: type[Implementation]
    declaration: Declaration
    workload: Workload
    schedules: Schedules
    facts: CaseFacts
    oracle: Oracle

    @property
    def no_oracle_because(self) -> str:
        """As the oracle says."""
        return self.oracle.missing_because

    def run(self, case: Case, launcher: Launcher) -> Left:
        """One leg."""
        outcomes = train(launcher, case, self.workload, self.declaration)
        if root_cause(outcomes) is not None:
            return Left(outcomes)
        return Left(outcomes, [records_of(outcomes, self.declaration)])

    def train_oracle(self, left: Left, cache: Path) -> Truth:
        """From what the ranks report, where that matters; empty where tensors have no values."""
        (records,) = left.legs
        if not backends.BACKENDS[self.case.backend].has_values:
            return Truth()
        shares = {record.steps[0].share for record in records} - {None}
        events = [event for record in records for event in record.history]
        return self.oracle.trained(cache, Ran(len(shares), events))

    def evidence(self, left: Left, truth: Truth) -> Evidence:
        """Records, oracle and costs."""
        (records,) = left.legs
        model = workload_facts(self.workload)
        facts = self.facts.routed_as(step.routed for step in truth.steps)
        evidence = Evidence(self.case, records, truth, model, facts, self.schedules)
        evidence.meeting, evidence.train_rounded = self.oracle.meeting, self.oracle.rounded
        evidence.own_costs = _own_costs(self.system, evidence)
        return evidence


def _own_costs(system: type[Implementation], evidence: Evidence) -> OwnCosts | None:
    """The promises of the class's own cost model in this case, at depth ``own``."""
    facts = evidence.model_facts
    if evidence.depth != "own" or facts is None:
        return None
    skipped = [any(r.steps[step].skipped for r in evidence.records) for step in evidence.steps]
    return own_costs(system, facts, skipped)


# --------------------------------------------------------------------------------- training runs


def train(
    launcher: Launcher, case: Case, workload: Workload, declaration: Declaration, name: str = ""
) -> list[RankOutcome]:
    """Train on the ranks of ``launcher``, in its folder ``name``."""
    workload.prepare(case.steps, case.data_coordinates)
    # Threads could not share module globals; nor can processes that are used again.
    keeps = declaration.runs_on_threads
    return launcher.launch(case, RankProgram(case, workload), name, keeps=keeps)


def beside(
    launcher: Launcher, case: Case, name: str, what: str, collect: Collect
) -> tuple[Beside, list[RankOutcome]]:
    """Run ``case`` in addition to the first run; how its ranks ended. ``what`` describes it."""
    if launcher.host.cannot_again:
        return Beside(skip=launcher.host.cannot_again), []
    try:
        declaration = Declaration.of(registry.load(case.implementation), case.options)
    except (Refused, registry.BrokenImplementation) as error:
        return Beside(problem=f"{what} cannot be made: {error}"), []
    missing = declaration.missing_here(case.backend, case.world)
    if reason := declaration.excludes_case(case, missing):
        return Beside(skip=f"{case.implementation} {reason}"), []
    workload = workloads.for_case(case)
    outcomes = train(launcher, case, workload, declaration, name)
    cause = root_cause(outcomes)
    if cause is not None and cause.error_type == "CannotReload":
        return Beside(skip=f"{case.implementation} {cause.message}"), outcomes
    if cause is not None:
        how = " ".join(filter(None, (cause.status, cause.error_type)))
        # Where the case works is another place in every run.
        message = cause.message.replace(f"{launcher.workdir}/", "")
        return Beside(problem=f"in {what} rank {cause.rank} {how}: {message}"), outcomes
    return Beside(collect(case, workload, records_of(outcomes, declaration))), outcomes


def without_oracle(base: Evidence) -> Collect:
    """Of the same model as ``base``, and compared with nothing but that."""
    return lambda case, _, records: Evidence(case, records, Truth(), base.workload, {})


@dataclass(frozen=True)
class RankProgram:
    """The program of every rank; ranks that were not forked build the workload again."""

    case: Case
    workload: Workload

    def __call__(self, rank: int, world: int) -> dict[str, Any]:
        return run_rank(self.case, self.workload, rank).to_dict()

    def prepare(self) -> None:
        """Before ranks that are threads start."""
        import_now(self.case)

    def __reduce__(self) -> tuple[Callable[[Case], RankProgram], tuple[Case]]:
        return _for_case, (self.case,)


def _for_case(case: Case) -> RankProgram:
    workload = workloads.for_case(case)
    workload.prepare(case.steps, case.data_coordinates)  # once, where ranks are threads
    return RankProgram(case, workload)
