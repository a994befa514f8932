"""Faults of tensor and sequence parallelism, planted in ``reference/tensor``.

Most need two ranks, biases that are not zero and gradients that are looked at one by one; those of
sequence parallelism show in what stands on every rank, those of the loss need targets on another
rank's part of the vocabulary, smoothing and a vocabulary that does not divide.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from shardproof.case import WorkloadSpec
from shardproof.comm import Comm
from shardproof.contract import Build, CrossEntropy, MicroBatch, OptimizerSpec
from shardproof.impls.mutants import declare
from shardproof.impls.reference.engine.norm import NormPart, power_sum
from shardproof.impls.reference.tensor import Options, ReferenceTensor, TensorParallel, operators
from shardproof.impls.reference.tensor.cuts import Cut, Split, Uncut
from shardproof.impls.reference.tensor.layers import (
    Classes,
    Column,
    Heads,
    Placed,
    Positions,
    Row,
    SplitLayer,
    Vocabulary,
)
from shardproof.impls.reference.tensor.loss import cross_entropy

SEQUENCE = {"sequence_parallel": True}
CLIP = OptimizerSpec(clip_norm=0.05)


def gpt(*traits: str, **params: Any) -> WorkloadSpec:
    """Two small blocks; ``params`` are knobs."""
    sizes = {"width": 16, "heads": 4, "layers": 2} | params
    return WorkloadSpec("charnames_gpt", traits=traits, params=sizes, global_batch=8)


mutant = partial(
    declare.mutant,
    parent=ReferenceTensor,
    parent_name="reference/tensor",
    mesh={"tensor": 2},
    workload=gpt(),
)


class _Layers(TensorParallel):
    """Layers of class ``planted[0]`` become ``planted[1]``."""

    planted: tuple[type[SplitLayer], type[SplitLayer]]

    def make_layers(self) -> list[SplitLayer]:
        layers = super().make_layers()
        for layer in layers:
            if type(layer) is self.planted[0]:
                layer.__class__ = self.planted[1]
        return layers


# --------------------------------------------------------------------------------------- layers


class _BiasInside(Row):
    def forward(self, compute: Callable[..., Tensor], *args: Any) -> Tensor:
        return self.leave(compute(*args), self.comm)


@mutant(
    "tensor_bias_on_every_rank",
    zoo=("T01",),
    summary="every rank adds the bias of a row-parallel layer, then they are summed",
    killed_by=("equivalence",),
)
class BiasOnEveryRank(_Layers):
    planted = (Row, _BiasInside)


@mutant(
    "tensor_gradient_of_inputs_not_summed",
    zoo=("T11",),
    summary="the operator that does nothing in forward is left out before one layer, and with it "
    "its backward",
    killed_by=("equivalence", "replicas", "traffic"),
)
class GradientOfInputsNotSummed(TensorParallel):
    def make_layers(self) -> list[SplitLayer]:
        layers = super().make_layers()
        for layer in layers:
            if isinstance(layer, Column) and layer.name == "blocks.1.mlp.up":
                layer.enter = lambda tensor, comm: tensor
        return layers


@mutant(
    "tensor_reduces_twice",
    zoo=("T08",),
    summary="outputs that are whole already are summed once more, for nothing",
    killed_by=("traffic",),
)
class ReducesTwice(TensorParallel):
    def make_layers(self) -> list[SplitLayer]:
        layers = super().make_layers()
        for layer in layers:
            if isinstance(layer, Row):
                layer.leave = _twice
        return layers


def _twice(tensor: Tensor, comm: Comm) -> Tensor:
    total = operators.f_bar(tensor, comm)
    operators.all_reduce(total.detach(), comm)
    return total


@mutant(
    "tensor_sum_is_its_own_backward",
    zoo=("T08",),
    summary="the backward of a sum over ranks sums again: gradients grow by the number of ranks",
    killed_by=("equivalence", "traffic"),
)
class SumIsItsOwnBackward(TensorParallel):
    def make_layers(self) -> list[SplitLayer]:
        layers = super().make_layers()
        for layer in layers:
            if isinstance(layer, Row):
                layer.leave = lambda x, comm: operators.f(operators.f_bar(x, comm), comm)
        return layers


class _GatherOnly(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, comm: Comm) -> Tensor:
        ctx.start, ctx.share = comm.rank * tensor.shape[1], tensor.shape[1]
        return operators.all_gather(tensor, comm, dim=1)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0].narrow(1, ctx.start, ctx.share), None


@mutant(
    "tensor_gather_scatters_terms",
    zoo=("T08",),
    summary="a gathered sequence's gradient is taken for whole: each rank keeps a part of its term",
    killed_by=("equivalence", "traffic"),
    options=SEQUENCE,
)
class GatherScattersTerms(TensorParallel):
    def make_layers(self) -> list[SplitLayer]:
        layers = super().make_layers()
        for layer in layers:
            if isinstance(layer, Column):
                layer.enter = _GatherOnly.apply
        return layers


@mutant(
    "tensor_copies_start_apart",
    summary="what stands on every rank starts from each rank's own values",
    killed_by=("equivalence", "replicas"),
)
class CopiesStartApart(TensorParallel):
    def __init__(self, module: nn.Module, comm: Comm, options: Options) -> None:
        own = module.get_parameter("norm.weight").detach().clone()
        super().__init__(module, comm, options)
        module.get_parameter("norm.weight").data.copy_(own)


@mutant(
    "tensor_cuts_through_heads",
    zoo=("K19",),
    summary="the rows of a fused projection are shared out in order, not query by key by value",
    killed_by=("equivalence",),
)
class CutsThroughHeads(TensorParallel):
    def make_layers(self) -> list[SplitLayer]:
        return [
            Column(layer.name, layer.module, layer.comm, layer.enter)
            if isinstance(layer, Heads)
            else layer
            for layer in super().make_layers()
        ]


@mutant(
    "tensor_identical_shards",
    zoo=("T13",),
    summary="all ranks start from the first rank's part of what is split",
    killed_by=("equivalence",),
)
class IdenticalShards(TensorParallel):
    def local(self, name: str, whole: Tensor) -> Tensor:
        right, cut = super().local(name, whole), self.cuts[name]
        if isinstance(cut, Split) and len(cut.blocks) == 1:
            return whole.narrow(cut.dim, 0, right.shape[cut.dim]).clone()
        return right


@mutant(
    "tensor_mlp_is_whole",
    summary="the MLPs are not split: every rank computes all of them",
    killed_by=("traffic", "memory", "active"),
)
class MlpIsWhole(TensorParallel):
    def make_layers(self) -> list[SplitLayer]:
        return [layer for layer in super().make_layers() if ".mlp." not in layer.name]


class _Unmasked(Vocabulary):
    def forward(self, compute: Callable[..., Tensor], *args: Any) -> Tensor:
        place = (args[0] - self.own.start).clamp(0, len(self.own) - 1)
        return self.leave(compute(place), self.comm)


@mutant(
    "tensor_embedding_not_masked",
    summary="a rank adds one of its rows for a number that another rank has",
    killed_by=("equivalence",),
)
class EmbeddingNotMasked(_Layers):
    planted = (Vocabulary, _Unmasked)


# ------------------------------------------------------------------------------------- the loss


class _Loss(TensorParallel):
    def parts(self, outputs: Tensor, micro: MicroBatch) -> tuple[Tensor, Tensor, Classes]:
        """Logits ``(targets, classes)``, targets, the last layer."""
        assert self.output is not None
        logits = outputs.reshape(-1, outputs.shape[-1]).to(micro.weights.dtype)
        return logits, micro.targets.reshape(-1), self.output


@mutant(
    "tensor_smoothing_over_own_classes",
    zoo=("T04",),
    summary="label smoothing divides by the rank's own number of classes",
    killed_by=("equivalence",),
    workload=gpt(label_smoothing=0.1, vocab=98),
)
class SmoothingOverOwnClasses(TensorParallel):
    def loss(self, build: Build, outputs: Tensor, micro: MicroBatch) -> Tensor:
        assert self.output is not None
        self.output.total = len(self.output.own)
        return super().loss(build, outputs, micro)


@mutant(
    "tensor_loss_plus_log",
    zoo=("T05",),
    summary="the split loss is taken of gathered logits: right plus the logarithm of the ranks",
    killed_by=("equivalence",),
    options={"loss_parallel": False},
)
class LossPlusLog(_Loss):
    def loss(self, build: Build, outputs: Tensor, micro: MicroBatch) -> Tensor:
        logits, targets, last = self.parts(outputs, micro)
        own = range(self.comm.rank * last.total, (self.comm.rank + 1) * last.total)
        losses = cross_entropy(logits, targets, CrossEntropy(), own, last.total, self.comm)
        return (micro.weights.reshape(-1) * losses).sum()


@mutant(
    "tensor_plain_collective_in_loss",
    zoo=("T07",),
    summary="the loss is right, its gradient is that of the rank's own classes alone",
    killed_by=("equivalence",),
)
class PlainCollectiveInLoss(_Loss):
    def loss(self, build: Build, outputs: Tensor, micro: MicroBatch) -> Tensor:
        right = super().loss(build, outputs, micro).detach()
        logits, targets, last = self.parts(outputs, micro)
        place = targets - last.own.start
        elsewhere = (place < 0) | (place >= len(last.own))
        target = logits.gather(-1, place.masked_fill(elsewhere, 0)[:, None])[:, 0]
        own = logits.logsumexp(-1) - target.masked_fill(elsewhere, 0)
        loss = (micro.weights.reshape(-1) * own).sum()
        return right + (loss - loss.detach())


# -------------------------------------------------------------------------- sums of gradients


class _Unsummed(TensorParallel):
    """The gradient of parameters that ``pattern`` names is taken for final."""

    pattern: str

    def whole(self, parameter: Tensor) -> Cut:
        cut = super().whole(parameter)
        name = next(n for n, p in self.module.named_parameters() if p is parameter)
        return replace(cut, is_partial=False) if self.pattern in name else cut  # type: ignore[type-var]


@mutant(
    "tensor_norm_not_summed",
    zoo=("T02",),
    summary="under sequence parallelism a norm's gradient is that of a part of the positions",
    killed_by=("equivalence", "replicas", "traffic"),
    options=SEQUENCE,
)
class NormNotSummed(_Unsummed):
    pattern = "norm.weight"


@mutant(
    "tensor_row_bias_not_summed",
    zoo=("T02",),
    summary="under sequence parallelism the biases behind row-parallel layers are not summed",
    killed_by=("equivalence", "replicas"),
    options=SEQUENCE,
)
class RowBiasNotSummed(_Unsummed):
    pattern = "down.bias"


@mutant(
    "tensor_small_layer_not_summed",
    zoo=("T17",),
    summary="a small layer that some samples are routed to is not summed over positions",
    killed_by=("equivalence", "replicas"),
    workload=gpt("conditional_by_micro_batch"),
    options=SEQUENCE,
)
class SmallLayerNotSummed(_Unsummed):
    pattern = "conditional_by_micro_batch"


@mutant(
    "tensor_sums_what_is_whole",
    zoo=("T08",),
    summary="gradients that every rank has whole are summed over the ranks",
    killed_by=("equivalence", "traffic"),
)
class SumsWhatIsWhole(TensorParallel):
    def whole(self, parameter: Tensor) -> Cut:
        return Uncut(tuple(parameter.shape), self.comm.rank, self.comm.size, is_partial=True)


@mutant(
    "tensor_kv_bias_not_summed",
    zoo=("T16",),
    summary="the bias of KV heads that ranks share is not summed, the weight is",
    killed_by=("equivalence", "replicas", "traffic"),
    workload=gpt(kv_heads=1),
)
class KvBiasNotSummed(TensorParallel):
    def finish(self) -> None:
        for name, cut in self.cuts.items():
            if name.endswith("qkv.bias") and isinstance(cut, Split):
                self.cuts[name] = replace(cut, shared=(0, 0))
        super().finish()


@mutant(
    "tensor_kv_summed_over_the_axis",
    zoo=("T16", "H08"),
    summary="gradients of a KV head are summed over all ranks, not over those that share it",
    killed_by=("equivalence",),
    workload=gpt(kv_heads=2),
    mesh={"tensor": 4},
)
class KvSummedOverTheAxis(TensorParallel):
    def finish(self) -> None:
        for name, parameter in self.trained():
            if "qkv" in name and parameter.grad is not None:
                rows = parameter.grad.tensor_split([4])[1]
                rows.copy_(operators.all_reduce(rows, self.comm))


@mutant(
    "tensor_sums_running_totals",
    zoo=("F23",),
    summary="terms are summed after every micro-batch, together with what was summed before",
    killed_by=("equivalence", "traffic"),
    options=SEQUENCE,
)
class SumsRunningTotals(TensorParallel):
    def accumulate(self, is_last: bool) -> None:
        if any(p.grad is not None for _, p in self.trained()):
            super().finish()


@mutant(
    "tensor_sums_in_half_the_width",
    zoo=("H13",),
    summary="terms are rounded to fp32 on their way, computing is in fp64",
    killed_by=("equivalence",),
    options=SEQUENCE,
)
class SumsInHalfTheWidth(TensorParallel):
    def finish(self) -> None:
        for name, parameter in self.trained():
            if isinstance(self.cuts[name], Uncut) and parameter.grad is not None:
                parameter.grad = parameter.grad.float().to(parameter.dtype)
        super().finish()


# ----------------------------------------------------------------------------------- sequences


class _FirstPositions(Positions):
    def forward(self, compute: Callable[..., Tensor], *args: Any) -> Tensor:
        return compute(args[0][: operators.share(len(args[0]), self.comm.size)])


@mutant(
    "tensor_first_positions",
    summary="every rank embeds the first positions, whichever it has",
    killed_by=("equivalence",),
    options=SEQUENCE,
)
class FirstPositionsOnly(_Layers):
    planted = (Positions, _FirstPositions)


@mutant(
    "tensor_same_masks",
    zoo=("T14",),
    summary="dropout draws the same masks for every part of a sequence",
    killed_by=("equivalence",),
    workload=gpt("dropout_counter"),
    options=SEQUENCE,
)
class SameMasks(TensorParallel):
    def make_layers(self) -> list[SplitLayer]:
        return [layer for layer in super().make_layers() if not isinstance(layer, Placed)]


@mutant(
    "tensor_masks_apart",
    zoo=("T14",),
    summary="dropout draws other masks on every rank where all compute the same activations",
    killed_by=("equivalence", "replicas"),
    workload=gpt("dropout_counter"),
)
class MasksApart(TensorParallel):
    def make_layers(self) -> list[SplitLayer]:
        for part in self.module.modules():
            if hasattr(part, "first_position"):
                vars(part)["first_position"] = 1000 * self.comm.rank
        return super().make_layers()


# ------------------------------------------------------------------------------------ the norm


@mutant(
    "tensor_norm_counts_copies",
    zoo=("O04",),
    summary="the norm counts what stands on every rank once a rank",
    killed_by=("norm", "equivalence"),
    optimizer=CLIP,
)
class NormCountsCopies(TensorParallel):
    def norm_parts(self, order: float = 2.0) -> list[NormPart]:
        [(total, axes)] = super().norm_parts(order)
        for piece in self.pieces("gradients"):
            total += power_sum(piece.tensor, order) if piece.replica else 0
        return [(total, axes)]


@mutant(
    "tensor_norm_of_own_shards",
    zoo=("O02", "H11"),
    summary="every rank clips by the norm of what it holds",
    killed_by=("norm", "replicas", "traffic"),
    optimizer=CLIP,
)
class NormOfOwnShards(TensorParallel):
    def norm_parts(self, order: float = 2.0) -> list[NormPart]:
        gradients = [p.grad for _, p in self.trained() if p.grad is not None]
        return [(torch.stack([power_sum(g, order) for g in gradients]).sum(), ())]


@mutant(
    "tensor_norm_misses_a_shard",
    zoo=("O05",),
    summary="a split bias counts as a copy: only the first rank's part is in the norm",
    killed_by=("norm", "equivalence"),
    optimizer=CLIP,
)
class NormMissesAShard(TensorParallel):
    def norm_parts(self, order: float = 2.0) -> list[NormPart]:
        [(total, axes)] = super().norm_parts(order)
        for name, parameter in self.trained():
            if name.endswith("up.bias") and parameter.grad is not None and self.comm.rank:
                total -= power_sum(parameter.grad, order)
        return [(total, axes)]


@mutant(
    "tensor_norm_of_terms",
    zoo=("T10", "O08"),
    summary="the norm is taken of terms that are still to be summed",
    killed_by=("norm", "equivalence"),
    optimizer=CLIP,
    options=SEQUENCE,
)
class NormOfTerms(TensorParallel):
    def finish(self) -> None:
        self.early = super().norm_parts()
        super().finish()

    def norm_parts(self, order: float = 2.0) -> list[NormPart]:
        return self.early


@mutant(
    "tensor_clips_on_the_first_rank",
    zoo=("O01",),
    summary="only the first rank clips: copies drift apart",
    killed_by=("replicas", "equivalence"),
    optimizer=CLIP,
)
class ClipsOnTheFirstRank(ReferenceTensor):
    def clip(self, norm: Tensor, max_norm: float) -> None:
        if self.mesh.coordinate["tensor"] == 0:
            super().clip(norm, max_norm)
