"""What a scenario does to its cells beside training: planned faults, and checkpoints.

Each plan gives every cell once more.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from shardproof.case import CheckpointPlan, Fault
from shardproof.errors import Problem, nearest
from shardproof.scenarios import schema
from shardproof.scenarios.cells import Cell, mesh_name
from shardproof.scenarios.load import ScenarioFile
from shardproof.scenarios.vocabulary import Vocabulary

#: Phases before all steps, and those of systems that save.
_BEFORE, _OF_CHECKPOINTS = ("setup", "load"), ("save", "load")


def fault(plan: schema.FaultPlan) -> Fault:
    """``plan`` as a case has it."""
    expect = plan.expect
    return Fault(
        **plan.model_dump(exclude={"label", "expect"}),
        verdicts=tuple(expect.verdict),
        blames=expect.rank,
        says=tuple(expect.says),
    )


def checkpoint(plan: schema.CheckpointPlan) -> CheckpointPlan:
    """``plan`` as a case has it."""
    given = plan.into.model_dump(exclude_none=True) if plan.into else {}
    if plan.into is not None and plan.into.precision is not None:
        policy = plan.into.precision.model_dump(exclude={"label"}, exclude_none=True)
        given["precision"] = policy
    return CheckpointPlan(plan.save_at, plan.saves, given, plan.again_at or 0, plan.trained)


def problems(file: ScenarioFile, vocabulary: Vocabulary) -> Iterator[Problem]:
    """What is wrong with plans whatever their cells."""
    scenario = file.scenario
    for name, plans, noun in (
        ("faults", [plan.name for plan in scenario.faults], "fault plan"),
        ("checkpoint", [plan.label for plan in scenario.checkpoints], "checkpoint plan"),
    ):
        key = "faults" if name == "faults" else "checkpoints"
        if bool(plans) != (name in scenario.checks):
            what = f"{noun}s and the check `{name}` belong together"
            yield file.problem(["checks"], what, "give both or neither", ", ".join(scenario.checks))
        for index, label in enumerate(plans):
            if label in plans[:index]:
                what = f"{noun} named twice"
                yield file.problem([key, index], what, "give it a label", label)
    yield from _faults(file)
    yield from _checkpoints(file, vocabulary)


def _faults(file: ScenarioFile) -> Iterator[Problem]:
    scenario = file.scenario
    for index, plan in enumerate(scenario.faults):
        last = 0 if plan.phase in _BEFORE else scenario.steps - 1
        valid = [*range(last + 1)]
        if plan.phase in _OF_CHECKPOINTS and not scenario.checkpoints:
            what = f"fault plan {plan.name}: nothing is saved or loaded"
            remedy = "plan checkpoints, or name another phase"
            yield file.problem(["faults", index, "phase"], what, remedy, plan.phase)
        elif plan.phase == "save":
            saved = [set(checkpoint(one).saved_at) for one in scenario.checkpoints]
            valid = sorted(done - 1 for done in set.intersection(*saved))
        if plan.step not in valid:
            what = f"fault plan {plan.name}: no step that has a phase {plan.phase}"
            shown = f"{valid[0]} to {valid[-1]}" if valid else "none"
            yield file.problem(["faults", index, "step"], what, f"valid: {shown}", str(plan.step))


def _checkpoints(file: ScenarioFile, vocabulary: Vocabulary) -> Iterator[Problem]:
    scenario = file.scenario
    for index, plan in enumerate(scenario.checkpoints):
        at: list[str | int] = ["checkpoints", index]
        few = scenario.quick_size and scenario.quick_size.steps
        last = min(scenario.steps, few or scenario.steps) - 1
        if plan.save_at > last:
            what = f"checkpoint plan {plan.label}: no step follows the save"
            remedy = f"valid: 1 to {last}" if last else "give the scenario more steps"
            yield file.problem([*at, "save_at"], what, remedy, str(plan.save_at))
        if plan.again_at is not None and not plan.save_at <= plan.again_at <= last:
            what = f"checkpoint plan {plan.label}: who loads saves before the load or after the end"
            remedy = "give the scenario more steps"
            if plan.save_at <= last:
                remedy = f"valid: {plan.save_at} to {last}"
            yield file.problem([*at, "again_at"], what, remedy, str(plan.again_at))
        if plan.again_at is not None and scenario.faults:
            what = f"checkpoint plan {plan.label}: beside faults who loads does not save in turn"
            yield file.problem([*at, "again_at"], what, "leave it out", str(plan.again_at))
        if plan.trained and scenario.faults:
            what = f"checkpoint plan {plan.label}: beside faults who loads has not trained"
            yield file.problem([*at, "trained"], what, "leave it out", str(plan.trained))
        if plan.trained > plan.save_at:
            # Steps after the load have numbers of their own.
            what = f"checkpoint plan {plan.label}: who loads has made more steps than who saved"
            remedy = f"valid: 0 to {plan.save_at}"
            yield file.problem([*at, "trained"], what, remedy, str(plan.trained))
        if plan.saves > plan.save_at:
            what = f"checkpoint plan {plan.label}: more saves than steps before them"
            remedy = f"valid: 1 to {plan.save_at}"
            yield file.problem([*at, "saves"], what, remedy, str(plan.saves))
        if plan.into and plan.into.precision and plan.into.precision.built:
            what = f"checkpoint plan {plan.label}: who loads is built in the dtype of who saved"
            where = [*at, "into", "precision", "built"]
            yield file.problem(where, what, "leave it out", plan.into.precision.built)
        name = plan.into.implementation if plan.into else None
        if name is not None and name not in vocabulary.implementations and ":" not in name:
            remedy = nearest(name, vocabulary.implementations, "implementations")
            where = [*at, "into", "implementation"]
            yield file.problem(where, "unknown implementation", remedy, name)


def problems_of_cells(file: ScenarioFile, cells: Sequence[Cell]) -> Iterator[Problem]:
    """Whether every fault plan names ranks that all of its cells have."""
    for index, plan in enumerate(file.scenario.faults):
        own = [cell for cell in cells if cell.fault is plan]
        if not own:
            continue
        cell = min(own, key=lambda one: one.world)
        shown = mesh_name(cell.mesh)
        remedy = f"valid: 0 to {cell.world - 1}, or exclude {{mesh: {shown}}}"
        for keys, rank in ((["rank"], plan.rank), (["expect", "rank"], plan.expect.rank)):
            if rank is not None and rank >= cell.world:
                what = f"fault plan {plan.name}: no such rank in {shown}"
                yield file.problem(["faults", index, *keys], what, remedy, str(rank))
