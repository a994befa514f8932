"""Faults of ZeRO-1 and ZeRO-2: gradients reduced and kept, updates, gathers, and costs.

Three ranks, so that shards are uneven and no divisor is a power of two.  Where the
original mistake would change nothing in the parent, its effect is planted instead; the summary says
what goes wrong.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from shardproof.comm import Comm, Mesh
from shardproof.contract import Kind, OptimizerSpec
from shardproof.impls.mutants import declare
from shardproof.impls.mutants.triggers import (
    ADAMW,
    CLIP,
    NORM,
    deep_gpt,
    exchange_equal,
    gpt,
    own_parts,
    whole_gpt,
)
from shardproof.impls.reference import ddp
from shardproof.impls.reference.engine.handle import Handle
from shardproof.impls.reference.engine.norm import NormPart, power_sum
from shardproof.impls.reference.parts.owned_bucket import OwnedBucket
from shardproof.impls.reference.zero1 import ReferenceZero1, Zero1
from shardproof.impls.reference.zero2 import ReferenceZero2, Zero2

BUCKETS: Mapping[str, Any] = {"bucket_bytes": 48 * 1024}
LATE = gpt("late_results")
mutant = declare.family(ReferenceZero1, ReferenceZero2, options=BUCKETS, mesh={"shard": 3})


# ---------------------------------------------------------------------- what is reduced, and when


@mutant(
    "zero1_leaves_partly_full_bucket",
    says="not reduced|no such call is made",
    zoo=("F07",),
    killed_by=("equivalence", "traffic"),
    workload=gpt("unused"),
)
class LeavesPartlyFullBucket(Zero1):
    """A bucket that backward did not fill is not reduced."""

    def send(self, bucket: OwnedBucket) -> None:
        if not bucket.missing:
            super().send(bucket)


@mutant(
    "zero1_uses_last_bucket_early",
    says="not reduced",
    zoo=("D10",),
    killed_by=("equivalence",),
    workload=LATE,
)
class UsesLastBucketEarly(Zero1):
    """The last bucket is used without waiting for its reduction."""

    def send(self, bucket: OwnedBucket) -> None:
        super().send(bucket)
        # ``finish`` waits for the works that it finds, and finds none here.
        if bucket is self.queue[-1]:
            bucket.work = None


@mutant(
    "zero2_rewrites_buffer_in_flight",
    says=r"contain only .+|is missing|all values are zero|counts 0 times|coordinate \d alone",
    zoo=("F08",),
    killed_by=("equivalence",),
    workload=LATE,
)
class RewritesBufferInFlight(Zero2):
    """A bucket's memory is reused while its reduction still reads it."""

    def send(self, bucket: OwnedBucket) -> None:
        super().send(bucket)
        bucket.flat().zero_()


@mutant(
    "zero2_adds_before_landing",
    says="not finite",
    zoo=("D10",),
    killed_by=("equivalence",),
    workload=LATE,
)
class AddsBeforeLanding(Zero2):
    """A bucket's sums are added to the kept shard before they have arrived."""

    def wait_and_accumulate(self) -> None:
        # What the sums held before the wait is put back after it.
        early = {bucket: sums.clone() for bucket, sums in self.sums.items()}
        for bucket, sums in self.sums.items():
            bucket.work.wait()  # type: ignore[union-attr]
            sums.copy_(early[bucket])
        super().wait_and_accumulate()


@mutant(
    "zero2_last_micro_batch_leaks",
    says=r"data coordinate \d|own gradient",
    zoo=("F10",),
    killed_by=("equivalence",),
)
class LastMicroBatchLeaks(Zero2):
    """For the last micro-batch, a rank keeps its own gradient instead of the sum."""

    def send(self, bucket: OwnedBucket) -> None:
        own = bucket.layout.shard(bucket.complete(), self.comm.rank).clone()
        super().send(bucket)
        # In the last round alone: all other sums are right.
        if self.begun == self.rounds:
            bucket.work.wait()  # type: ignore[union-attr]
            self.sums[bucket].copy_(own)


@mutant(
    "zero2_overwrites_its_shard",
    says=r"only .+ is in|micro-batch 0 .*(?:missing|counts 0 times)",
    killed_by=("equivalence",),
)
class OverwritesItsShard(Zero2):
    """Each micro-batch's sum takes the place of the kept shard: only the last one counts."""

    def wait_and_accumulate(self) -> None:
        for bucket in self.sums:
            self.kept.pop(bucket, None)
        super().wait_and_accumulate()


