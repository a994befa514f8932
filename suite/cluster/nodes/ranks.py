"""The nodes of a cluster, and ranks on them: which runs where, how it starts, how its node is."""

from __future__ import annotations

import contextlib
import json
import pickle
import select
import signal
import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

from shardproof.backends import BACKENDS
from shardproof.backends.disturbances import Disturbances
from shardproof.case import OF_NODES, Case, Fault
from shardproof.cluster import fault_plans
from shardproof.cluster.nodes import asking
from shardproof.cluster.nodes.condition import Inquiry
from shardproof.cluster.nodes.doors import START_SECONDS, awaited, door
from shardproof.cluster.nodes.far import FarNodes
from shardproof.cluster.nodes.informants import NodeInformant, share
from shardproof.cluster.nodes.keeper import KeeperTask, Packed, keep
from shardproof.launch.diagnosis import Lost, RankProcess
from shardproof.launch.informant import Informant
from shardproof.launch.mpi import mpirun
from shardproof.launch.nodes import NodeGone, Nodes, facts_here
from shardproof.launch.rank_process import RankLaunch
from shardproof.launch.ranks import ProcessHost

#: Seconds that keepers have to start their ranks; an ``mpirun`` may take all of its own.
_MEET_SECONDS = mpirun.START_SECONDS + 10.0
#: Seconds between two looks at nodes while a keeper is waited for.
_LOOK_SECONDS = 0.05
#: Seconds that an agent has to go as well where a keeper has gone, and where a rank was killed.
_TELL_SECONDS, _DYING_SECONDS = 10.0, 1.0


@dataclass(frozen=True)
class ClusterNodes(Nodes):
    """Nodes whose agents have their doors in ``folder``.

    ``far_seconds``: what messages between nodes take more, where ranks and not the kernel delay
    them.
    """

    folder: Path = asking.FOLDER
    far_seconds: float = 0.0

    @classmethod
    def of(cls, facts: Mapping[str, Any]) -> Self:
        """Those that this machine is the head of."""
        rate = int(facts.get("told", {}).get("declared", {}).get("bits_per_second", 0))
        far = float(facts.get("far_seconds", 0.0))
        return cls(int(facts["nodes"]), int(facts["ranks_per_node"]), rate, far_seconds=far)

    def host(self) -> NodeRanks:
        """The runner of ranks on these nodes."""
        return NodeRanks(self)

    def wait(self) -> None:
        """Return once every agent answers.

        :raises NodeGone: one does not.
        """
        every = [door(self.folder, node) for node in range(self.count)]
        if (late := awaited(every, START_SECONDS)) is not None:
            what = f"the agent of node {every.index(late)} did not start within {START_SECONDS:g} s"
            raise NodeGone(what)

    def not_far(self, backend: str) -> str | None:
        """Why messages of a backend are not delayed as declared; ``None``: they are."""
        known = BACKENDS[backend]
        if not self.far_seconds or known.threads or known.delays_far_nodes:
            return None
        return f"without netem in the kernel only messages of gloo are delayed, not of {backend}"

    def with_faults(self, cases: Sequence[Case]) -> list[Case]:
        """``cases`` with the fault that is planned for this run.

        :raises SelectionError: it cannot be made in these cases.
        """
        return fault_plans.with_planned(cases, facts_here() or {})


