"""Systems whose oracle is not plain training, two that lie, and one that doubles gradients."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from shardproof.comm import Comm, Mesh
from shardproof.contract import Capabilities
from shardproof.impls.pytorch.ddp import PyTorchDDP
from shardproof.impls.reference.engine.handle import Handle
from shardproof.impls.reference.naive_ddp import NaiveDDP, ReferenceNaiveDDP
from shardproof.impls.reference.parts.reducers import Reducer

Gradients = dict[str, Tensor]


class HalfHandle(NaiveDDP):
    """Sends gradients as fp16 and keeps what that lost for the next step."""

    def __init__(self, module: nn.Module, comm: Comm, reducer: Reducer, feedback: bool) -> None:
        super().__init__(module, comm, reducer)
        self.feedback = feedback
        self.lost: Gradients = {}

    def finish(self) -> None:
        """Add what was lost, round, keep what is lost now, sum."""
        for name, parameter in zip(self.names, self.parameters, strict=True):
            assert parameter.grad is not None
            parameter.grad = rounded(name, parameter.grad, self.lost, self.feedback)
        super().finish()


def rounded(name: str, gradient: Tensor, lost: Gradients, feedback: bool) -> Tensor:
    """``gradient`` as fp16 carries it; ``lost`` is read and updated."""
    wanted = gradient + lost[name] if feedback and name in lost else gradient
    sent = wanted.to(torch.float16).to(gradient.dtype)
    lost[name] = wanted - sent
    return sent


class HalfDDP(ReferenceNaiveDDP):
    """Lossy by declaration."""

    feedback = True

    @classmethod
    def capabilities(cls, options: Mapping[str, Any]) -> Capabilities:
        """Judged against an emulation of the rounding."""
        return replace(super().capabilities(options), exactness="lossy", oracle="emulated")

    @classmethod
    def emulator(
        cls, options: Mapping[str, Any]
    ) -> Callable[[int, Sequence[Gradients]], Gradients]:
        """One store of losses per coordinate; the sum in rank order."""
        lost: dict[int, Gradients] = {}

        def fold(step: int, parts: Sequence[Gradients]) -> Gradients:
            total: Gradients = {}
            for coordinate, part in enumerate(parts):
                mine = lost.setdefault(coordinate, {})
                for name, gradient in part.items():
                    sent = rounded(name, gradient, mine, True)
                    total[name] = total[name] + sent if name in total else sent
            return total

        return fold

    def transform(self, module: nn.Module, mesh: Mesh, options: Mapping[str, Any]) -> Handle:
        """Apply the handle along the replicate axis."""
        return HalfHandle(module, mesh.comm("replicate"), self.reducer, self.feedback)


class ForgetfulHalfDDP(HalfDDP):
    """Declares error feedback and drops what it lost."""

    feedback = False


class HonestPlainHalfDDP(HalfDDP):
    """Rounds, but claims plain sums."""

    @classmethod
    def capabilities(cls, options: Mapping[str, Any]) -> Capabilities:
        """Judged like any other."""
        return replace(super().capabilities(options), exactness="reordered-sum", oracle="plain")


class DoubledDDP(PyTorchDDP):
    """All replicas are equal, and wrong: gradients are twice what they should be."""

    def loss_factor(self) -> int:
        """Doubles every gradient."""
        return 2 * super().loss_factor()
