"""Faults on purpose: what a fault plan does to one rank, at a place of its program.

A rank dies, stops, raises, exits or is late (``kill``, ``stop``, ``raise``, ``exit``, ``delay``)
where it first comes to the phase of the step; ``call`` calls later, if the plan says so.  One of
its calls is spoilt (``corrupt``: one bit of what it gives, ``drop``: the call is not made,
``swap``: it is made after the next one of the group, ``shape``: one element more) at the first
that can be.  What strikes a node is done from outside (:data:`strike_node`).  The moment is
written to the heartbeat, so that it is known whether the fault happened, also of a rank that it
kills.

Needs the program-order log, and so ledgers.

A member that dies inside a step (:func:`dying`) is another matter: its rank lives on, to help to
make the next groups.  Only a backend that ``outlives_members`` can let go of one: a native group
that lost one may fail or wait, depending on who is where.  The others learn of it where they wait
for a call that the dead has not made.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from shardproof import comm
from shardproof.backends import base, heartbeat
from shardproof.backends.backend import Backend
from shardproof.backends.base import Handle
from shardproof.backends.futures import OwnHandle
from shardproof.backends.request import Request
from shardproof.case import OF_CLUSTERS, OF_NODES, Fault
from shardproof.ledgers import program_order

#: What happens to the process, at a call or between two.
OF_PROCESSES = ("kill", "stop", "raise", "exit", "delay", *OF_NODES, *OF_CLUSTERS)
#: Carries out what a rank cannot do by itself, and returns when it is done; set where there are
#: nodes.
strike_node: Callable[[Fault], None] | None = None
#: Phases that come before all steps.
BEFORE_STEPS = ("setup", "load")
#: Operations whose calls can ask for one element more: their arguments begin with the tensors.
SHAPED = ("all_reduce", "broadcast", "reduce", "send", "recv")
EXIT_CODE = 7
#: The lowest bit of the exponent: the value doubles or halves.
_BITS = {
    torch.float64: (torch.int64, 52),
    torch.float32: (torch.int32, 23),
    torch.float16: (torch.int16, 10),
    torch.bfloat16: (torch.int16, 7),
}
Issue = Callable[[Request], Handle]


class InjectedFault(RuntimeError):
    """Raised in the rank that a fault plan names, and by nothing else."""


class Injection:
    """A fault of the calling rank, until it has happened."""

    def __init__(self, fault: Fault) -> None:
        self._fault, self._calls, self._happened = fault, 0, False
        self._held: _Held | None = None

    def event(self) -> None:
        """The rank's log has a new event, perhaps a new phase."""
        fault = self._fault
        if not self._happened and fault.kind in OF_PROCESSES and not fault.call and self._is_here():
            self._strike()

    def call(self, request: Request, group: object, issue: Issue) -> Handle:
        """Issue ``request`` by ``issue``, or what the fault makes of it."""
        if self._held is not None and self._held.group is group:
            held, self._held = self._held, None
            if held.real is None:  # nobody waited for it: now they are exchanged
                self._happens()
                handle = issue(request)
                held.issue()
                return handle
        if self._happened or self._held is not None or not self._is_here():
            return issue(request)
        fault, self._calls = self._fault, self._calls + 1
        if self._calls <= fault.call:
            return issue(request)
        if fault.kind in OF_PROCESSES:
            self._strike()
            return issue(request)
        if fault.kind == "swap":
            self._held = _Held(request, group, issue)
            return self._held
        if fault.kind == "drop":
            self._happens()
            return _Dropped(request)
        changed = _corrupted(request) if fault.kind == "corrupt" else _longer(request)
        if changed is not None:
            self._happens()
        return issue(changed or request)

    def _is_here(self) -> bool:
        log = program_order.current()
        if log is None or log.phase != self._fault.phase:
            return False
        return log.number == (-1 if self._fault.phase in BEFORE_STEPS else self._fault.step)

    def _happens(self) -> None:
        self._happened = True
        heartbeat.inject()

    def _strike(self) -> None:
        self._happens()
        fault = self._fault
        if fault.strikes_nodes:
            assert strike_node is not None
            strike_node(fault)
        elif fault.kind == "delay":
            time.sleep(fault.seconds)
        elif fault.kind == "exit":
            os._exit(EXIT_CODE)
        elif fault.kind == "raise":
            where = f"step {fault.step}, {fault.phase}"
            raise InjectedFault(f"the fault plan raises this error on rank {fault.rank}: {where}")
        else:
            os.kill(os.getpid(), signal.SIGKILL if fault.kind == "kill" else signal.SIGSTOP)


