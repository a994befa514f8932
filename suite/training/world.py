"""The ranks of this job: ``join`` finds them under any launcher and returns a :class:`World`.

a group exists already        the user's own ``init_process_group``, a rank of ``Training``
RANK and WORLD_SIZE           torchrun, and ranks that ``Training`` starts as processes
variables of Open MPI, MPICH  an ``mpirun``, over the backend of MPI
variables of Slurm            ``srun``; MASTER_ADDR names the first node
none of these                 a world of one rank
"""

from __future__ import annotations

import atexit
import os
import socket
import sys
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from types import TracebackType
from typing import Any

import psutil
import torch
import torch.distributed as dist

from shardproof.axes import joint_groups, replicas
from shardproof.backends import BACKENDS, USUAL_PROCESSES, Backend, Joining, gloo, joined
from shardproof.comm import THREADED, Comm, Mesh, Subgroup
from shardproof.errors import LaunchError, Problem, nearest
from shardproof.ledgers.program_order import PerRank
from shardproof.training.inputs import require_positive

# The communicator calls operations by names that torch 2.11 has, too: no news for who trains.
warnings.filterwarnings("ignore", r".*torch\.distributed\.\w+. is deprecated", FutureWarning)

#: Seconds that a call waits for its peers unless told otherwise: as long as torch's own.
TIMEOUT_SECONDS = 1800.0
#: Variables of launchers: rank and number of ranks.
_TORCHRUN = ("RANK", "WORLD_SIZE")
_MPI = (("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"), ("PMI_RANK", "PMI_SIZE"))
_SLURM = ("SLURM_PROCID", "SLURM_NTASKS")


@dataclass
class World:
    """The ranks of this job and the place of the calling one; ``with join() as world`` leaves it.

    ``owns_group``: whether :func:`join` made the default group, which :meth:`leave` destroys.
    """

    mesh: Mesh
    owns_group: bool

    @property
    def comm(self) -> Comm:
        """The communicator of all ranks."""
        return self.mesh.comm(*self.mesh.axes)

    @property
    def rank(self) -> int:
        """The number of this rank, from 0."""
        return self.mesh.rank

    @property
    def size(self) -> int:
        """The number of ranks."""
        return self.mesh.world

    @property
    def device(self) -> str:
        """Where models and batches of this rank lie."""
        return self.mesh.device

    @property
    def group(self) -> dist.ProcessGroup:
        """The process group of all ranks, for calls of ``torch.distributed``."""
        return self.comm.group

    def new_group(self, ranks: Sequence[int]) -> Subgroup:
        """The communicator of some ranks; all ranks call it, ``contains`` says who may use it."""
        if not isinstance(ranks, Iterable) or isinstance(ranks, str):
            raise ValueError(f"new_group({ranks!r:.60}): give a list of ranks, such as [0, 1]")
        return self.mesh.subgroup(sorted(ranks))

    def contains(self, rank: int) -> bool:
        """Whether there is such a rank."""
        return 0 <= rank < self.size

    def new_mesh(self, axes: Mapping[str, int]) -> Mesh:
        """These ranks on a grid, e.g. ``{"shard": 2, "tensor": 4}``; all ranks call it."""
        require_mesh(axes, self.size)
        return Mesh(axes, joint=joint_groups(axes), device=self.device)

    def barrier(self) -> None:
        """Return when every rank has called it."""
        self.comm.barrier()

    def leave(self) -> None:
        """Destroy the groups, if :func:`join` made them."""
        if _WORLD.get() is self:
            _WORLD.set(None, process=is_process())
            if self.owns_group:
                joined.leave()

    def __enter__(self) -> World:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: Any, trace: TracebackType | None
    ) -> None:
        self.leave()


_WORLD: PerRank[World] = PerRank()


