"""Data parallelism, the naive way: the lesson that ``ddp.py`` improves on.

The problem and the placement are those of ``ddp.py``.  Gradients are summed one parameter at a
time, after backward has ended.

    step     micro-batches   forward, backward; gradients add up locally
             finish          for each parameter: all-reduce, wait

This is correct, short, and slow for two reasons.  The network idles while backward computes, and
the processors idle afterwards.  And each small tensor (a bias, a norm's weight) pays the latency of
a whole call.

Cost: floating-point bytes sent a step, over all N ranks: 2 (N-1) trainable bytes, as ``ddp.py`` (an
all-reduce moves 2 (N-1)/N of the payload a rank: ZeRO, arXiv 1910.02054, section VII-A), in as many
calls as there are parameters with elements.
Numbers: the plain sum over ranks; replicas stay equal bit for bit.
Left out: overlap, buckets, buffer broadcast (each rank keeps its own after the first step).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from shardproof.comm import Comm, Mesh
from shardproof.contract import Capabilities
from shardproof.impls.reference.engine.choices import (
    FORMATS,
    Compressing,
    Followed,
    OfWholes,
    Saved,
    lossy,
)
from shardproof.impls.reference.engine.engine import Engine
from shardproof.impls.reference.engine.handle import PLAIN, Comms, Context, Handle, Replicated
from shardproof.impls.reference.engine.options import parse_options
from shardproof.impls.reference.engine.state import broadcast_tensors, named_state
from shardproof.impls.reference.parts.flat import FlatLayout
from shardproof.impls.reference.parts.reducers import Bucket, Reducer


@dataclass(frozen=True)
class Options(OfWholes, Compressing, Followed, Saved):
    """``all_reduce``, ``compress``, and the checkpoint format."""


def apply(module: nn.Module, comms: Comms, options: Options, context: Context = PLAIN) -> NaiveDDP:
    """Replicate ``module`` over ``comms["replicate"]``, starting from rank 0's values."""
    return NaiveDDP(module, comms["replicate"], context.reducer)


class NaiveDDP(Replicated):
    """The handle: everything happens in ``finish``."""

    def __init__(self, module: nn.Module, comm: Comm, reducer: Reducer) -> None:
        super().__init__(module, comm)
        self.reducer = reducer
        reducer.check(comm.size)
        broadcast_tensors(list(named_state(module).values()), comm)

    def finish(self) -> None:
        """Sum gradient by gradient: zero if only this rank has none, none if no rank has one."""
        # A sum of zeros does not tell whether anybody used the parameter: users are counted beside.
        votes = [p.grad is not None for p in self.parameters]
        used = self.comm.begin_agreement(votes, "sum")
        for name, parameter, count in zip(self.names, self.parameters, used.wait(), strict=True):
            gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            # A transposed parameter has a transposed gradient, and collectives take contiguous
            # tensors.
            gradient = gradient.contiguous()
            if gradient.numel():
                parts = FlatLayout({name: gradient}, 1).whole
                bucket = Bucket(gradient.view(-1), parts, self.step)
                self.reducer.all_reduce(bucket, self.comm).wait()
            # Not zero but none, or weight decay and momentum would move unused parameters.
            parameter.grad = gradient if count else None


class ReferenceNaiveDDP(Engine):
    """The strategy as a system under test."""

    strategy = "naive_ddp"
    depth = "layout"
    options_type = Options

    @classmethod
    def capabilities(cls, options: Mapping[str, Any]) -> Capabilities:
        """The ``naive_ddp`` profile; buffers stay with their rank."""
        chosen = parse_options(Options, options)
        exact = Capabilities(
            dtypes=("float64", "float32", "bfloat16"),
            buffers="per_rank",
            features=frozenset({"clipping", "accumulation", "initial_broadcast"}),
            checkpoints=FORMATS,
        )
        return lossy(exact, chosen)

    def transform(self, module: nn.Module, mesh: Mesh, options: Mapping[str, Any]) -> Handle:
        """Apply the handle along the replicate axis."""
        comms = {"replicate": mesh.comm("replicate")}
        chosen = parse_options(Options, options)
        return apply(module, comms, chosen, Context(self.reducer))


IMPLEMENTATION = ReferenceNaiveDDP
