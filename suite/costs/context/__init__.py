"""Context parallelism: gradients over all ranks, and the messages of attention."""

from __future__ import annotations

from shardproof.costs.context.exchange import Exchange as Exchange
from shardproof.costs.ddp import DDP
from shardproof.costs.model import Flow


class Context(DDP):
    """Full replication; gradients are summed over all ranks, positions of samples are cut."""

    strategy = "context"
    source = (
        "keys and values of a layer forward, their gradients backward, (C-1) 2 B S K D e bytes "
        "each: all-gather, Llama 3 (arXiv 2407.21783) section 3.3.2; ring, arXiv 2310.01889, with "
        "the blocks once more in backward and C hops of gradients in float32 or wider; heads, "
        "(C-1)/C B S (2 H + 2 K) D e each: DeepSpeed-Ulysses (arXiv 2309.14509); gradients of "
        "parameters as ddp, over replicate x context"
    )

    @property
    def exchange(self) -> Exchange:
        """The messages of attention."""
        return Exchange.of(self.facts)

    def flows(self) -> list[Flow]:
        """Gradients over all ranks, and what attention sends."""
        return [*self.packed("all_reduce", self.facts.trainable), *self.exchange.flows()]

    def metadata_bytes(self) -> int:
        """Choices of routers."""
        return self.exchange.metadata_bytes()
