"""The runs of a case that saves: one that saves nothing, and one or two that load and go on.

    the case    step | step | save | step | step       judged like every case
    unsaved     step | step |      | step | step       the same bits: saving changes nothing
    loaded                    load | step | step       fresh ranks, set up from other values
    again                                 load | step  others, if the plan has who loads save, too

Where a planned fault ended the case there is nothing to judge of it; then the run that saves
nothing stands in its place, and what is loaded is the last checkpoint that was committed.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path

from shardproof import registry
from shardproof.case import Case
from shardproof.cases import answers
from shardproof.cases.rank_program import workload_facts
from shardproof.cases.training_run import Launcher, without_oracle
from shardproof.checks.checkpoint import PROMISES, who_loads
from shardproof.checks.checkpoint.loaded import is_same
from shardproof.contract import Refused
from shardproof.costs.expression import facts_of
from shardproof.evidence.assembled import Beside, Continued, Evidence
from shardproof.evidence.records import RankRecord
from shardproof.launch.ranks import RankOutcome
from shardproof.oracle import apart, training
from shardproof.oracle.truth import Truth
from shardproof.workloads import Workload

#: The root of what a case saves, below its working folder.
ROOT = "checkpoints"


def first_run(case: Case, workdir: Path) -> Case:
    """``case`` as it is run first: it saves, and a fault of the load is yet to come."""
    if case.checkpoint is None:
        return case
    fault = None if _is_of_load(case) else case.fault
    return replace(case, saves_into=str(workdir / ROOT), fault=fault)


def run_beside(evidence: Evidence, launcher: Launcher, cache: Path) -> list[RankOutcome]:
    """Put the runs beside ``evidence``; how the ranks ended on which a fault of the load fell."""
    root = launcher.workdir / ROOT
    if root.is_dir():
        evidence.checkpoints_left = sum(path.is_dir() for path in root.iterdir())
    evidence.beside["unsaved"], _ = launcher.beside(
        _unsaved(evidence.case), "unsaved", "the run that saves nothing", without_oracle(evidence)
    )
    outcomes = _load(evidence, launcher, cache)
    return outcomes if _is_of_load(evidence.case) else []


def run_after_fault(case: Case, launcher: Launcher, cache: Path) -> Evidence | None:
    """Evidence of a run that saves nothing, and of one that loads what ``case`` had committed.

    ``None``: the case saves nothing, or there is no such run.
    """
    if case.checkpoint is None or "checkpoint" not in case.checks:
        return None

    def collect(case: Case, workload: Workload, records: list[RankRecord]) -> Evidence:
        return Evidence(case, records, Truth(), workload_facts(workload), facts_of(case, workload))

    what = "the run that saves nothing"
    evidence = launcher.beside(_unsaved(case), "unsaved", what, collect)[0].evidence
    if evidence is not None:
        evidence.case = replace(case, checks=("checkpoint",))
        _load(evidence, launcher, cache)
    return evidence


def _load(evidence: Evidence, launcher: Launcher, cache: Path) -> list[RankOutcome]:
    case = evidence.case
    try:
        loads = who_loads(case)
    except Refused as error:
        evidence.beside["loaded"] = Beside(problem=f"who loads cannot be made: {error}")
        return []
    fault = case.fault if _is_of_load(case) else None
    root = str(launcher.workdir / ROOT)
    promised = tuple(name for name in case.checks if name in PROMISES)
    # The log of the program tells when a fault is due.
    ledgers = fault is not None or (case.ledgers and bool(promised))
    # A formula of the scenario is that of who saves.
    expect = case.expect if is_same(case, loads) else {}
    loads = replace(loads, loads_from=root, checks=promised, expect=expect)
    loads = replace(loads, fault=fault, ledgers=ledgers)
    assert loads.checkpoint is not None
    saves_again = loads.checkpoint.again_at and case.fault is None
    if saves_again:
        # That step is saved already: a root has it once.
        at_once = loads.checkpoint.again_at == loads.checkpoint.save_at
        loads = replace(loads, saves_into=f"{root}-again" if at_once else root)

    def collect(loads: Case, workload: Workload, records: list[RankRecord]) -> Evidence:
        truth = Truth()
        if not is_same(case, loads):
            rule = records[0].declaration.buffers
            truth = apart.trained(loads, partial(training.load_or_train, loads, rule, cache))
        facts = facts_of(loads, workload)
        found = Continued(evidence, loads, records, truth, evidence.workload, facts)
        if is_same(case, loads):
            found.own_costs = evidence.own_costs
        if found.declaration.trains_alone:
            found.meeting = answers.Meets(registry.load(loads.implementation), loads.options)
        return found

    what = "the run that loads"
    evidence.beside["loaded"], outcomes = launcher.beside(loads, "loaded", what, collect)
    loaded = evidence.beside["loaded"].evidence
    if saves_again and loaded is not None:
        evidence.beside["again"] = _load_again(loaded, launcher)
    return outcomes


def _load_again(loaded: Evidence, launcher: Launcher) -> Beside:
    """The run that loads what ``loaded`` saved: its ranks anew."""
    plan = loaded.case.checkpoint
    assert plan is not None
    plan = replace(plan, save_at=plan.again_at, saves=1, again_at=0)
    again = replace(loaded.case, id=f"{loaded.case.id}::again", checkpoint=plan)
    again = replace(again, loads_from=again.saves_into, saves_into="")

    def collect(again: Case, workload: Workload, records: list[RankRecord]) -> Evidence:
        found = Continued(loaded, again, records, Truth(), loaded.workload, loaded.facts)
        found.own_costs = loaded.own_costs
        return found

    return launcher.beside(
        again, "again", "the run that loads what was saved after a load", collect
    )[0]


def _unsaved(case: Case) -> Case:
    return replace(case, id=f"{case.id}::unsaved", fault=None, ledgers=False, checks=())


def _is_of_load(case: Case) -> bool:
    return case.fault is not None and case.fault.phase == "load"
