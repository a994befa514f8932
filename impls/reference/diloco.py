"""DiLoCo: ranks train alone, and an outer optimizer uses their progress as a gradient.

Problem.  Local SGD forgets, at every meeting, where ranks were heading: with hundreds of steps in
between, the mean of what they found is a step of its own, and can have a rate and momentum of its
own (DiLoCo, arXiv 2311.08105, algorithm 1; outer Nesterov momentum 0.9 and rate 0.7 there).

    what                        where
    parameters                  every rank, whole; equal after a meeting, its own in between
    gradients                   every rank, its own: of its share of the batch, times N
    optimizer state (inner)     every rank, its own; it never meets
    start, outer momentum       every rank, whole and equal: slots outer_start, outer_momentum
    buffers, loss scale         every rank, its own

    step     micro-batches   forward, backward; gradients add up locally
             finish          gradients times N
             clip, update    by this rank's own norm; an overflow leaves out its own update only
             after_update    after every H-th step:
                             [1] d = mean over ranks of (start - parameters), the pseudo-gradient
                             [2] m = outer_momentum m + d
                             [3] start = start - outer_lr (d + outer_momentum m)
                             [4] parameters = start

Evaluation is that of a rank's own parameters.  Between meetings there is no state of all: what is
saved is every rank's own, for as many ranks to go on with; after a meeting any number may load it.

Cost: bytes sent as local SGD: 2 (N-1) trainable parameter bytes in every H-th step.  Memory: the
start and, with momentum, the outer momentum: 2 P more than data parallelism.
Numbers: those of N trajectories on one process.  With H = 1, outer rate 1 and no outer momentum,
under SGD, the parameters are those of data parallelism (section 2 of the paper).
Left out: what keeps the start on the host, sends in fewer bits, or overlaps the mean with training
(streaming DiLoCo); ranks that come and go.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from shardproof.comm import Comm
from shardproof.contract import OUTER, Piece, Refused
from shardproof.impls.reference.engine.handle import PLAIN, Comms, Context
from shardproof.impls.reference.engine.options import at_least, parse_options
from shardproof.impls.reference.parts.alone import Alone, Meeting, Meets, TrainsAlone, mean, mean_of

START, MOMENTUM = f".{OUTER}start", f".{OUTER}momentum"


@dataclass(frozen=True)
class Options(Meets):
    """``every``: H; rate and momentum of the outer optimizer; and the checkpoint format."""

    outer_lr: float = 0.7
    outer_momentum: float = 0.9

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.outer_lr < float("inf"):
            raise Refused(
                f"option 'outer_lr' must be a finite number above 0, not {self.outer_lr!r}"
            )
        at_least("outer_momentum", self.outer_momentum, 0)
        if self.outer_momentum >= 1:
            raise Refused(
                f"option 'outer_momentum' must be below 1, not {self.outer_momentum!r}: with 1 "
                "or more the effect of a past update never fades"
            )


def apply(module: nn.Module, comms: Comms, options: Options, context: Context = PLAIN) -> DiLoCo:
    """Replicate ``module`` over ``comms["replicate"]``, starting from rank 0's values."""
    return DiLoCo(module, comms["replicate"], options)


class DiLoCo(Alone):
    """The handle: the outer optimizer."""

    def __init__(self, module: nn.Module, comm: Comm, options: Options) -> None:
        super().__init__(module, comm, options)
        self.options = options
        self.starts = [parameter.detach().clone() for parameter in self.parameters]
        self.momenta = [torch.zeros_like(start) for start in self.starts if options.outer_momentum]

    @torch.no_grad()
    def meet(self) -> None:
        """Take one step of the outer optimizer, equal on all ranks, and continue from its
        result.
        """
        pseudo_gradients = self.pseudo_gradients()  # [1]
        self.outer_step(pseudo_gradients)
        for parameter, start in zip(self.parameters, self.starts, strict=True):
            parameter.copy_(start)  # [4]

    def pseudo_gradients(self) -> list[Tensor]:
        """The average change of the ranks since the start, with the sign of a gradient."""
        pairs = zip(self.starts, self.parameters, strict=True)
        return mean([start - parameter for start, parameter in pairs], self.comm)

    def outer_step(self, gradients: Sequence[Tensor]) -> None:
        """SGD with Nesterov momentum, applied to the start."""
        rate, kept = self.options.outer_lr, self.options.outer_momentum
        for index, (start, gradient) in enumerate(zip(self.starts, gradients, strict=True)):
            step = gradient
            if kept:
                momentum = self.momenta[index].mul_(kept).add_(gradient)  # [2]
                step = gradient.add(momentum, alpha=kept)
            start.add_(step, alpha=-rate)  # [3]

    @torch.no_grad()
    def loaded(self) -> None:
        """Restart the outer optimizer from the loaded parameters; a later load of its state
        replaces it.
        """
        super().loaded()
        for start, parameter in zip(self.starts, self.parameters, strict=True):
            start.copy_(parameter)
        for momentum in self.momenta:
            momentum.zero_()

    def outer_pieces(self) -> list[Piece]:
        """Start and momentum, as slots of the optimizer."""
        slots = {START: self.starts, MOMENTUM: self.momenta}
        return [
            Piece.whole(name + slot, tensor, replica=self.replica)
            for slot, tensors in slots.items()
            for name, tensor in zip(self.names, tensors, strict=False)
        ]


class ReferenceDiLoCo(TrainsAlone):
    """The strategy as a system under test."""

    strategy = "diloco"
    options_type = Options
    handle_type = DiLoCo

    @classmethod
    def meeting(cls, options: Mapping[str, Any]) -> Meeting:
        """The outer step, computed by torch's optimizer."""
        chosen = parse_options(Options, options)
        return OuterStep(chosen, chosen)


Tensors = Mapping[str, Tensor]


@dataclass(frozen=True)
class OuterStep(Meeting):
    """The meeting for the oracle: the pseudo-gradient goes into ``torch.optim.SGD``."""

    options: Options

    def begin(self, parameters: Tensors) -> dict[str, Tensor]:
        """Store the start; there is no momentum yet."""
        kept = {name + START: value.clone() for name, value in parameters.items()}
        if self.options.outer_momentum:
            kept |= {name + MOMENTUM: torch.zeros_like(p) for name, p in parameters.items()}
        return kept

    def meet(
        self, ends: Sequence[Tensors], kept: Tensors
    ) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """The result of the outer optimizer's step from the start."""
        after: dict[str, Tensor] = {}
        for name in ends[0]:
            start = nn.Parameter(kept[name + START].clone())
            start.grad = mean_of([start.detach() - end[name] for end in ends])
            rate, momentum = self.options.outer_lr, self.options.outer_momentum
            outer = torch.optim.SGD(
                [start], rate, momentum=momentum, nesterov=bool(momentum), foreach=False
            )
            if momentum:
                outer.state[start]["momentum_buffer"] = kept[name + MOMENTUM].clone()
            outer.step()
            after[name + START] = start.detach().clone()
            if momentum:
                after[name + MOMENTUM] = outer.state[start]["momentum_buffer"]
        return {name: after[name + START].clone() for name in ends[0]}, after


IMPLEMENTATION = ReferenceDiLoCo
