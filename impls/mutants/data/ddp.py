"""Faults of data parallelism, planted in ``reference/ddp``.

Where the original mistake would change nothing in the parent, its effect is planted instead; the
summary says what goes wrong.  Buckets are small, so that there are several of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor

from shardproof.case import WorkloadSpec
from shardproof.contract import Batch
from shardproof.impls.mutants import declare
from shardproof.impls.mutants.triggers import CLIP, Nothing, gpt
from shardproof.impls.reference.ddp import DDP, ReferenceDDP
from shardproof.impls.reference.engine.state import broadcast_tensors, named_state
from shardproof.impls.reference.parts.buckets import GradientBucket
from shardproof.impls.reference.parts.reducers import Work

BUCKETS: Mapping[str, Any] = {"bucket_bytes": 48 * 1024, "first_bucket_bytes": 8 * 1024}
CNN_BUCKETS: Mapping[str, Any] = {"bucket_bytes": 8 * 1024, "first_bucket_bytes": 2 * 1024}

mutant = declare.family(ReferenceDDP, options=BUCKETS)


# ---------------------------------------------------------------------- what is reduced, and when


@mutant(
    "ddp_last_backward_only",
    says="conditional_by_micro_batch.*(zero|micro-batch 0|missing)",
    zoo=("D01",),
    killed_by=("equivalence",),
    workload=gpt("conditional_by_micro_batch"),
)
class LastBackwardOnly(DDP):
    """The gradient of a branch used only in an earlier micro-batch is missing from the sum."""

    def contribution(self, index: int) -> Tensor | None:
        # Arrivals are those of the last backward; an earlier one has left a gradient without one.
        return super().contribution(index) if index in self.arrivals else None


@mutant(
    "ddp_drops_incomplete_bucket",
    says="not (reduced|summed)",
    zoo=("D02",),
    killed_by=("equivalence", "replicas"),
    workload=gpt("unused"),
)
class DropsIncompleteBucket(DDP):
    """A bucket with an unused parameter is not reduced: its gradients stay local."""

    def reduce(self, bucket: GradientBucket) -> Work:
        # Something is missing only from buckets that ``finish`` sends.
        return Nothing() if bucket.missing else super().reduce(bucket)


@mutant(
    "ddp_misses_replaced_parameter",
    says="embed.token.weight.*not (reduced|summed)",
    zoo=("D04",),
    killed_by=("equivalence", "replicas"),
)
class MissesReplacedParameter(DDP):
    """One parameter was replaced after wrapping. The gradient of its old tensor is reduced."""

    local: Tensor | None = None

    def launch(self, bucket: GradientBucket) -> None:
        if 0 in bucket.members:
            own = self.parameters[0].grad
            self.local = None if own is None else own.clone()
        super().launch(bucket)

    def wait_and_publish(self, bucket: GradientBucket) -> None:
        super().wait_and_publish(bucket)
        if 0 in bucket.members:
            self.parameters[0].grad = self.local  # of the tensor that replaced it


@mutant(
    "ddp_latches_sync_flag",
    says="not (reduced|summed)",
    zoo=("D05",),
    killed_by=("equivalence", "replicas"),
)
class LatchesSyncFlag(DDP):
    """The decision to reduce is made in the first forward of a step, so accumulation never
    reduces.
    """

    def accumulate(self, is_last: bool) -> None:
        # ``computed`` is still False in the first forward of a step.
        self.decided = self.decided if self.computed else is_last
        super().accumulate(is_last)

    def reduce(self, bucket: GradientBucket) -> Work:
        return super().reduce(bucket) if self.decided else Nothing()

    decided = True


@mutant(
    "ddp_rebuild_loses_gradients",
    says="only the last micro-batch",
    zoo=("D08",),
    killed_by=("equivalence",),
)
class RebuildLosesGradients(DDP):
    """Laying out new buckets overwrites the gradients of earlier micro-batches."""

    rebuilt = False

    def lay_out(self) -> None:
        super().lay_out()
        self.rebuilt = self.learned

    def accumulate(self, is_last: bool) -> None:
        super().accumulate(is_last)
        if self.rebuilt and is_last:
            # Once: from the next step on gradients are views of the new buckets.
            self.rebuilt = False
            super().after_step()


@mutant(
    "ddp_skips_last_wait",
    says="not (reduced|summed)",
    zoo=("D10",),
    killed_by=("equivalence",),
    workload=gpt("late_results"),
)
class SkipsLastWait(DDP):
    """The last bucket is used without waiting for it."""

    def wait_and_publish(self, bucket: GradientBucket) -> None:
        if bucket is self.buckets[-1]:
            bucket.work = Nothing()
        super().wait_and_publish(bucket)


@mutant(
    "ddp_never_reduces",
    says="not (reduced|summed)",
    zoo=("D17",),
    killed_by=("equivalence", "replicas", "traffic"),
)
class NeverReduces(DDP):
    """Every rank trains on its own gradients."""

    def reduce(self, bucket: GradientBucket) -> Work:
        return Nothing()


@mutant("ddp_reduces_in_fp32", says="float32|narrower", killed_by=("equivalence", "traffic"))
class ReducesInFp32(DDP):
    """Gradients of an fp64 run are summed in fp32."""

    def reduce(self, bucket: GradientBucket) -> Work:
        # The case is in fp64, so fp32 shows in the sums and in the bytes.
        narrow = bucket.flat.float()
        outgoing = replace(bucket.outgoing(self.step), flat=narrow)
        self.reducer.all_reduce(outgoing, self.comm).wait()
        bucket.flat.copy_(narrow)
        return Nothing()


# ------------------------------------------------------------------------------- scale and shares


@mutant(
    "ddp_divides_by_world",
    says="too small .*ranks",
    killed_by=("equivalence",),
    mesh={"replicate": 3},
)
class DividesByWorld(DDP):
    """The sum is divided by the number of ranks although the weights already sum to 1."""

    def wait_and_publish(self, bucket: GradientBucket) -> None:
        super().wait_and_publish(bucket)
        bucket.flat.div_(self.comm.size)


@mutant(
    "ddp_divides_by_world_clipped",
    says="3 times too small .*ranks|norm is right for the reported gradients",
    killed_by=("norm",),
    mesh={"replicate": 3},
    optimizer=CLIP,
)
class DividesByWorldClipped(DividesByWorld):
    """As ddp_divides_by_world. Clipping hides the scale; the norm before it does not."""


@mutant(
    "ddp_mean_of_means",
    says="micro-batch counts the same",
    killed_by=("equivalence",),
    workload=gpt("unequal_tokens"),
)
class MeanOfMeans(ReferenceDDP):
    """Every micro-batch has the same weight, whatever its number of tokens."""

    def backward(self, batch: Batch) -> Tensor | None:
        # Weights of a micro-batch sum to its share of the tokens; here to an equal share.
        share = 1 / (len(batch.micro_batches) * self.mesh.world)
        equal = [
            replace(micro, weights=share * micro.weights / micro.weights.sum())
            for micro in batch.micro_batches
        ]
        return super().backward(replace(batch, windows=(tuple(equal),)))


@mutant(
    "ddp_drops_last_micro_batch",
    says="last micro-batch is not|only the first micro-batch",
    killed_by=("equivalence",),
)
class DropsLastMicroBatch(ReferenceDDP):
    """The last micro-batch of a step is never computed."""

    def backward(self, batch: Batch) -> Tensor | None:
        return super().backward(replace(batch, windows=(tuple(batch.micro_batches[:-1]),)))


@mutant(
    "ddp_scales_incomplete_window",
    says="incomplete window",
    zoo=("O16",),
    killed_by=("equivalence",),
    workload=gpt("incomplete_window"),
)
class ScalesIncompleteWindow(ReferenceDDP):
    """An incomplete window is divided by the full number of micro-batches."""

    def backward(self, batch: Batch) -> Tensor | None:
        full = max(len(window) for window in batch.windows)
        windows = tuple(
            tuple(replace(m, weights=m.weights * len(window) / full) for m in window)
            for window in batch.windows
        )
        return super().backward(replace(batch, windows=windows))


# -------------------------------------------------------------------------------- rank 0's values


@mutant(
    "ddp_forgets_initial_parameter",
    says="rank 1 starts 'embed.token.weight'",
    killed_by=("equivalence", "replicas"),
)
class ForgetsInitialParameter(DDP):
    """The initial broadcast leaves out one parameter."""

    def broadcast_initial(self) -> None:
        broadcast_tensors(list(named_state(self.module).values())[1:], self.comm)


@mutant(
    "ddp_keeps_local_buffers",
    says="running_mean.*never sent|broadcast: 0 bytes",
    killed_by=("equivalence", "traffic"),
    workload=WorkloadSpec("digits_cnn"),
    options=CNN_BUCKETS,
)
class KeepsLocalBuffers(DDP):
    """Buffers are not broadcast at the start of a step."""

    def broadcast_buffers(self) -> None:
        pass


@mutant(
    "ddp_broadcasts_stale_buffers",
    says="rebound_buffer.*never sent",
    zoo=("D11",),
    killed_by=("equivalence",),
    workload=gpt("rebound_buffer"),
)
class BroadcastsStaleBuffers(DDP):
    """The buffers seen at construction are broadcast, not those bound now."""

    first_bound: dict[str, Tensor] | None = None

    def buffers(self) -> dict[str, Tensor]:
        self.first_bound = self.first_bound or super().buffers()
        return self.first_bound


@mutant(
    "ddp_buffer_order_by_rank",
    says="were swapped",
    zoo=("X02",),
    killed_by=("equivalence",),
    workload=WorkloadSpec("digits_cnn"),
    options=CNN_BUCKETS,
)
class BufferOrderByRank(DDP):
    """Ranks list their buffers in different orders: sizes match, but values go to the wrong
    buffer.
    """

    def buffers(self) -> dict[str, Tensor]:
        named = list(super().buffers().items())
        layer = 3 * min(self.comm.rank, 1)  # a layer has three buffers
        return dict(named[layer:] + named[:layer])


# --------------------------------------------------------------------------------- cost and order


@mutant(
    "ddp_communicates_every_micro_batch",
    says="before the last micro-batch|2 times as many",
    killed_by=("traffic", "active"),
)
class CommunicatesEveryMicroBatch(DDP):
    """Gradients are reduced after every micro-batch and thrown away until the last."""

    def accumulate(self, is_last: bool) -> None:
        # An earlier micro-batch has left gradients that only the last one should send.
        if self.computed:
            for bucket in self.buckets:
                bucket.pack(self.contribution(index) for index in bucket.members)
                self.reduce(bucket).wait()
        super().accumulate(is_last)


@mutant(
    "ddp_agrees_in_every_step",
    says="broadcasts integers 3 times after updates",
    killed_by=("traffic",),
    steps=3,
)
class AgreesInEveryStep(DDP):
    """Ranks agree on the order of buckets again in each step, although it has not changed."""

    def after_step(self) -> None:
        self.learned = False
        super().after_step()


@mutant(
    "ddp_agrees_twice",
    says="2 times after that of step 0",
    killed_by=("traffic",),
    workload=gpt("unused"),
)
class AgreesTwice(DDP):
    """The end of a step runs twice, so ranks agree on the order of buckets again."""

    def after_step(self) -> None:
        super().after_step()
        super().after_step()


@mutant("ddp_waits_after_each_launch", says="waited for at once", killed_by=("overlap",))
class WaitsAfterEachLaunch(DDP):
    """Each reduction is waited for as soon as it is launched."""

    def reduce(self, bucket: GradientBucket) -> Work:
        work = super().reduce(bucket)
        work.wait()
        return work


@mutant("ddp_reduces_after_backward", says="start after backward has ended", killed_by=("overlap",))
class ReducesAfterBackward(DDP):
    """All buckets are launched only after backward has ended."""

    def launch_full_buckets(self) -> None:
        pass


@mutant(
    "ddp_unused_parameter_blocks_all",
    says="start after backward has ended",
    killed_by=("overlap",),
    workload=gpt("unused"),
)
class UnusedParameterBlocksAll(DDP):
    """Buckets keep their first order, so one unused parameter holds up all of them."""

    def count(self, votes: Sequence[int]) -> None:
        super().count(votes)
        # Forgets both reasons for which buckets are laid out again.
        self.newly_late = set()
        self.root_computed = False