class NodeRanks(ProcessHost):
    """Ranks on ``nodes``, each forked by a keeper in its node; those that are threads on the first.

    They are another user's than this process, which neither sends them signals nor opens more to
    them than the folder of their launch.  An order to an agent lasts as long as its connection, so
    that ranks end with their leader.
    """

    def __init__(self, nodes: ClusterNodes) -> None:
        self._nodes = nodes
        self._orders: list[_Order] = []
        self._fault: Fault | None = None

    def start(self, launch: RankLaunch) -> list[RankProcess]:
        """Have the agents start them.

        :raises NodeGone: an agent cannot.
        """
        if launch.world > self._nodes.places and not launch.backend.threads:
            raise ValueError(f"these nodes can run {self._nodes.places} ranks, not {launch.world}")
        self._orders = []
        self._fault = getattr(launch.disturbances, "fault", None)
        tasks = self._tasks(launch)
        packed = replace(self._delayed(launch), program=Packed(pickle.dumps(launch.program)))
        tasks[0].launch.write_bytes(pickle.dumps(packed))
        share(launch.workdir)
        launch.heartbeat.chmod(0o666)
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
            listener.bind(str(tasks[0].leader))
            tasks[0].leader.chmod(0o666)
            listener.listen(len(tasks))
            for node, task in enumerate(tasks):
                self._orders.append(_Order(node, task))
            self._meet(listener)
        if launch.backend.threads:
            return [RankProcess(pid, tuple(launch.ranks)) for pid in self._orders[0].pids.values()]
        pids = {rank: pid for order in self._orders for rank, pid in order.pids.items()}
        return [RankProcess(pids[rank], (rank,)) for rank in sorted(pids)]

    def _tasks(self, launch: RankLaunch) -> list[KeeperTask]:
        nodes, world = self._nodes, launch.world
        placed = [ranks for node in range(nodes.count) if (ranks := nodes.ranks_of(node, world))]
        if launch.backend.threads:
            placed = [tuple(launch.ranks)]
        names = [door(nodes.folder, node).name for node in range(len(placed))]
        over_mpi = launch.backend.mpirun and len(placed) > 1
        spread = dict(zip(names, map(len, placed), strict=True)) if over_mpi else {}
        return [
            KeeperTask(name, ranks, launch.workdir, nodes.folder, spread)
            for name, ranks in zip(names, placed, strict=True)
        ]

    def _delayed(self, launch: RankLaunch) -> RankLaunch:
        """``launch`` with messages between nodes delayed, where ranks and not the kernel do it."""
        if not self._nodes.far_seconds:
            return launch
        far = FarNodes(self._nodes.far_seconds, self._nodes.ranks_per_node)
        others = launch.disturbances or Disturbances()
        return replace(launch, disturbances=replace(others, far=far))

    def _meet(self, listener: socket.socket) -> None:
        """Wait for all keepers, and for the pids of their ranks."""
        deadline = time.monotonic() + _MEET_SECONDS
        orders = {order.task.ranks[0]: order for order in self._orders}
        for _ in self._orders:
            self._await(listener, deadline)
            keeper, _ = listener.accept()
            self._await(keeper, deadline)
            orders[int(keeper.recv(64) or -1)].keeper = keeper
        for order in self._orders:
            self._await(order.keeper, deadline)
            told: list[int] | str = json.loads(order.keeper.recv(1 << 16) or '"it ended"')
            if isinstance(told, str):
                gone = ", ".join(map(str, order.task.ranks))
                raise NodeGone(f"the process that starts ranks {gone} on a node failed: {told}")
            order.pids = dict(zip(order.task.ranks, told, strict=False))  # one for all threads

    def _await(self, connection: socket.socket, deadline: float) -> None:
        """Return once there is something to read.

        :raises NodeGone: a node is lost, or it takes too long.
        """
        while not select.select([connection], [], [], _LOOK_SECONDS)[0]:
            for lost in self.lost().values():
                raise NodeGone(str(lost))
            if time.monotonic() > deadline:
                raise NodeGone(f"nodes did not start their ranks within {_MEET_SECONDS:g} s")

    def descriptors(self, alive: Sequence[RankProcess]) -> list[int]:
        """The descriptor that becomes readable when one of them ends."""
        return [order.keeper.fileno() for order in self._orders if not order.is_gone]

    def status(self, process: RankProcess) -> int | None:
        """The wait status of a process that has ended; all do with their keeper."""
        rank = process.ranks[0]
        order = next(order for order in self._orders if rank in order.pids)
        order.hear()
        return order.statuses.get(rank, signal.SIGKILL if order.is_gone else None)

    def signal(self, pid: int, signum: int) -> bool:
        """Have its keeper send it."""
        order = next(order for order in self._orders if pid in order.pids.values())
        with contextlib.suppress(OSError):  # it has gone, and the process with it
            return order.keeper.send(json.dumps([pid, signum]).encode(), socket.MSG_DONTWAIT) > 0
        return False

    def informant(self, workdir: Path, seconds: float) -> Informant:
        """One on the first node."""
        return NodeInformant(door(self._nodes.folder, 0), workdir, seconds)

    def lost(self, at_end: bool = False) -> dict[int, Lost]:
        """The nodes that have ended, are paused or are cut off, by rank.

        ``at_end``: waits for word of each, and of those whose ranks were killed until it is known
        why: their agent lives on, or has ended as well.
        """
        if at_end:
            return self._settled() | self._full()
        found: dict[int, Lost] = {}
        for order in self._orders:
            if (lost := order.lost()) is not None:
                found |= dict.fromkeys(order.task.ranks, lost)
        return found

    def close(self, alive: Sequence[RankProcess]) -> None:
        """The agents end what still runs."""
        for order in self._orders:
            order.close()
        # So that no later case meets it.  Where nothing is expected of a fault, it is to stay.
        if (fault := self._fault) and fault.kind in OF_NODES and fault.verdicts:
            # Where it stays undone, the next case that needs the node says so.
            with contextlib.suppress(asking.NotDone):
                asking.heal(fault, fault.rank // self._nodes.ranks_per_node)

    def _full(self) -> dict[int, Lost]:
        return {
            rank: Lost(order.node, order.task.ranks, "full")
            for order in self._orders
            for rank in order.ended_for_memory
        }

    def _settled(self) -> dict[int, Lost]:
        began = time.monotonic()
        # Processes of a node that is being killed die one after the other, in any order.
        killed = any(signal.SIGKILL in order.statuses.values() for order in self._orders)
        least = began + (_DYING_SECONDS if killed else 0.0)
        for order in self._orders:
            order.inquiry.known = False
        while True:
            # A keeper that has gone was killed from outside, and its node most likely with it.
            now, known = time.monotonic(), all(order.is_known for order in self._orders)
            found = self.lost()  # after what is known: each question may bring news
            if found or (known and now >= least) or now > began + _TELL_SECONDS:
                return found
            time.sleep(0.01)


class _Order:
    """The order to an agent, which lasts as long as the connection to it.

    :raises NodeGone: the agent has ended.
    """

    def __init__(self, node: int, task: KeeperTask) -> None:
        self.node, self.task = node, task
        self.pids: dict[int, int] = {}
        self.statuses: dict[int, int] = {}
        #: Ranks that the kernel has ended because the memory of their node was used up.
        self.ended_for_memory: set[int] = set()
        #: Whether the keeper has ended, and with it all its ranks.
        self.is_gone = False
        self.keeper = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._agent = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            self._agent.connect(str(task.doors / task.node))
            self._agent.send(pickle.dumps((keep, task)))
        except OSError:
            self.close()
            raise NodeGone(str(Lost(node, task.ranks, "ended"))) from None
        self.inquiry = Inquiry(self._agent)

    def hear(self) -> None:
        """Note what the keeper tells."""
        while not self.is_gone:
            try:
                message = self.keeper.recv(4096, socket.MSG_DONTWAIT)
            except BlockingIOError:
                return
            except OSError:
                message = b""
            self.is_gone = not message
            if message:
                rank, self.statuses[rank], for_memory = json.loads(message)
                self.ended_for_memory |= {rank} if for_memory else set()

    @property
    def is_known(self) -> bool:
        """Whether it is known how the node is; where the keeper has gone, only if it is lost."""
        return self.lost() is not None or (self.inquiry.known and not self.is_gone)

    def lost(self) -> Lost | None:
        """The state of the node; ``None``: nothing is known to be wrong."""
        how = self.inquiry.how()
        return None if how is None else Lost(self.node, self.task.ranks, how)

    def close(self) -> None:
        """Nothing more is ordered: what still runs ends."""
        self.keeper.close()
        self._agent.close()
