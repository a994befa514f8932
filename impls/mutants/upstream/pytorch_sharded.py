"""Faults around PyTorch's ``fully_shard``: parameters that it does not know, and divisions."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

from torch import Tensor, nn

from shardproof.contract import Batch
from shardproof.impls.mutants import declare
from shardproof.impls.mutants.triggers import gpt
from shardproof.impls.pytorch.fsdp2 import PyTorchFSDP2

mutant = declare.family(PyTorchFSDP2, mesh={"shard": 2}, workload=gpt())


@mutant(
    "pytorch_fsdp2_head_added_after_wrapping",
    says="_local_tensor",
    killed_by=("crash",),
    crash_says="_local_tensor",
)
class HeadAddedAfterSharding(PyTorchFSDP2):
    """The head's weight is a whole tensor on every rank, because FSDP2 looks for the one it
    replaced.
    """

    def shard(self, module: nn.Module) -> nn.Module:
        head: Any = module.get_submodule("head")
        whole = head.weight.detach().clone()
        wrapped = super().shard(module)
        head.register_parameter("weight", nn.Parameter(whole))
        self.named = dict(module.named_parameters())
        return wrapped


@mutant(
    "pytorch_fsdp2_divides_twice",
    says="2 times too small",
    killed_by=("equivalence",),
    options={"gradient_divide_factor": 2.0},
)
class DividesTwice(PyTorchFSDP2):
    """Gradients are divided by the factor again after the reduction."""

    def finish(self) -> None:
        gradients: list[Any] = [p.grad for p in self.updated().values() if p.grad is not None]
        for gradient in gradients:
            gradient.to_local().div_(self.loss_factor)


@mutant(
    "pytorch_fsdp2_gathers_again_after_an_evaluation",
    says="all_gather",
    killed_by=("traffic",),
    options={"wrap": {"units": ["embed.token", "embed.position", "blocks.0", "norm", "head"]}},
    steps=3,
)
class GathersAgainAfterAnEvaluation(PyTorchFSDP2):
    """The first step after an evaluation gathers its first unit once more, without need."""

    has_evaluated = False

    def evaluate(self, batch: Batch) -> Tensor:
        self.has_evaluated = True
        return super().evaluate(batch)

    def accumulating(self, is_last: bool) -> AbstractContextManager[object]:
        if self.has_evaluated:
            self.sharded[0].unshard()
            self.sharded[0].reshard()
        self.has_evaluated = False
        return super().accumulating(is_last)
