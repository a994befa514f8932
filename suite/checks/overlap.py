"""Gradient reductions overlap with backward, in program order.

A bucket's reduction must be *issued* while backward still has units to compute and *waited for*
only after some of that computing.  Counts, not clocks: the log numbers every call, every wait and
every unit whose backward starts.  One unused parameter early in the order can silently stop all
buckets from being launched inside backward; numbers and traffic stay right, only this count shows
it.

*Cannot see* whether the hardware overlaps anything, nor steps before the bucket order is settled:
steps 0 and 1 are left out.

Of strategies that shard parameters gathers are counted as well: how many are issued ahead, while
another unit computes (prefetch), and how deep: how many are under way when a unit begins, against
what the strategy promises.
"""

from __future__ import annotations

from shardproof.checks import Outcome
from shardproof.checks.traffic import step_calls
from shardproof.costs import cost_model_of
from shardproof.evidence.assembled import Figures
from shardproof.evidence.records import RankRecord
from shardproof.ledgers.traffic import Call

#: Steps in which an implementation may still be learning the order of its gradients.
SETTLING = 2
REDUCTIONS = ("all_reduce", "reduce_scatter")


def decide(evidence: Figures) -> Outcome:
    """Count the reductions issued in time, for every rank and settled step."""
    if not evidence.case.ledgers:
        return Outcome("overlap", "skip", "ledgers are off")
    if evidence.case.world == 1:
        return Outcome("overlap", "skip", "a world of one rank has nothing to overlap")
    if "overlap" not in evidence.declaration.features:
        return Outcome("overlap", "skip", "not part of what this strategy claims")
    cost_model = cost_model_of(evidence.declaration.strategy, evidence.model_facts)
    ahead = cost_model.prefetch() if cost_model is not None else None
    settled = [step for step in evidence.steps if step >= SETTLING]
    if not settled:
        return Outcome("overlap", "precondition", f"needs more than {SETTLING} steps")
    total = inside = hidden = 0
    gathers: list[int] = []
    depths: dict[str, int] = {}
    for index, record in enumerate(evidence.records):
        for step in settled:
            calls = [
                call
                for call in step_calls(evidence, step, index)
                if call.operation in REDUCTIONS and call.phase == "backward"
            ]
            own = [n for n, kind, _ in record.events_of(step) if kind == "backward"]
            if not own:
                continue  # a rank without micro-batches computes nothing to hide behind
            late = [call for call in calls if not call.inside_backward]
            early = [call for call in calls if call.issued < own[-1]]
            exposed = [call for call in early if not _computed_while_under_way(call, own)]
            total += len(calls)
            inside += len(calls) - len(late)
            hidden += len(early) - len(exposed)
            rank = record.rank
            # A bucket with a parameter that this rank did not use can only leave after backward.
            allowed = 1 if evidence.workload.unused_possible else 0
            waits = False
            if ahead is not None:
                rounds = _forwards(record, step)
                idle = cost_model.facts.rounds - rounds if cost_model is not None else 0
                allowed = ahead.after_backward(rounds, idle)
                waits = idle > 0
                early_gathers = _gathers_ahead(evidence, index, step)
                gathers.append(early_gathers)
                if early_gathers < ahead.gathers * rounds:
                    return _fail(
                        f"rank {rank}, step {step}: {early_gathers} gathers are issued while "
                        f"another unit computes, {ahead.gathers * rounds} promised",
                        total,
                        inside,
                        hidden,
                    )
                for phase, (least, most) in ahead.depth.items():
                    deepest = _depth(evidence, index, step, phase)
                    depths[phase] = max(depths.get(phase, 0), deepest)
                    if not least <= deepest <= most:
                        wanted = str(least) if least == most else f"{least} to {most}"
                        return _fail(
                            f"rank {rank}, step {step}: when a unit's {phase} begins at most "
                            f"{deepest} gathers are under way, {wanted} promised",
                            total,
                            inside,
                            hidden,
                        )
            if len(late) > allowed:
                return _fail(
                    f"rank {rank}, step {step}: {len(late)} of {len(calls)} reductions are issued "
                    f"after backward has ended ({allowed} allowed)",
                    total,
                    inside,
                    hidden,
                )
            if exposed and (ahead is None or ahead.watched):
                return _fail(
                    f"rank {rank}, step {step}: {len(exposed)} of {len(early)} reductions issued "
                    "in time are waited for before any further unit computes",
                    total,
                    inside,
                    hidden,
                )
            # Gradients that wait for a round in which only others compute leave late.
            if len(calls) > 2 and not early and not waits:
                return _fail(
                    f"rank {rank}, step {step}: none of {len(calls)} reductions is issued before "
                    "the last unit's backward",
                    total,
                    inside,
                    hidden,
                )
    if not total:
        return Outcome("overlap", "fail", "no gradient reduction was logged in backward")
    figures = _figures(total, inside, hidden)
    if gathers:
        figures["gathers_ahead"] = min(gathers)
    if depths:
        figures["depth"] = depths
    return Outcome("overlap", "pass", "", None, figures)


def _forwards(record: RankRecord, step: int) -> int:
    """Forward passes of the whole model in ``step``."""
    return sum((kind, unit) == ("forward", "") for _, kind, unit in record.events_of(step))


def _gathers_ahead(evidence: Figures, index: int, step: int) -> int:
    """Gathers that are under way while some unit begins to compute."""
    events = evidence.records[index].events_of(step)
    units = [n for n, kind, _ in events if kind in ("forward", "backward", "recompute")]
    return sum(
        call.operation == "all_gather"
        and call.phase in ("forward", "backward")
        and _computed_while_under_way(call, units)
        for call in step_calls(evidence, step, index)
    )


def _depth(evidence: Figures, index: int, step: int, phase: str) -> int:
    """The most gathers of ``phase`` that are under way at once when a unit begins it."""
    units = [n for n, kind, _ in evidence.records[index].events_of(step) if kind == phase]
    calls = [
        call
        for call in step_calls(evidence, step, index)
        if call.operation == "all_gather" and call.phase == phase
    ]
    return max(sum(_computed_while_under_way(call, [n]) for call in calls) for n in units)


def _computed_while_under_way(call: Call, units: list[int]) -> bool:
    waited = call.waited
    return any(call.issued < n and (waited is None or n < waited) for n in units)


def _fail(message: str, total: int, inside: int, hidden: int) -> Outcome:
    return Outcome("overlap", "fail", message, None, _figures(total, inside, hidden))


def _figures(total: int, inside: int, hidden: int) -> dict[str, object]:
    return {"reductions": total, "issued_inside_backward": inside, "hidden": hidden}
