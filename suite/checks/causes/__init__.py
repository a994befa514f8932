"""Sentences that lead home: what must have been done for just these wrong numbers to come out.

Asked where a comparison has failed, of the tensors of that moment.  Each function tries what is
often done wrong, on the oracle's own numbers, and tells the first that gives what the system holds.
A sentence stands before the numbers of the check; it decides nothing, and it is empty where
nothing fits.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

from shardproof.backends.errors import name_ranks
from shardproof.errors import is_exhausted
from shardproof.evidence.assembled import Evidence

#: Relative error of a member's own loss that counts.
_APART = 1e-9


def told(cause: Callable[[], str]) -> str:
    """The sentence of ``cause``; an exception in it does not replace a failure.

    But where the machine has no memory or descriptors left, the case is run once more.
    """
    try:
        return cause()
    except Exception as error:
        if is_exhausted(error):
            raise
        return f"no cause could be determined ({error!r})"


def before(cause: Callable[[], str], failure: object) -> str:
    """``failure`` in words, and in front of it what ``cause`` says, if it says anything."""
    return ": ".join(filter(None, (told(cause), str(failure))))


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
        return f"only {which}, differs: it misses state that the others have"
    if dead := [rank for rank in now.begin if rank not in now.members]:
        return f"step {step} was repeated without {name_ranks(dead)}, which died in it"
    if before is not None and now.members != before.members:
        there, were = name_ranks(now.members), name_ranks(before.members)
        return f"step {step} is the first with {there}, after {were}"
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
