"""The runs of a case that saves: one that saves nothing, and one or two that restore and resume.

    the case    step | step | save | step | step       judged like every case
    unsaved     step | step |      | step | step       the same bits: saving changes nothing
    loaded                    load | step | step       fresh ranks, set up from other values
    again                                 load | step  others, if the plan has who loads save, too

Where a planned fault ended the case there is nothing to judge of it; then the run that saves
nothing stands in its place, and what is loaded is the last checkpoint that was committed.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from shardproof import registry
from shardproof.case import Case, Fault
from shardproof.cases.launcher import Launcher
from shardproof.cases.plans.plan import Plan
from shardproof.cases.rank_program import workload_facts
from shardproof.cases.training import beside, without_oracle
from shardproof.checks.checkpoint import PROMISES, is_same, who_loads
from shardproof.contract import Refused
from shardproof.costs.expression import facts_of
from shardproof.evidence.assembled import Beside, Continued, Evidence
from shardproof.evidence.records import RankRecord
from shardproof.launch.ranks import RankOutcome
from shardproof.oracle.asked import Meets
from shardproof.oracle.kinds import Plain, Ran
from shardproof.oracle.truth import Truth
from shardproof.workloads import Workload


class Checkpoint(Plan):
    """Saves in the first run, and further runs that load."""

    def is_in(self, case: Case) -> bool:
        """Whether ``case`` saves."""
        return case.checkpoint is not None

    def first(self, case: Case, launcher: Launcher) -> Case:
        """It saves, and a fault of the load is yet to come."""
        fault = None if _of_load(case) else case.fault
        return replace(case, saves_into=str(_root(launcher)), fault=fault)

    def after(self, evidence: Evidence, launcher: Launcher) -> list[RankOutcome]:
        """Run what saves nothing, then what loads; how that ended, if the fault is of the load."""
        case, root = evidence.case, _root(launcher)
        if root.is_dir():
            evidence.checkpoints_left = sum(path.is_dir() for path in root.iterdir())
        evidence.beside["unsaved"], _ = beside(
            launcher, _unsaved(case), "unsaved", _SAVES_NOTHING, without_oracle(evidence)
        )
        outcomes = _load(evidence, launcher)
        return outcomes if _of_load(case) else []

    def after_fault(self, case: Case, launcher: Launcher) -> Evidence | None:
        """Evidence of the run that saves nothing, and of one that loads what was committed."""
        if "checkpoint" not in case.checks:
            return None

        def collect(case: Case, workload: Workload, records: list[RankRecord]) -> Evidence:
            model, facts = workload_facts(workload), facts_of(case, workload)
            return Evidence(case, records, Truth(), model, facts)

        found, _ = beside(launcher, _unsaved(case), "unsaved", _SAVES_NOTHING, collect)
        if found.evidence is not None:
            found.evidence.case = replace(case, checks=("checkpoint",))
            _load(found.evidence, launcher)
        return found.evidence


_SAVES_NOTHING = "the run without saves"


def _root(launcher: Launcher) -> Path:
    """The root of what a case saves."""
    return launcher.workdir / "checkpoints"


def _unsaved(case: Case) -> Case:
    return replace(case, id=f"{case.id}::unsaved", fault=None, ledgers=False, checks=())


def _of_load(case: Case) -> Fault | None:
    """The fault of ``case``, if it hits the restoring run."""
    return case.fault if case.fault is not None and case.fault.phase == "load" else None


def _load(evidence: Evidence, launcher: Launcher) -> list[RankOutcome]:
    """Attach the restoring run to ``evidence``, and the one after it, if the plan has one."""
    case = evidence.case
    try:
        loads = who_loads(case)
    except Refused as error:
        evidence.beside["loaded"] = Beside(problem=f"the restoring run cannot be made: {error}")
        return []
    fault, root, plan = _of_load(case), str(_root(launcher)), loads.checkpoint
    promised = tuple(name for name in case.checks if name in PROMISES)
    assert plan is not None
    saves_again = plan.again_at and case.fault is None
    # That step is saved already: a root has it once.
    at_once = plan.again_at == plan.save_at
    loads = replace(
        loads,
        loads_from=root,
        saves_into=(f"{root}-again" if at_once else root) if saves_again else "",
        checks=promised,
        # A formula of the scenario is that of who saves.
        expect=case.expect if is_same(case, loads) else {},
        fault=fault,
        # The log of the program tells when a fault is due.
        ledgers=fault is not None or (case.ledgers and bool(promised)),
    )

    def collect(loads: Case, workload: Workload, records: list[RankRecord]) -> Evidence:
        same, truth = is_same(case, loads), Truth()
        if not same:
            system, declared = registry.load(loads.implementation), records[0].declaration
            oracle = Plain(loads, system, declared, workload)
            truth = oracle.trained(launcher.oracles, Ran(workers=0, events=()))
        facts = facts_of(loads, workload)
        found = Continued(evidence, loads, records, truth, evidence.workload, facts)
        if same:
            found.own_costs = evidence.own_costs
        if found.declaration.trains_alone:
            found.meeting = Meets(registry.load(loads.implementation), loads.options)
        return found

    found, outcomes = beside(launcher, loads, "loaded", "the restoring run", collect)
    evidence.beside["loaded"] = found
    if saves_again and found.evidence is not None:
        evidence.beside["again"] = _load_again(found.evidence, launcher)
    return outcomes


def _load_again(loaded: Evidence, launcher: Launcher) -> Beside:
    """The run that loads what ``loaded`` saved: its ranks are fresh ones, too."""
    plan = loaded.case.checkpoint
    assert plan is not None
    plan = replace(plan, save_at=plan.again_at, saves=1, again_at=0)
    again = replace(loaded.case, id=f"{loaded.case.id}::again", checkpoint=plan)
    again = replace(again, loads_from=again.saves_into, saves_into="")

    def collect(again: Case, workload: Workload, records: list[RankRecord]) -> Evidence:
        found = Continued(loaded, again, records, Truth(), loaded.workload, loaded.facts)
        found.own_costs = loaded.own_costs
        return found

    what = "the run that restores the second checkpoint"
    return beside(launcher, again, "again", what, collect)[0]
