"""The process group that all our backends share: many method names in, a few plain requests out.

torch calls a group by about twenty names (Python, C++, and names that changed between 2.11 and
2.13).  :class:`GroupBase` turns each into a :class:`Request` (what goes in, what comes out, per
item), writes it to the traffic ledger and the heartbeat, and leaves only ``_start`` to a backend:
begin the request and return a :class:`Handle`.

Waiting is recorded in program order by the handle.  Two callers take a C++ future instead of
waiting: DDP's reducer and its communication hooks.  They consume it when backward ends, so a future
taken inside a backward pass counts as waited for there: a callback queued on the pass runs before
the reducer's own, which is queued later.
"""

from __future__ import annotations

import zlib
from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from functools import partial, partialmethod
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from shardproof import axes
from shardproof.backends import heartbeat
from shardproof.backends.backend import Backend
from shardproof.backends.errors import CollectiveMismatch, differing_calls, spans
from shardproof.backends.request import (
    Request,
    chunks,
    listed,
    reduction,
    root_of,
    rows,
    wholes,
)
from shardproof.comm import BACKGROUND
from shardproof.ledgers import program_order, traffic
from shardproof.ledgers.memory import installed
from shardproof.ledgers.program_order import inside_backward

#: Called like the heartbeat when the calling rank begins or ends to be blocked (``shardproof
#: watch`` puts its own here); ``bool`` does nothing.
on_wait: Callable[[bool], object] = bool


@contextmanager
def blocked(call: int = 0) -> Iterator[None]:
    """The calling rank waits for others inside: whatever it burns there is no work.

    ``call``: the number under which the heartbeat knows what it waits in (0: it is not known).
    """
    heartbeat.wait(True, call)
    on_wait(True)
    try:
        yield
    finally:
        heartbeat.wait(False, call)
        on_wait(False)


class Handle(dist.Work):
    """The handle that a call returns. A backend supplies ``_settle`` (block until the result is
    there).
    """

    def __init__(self, request: Request) -> None:
        super().__init__()
        self.request = request
        #: The ledger that has this call, and its rows there.
        self.ledger: traffic.TrafficLedger | None = None
        self.rows: list[traffic.LoggedCall] = []
        #: The number under which the heartbeat knows this call.
        self.noted = 0
        self.in_background = False

    @abstractmethod
    def _settle(self, timeout: float | None) -> None:
        """Return when the result is in the output tensors; raise what went wrong."""

    @abstractmethod
    def _future(self) -> Any:
        """A future of the output tensors."""

    @abstractmethod
    def is_completed(self) -> bool:
        """Whether the result is there, without waiting."""

    def is_success(self) -> bool:  # torch's own says so of every call that has not failed yet
        return self.is_completed() and self.exception() is None

    def note_wait(self) -> None:
        """The program waits for this call now."""
        if self.ledger is not None:
            self.ledger.waited(self.rows)

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Return when the result is visible; ``timeout`` of zero or ``None`` means the group's."""
        self.note_wait()
        self._block(timeout.total_seconds() if timeout else None)
        return True

    def _block(self, timeout: float | None) -> None:
        with nullcontext() if self.in_background else blocked(self.noted):
            self._settle(timeout)

    def synchronize(self) -> None:
        self.wait()

    def get_future(self) -> Any:
        """A future of the result, for DDP's reducer and hooks (see the module)."""
        if inside_backward():
            torch.autograd.Variable._execution_engine.queue_callback(self._backward_ended)
        else:
            self._taken_outside_backward()
        return self._future()

    def _backward_ended(self) -> None:
        self.note_wait()

    def _taken_outside_backward(self) -> None:
        """The earliest moment is recorded: the wait for a C++ future cannot be seen."""
        self.note_wait()

    def result(self) -> list[Tensor]:
        self.wait()
        return [tensor for item in self.request.outputs for tensor in item]

    def exception(self) -> Any:
        return None


class Injected(Protocol):
    """A fault plan of the calling rank."""

    def call(self, request: Request, group: object, issue: Callable[[Request], Handle]) -> Handle:
        """Issue ``request`` by ``issue``, or what the fault makes of it."""


