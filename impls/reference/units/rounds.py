"""Collectives of ranks with different numbers of micro-batches.

Where a forward or backward makes collective calls, a rank that has run out of micro-batches must
make them too, or the others wait for ever.  But it computes nothing, so it cannot know which calls
come.  At the start of a step the ranks therefore agree on the number of *rounds* (that of the
busiest rank) and on how many of these find all ranks at work.  In the others a small integer goes
ahead of every call: ranks that compute announce it, idle ranks hear it and follow.

    round                0          1          2
    rank 0               computes   computes   computes      announces: gather 3, ..., END
    rank 1               computes   computes   follows       hears:     gather 3, ..., END

Cost: two integers a step, and in rounds with an idle rank one a call.
"""

from __future__ import annotations

from collections.abc import Sequence

from shardproof.comm import Comm

#: The announcement that ends a round.
END = 0
_NOTHING = -1


class Rounds:
    """The rounds of one step, over the ranks of all ``comms`` together (one per mesh axis)."""

    def __init__(self, comms: Sequence[Comm]) -> None:
        self.comms = [comm for comm in comms if comm.size > 1]
        self.total = self.busy = 0
        self.number = -1

    def largest(self, values: Sequence[int]) -> list[int]:
        """The element-wise maximum of ``values`` over the ranks."""
        largest = list(values)
        for comm in self.comms:
            largest = comm.agree(largest, "max")
        return largest

    def begin(self, own: int) -> None:
        """Begin a step in which this rank computes in its first ``own`` rounds."""
        # The smallest number is minus the largest of the negated ones: one message for both.
        self.total, least = self.largest([own, -own])
        self.busy = -least
        self.number = -1

    def next(self) -> bool:
        """Advance to the next round; False if there is none."""
        self.number += 1
        return self.number < self.total

    @property
    def is_last(self) -> bool:
        """Whether the current round is the last of the step."""
        return self.number == self.total - 1

    @property
    def all_compute(self) -> bool:
        """Whether no rank is idle in the current round."""
        return self.number < self.busy

    def announce(self, call: int) -> None:
        """Announce the next call if some rank is idle in this round."""
        # Where all ranks compute they know what comes: nothing needs to be sent.
        if not self.all_compute:
            self.largest([call])

    def hear(self) -> int:
        """The announcements of the working ranks."""
        return self.largest([_NOTHING])[0]
