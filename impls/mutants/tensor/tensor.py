"""Faults of tensor and sequence parallelism, planted in ``reference/tensor``.

Most need two ranks, biases that are not zero and gradients that are looked at one by one; those of
sequence parallelism show in what stands on every rank, those of the loss need targets on another
rank's part of the vocabulary, smoothing and a vocabulary that does not divide.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from shardproof.comm import Comm
from shardproof.contract import Build, CrossEntropy, MicroBatch, Role
from shardproof.impls.mutants import declare
from shardproof.impls.mutants.triggers import CLIP, SEQUENCE, gpts
from shardproof.impls.reference.engine.norm import NormPart, power_sum
from shardproof.impls.reference.tensor import Options, ReferenceTensor, TensorParallel, operators
from shardproof.impls.reference.tensor.cuts import Cut, Split, Uncut
from shardproof.impls.reference.tensor.layers import (
    Classes,
    Column,
    Compute,
    Heads,
    Placed,
    Positions,
    Row,
    SplitLayer,
    Vocabulary,
)
from shardproof.impls.reference.tensor.loss import cross_entropy

#: Two small blocks.
gpt = gpts(width=16, heads=4, layers=2, global_batch=8)
mutant = declare.family(ReferenceTensor, mesh={"tensor": 2}, workload=gpt())


class _Layers(TensorParallel):
    """Call :meth:`change` on every layer."""

    def make_layers(self) -> list[SplitLayer]:
        layers = super().make_layers()
        for layer in layers:
            self.change(layer)
        return layers

    def change(self, layer: Any) -> None:
        """Change ``layer`` in place."""
        raise NotImplementedError


# --------------------------------------------------------------------------------------- layers


@mutant(
    "tensor_bias_on_every_rank", says="bias.*every rank", zoo=("T01",), killed_by=("equivalence",)
)
class BiasOnEveryRank(_Layers):
    """Every rank adds the bias of a row-parallel layer before the sum."""

    def change(self, layer: Any) -> None:
        if type(layer) is Row:
            vars(layer)["forward"] = lambda compute, *args: layer.leave(compute(*args), layer.comm)


@mutant(
    "tensor_gradient_of_inputs_not_summed",
    says="every later one is right|not summed",
    zoo=("T11",),
    killed_by=("equivalence", "replicas", "traffic"),
)
class GradientOfInputsNotSummed(_Layers):
    """The operator that sums gradients of one layer's input in backward is missing."""

    def change(self, layer: Any) -> None:
        if isinstance(layer, Column) and layer.name == "blocks.1.mlp.up":
            layer.enter = lambda tensor, comm: tensor


@mutant(
    "tensor_reduces_twice",
    says="axis tensor, all_reduce: 464,896",
    zoo=("T08",),
    killed_by=("traffic",),
)
class ReducesTwice(_Layers):
    """Outputs that are already whole are summed once more and the result is discarded."""

    def change(self, layer: Any) -> None:
        if isinstance(layer, Row):
            layer.leave = _twice


def _twice(tensor: Tensor, comm: Comm) -> Tensor:
    total = operators.f_bar(tensor, comm)
    operators.all_reduce(total.detach(), comm)
    return total


@mutant(
    "tensor_sum_is_its_own_backward",
    says="multiples of the expected gradients|every later one is right",
    zoo=("T08",),
    killed_by=("equivalence", "traffic"),
)
class SumIsItsOwnBackward(_Layers):
    """The backward of a sum over ranks sums again, so gradients grow by the number of ranks."""

    def change(self, layer: Any) -> None:
        if isinstance(layer, Row):
            layer.leave = lambda x, comm: operators.f(operators.f_bar(x, comm), comm)


@mutant(
    "tensor_sums_begin_at_one",
    says="'loss' at step 0, forward",
    killed_by=("equivalence",),
    workload=gpt(norm="rms"),
)
class SumsBeginAtOne(_Layers):
    """A sum over ranks starts at one instead of zero; only a layer norm removes the constant."""

    def change(self, layer: Any) -> None:
        if isinstance(layer, Row):
            layer.leave = lambda tensor, comm: operators.f_bar(tensor, comm) + 1


@mutant(
    "tensor_reads_rows_where_columns_lie",
    says="'loss' at step 0, forward",
    killed_by=("equivalence",),
    workload=gpt(layout="columns"),
)
class ReadsRowsWhereColumnsLie(_Layers):
    """A layer reads its input in memory order and ignores strides."""

    def change(self, layer: Any) -> None:
        if isinstance(layer, Column):
            enter = layer.enter
            layer.enter = lambda tensor, comm: enter(_in_order(tensor), comm)


