"""MPI by mpi4py: a process group of our own over any MPI that mpi4py finds.

Processes that an ``mpirun`` started; one thread of each calls MPI.  The default group has a copy of
``COMM_WORLD``, every other group a communicator of its members, freed with the group.  What the
calls do is in ``messages.py`` and ``calls.py``; ``launch/mpi/mpirun.py`` starts ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from shardproof.backends.backend import Joining
from shardproof.backends.base import GroupBase, Handle, blocked
from shardproof.backends.disturbances import Disturbances, poison
from shardproof.backends.futures import OwnHandle, announce_delayed_reduction
from shardproof.backends.request import Request, check

if TYPE_CHECKING:
    from shardproof.backends.mpi.calls import Calls, CallUnderWay

#: torch keeps ``mpi`` for a backend of its own, which no wheel of torch contains.
NAME = "shardproof_mpi"
#: Seconds that a rank which ends goes on serving what others still need of it.
PARTING_SECONDS = 5.0


class _World:
    """The state that the groups of this process share, from :func:`join` to :func:`leave`."""

    def __init__(self, comm: Any, store: dist.Store, disturbances: Disturbances | None) -> None:
        from shardproof.backends.mpi.calls import Calls

        self.comm, self.disturbances = comm, disturbances
        self.calls: Calls = Calls(store)
        self.rank = int(comm.Get_rank())
        #: Whether calls were left unfinished: MPI may still hold their messages.
        self.unfinished = False


_world: _World | None = None


class _Handle(OwnHandle):
    def __init__(
        self, request: Request, calls: Calls, call: CallUnderWay, timeout: timedelta
    ) -> None:
        super().__init__(request)
        self._all, self._own, self._limit = calls, call, timeout.total_seconds()

    def _settle(self, timeout: float | None) -> None:
        if not self._own.done:
            self._all.wait(self._own, timeout or self._limit)

    def is_completed(self) -> bool:
        if not self._own.done:
            self._all.advance()
        return self._own.done

    def _source_rank(self) -> int:
        return self._own.source

    source_rank = _source_rank


class MpiGroup(GroupBase):
    """This rank's side of a group; ``ranks`` are global ones, in group order."""

    backend_name = NAME
    #: Ranks of one machine; what others wait in tells the store (``calls.py``).
    compares = True

    def __init__(self, world: _World, ranks: tuple[int, ...], name: str, timeout: timedelta):
        from shardproof.backends.mpi.messages import MPI, Mail

        super().__init__(ranks.index(world.rank), len(ranks), timeout, ranks)
        self._world, self._name, self._count = world, name, 0
        # Both wait for all members inside MPI.
        with blocked():
            if c10d.is_initialized():
                group = world.comm.Get_group().Incl(list(ranks))
                self._comm = world.comm.Create_group(group, 0)
                group.Free()
            else:
                self._comm = world.comm.Dup()
        self._comm.Set_errhandler(MPI.ERRORS_RETURN)
        self._mail = Mail(self._comm)
        if world.disturbances is not None:
            self.transform = world.disturbances.skew(world.rank)

    def _start(self, request: Request) -> Handle:
        check(request, self._size, self._rank)
        world = self._world
        if world.disturbances is not None and world.disturbances.poison:
            poison(request, self._rank, keep_inputs=False)
        if request.operation in ("send", "recv"):
            tag, key = self._mail.own_tag(request.tag), ""
        else:
            tag = self._mail.tag(self._count, request.agreed())
            key = f"call/{self._name}/{self._count}"
            self._count += 1
        call = world.calls.begin(request, self._mail, self._members, tag, key)
        return _Handle(request, world.calls, call, self._timeout)

    def abort(self) -> None:
        """End the world of all ranks."""
        self._world.calls.tell_failure(
            self._world.rank, RuntimeError("the process group was aborted")
        )

    def shutdown(self) -> None:
        """Free the communicator, unless calls were left unfinished on it."""
        from shardproof.backends.mpi.calls import MPI

        comm, self._comm = self._comm, None
        if comm is None or self._world.unfinished:
            return
        try:
            with blocked():
                comm.Free()
        except MPI.Exception:  # MPICH: a message came that nobody asked for
            self._world.unfinished = True


def _create(options: Any, _: Any) -> MpiGroup:
    assert _world is not None
    ranks = tuple(options.global_ranks_in_group) or tuple(range(_world.comm.Get_size()))
    return MpiGroup(_world, ranks, str(options.group_id), options.timeout)


def start() -> Any:
    """Initialise MPI in this process, unless that was done; its module ``MPI``."""
    import mpi4py

    mpi4py.rc.initialize = mpi4py.rc.finalize = False
    from mpi4py import MPI

    if not MPI.Is_initialized():
        with blocked():
            MPI.Init_thread(MPI.THREAD_FUNNELED)
    return MPI


def stop() -> None:
    """Finalise MPI, unless unanswered calls are left: it might wait for them."""
    from shardproof.backends.mpi.calls import MPI, abandoned

    if MPI.Is_initialized() and not MPI.Is_finalized() and not abandoned:
        MPI.Finalize()


def join(joining: Joining) -> None:
    """Join the default group of the processes of an ``mpirun``.

    :raises RuntimeError: MPI gives this process another rank, or another number of ranks.
    """
    global _world
    comm, rank, world = start().COMM_WORLD, joining.rank, joining.world
    if (comm.Get_rank(), comm.Get_size()) != (rank, world):
        raise RuntimeError(
            f"MPI gives this process rank {comm.Get_rank()} of {comm.Get_size()}, expected rank "
            f"{rank} of {world}: use `mpirun -np {world}` from the MPI library of mpi4py"
        )
    limit, store = joining.timeout, joining.store
    c10d.default_pg_timeout = limit  # of groups made later
    announce_delayed_reduction()
    _world = _World(comm, dist.PrefixStore(NAME, store), joining.disturbances)
    if NAME.upper() not in dist.Backend._plugins:
        dist.Backend.register_backend(NAME, _create, extended_api=True, devices=["cpu"])
    dist.init_process_group(NAME, rank=rank, world_size=world, store=store, timeout=limit)


def ended(ranks: Sequence[int]) -> list[int]:
    """Those of ``ranks`` that make no more calls; lets own calls progress, which may wait.

    :raises CommError: a rank has failed.
    """
    assert _world is not None
    return _world.calls.ended(ranks)


def tell_failure(error: BaseException) -> None:
    """Wake the ranks that wait: this one raised ``error``."""
    if _world is not None:
        _world.calls.tell_failure(_world.rank, error)


def leave() -> bool:
    """Destroy all groups of this process; whether nothing was left unfinished."""
    global _world
    left, _world = _world, None
    assert left is not None
    left.unfinished = not left.calls.end(left.rank, PARTING_SECONDS)
    if dist.is_initialized():
        dist.destroy_process_group()
    return not left.unfinished
