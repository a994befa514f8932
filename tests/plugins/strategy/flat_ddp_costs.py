"""What ``flat_ddp`` sends and holds, from shapes and mesh alone.

N ranks, G bytes of trained parameters, padded until N divides their elements:

    reduce-scatter    (N-1) G bytes over all ranks, one call per rank
    all-gather        (N-1) G bytes over all ranks, one call per rank
    gradients         G bytes on each rank; parameters and optimizer state are whole
"""

from __future__ import annotations

from shardproof.costs.ddp import Single
from shardproof.costs.model import Flow, flow
from shardproof.costs.model_facts import ITEMSIZE


class FlatDDPCosts(Single):
    """As one process, but for the buffer of gradients and the calls that sum it."""

    strategy = "flat_ddp"
    source = (
        "an all-reduce is a reduce-scatter and an all-gather, (N-1)/N of the payload a rank each: "
        "Thakur, Rabenseifner and Gropp 2005, section 4.4"
    )

    @property
    def buffer_bytes(self) -> int:
        """G: one buffer in the dtype of the model."""
        trained, ranks = self.facts.trainable, self.facts.world
        elements = sum(tensor.numel for tensor in trained)
        return (elements + -elements % ranks) * ITEMSIZE[trained[0].dtype]

    def flows(self) -> list[Flow]:
        """One reduce-scatter and one all-gather a step, whatever the number of micro-batches."""
        return [
            *flow(self.facts, "replicate", "reduce_scatter", [self.buffer_bytes]),
            *flow(self.facts, "replicate", "all_gather", [self.buffer_bytes]),
        ]

    def gradient_bytes(self, rank: int, step: int) -> int:
        """The whole buffer, padding included, in every step."""
        return self.buffer_bytes

    def communication_at_rest(self, rank: int, step: int) -> int:
        """Nothing: both calls work in place."""
        return 0
