"""The nodes of a cluster as leaders see them: which rank runs where, and how its process starts."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from shardproof.launch.diagnosis import RankProcess
from shardproof.launch.lease import Lease
from shardproof.launch.rank_keeper import KeeperTask
from shardproof.launch.rank_process import RankLaunch
from shardproof.launch.ranks import RanksGone

#: The variable in which a head finds what it is the head of, as JSON (``multinode/cluster.py``).
ENVIRONMENT = "SHARDPROOF_CLUSTER"
#: Where the agents of a cluster have their doors.
FOLDER = Path("/dev/shm/shardproof-nodes")
#: Seconds that agents have to come.
START_SECONDS = 120.0
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

    @classmethod
    def here(cls) -> Self | None:
        """Those that this machine is the head of."""
        if (facts := facts_here()) is None:
            return None
        return cls(FOLDER, int(facts["nodes"]), int(facts["ranks_per_node"]))

    def wait(self) -> None:
        """Return once every agent answers.

        :raises NodeGone: one does not.
        """
        deadline = time.monotonic() + START_SECONDS
        for node in range(self.count):
            while not door(self.folder, node).exists():
                if time.monotonic() > deadline:
                    what = f"node {node}: its agent has not come within {START_SECONDS:g} s"
                    raise NodeGone(what)
                time.sleep(0.05)

    def __str__(self) -> str:
        return f"{self.count} nodes x {self.ranks_per_node} ranks"

    @property
    def places(self) -> int:
        """Ranks that there is room for."""
        return self.count * self.ranks_per_node

    def ranks_of(self, node: int, world: int) -> tuple[int, ...]:
        """The ranks on ``node`` in a world of that size."""
        first = node * self.ranks_per_node
        return tuple(range(first, min(first + self.ranks_per_node, world)))

    def start(self, launch: RankLaunch) -> Ranks:
        """Have the agents start the ranks of ``launch``; a ``launch.ranks.Start``.

        :raises NodeGone: one of them cannot.
        """
        if launch.world > self.places:
            raise ValueError(f"{launch.world} ranks on {self.places} places")
        return Ranks(self, launch)


def facts_here() -> Facts | None:
    """What this machine is the head of; ``None``: of nothing."""
    text = os.environ.get(ENVIRONMENT, "")
    return json.loads(text) if text else None


def door(folder: Path, node: int) -> Path:
    """The socket of the agent of ``node``."""
    return folder / f"node{node}"


class Ranks:
    """The ranks of one launch, each in its node; a ``launch.ranks.Ranks``.

    An order to an agent lasts as long as its connection, so that ranks end with their leader.
    """

    def __init__(self, nodes: Nodes, launch: RankLaunch) -> None:
        self._orders: list[socket.socket] = []
        keepers = []
        try:
            for node in range(nodes.count):
                if ranks := nodes.ranks_of(node, launch.world):
                    folder = launch.workdir / f"node{node}"
                    folder.mkdir()
                    keepers.append(KeeperTask(ranks, folder, mpi=False, most_cases=1))
                    self._order(door(nodes.folder, node), keepers[-1])
            self._lease = Lease(keepers, launch)
        except (OSError, RanksGone) as error:
            self._release()
            raise NodeGone(f"node {node}: {error}") from error

    def processes(self) -> list[RankProcess]:
        """They run already."""
        return self._lease.processes()

    def descriptors(self, alive: Sequence[RankProcess]) -> list[int]:
        """What becomes readable when one of them ends."""
        return self._lease.descriptors(alive)

    def status(self, process: RankProcess) -> int | None:
        """Its wait status, once it has ended."""
        return self._lease.status(process)

    def close(self, alive: Sequence[RankProcess]) -> None:
        """The agents end what still runs."""
        self._lease.close(alive)
        self._release()

    def stay(self) -> Collection[int]:
        """None: they are no children of this process."""
        return ()

    def _order(self, agent: Path, keeper: KeeperTask) -> None:
        order = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._orders.append(order)
        order.connect(str(agent))
        order.send(json.dumps([keeper.ranks, str(keeper.folder)]).encode())

    def _release(self) -> None:
        for order in self._orders:
            with contextlib.suppress(OSError):
                order.close()