class _Dropped(Handle):
    """A call that was not made: over at once, and the outputs stay as they were."""

    def _settle(self, timeout: float | None) -> None:
        """Nothing to wait for."""

    def is_completed(self) -> bool:
        return True

    def _future(self) -> Any:
        future: Any = torch.futures.Future()
        future.set_result([tensor for item in self.request.outputs for tensor in item])
        return future


class _Held(OwnHandle):
    """A call that is made when the next one of its group has been, or when it is waited for."""

    def __init__(self, request: Request, group: object, issue: Issue) -> None:
        super().__init__(request)
        self.group, self._issue = group, issue
        self.real: Handle | None = None

    def issue(self) -> Handle:
        """Make the call, once."""
        if self.real is None:
            self.real = self._issue(self.request)
            self.noted = self.real.noted
        return self.real

    def _settle(self, timeout: float | None) -> None:
        self.issue().wait()

    def is_completed(self) -> bool:
        return self.real is not None and self.real.is_completed()


def _corrupted(request: Request) -> Request | None:
    """The same, one bit of what this rank gives flipped in place; ``None``: no bit of it counts."""
    for tensor in (t.detach() for item in request.inputs for t in item):
        if tensor.dtype in _BITS and tensor.numel() and tensor.is_contiguous():
            whole, bit = _BITS[tensor.dtype]
            flat = tensor.view(-1)
            largest = int(flat.abs().argmax())
            if flat[largest]:
                with torch.no_grad():
                    flat.view(whole)[largest] ^= 1 << bit
                return request
    return None


def _longer(request: Request) -> Request | None:
    """The same for tensors with one element more; ``None``: the operation has no such call."""
    if request.operation not in SHAPED:
        return None
    given = request.args[0]
    tensors: Sequence[Tensor] = [given] if isinstance(given, Tensor) else given
    longer = [torch.cat([t.detach().flatten(), t.new_zeros(1)]) for t in tensors]
    items = [[tensor] for tensor in longer]
    return replace(
        request,
        inputs=items if request.inputs else [],
        outputs=items if request.outputs else [],
        args=(longer[0] if isinstance(given, Tensor) else longer, *request.args[1:]),
    )


def _backend() -> Backend:
    backend = base.JOINED.get()
    assert backend is not None
    return backend


class Died(BaseException):
    """Raised in the member that is to die: no system that catches errors keeps it alive."""


class _Dying:
    """The calls that are left to the calling rank."""

    def __init__(self, calls: int) -> None:
        self.left = calls

    def call(self, request: Request, group: object, issue: Issue) -> Handle:
        """Issue ``request``, unless the rank dies of it."""
        if not self.left:
            _backend().depart()
            raise Died
        self.left -= 1
        return issue(request)


@contextmanager
def dying(call: int) -> Iterator[None]:
    """The calling rank dies inside, right before its call number ``call``."""
    base.INJECTION.set(_Dying(call), process=False)
    try:
        yield
    finally:
        base.INJECTION.set(None, process=False)


def renew(rank: int, world: int, place: str) -> None:
    """Let all groups forget calls that were never completed; every rank of the world comes here."""
    ranks, text = range(world), f"the new groups after {place}"
    comm.meet(ranks, rank, f"{place}/gone", text)
    if rank == 0:
        _backend().renew()
    comm.meet(ranks, rank, f"{place}/renewed", text)
