"""ZeRO-1 with something wrong by a factor near 1 or by a rounding, driven by test_causes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from shardproof.contract import StepResult
from shardproof.impls.reference.zero1 import ReferenceZero1

#: What is wrong, as names of classes tell it and as :class:`Slightly` knows it.
WHAT = {
    "Loss": "loss",
    "Evaluation": "evaluation",
    "Norm": "norm",
    "Start": "start",
    "Gradients": "gradients_final",
    "Clipped": "after_clip",
}


class Slightly(ReferenceZero1):
    """Wrong is a result, a moment of the step, or what a method is for."""

    depth = "family"
    factor: ClassVar[float]
    wrong: ClassVar[str]

    def setup(self, build: Any, state: Any, *arguments: Any) -> None:
        super().setup(build, state, *arguments)
        if self.wrong == "start":
            for parameter in self.module.parameters():
                parameter.data.mul_(self.factor)

    def step(self, batch: Any, observe: Any) -> StepResult:
        def scaled(point: Any) -> None:
            if point == self.wrong:
                self.scale_gradients(torch.tensor(self.factor, dtype=torch.float64))
            observe(point)

        result = super().step(batch, scaled)
        if self.wrong in ("loss", "norm"):
            return replace(result, **{self.wrong: getattr(result, self.wrong) * self.factor})
        return result

    def evaluate(self, batch: Any) -> Tensor | None:
        loss = super().evaluate(batch)
        return loss * self.factor if self.wrong == "evaluation" and loss is not None else loss


def _systems() -> dict[str, type[Slightly]]:
    """``MoreLoss``, ``LessLoss``, ``MoreNorm``, ..."""
    found = {}
    for what, wrong in WHAT.items():
        for way, factor in (("More", 1 + 1e-10), ("Less", 1 - 1e-10)):
            members = {"wrong": wrong, "factor": factor, "__module__": __name__}
            found[f"{way}{what}"] = type(f"{way}{what}", (Slightly,), members)
    return found


globals().update(_systems())


class Rounds(ReferenceZero1):
    """Outputs of the model are rounded before the loss."""

    depth = "family"
    dtype: ClassVar[torch.dtype] = torch.float32

    def loss_of(self, outputs: Tensor, micro: Any) -> Tensor:
        return super().loss_of(self.rounded(outputs), micro)

    def rounded(self, outputs: Tensor) -> Tensor:
        return outputs.to(self.dtype).to(outputs.dtype)


class RoundsMore(Rounds):
    dtype = torch.bfloat16


class RoundsInEvaluation(Rounds):
    def rounded(self, outputs: Tensor) -> Tensor:
        return outputs if self.module.training else super().rounded(outputs)


class LeavesNarrow(Rounds):
    def rounded(self, outputs: Tensor) -> Tensor:
        return outputs.to(torch.float16)
