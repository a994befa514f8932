"""Faults of DiLoCo's outer step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from shardproof.comm import Comm
from shardproof.impls.mutants import declare
from shardproof.impls.reference.diloco import DiLoCo, ReferenceDiLoCo

mutant = declare.family(ReferenceDiLoCo, options={"every": 2}, steps=4, killed_by=("equivalence",))


@mutant("outer_pseudo_gradient_reversed", says="the outer step goes the wrong way", zoo=("G05",))
class PseudoGradientReversed(DiLoCo):
    """The pseudo-gradient has the wrong sign, so the outer step undoes the training."""

    def pseudo_gradients(self) -> list[Tensor]:
        return [-gradient for gradient in super().pseudo_gradients()]


@mutant("outer_start_is_the_parameters", says="outer_start", zoo=("G05",))
class StartIsTheParameters(DiLoCo):
    """The start refers to the parameters instead of a copy, so the pseudo-gradient is zero."""

    def __init__(self, module: Any, comm: Comm, options: Any) -> None:
        super().__init__(module, comm, options)
        self.starts = [parameter.detach() for parameter in self.parameters]


@mutant("outer_momentum_reversed", says="at step 3")
class MomentumReversed(DiLoCo):
    """Outer momentum is subtracted from the new pseudo-gradient."""

    def outer_step(self, gradients: Sequence[Tensor]) -> None:
        for momentum in self.momenta:
            momentum.neg_()
        super().outer_step(gradients)


@mutant("outer_momentum_forgotten", says="at step 3")
class MomentumForgotten(DiLoCo):
    """Outer momentum starts again at every meeting."""

    def outer_step(self, gradients: Sequence[Tensor]) -> None:
        for momentum in self.momenta:
            momentum.zero_()
        super().outer_step(gradients)


@mutant("outer_without_nesterov", says="times the outer step")
class WithoutNesterov(DiLoCo):
    """The outer step is the momentum itself, without Nesterov's look-ahead."""

    def outer_step(self, gradients: Sequence[Tensor]) -> None:
        for start, momentum, gradient in zip(self.starts, self.momenta, gradients, strict=True):
            momentum.mul_(self.options.outer_momentum).add_(gradient)
            start.add_(momentum, alpha=-self.options.outer_lr)


@mutant("outer_rate_ignored", says="times the outer step")
class RateIgnored(DiLoCo):
    """The outer rate has no effect; it is 1."""

    def outer_step(self, gradients: Sequence[Tensor]) -> None:
        befores = [start.clone() for start in self.starts]
        super().outer_step(gradients)
        for start, before in zip(self.starts, befores, strict=True):
            start.sub_(before).div_(self.options.outer_lr).add_(before)


@mutant("outer_sum_of_pseudo_gradients", says="times the outer step")
class SumOfPseudoGradients(DiLoCo):
    """Pseudo-gradients are summed over ranks instead of averaged."""

    def pseudo_gradients(self) -> list[Tensor]:
        return [gradient * self.comm.size for gradient in super().pseudo_gradients()]


@mutant("outer_start_not_moved", says="outer_start' at step 1")
class StartNotMoved(DiLoCo):
    """The outer step moves the parameters, but the start stays at the initial values."""

    @torch.no_grad()
    def meet(self) -> None:
        befores = [start.clone() for start in self.starts]
        super().meet()
        for start, before in zip(self.starts, befores, strict=True):
            start.copy_(before)


@mutant(
    "outer_step_for_nobody",
    says="the ranks did not synchronize",
    killed_by=("equivalence", "replicas"),
)
class StepForNobody(DiLoCo):
    """The start moves, but ranks continue from their own parameters."""

    @torch.no_grad()
    def meet(self) -> None:
        self.outer_step(self.pseudo_gradients())


@mutant("outer_is_the_mean", says="the mean of the ranks' own results, without an outer step")
class IsTheMean(DiLoCo):
    """Parameters become their mean; there is no outer optimizer."""

    def outer_step(self, gradients: Sequence[Tensor]) -> None:
        for start, gradient in zip(self.starts, gradients, strict=True):
            start.sub_(gradient)


@mutant(
    "outer_momentum_of_each", says="replicas 0 and 1 differ", killed_by=("equivalence", "replicas")
)
class MomentumOfEach(DiLoCo):
    """Outer momentum adds the rank's own pseudo-gradient, so ranks diverge."""

    def pseudo_gradients(self) -> list[Tensor]:
        return [start - p.detach() for start, p in zip(self.starts, self.parameters, strict=True)]
