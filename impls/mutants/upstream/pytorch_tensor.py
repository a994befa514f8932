"""Faults around PyTorch's tensor parallelism: a wrong placement, a wrong layout, a missing step.

Planted in ``pytorch/tensor_parallel`` on 2 ranks, or 3 where equal halves would hide them.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel
from torch.nn import functional as F

from shardproof.contract import MicroBatch
from shardproof.impls.mutants import declare
from shardproof.impls.mutants.triggers import NORM, SEQUENCE, gpts
from shardproof.impls.pytorch.tensor_parallel import PyTorchTensorParallel
from shardproof.impls.pytorch.tensor_styles import rows_by_rank

#: Heads, rows and positions divide by 2 and by 3.
gpt = gpts(layers=2, width=24, heads=6, seq=12, vocab=96, global_batch=6)
mutant = declare.family(PyTorchTensorParallel, mesh={"tensor": 2}, workload=gpt())


@mutant(
    "torch_tensor_bias_on_every_rank",
    says="bias.*every rank",
    zoo=("T01",),
    killed_by=("equivalence",),
)
class BiasOnEveryRank(PyTorchTensorParallel):
    """RowwiseParallel's bias is added in full on every rank before the sum."""

    def shard(self, module: nn.Module) -> nn.Module:
        super().shard(module)
        layer: Any = module.get_submodule("blocks.0.mlp.down")

        def forward(values: DTensor) -> Tensor:
            bias = DTensor.from_local(layer.bias.to_local(), layer.bias.device_mesh, [Partial()])
            return F.linear(values, layer.weight, bias)

        layer.forward = forward
        return module


@mutant(
    "torch_tensor_norms_not_reduced",
    says="not summed",
    zoo=("T02", "T08"),
    killed_by=("equivalence", "replicas", "traffic"),
    options=SEQUENCE,
)
class NormsNotReduced(PyTorchTensorParallel):
    """Under sequence parallelism, each rank keeps its own part of the norms' gradients."""

    def finish(self) -> None:
        for parameter in self.updated().values():
            gradient = parameter.grad
            if isinstance(gradient, DTensor) and any(p.is_partial() for p in gradient.placements):
                own = gradient.to_local()
                parameter.grad = DTensor.from_local(own, gradient.device_mesh, [Replicate()])
        super().finish()


@mutant(
    "torch_tensor_first_chunk_everywhere",
    says="only the part of 'embed.token.weight' on rank 1",
    killed_by=("equivalence",),
)
class FirstChunkEverywhere(PyTorchTensorParallel):
    """Every rank takes the first chunk of rows of the embedding's whole gradient."""

    def finish(self) -> None:
        token: Any = self.named["embed.token.weight"]
        first = token.grad.to_local()[: token.to_local().shape[0]].clone()
        token.grad = DTensor.from_local(first, token.device_mesh, token.placements)
        super().finish()


@mutant(
    "torch_tensor_loss_over_local_vocabulary",
    says="report different losses",
    killed_by=("equivalence", "traffic"),
    options={"loss_parallel": True},
)
class LossOverLocalVocabulary(PyTorchTensorParallel):
    """The loss normalises over the logits of the rank's own part of the vocabulary."""

    def loss(self, micro: MicroBatch) -> Tensor:
        outputs: Any = self.module(micro.inputs)
        own = outputs.to_local()
        first = self.mesh.coordinate["tensor"] * own.shape[-1]
        rows = (micro.targets - first).clamp(0, own.shape[-1] - 1)
        losses = F.cross_entropy(own.flatten(0, 1), rows.flatten(), reduction="none")
        mine = (micro.targets >= first) & (micro.targets < first + own.shape[-1])
        return (micro.weights * mine * losses.view_as(micro.weights)).sum()


class PassesOn(torch.autograd.Function):
    """A log-softmax with an identity gradient."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor) -> Tensor:
        return logits.log_softmax(-1)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0]


@mutant(
    "torch_tensor_second_loss_passes_gradients_on",
    says="head",
    killed_by=("equivalence",),
    workload=gpt(confidence_penalty=0.1),
)
class SecondLossPassesGradientsOn(PyTorchTensorParallel):
    """One of two loss terms on the same logits gets the gradient of its log-softmax."""

    def loss(self, micro: MicroBatch) -> Tensor:
        logits: Tensor = self.module(micro.inputs)
        right, wrong = logits.log_softmax(-1), PassesOn.apply(logits)
        sums = [(micro.weights * (one.exp() * one).sum(-1)).sum() for one in (wrong, right)]
        return self.build.loss(logits, micro) + 0.1 * (sums[0] - sums[1])


@mutant(
    "torch_tensor_shards_alike", says="from rank 0's part", zoo=("T13",), killed_by=("equivalence",)
)
class ShardsAlike(PyTorchTensorParallel):
    """Every rank starts with the first rank's shard."""

    def shard(self, module: nn.Module) -> nn.Module:
        super().shard(module)
        for name in ("up", "down"):
            weight: Any = module.get_parameter(f"blocks.1.mlp.{name}.weight")
            self.mesh.comm("tensor").broadcast(weight.to_local().detach())
        return module


@mutant(
    "torch_tensor_start_not_shared",
    says="rank 1 starts .*norm1",
    killed_by=("equivalence", "replicas"),
    options=SEQUENCE,
)
class StartNotShared(PyTorchTensorParallel):
    """Each rank keeps its own initial norms, although torch treats them as equal."""

    def share(self, tensors: Sequence[Tensor]) -> None:
        pass


