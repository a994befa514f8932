"""Right after a load: what is held is what was held at the save, on every rank."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from torch import Tensor

from shardproof.case import Case
from shardproof.checks.causes import state
from shardproof.checks.numbers import Differs
from shardproof.checks.one_update import MASTER
from shardproof.checks.two_runs import KINDS, of_rank_0, without_masters
from shardproof.contract import Kind
from shardproof.evidence.assembled import Assembled, Continued, Evidence
from shardproof.evidence.records import ComparisonRow

#: Of a case's options: what says how checkpoints are written.
OPTION = "checkpoint"


def is_same(case: Case, loads: Case) -> bool:
    """Whether who loads is who saved, so that the bits that follow are the same."""
    one, other = (
        (c.implementation, dict(c.mesh), dict(c.precision), {**c.options, OPTION: None})
        for c in (case, loads)
    )
    return one == other


def what_was_loaded(base: Evidence, other: Continued, rows: list[ComparisonRow]) -> None:
    """Progress, ties, tensors and generators, right after the load."""
    # First of all: a checkpoint of another step explains every tensor that differs.
    _progress(base, other)
    step, found = other.first_step - 1, []
    for kind in KINDS:
        if not base.has(step, "after_update"):
            raise Differs(f"step {step}: 'after_update' was never observed")
        load = _load(base, other, kind)
        told = load.saved.problems or load.held.problems
        sentence = "; ".join(told[:3]) or state.of_load(load)
        if sentence:
            found.append(sentence)
        wrong = float(bool(sentence))
        place = (step, f"after the load, {kind}", "all that was saved", "all ranks")
        if load.saved.tensors:
            rows.append(ComparisonRow(*place, error=wrong, bound=0.0))
    found += _ties(other)
    found += _draws(base, other)
    if found:
        raise Differs("; ".join(found))


def _progress(base: Evidence, other: Continued) -> None:
    """Whether every rank was given back what the caller saved."""
    plan = other.case.checkpoint
    assert plan is not None
    extras = {n: r.loaded.extra for n, r in other.ranks.items() if r.loaded is not None}
    steps = {rank: _step_of(extra) for rank, extra in extras.items()}
    # A fault may have come before the last save.
    saved = [plan.save_at] if "unsaved" in base.beside else [*plan.saved_at]
    for rank, step in steps.items():
        if step not in saved:
            raise Differs(
                f"progress was not loaded: rank {rank} would go on from step {step}, the newest "
                f"checkpoint is of step {plan.save_at}"
            )
    for rank, extra in extras.items():
        if steps[rank] != other.first_step:
            apart = f"step {steps[rank]}, another rank that of step {other.first_step}"
            raise Differs(f"rank {rank} loaded the checkpoint of {apart}")
        given = plan.extra(other.first_step)
        if odd := [key for key in {**given, **extra} if given.get(key) != extra.get(key)]:
            was, now = given.get(odd[0]), extra.get(odd[0])
            raise Differs(f"extra was not loaded on rank {rank}: {odd[0]!r} is {now}, not {was}")


def _step_of(extra: Mapping[str, Any]) -> Any:
    """The step that a caller goes on with."""
    data = extra.get("data")
    return data.get("step") if isinstance(data, Mapping) else None


def _load(base: Evidence, other: Continued, kind: Kind) -> state.Load:
    """What ``kind`` was at the save, as who loads is to hold it, and what it holds."""
    step = other.first_step - 1
    saved, held = (run.observed(step, "after_update", kind) for run in (base, other))
    before = other.initial(kind).first() if kind != "optimizer" else {}
    moments = state.moments_of(base, kind, other.first_step)
    # What other ranks hold is dead where each step begins with rank 0's.
    if kind == "buffers" and not (buffers_go_on(base, other) and _keeps_own(other)):
        saved, held = of_rank_0(saved), of_rank_0(held)
    if not is_same(base.case, other.case):
        saved = _between_precisions(base, step, kind, saved, held)
        if kind == "optimizer":
            saved = replace(saved, tensors={**saved.tensors, **_begun_anew(other)})
    return state.Load(kind, other.first_step, saved, held, before, moments)


def _begun_anew(other: Continued) -> dict[str, dict[int, Tensor]]:
    """The outer optimizer's slots, if who loads has one: who saved had none."""
    if other.meeting is None:
        return {}
    loaded = other.observed(other.first_step - 1, "after_update", "parameters").first()
    trained = {n: loaded[n] for n in other.workload.trainable_names if n in loaded}
    return {name: {0: slot} for name, slot in other.meeting.begin(trained).items()}


def buffers_go_on(base: Evidence, other: Evidence) -> bool:
    """Whether every data coordinate has its own buffers, or rank 0's, again."""
    rules = {run.declaration.buffers for run in (base, other)}
    return base.case.data_coordinates == other.case.data_coordinates and len(rules) == 1


def _keeps_own(run: Evidence) -> bool:
    """Whether what a rank holds of buffers means anything to the next step."""
    return run.declaration.buffers != "rank0"


def _between_precisions(
    base: Evidence, step: int, kind: Kind, saved: Assembled, held: Assembled
) -> Assembled:
    """A parameter in another dtype is its master, rounded; a master that was not saved is its
    parameter.
    """
    slots = base.observed(step, "after_update", "optimizer").first()
    if kind == "parameters":
        wide = {name: slots.get(f"{name}.{MASTER}") for name in saved.tensors}
        tensors = {
            name: {n: _rounded(t, wide[name], held.tensors.get(name)) for n, t in copies.items()}
            for name, copies in saved.tensors.items()
        }
        return replace(saved, tensors=tensors)
    if kind != "optimizer":
        return saved
    values = base.observed(step, "after_update", "parameters").tensors
    tensors = dict(without_masters(saved).tensors)
    for name, copies in held.tensors.items():
        owner = name.removesuffix(f".{MASTER}")
        if name != owner:
            own = saved.tensors.get(name) or values.get(owner, {})
            tensors[name] = {n: t.to(copies[min(copies)].dtype) for n, t in own.items()}
    return replace(saved, tensors=tensors)


def _rounded(tensor: Tensor, master: Tensor | None, held: Mapping[int, Tensor] | None) -> Tensor:
    """``tensor`` in the dtype in which it is ``held``."""
    if not held or (dtype := held[min(held)].dtype) == tensor.dtype:
        return tensor
    return (tensor if master is None else master).to(dtype)


def _ties(other: Continued) -> list[str]:
    for record in other.records:
        assert record.loaded is not None
        for names in record.loaded.parted:
            shown = " and ".join(map(repr, names[:3]))
            return [f"the load parted {shown} on rank {record.rank}, which were one parameter"]
    return []


def _draws(base: Evidence, other: Continued) -> list[str]:
    """What is said of generators; ranks of another mesh have none of the ranks that saved."""
    if dict(base.case.mesh) != dict(other.case.mesh):
        return []
    step = other.first_step - 1
    saved, held = ([r.steps[step].draws for r in run.records] for run in (base, other))
    before = [r.loaded.before if r.loaded else {} for r in other.records]
    told = state.of_draws(saved, held, before)
    return [told] if told else []