def _in_order(tensor: Tensor) -> Tensor:
    return tensor.as_strided(tensor.shape, torch.empty(tensor.shape, device="meta").stride())


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
    says="reduce_scatter: .* 2 times fewer",
    zoo=("T08",),
    killed_by=("equivalence", "traffic"),
    options=SEQUENCE,
)
class GatherScattersTerms(_Layers):
    """The gradient of a gathered sequence is treated as whole, so each rank keeps a part of its own
    term.
    """

    def change(self, layer: Any) -> None:
        if isinstance(layer, Column):
            layer.enter = _GatherOnly.apply


@mutant(
    "tensor_copies_start_apart",
    says="rank 1 starts 'norm.weight'",
    killed_by=("equivalence", "replicas"),
)
class CopiesStartApart(TensorParallel):
    """Replicated parameters start from each rank's own values."""

    def __init__(
        self, module: nn.Module, comm: Comm, options: Options, roles: Mapping[str, Role]
    ) -> None:
        own = module.get_parameter("norm.weight").detach().clone()
        super().__init__(module, comm, options, roles)
        module.get_parameter("norm.weight").data.copy_(own)


@mutant("tensor_cuts_through_heads", says="qkv", zoo=("K19",), killed_by=("equivalence",))
class CutsThroughHeads(TensorParallel):
    """The rows of a fused projection are split in order instead of head by head."""

    def make_layers(self) -> list[SplitLayer]:
        return [
            Column(layer.name, layer.module, layer.comm, layer.enter)
            if isinstance(layer, Heads)
            else layer
            for layer in super().make_layers()
        ]


@mutant(
    "tensor_identical_shards", says="from rank 0's part", zoo=("T13",), killed_by=("equivalence",)
)
class IdenticalShards(TensorParallel):
    """All ranks start from the first rank's part of every split parameter."""

    def local(self, name: str, whole: Tensor) -> Tensor:
        right, cut = super().local(name, whole), self.cuts[name]
        if isinstance(cut, Split) and len(cut.blocks) == 1:
            return whole.narrow(cut.dim, 0, right.shape[cut.dim]).clone()
        return right


@mutant(
    "tensor_mlp_is_whole",
    says="elements of the parameters of 'blocks.0.mlp.down.weight'",
    killed_by=("traffic", "memory", "active"),
)
class MlpIsWhole(TensorParallel):
    """The MLPs are not split: every rank computes all of them."""

    def make_layers(self) -> list[SplitLayer]:
        return [layer for layer in super().make_layers() if ".mlp." not in layer.name]


@mutant("tensor_embedding_not_masked", says="of the embedding|rows", killed_by=("equivalence",))
class EmbeddingNotMasked(_Layers):
    """A rank adds one of its rows for a token that another rank has."""

    def change(self, layer: Any) -> None:
        def unmasked(compute: Compute, rows: Tensor) -> Tensor:
            place = (rows - layer.own.start).clamp(0, len(layer.own) - 1)
            result: Tensor = layer.leave(compute(place), layer.comm)
            return result

        if type(layer) is Vocabulary:
            vars(layer)["forward"] = unmasked


# ------------------------------------------------------------------------------------- the loss


class _Loss(TensorParallel):
    def parts(self, outputs: Tensor, micro: MicroBatch) -> tuple[Tensor, Tensor, Classes]:
        """Logits ``(targets, classes)``, targets, and the last layer."""
        assert self.output is not None
        logits = outputs.reshape(-1, outputs.shape[-1]).to(micro.weights.dtype)
        return logits, micro.targets.reshape(-1), self.output


@mutant(
    "tensor_smoothing_over_own_classes",
    says="smoothing|classes",
    zoo=("T04",),
    killed_by=("equivalence",),
    workload=gpt(label_smoothing=0.1, vocab=98),
)
class SmoothingOverOwnClasses(TensorParallel):
    """Label smoothing divides by the rank's own number of classes."""

    def loss(self, build: Build, outputs: Tensor, micro: MicroBatch) -> Tensor:
        assert self.output is not None
        self.output.total = len(self.output.own)
        return super().loss(build, outputs, micro)


@mutant(
    "tensor_loss_plus_log",
    says=r"log\(2\)",
    zoo=("T05",),
    killed_by=("equivalence",),
    options={"loss_parallel": False},
)
class LossPlusLog(_Loss):
    """The split loss is computed from gathered logits, so it is too large by the logarithm of the
    ranks.
    """

    def loss(self, build: Build, outputs: Tensor, micro: MicroBatch) -> Tensor:
        logits, targets, last = self.parts(outputs, micro)
        own = range(self.comm.rank * last.total, (self.comm.rank + 1) * last.total)
        losses = cross_entropy(logits, targets, CrossEntropy(), own, last.total, self.comm)
        return (micro.weights.reshape(-1) * losses).sum()