@mutant("torch_tensor_norm_counts_copies", says="every copy", zoo=("O04",), **NORM)
class NormCountsCopies(PyTorchTensorParallel):
    """The norm counts replicated tensors once per rank."""

    def clip(self, limit: float) -> Tensor:
        gradients = [p.grad for p in self.updated().values() if p.grad is not None]
        local = [g.to_local() if isinstance(g, DTensor) else g for g in gradients]
        total = nn.utils.get_total_norm(local, foreach=False) ** 2
        self.mesh.comm("tensor").all_reduce(total)
        nn.utils.clip_grads_with_norm_(self.updated().values(), limit, total.sqrt(), foreach=False)
        return total.sqrt()


@mutant("torch_tensor_norm_of_own_shards", says="holds itself", zoo=("H11",), **NORM)
class NormOfOwnShards(PyTorchTensorParallel):
    """Every rank clips by the norm of its own shards."""

    def clip(self, limit: float) -> Tensor:
        gradients = [p.grad for p in self.updated().values() if p.grad is not None]
        local = [g.to_local() if isinstance(g, DTensor) else g for g in gradients]
        norm = nn.utils.get_total_norm(local, foreach=False)
        nn.utils.clip_grads_with_norm_(self.updated().values(), limit, norm, foreach=False)
        return norm


@mutant(
    "torch_tensor_fused_in_one_block",
    says="qkv",
    zoo=("K19",),
    killed_by=("equivalence",),
    mesh={"tensor": 3},
)
class FusedInOneBlock(PyTorchTensorParallel):
    """A rank's rows of the fused projection are the first ones instead of those of its heads."""

    @torch.no_grad()
    def shard(self, module: nn.Module) -> nn.Module:
        for unit in self.build.units:
            attention: Any = module.get_submodule(f"{unit}.attention")
            order = rows_by_rank(attention, self.mesh.size("tensor"))
            for parameter in attention.qkv.parameters():
                parameter[order] = parameter.clone()
        super().shard(module)
        self.orders = {}
        return module


@mutant(
    "torch_tensor_tie_is_lost",
    says="'head.weight', which the oracle does not have",
    zoo=("F05",),
    killed_by=("equivalence", "active"),
    workload=gpt("tied_over_units"),
)
class TieIsLost(PyTorchTensorParallel):
    """The head's weight, tied to the embedding's, becomes a parameter of its own."""

    def shard(self, module: nn.Module) -> nn.Module:
        super().shard(module)
        head = module.get_submodule("head")
        head.register_parameter("weight", nn.Parameter(head.get_parameter("weight").detach()))
        self.named = dict(module.named_parameters())
        return module


@mutant(
    "torch_tensor_gathers_between_the_pair",
    says="all_gather: .* 5 times as many",
    killed_by=("traffic",),
)
class GathersBetweenThePair(PyTorchTensorParallel):
    """up's output is gathered and split again before down: numbers are right, but traffic is
    higher.
    """

    def styles(self, module: nn.Module) -> dict[str, Any]:
        styles: dict[str, Any] = super().styles(module)
        for unit in self.build.units:
            styles[f"{unit}.mlp.up"] = ColwiseParallel(output_layouts=Replicate())
            styles[f"{unit}.mlp.down"] = RowwiseParallel(input_layouts=Replicate())
        return styles


@mutant(
    "torch_tensor_head_not_split",
    says="parameters of 'head.bias'",
    killed_by=("traffic", "memory", "active"),
)
class HeadNotSplit(PyTorchTensorParallel):
    """No style splits the head: numbers are right, but every rank holds it whole."""

    def styles(self, module: nn.Module) -> dict[str, Any]:
        return {n: style for n, style in super().styles(module).items() if n != "head"}


@mutant(
    "torch_tensor_backward_outside_loss_parallel",
    says="nll_loss_backward|DTensor",
    killed_by=("crash",),
    crash_says="mixed torch.Tensor and DTensor",
    options={"loss_parallel": True},
)
class BackwardOutside(PyTorchTensorParallel):
    """Backward runs outside loss_parallel, which torch's documentation warns against."""

    def accumulating(self, is_last: bool) -> AbstractContextManager[object]:
        return nullcontext()


@mutant(
    "torch_tensor_odd_module_sees_own_positions",
    says="odd.prime_sized.*not summed",
    killed_by=("equivalence", "traffic"),
    options=SEQUENCE,
    workload=gpt("prime_sized"),
)
class OddModuleSeesOwnPositions(PyTorchTensorParallel):
    """Under sequence parallelism, a module without a style gets only the rank's positions."""

    def styles(self, module: nn.Module) -> dict[str, Any]:
        return {n: style for n, style in super().styles(module).items() if ".odd" not in n}


@mutant(
    "torch_tensor_positions_from_zero",
    says="of positions|positions of",
    killed_by=("equivalence",),
    options=SEQUENCE,
)
class PositionsFromZero(PyTorchTensorParallel):
    """Under sequence parallelism, every rank adds the first positions' embedding."""

    def shard(self, module: nn.Module) -> nn.Module:
        super().shard(module)
        position = module.get_submodule("embed.position")

        def first(_: nn.Module, inputs: tuple[DTensor]) -> DTensor:
            own, mesh = inputs[0], inputs[0].device_mesh
            start = torch.zeros_like(own.to_local())
            local = start + torch.arange(len(start))
            return DTensor.from_local(local, mesh, own.placements)

        position.register_forward_pre_hook(first)
        return module
