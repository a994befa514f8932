"""The plans of a scenario in addition to training: faults, checkpoints, members that change.

Each plan gives every cell once more.  :data:`SECTIONS` has a row for each section of plans: what a
case gets of a plan, what is wrong with one in its scenario, and why a cell cannot carry one out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from shardproof.backends import BACKENDS
from shardproof.case import CheckpointPlan, Death, Fault
from shardproof.errors import Problem
from shardproof.scenarios import schema
from shardproof.scenarios.cells import Cell, mesh_name, plan_name
from shardproof.scenarios.load import ScenarioFile

Keys = list[str | int]
#: Where in a plan, what is wrong there, the remedy, and the value.
Wrong = tuple[Keys, str, str, Any]


@dataclass(frozen=True)
class PlanSection:
    """A section of plans, an axis of cells, and the check that judges them.

    ``fields``: those of a case with a plan; ``wrong``: with a plan in its scenario, whatever its
    cells; ``unfit``: what a plan asks for and a cell cannot do.
    """

    key: str
    axis: str
    check: str
    fields: Callable[[Any], dict[str, Any]]
    wrong: Callable[[Any, schema.Scenario], Iterator[Wrong]]
    unfit: Callable[[Any, Cell], Iterator[Wrong]] = lambda plan, cell: iter(())


# --------------------------------------------------------------------------------------- faults


def _fault(plan: schema.FaultPlan) -> dict[str, Any]:
    given, expect = plan.model_dump(exclude={"label", "expect"}), plan.expect
    given |= {"verdicts": tuple(expect.verdict), "blames": expect.rank}
    return {"fault": Fault(**given, says=tuple(expect.says))}


def _wrong_fault(plan: schema.FaultPlan, scenario: schema.Scenario) -> Iterator[Wrong]:
    # Set-up and load come before all steps.
    valid = [0] if plan.phase in ("setup", "load") else [*range(scenario.steps)]
    if plan.phase in ("save", "load") and not scenario.checkpoints:
        remedy = "plan checkpoints, or name another phase"
        yield ["phase"], "this scenario saves and loads nothing", remedy, plan.phase
    elif plan.phase == "save":
        saved = [set(_checkpoint(one)["checkpoint"].saved_at) for one in scenario.checkpoints]
        valid = sorted(done - 1 for done in set.intersection(*saved))
    if plan.step not in valid:
        remedy = f"valid: {valid[0]} to {valid[-1]}" if valid else "no step is valid"
        yield ["step"], f"phase {plan.phase} does not occur in this step", remedy, plan.step


def _unfit_fault(plan: schema.FaultPlan, cell: Cell) -> Iterator[Wrong]:
    shown = mesh_name(cell.mesh)
    remedy = f"valid: 0 to {cell.world - 1}, or exclude {{mesh: {shown}}}"
    if plan.rank >= cell.world:
        yield ["rank"], f"no such rank in {shown}", remedy, plan.rank
    if (plan.expect.rank or 0) >= cell.world:
        yield ["expect", "rank"], f"no such rank in {shown}", remedy, plan.expect.rank


# ---------------------------------------------------------------------------------- checkpoints


def _checkpoint(plan: schema.CheckpointKeys) -> dict[str, Any]:
    hidden: Any = {"precision": {"label"}}
    given = plan.into.model_dump(exclude_none=True, exclude=hidden) if plan.into else {}
    saves = CheckpointPlan(plan.save_at, plan.saves, given, plan.again_at or 0, plan.trained)
    return {"checkpoint": saves}


def _wrong_checkpoint(plan: schema.CheckpointKeys, scenario: schema.Scenario) -> Iterator[Wrong]:
    last, save, again = scenario.least_steps - 1, plan.save_at, plan.again_at
    if save > last:
        remedy = f"valid: 1 to {last}" if last else "give the scenario more steps"
        yield ["save_at"], "no step follows the save", remedy, save
    if again is not None and not save <= again <= last:
        remedy = f"valid: {save} to {last}" if save <= last else "give the scenario more steps"
        yield ["again_at"], "again_at must lie between save_at and the last step", remedy, again
    for key in ("again_at", "trained"):
        if scenario.faults and (given := getattr(plan, key)):
            yield [key], f"{key} cannot be combined with a fault plan", f"leave {key} out", given
    # Steps after the load have numbers of their own.
    if plan.trained > save:
        yield ["trained"], "trained must not exceed save_at", f"valid: 0 to {save}", plan.trained
    if plan.saves > save:
        yield ["saves"], "saves must not exceed save_at", f"valid: 1 to {save}", plan.saves
    if plan.into and plan.into.precision and (built := plan.into.precision.built):
        what = "the restoring run must have the same model dtype as the saving run"
        yield ["into", "precision", "built"], what, "leave it out", built


# ----------------------------------------------------------------------------------- membership


def _members(plan: schema.MembershipPlan) -> dict[str, Any]:
    members = {str(change.step): tuple(change.members) for change in plan.changes}
    deaths = tuple(Death(**death.model_dump()) for death in plan.deaths)
    return {"membership": members, "deaths": deaths}


def _wrong_members(plan: schema.MembershipPlan, scenario: schema.Scenario) -> Iterator[Wrong]:
    if not plan.changes and not plan.deaths:
        yield [], "no rank joins, leaves or dies", "plan a change or a death", plan.label
    last = scenario.least_steps - 1
    for key in ("changes", "deaths"):
        for place, entry in enumerate(getattr(plan, key)):
            if entry.step > last:
                remedy = f"valid: 0 to {last}"
                yield [key, place, "step"], "there is no such step", remedy, entry.step


def _unfit_members(plan: schema.MembershipPlan, cell: Cell) -> Iterator[Wrong]:
    shown = mesh_name(cell.mesh)
    without = f"or exclude {{reason: ..., mesh: {shown}, membership: {plan.label}}}"
    if len(cell.mesh) > 1:
        yield [], "members change only on one-axis meshes", f"use such a mesh, {without}", shown
        return
    if plan.deaths and not BACKENDS[cell.backend].threads:
        able = ", ".join(name for name, backend in BACKENDS.items() if backend.threads)
        there = f"{{reason: ..., backend: {cell.backend}, membership: {plan.label}}}"
        remedy = f"use backend: {able}, or add it and exclude {there}"
        yield ["deaths"], f"a member can die inside a step on {able} only", remedy, cell.backend
    now = list(range(cell.world))
    # Changes come before their step, deaths within.
    planned = [(one.step, False, at) for at, one in enumerate(plan.changes)]
    planned += [(one.step, True, at) for at, one in enumerate(plan.deaths)]
    for step, is_death, at in sorted(planned):
        if is_death:
            rank = plan.deaths[at].rank
            where: Keys = ["deaths", at, "rank"]
            if rank not in now:
                remedy = f"valid: {', '.join(map(str, now))}, {without}"
                yield where, f"rank {rank} is not a member of step {step}", remedy, rank
            now = [one for one in now if one != rank]
            if not now:
                yield where, f"no member is left in step {step}", "keep at least one alive", rank
            continue
        if step in [one.step for one in plan.changes[:at]]:
            yield ["changes", at, "step"], "two changes have the same step", "merge the two", step
        members = plan.changes[at].members
        for what, remedy in _unfit_change(members, now, step, cell):
            yield ["changes", at, "members"], what, f"{remedy}, {without}", members
        now = members


def _unfit_change(
    members: Sequence[int], before: Sequence[int], step: int, cell: Cell
) -> Iterator[tuple[str, str]]:
    """The problem of the ``members`` from ``step`` on, and a remedy."""
    if not members:
        yield "the change leaves no member", "name at least one rank"
    if any(rank >= cell.world for rank in members):
        yield f"no such rank in {mesh_name(cell.mesh)}", f"valid: 0 to {cell.world - 1}"
    if list(members) != sorted({*members}):
        yield "list members in ascending order, each once", f"write {sorted({*members})}"
    if list(members) == list(before):
        yield f"the change before step {step} changes nothing", "name other ranks, or remove it"
    if step and members and not {*members} & {*before}:
        what = f"no member of step {step - 1} remains to synchronize the new ones"
        yield what, f"name one of {', '.join(map(str, before))} as well"


SECTIONS = (
    PlanSection("faults", "fault", "faults", _fault, _wrong_fault, _unfit_fault),
    PlanSection("checkpoints", "checkpoint", "checkpoint", _checkpoint, _wrong_checkpoint),
    PlanSection(*("membership",) * 3, _members, _wrong_members, _unfit_members),
)


def fields(cell: Cell) -> dict[str, Any]:
    """The plans that a case takes from its cell."""
    planned = ((section, getattr(cell, section.axis)) for section in SECTIONS)
    return {k: v for own, plan in planned if plan is not None for k, v in own.fields(plan).items()}


def problems(file: ScenarioFile) -> Iterator[Problem]:
    """The problem of plans, whatever their cells."""
    checks = file.scenario.checks
    for section in SECTIONS:
        plans = getattr(file.scenario, section.key)
        if bool(plans) != (section.check in checks):
            what = f"{section.axis} plans and the check `{section.check}` belong together"
            yield file.problem(["checks"], what, "give both or neither", ", ".join(checks))
        names = [*map(plan_name, plans)]
        for index, plan in enumerate(plans):
            if names[index] in names[:index]:
                what = f"{section.axis} plan named twice"
                yield file.problem([section.key, index], what, "give it a label", names[index])
            for wrong in section.wrong(plan, file.scenario):
                yield _problem(file, section, index, wrong)


def problems_of_cells(file: ScenarioFile, cells: Sequence[Cell]) -> Iterator[Problem]:
    """The first thing that a plan asks for and its cells cannot do, of each plan."""
    for section in SECTIONS:
        for index, plan in enumerate(getattr(file.scenario, section.key)):
            own = [cell for cell in cells if getattr(cell, section.axis) is plan]
            own.sort(key=lambda cell: cell.world)
            if first := next((w for cell in own for w in section.unfit(plan, cell)), None):
                yield _problem(file, section, index, first)


def _problem(file: ScenarioFile, section: PlanSection, index: int, wrong: Wrong) -> Problem:
    keys, what, remedy, value = wrong
    name = plan_name(getattr(file.scenario, section.key)[index])
    what = f"{section.axis} plan {name}: {what}"
    return file.problem([section.key, index, *keys], what, remedy, str(value))
