"""The process group that all our backends share: many method names in, a few plain requests out.

torch calls a group by about twenty names (Python, C++, and names that changed between 2.11 and
2.13).  :class:`GroupBase` turns each into a :class:`Request` (what goes in, what comes out, per item),
writes it to the traffic ledger and the heartbeat, and leaves only ``_start`` to a backend: begin the
request and return a :class:`Handle`.

Waiting is recorded in program order by the handle.  Two callers take a C++ future instead of
waiting: DDP's reducer and its communication hooks.  They consume it when backward ends, so a future
taken inside a backward pass counts as waited for there: a callback queued on the pass runs before
the reducer's own, which is queued later.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from fractions import Fraction
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from suite.ledgers import traffic
from suite.ledgers.phases import inside_backward

_ReduceOp = dist.ReduceOp
_REDUCE_NAMES: dict[Any, str] = {
    _ReduceOp.SUM: "sum",
    _ReduceOp.AVG: "avg",
    _ReduceOp.MIN: "min",
    _ReduceOp.MAX: "max",
    _ReduceOp.PRODUCT: "product",
    _ReduceOp.BAND: "band",
    _ReduceOp.BOR: "bor",
    _ReduceOp.BXOR: "bxor",
}

#: Called with one line of text per call of this process's ranks; set by the launcher.
_listener: Callable[[str], None] | None = None


def listen(callback: Callable[[str], None] | None) -> None:
    """Send one line of text about every call made in this process to ``callback`` (heartbeat)."""
    global _listener
    _listener = callback


@dataclass
class Request:
    """A call in plain form: per item, the tensors that this rank gives and those that it receives.

    One tensor per item, or one per rank of the group where the operation needs it (outputs of an
    all-gather, inputs of a reduce-scatter, ...).  In-place operations list a tensor on both sides.
    ``method`` and ``args`` are the call as torch made it, for backends that pass it on.
    """

    operation: str
    inputs: list[list[Tensor]] = field(default_factory=list)
    outputs: list[list[Tensor]] = field(default_factory=list)
    reduce: str | None = None
    root: int | None = None
    peer: int | None = None
    tag: int = 0
    method: str = ""
    args: tuple[Any, ...] = ()

    def text(self) -> str:
        """The call in words: ``all_reduce(sum, float32[4])``."""
        items = self.inputs or self.outputs
        words = [self.reduce] if self.reduce else []
        if self.root is not None:
            words.append(f"root {self.root}")
        if self.operation == "send":
            words.append(f"to {self.peer}")
        elif self.operation == "recv":
            words.append("from any rank" if self.peer is None else f"from {self.peer}")
        if self.tag:
            words.append(f"tag {self.tag}")
        for item in items[:3]:
            count = "+".join(str(t.numel()) for t in item[:4]) + ("+..." if len(item) > 4 else "")
            words.append(f"{_name(item[0].dtype) if item else 'nothing'}[{count}]")
        if len(items) > 3:
            words.append(f"... {len(items)} tensors")
        return f"{self.operation}({', '.join(words)})"

    def loads(self, size: int, rank: int) -> list[tuple[str, bool, int, Fraction]]:
        """``(dtype, floating, payload bytes, share sent)`` for each dtype in the call."""
        received = self.operation in ("all_gather", "scatter", "recv")
        sides = self.outputs if received else self.inputs
        totals: dict[torch.dtype, int] = {}
        for item in sides:
            for index, tensor in enumerate(item):
                if self.operation == "all_to_all" and index == rank:
                    continue
                bytes_ = tensor.numel() * tensor.element_size()
                totals[tensor.dtype] = totals.get(tensor.dtype, 0) + bytes_
        loads = []
        for dtype, payload in totals.items():
            share = traffic.share_sent(self.operation, size, rank, self.root, payload)
            floating = dtype.is_floating_point or dtype.is_complex
            loads.append((_name(dtype), floating, payload, share))
        return loads or [("", False, 0, Fraction(0))]


class Handle(dist.Work):  # type: ignore[misc]
    """What a call returns.  A backend supplies ``_settle`` (block until the result is there)."""

    def __init__(self, request: Request) -> None:
        super().__init__()
        self.request = request
        self._ledger: traffic.TrafficLedger | None = None
        self._calls: list[traffic.Call] = []

    def attach(self, ledger: traffic.TrafficLedger, calls: list[traffic.Call]) -> None:
        """Record the wait in ``calls``."""
        self._ledger, self._calls = ledger, calls

    @abstractmethod
    def _settle(self, timeout: float | None) -> None:
        """Return when the result is in the output tensors; raise what went wrong."""

    @abstractmethod
    def _future(self) -> Any:
        """A future of the output tensors."""

    @abstractmethod
    def is_completed(self) -> bool:
        """Whether the result is there, without waiting."""

    def note_wait(self) -> None:
        """The program waits for this call now."""
        if self._ledger is not None:
            self._ledger.waited(self._calls)

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Return when the result is visible; ``timeout`` of zero or ``None`` means the group's."""
        self.note_wait()
        self._settle(timeout.total_seconds() if timeout else None)
        return True

    def synchronize(self) -> None:
        """The same as :meth:`wait` on a CPU."""
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
        """Nobody sees when a C++ future is waited for, so the earliest moment is recorded."""
        self.note_wait()

    def result(self) -> list[Tensor]:
        """The output tensors, after waiting."""
        self.wait()
        return [tensor for item in self.request.outputs for tensor in item]

    def is_success(self) -> bool:
        """Whether the call is over without an error."""
        return self.is_completed() and self.exception() is None

    def exception(self) -> Any:
        """The error of a completed call."""
        return None


