"""Carries a schedule out, with the send and recv of any backend.

    start     round 0: all its receives and sends are posted
    wait      round 0: each receive is waited for and combined; then the sends are waited for
              round 1: posted, waited for, ...

A received part that replaces lands where it belongs, one that is combined in a scratch buffer, made
once for the largest round.  What is received is combined while later receives and sends of the
round are still under way.  Nothing runs beside the program: between ``start`` and ``wait`` only the
first round moves.  So all ranks must wait for their collectives in the same order, as all
strategies do.

Messages of one collective carry one tag, so that several may be under way.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from shardproof.comm import Comm, Op, Recv
from shardproof.comm import Send as Sending
from shardproof.impls.reference.collectives.schedule import (
    Reduce,
    Round,
    Send,
    Transfer,
    made,
)

#: What combines two parts; ``avg`` divides once, in the end.
COMBINE: dict[Op, Callable[..., Tensor]] = {
    "sum": torch.add,
    "avg": torch.add,
    "product": torch.mul,
    "min": torch.minimum,
    "max": torch.maximum,
}


class Running:
    """A collective under way over ``data``, which is contiguous; a ``Work``.

    ``then`` is called once, when the last round has ended.
    """

    def __init__(
        self,
        rounds: Iterable[Round],
        data: Tensor,
        comm: Comm,
        op: Op = "sum",
        then: Callable[[], object] | None = None,
    ) -> None:
        if not data.is_contiguous():
            raise ValueError("collectives take contiguous tensors")
        self.rounds = list(made(rounds))
        self.data, self.comm, self.op = data.detach().view(-1), comm, op
        self.then = then
        self.tag = comm.new_tag()
        needed = max((scratch_elements(transfers) for transfers in self.rounds), default=0)
        self.scratch = self.data.new_empty(needed)
        self.next, self.done = 0, False  # the round to be posted; whether all have ended
        self.posted: list[tuple[Transfer, Tensor, Any]] = []  # (transfer, its memory, its handle)
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
            places.append(place)
        handles = self.comm.batch(
            [
                (Sending if isinstance(one, Send) else Recv)(place, one.peer, self.tag)
                for one, place in zip(transfers, places, strict=True)
            ]
        )
        if len(handles) < len(transfers):
            handles = handles * len(transfers)  # NCCL: one handle for the whole batch
        self.posted = list(zip(transfers, places, handles, strict=True))

    def finish(self) -> None:
        """Wait for all transfers of the posted round, and combine what came."""
        sends = [(one, handle) for one, _, handle in self.posted if isinstance(one, Send)]
        for one, place, handle in self.posted:
            if isinstance(one, Send):
                continue
            handle.wait()
            if isinstance(one, Reduce):
                # A send that is still reading these elements comes first.
                for sent in [each for each in sends if overlap(each[0].elements, one.elements)]:
                    sent[1].wait()
                    sends.remove(sent)
                self.combine(one, place)
        for _, handle in sends:
            handle.wait()
        self.posted = []

    @torch.no_grad()
    def combine(self, one: Reduce, received: Tensor) -> None:
        """The lower rank's operand comes first, so that both sides of an exchange agree."""
        own = self.data[one.elements.start : one.elements.stop]
        pair = (received, own) if one.peer < self.comm.rank else (own, received)
        COMBINE[self.op](*pair, out=own)

    @torch.no_grad()
    def wait(self) -> None:
        """Return when the result is in ``data``."""
        while self.posted or self.next < len(self.rounds):
            self.finish()
            self.post()
        if self.done:
            return
        self.done = True
        self.scratch = self.data[:0]  # whoever keeps the handle keeps no memory
        if self.op == "avg":
            self.data.div_(self.comm.size)
        if self.then is not None:
            self.then()


def scratch_elements(transfers: Round) -> int:
    """Elements of a round that are received beside the data."""
    return sum(len(one.elements) for one in transfers if isinstance(one, Reduce))


def overlap(a: range, b: range) -> bool:
    """Whether two ranges of elements have one in common."""
    return max(a.start, b.start) < min(a.stop, b.stop)
