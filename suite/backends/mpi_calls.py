"""Calls to a group as messages of MPI: who sends what to whom, and the waiting for it.

MPI moves bytes, of any dtype; sums are made here, as left folds in rank order
(``arithmetic.fold``).  So the bits are those of ``in_memory``, whatever the MPI, its algorithms or
the number of ranks:

    all_reduce      small: everybody sends all to everybody and folds all
                    large: rank r gets part r of everybody and folds it; then all get all parts
    reduce_scatter  rank r gets part r of everybody and folds it
    broadcast       a binomial tree
    barrier         in round k, rank r tells rank r + 2^k
    the others      each tensor straight to where it belongs

Nothing blocks but :meth:`Calls.wait`, and that polls: every call under way is advanced, then the
core is given up, first for others that want it, then for a time that grows with the wait.  Bytes
move only while some call is polled; nothing is overlapped with computing.

Messages of collectives carry the call's number and a digest of its signature in their tag.  Calls
that do not match never meet, so they corrupt nothing; ranks that wait for long compare what they
wait in through the store.

Imported by ranks only, after ``mpi.start``: importing it needs mpi4py.
"""

from __future__ import annotations

import json
import os
import time
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from mpi4py import MPI
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from shardproof.backends import arithmetic, errors
from shardproof.backends.request import Request

#: Bytes that a rank may receive in a small all-reduce, which takes one round instead of two.
SMALL_BYTES = 256 << 10
#: The most bytes of one message: MPI counts in 32 bits.
MESSAGE_BYTES = 1 << 30
#: Polls that only offer the core to others before a rank sleeps between two of them.
SPINS = 20
#: Of the time that a rank has waited, what it sleeps until the next poll; in seconds at most.
SLEEP_SHARE, LONGEST_SLEEP = 0.1, 0.002
#: Seconds between two looks at what the others say in the store; seconds of waiting from which on
#: a rank says there what it waits in, and for one that has ended.
LOOK_SECONDS, PATIENCE_SECONDS, ENDED_SECONDS = 0.05, 0.5, 0.5

FAILED, ENDED = "failed", "ended"

_NUMBER_BITS = 10
_buffer = getattr(MPI, "buffer", None) or MPI.memory  # its name before mpi4py 4


@dataclass(slots=True, eq=False)
class Message:
    """One message under way; ``peer``: the other side's rank in the group, ``bytes``: expected."""

    request: MPI.Request
    status: MPI.Status
    peer: int
    bytes: int
    receives: bool
    #: MPI reads or writes it until the message is complete.
    tensor: Tensor


Steps = Iterator[list[Message]]


class Mail:
    """The messages of one group, whose ranks are those of the communicator."""

    def __init__(self, comm: MPI.Comm) -> None:
        self.comm, self.rank, self.size = comm, comm.Get_rank(), comm.Get_size()
        self.others = [rank for rank in range(self.size) if rank != self.rank]
        self._most = int(comm.Get_attr(MPI.TAG_UB))
        bits = (self._most + 1).bit_length() - 1
        self._digest = (1 << (bits - _NUMBER_BITS - 1)) - 1

    def tag(self, number: int, signature: object) -> int:
        """The tag of the collective call ``number``: odd, those of users are even."""
        digest = zlib.crc32(repr(signature).encode()) & self._digest
        number &= (1 << _NUMBER_BITS) - 1
        return (digest << _NUMBER_BITS | number) << 1 | 1

    def own_tag(self, tag: int) -> int:
        """MPI's tag for a send or receive with ``tag`` of the user's.

        :raises ValueError: MPI has no such tag.
        """
        if not 0 <= 2 * tag <= self._most:
            raise ValueError(f"tag {tag} is outside of what this MPI has: 0 to {self._most // 2}")
        return 2 * tag

    def send(self, tensor: Tensor, peer: int, tag: int) -> list[Message]:
        """Begin to send a dense tensor."""
        return [
            Message(
                self.comm.Isend([part, MPI.BYTE], peer, tag), MPI.Status(), peer, 0, False, tensor
            )
            for part in _parts(tensor)
        ]

    def receive(self, tensor: Tensor, peer: int, tag: int) -> list[Message]:
        """Begin to receive into a dense tensor."""
        return [
            Message(
                self.comm.Irecv([part, MPI.BYTE], peer, tag),
                MPI.Status(),
                peer,
                part.nbytes,
                True,
                tensor,
            )
            for part in _parts(tensor)
        ]

    def swap(
        self,
        tag: int,
        outgoing: Mapping[int, Sequence[Tensor]],
        incoming: Mapping[int, Sequence[Tensor]],
    ) -> list[Message]:
        """Begin to send and receive lists of tensors, by peer."""
        begun: list[Message] = []
        for peer, tensors in incoming.items():
            for tensor in tensors:
                begun += self.receive(tensor, peer, tag)
        for peer, tensors in outgoing.items():
            for tensor in tensors:
                begun += self.send(tensor, peer, tag)
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
                f"{output.numel()} elements cannot hold the {value.numel()} of their result"
            )
        if output.data_ptr() != value.data_ptr() or output.stride() != value.stride():
            # What is staged may be written over an input, and this value be one.
            self._writes.append((output, value.clone() if self._writes else value))

    def write(self) -> None:
        """Everything has arrived, and everything was sent."""
        arithmetic.write(self._writes)


