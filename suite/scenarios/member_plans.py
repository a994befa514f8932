"""Members that change: what a scenario plans, and why a plan cannot be carried out."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from shardproof.backends import BACKENDS
from shardproof.case import Death
from shardproof.errors import Problem
from shardproof.scenarios import schema
from shardproof.scenarios.cells import Cell, mesh_name
from shardproof.scenarios.load import ScenarioFile

Keys = list[str | int]


def membership(plan: schema.MembershipPlan | None) -> dict[str, tuple[int, ...]]:
    """Members from a step on, as a case has them."""
    return {str(change.step): tuple(change.members) for change in plan.changes} if plan else {}


def deaths(plan: schema.MembershipPlan | None) -> tuple[Death, ...]:
    """Who dies, as a case has it."""
    return tuple(Death(**death.model_dump()) for death in plan.deaths) if plan else ()


def problems(file: ScenarioFile) -> Iterator[Problem]:
    """What is wrong with plans whatever their cells."""
    scenario = file.scenario
    labels = [plan.label for plan in scenario.membership]
    if bool(labels) != ("membership" in scenario.checks):
        what = "membership plans and the check `membership` belong together"
        yield file.problem(["checks"], what, "give both or neither", ", ".join(scenario.checks))
    few = scenario.quick_size and scenario.quick_size.steps
    last = min(scenario.steps, few or scenario.steps) - 1
    for index, plan in enumerate(scenario.membership):
        at: Keys = ["membership", index]
        named = f"membership plan {plan.label}"
        if plan.label in labels[:index]:
            what, remedy = "membership plan named twice", "give it another label"
            yield file.problem(at, what, remedy, plan.label)
        if not plan.changes and not plan.deaths:
            what, remedy = f"{named}: nobody joins, leaves or dies", "plan a change or a death"
            yield file.problem(at, what, remedy, plan.label)
        for key in ("changes", "deaths"):
            for place, entry in enumerate(getattr(plan, key)):
                if entry.step > last:
                    what = f"{named}: there is no such step"
                    where = [*at, key, place, "step"]
                    yield file.problem(where, what, f"valid: 0 to {last}", str(entry.step))


def problems_of_cells(file: ScenarioFile, cells: Sequence[Cell]) -> Iterator[Problem]:
    """The first thing that a plan asks for and its cells cannot do, of each plan."""
    for index, plan in enumerate(file.scenario.membership):
        own = [cell for cell in cells if cell.membership is plan]
        for cell in sorted(own, key=lambda one: one.world):
            found = next(_faults(plan, cell), None)
            if found is not None:
                keys, what, remedy, value = found
                what = f"membership plan {plan.label}: {what}"
                yield file.problem(["membership", index, *keys], what, remedy, value)
                break


def _faults(plan: schema.MembershipPlan, cell: Cell) -> Iterator[tuple[Keys, str, str, str]]:
    """Where, what is wrong there, the remedy and the value."""
    shown, world = mesh_name(cell.mesh), cell.world
    without = f"or exclude {{reason: ..., mesh: {shown}, membership: {plan.label}}}"
    if len(cell.mesh) > 1:
        what, remedy = "members change on a mesh of one axis only", f"take one, {without}"
        yield [], what, remedy, shown
        return
    if plan.deaths and not BACKENDS[cell.backend].threads:
        there = f"backend: {cell.backend}, membership: {plan.label}"
        remedy = f"run it on backend: in_memory, or also there and exclude {{reason: ..., {there}}}"
        what = "a member can die inside a step on in_memory only"
        yield ["deaths"], what, remedy, cell.backend
    changes = {change.step: (at, change) for at, change in enumerate(plan.changes)}
    for at, change in enumerate(plan.changes):
        if changes[change.step][0] != at:
            what, remedy = "two changes before one step", "make them one"
            yield ["changes", at, "step"], what, remedy, str(change.step)
    now = list(range(world))
    for step in range(1 + max([*changes, *(death.step for death in plan.deaths)], default=0)):
        if step in changes:
            at, change = changes[step]
            keys: Keys = ["changes", at, "members"]
            for what, remedy in _of_change(change.members, now, step, world, shown):
                yield (
                    keys,
                    what,
                    remedy or f"valid: 0 to {world - 1}, {without}",
                    str(change.members),
                )
            now = change.members
        for at, death in enumerate(plan.deaths):
            if death.step != step:
                continue
            if death.rank not in now:
                what = f"rank {death.rank} is no member of step {step}"
                remedy = f"valid: {', '.join(map(str, now))}, {without}"
                yield ["deaths", at, "rank"], what, remedy, str(death.rank)
            now = [rank for rank in now if rank != death.rank]
            if not now:
                what, remedy = f"nobody is left of step {step}", "let somebody live"
                yield ["deaths", at, "rank"], what, remedy, str(death.rank)


def _of_change(
    members: Sequence[int], before: Sequence[int], step: int, world: int, shown: str
) -> Iterator[tuple[str, str]]:
    """What is wrong with the ``members`` from ``step`` on, and a remedy (empty: valid ranks)."""
    if not members:
        yield "a change that leaves nobody", "name a rank at least"
    for rank in members:
        if rank >= world:
            yield f"no such rank in {shown}", ""
        if list(members).count(rank) > 1:
            yield f"rank {rank} joins twice", "name it once"
    if list(members) != sorted(members):
        yield "members do not ascend", f"write {sorted(members)}"
    if list(members) == list(before):
        yield f"a change that changes nothing before step {step}", "name others, or leave it out"
    if step and members and not set(members) & set(before):
        yield (
            f"nobody of the members before step {step} stays, to bring the others up to date",
            f"name one of {', '.join(map(str, before))} as well",
        )
