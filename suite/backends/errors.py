"""How communication fails: four causes, each told in one sentence that names ranks and calls.

All derive from :class:`CommError`, so that a launcher can tell them from a rank's own error: when
rank 2 raises ``ValueError``, the others raise :class:`RankFailed`, and the cause is the
``ValueError``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


def spans(ranks: Sequence[int]) -> str:
    """``0-3,7`` for ascending ranks 0, 1, 2, 3 and 7: a message of many ranks stays short."""
    starts = [i for i, rank in enumerate(ranks) if i == 0 or rank != ranks[i - 1] + 1]
    ends = [*(i - 1 for i in starts[1:]), len(ranks) - 1]
    parts = [(ranks[i], ranks[j]) for i, j in zip(starts, ends, strict=True)]
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in parts)


def name_ranks(ranks: Sequence[int]) -> str:
    """``rank 3`` or ``ranks 0-3,7``."""
    return f"rank{'s' * (len(ranks) > 1)} {spans(ranks)}"


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
        """What those who wait in ``call`` raise."""
        text = f"rank {rank} did not call {call}: {self.why}"
        return RankEnded(text, rank) if self.ended else CollectiveMismatch(text)
