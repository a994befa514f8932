"""Calls to a group as messages of MPI: who sends what to whom.

MPI moves bytes, of any dtype; sums are made here, as left folds in rank order
(``arithmetic.fold``).  So the bits are those of ``in_memory``, whatever the MPI, its algorithms or
the number of ranks:

    all_reduce      small: everybody sends all to everybody and folds all
                    large: rank r gets part r of everybody and folds it; then all get all parts
    reduce_scatter  rank r gets part r of everybody and folds it
    broadcast       a binomial tree
    barrier         in round k, rank r tells rank r + 2^k
    the others      each tensor straight to where it belongs

Messages of collectives carry in their tag the call's number and a digest of what all ranks must
agree on.  Calls that do not match never meet, so they corrupt nothing.

Imported by ranks only, after ``group.start``: importing it needs mpi4py.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from mpi4py import MPI
from torch import Tensor

from shardproof.backends import arithmetic, errors
from shardproof.backends.request import Request

#: Bytes that a rank may receive in a small all-reduce, which takes one round instead of two.
SMALL_BYTES = 256 << 10
#: The most bytes of one message: MPI counts in 32 bits.
MESSAGE_BYTES = 1 << 30

_NUMBER_BITS = 10
_buffer = getattr(MPI, "buffer", None) or MPI.memory  # its name before mpi4py 4


@dataclass(slots=True, eq=False)
class MpiMessage:
    """One message under way; ``peer``: the other side's rank in the group, ``bytes``: expected."""

    request: MPI.Request
    status: MPI.Status
    peer: int
    bytes: int
    receives: bool
    #: MPI reads or writes it until the message is complete.
    tensor: Tensor


Steps = Iterator[list[MpiMessage]]
#: The largest tag that every MPI allows.
LEAST_TAG_LIMIT = 32767


class Mail:
    """The messages of one group, whose ranks are those of the communicator."""

    def __init__(self, comm: MPI.Comm) -> None:
        self.comm, self.rank, self.size = comm, comm.Get_rank(), comm.Get_size()
        self.others = [rank for rank in range(self.size) if rank != self.rank]
        self._most = int(comm.Get_attr(MPI.TAG_UB) or LEAST_TAG_LIMIT)
        bits = (self._most + 1).bit_length() - 1
        self._digest = (1 << (bits - _NUMBER_BITS - 1)) - 1

    def tag(self, number: int, agreed: str) -> int:
        """The tag of the collective call ``number``: odd, those of users are even."""
        digest = zlib.crc32(agreed.encode()) & self._digest
        number &= (1 << _NUMBER_BITS) - 1
        return (digest << _NUMBER_BITS | number) << 1 | 1

    def own_tag(self, tag: int) -> int:
        """MPI's tag for a send or receive with ``tag`` of the user's.

        :raises ValueError: MPI has no such tag.
        """
        if not 0 <= 2 * tag <= self._most:
            raise ValueError(f"tag {tag} is not valid with this MPI; valid: 0 to {self._most // 2}")
        return 2 * tag

    def swap(
        self,
        tag: int,
        outgoing: Mapping[int, Sequence[Tensor]],
        incoming: Mapping[int, Sequence[Tensor]],
    ) -> list[MpiMessage]:
        """Begin to send and receive lists of dense tensors, by peer."""
        begun = []
        for receives, sides in ((True, incoming), (False, outgoing)):
            start = self.comm.Irecv if receives else self.comm.Isend
            for peer, tensor in ((peer, t) for peer, tensors in sides.items() for t in tensors):
                for part in _parts(tensor):
                    request, size = start([part, MPI.BYTE], peer, tag), part.nbytes
                    begun.append(MpiMessage(request, MPI.Status(), peer, size, receives, tensor))
        return begun


def _parts(tensor: Tensor) -> list[MPI.buffer]:
    start, size = tensor.data_ptr(), tensor.numel() * tensor.element_size()
    return [
        _buffer.fromaddress(start + at, min(MESSAGE_BYTES, size - at))
        for at in range(0, max(size, 1), MESSAGE_BYTES)
    ]


# -------------------------------------------------------------------------------- who sends what


def _dense(tensor: Tensor) -> Tensor:
    return tensor.detach().resolve_conj().resolve_neg().contiguous()


