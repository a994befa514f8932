"""Members come and go: a step is everybody's or nobody's, and every sample is trained on once.

A step in which a member dies is committed by all or by none: whoever waits for the dead is stopped,
so the others must not have committed it, and all take it again without the dead.  In every step the
members' samples are, together and once each, the next ones of the row of epochs, whoever joined,
left or died: a member that does not know how far training is takes samples that were trained on
before.  Samples of a step that nobody committed count once, when it is taken again.

*Cannot see* whether numbers are right (``equivalence``, which is told the same members), nor, of a
system that does not tell its progress, whether it would have gone on at the right sample.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from shardproof import members
from shardproof.backends.errors import name_ranks
from shardproof.checks import Outcome
from shardproof.evidence.assembled import Figures


def decide(figures: Figures) -> Outcome:
    """Every step of every member, from what the ranks told."""
    case = figures.case
    if not members.changes(case):
        return Outcome("membership", "skip", "the members are the same in every step")
    if lacking := _lived(figures):
        return Outcome("membership", "precondition", lacking)
    for step in figures.steps:
        for problem in (_commits(figures, step), _samples(figures, step)):
            if problem:
                return Outcome("membership", "fail", f"step {step}: {problem}")
    last = figures.members[-1]
    numbers = {
        "changes": sum(a.members != b.begin for a, b in _pairs(figures)),
        "deaths": len(case.deaths),
        "samples": last.first + last.size,
    }
    return Outcome("membership", "pass", figures=numbers)


def _pairs(figures: Figures) -> list[tuple[members.StepMembers, members.StepMembers]]:
    return list(zip(figures.members, figures.members[1:], strict=False))


def _attempts(figures: Figures, step: int) -> dict[str, list[int]]:
    """How the attempt at a step that was to end nowhere ended -> the ranks where it did."""
    ends: dict[str, list[int]] = {}
    for record in figures.records:
        ends.setdefault(record.steps[step].attempt, []).append(record.rank)
    return ends


def _lived(figures: Figures) -> str:
    """Why a death did not take place (empty: all did)."""
    for death in figures.case.deaths:
        if death.rank in _attempts(figures, death.step).get("lived", ()):
            return (
                f"rank {death.rank} was to die before its call {death.call} of step {death.step}, "
                "which it ended with fewer calls: name an earlier one"
            )
    return ""


def _commits(figures: Figures, step: int) -> str:
    ends = _attempts(figures, step)
    dead, committed, stopped = (ends.get(how, []) for how in ("died", "committed", "stopped"))
    if not committed:
        return ""
    others = f", {name_ranks(stopped)} did not" if stopped else ""
    return f"{name_ranks(dead)} died in it, and {name_ranks(committed)} committed it all the same{others}"


def _samples(figures: Figures, step: int) -> str:
    now = figures.members[step]
    due = range(now.first, now.first + now.size)
    taken = {r.rank: r.steps[step].samples for r in figures.records if r.steps[step].present}
    if sorted(sample for own in taken.values() for sample in own) == [*due]:
        return ""
    for rank, own in taken.items():
        before = [sample for sample in own if sample < due.start]
        if before:
            at = _step_of(figures, before[0])
            return f"rank {rank} trains on sample {before[0]} again, which step {at} was for"
        if any(sample >= due.stop for sample in own):
            what = f"rank {rank} trains on sample {max(own)}, which lies behind"
            return f"{what} the next {_row(due)}"
    return _unshared(due, taken)


def _unshared(due: range, taken: Mapping[int, Sequence[int]]) -> str:
    """Where all samples are of this step: some are shared out twice, or not at all."""
    counts = dict.fromkeys(due, 0)
    for own in taken.values():
        for sample in own:
            counts[sample] += 1
    twice = [sample for sample, count in counts.items() if count > 1]
    if twice:
        both = [rank for rank, own in taken.items() if twice[0] in own]
        return f"{name_ranks(both)} train on sample {twice[0]}, each of them"
    left = [sample for sample, count in counts.items() if not count]
    return f"nobody trains on sample {left[0]} ({len(left)} of {len(counts)} are left out)"


def _step_of(figures: Figures, sample: int) -> int:
    return max(step for step in figures.steps if figures.members[step].first <= sample)


def _row(samples: range) -> str:
    return f"{len(samples)}, from {samples.start} on"
