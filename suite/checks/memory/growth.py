"""Memory that grows from step to step: something of each step is kept, and never let go.

Compared is what lies in no class of state when a step has been updated, tensors and, of systems
that are not the suite's, small Python objects.  What is made once (a cache, a bucket cut anew after
the first step, what an evaluation leaves) grows once.  So a leak is what grows in every step after
another, by much the same amount.

*Cannot see* a leak in fewer than three steps, one that comes in some steps only, and objects of
more than 512 bytes each that are no tensors.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from shardproof.evidence.assembled import Figures
from shardproof.evidence.records import RankRecord

#: The moment of a row that counts Python's small objects in use.
OBJECTS = "objects"
#: Classes of tensors that are no state.  State grows where a branch of the model is used late.
_UNCLAIMED = ("communication", "activations", "temporary")
#: Least growth of a step: numbers that a system may keep of each step; and objects, beside what the
#: suite's own records take (80 a tensor, rank and step of two micro-batches [measured]).
_BYTES, _OBJECTS, _RECORDED = 1024, 20_000, 150
#: Growths of a leak differ by at most this factor: a first step may have other buckets.
_ALIKE = 2


def problem(evidence: Figures, record: RankRecord) -> str:
    """The memory that grows on the rank of ``record``, and by how much; empty: none."""
    held, beside = (dict.fromkeys(evidence.steps, 0) for _ in range(2))
    counted = {}
    for row in record.memory:
        if (row.moment, row.where) == ("mark", "after_update") and row.step in held:
            held[row.step] += row.bytes * (row.kind in _UNCLAIMED)
            beside[row.step] += row.bytes * (row.kind == "gradients")
        elif row.moment == OBJECTS:
            counted[row.step] = row.bytes
    owner = f"rank {record.rank}"
    # A part of a bucket whose parameter has no gradient any more is unclaimed, and nothing grows.
    shrunk = beside[evidence.steps[0]] - beside[evidence.steps[-1]]
    least = _least_growth([*held.values()], _BYTES)
    if least and held[evidence.steps[-1]] - held[evidence.steps[0]] - shrunk >= least:
        what = f"memory grows in every step, by {least:,} bytes and more"
        return f"{owner}: {what}: tensors of each step are kept and never freed"
    tensors = len(evidence.workload.parameter_names) * evidence.case.world
    rounds = 1 + max((sum(record.steps[step].windows) for step in evidence.steps), default=1)
    most = _OBJECTS + _RECORDED * tensors * rounds
    if least := _least_growth([counted[step] for step in sorted(counted)], most):
        what = f"Python's small objects grow in every step, by {least:,} and more"
        return f"{owner}: {what}: objects of each step are kept and never freed"
    return ""


def _least_growth(levels: Sequence[int], least: int) -> int:
    """By how much every level exceeds the one before, where they all do alike; 0: they do not."""
    grown = [after - before for before, after in pairwise(levels)]
    grown = grown[1:] if len(grown) > 2 else grown
    if len(grown) < 2 or min(grown) < least or max(grown) > _ALIKE * min(grown):
        return 0
    return min(grown)
