"""Local SGD: ranks train alone and average their parameters every few steps.

Problem.  Data parallelism sends all gradients in every step.  Where the network is slow, ranks may
as well make several steps on their own data and then agree: H times less is sent, for ranks that
part in between (Stich, arXiv 1805.09767).

    what                        where
    parameters                  every rank, whole; equal after a meeting, its own in between
    gradients                   every rank, its own: of its share of the batch, times N
    optimizer state             every rank, its own; it never meets
    buffers                     every rank, its own
    loss scale                  every rank, its own

    step     micro-batches   forward, backward; gradients add up locally
             finish          [1] gradients times N
             clip, update    [2] by this rank's own norm; an overflow leaves out its own update only
             after_update    [3] after every H-th step: parameters = mean over ranks

The mean is no part of the update: a rank whose update was left out takes part in it, or the others
would wait for ever.  A parameter that a rank did not use is not updated there.

Evaluation is that of a rank's own parameters.  Between meetings there is no state of all: what is
saved is every rank's own, for as many ranks to go on with; after a meeting any number may load it.

Cost: bytes sent, over all N ranks: 2 (N-1) trainable parameter bytes in every H-th step (one
all-reduce a dtype), nothing in the others.  No memory beyond data parallelism's but the message.
Numbers: those of N trajectories on one process.  With H = 1 and SGD the parameters are those of
data parallelism: the update is linear in the gradient, so the mean of updates is the update by the
mean, momentum included.
Left out: means of buffers and of optimizer state, a mean under way while training goes on.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from shardproof.impls.reference.engine.handle import PLAIN, Comms, Context
from shardproof.impls.reference.engine.options import parse_options
from shardproof.impls.reference.parts.alone import Alone, Meeting, Meets, TrainsAlone, mean


@dataclass(frozen=True)
class Options(Meets):
    """``every``: H; and the checkpoint format."""


def apply(module: nn.Module, comms: Comms, options: Options, context: Context = PLAIN) -> LocalSGD:
    """Replicate ``module`` over ``comms["replicate"]``, starting from rank 0's values."""
    return LocalSGD(module, comms["replicate"], options)


class LocalSGD(Alone):
    """The handle: the mean."""

    @torch.no_grad()
    def meet(self) -> None:
        """Average the parameters in place, because the optimizer and its state refer to them."""
        for parameter, value in zip(self.parameters, mean(self.parameters, self.comm), strict=True):
            parameter.copy_(value)


class ReferenceLocalSGD(TrainsAlone):
    """The strategy as a system under test."""

    strategy = "local_sgd"
    options_type = Options
    handle_type = LocalSGD

    @classmethod
    def meeting(cls, options: Mapping[str, Any]) -> Meeting:
        """The mean of the parameters."""
        return Meeting(parse_options(Options, options))


IMPLEMENTATION = ReferenceLocalSGD
