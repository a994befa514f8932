"""Faults of the cut by positions, planted in ``reference/context``.

What each rank takes of a sample: positions, documents, targets, weights, masks of dropout; and what
ranks add up: losses, gradients, the norm.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from shardproof.comm import Mesh
from shardproof.contract import Batch, MicroBatch
from shardproof.impls.mutants import declare
from shardproof.impls.mutants.triggers import CLIP, gpts
from shardproof.impls.reference.context import ContextParallel, ReferenceContext
from shardproof.impls.reference.context.cuts import positions
from shardproof.impls.reference.ddp import DDP
from shardproof.impls.reference.engine.handle import Handle
from shardproof.impls.reference.engine.norm import NormPart

#: One small block; two samples a micro-batch, so that a cut cannot be taken along samples.
gpt = gpts(layers=1, width=16, seq=12, global_batch=4, micro_batches=2)
mutant = declare.family(ReferenceContext, mesh={"context": 2}, workload=gpt())


# ------------------------------------------------------------------------------ targets, weights


@mutant(
    "context_shifts_targets_after_the_cut",
    says="targets were shifted after the cut",
    killed_by=("equivalence",),
)
class ShiftsTargetsAfterTheCut(ContextParallel):
    """The targets of a rank are its own inputs, moved on by one: the last one of each part is
    another position's.
    """

    def cut(self, micro: MicroBatch) -> MicroBatch:
        own = super().cut(micro)
        return replace(own, targets=micro.inputs[:, self.span.rows.roll(-1)])


@mutant(
    "context_local_token_count",
    says="divided by the token count of each rank",
    killed_by=("equivalence",),
)
class LocalTokenCount(ContextParallel):
    """The loss is divided by the number of tokens of the rank, not by that of the batch."""

    def cut(self, micro: MicroBatch) -> MicroBatch:
        own = super().cut(micro)
        held, whole = own.weights.sum(), micro.weights.sum()
        times = whole / self.comm.size / held if held else torch.ones(())
        return replace(own, weights=own.weights * times)


@mutant(
    "context_cuts_along_samples",
    says="targets of one sample were compared with outputs of another",
    killed_by=("equivalence",),
)
class CutsAlongSamples(ContextParallel):
    """Targets are cut from all samples end to end, which is right for one sample only."""

    def cut(self, micro: MicroBatch) -> MicroBatch:
        own, rank = super().cut(micro), self.comm.rank
        targets, weights = (
            whole.flatten().chunk(self.comm.size)[rank].view_as(part)
            for whole, part in ((micro.targets, own.targets), (micro.weights, own.weights))
        )
        return replace(own, targets=targets, weights=weights)


@mutant(
    "context_padding_in_the_loss",
    says="position 4 of every sample counts twice in the loss",
    killed_by=("equivalence",),
    workload=gpt(seq=11),
)
class PaddingInTheLoss(ContextParallel):
    """A part that is shorter than others is padded with its last position, which counts twice."""

    def cut(self, micro: MicroBatch) -> MicroBatch:
        own = super().cut(micro)
        most = max(len(part) for part in self.span.parts)
        if len(self.span.rows) == most:
            return own
        weights = own.weights.clone()
        weights[:, -1] *= 2
        return replace(own, weights=weights)


@mutant(
    "context_misses_ranks_without_targets",
    says=r"rank 2 waits in send\(to 3.* rank 3 waits in all_reduce",
    killed_by=("hang",),
    workload=gpt(seq=48, global_batch=2),
    mesh={"context": 4},
)
class MissesRanksWithoutTargets(ReferenceContext):
    """A rank whose positions have no target leaves the backward out, for which others wait."""

    def loss_of(self, outputs: Tensor, micro: MicroBatch) -> Tensor:
        loss = super().loss_of(outputs, micro)
        if self.parallel.cut(micro).weights.any():
            return loss
        first = next(self.module.parameters())
        return loss.detach() + 0 * first.sum()


@mutant(
    "context_evaluates_what_divides",
    says="position 10 of every sample is not in the loss",
    killed_by=("equivalence",),
    workload=gpt(seq=11),
)
class EvaluatesWhatDivides(ReferenceContext):
    """An evaluation leaves out the positions behind the last multiple of the ranks."""

    def evaluate(self, batch: Batch) -> Tensor | None:
        def left_out(micro: MicroBatch) -> MicroBatch:
            weights, ranks = micro.weights.clone(), self.mesh.size("context")
            weights[:, weights.shape[1] // ranks * ranks :] = 0
            return replace(micro, weights=weights)

        windows = tuple(tuple(map(left_out, window)) for window in batch.windows)
        return super().evaluate(replace(batch, windows=windows))


@mutant(
    "context_cuts_in_order",
    says="expected 13,824 floating-point operations .* not those of .* with cut 'zigzag'",
    killed_by=("active",),
    options={"method": "ring", "cut": "zigzag"},
)
class CutsInOrder(ContextParallel):
    """Every cut is contiguous, whatever the option asks for, so the last rank has most of the
    work.
    """

    def parts(self, length: int, device: Any) -> Sequence[Tensor]:
        ranks = range(self.comm.size)
        return [positions(length, len(ranks), rank, "contiguous").to(device) for rank in ranks]


# --------------------------------------------------------------------------- positions, documents


class _Spans(ContextParallel):
    """Call :meth:`change` once the model's span is known."""

    def begin(self, micro: MicroBatch) -> None:
        super().begin(micro)
        self.change(self.span)

    def change(self, span: Any) -> None:
        """Change ``span``, in which this rank's positions stand already."""
        raise NotImplementedError