def join(backend: str = "", timeout: float = TIMEOUT_SECONDS) -> World:
    """The world of the calling rank; asked again, the same one.

    ``backend``: unless given, the fastest one that the machine and the launcher allow.

    :raises LaunchError: the launcher's variables cannot be, or the backend cannot be used.
    """
    require_positive("timeout", timeout)
    world = _WORLD.get()
    if world is not None and dist.is_initialized():
        return world
    if owns := not dist.is_initialized():
        _initialize(backend, timeout)
    on_gpu = dist.get_backend() in {b.name for b in BACKENDS.own.values() if b.device != "cpu"}
    device = "cuda" if on_gpu else "cpu"
    return settle(Mesh(replicas(dist.get_world_size()), device=device), owns)


def settle(mesh: Mesh, owns_group: bool) -> World:
    """The world over ``mesh``, from now on that of the calling rank."""
    world = World(mesh, owns_group)
    _WORLD.set(world, process=is_process())
    return world


def is_launched(environment: Mapping[str, str]) -> bool:
    """Whether a launcher has made this process a rank of its job."""
    if dist.is_initialized() or all(name in environment for name in _TORCHRUN):
        return True
    # One rank of these is also what a shell inside of an allocation looks like.
    slurm = (_SLURM,) if "SLURM_STEP_ID" in environment else ()
    return any(r in environment and environment.get(n, "1") != "1" for r, n in (*_MPI, *slurm))


def backend_named(name: str, world: int) -> Backend:
    """The backend called ``name``, usable by ``world`` ranks here.

    :raises LaunchError: there is none, or it cannot be used on this machine.
    """
    if name not in BACKENDS:
        raise LaunchError(Problem("unknown backend", nearest(name, BACKENDS, "valid"), name))
    backend = BACKENDS[name]
    if reason := backend.available(world):
        raise LaunchError(Problem(reason, backend.remedy, name))
    return backend


def require_axes(axes: Mapping[str, int]) -> None:
    """Raise unless ``axes`` are names of axes and ranks along each.

    :raises ValueError: they are not.
    """
    from shardproof.axes import names

    if not isinstance(axes, Mapping) or not axes:
        raise ValueError(
            f"mesh = {axes!r:.60}: write the number of ranks of each axis, e.g. {replicas(4)} "
            f"(axes: {', '.join(names())}), or leave mesh out"
        )
    for axis, ranks in axes.items():
        if axis not in names():
            raise ValueError(f"mesh: unknown axis {axis!r}; {nearest(axis, names(), 'valid')}")
        if type(ranks) is not int or ranks < 1:
            raise ValueError(
                f"mesh: axis {axis!r} = {ranks!r}: give a whole number of ranks, at least 1"
            )


def require_mesh(axes: Mapping[str, int], world: int) -> None:
    """Raise unless ``axes`` are a grid of ``world`` ranks.

    :raises ValueError: it has another number of ranks, or an axis that there is not.
    """
    from shardproof.axes import size

    require_axes(axes)
    if (asked := size(axes, axes)) != world:
        shape = " x ".join(f"{axis}={ranks}" for axis, ranks in axes.items())
        remedy = f"start {asked} ranks"
        if world % asked == 0:
            remedy += f", or multiply one axis by {world // asked}"
        else:
            remedy += f", or choose axes whose product is {world}"
        raise ValueError(f"mesh {shape} has {asked} ranks, but this job has {world}: {remedy}")


def is_process() -> bool:
    """Whether the calling rank is a process; else it is a thread."""
    return not dist.is_initialized() or dist.get_backend() != THREADED


def _initialize(backend: str, timeout: float) -> None:
    """Make the default group, of the ranks that the launcher started."""
    environment = os.environ
    local = int(environment.get("LOCAL_WORLD_SIZE", "1"))
    name = backend or environment.get("SHARDPROOF_BACKEND") or _usual(local)
    found = backend_named(name, local)
    if found.mpirun:
        _join_mpi(found, timeout)
        return
    rank, world, store = _meeting(timeout)
    if found.threads and world > 1:
        remedy = f"leave the backend out, or choose {USUAL_PROCESSES}"
        what = "ranks of this backend are threads, but this rank is a process"
        raise LaunchError(Problem(what, remedy, name))
    address = environment.get("MASTER_ADDR", "")
    if address and gloo.INTERFACE not in environment and (leads := _interface_to(address)):
        environment[gloo.INTERFACE] = leads
    joined.join(found, Joining(rank, world, store, timeout, False, found.hub(world, timeout)))