@mutant("zero2_sums_into_the_parameters", says="initial value|differs", killed_by=("equivalence",))
class SumsIntoTheParameters(Zero2):
    """The local shard is what the reduce-scatter returns: it overwrites the parameter's shard."""

    def gradient(self, bucket: OwnedBucket) -> Tensor:
        found = super().gradient(bucket)
        if found.numel():
            bucket.parameters.shard.copy_(found)
        return found


@mutant(
    "zero2_reduces_sums_again",
    says="micro-batch 0 counts 2 times",
    zoo=("F23",),
    killed_by=("equivalence",),
)
class ReducesSumsAgain(Zero2):
    """The sums of earlier micro-batches are reduced again with every later one."""

    def send(self, bucket: OwnedBucket) -> None:
        bucket.layout.shard(bucket.complete(), self.comm.rank).add_(self.kept.get(bucket, 0))
        super().send(bucket)


@mutant(
    "zero1_fourth_rank_left_out",
    says="data coordinate 3 is missing",
    zoo=("F22",),
    killed_by=("equivalence",),
    mesh={"shard": 4},
)
class FourthRankLeftOut(Zero1):
    """Rank 3 contributes zeros: wrong from 4 ranks on."""

    def send(self, bucket: OwnedBucket) -> None:
        if self.comm.rank == 3:
            bucket.flat().zero_()
        super().send(bucket)


@mutant(
    "zero1_one_rank_is_no_group",
    says="no rank holds",
    zoo=("F02", "F13"),
    killed_by=("equivalence",),
    mesh={"shard": 1},
)
class OneRankIsNoGroup(Zero1):
    """On one rank the optimizer gets no gradients, because nothing was scattered."""

    def publish_gradients(self) -> None:
        if self.comm.size > 1:
            super().publish_gradients()


@mutant(
    "zero2_exchanges_equal_buckets",
    says="each other|'blocks.2.mlp.up.bias'",
    zoo=("X05",),
    killed_by=("equivalence",),
    workload=whole_gpt(),
)
class ExchangesEqualBuckets(Zero2):
    """One rank has two buckets of equal size in swapped order: wrong sums and no error."""

    def __init__(self, module: nn.Module, comm: Comm, *rest: Any) -> None:
        super().__init__(module, comm, *rest)
        if comm.rank == 1:
            exchange_equal(self.buckets, [bucket.layout.padded_numel for bucket in self.buckets])


@mutant(
    "zero2_idle_rank_stays_away",
    says="does not match.*reduce_scatter",
    zoo=("X04",),
    killed_by=("crash",),
    crash_says="does not match",
    workload=gpt("unequal_micro_batches"),
)
class IdleRankStaysAway(Zero2):
    """A rank without a further micro-batch takes no part in the others' reductions."""

    def before_step(self, micro_batches: int) -> None:
        super().before_step(micro_batches)
        # Its own number in place of the agreed one.
        self.rounds = micro_batches


@mutant(
    "zero1_gathers_on_first_rank",
    says="rank [12] early: .*rank 0 was still in all_gather",
    zoo=("X11",),
    killed_by=("crash",),
    crash_says=" early: ",
)
class GathersOnFirstRank(ReferenceZero1):
    """Only rank 0 asks for the full state, although gathering needs all ranks."""

    def full_state(self, kind: Kind) -> dict[str, Tensor]:
        return {} if self.mesh.rank else super().full_state(kind)


# ------------------------------------------------------------------------- who updates what, how


@mutant(
    "zero1_optimizer_on_old_tensors",
    says="no update was made|elements of the optimizer",
    zoo=("F14",),
    killed_by=("equivalence", "active"),
)
class OptimizerOnOldTensors(Zero1):
    """The optimizer holds tensors that the model no longer uses."""

    def param_groups(self, spec: OptimizerSpec) -> list[dict[str, Any]]:
        groups = super().param_groups(spec)
        for group in groups:
            # Clones take the update, and nobody looks at them again.
            group["params"] = [(name, tensor.clone()) for name, tensor in group["params"]]
        return groups


@mutant(
    "zero1_first_part_of_empty_shard",
    says="IndexError",
    zoo=("F17",),
    killed_by=("crash",),
    crash_says="IndexError: list index out of range",
    workload=gpt("one_element"),
    options={"bucket_bytes": 1},
)
class FirstPartOfEmptyShard(Zero1):
    """A rank whose shard is all padding reads the first parameter in it."""

    def publish_gradients(self) -> None:
        super().publish_gradients()
        self.firsts = [list(bucket.parts.values())[0] for bucket in self.buckets]  # noqa: RUF015


