"""Members change: all members commit a step or none, and every sample is trained on once.

A step in which a member dies is committed by all or by none: whoever waits for the dead is stopped,
so the others must not have committed it, and all take it again without the dead.  In every step the
members' samples are, together and once each, the next ones of the row of epochs, whoever joined,
left or died: a member that does not know how far training is takes samples that were trained on
before.  Samples of a step that nobody committed count once, when it is taken again.

*Cannot see* whether numbers are right (``equivalence``, which is told the same members), nor, of a
system that does not tell its progress, whether it would have gone on at the right sample.
"""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

from shardproof.backends.errors import name_ranks
from shardproof.checks import Needs, Outcome
from shardproof.evidence.assembled import Figures

NEEDS: Needs = ("every rank",)


def decide(figures: Figures) -> Outcome:
    """Every step of every member, as the ranks reported it."""
    case = figures.case
    if not case.changes_members:
        return Outcome("membership", "skip", "the members are the same in every step")
    if lacking := _lived(figures):
        return Outcome("membership", "precondition", lacking)
    for step in figures.steps:
        if problem := _commits(figures, step) or _samples(figures, step):
            return Outcome("membership", "fail", f"step {step}: {problem}")
    last = figures.members[-1]
    numbers = {
        "changes": sum(a.members != b.begin for a, b in pairwise(figures.members)),
        "deaths": len(case.deaths),
        "samples": last.first + last.size,
    }
    return Outcome("membership", "pass", figures=numbers)


def _lived(figures: Figures) -> str:
    """Why a death did not take place (empty: all did)."""
    for death in figures.case.deaths:
        if figures.ranks[death.rank].steps[death.step].attempt == "lived":
            what = f"was to die before its call {death.call} of step {death.step}"
            why = "the rank ended that step with fewer calls: name an earlier call"
            return f"rank {death.rank} {what}, but {why}"
    return ""


def _commits(figures: Figures, step: int) -> str:
    # How the attempt at a step that was to end nowhere ended, on each rank.
    ends = {record.rank: record.steps[step].attempt for record in figures.records}
    dead, committed, stopped = (
        [rank for rank, end in ends.items() if end == how]
        for how in ("died", "committed", "stopped")
    )
    if not committed:
        return ""
    what = f"{name_ranks(dead)} died in it, yet {name_ranks(committed)} committed it"
    return f"{what}, {name_ranks(stopped)} did not" if stopped else what


def _samples(figures: Figures, step: int) -> str:
    """Whether members take the samples that ``step`` is for, together and once each."""
    now = figures.members[step]
    #     | trained on before | due in this step | not yet |      the row of epochs
    due = range(now.first, now.first + now.size)
    steps = {rank: record.steps[step] for rank, record in figures.ranks.items()}
    taken = {rank: its.samples for rank, its in steps.items() if its.present}
    counts = Counter(sample for own in taken.values() for sample in own)
    for rank, own in taken.items():
        if before := [sample for sample in own if sample < due.start]:
            at = max(step for step in figures.steps if figures.members[step].first <= before[0])
            return f"rank {rank} trains again on sample {before[0]} of step {at}"
        if any(sample >= due.stop for sample in own):
            what = f"rank {rank} trains on sample {max(own)}, expected one of"
            return f"{what} the next {len(due)} from {due.start} on"
    # All samples are of this step: some may be shared out twice, or not at all.
    if twice := [sample for sample in due if counts[sample] > 1]:
        both = [rank for rank, own in taken.items() if twice[0] in own]
        return f"{name_ranks(both)} train on sample {twice[0]}, each of them"
    if left := [sample for sample in due if not counts[sample]]:
        return f"no rank trains on sample {left[0]} ({len(left)} of {len(due)} are left out)"
    return ""