#: The fault plan of the calling rank, if it has one (``faults.py``).
INJECTION: program_order.PerRank[Injected] = program_order.PerRank()
#: The backend that the calling rank has joined (``joined.py``).
JOINED: program_order.PerRank[Backend] = program_order.PerRank()


class GroupBase(dist.ProcessGroup):
    """A Python process group: normalises, records and hands on.

    ``transform`` is the place for injected delays, faults and backend mutants: it sees every
    request before it starts and returns the one to start.
    """

    backend_name = ""
    #: Whether calls that cannot match are told by what ranks say of them, before the backend gets
    #: them: one that does not see it by itself.
    compares = False

    def __init__(
        self, rank: int, size: int, timeout: timedelta, members: tuple[int, ...] = ()
    ) -> None:
        super().__init__(rank, size)  # type: ignore[call-arg]
        self._rank, self._size, self._members = rank, size, members
        self._timeout = timeout
        self._name = self._description = self._spelt = ""
        self.transform: Callable[[Request], Request] | None = None
        #: What stands for the group where calls are noted, and how many collective ones it made.
        self._group_number = self._collectives = 0

    # ------------------------------------------------------------------- identity, asked by torch

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return self._size

    getRank, getSize = rank, size

    def name(self) -> str:
        return self.backend_name

    getBackendName = _get_backend_name = name

    def _set_group_name(self, name: str) -> None:
        self._name = name

    def _set_group_desc(self, description: str) -> None:
        self._description = description

    def getGroupName(self) -> str:
        return self._name

    def getGroupDesc(self) -> str:
        """The purpose of the group: DeviceMesh says ``mesh_<axis>``."""
        return self._description

    # torch's own properties need a C++ backend.
    group_name = property(getGroupName)
    group_desc = property(getGroupDesc)

    @property
    def _device_types(self) -> list[torch.device]:
        """Devices whose tensors the group takes, asked by FSDP1's and asynchronous checkpoints."""
        return [torch.device("cpu")]

    def set_timeout(self, timeout: timedelta) -> None:
        """Change how long a call may wait for its peers."""
        self._timeout = timeout

    _set_timeout = set_timeout

    @property
    def global_ranks(self) -> tuple[int, ...]:
        """Global ranks of the members, in group order."""
        return self._members

    @property
    def axis(self) -> str:
        """Mesh axis of the group, if torch was given it."""
        if self._description.startswith("mesh_"):
            return self._description.removeprefix("mesh_")
        return "world" if self._description == "default_pg" else ""

    # ---------------------------------------------------------------------------- the one funnel

    @abstractmethod
    def _start(self, request: Request) -> Handle:
        """Begin ``request`` without waiting for anybody."""

    def _issue(self, request: Request) -> Handle:
        if self._description == BACKGROUND:  # of no step, and on a thread that is no rank's
            handle = self._start(request)
            handle.in_background = True
            return handle
        injection = INJECTION.get()
        if injection is not None:
            return injection.call(request, self, self._issue_as_it_is)
        return self._issue_as_it_is(request)

    def _issue_as_it_is(self, request: Request) -> Handle:
        if self.transform is not None:
            request = self.transform(request)
        request.where = self._where()
        noted = self._note(request)
        ledger, calls = traffic.current(), list[traffic.LoggedCall]()
        tensors = [t for item in (*request.inputs, *request.outputs) for t in wholes(item)]
        installed.communicated(tensors)
        if ledger is not None:
            loads = request.loads(self._size, self._rank)
            ranks, peer = self.global_ranks, request.peer
            if peer is not None:  # one beyond the group is refused, or not, by the backend
                peer = ranks[peer] if 0 <= peer < len(ranks) else None
            strided = not all(tensor.is_contiguous() for tensor in tensors)
            calls = ledger.record(request.operation, ranks, self.axis, loads, peer, strided)
            if request.operation in ("send", "recv"):
                ((tensor,),) = request.inputs or request.outputs
                if installed.at_release(tensor, partial(ledger.released, calls)):
                    ledger.released(calls, traffic.NEVER)
        handle = self._start(request)
        handle.noted, handle.ledger, handle.rows = noted, ledger, calls
        return handle

    def _where(self) -> str:
        """The axis in words, and the layer if activations travel; empty: all ranks are in it."""
        if not self.axis or self._size == dist.get_world_size():
            return ""
        log = program_order.current() if axes.exchanging(self.axis.split("+")) else None
        return f" of axis {self.axis}" + (f", layer {log.layer}" if log and log.layer else "")

    def _note(self, request: Request) -> int:
        """Write it to the heartbeat; its number there.

        :raises CollectiveMismatch: another rank's call of this number differs from ``request``.
        """
        if (writer := heartbeat.current()) is None:
            return 0
        ranks = self.global_ranks
        group = self._group_number = self._group_number or writer.group(f"{self._name}/{ranks}")
        number = digest = 0
        if request.operation not in ("send", "recv"):
            number = self._collectives = self._collectives + 1
            digest = zlib.crc32(request.agreed().encode())
        log, text = program_order.current(), request.text()
        step = log.number if log else -1
        # Once a group: to spell N ranks at each call of each of them is N^2 work.
        # All ranks are listed: readers of the heartbeat count them (``members_of``).
        self._spelt = self._spelt or f"rank{'s' * (len(ranks) > 1)} {spans(ranks)}"
        noted = writer.note(f"{text} on {self._spelt}", group, number, digest, step)
        if self.compares and number:
            others = writer.differing(ranks, group, number, digest)
            if others:
                calls = {rank: told.rpartition(" on ")[0] for rank, told in others.items()}
                calls[ranks[self._rank]] = text
                raise CollectiveMismatch(differing_calls(number - 1, ranks, calls))
        return noted

    # ---------------------------------------------------------------- collectives, as torch calls

    def _call(
        self,
        operation: str,
        method: str,
        given: tuple[Any, ...],
        inputs: Sequence[Sequence[Tensor]] = (),
        outputs: Sequence[Sequence[Tensor]] = (),
        **fields: Any,
    ) -> Handle:
        """Issue what torch called by ``method(*given)``."""
        if operation in ("all_reduce", "reduce", "reduce_scatter"):
            fields["reduce"] = reduction(given)
        if operation in ("broadcast", "reduce", "gather", "scatter"):
            fields["root"] = root_of(given)
        sides = list(inputs), list(outputs)
        return self._issue(Request(operation, *sides, method=method, args=given, **fields))

    def _in_place(self, operation: str, method: str, tensors: Any, *args: Any) -> Handle:
        items = _singly(listed(tensors))
        return self._call(operation, method, (tensors, *args), items, items)

    allreduce = partialmethod(_in_place, "all_reduce", "allreduce")
    allreduce_coalesced = partialmethod(_in_place, "all_reduce", "allreduce_coalesced")
    broadcast = partialmethod(_in_place, "broadcast", "broadcast")
    reduce = partialmethod(_in_place, "reduce", "reduce")

    def allgather(self, outputs: Any, inputs: Any, *args: Any) -> Handle:
        """Collect every rank's tensor in a list; sizes may differ between ranks."""
        given = (outputs, inputs, *args)
        if isinstance(inputs, Tensor):
            outputs, inputs = [outputs], [inputs]
        return self._call("all_gather", "allgather", given, _singly(inputs), outputs)

    def allgather_coalesced(
        self, output_lists: list[list[Tensor]], inputs: list[Tensor], *args: Any
    ) -> Handle:
        """Several tensors; ``output_lists[rank][item]``."""
        outputs = [list(column) for column in zip(*output_lists, strict=True)]
        given = (output_lists, inputs, *args)
        return self._call("all_gather", "allgather_coalesced", given, _singly(inputs), outputs)

    def _chunks(self, tensor: Tensor) -> Sequence[Tensor]:
        """The part of ``tensor`` for each rank."""
        return chunks(tensor, self._size)

    def _by_chunks(self, operation: str, method: str, *given: Any) -> Handle:
        """A call of (outputs, inputs, ...) whose larger side holds a chunk of every rank."""
        outputs, inputs = map(listed, given[:2])
        if operation == "all_gather":
            parts = [self._chunks(t) for t in outputs]
            return self._call(operation, method, given, _singly(inputs), parts)
        parts = [self._chunks(t) for t in inputs]
        return self._call(operation, method, given, parts, _singly(outputs))

    #: Concatenate every rank's tensor in the first argument.
    all_gather_single = partialmethod(_by_chunks, "all_gather", "all_gather_single")
    all_gather_single_coalesced = partialmethod(
        _by_chunks, "all_gather", "all_gather_single_coalesced"
    )
    #: Combine the second argument over ranks; rank r receives its r-th chunk.
    reduce_scatter_single = partialmethod(_by_chunks, "reduce_scatter", "reduce_scatter_single")
    reduce_scatter_single_coalesced = partialmethod(
        _by_chunks, "reduce_scatter", "reduce_scatter_single_coalesced"
    )

    def reduce_scatter(self, outputs: Any, inputs: Any, *args: Any) -> Handle:
        """Combine lists over ranks; rank r receives the r-th."""
        given = (outputs, inputs, *args)
        if isinstance(outputs, Tensor):
            outputs, inputs = [outputs], [inputs]
        return self._call("reduce_scatter", "reduce_scatter", given, inputs, _singly(outputs))

    def gather(self, outputs: Any, inputs: Any, *args: Any) -> Handle:
        given = (outputs, inputs, *args)
        if isinstance(inputs, Tensor):
            outputs, inputs = [outputs] if outputs else [], [inputs]
        lists = outputs if self._rank == root_of(args) else []
        return self._call("gather", "gather", given, _singly(inputs), lists)

    def scatter(self, outputs: Any, inputs: Any, *args: Any) -> Handle:
        given = (outputs, inputs, *args)
        if isinstance(outputs, Tensor):
            outputs, inputs = [outputs], [inputs] if inputs else []
        lists = inputs if self._rank == root_of(args) else []
        return self._call("scatter", "scatter", given, lists, _singly(outputs))

    def alltoall(self, outputs: list[Tensor], inputs: list[Tensor], *args: Any) -> Handle:
        """Send the r-th input to rank r."""
        given = (outputs, inputs, *args)
        return self._call("all_to_all", "alltoall", given, [list(inputs)], [list(outputs)])

    def all_to_all_single(
        self,
        output: Tensor,
        input: Tensor,
        output_splits: list[int] | None = None,
        input_splits: list[int] | None = None,
        *args: Any,
    ) -> Handle:
        """Send the r-th part of ``input`` to rank r: rows, equally many unless splits say."""
        given = (output, input, output_splits or [], input_splits or [], *args)
        inputs = rows(input, input_splits, self._size)
        outputs = rows(output, output_splits, self._size)
        return self._call("all_to_all", "all_to_all_single", given, [inputs], [outputs])

    def barrier(self, *args: Any, **options: Any) -> Handle:
        return self._call("barrier", "barrier", (*args, *options.values()))

    def monitored_barrier(self, *args: Any, **options: Any) -> None:
        """A barrier; a backend of ours names who is missing anyway."""
        self.barrier().wait()

    def send(self, tensors: list[Tensor], destination: int, tag: int = 0) -> Handle:
        items, given = _singly(tensors), (tensors, destination, tag)
        return self._call("send", "send", given, items, peer=destination, tag=tag)

    def recv(self, tensors: list[Tensor], source: int, tag: int = 0) -> Handle:
        items, given = _singly(tensors), (tensors, source, tag)
        return self._call("recv", "recv", given, [], items, peer=source, tag=tag)

    def recv_anysource(self, tensors: list[Tensor], tag: int = 0) -> Handle:
        items, given = _singly(tensors), (tensors, tag)
        return self._call("recv", "recv_anysource", given, [], items, peer=None, tag=tag)

    # Names before torch 2.13.
    _allgather_base = all_gather_single
    _reduce_scatter_base = reduce_scatter_single
    alltoall_base = all_to_all_single  # type: ignore[assignment]
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced


def _singly(tensors: list[Tensor]) -> list[list[Tensor]]:
    return [[tensor] for tensor in tensors]