@mutant(
    "context_positions_from_zero",
    says="positions count from 0 on every rank",
    killed_by=("equivalence",),
)
class PositionsFromZero(_Spans):
    """Every rank embeds positions that count from 0."""

    def change(self, span: Any) -> None:
        span.places = lambda rows: torch.arange(len(rows), device=rows.device)


@mutant(
    "context_rotary_from_zero",
    says="turn by positions that count from 0 on every rank",
    killed_by=("equivalence",),
    workload=gpt("rotary"),
)
class RotaryFromZero(ContextParallel):
    """Rotary angles count from 0 on every rank; embedded positions are right."""

    def find_span(self, module: nn.Module) -> Any:
        found = super().find_span(module)
        self.turning = [part for part in module.modules() if getattr(part, "is_rotary", False)]
        return found

    def begin(self, micro: MicroBatch) -> None:
        super().begin(micro)
        own: Any = copy(self.span)
        own.places = lambda rows: torch.arange(len(rows), device=rows.device)
        for part in self.turning:
            vars(part)["span"] = own


@mutant(
    "context_documents_begin_with_ranks",
    says="a document begins where the part of a rank begins",
    killed_by=("equivalence",),
    workload=gpt("packed"),
)
class DocumentsBeginWithRanks(ContextParallel):
    """Documents are looked for in each rank's own part: one that continues from another part
    starts again.
    """

    def find_span(self, module: nn.Module) -> Any:
        span: Any = super().find_span(module)
        read = span.read

        def reads(inputs: Tensor) -> Tensor:
            tokens: Tensor = read(inputs)
            for part in span.parts:
                span.starts[:, part] = span.starts[:, part].clamp(min=int(part[0]))
            return tokens

        span.read = reads
        return span


@mutant(
    "context_positions_of_whole_samples",
    says="positions do not restart with each document",
    killed_by=("equivalence",),
    workload=gpt("packed"),
)
class PositionsOfWholeSamples(_Spans):
    """Positions of packed documents count from the start of the sample."""

    def change(self, span: Any) -> None:
        span.places = lambda rows: rows


@mutant(
    "context_documents_see_each_other",
    says="the mask does not keep documents apart",
    killed_by=("equivalence",),
    workload=gpt("packed"),
)
class DocumentsSeeEachOther(_Spans):
    """The mask of packed documents is lost in the cut: only later positions are hidden."""

    def change(self, span: Any) -> None:
        span.hides = lambda rows, columns: columns[None] > rows[:, None]


@mutant(
    "context_same_dropout_masks",
    says="dropout draws the mask of the first positions",
    killed_by=("equivalence",),
    workload=gpt("dropout_counter"),
)
class SameDropoutMasks(ContextParallel):
    """Dropout draws the mask of the first positions on every rank."""

    def find_span(self, module: nn.Module) -> Any:
        found = super().find_span(module)
        for part in module.modules():
            if hasattr(part, "first_position"):
                vars(part)["span"] = type(found)()
        return found


# ------------------------------------------------------------------------------------------- sums


@mutant(
    "context_averages_gradients",
    says="2 times too small",
    killed_by=("equivalence",),
)
class AveragesGradients(DDP):
    """Gradients are averaged over context ranks, whose losses add up already."""

    def finish(self) -> None:
        super().finish()
        for parameter in self.parameters:
            if parameter.grad is not None:
                parameter.grad /= self.comm.size


class _SumsOver(ReferenceContext):
    """Gradients are summed over one of two axes."""

    along = ""

    def transform(self, module: nn.Module, mesh: Mesh, options: Any) -> Handle:
        whole = super().transform(module, mesh, options)
        assert isinstance(whole, DDP)
        whole.comm = mesh.comm(self.along)
        return whole


@mutant(
    "context_sums_over_replicas_only",
    says="axis replicate, all_reduce: .* no such call is promised",
    killed_by=("equivalence", "replicas", "traffic"),
    mesh={"replicate": 2, "context": 2},
)
class SumsOverReplicasOnly(_SumsOver):
    """Gradients are summed over replicas, not over context ranks."""

    along = "replicate"


@mutant(
    "context_sums_over_context_only",
    says="axis context, all_reduce: .* no such call is promised",
    killed_by=("equivalence", "replicas", "traffic"),
    mesh={"replicate": 2, "context": 2},
)
class SumsOverContextOnly(_SumsOver):
    """Gradients are summed over context ranks, not over replicas."""

    along = "context"


@mutant(
    "context_norm_counts_ranks",
    says="equal gradients were counted on every rank",
    killed_by=("norm", "equivalence", "traffic"),
    optimizer=CLIP,
)
class NormCountsRanks(DDP):
    """The norm sums squares over context ranks as if they held other gradients."""

    def norm_parts(self, order: float = 2.0) -> list[NormPart]:
        return [(total, ("context",)) for total, _ in super().norm_parts(order)]


@mutant(
    "context_tells_the_whole_loss",
    says="the loss is 2 times|2 times too",
    killed_by=("equivalence", "traffic"),
)
class TellsTheWholeLoss(ReferenceContext):
    """Each rank tells the loss of all positions, which is then added up once more."""

    def backward(self, batch: Batch) -> Tensor | None:
        loss = super().backward(batch)
        assert loss is not None
        self.mesh.comm("context").all_reduce(loss)
        return loss
