"""A call to a process group in plain form, and how torch's arguments are read into it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from shardproof.ledgers import traffic

_ReduceOp = dist.ReduceOp
#: Reduce operations that integers alone have.
_BITS = ("band", "bor", "bxor")
_REDUCE = ("sum", "avg", "min", "max", "product", *_BITS)
_REDUCE_NAMES: dict[Any, str] = {getattr(_ReduceOp, name.upper()): name for name in _REDUCE}
#: Operations to which each rank gives sizes of its own.
_UNEQUAL = frozenset({"all_to_all", "gather", "scatter"})


@dataclass
class Request:
    """A call in plain form: per item, the tensors that this rank gives and those that it receives.

    One tensor per item, or one per rank of the group where the operation needs it (outputs of an
    all-gather, inputs of a reduce-scatter, ...).  In-place operations list a tensor on both sides.
    ``method`` and ``args`` are the call as torch made it, for backends that pass it on.  ``where``:
    which axis it belongs to, and which layer makes it, in words.
    """

    operation: str
    inputs: Sequence[Sequence[Tensor]] = field(default_factory=list)
    outputs: Sequence[Sequence[Tensor]] = field(default_factory=list)
    reduce: str | None = None
    root: int | None = None
    peer: int | None = None
    tag: int = 0
    method: str = ""
    args: tuple[Any, ...] = ()
    where: str = ""

    def text(self) -> str:
        """The call in words: ``all_reduce(sum, float32[4])``, and where it belongs."""
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
        return f"{self.operation}({', '.join(words)}){self.where}"

    def signature(self) -> tuple[object, ...]:
        """The properties that must agree between all ranks of a collective."""
        one_sided = self.operation in ("gather", "scatter")
        items = self.inputs if self.operation != "scatter" else self.outputs
        sized = self.operation in ("all_reduce", "reduce", "broadcast")
        shapes = tuple(
            tuple((t.dtype, t.numel() if sized else -1) for t in item[:1]) for item in items
        )
        outputs = 0 if one_sided else len(self.outputs)
        return self.operation, self.reduce, self.root, shapes, outputs

    def agreed(self) -> str:
        """The properties that must be equal in the calls of all ranks, sizes included, in words."""
        if self.operation in _UNEQUAL:
            every = self.outputs if self.operation == "scatter" else self.inputs
            dtypes = {_name(t.dtype) for item in every for t in wholes(item)}
            return f"{self.operation} {self.reduce} {self.root} {sorted(dtypes)}"
        if self.operation == "all_gather":  # ranks may give tensors of different sizes in a list
            received = "+".join(str(n) for item in self.outputs for n in _sizes(item))
            return f"all_gather {received} {[_name(item[0].dtype) for item in self.inputs]}"
        return self.text().removesuffix(self.where)  # ranks may come from different layers

    def loads(self, size: int, rank: int) -> list[tuple[str, bool, int, Fraction]]:
        """``(dtype, floating, payload bytes, share sent)`` for each dtype in the call."""
        received = self.operation in ("all_gather", "scatter", "recv")
        sides = self.outputs if received else self.inputs
        totals: dict[torch.dtype, int] = {}
        for item in sides:
            for tensor in _leaving(item, rank) if self.operation == "all_to_all" else wholes(item):
                totals[tensor.dtype] = totals.get(tensor.dtype, 0) + tensor.nbytes
        loads = []
        for dtype, payload in totals.items():
            share = traffic.share_sent(self.operation, size, rank, self.root, payload)
            floating = dtype.is_floating_point or dtype.is_complex
            loads.append((_name(dtype), floating, payload, share))
        return loads or [("", False, 0, Fraction(0))]


#: Method names of torch 2.13 and what they were called before.
OLD_NAMES = {
    "all_gather_single": "_allgather_base",
    "reduce_scatter_single": "_reduce_scatter_base",
    "all_to_all_single": "alltoall_base",
    "all_gather_single_coalesced": "allgather_into_tensor_coalesced",
    "reduce_scatter_single_coalesced": "reduce_scatter_tensor_coalesced",
}


class Chunks(Sequence[Tensor]):
    """``size`` equal parts of ``whole``, a contiguous tensor, in memory order.

    A part becomes a view when it is asked for: N views on each of N ranks are N^2 of them a call.
    """

    def __init__(self, whole: Tensor, size: int) -> None:
        self.whole, self._size = whole, size
        self._parts = whole.detach().view(size, -1)

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, place: Any) -> Any:
        if isinstance(place, slice):
            return list(self._parts[place].unbind(0))
        return self._parts[place]  # an IndexError beyond the last ends an iteration


class Rows(Sequence[Tensor]):
    """Groups of rows of ``whole``, a contiguous tensor; a group becomes a view when asked for."""

    def __init__(self, whole: Tensor, sizes: Sequence[int]) -> None:
        self.whole, self.sizes, self.row = whole.detach(), list(sizes), tuple(whole.shape[1:])
        self.ends = [0, *accumulate(sizes)]

    def __len__(self) -> int:
        return len(self.sizes)

    def __getitem__(self, place: Any) -> Any:
        at = range(len(self))[place]
        return self._group(at) if isinstance(at, int) else [self._group(one) for one in at]

    def _group(self, at: int) -> Tensor:
        return self.whole[self.ends[at] : self.ends[at + 1]]


def wholes(item: Sequence[Tensor]) -> Sequence[Tensor]:
    """The tensors of ``item``; those that are parts of one as that one."""
    return [item.whole] if isinstance(item, Chunks | Rows) else item


def _leaving(item: Sequence[Tensor], rank: int) -> Sequence[Tensor]:
    """``item`` without the part for ``rank``; of one tensor, what lies before and behind it."""
    if isinstance(item, Rows) and len(item) > 1:
        return item.whole[: item.ends[rank]], item.whole[item.ends[rank + 1] :]
    return [tensor for place, tensor in enumerate(item) if place != rank]


def _sizes(item: Sequence[Tensor]) -> Iterable[int]:
    if isinstance(item, Chunks):
        return [item.whole.numel() // len(item)] * len(item)
    return (tensor.numel() for tensor in item)


def chunks(tensor: Tensor, size: int) -> Sequence[Tensor]:
    """``size`` equal parts of ``tensor`` in memory order (rows, if it is strided).

    Raises ``ValueError`` when the elements cannot be divided.
    """
    if tensor.numel() % size:
        raise ValueError(f"{tensor.numel()} elements cannot be cut into {size} equal chunks")
    if not tensor.numel():
        return [tensor.detach().view(-1)] * size
    return Chunks(tensor, size) if tensor.is_contiguous() else rows(tensor, None, size)


def rows(tensor: Tensor, splits: Sequence[int] | None, size: int) -> Sequence[Tensor]:
    """``size`` groups of rows of ``tensor``: of the sizes ``splits``, or equal ones."""
    if splits and (len(splits) != size or sum(splits) != len(tensor)):
        raise ValueError(f"split sizes {splits}: expected {size} sizes with sum {len(tensor)}")
    if not splits and len(tensor) % size:
        raise ValueError(f"{len(tensor)} rows cannot be cut into {size} equal parts")
    sizes = list(splits or [len(tensor) // size] * size)
    return Rows(tensor, sizes) if tensor.is_contiguous() else list(tensor.detach().split(sizes))


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def listed(tensors: Any) -> list[Tensor]:
    """A list of one, or the list itself: torch allows both."""
    return [tensors] if isinstance(tensors, Tensor) else list(tensors)


def reduction(args: tuple[Any, ...]) -> str:
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


def root_of(args: tuple[Any, ...]) -> int:
    """The root rank in ``args``: in an options object or bare."""
    for arg in args:
        if hasattr(arg, "rootRank"):
            return int(arg.rootRank)
        if isinstance(arg, int):
            return arg
    return 0


def check(request: Request, size: int, rank: int) -> None:
    """Whether member ``rank`` of ``size`` may make ``request``, as far as it can see by itself.

    For backends of our own: torch's look by themselves.

    :raises ValueError: a root or peer that is no member, a reduce operation that the dtype does not
        have, or tensors of a wrong number, size or dtype.
    """
    operation, root, peer = request.operation, request.root, request.peer
    if root is not None and not 0 <= root < size:
        raise ValueError(f"{request.text()}: root {root} is not in a group of {size} ranks")
    if peer is not None and not 0 <= peer < size:
        raise ValueError(f"{request.text()}: peer {peer} is not in a group of {size} ranks")
    if peer == rank:
        raise ValueError(f"{request.text()}: rank {rank} of the group sends to itself")
    for dtype in {t.dtype for item in request.inputs for t in wholes(item) if request.reduce}:
        numbers = dtype.is_floating_point or dtype.is_complex
        unordered = dtype.is_complex and request.reduce in ("min", "max")
        if unordered or (numbers and request.reduce in _BITS):
            raise ValueError(f"{request.text()}: {_name(dtype)} does not support {request.reduce}")
    gives, takes = request.inputs, request.outputs
    if operation in ("all_gather", "gather") and (operation == "all_gather" or rank == root):
        _check_parts(request, takes, [item[0] for item in gives], size, rank)
    elif operation in ("reduce_scatter", "scatter") and (
        operation == "reduce_scatter" or rank == root
    ):
        _check_parts(request, gives, [item[0] for item in takes], size, rank)
    elif operation == "all_to_all":
        _check_parts(request, takes, [gives[0][rank]] if len(gives[0]) == size else [], size, rank)
        _check_parts(request, gives, [takes[0][rank]], size, rank)


def _check_parts(
    request: Request, lists: Sequence[Sequence[Tensor]], own: Sequence[Tensor], size: int, rank: int
) -> None:
    """``lists`` have a part for each rank, and the caller's is as ``own``."""
    if len(lists) != len(own) or any(len(parts) != size for parts in lists):
        counts = ", ".join(str(len(parts)) for parts in lists) or "none"
        raise ValueError(f"{request.text()}: expected {size} tensors (one per rank), got {counts}")
    for parts, one in zip(lists, own, strict=True):
        dtypes = {_name(t.dtype) for t in (*wholes(parts), one)}
        if len(dtypes) > 1:
            raise ValueError(f"{request.text()}: mixed dtypes: {' and '.join(sorted(dtypes))}")
        if parts[rank].numel() != one.numel():
            sizes = (
                f"this rank's {one.numel()} elements do not fit its part of {parts[rank].numel()}"
            )
            raise ValueError(f"{request.text()}: {sizes}")