def _span(tensor: Tensor) -> tuple[int, int]:
    """First and last byte that a tensor may touch."""
    reach = sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))
    start = tensor.data_ptr()
    return start, start + (max(0, reach) + 1) * tensor.element_size()


def _fold(mail: Mail, own: Tensor, others: Mapping[int, Tensor], op: str) -> Tensor:
    return arithmetic.fold([{**others, mail.rank: own}[rank] for rank in range(mail.size)], op)


def _all_reduce(request: Request, mail: Mail, tag: int) -> Steps:
    own, landing = [_dense(item[0]) for item in request.inputs], _Landing(request)
    op, me = request.reduce or "sum", mail.rank
    if sum(t.numel() * t.element_size() for t in own) * len(mail.others) <= SMALL_BYTES:
        got = {peer: [torch.empty_like(t) for t in own] for peer in mail.others}
        yield mail.swap(tag, dict.fromkeys(mail.others, own), got)
        totals = [
            _fold(mail, t, {peer: got[peer][i] for peer in got}, op) for i, t in enumerate(own)
        ]
    else:
        parts = [t.view(-1).tensor_split(mail.size) for t in own]
        got = {peer: [torch.empty_like(p[me]) for p in parts] for peer in mail.others}
        yield mail.swap(tag, {peer: [p[peer] for p in parts] for peer in mail.others}, got)
        totals = [torch.empty_like(t) for t in own]
        split = [t.view(-1).tensor_split(mail.size) for t in totals]
        for i, p in enumerate(parts):
            split[i][me].copy_(_fold(mail, p[me], {peer: got[peer][i] for peer in got}, op))
        mine = [s[me] for s in split]
        del got
        rest = {peer: [s[peer] for s in split] for peer in mail.others}
        yield mail.swap(tag, dict.fromkeys(mail.others, mine), rest)
    for item, total in zip(request.outputs, totals, strict=True):
        landing.put(item[0], total)
    landing.write()


def _reduce(request: Request, mail: Mail, tag: int) -> Steps:
    own, landing, root = [_dense(i[0]) for i in request.inputs], _Landing(request), request.root
    if mail.rank != root:
        yield mail.swap(tag, {root or 0: own}, {})
        return
    got = {peer: [torch.empty_like(t) for t in own] for peer in mail.others}
    yield mail.swap(tag, {}, got)
    for i, item in enumerate(request.outputs):
        parts = {peer: got[peer][i] for peer in got}
        landing.put(item[0], _fold(mail, own[i], parts, request.reduce or "sum"))
    landing.write()


def _reduce_scatter(request: Request, mail: Mail, tag: int) -> Steps:
    me, landing = mail.rank, _Landing(request)
    own = [[_dense(part) for part in item] for item in request.inputs]
    got = {peer: [torch.empty_like(item[me]) for item in own] for peer in mail.others}
    yield mail.swap(tag, {peer: [item[peer] for item in own] for peer in mail.others}, got)
    for i, item in enumerate(request.outputs):
        parts = {peer: got[peer][i] for peer in got}
        landing.put(item[0], _fold(mail, own[i][me], parts, request.reduce or "sum"))
    landing.write()


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
        landing.write()
    else:
        values = [_dense(item[0]) for item in request.inputs]
    yield mail.swap(tag, dict.fromkeys(children, values), {})


def _all_gather(request: Request, mail: Mail, tag: int) -> Steps:
    own, landing = [_dense(item[0]) for item in request.inputs], _Landing(request)
    places = {peer: [landing.place(o[peer]) for o in request.outputs] for peer in mail.others}
    yield mail.swap(tag, dict.fromkeys(mail.others, own), places)
    for item, value in zip(request.outputs, own, strict=True):
        landing.put(item[mail.rank], value)
    landing.write()


