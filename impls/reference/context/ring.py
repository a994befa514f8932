"""Ring attention: blocks of keys and values travel from rank to rank (arXiv 2310.01889).

Every rank keeps its queries.  In each round it attends to the block that it has, while that block
goes to the next rank and another one comes from the rank before.

    4 ranks     round 0   round 1   round 2   round 3        rank 0 -> rank 1
    rank 0      kv0       kv3       kv2       kv1               ^         |
    rank 1      kv1       kv0       kv3       kv2               |         v
    rank 2      kv2       kv1       kv0       kv3            rank 3 <- rank 2
    rank 3      kv3       kv2       kv1       kv0

    forward     round r < C-1   start to send the block, and to receive the next one
                each round      scores against the block -> partial result and its log-sum-exp,
                                merged into what there is (float32 or wider)
                round r < C-1   wait for the next block
    backward    each round      as forward: the same blocks travel the same way once more
                each round      the query gradient grows here; the block's own gradient comes from
                                the rank before, takes this rank's terms, and leaves
                last round      its C-th message takes each block's gradient home

So a rank sends 2 C - 1 messages a layer in backward: C - 1 blocks, when a round begins, and C
gradients, when the terms of a round are there.  A gradient travels in float32 or wider.

Partial results are merged as ``out = sum_j exp(lse_j - lse) out_j``, ``lse = log sum_j
exp(lse_j)``.  The first block is a rank's own, in which each query sees at least itself, so ``lse``
is finite from then on.  What is computed of one block stands in ``block.py``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from shardproof.comm import Comm, Recv, Send
from shardproof.impls.reference.context.block import attend, gradients

#: Waits for a message, and returns what came.
Arrival = Callable[[], Tensor]


@dataclass(frozen=True)
class Seen:
    """The part of the scores against one block that is computed.

    From the first to the last of the ``rows`` that see something of the block, and of the
    ``columns`` that some row sees; the mask between these.  ``length``: positions of the block.
    """

    rows: slice
    columns: slice
    mask: Tensor
    length: int

    @classmethod
    def of(cls, hides: Tensor) -> Seen:
        """The scores that ``hides`` ``(..., rows, columns)`` leaves."""
        shows = ~hides.flatten(0, -3).all(0) if hides.dim() > 2 else ~hides
        rows, columns = (hull(shows.any(dim)) for dim in (1, 0))
        return cls(rows, columns, hides[..., rows, columns], hides.shape[-1])

    def hides(self, query: Tensor) -> Tensor:
        """The mask of the stacked rows of ``query``, for all heads of a sample or of all."""
        group, rows = query.shape[2:4]
        shape = *self.mask.shape[:-2], group, rows, self.mask.shape[-1]
        return self.mask[..., None, :, :].expand(shape).flatten(-3, -2)

    def __bool__(self) -> bool:
        """Whether any row sees anything."""
        return self.rows.stop > self.rows.start


def hull(marks: Tensor) -> slice:
    """From the first to the last of ``marks`` that is true; an empty slice if none is."""
    numbers = marks.nonzero().flatten().tolist()
    return slice(numbers[0], numbers[-1] + 1) if numbers else slice(0, 0)


class Ring:
    """Attention of this rank's queries over the blocks of all ranks of ``comm``."""

    #: The scores against a block that are computed, by its mask.
    seen_of: Callable[[Tensor], Seen] = staticmethod(Seen.of)

    def __init__(self, comm: Comm) -> None:
        self.comm = comm
        self.next, self.previous = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size

    def attend(self, core: nn.Module, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """The attention of ``core``, whose ``span`` tells which positions each rank has."""
        span: Any = core.span
        # Made here: when backward comes, the span may be that of another micro-batch.
        seen = [self.seen_of(span.hides(span.rows, columns)) for columns in span.parts]
        result: Tensor = _Ring.apply(query, key, value, self, seen)
        return result

    # ----------------------------------------------------------------------------------- messages

    def rounds(self) -> Sequence[int]:
        """The home of the block of each round: this rank first, then those behind it."""
        return [(self.comm.rank - number) % self.comm.size for number in range(self.comm.size)]

    def pass_on(self, tensor: Tensor, length: int) -> Arrival:
        """Start to send ``tensor``, keys and values or their gradient, to the next rank; what
        comes has ``length`` positions.
        """
        came = tensor.new_empty(*tensor.shape[:3], length, tensor.shape[4])
        tensor = tensor.contiguous()
        # A rank without positions has no block; both ends know this and send none.
        halves: list[Send | Recv] = [Send(tensor, self.next)] if tensor.numel() else []
        halves += [Recv(came, self.previous)] if came.numel() else []
        works = self.comm.batch(halves) if self.comm.size > 1 else []

        def arrive() -> Tensor:
            for work in works:
                work.wait()
            return came if self.comm.size > 1 else tensor

        return arrive

    # ------------------------------------------------------------------------------------ forward

    def forward(self, query: Tensor, block: Tensor, seen: Sequence[Seen]) -> tuple[Tensor, Tensor]:
        """Results ``(samples, KV heads, group, rows, size)`` and the log-sum-exp of each row."""
        result, total = torch.zeros_like(query), query.new_full(query.shape[:-1], -math.inf)
        for number, source in enumerate(order := self.rounds()):
            is_last = number == len(order) - 1
            if not is_last:
                coming = self.pass_on(block, seen[order[number + 1]].length)
            if seen[source]:
                rows = seen[source].rows
                part = self.partial(query[..., rows, :], block, seen[source])
                if number == 0:
                    # The block of this rank: there is nothing yet to merge with.
                    result, total = part
                else:
                    held = result[..., rows, :], total[..., rows]
                    result[..., rows, :], total[..., rows] = self.merged(held, part)
            if not is_last:
                block = coming()
        return result, total

    def partial(self, query: Tensor, block: Tensor, seen: Seen) -> tuple[Tensor, Tensor]:
        """Attention of some rows over one block alone, and its log-sum-exp."""
        result, lse = attend(stacked(query), *wide_parts(block, seen), seen.hides(query))
        return result.view_as(query), lse.reshape(query.shape[:-1])

    def merged(
        self, held: tuple[Tensor, Tensor], part: tuple[Tensor, Tensor]
    ) -> tuple[Tensor, Tensor]:
        """Two results over different keys as one."""
        total = torch.logaddexp(held[1], part[1])
        one, other = ((lse - total).exp()[..., None] for _, lse in (held, part))
        return held[0] * one + part[0] * other, total

    # ----------------------------------------------------------------------------------- backward

    def backward(
        self, query: Tensor, block: Tensor, seen: Sequence[Seen], back: tuple[Tensor, ...]
    ) -> tuple[Tensor, Tensor]:
        """Gradients of the queries and of this rank's own block; ``back``: the gradient of the
        result, the result, and the log-sum-exp of each row.
        """
        of_query, arrival = torch.zeros_like(query), None
        for number, source in enumerate(order := self.rounds()):
            is_last = number == len(order) - 1
            if not is_last:
                coming = self.pass_on(block, seen[order[number + 1]].length)
            terms = torch.zeros_like(block, dtype=query.dtype)
            if seen[source]:
                rows, columns = seen[source].rows, seen[source].columns
                some = query[..., rows, :], *(part[..., rows, :] for part in back[:2])
                own, terms[..., columns, :] = self.terms(
                    some, back[2][..., rows], wide_parts(block, seen[source]), seen[source]
                )
                of_query[..., rows, :] += own
            if arrival is not None:
                terms = self.grown(terms, arrival())
            following = order[(number + 1) % len(order)]
            arrival = self.pass_on(terms, seen[following].length)
            if not is_last:
                block = coming()
        assert arrival is not None
        return of_query, arrival()

    def terms(
        self,
        rows: tuple[Tensor, ...],
        lse: Tensor,
        block: tuple[Tensor, Tensor],
        seen: Seen,
    ) -> tuple[Tensor, Tensor]:
        """The terms that one block adds to the gradients of queries, and of the block."""
        query, gradient, result = (stacked(part) for part in rows)
        back = gradient, result, lse.flatten(2)
        own, *of_block = gradients(query, *block, seen.hides(rows[0]), back)
        return own.view_as(rows[0]), torch.stack(of_block)

    def grown(self, terms: Tensor, came: Tensor) -> Tensor:
        """The gradient of a block: what came with it, and this rank's ``terms``."""
        return came + terms


def wide_parts(block: Tensor, seen: Seen) -> tuple[Tensor, Tensor]:
    """Keys and values of the columns that are seen, ``(samples, KV heads, columns, size)``."""
    wide = torch.promote_types(block.dtype, torch.float32)
    key, value = block[..., seen.columns, :].to(wide)
    return key, value


def stacked(part: Tensor) -> Tensor:
    """``(samples, KV heads, group, rows, size)``, the rows of a group below each other."""
    return part.flatten(2, 3)


class _Ring(torch.autograd.Function):
    """A ring as autograd sees it: its results, and their gradient."""

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, ring: Ring, seen: Sequence[Seen]
    ) -> Tensor:
        wide = grouped(query, key.shape[1])
        result, lse = ring.forward(wide, torch.stack([key, value]), seen)
        result = result.flatten(1, 2)
        ctx.save_for_backward(query, key, value, result, lse)
        ctx.ring, ctx.seen = ring, seen
        return result.to(query.dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, result, lse = ctx.saved_tensors
        heads = key.shape[1]
        back = grouped(gradients[0], heads), grouped(result, heads), lse
        block = torch.stack([key, value])
        of_query, of_block = ctx.ring.backward(grouped(query, heads), block, ctx.seen, back)
        of_query = of_query.flatten(1, 2)
        return (of_query.to(query.dtype), *of_block.to(key.dtype), None, None)


def grouped(tensor: Tensor, heads: int) -> Tensor:
    """``(samples, query heads, rows, size)`` -> ``(samples, KV heads, group, rows, size)``, in
    float32 or wider.
    """
    wide = torch.promote_types(tensor.dtype, torch.float32)
    return tensor.to(wide).unflatten(1, (heads, tensor.shape[1] // heads))