class _Landing:
    """Where the bytes for a request's outputs arrive.

    In the outputs themselves, unless those are strided, or overlap with an input that others have
    yet to get.
    """

    def __init__(self, request: Request) -> None:
        self._taken = [_span(t) for item in request.inputs for t in item if t.numel()]
        self._outputs = request.outputs
        self._writes: list[arithmetic.Write] = []

    def place(self, output: Tensor) -> Tensor:
        """A dense tensor to receive what belongs into ``output``."""
        first, last = _span(output)
        free = all(last <= start or end <= first for start, end in self._taken)
        if free and output.is_contiguous() and not (output.is_conj() or output.is_neg()):
            return output.detach()
        staged = torch.empty(output.shape, dtype=output.dtype)
        self._writes.append((output, staged))
        return staged

    def put(self, output: Tensor, value: Tensor) -> None:
        """``output`` will be ``value``, which is here already."""
        if output.numel() != value.numel():
            raise errors.CollectiveMismatch(
                f"the result has {value.numel()} elements, but its buffer has {output.numel()}"
            )
        if output.data_ptr() != value.data_ptr() or output.stride() != value.stride():
            # What is staged may be written over an input, and this value be one.
            self._writes.append((output, value.clone() if self._writes else value))

    def finish(self, values: Sequence[Tensor] = (), place: int = 0) -> None:
        """Everything has arrived, and everything was sent.

        ``values``: what belongs into the ``place``-th output of each item.
        """
        for item, value in zip(self._outputs, values, strict=False):
            self.put(item[place], value)
        arithmetic.write(self._writes)


def _span(tensor: Tensor) -> tuple[int, int]:
    """First and last byte that a tensor may touch."""
    reach = sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))
    start = tensor.data_ptr()
    return start, start + (max(0, reach) + 1) * tensor.element_size()


def _folds(
    request: Request, mail: Mail, own: list[Tensor], others: Mapping[int, list[Tensor]]
) -> list[Tensor]:
    """Of each item the fold over all ranks, in their order."""
    of_rank = {**others, mail.rank: own}
    items = zip(*(of_rank[rank] for rank in range(mail.size)), strict=True)
    return [arithmetic.fold(list(item), request.reduce or "sum") for item in items]


def _all_reduce(request: Request, mail: Mail, tag: int) -> Steps:
    own, landing = [_dense(item[0]) for item in request.inputs], _Landing(request)
    me = mail.rank
    if sum(t.numel() * t.element_size() for t in own) * len(mail.others) <= SMALL_BYTES:
        got = {peer: [torch.empty_like(t) for t in own] for peer in mail.others}
        yield mail.swap(tag, dict.fromkeys(mail.others, own), got)
        totals = _folds(request, mail, own, got)
    else:
        parts = [t.view(-1).tensor_split(mail.size) for t in own]
        got = {peer: [torch.empty_like(p[me]) for p in parts] for peer in mail.others}
        yield mail.swap(tag, {peer: [p[peer] for p in parts] for peer in mail.others}, got)
        totals = [torch.empty_like(t) for t in own]
        split = [t.view(-1).tensor_split(mail.size) for t in totals]
        for s, total in zip(split, _folds(request, mail, [p[me] for p in parts], got), strict=True):
            s[me].copy_(total)
        mine = [s[me] for s in split]
        del got
        rest = {peer: [s[peer] for s in split] for peer in mail.others}
        yield mail.swap(tag, dict.fromkeys(mail.others, mine), rest)
    landing.finish(totals)


def _reduce(request: Request, mail: Mail, tag: int) -> Steps:
    own, landing, root = [_dense(i[0]) for i in request.inputs], _Landing(request), request.root
    if mail.rank != root:
        yield mail.swap(tag, {root or 0: own}, {})
        return
    got = {peer: [torch.empty_like(t) for t in own] for peer in mail.others}
    yield mail.swap(tag, {}, got)
    landing.finish(_folds(request, mail, own, got))


def _reduce_scatter(request: Request, mail: Mail, tag: int) -> Steps:
    me, landing = mail.rank, _Landing(request)
    own = [[_dense(part) for part in item] for item in request.inputs]
    got = {peer: [torch.empty_like(item[me]) for item in own] for peer in mail.others}
    yield mail.swap(tag, {peer: [item[peer] for item in own] for peer in mail.others}, got)
    landing.finish(_folds(request, mail, [item[me] for item in own], got))


