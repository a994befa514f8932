"""One process, and data parallelism with full replication."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

from shardproof.costs import collectives, compression
from shardproof.costs.layout import Flat, layouts
from shardproof.costs.model import Bytes, CostModel, Flow, Local, state_bytes
from shardproof.costs.model_facts import ITEMSIZE, TensorFacts, used

_ALL_REDUCE = (
    "ZeRO (arXiv 1910.02054) section VII-A: an all-reduce moves 2 Psi; exactly, a rank "
    "sends 2(N-1)/N of the payload, as in nccl-tests doc/PERFORMANCE.md"
)


class Single(CostModel):
    """Everything once, nothing sent: P + G + O bytes."""

    strategy = "single"
    source = "one process sends nothing"

    def flows(self) -> list[Flow]:
        """No flow: one process sends nothing."""
        return []

    def resident(self, rank: int, step: int, updated: int) -> Bytes:
        """Whole tensors; gradients of what has been used."""
        facts, held = self.facts, self.held_by(rank)
        trained = [t for t in held if t.trainable]
        return {
            "parameters": sum(t.numel * self.item(t) for t in held),
            "masters": sum(t.nbytes for t in trained if facts.compute(t.dtype) != t.dtype),
            "gradients": self.gradient_bytes(rank, step),
            "optimizer_state": state_bytes(facts, [(t, t.numel) for t in trained], updated)
            + compression.state_bytes(facts, trained, rank, facts.world, step),
        }

    def held_by(self, rank: int) -> Sequence[TensorFacts]:
        """The parameters of which ``rank`` holds all elements."""
        return self.facts.parameters

    def item(self, tensor: TensorFacts) -> int:
        """Bytes of an element of ``tensor`` or its gradient."""
        return ITEMSIZE[self.facts.compute(tensor.dtype)]

    def gradient_bytes(self, rank: int, step: int) -> int:
        """Gradients exist for what is used in ``step``."""
        return sum(t.numel * self.item(t) for t in used(self.held_by(rank), step))

    def local(self, rank: int) -> Local:
        """Elements that ``rank`` holds (name -> count): every parameter whole."""
        return Local.of(self.facts, {t.name: t.numel for t in self.held_by(rank)})


class NaiveDDP(Single):
    """Full replication; every gradient in a call of its own, once a step."""

    strategy = "naive_ddp"
    frees_gradients = True
    source = f"gradients once per step, whatever the micro-batches. {_ALL_REDUCE}"

    def flows(self) -> list[Flow]:
        """2 (N-1) G bytes: one all-reduce for each trained tensor (or what its algorithm sends)."""
        flats = [Flat((t,), 1) for t in self.facts.trainable]
        return compression.flows(self.facts, self.facts.group(), "all_reduce", flats)


class DDP(Single):
    """Full replication; gradients in buckets; rank 0's buffers are copied when a step starts.

    The number of buckets depends on the order in which gradients arrive, so it is only bounded:
    from one a dtype to one a tensor.
    """

    strategy = "ddp"
    source = (
        "gradients as naive_ddp; floating-point buffers are broadcast once per step, N-1 copies: "
        f"torch DistributedDataParallel, broadcast_buffers. {_ALL_REDUCE}"
    )

    def flows(self) -> list[Flow]:
        """2 (N-1) G (or what the chosen algorithm sends) + (N-1) buffers, in bytes; buffers are
        sent together or one by one.
        """
        facts = self.facts
        copied = facts.buffers if facts.option("broadcast_buffers", True) else ()
        buffers = [b for b in copied if b.dtype in ITEMSIZE]
        return [*self.packed("all_reduce", facts.trainable), *self.packed("broadcast", buffers)]

    def packed(
        self, operation: Literal["all_reduce", "broadcast"], tensors: Sequence[TensorFacts]
    ) -> list[Flow]:
        """``tensors`` in a call each, or all of one dtype in one.

        The bytes are the same: every algorithm sends, over all ranks, a multiple of the elements.
        """
        apart, together = [Flat((t,), 1) for t in tensors], layouts(tensors, 1)
        #     fewest   |a b c d|          one bucket a dtype
        #     most     |a|b|c|d|          one bucket a tensor; a system may split in between
        fewest, most = (self.moved(operation, flats) for flats in (together, apart))
        # A bucket may have lanes where its tensors, alone, have none, or fewer than all at once.
        slack = collectives.most_lanes(self.facts, operation, [flat.numel for flat in together])
        return [
            replace(f, calls=(least.range[0] // slack, f.range[1] * slack), by_rank=None)
            for f, least in zip(most, fewest, strict=True)
        ]

    def moved(
        self, operation: Literal["all_reduce", "broadcast"], flats: Sequence[Flat]
    ) -> list[Flow]:
        """The reductions of each of ``flats``: gradients may be compressed, buffers are not."""
        if operation == "all_reduce":
            return compression.flows(self.facts, self.facts.group(), operation, flats)
        payloads = [flat.payload(flat.dtype) for flat in flats]
        return collectives.flow(self.facts, self.facts.group(), operation, payloads)

    def agreements(self, rank: int) -> tuple[int, int] | None:
        """One on the order of buckets; another where rank 0 learns it later, because it had no
        data, and for each parameter that comes late for the first time later on.
        """
        facts = self.facts
        is_idle = facts.rotating or not all(facts.micro_batches)
        # A backward may lack the gradient of these though an earlier one had it.
        late = sum(t.last_use is not None or t.is_conditional for t in facts.trainable)
        return 1, 1 + is_idle + late

    def gpu_traffic(self, rank: int, step: int, updated: int) -> dict[str, int]:
        """With the factors that a hook of torch draws on the host."""
        drawn = compression.drawn_on_host(self.facts, step)
        return super().gpu_traffic(rank, step, updated) | {"up": drawn}

    def why_overlap_is_not_judged(self) -> str:
        """Rounds of several buckets, or calls of compressed ones, are alike in the log."""
        chosen = collectives.over_send_recv(self.facts, "all_reduce")
        compressed = compression.BY_OTHER_CALLS if compression.chosen(self.facts) else ""
        return collectives.ROUNDS_ARE_ALIKE if chosen else compressed

    def why_not_measured(self) -> str:
        """A bucket with no used parameter holds no gradients; no formula says which ones."""
        idle = [t.name for t in self.facts.trainable if not t.always_used]
        return f"{idle[0]!r} is not always used, so buckets vary" if idle else ""

    def gradient_bytes(self, rank: int, step: int) -> int:
        """Gradients are views of the buckets, which hold every trained tensor."""
        facts = self.facts
        return sum(t.numel * ITEMSIZE[facts.reduction(t.dtype)] for t in facts.trainable)


class Elastic(DDP):
    """Full replication over the members of a step; buffers are each member's own.

    Its facts are those of one step: the axis has as many ranks as there are members.
    """

    strategy = "elastic_ddp"
    source = f"gradients as naive_ddp, over the members of the step. {_ALL_REDUCE}"

    def agreements(self, rank: int) -> None:
        """Members that join agree as well."""

    def flows(self) -> list[Flow]:
        """2 (n-1) G bytes (or what compression makes of them), for n members."""
        return self.packed("all_reduce", self.facts.trainable)

    def why_not_measured(self) -> str:
        """Copies of what a step moves live as long as the step."""
        return "a member keeps copies of what a step moves: no memory is promised"
