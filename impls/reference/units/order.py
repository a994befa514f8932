"""The order in which units are called, which determines prefetching.

Nobody can look into a forward that has not run.  So forward is expected to go as it went in the
round before, which is why the first one gathers nothing ahead; and backward goes through the units
of its own forward in reverse.
"""

from __future__ import annotations

from shardproof.impls.reference.units.shard import ShardedUnit


class CallOrder:
    """Forwards and backwards of the units in the current round, and forwards of the previous one.

    ``backward`` lists units whose backward is still to come, the next one last.
    """

    def __init__(self) -> None:
        self.forward: list[ShardedUnit] = []
        self.last_forward: list[ShardedUnit] = []
        self.backward: list[ShardedUnit] = []

    def start_round(self) -> None:
        """Start a new forward."""
        self.last_forward, self.forward, self.backward = self.forward, [], []

    def forward_begins(self, unit: ShardedUnit, ahead: int) -> list[ShardedUnit]:
        """Record it; return the units, at most ``ahead``, that followed in the previous round."""
        self.forward.append(unit)
        count = len(self.forward)
        # A guess that has been wrong once may gather what nobody frees: stop guessing.
        if self.forward != self.last_forward[:count]:
            return []
        return self.last_forward[count : count + ahead]

    def forward_ends(self, unit: ShardedUnit) -> None:
        """Record it: its backward comes before those of all units that ended earlier."""
        if unit in self.backward:
            self.backward.remove(unit)  # called again: the last call is the first in backward
        self.backward.append(unit)

    def backward_begins(self, unit: ShardedUnit, ahead: int) -> list[ShardedUnit]:
        """Record it; return the units, at most ``ahead``, whose backwards come next."""
        if unit in self.backward:
            del self.backward[self.backward.index(unit) :]
        return self.backward[: -1 - ahead : -1]