def _broadcast(request: Request, mail: Mail, tag: int) -> Steps:
    root = request.root or 0
    place = (mail.rank - root) % mail.size
    # The lowest set bit of a place is cleared to find its parent; smaller ones set, its children.
    lowest = place & -place if place else 1 << (mail.size - 1).bit_length()
    steps = [lowest >> k for k in range(1, lowest.bit_length())]
    children = [(place + s + root) % mail.size for s in steps if place + s < mail.size]
    if place:
        # Nobody gets anything of this rank's inputs: they are what is overwritten.
        landing = _Landing(Request("broadcast"))
        values = [landing.place(item[0]) for item in request.outputs]
        yield mail.swap(tag, {}, {(place - lowest + root) % mail.size: values})
        landing.finish()
    else:
        values = [_dense(item[0]) for item in request.inputs]
    yield mail.swap(tag, dict.fromkeys(children, values), {})


def _all_gather(request: Request, mail: Mail, tag: int) -> Steps:
    own, landing = [_dense(item[0]) for item in request.inputs], _Landing(request)
    places = {peer: [landing.place(o[peer]) for o in request.outputs] for peer in mail.others}
    yield mail.swap(tag, dict.fromkeys(mail.others, own), places)
    landing.finish(own, mail.rank)


def _gather(request: Request, mail: Mail, tag: int) -> Steps:
    own, root = [_dense(item[0]) for item in request.inputs], request.root or 0
    if mail.rank != root:
        yield mail.swap(tag, {root: own}, {})
        return
    landing = _Landing(request)
    yield mail.swap(
        tag, {}, {peer: [landing.place(o[peer]) for o in request.outputs] for peer in mail.others}
    )
    landing.finish(own, root)


def _scatter(request: Request, mail: Mail, tag: int) -> Steps:
    root, landing = request.root or 0, _Landing(request)
    if mail.rank != root:
        yield mail.swap(tag, {}, {root: [landing.place(item[0]) for item in request.outputs]})
        landing.finish()
        return
    own = [[_dense(part) for part in item] for item in request.inputs]
    yield mail.swap(tag, {peer: [item[peer] for item in own] for peer in mail.others}, {})
    landing.finish([values[root] for values in own])


def _all_to_all(request: Request, mail: Mail, tag: int) -> Steps:
    landing, (inputs,), (outputs,) = _Landing(request), request.inputs, request.outputs
    own = [_dense(part) for part in inputs]
    yield mail.swap(
        tag,
        {peer: [own[peer]] for peer in mail.others},
        {peer: [landing.place(outputs[peer])] for peer in mail.others},
    )
    landing.put(outputs[mail.rank], own[mail.rank])
    landing.finish()


def _barrier(request: Request, mail: Mail, tag: int) -> Steps:
    nothing = torch.empty(0)
    for k in range((mail.size - 1).bit_length()):
        ahead, behind = (mail.rank + (1 << k)) % mail.size, (mail.rank - (1 << k)) % mail.size
        yield mail.swap(tag, {ahead: [nothing]}, {behind: [nothing]})


def _send(request: Request, mail: Mail, tag: int) -> Steps:
    assert request.peer is not None
    yield mail.swap(tag, {request.peer: [_dense(item[0]) for item in request.inputs]}, {})


def _receive(request: Request, mail: Mail, tag: int) -> Steps:
    landing = _Landing(request)
    peer = MPI.ANY_SOURCE if request.peer is None else request.peer
    yield mail.swap(tag, {}, {peer: [landing.place(item[0]) for item in request.outputs]})
    landing.finish()


STEPS: dict[str, Callable[[Request, Mail, int], Steps]] = {
    "all_reduce": _all_reduce,
    "reduce": _reduce,
    "broadcast": _broadcast,
    "all_gather": _all_gather,
    "reduce_scatter": _reduce_scatter,
    "gather": _gather,
    "scatter": _scatter,
    "all_to_all": _all_to_all,
    "barrier": _barrier,
    "send": _send,
    "recv": _receive,
}
