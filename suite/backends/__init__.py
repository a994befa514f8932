"""Communication backends. Each is a torch.distributed one, so upstream systems run unchanged."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch.distributed as dist
from torch.distributed import Store

from shardproof import comm
from shardproof.backends import base, cuda, faults, gloo, in_memory, meeting, mpi, nccl
from shardproof.backends.base import Peer, listen
from shardproof.backends.disturbances import Disturbances, disturbances_of
from shardproof.backends.in_memory import Hub
from shardproof.ledgers import program_order, traffic

__all__ = [
    "BACKENDS",
    "Backend",
    "Hub",
    "Peer",
    "join",
    "leave",
    "listen",
    "tell_failure",
    "Disturbances",
    "disturbances_of",
]

comm.meet = meeting.meet


@dataclass(frozen=True)
class Backend:
    """A backend as scenarios name it; ``threads``: its ranks are threads of one process."""

    name: str
    threads: bool
    #: Where tensors lie: ranks make their models and batches there.
    device: str = "cpu"
    #: Whether a rank can send a tensor to one other rank, as stages of pipelines do.
    sends: bool = True
    #: Whether a rank burns CPU while it waits inside a call.
    polls: bool = False
    #: Whether sums are left folds in rank order, at any world size.
    in_rank_order: bool = False
    #: Whether ranks are processes that an ``mpirun`` started.
    mpirun: bool = False
    #: Whether ``--backend`` moves the cells of other backends to it: it is a value of few matrices.
    takes_over: bool = False

    def available(self, world: int = 1) -> str | None:
        """``None`` if ``world`` ranks can use it on this machine, else the reason why not."""
        if self.name == "nccl":
            return nccl.available(world)
        if self.mpirun:
            return mpi.available()
        if self.threads:
            return None
        return gloo.available(on_gpus=self.device == "cuda")

    def adds_in_order(self, ranks: int) -> bool:
        """Whether sums over ``ranks`` are those of a left fold in rank order."""
        return ranks <= 2 or self.in_rank_order

    def adds_like_one(self, ranks: int) -> bool:
        """Whether such sums have the bits of one process's, which computes on a CPU."""
        return self.device == "cpu" and self.adds_in_order(ranks)


BACKENDS: dict[str, Backend] = {
    "in_memory": Backend("in_memory", threads=True, in_rank_order=True),
    "gloo": Backend("gloo", threads=False),
    # gloo copies CUDA tensors through the host; ranks may share a GPU, which NCCL refuses.
    "gloo_cuda": Backend("gloo_cuda", threads=False, device="cuda", sends=False, takes_over=True),
    "nccl": Backend("nccl", threads=False, device="cuda", polls=True, takes_over=True),
    "mpi": Backend(
        "mpi", threads=False, polls=True, in_rank_order=True, mpirun=True, takes_over=True
    ),
}


def join(
    backend: str | Backend,
    rank: int,
    world: int,
    rendezvous: Path | Store,
    timeout_s: float,
    ledgers: bool,
    hub: Hub | None = None,
    disturbances: Disturbances | None = None,
) -> None:
    """Initialise the default process group for this rank (a thread or a process).

    ``rendezvous`` is a file that does not exist yet, or a store, the same for all ranks (unused by
    threads);
    ``hub`` is shared by the threads of ``in_memory``.  With ``ledgers`` the rank's log and traffic
    ledger are ``program_order.current()`` and ``traffic.current()``.  Raises ``ValueError`` for an
    unknown backend or a missing or misfitting hub.
    """
    chosen = backend if isinstance(backend, Backend) else BACKENDS.get(backend)
    if chosen is None:
        raise ValueError(f"unknown backend {backend!r}; known: {', '.join(BACKENDS)}")
    if chosen.threads and (hub is None or hub.world != world):
        raise ValueError(f"{chosen.name} needs the hub that its {world} ranks share")
    log, is_process = program_order.RankLog() if ledgers else None, not chosen.threads
    fault = disturbances.fault if disturbances is not None else None
    injection = faults.Injection(fault) if fault and log and fault.rank == rank else None
    base.INJECTION.set(injection, process=is_process)
    if log and injection:
        log.listener = injection.event
    program_order.install(log, process=is_process)
    traffic.install(traffic.TrafficLedger(log) if log else None, process=is_process)
    if chosen.threads and hub is not None:
        in_memory.join(rank, hub, disturbances)
    elif chosen.mpirun:
        mpi.join(rank, world, rendezvous, timeout_s, disturbances)
    else:
        if chosen.device == "cuda":
            cuda.take(rank)
        native = nccl.LoggedNccl if chosen.name == "nccl" else gloo.LoggedGloo
        native.join(rank, world, rendezvous, timeout_s, ledgers, disturbances)


def tell_failure(error: BaseException) -> None:
    """This rank raised ``error``: wake the others, where the backend cannot see it by itself."""
    if mpi.is_rank():
        mpi.tell_failure(error)


def leave() -> bool:
    """Destroy this rank's process groups.  Its ledgers stay readable until the next ``join``.

    Returns whether all of its calls had come to their end, as far as the backend can tell.
    """
    if in_memory.is_rank():
        in_memory.leave()
    elif mpi.is_rank():
        return mpi.leave()
    elif dist.is_initialized() and dist.get_backend() in ("nccl", "logged_nccl"):
        nccl.LoggedNccl.leave()
    else:
        gloo.LoggedGloo.leave()
    return True