def _gather(request: Request, mail: Mail, tag: int) -> Steps:
    own, root = [_dense(item[0]) for item in request.inputs], request.root or 0
    if mail.rank != root:
        yield mail.swap(tag, {root: own}, {})
        return
    landing = _Landing(request)
    yield mail.swap(
        tag, {}, {peer: [landing.place(o[peer]) for o in request.outputs] for peer in mail.others}
    )
    for item, value in zip(request.outputs, own, strict=True):
        landing.put(item[root], value)
    landing.write()


def _scatter(request: Request, mail: Mail, tag: int) -> Steps:
    root, landing = request.root or 0, _Landing(request)
    if mail.rank != root:
        yield mail.swap(tag, {}, {root: [landing.place(item[0]) for item in request.outputs]})
        landing.write()
        return
    own = [[_dense(part) for part in item] for item in request.inputs]
    yield mail.swap(tag, {peer: [item[peer] for item in own] for peer in mail.others}, {})
    for item, values in zip(request.outputs, own, strict=True):
        landing.put(item[0], values[root])
    landing.write()


def _all_to_all(request: Request, mail: Mail, tag: int) -> Steps:
    landing, (inputs,), (outputs,) = _Landing(request), request.inputs, request.outputs
    own = [_dense(part) for part in inputs]
    yield mail.swap(
        tag,
        {peer: [own[peer]] for peer in mail.others},
        {peer: [landing.place(outputs[peer])] for peer in mail.others},
    )
    landing.put(outputs[mail.rank], own[mail.rank])
    landing.write()


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
    landing.write()


