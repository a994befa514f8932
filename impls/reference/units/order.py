"""The order in which units are called, from which a strategy knows what to gather ahead.

Nobody can look into a forward that has not run.  So forward is expected to go as it went in the
round before, which is why the first one gathers nothing ahead; and backward goes through the units
of its own forward in reverse.
"""

from __future__ import annotations

from shardproof.impls.reference.units.shard import ShardedUnit


class CallOrder:
    """Forwards and backwards of the units in the round under way, and forwards of the one before.

    ``backward`` lists units whose backward is still to come, the next one last.
    """

    def __init__(self) -> None:
        self.forward: list[ShardedUnit] = []
        self.last_forward: list[ShardedUnit] = []
        self.backward: list[ShardedUnit] = []

    def start_round(self) -> None:
        """A new forward begins."""
        self.last_forward, self.forward, self.backward = self.forward, [], []

    def forward_begins(self, unit: ShardedUnit, ahead: int) -> list[ShardedUnit]:
        """Note it; the units, ``ahead`` at most, that came next in the round before."""
        self.forward.append(unit)
        count = len(self.forward)
        # A guess that has been wrong once may gather what nobody frees: stop guessing.
        if self.forward != self.last_forward[:count]:
            return []
        return self.last_forward[count : count + ahead]

    def forward_ends(self, unit: ShardedUnit) -> None:
        """Its backward comes before those of all units that ended earlier."""
        if unit in self.backward:
            self.backward.remove(unit)  # called again: the last call is the first in backward
        self.backward.append(unit)

    def backward_begins(self, unit: ShardedUnit, ahead: int) -> list[ShardedUnit]:
        """Note it; the units, ``ahead`` at most, whose backwards come next."""
        if unit in self.backward:
            del self.backward[self.backward.index(unit) :]
        return self.backward[: -1 - ahead : -1]
