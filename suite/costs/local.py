"""Ranks that train alone and meet in every H-th step: local SGD, DiLoCo."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

from shardproof.costs.ddp import Single
from shardproof.costs.model import Bytes, Flow, Local, flow
from shardproof.costs.model_facts import TensorFacts


class LocalSGD(Single):
    """Full replication; parameters are averaged in every H-th step, and nothing else is sent."""

    strategy = "local_sgd"
    source = (
        "one all-reduce of the parameters every H steps: Stich, arXiv 1805.09767, algorithm 1; "
        "bytes of an all-reduce: ZeRO (arXiv 1910.02054) section VII-A"
    )
    #: What ``every`` is where the options do not say.
    every = 8
    #: Steps counted before the first one: with 1, ranks meet after step H - 1.
    ahead = 1

    def flows(self) -> list[Flow]:
        """2 (N-1) P bytes where ranks meet: one all-reduce a dtype; elsewhere none."""
        facts = self.facts
        if (facts.step + self.ahead) % int(facts.option("every", self.every)):
            return []
        tensors = sorted(facts.trainable, key=lambda tensor: tensor.dtype)
        groups = groupby(tensors, key=lambda tensor: tensor.dtype)
        return flow(facts, "replicate", "all_reduce", [sum(t.nbytes for t in g) for _, g in groups])

    def control_limit(self) -> int:
        """Between meetings not a byte of any kind is sent, and a meeting sends no integers."""
        return 0

    def why_not_measured(self) -> str:
        """Which ranks have gradients of a parameter that goes unused no formula says."""
        idle = [t.name for t in self.facts.trainable if not t.in_every_backward]
        return (
            f"{idle[0]!r} goes unused: which ranks hold its state is not promised" if idle else ""
        )

    def why_state_is_not_promised(self) -> str:
        """The same."""
        return self.why_not_measured()

    def trains(self, rank: int) -> bool:
        """Whether ``rank`` has data: without it there is nothing to update by."""
        return self.facts.micro_batches[self.facts.coordinate(rank)["replicate"]] > 0

    def outer(self) -> int:
        """Copies of the parameters that the strategy keeps."""
        return 0

    def gradient_bytes(self, rank: int, step: int) -> int:
        """Of a rank's own use."""
        return super().gradient_bytes(rank, step) if self.trains(rank) else 0

    def resident(self, rank: int, step: int, updated: int) -> Bytes:
        """As one process; what is kept from meeting to meeting counts as optimizer state."""
        own = super().resident(rank, step, updated if self.trains(rank) else -1)
        kept = self.outer() * sum(tensor.nbytes for tensor in self.facts.trainable)
        return own | {"optimizer_state": own["optimizer_state"] + kept}

    def local(self, rank: int) -> Local:
        """Whole tensors; state of what this rank uses, or of all where something is kept."""
        held = {t.name: t.numel for t in self.held_by(rank)}
        own = Local.of(self.facts, held, held if self.trains(rank) else {})
        if not self.outer():
            return own
        return Local(own.parameters, own.gradients, _sizes(self.facts.trainable))


class DiLoCo(LocalSGD):
    """Local SGD with an outer optimizer on where ranks started from."""

    strategy = "diloco"
    source = (
        "one all-reduce of the pseudo-gradient every H steps; the start and the outer momentum are "
        "kept, 8 bytes a parameter in fp32: DiLoCo, arXiv 2311.08105, algorithm 1"
    )

    def outer(self) -> int:
        """The start, and momentum unless it is 0."""
        return 2 if self.facts.option("outer_momentum", 0.9) else 1


class PostLocalSGD(LocalSGD):
    """PyTorch's: it meets after the first step already."""

    strategy = "post_local_sgd"
    source = "torch PeriodicModelAverager: step % period == 0. " + LocalSGD.source
    ahead = 0


def _sizes(tensors: Sequence[TensorFacts]) -> dict[str, int]:
    return {tensor.name: tensor.numel for tensor in tensors}
