"""What every strategy costs, in closed form, from shapes, options, mesh, optimizer and precision.

A promise is never asked of the implementation that is judged: it is computed from a
``costs.model_facts.ModelFacts``.  ``base`` has the words, ``layout`` the arithmetic of buckets
and units, ``replicated``, ``sharded``, ``fsdp``, ``upstream`` and
``deepspeed`` and ``pipeline`` the strategies, ``stages`` what lies where on the pipe axis,
``schedules`` the closed forms of schedules, ``accounting`` the ids.
"""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction

from shardproof.costs.ddp import DDP, NaiveDDP, Single
from shardproof.costs.fsdp import FSDP
from shardproof.costs.hybrid import Hybrid
from shardproof.costs.model import Bound, CostModel, Flow, Local, NoCostModel
from shardproof.costs.model_facts import ModelFacts
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
COST_MODELS: dict[str, type[CostModel]] = {
    cost_model.strategy: cost_model
    for cost_model in (
        *(Single, NaiveDDP, DDP, Zero1, Zero2, Zero3, FSDP, TensorParallel),
        *(FSDP1, FSDP2, ZeroRedundancyOptimizer),
        *(TorchTensorParallel, TorchHybrid),
        *(DeepSpeedZero0, DeepSpeedZero1, DeepSpeedZero2, DeepSpeedZero3),
        *(Pipeline, TorchPipelining, DeepSpeedPipeline, Hybrid),
    )
}

__all__ = [
    "COST_MODELS",
    "Bound",
    "Flow",
    "Local",
    "ModelFacts",
    "CostModel",
    "NoCostModel",
    "memory_ratio",
    "cost_model_of",
    "whole_bytes",
]


def cost_model_of(strategy: str, plan: ModelFacts | None) -> CostModel | None:
    """The promise of ``strategy`` for ``plan``; ``None`` where there is none."""
    if plan is None or strategy not in COST_MODELS:
        return None
    return offloaded(COST_MODELS[strategy], plan)(plan)


def memory_ratio(cost_model: CostModel) -> Fraction:
    """How many times less ``promise`` holds than whole copies of the same model do.

    Judged classes once all state exists; the rank that holds most counts.
    """
    return Fraction(whole_bytes(cost_model), cost_model.total() or 1)


def whole_bytes(cost_model: CostModel) -> int:
    """What whole copies of the same model hold on every rank, same options."""
    return DDP(replace(cost_model.plan, axes={"replicate": cost_model.plan.world})).total()
