"""The bytes of PyTorch 2.13's ring attention under DDP.

Paths are those below ``torch/distributed/tensor/experimental``.
"""

from __future__ import annotations

from fractions import Fraction

from shardproof.axes import cutting
from shardproof.costs.context import Exchange
from shardproof.costs.ddp import DDP
from shardproof.costs.model import Flow, Operation
from shardproof.costs.model_facts import ITEMSIZE


class TorchContext(DDP):
    """DDP over replicate x context, and blocks of keys and values that come by."""

    strategy, textbook = "torch_context", "context"
    source = (
        "gradients as ddp, over replicate x context; _context_parallel/_attention.py: keys and "
        "values of all positions in one all-gather (_AllGatherRotater), or in C-1 all-to-alls in "
        "which each rank sends one block (_AllToAllRotater), forward and once more in backward; "
        "their gradients in C all-to-alls, in float32 where convert_to_f32 is set "
        "(_templated_ring_attention_backward); with as many heads as the queries have"
    )

    def flows(self) -> list[Flow]:
        """Calls and bytes of one step."""
        return [*super().flows(), *self.attention()]

    def attention(self) -> list[Flow]:
        """Blocks forward and backward, and the gradients of blocks."""
        facts, exchange = self.facts, Exchange(self.facts)
        ranks, passes = exchange.ranks, exchange.forwards + exchange.backwards
        if ranks == 1:
            return []
        gathers = facts.option("rotate_method", "allgather") == "allgather"
        operation: Operation = "all_gather" if gathers else "all_to_all"
        rounds = 1 if gathers else ranks - 1
        found = []
        for samples, length in exchange.shapes:
            for heads, _, size, item in exchange.layers:
                #   C blocks of keys and values, each with so many elements:  numbers / C
                numbers = 2 * samples * length * heads * size
                wide = ITEMSIZE["float32"] if facts.option("convert_to_f32", True) else item
                moved = passes * (ranks - 1) * numbers * item
                sent = exchange.backwards * ranks * numbers * wide
                found += [
                    self.made(operation, moved, passes * rounds),
                    self.made("all_to_all", sent, exchange.backwards * ranks),
                ]
        return found

    def made(self, operation: Operation, sent: int, calls: int) -> Flow:
        """So many ``calls`` of each rank along the axis, which send so many bytes in all."""
        axis = cutting("positions")
        ranks = self.facts.size(axis)
        return Flow(axis, operation, Fraction(sent), calls * ranks, ranks=ranks)