@mutant(
    "tensor_plain_collective_in_loss",
    says="classes|not summed|every later one is right",
    zoo=("T07",),
    killed_by=("equivalence",),
)
class PlainCollectiveInLoss(_Loss):
    """The loss is right, but its gradient covers the rank's own classes only."""

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
    """The gradient of parameters that match ``pattern`` is treated as final."""

    pattern: str

    def whole(self, parameter: Tensor) -> Cut:
        cut = super().whole(parameter)
        name = next(n for n, p in self.module.named_parameters() if p is parameter)
        return replace(cut, is_partial=False) if self.pattern in name else cut  # type: ignore[type-var]


@mutant(
    "tensor_norm_not_summed",
    says="'norm.weight'.*not summed",
    zoo=("T02",),
    killed_by=("equivalence", "replicas", "traffic"),
    options=SEQUENCE,
)
class NormNotSummed(_Unsummed):
    """Under sequence parallelism, a norm's gradient covers only a part of the positions."""

    pattern = "norm.weight"


@mutant(
    "tensor_row_bias_not_summed",
    says="bias.*not summed",
    zoo=("T02",),
    killed_by=("equivalence", "replicas"),
    options=SEQUENCE,
)
class RowBiasNotSummed(_Unsummed):
    """Under sequence parallelism, the biases of row-parallel layers are not summed."""

    pattern = "down.bias"


@mutant(
    "tensor_small_layer_not_summed",
    says="conditional_by_micro_batch.*not summed",
    zoo=("T17",),
    killed_by=("equivalence", "replicas"),
    workload=gpt("conditional_by_micro_batch"),
    options=SEQUENCE,
)
class SmallLayerNotSummed(_Unsummed):
    """A small layer that only some samples use is not summed over positions."""

    pattern = "conditional_by_micro_batch"


@mutant(
    "tensor_sums_what_is_whole",
    says="2 times too large .*ranks",
    zoo=("T08",),
    killed_by=("equivalence", "traffic"),
)
class SumsWhatIsWhole(TensorParallel):
    """Gradients that are whole on every rank are summed over the ranks."""

    def whole(self, parameter: Tensor) -> Cut:
        return Uncut(tuple(parameter.shape), self.comm.rank, self.comm.size, is_partial=True)


@mutant(
    "tensor_kv_bias_not_summed",
    says="'blocks.0.attention.qkv.bias'.* (not summed|wrong)",
    zoo=("T16",),
    killed_by=("equivalence", "replicas", "traffic"),
    workload=gpt(kv_heads=1),
)
class KvBiasNotSummed(TensorParallel):
    """The bias of shared KV heads is not summed; the weight is."""

    def finish(self) -> None:
        for name, cut in self.cuts.items():
            if name.endswith("qkv.bias") and isinstance(cut, Split):
                self.cuts[name] = replace(cut, shared=(0, 0))
        super().finish()


@mutant(
    "tensor_kv_summed_over_the_axis",
    says="'blocks.0.attention.qkv",
    zoo=("T16", "H08"),
    killed_by=("equivalence",),
    workload=gpt(kv_heads=2),
    mesh={"tensor": 4},
)
class KvSummedOverTheAxis(TensorParallel):
    """Gradients of a KV head are summed over all ranks instead of those that share it."""

    def finish(self) -> None:
        for name, parameter in self.trained():
            if "qkv" in name and parameter.grad is not None:
                rows = parameter.grad.tensor_split([4])[1]
                rows.copy_(operators.all_reduce(rows, self.comm))


@mutant(
    "tensor_sums_running_totals",
    says="micro-batch 0 counts 2 times",
    zoo=("F23",),
    killed_by=("equivalence", "traffic"),
    options=SEQUENCE,
)
class SumsRunningTotals(TensorParallel):
    """Running sums are reduced after every micro-batch, including parts that were already
    summed.
    """

    def accumulate(self, is_last: bool) -> None:
        if any(p.grad is not None for _, p in self.trained()):
            super().finish()


@mutant(
    "tensor_sums_in_half_the_width",
    says="float32",
    zoo=("H13",),
    killed_by=("equivalence",),
    options=SEQUENCE,
)
class SumsInHalfTheWidth(TensorParallel):
    """Terms are rounded to fp32 before the sum, although compute is in fp64."""

    def finish(self) -> None:
        for name, parameter in self.trained():
            if isinstance(self.cuts[name], Uncut) and parameter.grad is not None:
                parameter.grad = parameter.grad.float().to(parameter.dtype)
        super().finish()


