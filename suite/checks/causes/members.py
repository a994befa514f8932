"""What members that change have to do with wrong numbers: who joined, who died, who is left."""

from __future__ import annotations

from collections.abc import Collection

from shardproof.backends.errors import name_ranks
from shardproof.evidence.assembled import Evidence

#: Relative error of a member's own loss that counts.
_APART = 1e-9


def of_members(evidence: Evidence, step: int, wrong: Collection[int]) -> str:
    """A sentence where ``step`` is the first of other members; ``wrong``: ranks that differ.

    Empty ranks: those are asked whose own loss is another.
    """
    if not evidence.case.changes_members:
        return ""
    now, before = evidence.members[step], evidence.members[step - 1] if step else None
    wrong = {*wrong} or _other_losses(evidence, step)
    joined = now.joined(before)
    if wrong and wrong <= set(joined):
        which = f"{name_ranks(sorted(wrong))}, which joined before step {step}"
        return f"only {which}, differs: it lacks something that the others have"
    dead = [rank for rank in now.begin if rank not in now.members]
    if dead:
        return f"step {step} was taken again without {name_ranks(dead)}, which died in it"
    if before is not None and now.members != before.members:
        there, were = name_ranks(now.members), name_ranks(before.members)
        return f"step {step} is the first of {there}, after {were}"
    return ""


def _other_losses(evidence: Evidence, step: int) -> set[int]:
    """Members whose share of the loss is not the oracle's."""
    truth = evidence.truth.steps[step].losses
    found = set()
    for record in evidence.records:
        loss, share = record.steps[step].loss, record.steps[step].share
        if loss is None or share is None or share >= len(truth):
            continue
        if abs(loss - truth[share]) > _APART * abs(truth[share]):
            found.add(record.rank)
    return found