def _usual(local: int) -> str:
    """The backend of MPI under an ``mpirun``, that of GPUs if each of ``local`` ranks has one, else
    that of processes.
    """
    own, usual = BACKENDS.own.values(), BACKENDS[USUAL_PROCESSES]
    if _TORCHRUN[0] not in os.environ and any(rank in os.environ for rank, _ in _MPI):
        return next((b for b in own if b.mpirun), usual).name
    gpus = [b for b in own if b.device != "cpu" and not b.shares_devices]
    fits = (b for b in gpus if torch.cuda.is_available() and not b.available(local))
    return next(fits, usual).name


def _meeting(timeout: float) -> tuple[int, int, dist.Store]:
    """Rank, number of ranks, and the store where they meet."""
    environment = os.environ
    slurm = (_SLURM,) if "SLURM_STEP_ID" in environment else ()
    for rank, size in (_TORCHRUN, *_MPI, *slurm):
        if rank in environment and size in environment:
            own, world = (_number(environment, name) for name in (rank, size))
            break
    else:
        return 0, 1, dist.HashStore()
    if own >= world:
        remedy = f"set {size} to the number of ranks on all nodes, and number {rank} from 0"
        raise LaunchError(
            Problem(f"{rank}={own} with {size}={world}: ranks are 0 to {world - 1}", remedy)
        )
    if world == 1 and "MASTER_ADDR" not in environment:
        return 0, 1, dist.HashStore()
    environment.setdefault("MASTER_ADDR", "127.0.0.1")
    environment.setdefault("MASTER_PORT", "29500")
    limit = timedelta(seconds=timeout)
    agent = environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    place = environment["MASTER_ADDR"], int(environment["MASTER_PORT"])
    base = dist.TCPStore(*place, world, own == 0 and not agent, limit, wait_for_workers=False)
    attempt = environment.get("TORCHELASTIC_RESTART_COUNT", "0")
    return own, world, dist.PrefixStore(f"shardproof/training/{attempt}", base)


def _number(environment: Mapping[str, str], name: str) -> int:
    text = environment[name]
    if not (text.isascii() and text.isdigit()):
        raise LaunchError(Problem(f"{name} is not a whole number", f"correct {name}", text))
    return int(text)


def _join_mpi(backend: Backend, timeout: float) -> None:
    """Ask MPI for rank and size; rank 0 opens the store and tells the others where."""
    from shardproof.backends.mpi import group
    from shardproof.launch.mpi.mpirun import unlink_segments

    found = group.start()
    comm = found.COMM_WORLD
    rank, world, store = comm.Get_rank(), comm.Get_size(), None
    one_node = comm.Split_type(found.COMM_TYPE_SHARED).Get_size() == world
    if rank == 0:
        store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    host = "127.0.0.1" if one_node else socket.gethostname()
    host, port = comm.bcast((host, store.port if store is not None else 0), root=0)
    if store is None:
        store = dist.TCPStore(host, port, is_master=False, wait_for_workers=False)
    joined.join(backend, Joining(rank, world, store, timeout, ledgers=False))
    unlink_segments()
    atexit.register(_end_mpi)


def _end_mpi() -> None:
    """Leave MPI in order; after an error its mpirun ends the other ranks, which may wait."""
    from shardproof.backends.mpi import group

    if (error := getattr(sys, "last_value", None)) is not None:
        joined.tell_failure(error)
        return
    if (world := _WORLD.get()) is not None:
        world.leave()
    group.stop()


def _interface_to(address: str) -> str | None:
    """The network interface that leads to ``address``; gloo would take that of the host's name."""
    try:
        first, *_ = socket.getaddrinfo(address, 9, type=socket.SOCK_DGRAM)
        family, kind, protocol, _, target = first
        with socket.socket(family, kind, protocol) as probe:
            probe.connect(target)  # sends nothing: only chooses the route
            own = probe.getsockname()[0]
    except OSError:
        return None
    named = psutil.net_if_addrs().items()
    return next((n for n, all_ in named if any(e.address.split("%")[0] == own for e in all_)), None)