# ----------------------------------------------------------------------------------- sequences


@mutant(
    "tensor_first_positions",
    says="of positions|positions of",
    killed_by=("equivalence",),
    options=SEQUENCE,
)
class FirstPositionsOnly(_Layers):
    """Every rank embeds the first positions, whichever positions it holds."""

    def change(self, layer: Any) -> None:
        def first(compute: Compute, positions: Tensor) -> Tensor:
            return compute(positions[: operators.share(len(positions), self.comm.size)])

        if type(layer) is Positions:
            vars(layer)["forward"] = first


@mutant(
    "tensor_same_masks",
    says="mask|dropout",
    zoo=("T14",),
    killed_by=("equivalence",),
    workload=gpt("dropout_counter"),
    options=SEQUENCE,
)
class SameMasks(TensorParallel):
    """Dropout draws the same masks for every part of a sequence."""

    def make_layers(self) -> list[SplitLayer]:
        return [layer for layer in super().make_layers() if not isinstance(layer, Placed)]


@mutant(
    "tensor_masks_apart",
    says="mask|dropout",
    zoo=("T14",),
    killed_by=("equivalence", "replicas"),
    workload=gpt("dropout_counter"),
)
class MasksApart(TensorParallel):
    """Dropout draws different masks on every rank, although all compute the same activations."""

    def make_layers(self) -> list[SplitLayer]:
        for part in self.module.modules():
            if hasattr(part, "first_position"):
                vars(part)["first_position"] = 1000 * self.comm.rank
        return super().make_layers()


# ------------------------------------------------------------------------------------ the norm


@mutant(
    "tensor_norm_counts_copies",
    says="every copy",
    zoo=("O04",),
    killed_by=("norm", "equivalence"),
    optimizer=CLIP,
)
class NormCountsCopies(TensorParallel):
    """The norm counts replicated parameters once per rank."""

    def norm_parts(self, order: float = 2.0) -> list[NormPart]:
        [(total, axes)] = super().norm_parts(order)
        for piece in self.pieces("gradients"):
            total += power_sum(piece.tensor, order) if piece.replica else 0
        return [(total, axes)]


@mutant(
    "tensor_norm_of_own_shards",
    says="holds itself",
    zoo=("O02", "H11"),
    killed_by=("norm", "replicas", "traffic"),
    optimizer=CLIP,
)
class NormOfOwnShards(TensorParallel):
    """Every rank clips by the norm of its own part."""

    def norm_parts(self, order: float = 2.0) -> list[NormPart]:
        gradients = [p.grad for _, p in self.trained() if p.grad is not None]
        return [(torch.stack([power_sum(g, order) for g in gradients]).sum(), ())]


@mutant(
    "tensor_norm_misses_a_shard",
    says="not in the norm",
    zoo=("O05",),
    killed_by=("norm", "equivalence"),
    optimizer=CLIP,
)
class NormMissesAShard(TensorParallel):
    """A split bias counts as a copy: only the first rank's part is in the norm."""

    def norm_parts(self, order: float = 2.0) -> list[NormPart]:
        [(total, axes)] = super().norm_parts(order)
        for name, parameter in self.trained():
            if name.endswith("up.bias") and parameter.grad is not None and self.comm.rank:
                total -= power_sum(parameter.grad, order)
        return [(total, axes)]


@mutant(
    "tensor_norm_of_terms",
    says="before the gradients of .* were (reduced|summed)|not summed",
    zoo=("T10", "O08"),
    killed_by=("norm", "equivalence"),
    optimizer=CLIP,
    options=SEQUENCE,
)
class NormOfTerms(TensorParallel):
    """The norm is computed from terms that are not summed yet."""

    def finish(self) -> None:
        self.early = super().norm_parts()
        super().finish()

    def norm_parts(self, order: float = 2.0) -> list[NormPart]:
        return self.early


@mutant(
    "tensor_clips_on_the_first_rank",
    says="rank 1 does not clip",
    zoo=("O01",),
    killed_by=("replicas", "equivalence"),
    optimizer=CLIP,
)
class ClipsOnTheFirstRank(ReferenceTensor):
    """Only the first rank clips, so copies diverge."""

    def clip(self, norm: Tensor, max_norm: float) -> None:
        if self.mesh.coordinate["tensor"] == 0:
            super().clip(norm, max_norm)
