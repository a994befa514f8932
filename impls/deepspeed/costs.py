"""The bytes of DeepSpeed 0.19.8 in fp32, compared with ZeRO's paper.

    stage    sent in a step, times (N-1) Psi           the paper's      where the rest comes from
    0        2                                         2                -
    1        3 (2 with one reduce an owner)            2                buckets are all-reduced
    2        2 m + 1 (m + 1 with one reduce an owner)  m + 1            the same
    3        3 m                                       3 m              -

and a norm of one number per parameter group, whether or not gradients are clipped.  Files are those
under ``deepspeed/runtime/zero``.

Gradients differ from point to point, so that :meth:`~shardproof.costs.model.CostModel.at_point` has
them: what they are at ``gradients_final`` is flattened, clipped and let go in ``engine.step()``;
where they are clipped the adapter keeps them until the end of the step.  Formulas say what they are
at ``gradients_final``.

Its pipeline sends what ``costs.pipeline.Pipeline`` says and something more.  Shapes travel as
integers before messages: they stand in the rows of control traffic.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import replace
from typing import ClassVar

from shardproof.axes import cutting
from shardproof.contract import Options
from shardproof.costs.context import Exchange
from shardproof.costs.ddp import DDP, Single
from shardproof.costs.layout import Flat, chunk
from shardproof.costs.model import Bytes, CostModel, Flow, Local, NoCostModel, flow, grouped_flow
from shardproof.costs.model_facts import TensorFacts, counter_bytes, slots, used
from shardproof.costs.pipeline import Pipeline, StageMessage

#: DeepSpeed is judged in fp32 only.
FP32 = 4
#: ``TENSOR_META_SIZE``: int32 numbers that tell the shape of one message of a pipeline.
META_BYTES = 256 * 4
_PAPER = "ZeRO (arXiv 1910.02054) section VII"


class _DeepSpeed(Single):
    """The common part of the four stages: bytes that differ between points."""

    unmixed = ("float32",)

    def held(self, kind: str) -> int:
        """The promised bytes; of temporary ones, those at ``gradients_final``."""
        last, ranks = self.facts.steps - 1, range(self.facts.world)
        final = [self.at_point(rank, "gradients_final", last) for rank in ranks]
        sizes = [held[kind] for held in final if kind in held]
        return max(sizes) if sizes else super().held(kind)


class DeepSpeedZero0(_DeepSpeed):
    """Whole copies: 2 (N-1) Psi, and one number if gradients are clipped.

    Parameters without a gradient get zeros.
    """

    strategy = "deepspeed_zero0"
    source = (
        "all-reduce of all gradients at once, engine.py: buffered_allreduce_fallback; "
        "utils.py: clip_grad_norm_ averages the norm over the ranks"
    )

    def flows(self) -> list[Flow]:
        """One all-reduce, several beyond 500 million elements, and the norm."""
        facts = self.facts
        whole = [sum(t.nbytes for t in facts.trainable)]
        norm = [FP32] if facts.clipped else []
        return [f.in_any_calls() for f in flow(facts, facts.group(), "all_reduce", whole + norm)]

    def resident(self, rank: int, step: int, updated: int) -> Bytes:
        """Bytes by class, without gradients, which the engine keeps in its own buffers."""
        held = super().resident(rank, step, updated)
        return {kind: size for kind, size in held.items() if kind != "gradients"}

    def at_point(self, rank: int, point: str, updated: int) -> Bytes:
        """All gradients until the update, which frees them."""
        whole = sum(t.nbytes for t in self.facts.trainable)
        return {"gradients": 0 if point == "after_update" else whole}


class _Sharded(_DeepSpeed):
    @property
    @abstractmethod
    def states(self) -> list[int]:
        """Bytes of optimizer state on a rank, by parameter group."""

    def at_point(self, rank: int, point: str, updated: int) -> Bytes:
        """The first update creates state group by group; ``after_clip`` comes before the last
        one's.
        """
        early = point == "after_clip" and updated < 0
        return {"optimizer_state": sum(self.states[:-1])} if early else {}

    @property
    def groups(self) -> list[list[TensorFacts]]:
        return [group for group in self.facts.grouped if group]

    @property
    def zero(self) -> Options:
        section: Options = self.facts.option("zero_optimization", {})
        return section

    @property
    def ranks(self) -> int:
        return self.facts.shards

    @property
    def offloaded(self) -> bool:
        return (self.zero.get("offload_optimizer") or {}).get("device", "none") != "none"


class DeepSpeedZero1(_Sharded):
    """P + (masters + O)/N bytes, each parameter group padded to a multiple of 2 N elements.

    In fp32 the master is a second copy of the partition, which ZeRO's own strategy does not hold.
    At ``gradients_final`` a rank still has the whole gradient of every parameter that its partition
    touches (``copy_grads_in_partition``), from ``after_clip`` on its flat partition.
    """

    strategy, textbook = "deepspeed_zero1", "zero1"
    source = (
        f"{_PAPER}: 2 Psi; DeepSpeed: 3 Psi, 1.5 times as much, because average_tensor in "
        "stage_1_and_2.py all-reduces buckets unless use_multi_rank_bucket_allreduce is off"
    )
    divided = (False, False, True)

    @property
    def flats(self) -> list[Flat]:
        """One flat partition per parameter group, padded to twice the ranks."""
        return [Flat(tuple(group), self.ranks, multiple=2) for group in self.groups]

    @property
    def padded(self) -> list[int]:
        """Elements of each flat partition with its padding."""
        return [flat.padded for flat in self.flats]

    @property
    def states(self) -> list[int]:
        """Slots over the partition, including padding, and one step counter."""
        each, counter = slots(self.facts), counter_bytes(self.facts)
        return [each * FP32 * count // self.ranks + counter for count in self.padded]

    def flows(self) -> list[Flow]:
        """Calls and bytes of one step under the chosen options."""
        facts, zero = self.facts, self.zero
        to_owners = (
            not zero.get("use_multi_rank_bucket_allreduce", True)
            and zero.get("reduce_scatter", True)
            and (zero.get("contiguous_gradients", True) or self.offloaded)
        )
        whole = [sum(t.nbytes for t in facts.trainable)]
        norms = [FP32] * len(self.padded) if zero.get("compute_grad_norm", True) else []
        gathered = [FP32 * count for count in self.padded]
        # An all-reduce sends every rank the whole sum, of which a partition keeps 1/N.
        how = "reduce" if to_owners else "all_reduce"
        moved = [
            *flow(facts, facts.sharded, how, whole, self.reductions),  # type: ignore[arg-type]
            *flow(facts, facts.sharded, "all_reduce", norms),
        ]
        return [
            *(f.in_any_calls() for f in moved),
            *flow(facts, facts.sharded, "all_gather", gathered),
        ]

    def fragments(self, rank: int) -> list[tuple[TensorFacts, int]]:
        """``(tensor, elements)`` in the partition of ``rank``, without padding."""
        return [(t, n) for flat in self.flats for t, n in flat.parts(rank) if n]

    def resident(self, rank: int, step: int, updated: int) -> Bytes:
        """Flat buffers, including padding; one step counter per group.

        Gradients of an offloaded optimizer lie in flat partitions that stay.
        """
        share = FP32 * sum(self.padded) // self.ranks
        frozen = sum(t.nbytes for t in self.facts.parameters if not t.trainable)
        return {
            "parameters": frozen + FP32 * sum(self.padded),
            "masters": share,
            **({"gradients": share} if self.offloaded else {}),
            "optimizer_state": sum(self.states) if updated >= 0 else 0,
        }

    def at_point(self, rank: int, point: str, updated: int) -> Bytes:
        """Whole gradients of tensors in the partition; flat partitions from clipping on."""
        held = super().at_point(rank, point, updated)
        if self.offloaded:
            return held
        if point == "gradients_final":
            touched = FP32 * sum(tensor.numel for tensor, _ in self.fragments(rank))
            return held | {"gradients": touched}
        share = FP32 * sum(self.padded) // self.ranks
        return held | {"gradients": share if self.facts.clipped else 0}

    def local(self, rank: int) -> Local:
        """Name -> elements: whole parameters, own fragments of everything else."""
        own = {tensor.name: count for tensor, count in self.fragments(rank)}
        every = {t.name: t.numel for t in self.facts.parameters}
        return Local(every, own, own if slots(self.facts) else {})


class DeepSpeedZero2(DeepSpeedZero1):
    """Stage 1 with a reduction in every micro-batch."""

    strategy, textbook = "deepspeed_zero2", "zero2"
    source = (
        f"{_PAPER}: (m + 1) Psi; DeepSpeed: (2 m + 1) Psi, because average_tensor in "
        "stage_1_and_2.py all-reduces buckets unless use_multi_rank_bucket_allreduce is off"
    )
    divided = (False, True, True)


class DeepSpeedZero3(_Sharded):
    """(P + masters + G + O)/N bytes, each parameter padded to a multiple of N elements.

    The master is there in fp32, too, where DeepSpeed's device is a CPU: ``_create_fp32_partitions``
    means to do without, but compares a ``torch.device`` with the string ``"cpu"``.

    What is gathered depends on the trace of earlier steps, except with the options of
    :attr:`untraced`; only then a promise of traffic is made and parameters are judged.
    """

    strategy, textbook = "deepspeed_zero3", "zero3"
    source = (
        f"{_PAPER}: 3 Psi a micro-batch; padding: partition_parameters.py, _aligned_size; "
        "which parameters stay: partitioned_param_coordinator.py, __params_to_release"
    )
    divided = (True, True, True)
    #: Options under which every module's parameters are gathered before and freed after its use.
    untraced: ClassVar[tuple[str, ...]] = (
        "stage3_param_persistence_threshold",
        "stage3_max_reuse_distance",
        "stage3_prefetch_bucket_size",
    )

    def shard(self, tensor: TensorFacts) -> int:
        """Elements of one rank's part of ``tensor``, including padding."""
        return -(-tensor.numel // self.ranks)

    @property
    def traced(self) -> bool:
        """Whether earlier steps decide which parameters are gathered and kept."""
        return any(self.zero.get(name) != 0 for name in self.untraced)

    @property
    def sharded(self) -> int:
        """Bytes of all parameters on one rank, in fp32."""
        return FP32 * sum(self.shard(t) for t in self.facts.parameters)

    @property
    def trained(self) -> int:
        """Bytes of the trained parameters on one rank, in fp32."""
        return FP32 * sum(self.shard(t) for t in self.facts.trainable)

    @property
    def states(self) -> list[int]:
        """Slots over the shards, and one step counter."""
        each, counter = slots(self.facts) * FP32, counter_bytes(self.facts)
        return [each * sum(map(self.shard, group)) + counter for group in self.groups]

    def flows(self) -> list[Flow]:
        """Two gathers and one reduction per parameter and micro-batch, and norms of the groups."""
        facts, zero = self.facts, self.zero
        if self.traced:
            names = ", ".join(self.untraced)
            raise NoCostModel(
                f"deepspeed_zero3 has a traffic formula only if these options are 0: {names}"
            )
        if not zero.get("reduce_scatter", True) or zero.get("sub_group_size") is not None:
            raise NoCostModel(
                "deepspeed_zero3 has no traffic formula if reduce_scatter is false or "
                "sub_group_size is set"
            )
        gathered = [FP32 * self.ranks * self.shard(t) for t in facts.parameters]
        reduced = [FP32 * self.ranks * self.shard(t) for t in facts.trainable]
        norms = [FP32 if self.offloaded else 8] * len(self.groups)
        moved = [
            *flow(facts, facts.sharded, "all_gather", gathered, 2 * facts.rounds),
            *flow(facts, facts.sharded, "reduce_scatter", reduced, facts.rounds),
        ]
        return [
            *(f.in_any_calls() for f in moved),
            *flow(facts, facts.sharded, "all_reduce", norms),
        ]

    def resident(self, rank: int, step: int, updated: int) -> Bytes:
        """Bytes by class on ``rank`` after ``step``."""
        held = {"optimizer_state": sum(self.states) if updated >= 0 else 0}
        return held if self.traced else {"parameters": self.sharded} | held

    def at_point(self, rank: int, point: str, updated: int) -> Bytes:
        """Gradients lie in one buffer, and the update copies them group by group."""
        copied = point != "gradients_final" and self.facts.clipped and not self.offloaded
        held = {"gradients": self.trained * (2 if copied else 1), "masters": self.trained}
        return super().at_point(rank, point, updated) | held

    def held(self, kind: str) -> int:
        """The promised bytes, without parameters that the trace keeps."""
        if kind in self.unjudged() and kind != "masters":
            raise NoCostModel(
                f"deepspeed_zero3 has no memory formula for {kind}: {self.unjudged()[kind]}"
            )
        return super().held(kind)

    def total(self) -> int:
        """The total of every stage, if parameters are promised."""
        self.held("parameters")
        return super().total()

    def unjudged(self) -> dict[str, str]:
        """Parameters that the trace keeps, and masters that look like other tensors."""
        reasons = {}
        if self.traced:
            names = ", ".join(self.untraced)
            reasons["parameters"] = (
                "earlier steps decide which parameters stay whole, unless these options are 0: "
                f"{names}"
            )
        if self.zero.get("sub_group_size") is not None:
            reasons["optimizer_state"] = reasons["masters"] = (
                "with sub_group_size set, each sub-group has one flat buffer"
            )
        if not self.facts.clipped or len(self.groups) > 1:
            reasons["masters"] = (
                "the optimizer holds a group's master only during that group's update, and the "
                "suite sees it there only if gradients are clipped and there is one group"
            )
        return reasons

    def local(self, rank: int) -> Local:
        """Name -> elements of the parts that ``rank`` owns."""
        parts = {t.name: chunk(t.numel, self.ranks, rank) for t in self.facts.parameters}
        held = {name: count for name, count in parts.items() if count}
        own = {t.name: held[t.name] for t in self.facts.trainable if t.name in held}
        return Local(held, own, own if slots(self.facts) else {})


class DeepSpeedPipeline(Pipeline):
    """``PipelineEngine``: the last stage sends two fp32 losses to all, and the norm is summed.

    Gradients of a tied parameter are all-reduced over the ranks of its two stages.
    """

    strategy, textbook = "deepspeed_pipeline", "pipeline"
    unmixed = ("float32",)
    source = (
        "runtime/pipe/engine.py: _exec_send_activations, _exec_send_grads; _aggregate_total_loss "
        "broadcasts two losses; _exec_reduce_tied_grads; utils.py: clip_grad_norm_"
    )

    def flows(self) -> list[Flow]:
        """Messages between stages, and the engine's own calls for them."""
        facts, along = self.facts, cutting("layers")
        messages = [f for f in super().flows() if f.operation in ("send", "recv")]
        norm = [FP32] if facts.clipped else []
        return [
            *messages,
            *flow(facts, along, "broadcast", [2 * FP32]),
            *flow(facts, along, "all_reduce", norm),
            *(
                replace(tied, ranks=0)  # both ends, which are no neighbours
                for t in used(facts.parameters, facts.step)
                if len(self.stages.ranks(t)) > 1
                for tied in grouped_flow(along, "all_reduce", [t.nbytes], ranks=2, times=1)
            ),
        ]

    def metadata_bytes(self) -> int:
        """``_send_tensor_meta``, before every activation if shapes are dynamic."""
        activations = len(list(self.messages())) // 2
        return activations * META_BYTES if self.facts.option("dynamic_shape", False) else 0

    def tied_messages(self) -> Iterator[StageMessage]:
        """None, because they are all-reduced."""
        return iter(())

    def at_point(self, rank: int, point: str, updated: int) -> Bytes:
        """The update frees gradients."""
        return {"gradients": 0} if point == "after_update" else {}

    #: Buffers of received activations and gradients stay in the engine.
    communication_at_rest = CostModel.communication_at_rest  # type: ignore[assignment]
    unclassified_limit = CostModel.unclassified_limit  # type: ignore[assignment]


class DeepSpeedUlysses(DDP):
    """DDP over replicate x context; queries, keys, values and results change their cut."""

    strategy, textbook = "deepspeed_ulysses", "context"
    source = (
        "gradients as ddp, over replicate x context; sequence/layer.py: DistributedAttention "
        "makes four all-to-alls in forward, which move (C-1)/C of their tensors, and _SeqAllToAll "
        "the same four in backward (arXiv 2309.14509, section 3.2)"
    )

    def flows(self) -> list[Flow]:
        """Calls and bytes of one step."""
        exchange = Exchange(self.facts)
        payloads = [
            samples * length * n * size * item // exchange.ranks
            for samples, length in exchange.shapes
            for heads, kv, size, item in exchange.layers
            for n in (heads, kv, kv, heads)
        ]
        passes = exchange.forwards + exchange.backwards
        return [*super().flows(), *exchange.each("all_to_all", payloads, passes)]
