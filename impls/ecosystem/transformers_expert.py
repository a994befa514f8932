"""transformers' ``DistributedConfig`` with ``ep_size``: experts by all-to-all, under FSDP2 or HSDP.

    what                 where
    experts              E/X of each layer on a rank of the axis ``expert``, sharded over ``shard``
    all the rest         sharded over shard x expert
    tokens               an all-to-all to their experts, another back; weights where they came from

``ep_size`` of transformers is cut out of ``fsdp_size``, so that is shard x expert here.  Where the
two are equal, the experts' group of FSDP has one rank, and torch divides their gradients twice in
float64 (docs/findings.md, 67).  Tried with transformers 5.24.0.
"""

from __future__ import annotations

from typing import ClassVar

from shardproof.impls.ecosystem.transformers_fsdp import TransformersFSDP


class TransformersExpert(TransformersFSDP):
    """The adapter."""

    strategy = "expert"
    axes: ClassVar[tuple[str, ...]] = ("replicate", "shard", "expert")

    def sizes(self) -> dict[str, int]:
        """FSDP shards over both axes, of which one parts the experts."""
        axes = self.mesh.axes
        sizes = {"dp_replicate_size": axes.get("replicate", 1), "ep_size": axes["expert"]}
        return sizes | {"fsdp_size": axes.get("shard", 1) * axes["expert"]}


IMPLEMENTATION = TransformersExpert
