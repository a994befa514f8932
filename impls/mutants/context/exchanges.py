"""Faults of attention over positions of other ranks, planted in ``reference/context``.

The ring: masks, the merge of partial results, the way home of gradients, its messages. Gathered
keys and values, and heads: order, sums, repeated heads.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from shardproof.impls.mutants import declare
from shardproof.impls.mutants.context.positions import gpt
from shardproof.impls.reference.context import ReferenceContext
from shardproof.impls.reference.context.exchanges import Gathered, Heads
from shardproof.impls.reference.context.ring import Arrival, Ring, Seen

mutant = declare.family(
    ReferenceContext, mesh={"context": 3}, workload=gpt(), options={"method": "ring"}
)
GATHERED, HEADS = {"method": "all_gather"}, {"method": "all_to_all"}
ZIGZAG = {"method": "all_gather", "cut": "zigzag"}


class _Masks:
    """Attend under other masks; a base in front of a method of attention."""

    def attend(self, core: nn.Module, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        span: Any = core.span
        right = span.hides
        span.hides = lambda rows, columns: self.hidden(right, span, columns)
        try:
            result: Tensor = super().attend(core, query, key, value)  # type: ignore[misc]
            return result
        finally:
            del span.hides

    def hidden(self, right: Any, span: Any, columns: Tensor) -> Tensor:
        """The ``columns`` hidden from this rank, where ``right`` is the true mask."""
        raise NotImplementedError


@mutant("context_ring_sees_later_blocks", says="no mask hides keys", killed_by=("equivalence",))
class SeesLaterBlocks(_Masks, Ring):
    """Only a rank's own block is masked: queries see keys of later positions elsewhere."""

    def hidden(self, right: Any, span: Any, columns: Tensor) -> Tensor:
        mask: Tensor = right(span.rows, columns)
        return mask if columns is span.parts[self.comm.rank] else torch.zeros_like(mask)


@mutant("context_ring_sees_own_block_only", says="queries see no key", killed_by=("equivalence",))
class SeesOwnBlockOnly(_Masks, Ring):
    """Blocks of other ranks travel and are not used."""

    def hidden(self, right: Any, span: Any, columns: Tensor) -> Tensor:
        mask: Tensor = right(span.rows, columns)
        return mask if columns is span.parts[self.comm.rank] else torch.ones_like(mask)


@mutant("context_ring_mask_is_off_by_a_block", says="off by one rank", killed_by=("equivalence",))
class MaskIsOffByABlock(_Masks, Ring):
    """A block of another rank is masked as the block before it."""

    def hidden(self, right: Any, span: Any, columns: Tensor) -> Tensor:
        source = next(n for n, part in enumerate(span.parts) if part is columns)
        named = columns if source == self.comm.rank else span.parts[source - 1]
        return right(span.rows, named)


@mutant(
    "context_ring_counts_its_own_block_twice",
    says="counts its own block of keys twice in the softmax",
    killed_by=("equivalence",),
)
class CountsItsOwnBlockTwice(Ring):
    """The diagonal block is computed in the first round and merged once more."""

    def partial(self, query: Tensor, block: Tensor, seen: Seen) -> tuple[Tensor, Tensor]:
        part, lse = super().partial(query, block, seen)
        return part, lse + math.log(2) if seen.mask.any() else lse


@mutant(
    "context_ring_merges_in_low_precision",
    says="merged by log-sum-exps in bfloat16",
    killed_by=("equivalence",),
)
class MergesInLowPrecision(Ring):
    """The log-sum-exp of partial results is kept in bfloat16."""

    def partial(self, query: Tensor, block: Tensor, seen: Seen) -> tuple[Tensor, Tensor]:
        part, lse = super().partial(query, block, seen)
        return part, lse.to(torch.bfloat16).to(lse.dtype)


@mutant(
    "context_ring_merges_by_the_largest",
    says="merged by the largest log-sum-exp",
    killed_by=("equivalence",),
)
class MergesByTheLargest(Ring):
    """The merged log-sum-exp is the larger of two, not that of their sum."""

    def merged(
        self, held: tuple[Tensor, Tensor], part: tuple[Tensor, Tensor]
    ) -> tuple[Tensor, Tensor]:
        right, total = super().merged(held, part)
        return right, torch.where(held[1] == -math.inf, total, torch.maximum(held[1], part[1]))


@mutant(
    "context_ring_loses_the_last_gradient",
    says="lack the terms of the last rank that it travels to",
    killed_by=("equivalence",),
)
class LosesTheLastGradient(Ring):
    """The terms of the last round are lost from the gradient of a block on its way home."""

    def backward(
        self, query: Tensor, block: Tensor, seen: Sequence[Seen], back: tuple[Tensor, ...]
    ) -> tuple[Tensor, Tensor]:
        self.left = len(seen)
        return super().backward(query, block, seen, back)

    def grown(self, terms: Tensor, came: Tensor) -> Tensor:
        self.left -= 1
        return super().grown(terms, came) if self.left > 1 else came


