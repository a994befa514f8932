"""The bytes of PyTorch 2.13's optimizers over whole copies of the model."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from functools import cached_property

from shardproof.costs import model
from shardproof.costs.ddp import DDP
from shardproof.costs.local import LocalSGD
from shardproof.costs.model import Bytes, CostModel, Flow, Local
from shardproof.costs.model_facts import used


class PostLocalSGD(LocalSGD):
    """PyTorch's local SGD, which already meets after the first step."""

    strategy = "post_local_sgd"
    source = "torch PeriodicModelAverager: step % period == 0. " + LocalSGD.source
    ahead = 0


class ZeroRedundancyOptimizer(CostModel):
    """DDP, and an optimizer that assigns whole parameters to ranks and broadcasts the updated ones:
    2 (N-1)/N + (N-1)/N = 3 (N-1)/N Psi per rank, 1.5 times ZeRO-1 by reduce-scatter + all-gather.
    """

    strategy, textbook = "zero_redundancy_optimizer", "zero1"
    source = (
        "as ddp; then every trained parameter is broadcast by its owner, or all of a rank's in one "
        "bucket (an fp32 number for a rank that owns none): optim/zero_redundancy_optimizer.py, "
        "_sync_params, _build_param_buckets; a step that a scaler leaves out broadcasts nothing"
    )
    divided = (False, False, True)

    @property
    def ddp(self) -> DDP:
        """The cost model of the DDP around it."""
        return DDP(self.facts)

    @cached_property
    def owner(self) -> Mapping[str, int]:
        """The owner of each parameter: the largest first, to the rank with the fewest elements
        (``_partition_parameters``).
        """
        sizes, owner = [0] * self.facts.world, dict[str, int]()
        for group in self.facts.grouped:
            for tensor in sorted(group, key=lambda t: t.numel, reverse=True):
                rank = sizes.index(min(sizes))
                owner[tensor.name] = rank
                sizes[rank] += tensor.numel
        return owner

    def flows(self) -> list[Flow]:
        """DDP's calls, and a broadcast of each rank's updated parameters."""
        facts = self.facts
        sent = [t.nbytes for t in facts.trainable]
        if facts.option("parameters_as_bucket_view", False):
            owned = Counter[int]()
            for tensor in facts.trainable:
                owned[self.owner[tensor.name]] += tensor.nbytes
            # A rank without parameters broadcasts one fp32 number.
            sent = [owned[rank] or 4 for rank in range(facts.world)]
        moved = self.ddp.flows()
        if facts.skipped:
            return moved
        copies = model.flow(
            facts, facts.sharded, "broadcast", sent
        )  # empty parameters are sent, too
        return [*moved, *(replace(one, calls=len(sent) * facts.world) for one in copies)]

    def resident(self, rank: int, step: int, updated: int) -> Bytes:
        """Bytes by class on ``rank`` after ``step``."""
        mine = [(t, t.numel) for t in self.facts.trainable if self.owner[t.name] == rank]
        state = model.state_bytes(self.facts, mine, updated)
        held = self.ddp.resident(rank, step, updated) | {"optimizer_state": state}
        if not self.facts.option("gradient_as_bucket_view", False):
            held["gradients"] = sum(t.nbytes for t in used(self.facts.parameters, step))
        return held

    def communication_at_rest(self, rank: int, step: int) -> int:
        """DDP's buckets, unless gradients live in them, and its copies of buffers; one number per
        parameter for its use, and one on a rank without parameters.
        """
        facts = self.facts
        own = facts.option("gradient_as_bucket_view", False)
        buckets = 0 if own else sum(t.nbytes for t in facts.trainable)
        return buckets + facts.float_buffer_bytes + 4 * (len(facts.trainable) + 1)

    def local(self, rank: int) -> Local:
        """Name -> elements; optimizer state of own parameters only."""
        of_ddp = self.ddp.local(rank)
        own = {n: size for n, size in of_ddp.optimizer.items() if self.owner[n] == rank}
        return Local(of_ddp.parameters, of_ddp.gradients, own)
