"""Where a rank stands: its number, the size of the world, and the store where ranks meet.

Launchers write it into the environment, each under names of its own; MPI is asked.  What cannot be
is said at once (:class:`~shardproof.errors.LaunchError`); what one rank cannot see for itself is
found by the roll call (``meeting.py``).
"""

from __future__ import annotations

import contextlib
import ipaddress
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import timedelta
from queue import Queue

import psutil
import torch.distributed as dist

from shardproof.backends.mpi import Mpi, group
from shardproof.errors import LaunchError, Problem
from shardproof.launch.mpi.mpirun import unlink_segments

#: Seconds that ranks wait for each other before the first case: slow nodes are still starting.
MEETING_SECONDS = 600.0
#: Seconds until a rank that waits says for whom; then after twice as many, and so on.
FIRST_WORD_SECONDS = 10.0
#: Seconds for a store that answers a connection, but not in the words of a store.
ANSWER_SECONDS = 20.0


@dataclass(frozen=True)
class Names:
    """Variables of one launcher; those of the node may be missing."""

    rank: str
    world: str
    local_rank: str
    local_world: str
    nodes: str = ""


#: The first found counts.
LAUNCHERS = {
    "torchrun": Names("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE"),
    "Open MPI": Names(
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_LOCAL_RANK",
        "OMPI_COMM_WORLD_LOCAL_SIZE",
    ),
    "MPICH": Names("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
    "Slurm": Names("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID", "", "SLURM_STEP_NUM_NODES"),
}


@dataclass(frozen=True)
class Place:
    """A rank of a job, and where the job's store is."""

    rank: int
    world: int
    address: str
    port: int
    #: Number among the ranks of this node, and how many those are, where the launcher says so.
    local_rank: int | None = None
    local_world: int | None = None
    #: The store itself, where this rank serves it already.
    served: dist.Store | None = None

    @classmethod
    def by_mpi(cls) -> Place:
        """Ask MPI; rank 0 opens the store and tells the others where.

        :raises LaunchError: there is no MPI, or not the one whose ``mpirun`` started this.
        """
        if reason := Mpi().available():
            remedy = "correct this, or choose another --backend"
            raise LaunchError(Problem(reason, remedy, f"--backend {Mpi.name}"))
        found = group.start()
        comm = found.COMM_WORLD
        rank, world = comm.Get_rank(), comm.Get_size()
        here = comm.Split_type(found.COMM_TYPE_SHARED)
        unlink_segments()  # however this process ends: only in order does it leave MPI
        for names in LAUNCHERS.values():
            if int(os.environ.get(names.world, world)) != world:
                what = f"MPI sees {world} ranks, but the launcher started "
                remedy = "use the mpirun of the MPI that mpi4py loads, or choose --backend gloo"
                problem = Problem(what + os.environ[names.world], remedy, f"--backend {Mpi.name}")
                raise LaunchError(problem)
        store, place = None, ("", 0)
        if rank == 0:
            store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
            alone = here.Get_size() == world
            place = "127.0.0.1" if alone else socket.gethostname(), store.port
        address, port = comm.bcast(place, root=0)
        return cls(rank, world, address, port, served=store)

    @classmethod
    def find(cls, environment: Mapping[str, str]) -> Place:
        """Read the launcher's variables.

        :raises LaunchError: no launcher, values that cannot be, or no address to meet at.
        """
        for names in LAUNCHERS.values():
            if names.rank in environment and names.world in environment:
                return cls._of(names, environment)
        known = ", ".join(LAUNCHERS)
        example = "torchrun --nproc-per-node 4 -m shardproof.cluster.torchrun"
        remedy = f"start the command with one of {known}, e.g. {example}"
        raise LaunchError(Problem("no launcher has set the rank of this process", remedy))

    @classmethod
    def _of(cls, names: Names, environment: Mapping[str, str]) -> Place:
        def number(name: str, least: int, most: int | None = None) -> int:
            text = environment[name]
            if text.isascii() and text.isdigit() and least <= int(text) <= (most or int(text)):
                return int(text)
            span = f"from {least}" + (f" to {most}" if most else "")
            raise LaunchError(
                Problem(f"{name} is not a whole number {span}", f"correct {name}", text)
            )

        def optional(name: str, least: int) -> int | None:
            return number(name, least) if name in environment else None

        world, rank = number(names.world, 1), number(names.rank, 0)
        local_rank, local_world = optional(names.local_rank, 0), optional(names.local_world, 1)
        _fits(names, rank, world, local_rank, local_world)
        if names is LAUNCHERS["Slurm"] and world > 1 and "SLURM_STEP_ID" not in environment:
            what = f"the batch script itself started one process for {names.world}={world}"
            raise LaunchError(Problem(what, "put `srun` before the command to start all ranks"))
        nodes = (optional(names.nodes, 1) if names.nodes else None) or 1
        several = nodes > 1 or (local_world or world) < world
        address = environment.get("MASTER_ADDR", "")
        if not address:
            # One node needs no address of another.
            if not (world == 1 or local_world == world):
                remedy = "set it to the host name of the first node, on every rank"
                raise LaunchError(Problem("MASTER_ADDR is not set", remedy))
            address = "127.0.0.1"
        elif several:
            _refuse_loopback(address, environment.get("GLOO_SOCKET_IFNAME"))
        port = number("MASTER_PORT", 1, 65535) if "MASTER_PORT" in environment else 29511
        return cls(rank, world, address, port, local_rank, local_world)

    def store(self, serves: bool = True) -> dist.Store:
        """The job's store, which rank 0 ``serves``; under torchrun its agent may already do so.

        :raises LaunchError: the port is taken, or what answers there is no store.
        """
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        if serves and self.served is not None:
            return dist.PrefixStore(f"shardproof/{attempt}", self.served)
        serves &= os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
        base = self._open(self.rank == 0 and serves and self.served is None)
        return dist.PrefixStore(f"shardproof/{attempt}", base)

    def _open(self, serves: bool) -> dist.TCPStore:
        """In a thread: torch waits for ever where something listens that never answers."""
        where, opened = f"{self.address}:{self.port}", Queue[dist.TCPStore | Exception]()

        def connect() -> None:
            place = self.address, self.port, self.world
            limit = timedelta(seconds=MEETING_SECONDS)
            try:
                opened.put(dist.TCPStore(*place, serves, limit, wait_for_workers=False))
            except Exception as error:  # noqa: BLE001 - raised below, in the rank's own thread
                opened.put(error)

        def known() -> str:
            if is_loopback(self.address):
                return ", which is this machine itself"
            try:
                socket.getaddrinfo(self.address, self.port)
            except OSError:
                return ", a name that this machine cannot resolve"
            return ""

        thread = threading.Thread(target=connect, name="store", daemon=True)
        thread.start()
        silent_since = time.monotonic()
        with telling(lambda: f"rank {self.rank} waits for rank 0 at {where}{known()}") as tell:
            while thread.is_alive():
                thread.join(1.0)
                tell()
                if not (thread.is_alive() and _answers(self.address, self.port)):
                    silent_since = time.monotonic()
                elif time.monotonic() - silent_since > ANSWER_SECONDS:
                    opened.put(TimeoutError("Ping failed"))
                    break
        found = opened.get()
        if isinstance(found, dist.TCPStore):
            return found
        raise self._reason(found, where) from found

    def _reason(self, error: Exception, where: str) -> Exception:
        """``error`` of a store as a sentence, where it is known what it means."""
        free = "choose a free MASTER_PORT, the same on every rank"
        known = {
            "EADDRINUSE": Problem(
                f"rank 0 cannot listen at port {self.port}, which is in use on this machine",
                f"{free}; or correct RANK, if two processes have rank 0",
            ),
            "Ping failed": Problem(f"another program, not rank 0, listens at {where}", free),
            "timed out": Problem(
                f"rank {self.rank} could not reach rank 0 at {where} within {MEETING_SECONDS:g} s",
                "start rank 0 at that address, and check that this machine can connect to rank 0",
            ),
        }
        found = (problem for word, problem in known.items() if word in str(error))
        return next(map(LaunchError, found), error)


def _fits(
    names: Names, rank: int, world: int, local_rank: int | None, local_world: int | None
) -> None:
    """:raises LaunchError: numbers that cannot be together."""
    if rank >= world:
        what = f"{names.rank}={rank} with {names.world}={world}: ranks are 0 to {world - 1}"
        remedy = f"set {names.world} to the number of ranks of all nodes"
    elif local_world is not None and local_world > world:
        what = f"{names.local_world}={local_world} on a node, but {names.world}={world} in all"
        remedy = f"set {names.world} to the number of ranks of all nodes"
    elif local_rank is not None and local_rank >= (local_world or world):
        most, size = (names.local_world, local_world) if local_world else (names.world, world)
        what = f"{names.local_rank}={local_rank} with {most}={size}"
        remedy = f"number the ranks of each node from 0 in {names.local_rank}"
    else:
        return
    raise LaunchError(Problem(what, remedy))


def _refuse_loopback(address: str, interface: str | None) -> None:
    """:raises LaunchError: other nodes cannot reach ``address``.

    Who names an interface for gloo may mean it: the loopback, where all nodes are one machine; or
    another, where a host's own name alone leads to the loopback, as Debian sets it up.
    """
    if not is_loopback(address) or interface in ("lo", "lo0"):
        return
    literal = address == "localhost" or address[:1].isdigit() or ":" in address
    if interface and not literal:
        return
    if literal:
        what = "MASTER_ADDR is a loopback address: every node reaches only itself"
        remedy = "set it to the host name of node 0 (on one machine: set GLOO_SOCKET_IFNAME=lo)"
    else:
        what = "MASTER_ADDR resolves to the loopback here, but the job has several nodes"
        remedy = "correct /etc/hosts, or set MASTER_ADDR to an IP address or GLOO_SOCKET_IFNAME"
    raise LaunchError(Problem(what, remedy, address))


def is_loopback(address: str) -> bool:
    """Whether ``address`` is this machine's loopback, as seen from here."""
    try:
        entries = socket.getaddrinfo(address, None, type=socket.SOCK_STREAM)
        return all(ipaddress.ip_address(str(entry[4][0])).is_loopback for entry in entries)
    except (OSError, ValueError):
        return False  # a name that is not known yet


def _answers(address: str, port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection((address, port), 1.0):
        return True
    return False


@contextlib.contextmanager
def telling(what: Callable[[], str]) -> Iterator[Callable[[], None]]:
    """A function to call while waiting: says ``what`` on stderr, ever more rarely."""
    began, pause = time.monotonic(), FIRST_WORD_SECONDS

    def tell() -> None:
        nonlocal pause
        waited = time.monotonic() - began
        if waited > pause:
            pause *= 2
            print(f"shardproof: {what()} ({waited:.0f} s)", file=sys.stderr, flush=True)

    yield tell


def interface_to(address: str) -> str | None:
    """The network interface that leads to ``address``; ``None`` if it is unknown.

    gloo would otherwise resolve the own host name, which is the loopback on many machines.
    """
    try:
        first, *_ = socket.getaddrinfo(address, 9, type=socket.SOCK_DGRAM)
        family, kind, protocol, _, target = first
        with socket.socket(family, kind, protocol) as probe:
            probe.connect(target)  # sends nothing: only chooses the route
            own = probe.getsockname()[0]
    except OSError:
        return None
    for name, entries in psutil.net_if_addrs().items():
        if any(entry.address.split("%")[0] == own for entry in entries):
            return name
    return None