class GroupBase(dist.ProcessGroup):  # type: ignore[misc]
    """A Python process group: normalises, records and hands on.

    ``transform`` is the place for injected delays, faults and backend mutants: it sees every request
    before it starts and returns the one to start.
    """

    backend_name = ""
    transform: Callable[[GroupBase, Request], Request] | None = None

    def __init__(self, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)
        self._rank, self._size = rank, size
        self._timeout = timeout
        self._name = self._description = ""

    # ------------------------------------------------------------------- identity, asked by torch

    def rank(self) -> int:
        """This rank within the group."""
        return self._rank

    def size(self) -> int:
        """Number of ranks in the group."""
        return self._size

    getRank, getSize = rank, size

    def name(self) -> str:
        """Name of the backend."""
        return self.backend_name

    getBackendName = _get_backend_name = name

    @property
    def group_name(self) -> str:
        """Unique name of the group; torch's own property needs a C++ backend."""
        return self._name

    @property
    def group_desc(self) -> str:
        """What the group is for: DeviceMesh says ``mesh_<axis>``."""
        return self._description

    def _set_group_name(self, name: str) -> None:
        self._name = name

    def _set_group_desc(self, description: str) -> None:
        self._description = description

    def getGroupName(self) -> str:
        """For C++ callers."""
        return self._name

    def getGroupDesc(self) -> str:
        """For C++ callers."""
        return self._description

    def set_timeout(self, timeout: timedelta) -> None:
        """Change how long a call may wait for its peers."""
        self._timeout = timeout

    _set_timeout = set_timeout

    @property
    @abstractmethod
    def global_ranks(self) -> tuple[int, ...]:
        """Global ranks of the members, in group order."""

    @property
    def axis(self) -> str:
        """Mesh axis of the group, as far as torch was told."""
        if self._description.startswith("mesh_"):
            return self._description.removeprefix("mesh_")
        return "world" if self._description == "default_pg" else ""

    # ---------------------------------------------------------------------------- the one funnel

    @abstractmethod
    def _start(self, request: Request) -> Handle:
        """Begin ``request`` without waiting for anybody."""

    def _issue(self, request: Request) -> Handle:
        if self.transform is not None:
            request = self.transform(request)
        if _listener is not None:
            _listener(f"{request.text()} on {self.global_ranks}")
        ledger = traffic.current()
        calls = None
        if ledger is not None:
            loads = request.loads(self._size, self._rank)
            calls = ledger.record(request.operation, self.global_ranks, self.axis, loads)
        handle = self._start(request)
        if ledger is not None and calls is not None:
            handle.attach(ledger, calls)
        return handle

    # --------------------------------------------------------------------- collectives, as torch calls

    def allreduce(self, tensors: Any, *args: Any) -> Handle:
        """Combine over ranks, in place."""
        items = [[t] for t in _list(tensors)]
        op, given = _reduction(args), (tensors, *args)
        return self._issue(Request("all_reduce", items, items, op, method="allreduce", args=given))

    def allreduce_coalesced(self, tensors: list[Tensor], *args: Any) -> Handle:
        """Several all-reduces in one call."""
        items = [[t] for t in tensors]
        method, given = "allreduce_coalesced", (tensors, *args)
        return self._issue(
            Request("all_reduce", items, items, _reduction(args), method=method, args=given)
        )

    def broadcast(self, tensors: Any, *args: Any) -> Handle:
        """Overwrite with the root's tensors."""
        items = [[t] for t in _list(tensors)]
        method, given = "broadcast", (tensors, *args)
        return self._issue(
            Request("broadcast", items, items, root=_root(args), method=method, args=given)
        )

    def reduce(self, tensors: Any, *args: Any) -> Handle:
        """Combine over ranks into the root's tensors."""
        items = [[t] for t in _list(tensors)]
        op, root = _reduction(args), _root(args)
        given = (tensors, *args)
        return self._issue(
            Request("reduce", items, items, op, root, method="reduce", args=given)
        )

    def allgather(self, outputs: Any, inputs: Any, *args: Any) -> Handle:
        """Collect every rank's tensor in a list; sizes may differ between ranks."""
        given = (outputs, inputs, *args)
        if isinstance(inputs, Tensor):
            outputs, inputs = [outputs], [inputs]
        items = [[t] for t in inputs]
        return self._issue(
            Request("all_gather", items, list(outputs), method="allgather", args=given)
        )

    def allgather_coalesced(
        self, output_lists: list[list[Tensor]], inputs: list[Tensor], *args: Any
    ) -> Handle:
        """Several tensors; ``output_lists[rank][item]``."""
        items = [[t] for t in inputs]
        outputs = [list(column) for column in zip(*output_lists, strict=True)]
        method, given = "allgather_coalesced", (output_lists, inputs, *args)
        return self._issue(Request("all_gather", items, outputs, method=method, args=given))

    def all_gather_single(self, output: Tensor, input: Tensor, *args: Any) -> Handle:
        """Concatenate every rank's tensor in ``output``."""
        method, given = "all_gather_single", (output, input, *args)
        pieces = [chunks(output, self._size)]
        return self._issue(Request("all_gather", [[input]], pieces, method=method, args=given))

    def all_gather_single_coalesced(
        self, outputs: list[Tensor], inputs: list[Tensor], *args: Any
    ) -> Handle:
        """Several :meth:`all_gather_single` in one call."""
        items, pieces = [[t] for t in inputs], [chunks(t, self._size) for t in outputs]
        method, given = "all_gather_single_coalesced", (outputs, inputs, *args)
        return self._issue(Request("all_gather", items, pieces, method=method, args=given))

    def reduce_scatter(self, outputs: Any, inputs: Any, *args: Any) -> Handle:
        """Combine lists over ranks; rank r receives the r-th."""
        given = (outputs, inputs, *args)
        if isinstance(outputs, Tensor):
            outputs, inputs = [outputs], [inputs]
        items = [[t] for t in outputs]
        op = _reduction(args)
        return self._issue(
            Request("reduce_scatter", list(inputs), items, op, method="reduce_scatter", args=given)
        )

    def reduce_scatter_single(self, output: Tensor, input: Tensor, *args: Any) -> Handle:
        """Combine ``input`` over ranks; rank r receives its r-th chunk."""
        pieces, op = [chunks(input, self._size)], _reduction(args)
        method, given = "reduce_scatter_single", (output, input, *args)
        return self._issue(
            Request("reduce_scatter", pieces, [[output]], op, method=method, args=given)
        )

    def reduce_scatter_single_coalesced(
        self, outputs: list[Tensor], inputs: list[Tensor], *args: Any
    ) -> Handle:
        """Several :meth:`reduce_scatter_single` in one call."""
        pieces, items = [chunks(t, self._size) for t in inputs], [[t] for t in outputs]
        method, given = "reduce_scatter_single_coalesced", (outputs, inputs, *args)
        op = _reduction(args)
        return self._issue(Request("reduce_scatter", pieces, items, op, method=method, args=given))

    def gather(self, outputs: Any, inputs: Any, *args: Any) -> Handle:
        """Collect every rank's tensor on the root."""
        given = (outputs, inputs, *args)
        if isinstance(inputs, Tensor):
            outputs, inputs = [outputs] if outputs else [], [inputs]
        root = _root(args)
        lists = list(outputs) if self._rank == root else []
        items = [[t] for t in inputs]
        return self._issue(Request("gather", items, lists, root=root, method="gather", args=given))

    def scatter(self, outputs: Any, inputs: Any, *args: Any) -> Handle:
        """Hand out the root's tensors."""
        given = (outputs, inputs, *args)
        if isinstance(outputs, Tensor):
            outputs, inputs = [outputs], [inputs] if inputs else []
        root = _root(args)
        lists = list(inputs) if self._rank == root else []
        items = [[t] for t in outputs]
        return self._issue(Request("scatter", lists, items, root=root, method="scatter", args=given))

    def alltoall(self, outputs: list[Tensor], inputs: list[Tensor], *args: Any) -> Handle:
        """Send the r-th input to rank r."""
        given = (outputs, inputs, *args)
        return self._issue(
            Request("all_to_all", [list(inputs)], [list(outputs)], method="alltoall", args=given)
        )

    def all_to_all_single(
        self,
        output: Tensor,
        input: Tensor,
        output_splits: list[int] | None = None,
        input_splits: list[int] | None = None,
        *args: Any,
    ) -> Handle:
        """Send the r-th part of ``input`` to rank r; parts are rows, equal unless split sizes say."""
        given = (output, input, output_splits or [], input_splits or [], *args)
        inputs = _rows(input, input_splits, self._size)
        outputs = _rows(output, output_splits, self._size)
        return self._issue(
            Request("all_to_all", [inputs], [outputs], method="all_to_all_single", args=given)
        )

    def barrier(self, *args: Any, **options: Any) -> Handle:
        """Return when every rank has called it."""
        given = (*args, *options.values())
        return self._issue(Request("barrier", method="barrier", args=given))

    def send(self, tensors: list[Tensor], destination: int, tag: int = 0) -> Handle:
        """Send to group rank ``destination``."""
        items, given = [[t] for t in tensors], (tensors, destination, tag)
        return self._issue(
            Request("send", items, peer=destination, tag=tag, method="send", args=given)
        )

    def recv(self, tensors: list[Tensor], source: int, tag: int = 0) -> Handle:
        """Receive from group rank ``source``."""
        items, given = [[t] for t in tensors], (tensors, source, tag)
        return self._issue(
            Request("recv", [], items, peer=source, tag=tag, method="recv", args=given)
        )

    def recv_anysource(self, tensors: list[Tensor], tag: int = 0) -> Handle:
        """Receive from whoever sends first."""
        items, given = [[t] for t in tensors], (tensors, tag)
        return self._issue(
            Request("recv", [], items, peer=None, tag=tag, method="recv_anysource", args=given)
        )

    # Names before torch 2.13.
    _allgather_base = all_gather_single
    _reduce_scatter_base = reduce_scatter_single
    alltoall_base = all_to_all_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced


#: Method names of torch 2.13 and what they were called before.
OLD_NAMES = {
    "all_gather_single": "_allgather_base",
    "reduce_scatter_single": "_reduce_scatter_base",
    "all_to_all_single": "alltoall_base",
    "all_gather_single_coalesced": "allgather_into_tensor_coalesced",
    "reduce_scatter_single_coalesced": "reduce_scatter_tensor_coalesced",
}


def chunks(tensor: Tensor, size: int) -> list[Tensor]:
    """``size`` equal parts of ``tensor`` in memory order (rows, if it is strided).

    Raises ``ValueError`` when the elements cannot be divided.
    """
    if tensor.numel() % size:
        raise ValueError(f"{tensor.numel()} elements cannot be cut into {size} equal chunks")
    if tensor.is_contiguous():
        flat = tensor.detach().view(size, -1) if tensor.numel() else tensor.detach().view(1, -1)
        return list(flat.unbind(0)) if tensor.numel() else [flat[0]] * size
    return _rows(tensor, None, size)


def _rows(tensor: Tensor, splits: Sequence[int] | None, size: int) -> list[Tensor]:
    rows = tensor.shape[0]
    if splits:
        if len(splits) != size or sum(splits) != rows:
            raise ValueError(f"split sizes {list(splits)} do not fit {rows} rows for {size} ranks")
        return list(tensor.detach().split(list(splits)))
    if rows % size:
        raise ValueError(f"{rows} rows cannot be cut into {size} equal parts")
    return list(tensor.detach().split([rows // size] * size))


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _list(tensors: Any) -> list[Tensor]:
    return [tensors] if isinstance(tensors, Tensor) else list(tensors)


def _reduction(args: tuple[Any, ...]) -> str:
    """The reduce operation in ``args``: an options object, an operation, or nothing (sum)."""
    for arg in args:
        op = getattr(arg, "reduceOp", arg)
        op = getattr(op, "op", op)  # ReduceOp objects hold the comparable enumeration
        try:
            if op in _REDUCE_NAMES:
                return _REDUCE_NAMES[op]
        except TypeError:
            continue
        if hasattr(arg, "reduceOp") or isinstance(arg, _ReduceOp):
            raise NotImplementedError(f"reduce operation {op} is not supported")
    return "sum"


def _root(args: tuple[Any, ...]) -> int:
    for arg in args:
        if hasattr(arg, "rootRank"):
            return int(arg.rootRank)
        if isinstance(arg, int):
            return arg
    return 0