@mutant(
    "zero1_drops_tail_of_last_shard",
    says="of 'blocks.0.mlp.down.bias', all values are zero",
    zoo=("F01",),
    killed_by=("equivalence",),
    workload=deep_gpt(),
)
class DropsTailOfLastShard(Zero1):
    """With uneven shards, the end of the last one gets no update."""

    def publish_gradients(self) -> None:
        super().publish_gradients()
        for bucket in self.buckets:
            # Only where there is padding: a division that rounds down loses the tail just there.
            if bucket.layout.padding and self.comm.rank == self.comm.size - 1:
                name = list(bucket.parts)[-1]
                self.targets[name].grad[-1:] = 0  # type: ignore[index]


@mutant(
    "zero2_gradient_where_used_only",
    says="no rank holds 'front.conditional_by_rank",
    zoo=("F04",),
    killed_by=("equivalence",),
    workload=gpt("conditional_by_rank"),
)
class GradientWhereUsedOnly(Zero2):
    """A rank updates its part of a parameter only if it used that parameter itself."""

    def publish_gradients(self) -> None:
        super().publish_gradients()
        for name, target in self.targets.items():
            if name not in self.used:
                target.grad = None


@mutant(
    "zero1_unused_parameter_decays",
    says="unused.*oracle does not have",
    killed_by=("equivalence",),
    workload=gpt("unused"),
    optimizer=ADAMW,
)
class UnusedParameterDecays(Zero1):
    """A parameter that no rank used gets a zero gradient, which decays and counts a step."""

    def publish_gradients(self) -> None:
        super().publish_gradients()
        for target in self.targets.values():
            if target.grad is None:
                target.grad = torch.zeros_like(target)


@mutant(
    "zero1_remembers_use",
    says="conditional_early_step.*oracle does not have",
    killed_by=("equivalence",),
    workload=gpt("conditional_early_step"),
    optimizer=ADAMW,
)
class RemembersUse(Zero1):
    """A parameter used once gets a zero gradient in steps that do not use it, so it moves on."""

    def after_step(self) -> None:
        # Kept over the clearing at the end of the step.
        used = set(self.used)
        super().after_step()
        self.used |= used


@mutant(
    "zero1_tied_weight_counts_twice",
    says="tied.*2 times too large",
    killed_by=("equivalence",),
    workload=gpt("tied"),
)
class TiedWeightCountsTwice(Zero1):
    """The gradient of a tied weight is counted once for each of its names."""

    def arrived(self, bucket: OwnedBucket, name: str, parameter: Tensor) -> None:
        if ".tied." in name:
            assert parameter.grad is not None
            parameter.grad = 2 * parameter.grad
        super().arrived(bucket, name, parameter)


@mutant(
    "zero2_unties_weights",
    says="tied.second.weight.*oracle does not have",
    zoo=("F05",),
    killed_by=("equivalence", "active"),
    workload=gpt("tied"),
)
class UntiesWeights(ReferenceZero2):
    """Sharding gives each use of a tied weight a tensor of its own."""

    def transform(self, module: nn.Module, mesh: Mesh, options: Mapping[str, Any]) -> Handle:
        for name, owner in module.named_modules():
            if name.endswith(".tied"):
                first, second = owner.get_parameter("first.weight"), owner.get_submodule("second")
                second.weight = nn.Parameter(first.detach().clone())
        # Untying gave the second use a name of its own, and dtypes are looked up by name.
        self.built = {name: parameter.dtype for name, parameter in module.named_parameters()}
        return super().transform(module, mesh, options)


@mutant(
    "zero1_forgets_frozen_parameters",
    says="rank 1 starts 'front.frozen",
    killed_by=("equivalence", "replicas"),
    workload=gpt("frozen"),
)
class ForgetsFrozenParameters(Zero1):
    """The initial broadcast leaves out frozen parameters."""

    def __init__(self, module: nn.Module, *rest: Any) -> None:
        frozen = [p for p in module.parameters() if not p.requires_grad]
        values = [parameter.detach().clone() for parameter in frozen]
        super().__init__(module, *rest)
        for parameter, value in zip(frozen, values, strict=True):
            # The broadcast has been made and is undone, so that the calls stay the same.
            parameter.data.copy_(value)