_STEPS: dict[str, Callable[[Request, Mail, int], Steps]] = {
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


# -------------------------------------------------------------------------------- calls under way


@dataclass(eq=False)
class Call:
    """A call of this rank; ``key`` names a collective one among all ranks."""

    request: Request
    mail: Mail
    #: Global ranks of the group.
    ranks: tuple[int, ...]
    steps: Steps
    key: str = ""
    messages: list[Message] = field(default_factory=list)
    done: bool = False
    #: Group rank of the sender, once something has come.
    source: int = -1
    told: bool = False

    @property
    def text(self) -> str:
        return f"{self.request.text()} of group {errors.spans(self.ranks)}"

    @property
    def rank(self) -> int:
        """The own global rank."""
        return self.ranks[self.mail.rank]

    def advance(self) -> bool:
        """Go as far as what has arrived allows; whether the call is over."""
        while not self.done and self._complete():
            with torch.no_grad(), _disable_current_modes():
                try:
                    following = next(self.steps, None)
                except errors.CollectiveMismatch as error:
                    what = f"rank {self.rank} calls {self.text}: {error}"
                    raise errors.CollectiveMismatch(what) from error
            self.done = following is None
            self.messages = following or []
        return self.done

    def _complete(self) -> bool:
        if not self.messages:
            return True
        statuses = [message.status for message in self.messages]
        try:
            if not MPI.Request.Testall([m.request for m in self.messages], statuses):
                return False
        except MPI.Exception as error:
            raise self._refused(error) from error
        for message in self.messages:
            if not message.receives:
                continue
            self.source = message.status.Get_source()
            came = message.status.Get_count(MPI.BYTE)
            if came != message.bytes:
                raise self._misfit(f"{came} bytes", message)
        return True

    def _refused(self, error: MPI.Exception) -> errors.CommError:
        codes = [m.status.Get_error() for m in self.messages]
        classes = {error.Get_error_class(), *map(MPI.Get_error_class, codes)}
        if MPI.ERR_TRUNCATE in classes:
            longer = [m for m in self.messages if m.receives]
            return self._misfit("more", longer[0])
        return errors.CommError(f"{self.text}: MPI says {error}")

    def _misfit(self, came: str, message: Message) -> errors.CollectiveMismatch:
        source = self.source if message.peer == MPI.ANY_SOURCE else message.peer
        return errors.CollectiveMismatch(
            f"rank {self.rank} calls {self.text} and expects {message.bytes} bytes, but "
            f"rank {self.ranks[source]} sends it {came}"
        )

    def missing(self) -> list[int]:
        """Global ranks that this call still waits for."""
        peers = {m.peer for m in self.messages if not m.request.Get_status()}
        if MPI.ANY_SOURCE in peers:
            return [self.ranks[peer] for peer in self.mail.others]
        return [self.ranks[peer] for peer in sorted(peers)]


class Calls:
    """All calls of this rank that are under way; ``store`` is what the ranks tell one another."""

    def __init__(self, store: dist.Store) -> None:
        self._store = store
        self._open: list[Call] = []
        self._failure: errors.CommError | None = None

    def begin(
        self, request: Request, mail: Mail, ranks: tuple[int, ...], tag: int, key: str
    ) -> Call:
        """Begin a call, and let those before it go on."""
        self._raise_failure()
        call = Call(request, mail, ranks, _STEPS[request.operation](request, mail, tag), key)
        self._open.append(call)
        self.advance()
        return call

    def advance(self) -> None:
        """Let every call go on: a peer may wait for any of them.

        :raises CommError: what is wrong with one of them; every call to come raises it as well.
        """
        try:
            self._open = [call for call in self._open if not call.advance()]
        except errors.CommError as error:
            self._failure = error
            raise

    def wait(self, call: Call, limit: float) -> None:
        """Block until ``call`` is done; raises the failure that prevents it."""
        began = looked = time.monotonic()
        polls = 0
        while not call.done:
            self._raise_failure()
            self.advance()
            if call.done:
                return
            polls += 1
            if polls < SPINS:
                os.sched_yield()
                continue
            now = time.monotonic()
            waited = now - began
            if now - looked > max(LOOK_SECONDS, waited / 20):
                looked = now
                self._look(call, waited)
            if waited > limit:
                missing = errors.name_ranks(call.missing()) if call.missing() else "any rank"
                self._fail(
                    errors.PeerTimeout(
                        f"no answer from {missing} in {limit:g} s: rank {call.rank} waits in "
                        f"{call.text}"
                    )
                )
            time.sleep(min(LONGEST_SLEEP, waited * SLEEP_SHARE))

    def end(self, rank: int, limit: float) -> bool:
        """Finish what others may still need; whether that was all.  Then tell that ``rank`` ended.

        What nobody will ever answer stays with MPI, and what it reads and writes stays alive.
        """
        deadline = time.monotonic() + limit
        while self._open and self._failure is None and time.monotonic() < deadline:
            self.advance()
            time.sleep(0.0002)
        if self._open:
            abandoned.extend(self._open)
        self._store.set(f"{ENDED}/{rank}", "1")
        return not self._open and self._failure is None

    def tell_failure(self, rank: int, error: BaseException) -> None:
        """``rank`` raised ``error``: let whoever waits know; the first one counts."""
        if not isinstance(error, errors.RankFailed):
            text = f"rank {rank} raised {type(error).__name__}: {error}"
            self._store.compare_set(FAILED, "", json.dumps([rank, text]))

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise self._failure.again()

    def _fail(self, error: errors.CommError) -> None:
        self._failure = error
        raise error

    def _look(self, call: Call, waited: float) -> None:
        """Whether the store tells why this call will never be done."""
        if self._store.check([FAILED]):
            rank, text = json.loads(self._store.get(FAILED))
            self._fail(errors.RankFailed(text, rank))
        if waited < PATIENCE_SECONDS:
            return
        if call.key:
            self._compare(call)
        missing = call.missing()
        gone = [rank for rank in missing if self._store.check([f"{ENDED}/{rank}"])]
        anybody = call.request.operation == "recv" and call.request.peer is None
        if not gone or (anybody and gone != missing):
            return
        # What they sent before they ended is here by now.
        deadline = time.monotonic() + ENDED_SECONDS
        while time.monotonic() < deadline:
            self.advance()
            if call.done:
                return
            time.sleep(LONGEST_SLEEP)
        self._fail(
            errors.RankEnded(
                f"{errors.name_ranks(gone)} ended without joining {call.text}, where rank "
                f"{call.rank} waits",
                gone[0],
            )
        )

    def _compare(self, call: Call) -> None:
        """Fail if a rank that waits in the same call of the group calls something else."""
        own: list[Any] = [call.request.text()]
        own.append(zlib.crc32(repr(call.request.signature()).encode()))
        if not call.told:
            call.told = True
            self._store.set(f"{call.key}/{call.rank}", json.dumps(own))
        calls = {call.rank: own}
        for rank in call.ranks:
            if rank != call.rank and self._store.check([f"{call.key}/{rank}"]):
                calls[rank] = json.loads(self._store.get(f"{call.key}/{rank}"))
        if len({digest for _, digest in calls.values()}) < 2:
            return
        alike: dict[str, list[int]] = {}
        for rank, (text, _) in sorted(calls.items()):
            alike.setdefault(text, []).append(rank)
        lines = [
            f"{errors.name_ranks(ranks)} {'call' if len(ranks) > 1 else 'calls'} {text}"
            for text, ranks in alike.items()
        ]
        number = call.key.rpartition("/")[2]
        self._fail(
            errors.CollectiveMismatch(
                f"call {number} of group {errors.spans(call.ranks)} does not match: "
                + "; ".join(lines)
            )
        )


#: Calls that ended ranks left unfinished: MPI may still write into their tensors.
abandoned: list[Call] = []
