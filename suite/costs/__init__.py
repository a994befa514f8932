"""What every strategy costs, in closed form, from shapes, options, mesh, optimizer and precision.

A promise is never asked of the implementation that is judged: it is computed from a
``costs.model_facts.Plan``.  ``base`` has the words, ``layout`` the arithmetic of buckets
and units, ``replicated``, ``sharded``, ``fsdp``, ``native`` and
``deepspeed`` and ``pipeline`` the strategies, ``stages`` what lies where on the pipe axis,
``schedules`` the closed forms of schedules, ``accounting`` the ids.
"""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction

from shardproof.costs.ddp import DDP, NaiveDDP, Single
from shardproof.costs.fsdp import FSDP
from shardproof.costs.hybrid import Hybrid
from shardproof.costs.model import Bound, Flow, Local, Promise, Unpromised
from shardproof.costs.model_facts import Plan
from shardproof.costs.offload import offloaded
from shardproof.costs.pipeline import Pipeline
from shardproof.costs.tensor import TensorParallel
from shardproof.costs.upstream.deepspeed import (
    DeepSpeedZero0,
    DeepSpeedZero1,
    DeepSpeedZero2,
    DeepSpeedZero3,
)
from shardproof.costs.upstream.pipelines import DeepSpeedPipeline, TorchPipelining
from shardproof.costs.upstream.torch_hybrid import TorchHybrid
from shardproof.costs.upstream.torch_sharded import FSDP1, FSDP2, ZeroRedundancyOptimizer
from shardproof.costs.upstream.torch_tensor import TorchTensorParallel
from shardproof.costs.zero import Zero1, Zero2, Zero3

#: Strategy -> its promise.
PROMISES: dict[str, type[Promise]] = {
    promise.strategy: promise
    for promise in (
        *(Single, NaiveDDP, DDP, Zero1, Zero2, Zero3, FSDP, TensorParallel),
        *(FSDP1, FSDP2, ZeroRedundancyOptimizer),
        *(TorchTensorParallel, TorchHybrid),
        *(DeepSpeedZero0, DeepSpeedZero1, DeepSpeedZero2, DeepSpeedZero3),
        *(Pipeline, TorchPipelining, DeepSpeedPipeline, Hybrid),
    )
}

__all__ = [
    "PROMISES",
    "Bound",
    "Flow",
    "Local",
    "Plan",
    "Promise",
    "Unpromised",
    "memory_ratio",
    "promise_of",
    "whole_bytes",
]


def promise_of(strategy: str, plan: Plan | None) -> Promise | None:
    """The promise of ``strategy`` for ``plan``; ``None`` where there is none."""
    if plan is None or strategy not in PROMISES:
        return None
    return offloaded(PROMISES[strategy], plan)(plan)


def memory_ratio(promise: Promise) -> Fraction:
    """How many times less ``promise`` holds than whole copies of the same model do.

    Judged classes once all state exists; the rank that holds most counts.
    """
    return Fraction(whole_bytes(promise), promise.total() or 1)


def whole_bytes(promise: Promise) -> int:
    """What whole copies of the same model hold on every rank, same options."""
    return DDP(replace(promise.plan, axes={"replicate": promise.plan.world})).total()