@mutant(
    "zero2_one_shard_loses_momentum",
    says="empty optimizer state",
    killed_by=("equivalence",),
    steps=3,
)
class OneShardLosesMomentum(ReferenceZero2):
    """One rank's optimizer state is lost before step 2."""

    updates = 0

    def update(self) -> None:
        if self.updates == 2 and self.mesh.rank == 1:
            self.optimizer.state.clear()
        super().update()
        self.updates += 1


# --------------------------------------------------------------------------- parameters come back


@mutant(
    "zero2_uses_stale_bucket",
    says="no update was made",
    zoo=("F16",),
    killed_by=("equivalence", "replicas"),
    workload=LATE,
)
class UsesStaleBucket(Zero2):
    """Forward does not wait for the gather of one bucket: it computes with old values."""

    def after_update(self) -> None:
        works = [bucket.gather(self.reducer) for bucket in self.buckets]
        # The first bucket is that of the last layers, which forward needs last; still too early.
        for work in works[1:]:
            work.wait()  # type: ignore[union-attr]


@mutant(
    "zero1_gathers_every_other_step",
    says="no update was made",
    zoo=("F16",),
    killed_by=("equivalence", "replicas", "traffic"),
)
class GathersEveryOtherStep(Zero1):
    """One bucket's parameters are gathered only in every other step."""

    updates = 0

    def after_update(self) -> None:
        self.updates += 1
        all_buckets = self.buckets
        # Every other step starts from the second bucket.
        self.buckets = all_buckets[self.updates % 2 :]
        super().after_update()
        self.buckets = all_buckets


# ---------------------------------------------------------------------------------------- its cost


@mutant(
    "zero1_falls_back_to_ddp",
    says="holds .* of the gradients|all_gather: .* no such call is made",
    killed_by=("active", "memory", "traffic"),
)
class FallsBackToDDP(ReferenceZero1):
    """The module is replicated: numbers are right, but nothing is sharded."""

    def transform(self, module: nn.Module, mesh: Mesh, options: Mapping[str, Any]) -> Handle:
        return ddp.apply(module, {"replicate": mesh.comm("shard")}, ddp.Options())


@mutant("zero1_all_reduces", says="all_reduce: .* no such call is promised", killed_by=("traffic",))
class AllReduces(Zero1):
    """Gradients are all-reduced and then gathered as parameters: 1.5x the traffic."""

    def send(self, bucket: OwnedBucket) -> None:
        bucket.work = self.comm.all_reduce(bucket.complete(), async_op=True)


@mutant(
    "zero1_communicates_every_micro_batch",
    says="reduce_scatter: .* 2 times as many",
    killed_by=("traffic",),
)
class CommunicatesEveryMicroBatch(Zero1):
    """Gradients are reduced after every micro-batch and thrown away until the last."""

    def accumulate(self, is_last: bool) -> None:
        for bucket in self.buckets:
            if bucket.filled:
                # Into memory of its own, so that the sums of the last micro-batch stay right.
                thrown_away = torch.empty_like(bucket.layout.shard(bucket.flat(), 0))
                self.comm.reduce_scatter(thrown_away, bucket.complete())
        super().accumulate(is_last)


@mutant("zero1_gradients_as_integers", says="other data than floats", killed_by=("traffic",))
class GradientsAsIntegers(Zero1):
    """Gradients are sent a second time, disguised as integers."""

    def finish(self) -> None:
        super().finish()
        for bucket in self.buckets:
            self.comm.all_reduce(self.gradient(bucket).clone().view(torch.int64))


@mutant("zero1_reduces_copies", says="communication: .* held", killed_by=("memory",))
class ReducesCopies(Zero1):
    """Buckets are reduced from copies, which live until all have arrived."""

    def send(self, bucket: OwnedBucket) -> None:
        shard = bucket.own_gradients()
        bucket.work = self.comm.reduce_scatter(shard, bucket.complete().clone(), async_op=True)


@mutant("zero1_gathers_beside", says="update: communication: .* at the peak", killed_by=("memory",))
class GathersBeside(Zero1):
    """Parameters are gathered into separate memory and copied from there."""

    def after_update(self) -> None:
        for bucket in self.buckets:
            # A second copy of every bucket: right numbers, twice the memory.
            whole = torch.empty_like(bucket.parameters.flat)
            self.comm.all_gather(whole, bucket.parameters.shard)
            bucket.parameters.flat.copy_(whole)
            bucket.parameters.copy_out()


