"""How the calling rank (a thread or a process) joins a backend, and leaves it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed import Store

from shardproof import comm
from shardproof.backends import BACKENDS, base, faults, meeting
from shardproof.backends.backend import Backend, Joining
from shardproof.backends.disturbances import Disturbances
from shardproof.ledgers import program_order, traffic

comm.meet = meeting.meet


def join(
    backend: str | Backend,
    rank: int,
    world: int,
    rendezvous: Path | Store,
    timeout_s: float,
    ledgers: bool,
    hub: Any = None,
    disturbances: Disturbances | None = None,
) -> None:
    """Initialize the default process group for this rank; the arguments are those of ``Joining``.

    With ``ledgers`` the rank's log and traffic ledger are ``program_order.current()`` and
    ``traffic.current()``.  Raises ``ValueError`` for an unknown backend or a missing or misfitting
    hub.
    """
    chosen = backend if isinstance(backend, Backend) else BACKENDS.get(backend)
    if chosen is None:
        raise ValueError(f"unknown backend {backend!r}; known: {', '.join(BACKENDS)}")
    log, is_process = program_order.RankLog() if ledgers else None, not chosen.threads
    fault = disturbances.fault if disturbances is not None else None
    injection = faults.Injection(fault) if fault and log and fault.rank == rank else None
    base.INJECTION.set(injection, process=is_process)
    if log and injection:
        log.listener = injection.event
    program_order.install(log, process=is_process)
    traffic.install(traffic.TrafficLedger(log) if log else None, process=is_process)
    chosen.join(Joining(rank, world, rendezvous, timeout_s, ledgers, hub, disturbances))
    base.JOINED.set(chosen, process=is_process)


def tell_failure(error: BaseException) -> None:
    """Wake the other ranks, where the backend does not see that this one raised ``error``."""
    if (backend := base.JOINED.get()) is not None:
        backend.tell_failure(error)


def leave() -> bool:
    """Destroy this rank's process groups.  Its ledgers stay readable until the next ``join``.

    Returns whether all of its calls had come to their end, as far as the backend can tell.
    """
    backend = base.JOINED.get()
    if backend is not None:
        base.JOINED.set(None, process=not backend.threads)
        return backend.leave()
    if dist.is_initialized():
        dist.destroy_process_group()
    return True
