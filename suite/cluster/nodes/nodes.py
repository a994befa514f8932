"""The nodes of a cluster as leaders see them: which rank runs where, and how its process starts."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

from shardproof.backends import BACKENDS
from shardproof.backends.disturbances import Disturbances, FarNodes
from shardproof.case import OF_NODES, Fault
from shardproof.cluster.nodes import asking
from shardproof.cluster.nodes.asking import FOLDER as FOLDER
from shardproof.cluster.nodes.asking import NODE as NODE
from shardproof.cluster.nodes.condition import Inquiry, Lost
from shardproof.cluster.nodes.doors import START_SECONDS, awaited
from shardproof.launch.diagnosis import RankProcess
from shardproof.launch.lease import Lease
from shardproof.launch.mpi.mpirun import Spread
from shardproof.launch.rank_keeper import KeeperTask
from shardproof.launch.rank_process import RankLaunch
from shardproof.launch.ranks import RanksGone

#: The variable in which a head finds what it is the head of, as JSON (``containers/cluster.py``).
ENVIRONMENT = "SHARDPROOF_CLUSTER"
#: Seconds that an agent has to go as well where a keeper has gone, and where a rank was killed.
_TELL_SECONDS, _DYING_SECONDS = 10.0, 1.0
#: ``nodes`` and ``ranks_per_node``; and for ``run.json`` the ``command`` that was typed, its
#: ``commit``, and what is ``told`` of the cluster.
Facts = Mapping[str, Any]


class NodeGone(RuntimeError):
    """An agent has ended or does not answer; the message names its node."""


@dataclass(frozen=True)
class Nodes:
    """``count`` nodes, whose agents have their doors in ``folder``.

    Consecutive ranks share a node, ``ranks_per_node`` of them, so that the last axes of a mesh lie
    inside nodes.
    """

    folder: Path
    count: int
    ranks_per_node: int
    #: Seconds that messages between nodes take more, where ranks and not the kernel delay them.
    far_seconds: float = 0.0
    #: Bits per second that each node sends with; 0: nothing is declared.
    rate: int = 0

    @classmethod
    def here(cls) -> Self | None:
        """Those that this machine is the head of."""
        if (facts := facts_here()) is None:
            return None
        far = float(facts.get("far_seconds", 0.0))
        rate = int(facts.get("told", {}).get("declared", {}).get("bits_per_second", 0))
        return cls(FOLDER, int(facts["nodes"]), int(facts["ranks_per_node"]), far, rate)

    def wait(self) -> None:
        """Return once every agent answers.

        :raises NodeGone: one does not.
        """
        every = [door(self.folder, node) for node in range(self.count)]
        if (late := awaited(every, START_SECONDS)) is not None:
            what = f"node {every.index(late)}: its agent has not come within {START_SECONDS:g} s"
            raise NodeGone(what)

    def __str__(self) -> str:
        return f"{self.count} nodes x {self.ranks_per_node} ranks"

    @property
    def places(self) -> int:
        """Ranks that there is room for."""
        return self.count * self.ranks_per_node

    def has_room(self, backend: str, world: int) -> bool:
        """Whether so many ranks fit; those that are threads stay in the head."""
        return BACKENDS[backend].threads or world <= self.places

    def ranks_of(self, node: int, world: int) -> tuple[int, ...]:
        """The ranks on ``node`` in a world of that size."""
        first = node * self.ranks_per_node
        return tuple(range(first, min(first + self.ranks_per_node, world)))

    def not_far(self, backend: str) -> str | None:
        """Why messages of a backend are not delayed as declared; ``None``: they are."""
        known = BACKENDS[backend]
        if not self.far_seconds or known.threads or known.delays_far_nodes:
            return None
        return f"the kernel has no netem, and ranks delay messages of gloo only, not of {backend}"

    def start(self, launch: RankLaunch) -> Ranks:
        """Have the agents start the ranks of ``launch``; a ``launch.ranks.Start``.

        :raises NodeGone: one of them cannot.
        """
        if launch.world > self.places:
            raise ValueError(f"{launch.world} ranks on {self.places} places")
        if self.far_seconds:
            far = FarNodes(self.far_seconds, self.ranks_per_node)
            others = launch.disturbances or Disturbances()
            launch = replace(launch, disturbances=replace(others, far=far))
        return Ranks(self, launch)


def facts_here() -> Facts | None:
    """What this machine is the head of; ``None``: of nothing."""
    text = os.environ.get(ENVIRONMENT, "")
    return json.loads(text) if text else None


def node_here() -> int | None:
    """The number of the node that this process is on; ``None``: there are no nodes."""
    text = os.environ.get(NODE, "")
    return int(text) if text else None


def door(folder: Path, node: int) -> Path:
    """The socket of the agent of ``node``."""
    return folder / f"node{node}"


class Ranks:
    """The ranks of one launch, each in its node; a ``launch.ranks.Ranks``.

    An order to an agent lasts as long as its connection, so that ranks end with their leader.
    """

    def __init__(self, nodes: Nodes, launch: RankLaunch) -> None:
        self._orders: list[_Order] = []
        self._nodes = nodes
        self._fault: Fault | None = getattr(launch.disturbances, "fault", None)
        placed = [ranks for n in range(nodes.count) if (ranks := nodes.ranks_of(n, launch.world))]
        spread, mpi = None, launch.link.mpirun
        if mpi and len(placed) > 1:
            counts = {door(nodes.folder, n).name: len(ranks) for n, ranks in enumerate(placed)}
            spread = Spread(nodes.folder, counts)
        try:
            for node, ranks in enumerate(placed):
                folder = launch.workdir / door(nodes.folder, node).name
                folder.mkdir()
                keeper = KeeperTask(ranks, folder, mpi, most_cases=1, spread=spread)
                self._orders.append(_Order(nodes.folder, node, keeper))
            keepers = [order.keeper for order in self._orders]
            self._lease = Lease(keepers, launch, self._look)
        except NodeGone:
            self._release()
            raise
        except RanksGone as error:
            self._release()
            raise NodeGone(str(error)) from error

    def processes(self) -> list[RankProcess]:
        """They run already."""
        return self._lease.processes()

    def descriptors(self, alive: Sequence[RankProcess]) -> list[int]:
        """What becomes readable when one of them ends."""
        return self._lease.descriptors(alive)

    def status(self, process: RankProcess) -> int | None:
        """Its wait status, once it has ended."""
        return self._lease.status(process)

    def lost(self, at_end: bool = False) -> dict[int, Lost]:
        """The nodes that have ended, are paused or are cut off, by rank.

        ``at_end``: it is waited for word of each, and of those whose ranks were killed
        until it is known why: their agent lives on, or has ended as well.
        """
        if at_end:
            return self._settled() | self._full()
        found: dict[int, Lost] = {}
        for order in self._orders:
            if (lost := order.lost()) is not None:
                found |= dict.fromkeys(order.keeper.ranks, lost)
        return found

    def close(self, alive: Sequence[RankProcess]) -> None:
        """The agents end what still runs."""
        self._lease.close(alive)
        self._release()
        # So that no later case meets it.  Where nothing is expected of a fault, it is to stay.
        if (fault := self._fault) and fault.kind in OF_NODES and fault.verdicts:
            # Where it stays undone, the next case that needs the node says so.
            with contextlib.suppress(asking.NotDone):
                asking.heal(fault, fault.rank // self._nodes.ranks_per_node)

    def stay(self) -> Collection[int]:
        """None: they are no children of this process."""
        return ()

    def _look(self) -> None:
        """:raises NodeGone: a node is lost."""
        for lost in self.lost().values():
            raise NodeGone(str(lost))

    def _full(self) -> dict[int, Lost]:
        whose = {rank: order for order in self._orders for rank in order.keeper.ranks}
        return {
            rank: Lost(whose[rank].node, whose[rank].keeper.ranks, "full")
            for rank in self._lease.ended_for_memory
        }

    def _settled(self) -> dict[int, Lost]:
        began = time.monotonic()
        # Processes of a node that is being killed die one after the other, in any order.
        least = began + (_DYING_SECONDS if self._lease.has_killed else 0.0)
        for order in self._orders:
            order.inquiry.known = False
        while True:
            now, known = time.monotonic(), all(map(self._is_known, self._orders))
            found = self.lost()  # after what is known: each question may bring news
            if found or (known and now >= least) or now > began + _TELL_SECONDS:
                return found
            time.sleep(0.01)

    def _is_known(self, order: _Order) -> bool:
        # A keeper that has gone was killed from outside, and its node most likely with it.
        kept = self._lease.is_kept(order.keeper.ranks[0])
        return order.lost() is not None or (order.inquiry.known and kept)

    def _release(self) -> None:
        for order in self._orders:
            order.connection.close()


class _Order:
    """What an agent is ordered to start, for as long as the connection to it lasts.

    :raises NodeGone: the agent has ended.
    """

    def __init__(self, folder: Path, node: int, keeper: KeeperTask) -> None:
        self.node, self.keeper = node, keeper
        self.connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            self.connection.connect(str(door(folder, node)))
            self.connection.send(keeper.order())
        except OSError:
            self.connection.close()
            raise NodeGone(str(Lost(node, keeper.ranks, "ended"))) from None
        self.inquiry = Inquiry(self.connection)

    def lost(self) -> Lost | None:
        """What has become of the node; ``None``: nothing that is known."""
        how = self.inquiry.how()
        return None if how is None else Lost(self.node, self.keeper.ranks, how)