@mutant(
    "context_ring_gradients_stay_with_the_neighbour",
    says="axis context, recv: 36 calls",
    killed_by=("equivalence", "traffic"),
)
class GradientsStayWithTheNeighbour(Ring):
    """The last message, which takes gradients of blocks home, is left out."""

    passed = 0

    def pass_on(self, tensor: Tensor, length: int) -> Arrival:
        # Of a step's C-1 messages in forward, and C-1 and C in backward, the last one.
        self.passed = (self.passed + 1) % (3 * self.comm.size - 2)
        return super().pass_on(tensor, length) if self.passed else lambda: tensor


@mutant(
    "context_ring_forgets_what_came",
    says="have the terms of the last rank that it travels to only",
    killed_by=("equivalence",),
)
class ForgetsWhatCame(Ring):
    """A block's gradient is replaced, not increased, by the terms of each rank."""

    def grown(self, terms: Tensor, came: Tensor) -> Tensor:
        return terms


@mutant(
    "context_ring_recomputes_without_messages",
    says="axis context, recv: 30 calls",
    killed_by=("equivalence", "traffic"),
    options={"method": "ring", "recompute_every": 1},
)
class RecomputesWithoutMessages(Ring):
    """A recomputed forward attends to the rank's own block in each round, and sends nothing."""

    again = False

    def forward(self, query: Tensor, block: Tensor, seen: Sequence[Seen]) -> tuple[Tensor, Tensor]:
        # Only a recomputed forward runs inside of a backward.
        self.again = torch._C._current_graph_task_id() != -1
        try:
            return super().forward(query, block, seen)
        finally:
            self.again = False

    def pass_on(self, tensor: Tensor, length: int) -> Arrival:
        return (lambda: tensor) if self.again else super().pass_on(tensor, length)


@mutant(
    "context_ring_scores_what_is_hidden",
    says="expected 4,096 floating-point operations of attention, counted 12,288",
    killed_by=("active",),
)
class ScoresWhatIsHidden(Ring):
    """Every block is scored as a whole, and what no query sees of it is masked then."""

    @staticmethod
    def seen_of(hides: Tensor) -> Seen:
        rows, columns = (slice(0, size) for size in hides.shape[-2:])
        return Seen(rows, columns, hides, columns.stop)


@mutant("context_ring_sends_blocks_twice", says="recv: 84 calls", killed_by=("traffic",))
class SendsBlocksTwice(Ring):
    """Each message is sent once more, and what comes first is thrown away."""

    def pass_on(self, tensor: Tensor, length: int) -> Arrival:
        super().pass_on(tensor, length)()
        return super().pass_on(tensor, length)


# --------------------------------------------------------------------------- gathered, and by heads


@mutant(
    "context_gather_keeps_its_own_gradient",
    says="have only the terms of that rank's queries",
    killed_by=("equivalence", "traffic"),
    options=GATHERED,
)
class GatherKeepsItsOwnGradient(Gathered):
    """The backward of a gather takes this rank's part, and does not add those of others."""

    def scatter(self, whole: Tensor, lengths: Sequence[int]) -> Tensor:
        return whole.split([*lengths], 3)[self.comm.rank]


@mutant(
    "context_gathers_in_order_of_ranks",
    says="masked as if each rank had the next positions",
    killed_by=("equivalence",),
    options=ZIGZAG,
)
class GathersInOrderOfRanks(_Masks, Gathered):
    """Gathered keys are masked as if each rank had the next positions, but chunks alternate."""

    def hidden(self, right: Any, span: Any, columns: Tensor) -> Tensor:
        mask: Tensor = right(span.rows, columns.sort().values)
        return mask


@mutant(
    "context_gathers_in_float32",
    says="axis context, all_gather: .* 2 times narrower, as another dtype",
    killed_by=("equivalence", "traffic"),
    options=GATHERED,
)
class GathersInFloat32(Gathered):
    """Keys and values are rounded to float32 when they travel, although the model is wider."""

    def gather(self, block: Tensor, lengths: Sequence[int]) -> Tensor:
        return super().gather(block.float(), lengths).to(block.dtype)


@mutant(
    "context_scatters_the_mean",
    says="are averaged over ranks, not summed",
    killed_by=("equivalence",),
    options=GATHERED,
)
class ScattersTheMean(Gathered):
    """Gradients of gathered keys and values are averaged over the ranks that used them."""

    def scatter(self, whole: Tensor, lengths: Sequence[int]) -> Tensor:
        return super().scatter(whole, lengths) / self.comm.size


@mutant(
    "context_repeats_heads_in_turn",
    says="share are repeated in turn, not each by itself",
    killed_by=("equivalence",),
    workload=gpt(heads=4, kv_heads=2),
    mesh={"context": 4},
    options=HEADS,
)
class RepeatsHeadsInTurn(Heads):
    """Fewer key and value heads than ranks are repeated in turn, not each by itself."""

    def repeated(self, part: Tensor, heads: int) -> Tensor:
        right = super().repeated(part, heads)
        times = right.shape[1] // part.shape[1]
        return part.repeat(1, times, 1, 1)


@mutant(
    "context_heads_come_back_elsewhere",
    says="heads come back from the ranks .* in another order",
    killed_by=("equivalence",),
    mesh={"context": 2},
    options=HEADS,
)
class HeadsComeBackElsewhere(Heads):
    """Results return in another order of heads than the queries left in."""

    def turn(self, tensor: Tensor, lengths: Sequence[int], to_heads: bool) -> Tensor:
        result = super().turn(tensor, lengths, to_heads)
        return result if to_heads else result.flip(1)
