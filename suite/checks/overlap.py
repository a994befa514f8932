"""Gradient reductions overlap with backward, in program order.

While a bucket of gradients is reduced, backward should go on.  So a reduction must *start* while
units are left whose backward has not begun, and be *waited for* only after one of them has begun.
No clock is read: the log of each rank numbers its calls, its waits and the begin of each unit's
backward, and the check compares these numbers.  It sees what right numbers and bytes hide: one
unused parameter early in the order can keep all buckets from being reduced inside backward.

*Cannot see* whether the hardware overlaps anything, nor steps before the order is settled: steps 0
and 1 are left out.  So is, where gathers are promised ahead, the first step with micro-batches of a
rank that has none in those: which unit follows is known from its own forward before.  Nor, where
a collective is made of messages, whether its receives are posted with its sends or later: rounds of
several collectives are alike in the log.

Of strategies that shard parameters gathers are counted as well: how many are issued ahead, while
another unit computes (prefetch), and how deep: how many are under way when a unit begins, against
what the strategy promises.  Where it promises that, too, they are needed in the order of their
issue: a unit gathered ahead of another that is used earlier holds that one up.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace

from shardproof.checks import Needs, Outcome
from shardproof.checks.traffic import is_compressed, step_calls
from shardproof.costs import compression
from shardproof.costs.model import Prefetch
from shardproof.evidence.assembled import Figures
from shardproof.evidence.records import RankRecord
from shardproof.files import SparselyStored
from shardproof.ledgers.traffic import LoggedCall

NEEDS: Needs = ("calls",)

#: Steps in which an implementation may still be learning the order of its gradients.
SETTLING = 2
REDUCTIONS = ("all_reduce", "reduce_scatter")


def decide(evidence: Figures) -> Outcome:
    """Count the reductions issued in time, for every rank and settled step."""
    if (outcome := _not_judged(evidence)) is not None:
        return outcome
    cost_model = evidence.cost_model()
    ahead = cost_model.prefetch() if cost_model is not None else None
    settled = [step for step in evidence.steps if step >= SETTLING]
    counts = OverlapFigures()
    gathers: list[int] = []
    depths: dict[str, int] = {}
    unlearned = False
    for record in evidence.records:
        for step in settled:
            begun = [event[1:] for event in record.events_of(step)]
            units = _begins(record, step, ("backward",))
            several = len({unit for kind, unit in begun if kind == "backward" and unit}) > 1
            if not units:
                continue  # a rank without micro-batches computes nothing to hide behind
            before = (s for s in evidence.steps if s < step)
            if ahead is not None and not any(_begins(record, s, ("backward",)) for s in before):
                unlearned = True  # its own order is not known yet
                continue
            #     issued . . . . unit begins . . . . waited for      hidden
            #     issued . waited for . unit begins                  exposed
            #     last unit begins . . . . issued                    nothing is left to hide it
            made = _Reductions(step_calls(record, step), units)
            counts.reductions += len(made.calls)
            counts.issued_inside_backward += len(made.calls) - len(made.late)
            counts.hidden += len(made.early) - len(made.exposed)
            # A bucket with a parameter that this rank did not use can only leave after backward.
            allowed, waits, problem = int(evidence.workload.unused_possible), False, ""
            if ahead is not None and cost_model is not None:
                rounds = begun.count(("forward", ""))  # passes of the whole model
                idle = cost_model.facts.rounds - rounds
                allowed, waits = ahead.after_backward(rounds, idle), idle > 0
                # Those that are under way while some unit begins to compute.
                computes = _begins(record, step, ("forward", "backward", "recompute"))
                issued = _gathers(record, step, ("forward", "backward"))
                gathers.append(sum(_computed_while_under_way(call, computes) for call in issued))
                deepest = {phase: _depth(record, step, phase) for phase in ahead.depth}
                depths = {phase: max(most, depths.get(phase, 0)) for phase, most in deepest.items()}
                problem = _wrong_gathers(ahead, rounds, gathers[-1], deepest)
                problem = problem or (_out_of_order(issued) if ahead.in_order else "")
            # How many may leave late, and what hides them, only a layout tells.
            most = allowed if evidence.depth == "layout" else None
            watched = ahead is None or ahead.watched
            problem = problem or _wrong_reductions(made, most, watched, waits or not several)
            if problem:
                message = f"rank {record.rank}, step {step}: {problem}"
                return Outcome("overlap", "fail", message, None, counts.to_dict())
    if not counts.reductions and unlearned:
        message = "in every step but the first, some rank computes for the first time"
        return Outcome("overlap", "precondition", message)
    if not counts.reductions:
        return Outcome("overlap", "fail", "no gradient reduction was logged in backward")
    figures = replace(counts, gathers_ahead=min(gathers, default=None), depth=depths or None)
    return Outcome("overlap", "pass", "", None, figures.to_dict())


@dataclass
class OverlapFigures(SparselyStored):
    """Reductions of the settled steps; the fewest gathers issued ahead, and the most at once."""

    reductions: int = 0
    issued_inside_backward: int = 0
    hidden: int = 0
    gathers_ahead: int | None = None
    depth: Mapping[str, int] | None = None


def _not_judged(evidence: Figures) -> Outcome | None:
    """The outcome where there is nothing to count; ``None``: there is."""
    if evidence.case.world == 1:
        return Outcome("overlap", "skip", "a world of one rank has nothing to overlap")
    if "overlap" not in evidence.declaration.features:
        return Outcome("overlap", "skip", "not part of what this strategy claims")
    cost_model = evidence.cost_model()
    if cost_model is not None and (reason := cost_model.why_overlap_is_not_judged()):
        return Outcome("overlap", "skip", reason)
    if cost_model is None and is_compressed(evidence):
        return Outcome("overlap", "skip", compression.BY_OTHER_CALLS)
    if all(step < SETTLING for step in evidence.steps):
        return Outcome("overlap", "precondition", f"needs more than {SETTLING} steps")
    return None


class _Reductions:
    """Gradient reductions in one backward of a rank, by when they start and are waited for.

    ``late``: after backward has ended; ``early``: before the last unit begins its backward;
    ``exposed``: early ones that are waited for before another unit begins.
    """

    def __init__(self, calls: list[LoggedCall], units: list[int]) -> None:
        """``calls`` of a step; ``units``: where units begin their backward."""
        inside = [call for call in calls if call.phase == "backward"]
        self.calls = [call for call in inside if call.operation in REDUCTIONS]
        self.late = [call for call in self.calls if not call.inside_backward]
        self.early = [call for call in self.calls if call.issued < units[-1]]
        self.exposed = [c for c in self.early if not _computed_while_under_way(c, units)]


def _wrong_reductions(made: _Reductions, most: int | None, watched: bool, unhidden: bool) -> str:
    """The problem of the reductions of one rank and step (``""``: nothing).

    ``most``: how many may start late (``None``: not promised).  ``watched``: the log has the begin
    of every unit.  ``unhidden``: it may be that none starts early.
    """
    calls, late, early, exposed = made.calls, made.late, made.early, made.exposed
    if most is not None and len(late) > most:
        when = f"after backward has ended, when nothing else computes ({most} allowed)"
        return f"{len(late)} of {len(calls)} gradient reductions start {when}"
    if most is not None and exposed and watched:
        count = f"{len(exposed)} of {len(early)} gradient reductions that start early enough"
        why = "no unit begins its backward while they are under way"
        return f"{count} are waited for at once: {why}"
    # Gradients that wait for a round in which only others compute leave late, and a single
    # unit has no other behind it.
    if len(calls) > 2 and not early and not unhidden:
        when = "before the last unit begins its backward"
        why = "no reduction is in progress while the other units compute"
        return f"none of {len(calls)} gradient reductions starts {when}: {why}"
    return ""


def _wrong_gathers(ahead: Prefetch, rounds: int, early: int, deepest: Mapping[str, int]) -> str:
    """The problem of the gathers of one rank and step (``""``: nothing)."""
    if early < (most := ahead.gathers * rounds):
        return f"{early} gathers are issued while another unit computes, {most} promised"
    for phase, (least, most) in ahead.depth.items():
        if not least <= deepest[phase] <= most:
            wanted = str(least) if least == most else f"{least} to {most}"
            found = f"at most {deepest[phase]} gathers are under way"
            return f"when a unit's {phase} begins {found}, {wanted} promised"
    return ""


def _out_of_order(gathers: list[LoggedCall]) -> str:
    """The first gather that is waited for before one that was issued earlier; empty: none is."""
    #     issued       a  c  b      a group carries its calls out in this order
    #     waited for   a  b  c      b comes only when c, which nobody needs yet, is over
    last: dict[tuple[int, ...], LoggedCall] = {}
    for call in (one for one in gathers if one.payload_bytes and one.waited is not None):
        before = last.setdefault(call.group, call)
        if (call.waited or 0) < (before.waited or 0):
            what = f"a gather of {before.payload_bytes:,} bytes is issued before one of"
            why = "units are gathered ahead in another order than they are used"
            return f"{what} {call.payload_bytes:,}, and needed after it: {why}"
        last[call.group] = call
    return ""


def _depth(record: RankRecord, step: int, phase: str) -> int:
    """The most gathers of ``phase`` that are under way at once when a unit begins it."""
    units = _begins(record, step, (phase,))
    gathers = _gathers(record, step, (phase,))
    return max(sum(_computed_while_under_way(call, [n]) for call in gathers) for n in units)


def _begins(record: RankRecord, step: int, kinds: Collection[str]) -> list[int]:
    """Where in the log a unit begins to compute."""
    return [n for n, kind, _ in record.events_of(step) if kind in kinds]


def _gathers(record: RankRecord, step: int, phases: Collection[str]) -> list[LoggedCall]:
    calls = step_calls(record, step)
    return [call for call in calls if call.operation == "all_gather" and call.phase in phases]


def _computed_while_under_way(call: LoggedCall, units: list[int]) -> bool:
    waited = call.waited
    return any(call.issued < n and (waited is None or n < waited) for n in units)
