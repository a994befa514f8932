"""How the calling rank (a thread or a process) joins a backend, meets other ranks, and leaves it.

Ranks meet outside of any process group while they are to make one: in the default group's store.
Time is no evidence there either: a rank that computes is waited for.  Whoever ends, or waits
elsewhere for a rank that is here, will never come; that is told at once, by name, before a native
group would hang.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from shardproof import comm
from shardproof.backends import BACKENDS, base, errors, faults, heartbeat
from shardproof.backends.backend import Backend, Joining
from shardproof.ledgers import program_order, traffic

#: Most seconds between two looks at who has come, and of the time waited until the next.
LONGEST_LOOK, LOOK_SHARE = 0.01, 0.1
#: Seconds between two looks at what the others do, and looks in which ranks that all wait do
#: nothing else before they stand still: half of the watchdog's, so that this sentence comes first.
TICK_SECONDS, WAITING_LOOKS = 0.05, 100


def join(backend: str | Backend, joining: Joining) -> None:
    """Initialize the default process group for this rank.

    With ledgers the rank's log and traffic ledger are ``program_order.current()`` and
    ``traffic.current()``.  Raises ``ValueError`` for an unknown backend or a missing or misfitting
    hub.
    """
    chosen = backend if isinstance(backend, Backend) else BACKENDS.get(backend)
    if chosen is None:
        raise ValueError(f"unknown backend {backend!r}; known: {', '.join(BACKENDS)}")
    log, is_process = program_order.RankLog() if joining.ledgers else None, not chosen.threads
    fault = joining.disturbances.fault if joining.disturbances is not None else None
    injection = faults.Injection(fault) if fault and log and fault.rank == joining.rank else None
    base.INJECTION.set(injection, process=is_process)
    if log and injection:
        log.listener = injection.event
    program_order.install(log, process=is_process)
    traffic.install(traffic.TrafficLedger(log) if log else None, process=is_process)
    chosen.join(joining)
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


def meet(ranks: Sequence[int], own: int, place: str, text: str) -> None:
    """Return when all global ``ranks`` say ``text`` at ``place``; this is rank ``own``.

    :raises CollectiveMismatch: a rank says something else there, or waits elsewhere for good.
    :raises RankFailed: a rank has ended, well or not.
    :raises PeerTimeout: a rank has not come within the store's time limit.
    """
    store: Any = c10d._get_default_store()
    store.set(f"{place}/{own}", text)
    began, there, evidence = time.monotonic(), {own}, _Evidence()
    log = program_order.current()
    heartbeat.note(text, log.number if log else -1)
    with base.blocked():
        while True:
            for rank in set(ranks) - there:
                if store.check([f"{place}/{rank}"]):
                    there.add(rank)
                    said = store.get(f"{place}/{rank}").decode()
                    if said != text:
                        (a, one), (b, other) = sorted([(own, text), (rank, said)])
                        what = f"rank {a} calls {one}, but rank {b} calls {other}"
                        _fail(errors.CollectiveMismatch(what))
            missing = [rank for rank in ranks if rank not in there]
            if not missing:
                return
            found = evidence.look(sorted(there), missing)
            # Whoever came since the look above may wait elsewhere by now.
            lost = [rank for rank in found if not store.check([f"{place}/{rank}"])]
            if lost:
                _fail(found[lost[0]].error(lost[0], text))
            waited = time.monotonic() - began
            if waited > store.timeout.total_seconds():
                names = errors.name_ranks(missing)
                _fail(errors.PeerTimeout(f"{names} did not call {text} in {waited:.1f} s"))
            time.sleep(min(LONGEST_LOOK, waited * LOOK_SHARE))


def _fail(error: errors.CommError) -> NoReturn:
    if (backend := base.JOINED.get()) is not None:
        backend.give_up(error)
    raise error


class _Evidence:
    """The state of the other ranks, as one waiting rank has seen it."""

    def __init__(self) -> None:
        self._looked, self._looks = 0.0, 0
        self._seen: object = None

    def look(self, there: Sequence[int], missing: Sequence[int]) -> Mapping[int, errors.Absence]:
        """Those of ``missing`` who will never come while ``there`` wait.

        :raises CommError: the world of all ranks has failed.
        """
        backend = base.JOINED.get()
        known = backend.never_coming(there, missing) if backend is not None else None
        if known is not None:
            return known
        now = time.monotonic()
        if now - self._looked < TICK_SECONDS:
            return {}
        self._looked = now
        peers = {peer.rank: peer for peer in heartbeat.peers()}
        if not all(rank in peers for rank in missing):
            return {}
        for rank in missing:
            if peers[rank].ended:
                # A rank reports its error before it ends, so the error may be newer than `known`.
                known = backend.never_coming(there, missing) if backend is not None else None
                return known or {rank: errors.Absence(peers[rank].ended, ended=True)}
        # Every rank waits, each in the same call as before: nobody is left who could end that.
        seen = [(peer.rank, peer.event) for peer in peers.values()]
        waits = all(peer.waiting or peer.ended for peer in peers.values())
        self._looks = self._looks + 1 if waits and seen == self._seen else 0
        self._seen = seen
        if self._looks < WAITING_LOOKS:
            return {}
        calls = {rank: peers[rank].last_call or "its first call" for rank in missing}
        return {rank: errors.Absence(f"it waits in {call}") for rank, call in calls.items()}


comm.meet = meet
