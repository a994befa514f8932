"""Execute a schedule with send and recv of any backend.

    start     round 0: all its receives and sends are posted
    wait      round 0: each receive is waited for and combined
              round 1: posted, waited for, ...
              in the end: all sends are waited for

A received part that replaces lands where it belongs, one that is combined in a scratch buffer, made
once for the largest round.  What is received is combined while later receives of the round, and
sends of any round, are still under way; elements that a send may be reading change only after it.
Nothing runs beside the program: between ``start`` and ``wait`` only the first round moves.  So all
ranks must wait for their collectives in the same order, as all strategies do.

A long vector is reduced in several lanes (:class:`Lanes`), each a schedule over a part of its own.
Messages of one collective carry one tag, so that several may be under way.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from shardproof.comm import Comm, Recv
from shardproof.comm import Send as Sending
from shardproof.impls.reference.collectives.schedule import (
    Reduce,
    Replace,
    Round,
    Schedule,
    Send,
    Transfer,
    cut,
    lanes,
    made,
)

#: What combines two parts; ``avg`` divides once, in the end.
COMBINE: dict[str, Callable[..., Tensor]] = {
    "sum": torch.add,
    "avg": torch.add,
    "product": torch.mul,
    "min": torch.minimum,
    "max": torch.maximum,
    "band": torch.bitwise_and,
    "bor": torch.bitwise_or,
    "bxor": torch.bitwise_xor,
}


class Running:
    """A collective in flight over the contiguous ``data``; a ``Work``.

    ``then`` is called once, when the last round has ended.
    """

    def __init__(
        self,
        rounds: Iterable[Round],
        data: Tensor,
        comm: Comm,
        op: str = "sum",
        then: Callable[[], object] | None = None,
    ) -> None:
        if not data.is_contiguous():
            raise ValueError("the tensor of a collective must be contiguous")
        self.rounds = list(made(rounds))
        self.data, self.comm, self.op = data.detach().view(-1), comm, op
        self.then = then
        self.tag = comm.new_tag()
        needed = max((scratch_elements(transfers) for transfers in self.rounds), default=0)
        self.scratch = self.data.new_empty(needed)
        self.next, self.done = 0, False  # the round to be posted; whether all have ended
        self.receives: list[tuple[Transfer, Tensor, Any]] = []  # (transfer, memory, handle)
        self.sends: list[tuple[range, Any]] = []  # of all rounds so far: (elements, handle)
        self.post()

    def post(self) -> None:
        """Start all transfers of the next round."""
        transfers = self.rounds[self.next] if self.next < len(self.rounds) else []
        self.next += 1
        places, free = [], 0
        for one in transfers:
            place = self.data[one.elements.start : one.elements.stop]
            if isinstance(one, Reduce):
                place = self.scratch[free : free + len(one.elements)]
                free += len(one.elements)
            elif isinstance(one, Replace):
                self.settle(one.elements)
            places.append(place)
        handles = self.comm.batch(
            [
                (Sending if isinstance(one, Send) else Recv)(place, one.peer, self.tag)
                for one, place in zip(transfers, places, strict=True)
            ]
        )
        if len(handles) < len(transfers):
            handles = handles * len(transfers)  # NCCL: one handle for the whole batch
        for one, place, handle in zip(transfers, places, handles, strict=True):
            if isinstance(one, Send):
                self.sends.append((one.elements, handle))
            else:
                self.receives.append((one, place, handle))

    def finish(self) -> None:
        """Wait for the receives of the posted round and combine the received elements."""
        for one, place, handle in self.receives:
            handle.wait()
            if isinstance(one, Reduce):
                self.settle(one.elements)
                self.combine(one, place)
        self.receives = []

    def settle(self, elements: range) -> None:
        """Wait for sends that may still read ``elements``, which are about to change."""
        for sent in [each for each in self.sends if overlap(each[0], elements)]:
            sent[1].wait()
            self.sends.remove(sent)

    @torch.no_grad()
    def combine(self, one: Reduce, received: Tensor) -> None:
        """Combine with the lower rank's operand first, so that both sides of an exchange agree."""
        own = self.data[one.elements.start : one.elements.stop]
        pair = (received, own) if one.peer < self.comm.rank else (own, received)
        COMBINE[self.op](*pair, out=own)

    def advance(self) -> bool:
        """Finish the posted round and post the next one; false if there was none."""
        if not self.receives and self.next >= len(self.rounds):
            return False
        self.finish()
        self.post()
        return True

    def is_completed(self) -> bool:
        """Whether the result is ready; never before a caller has waited for it."""
        return self.done

    @torch.no_grad()
    def wait(self) -> None:
        """Return when ``data`` holds the result."""
        if self.done:
            return
        while self.advance():
            pass
        self.settle(range(self.data.numel()))
        self.done = True
        self.scratch = self.data[:0]  # whoever keeps the handle keeps no memory
        if self.op == "avg":
            self.data.div_(self.comm.size)
        if self.then is not None:
            self.then()


class Lanes:
    """Collectives over parts of one vector, in flight together; a ``Work``.

    Their rounds take turns: while one lane's messages are combined, those of the others travel.
    """

    def __init__(self, running: Sequence[Running]) -> None:
        self.running = running

    def wait(self) -> None:
        """Return when all results are ready."""
        live = list(self.running)
        while live:
            live = [each for each in live if each.advance()]
        for each in self.running:
            each.wait()


def in_lanes(
    schedule: Schedule, data: Tensor, comm: Comm, kind: type[Running] = Running
) -> Running | Lanes:
    """Start an all-reduce of ``data`` in as many lanes as are useful."""
    parts = cut(range(data.numel()), lanes(data.numel()))
    flat = data.detach().view(-1)
    running = [
        kind(schedule(comm.rank, comm.size, len(p)), flat[p.start : p.stop], comm) for p in parts
    ]
    return running[0] if len(running) == 1 else Lanes(running)


def scratch_elements(transfers: Round) -> int:
    """Number of elements that a round receives into separate memory."""
    return sum(len(one.elements) for one in transfers if isinstance(one, Reduce))


def overlap(a: range, b: range) -> bool:
    """Whether two ranges of elements overlap."""
    return max(a.start, b.start) < min(a.stop, b.stop)
