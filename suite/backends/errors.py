"""How communication fails: four causes, each a sentence that names ranks and calls.

All derive from :class:`CommError`, so that a launcher can tell them from a rank's own error: when
rank 2 raises ``ValueError``, the others raise :class:`RankFailed`, and the cause is the
``ValueError``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from shardproof.table import grouped


def spans(ranks: Sequence[int]) -> str:
    """``0-3,7`` for ascending ranks 0, 1, 2, 3 and 7: a message of many ranks stays short."""
    if not ranks:
        return "of nobody"
    starts = [i for i, rank in enumerate(ranks) if i == 0 or rank != ranks[i - 1] + 1]
    ends = [*(i - 1 for i in starts[1:]), len(ranks) - 1]
    parts = [(ranks[i], ranks[j]) for i, j in zip(starts, ends, strict=True)]
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in parts)


#: Spans of ranks, and calls of several ranks, that a message spells out.  Of 128 ranks in as many
#: calls it would have 30 KB, on every rank.
_MOST_SPANS, MOST_CALLS = 8, 4


def few_spans(ranks: Sequence[int]) -> str:
    """:func:`spans`; of many the first ones, and how many ranks follow."""
    parts = spans(ranks).split(",")
    shown = ",".join(parts[:_MOST_SPANS])
    left = len(ranks) - len(members_of(shown)) if len(parts) > _MOST_SPANS else 0
    return f"{shown} and {left} more" if left else shown


def name_ranks(ranks: Sequence[int]) -> str:
    """``rank 3`` or ``ranks 0-3,7``."""
    return f"rank{'s' * (len(ranks) > 1)} {few_spans(ranks)}"


def all_do(verb: str, ranks: Sequence[int]) -> str:
    """``rank 3 waits`` or ``ranks 0-3,7 wait``, for the verb ``wait``."""
    return f"{name_ranks(ranks)} {verb}{'' if len(ranks) > 1 else 's'}"


def who_does(verb: str, what: Mapping[int, str]) -> list[str]:
    """``ranks 0-3 wait in A``, ``rank 4 waits in B``: ranks that do the same are named together.

    Of many different calls the last line counts those that are left out.
    """
    alike = [*grouped((text, rank) for rank, text in sorted(what.items())).items()]
    shown = alike if len(alike) <= MOST_CALLS + 1 else alike[:MOST_CALLS]
    lines = [f"{all_do(verb, ranks)} {text}" for text, ranks in shown]
    if rest := sorted(rank for _, ranks in alike[len(shown) :] for rank in ranks):
        lines.append(f"{all_do(verb, rest)} in {len(alike) - len(shown)} other calls")
    return lines


def members_of(group: str) -> list[int]:
    """The ranks that ``ranks 0-2,5``, ``rank 3`` or ``0-2,5`` names; what is in brackets behind
    it is left out.
    """
    members: list[int] = []
    listed = group.partition(" (")[0].removeprefix("ranks ").removeprefix("rank ")
    for part in listed.split(","):
        first, _, last = part.partition("-")
        if first.isdigit():
            members += range(int(first), int(last or first) + 1)
    return members


def differing_calls(number: int, group: Sequence[int], calls: Mapping[int, str]) -> str:
    """That ``calls``, by global rank, do not match, and who has not come to that call yet."""
    lines = who_does("call", calls)
    if missing := [rank for rank in group if rank not in calls]:
        have = "have" if len(missing) > 1 else "has"
        lines.append(f"{name_ranks(missing)} {have} not made the call yet")
    return f"call {number} of group {few_spans(group)} does not match: {'; '.join(lines)}"


class CommError(RuntimeError):
    """Communication could not be completed."""

    def again(self) -> CommError:
        """A fresh copy to raise in another thread (a raised error carries its own traceback)."""
        copy = type(self)(*self.args)
        copy.__dict__.update(self.__dict__)
        return copy


class CollectiveMismatch(CommError):
    """Ranks made different calls where one common call is needed."""


class Deadlock(CommError):
    """Every rank that still runs waits for something that cannot happen any more."""


class RankFailed(CommError):
    """A peer raised; ``rank`` is the global rank that did."""

    def __init__(self, message: str, rank: int = -1) -> None:
        super().__init__(message)
        self.rank = rank


class RankEnded(RankFailed):
    """A peer returned without joining a call that needs it."""


class PeerTimeout(CommError):
    """A peer did not answer in time, though not everybody was waiting."""


@dataclass(frozen=True)
class Absence:
    """Why a rank will never come to where others wait outside of process groups."""

    why: str
    ended: bool = False

    def error(self, rank: int, call: str) -> CommError:
        """The error that the ranks waiting in ``call`` raise."""
        text = f"rank {rank} did not call {call}: {self.why}"
        return RankEnded(text, rank) if self.ended else CollectiveMismatch(text)