@mutant(
    "zero1_copies_all_for_a_moment",
    says="update: .* bytes of temporaries at the peak",
    killed_by=("memory",),
    workload=deep_gpt(),
)
class CopiesAllForAMoment(Zero1):
    """All parameters are copied after the update and the copies freed at once."""

    def after_update(self) -> None:
        super().after_update()
        _ = [bucket.parameters.flat.clone() for bucket in self.buckets]


@mutant(
    "zero2_flattens_all_gradients",
    says="backward: .* bytes of temporaries at the peak",
    killed_by=("memory",),
    # One: of several the sums of the earlier ones may lie apart.
    workload=gpt(layers=4, micro_batches=1, global_batch=3),
)
class FlattensAllGradients(Zero2):
    """At the end of backward, a rank holds a second copy of all gradients."""

    def finish(self) -> None:
        super().finish()
        _ = [torch.zeros_like(bucket.parameters.flat) for bucket in self.buckets]


@mutant(
    "zero1_makes_contiguous",
    says="parameters: 62,352 bytes held, 63,376",
    killed_by=("memory",),
    workload=gpt("non_contiguous"),
)
class MakesContiguous(Zero1):
    """A transposed parameter loses its strides and the separate memory that keeps them."""

    # Planted at its bytes: whether a product over other strides is rounded otherwise is up to the
    # CPU's kernels.
    def __init__(self, module: nn.Module, *rest: Any) -> None:
        for parameter in module.parameters():
            parameter.data = parameter.data.contiguous()
        super().__init__(module, *rest)


@mutant(
    "zero2_keeps_whole_gradients",
    says="communication: .* held",
    zoo=("F20",),
    killed_by=("memory",),
)
class KeepsWholeGradients(Zero2):
    """Whole gradients are not freed after their reduction."""

    def wait_and_accumulate(self) -> None:
        whole = {bucket: bucket.full for bucket in self.sums}
        super().wait_and_accumulate()
        for bucket, full in whole.items():
            # Held again after the release, as if it had not taken place.
            bucket.full = full
            bucket.views = bucket.layout.views(full)  # type: ignore[arg-type]


@mutant(
    "zero2_reduces_last_micro_batch_only",
    says="reduce_scatter: .* 2 times fewer",
    zoo=("F20",),
    killed_by=("traffic", "memory"),
    workload=whole_gpt(),
)
class ReducesLastMicroBatchOnly(Zero2):
    """Whole gradients accumulate on every rank and are reduced once."""

    def before_step(self, micro_batches: int) -> None:
        # One round: what earlier micro-batches leave adds up in the buckets until then.
        super().before_step(min(micro_batches, 1))
        for bucket in self.buckets:
            bucket.start_round()

    def accumulate(self, is_last: bool) -> None:
        if is_last:
            super().accumulate(is_last)


# ------------------------------------------------------------------------------------ the norm


@mutant("zero1_norm_of_local_shards", says="holds itself", zoo=("O02", "H11"), **NORM)
class NormOfLocalShards(Zero1):
    """Every rank clips by the norm of its own shards."""

    def norm_parts(self, order: float = 2.0) -> list[NormPart]:
        return own_parts(super().norm_parts(order))


@mutant("zero1_norm_counts_padding", says="padding", killed_by=("norm",), optimizer=CLIP)
class NormCountsPadding(Zero1):
    """The norm covers whole shards, whose padding holds old values."""

    def norm_parts(self, order: float = 2.0) -> list[NormPart]:
        for bucket in self.buckets:
            # Padding is zero in the parent, which would hide that it is counted.
            bucket.flat()[bucket.layout.numel :] = 1.0
        sums = [power_sum(self.gradient(bucket), order) for bucket in self.buckets]
        return [(torch.stack(sums).sum(), (self.comm.axis,))]


@mutant(
    "zero1_norm_before_last_bucket",
    says="before the gradients of .* were reduced",
    zoo=("O08",),
    killed_by=("norm",),
    optimizer=CLIP,
)
class NormBeforeLastBucket(Zero1):
    """The norm is taken before the last bucket was reduced."""

    def send(self, bucket: OwnedBucket) -> None:
        # The last bucket that is sent is the one whose own gradients stay here.
        self.early = bucket.layout.shard(bucket.complete(), self.comm.rank).clone()
        super().send(bucket)

    def norm_parts(self, order: float = 2.0) -> list[NormPart]:
        sums = [power_sum(self.gradient(bucket), order) for bucket in self.queue[:-1]]
        return [(torch.stack([*sums, power_sum(self.early)]).sum(), (self.comm.axis,))]
