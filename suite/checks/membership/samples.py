"""Whether members take the samples that a step is for, together and once each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from shardproof.backends.errors import name_ranks
from shardproof.evidence.assembled import Figures


def problem(figures: Figures, step: int) -> str:
    """A sentence on the samples of ``step`` (empty: they are right)."""
    now = figures.members[step]
    #     | trained on before | due in this step | not yet |      the row of epochs
    due = range(now.first, now.first + now.size)
    steps = {rank: record.steps[step] for rank, record in figures.ranks.items()}
    taken = {rank: its.samples for rank, its in steps.items() if its.present}
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
