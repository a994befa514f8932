"""Faults of pipelines with many stages."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from itertools import combinations
from typing import Any

import torch.distributed as dist
from torch import nn

from shardproof.impls.mutants.at_scale import declare
from shardproof.impls.reference.pipeline import ReferencePipeline
from shardproof.impls.reference.pipeline.schedules import one_f_one_b
from shardproof.impls.reference.pipeline.stages import Stages
from shardproof.schedules import MESSAGES, Schedule, with_messages

fault_at_scale = declare.family(
    ReferencePipeline,
    mesh={"pipe": 16},
    shape={"layers": 16, "hidden": 256},
    micro_batches=4,
)


@fault_at_scale(
    "pipeline_keeps_embedding_on_all_stages",
    says="after_update: activations and temporaries: .* bytes promised",
)
class KeepsEmbeddingOnAllStages(Stages):
    """With more than 8 stages, every rank keeps the embedding."""

    def __init__(self, whole: nn.Module, *args: Any) -> None:
        super().__init__(whole, *args)
        self.embedding = whole.get_submodule("embed") if self.comm.size > 8 else None


@fault_at_scale("pipeline_makes_a_group_a_pair", says="process groups: .* made")
class MakesAGroupAPair(Stages):
    """With more than 8 stages, each pair of stages gets a process group for its messages."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        ranks = dist.get_process_group_ranks(self.comm.group)
        pairs = combinations(ranks, 2) if len(ranks) > 8 else ()
        self.pairs = [dist.new_group(list(pair)) for pair in pairs]


@fault_at_scale(
    "pipeline_warms_up_twice",
    says="peak in backward: activations: .* bytes promised",
    mesh={"pipe": 10},
    shape={"layers": 10, "hidden": 64, "heads": 4, "vocab": 128, "seq": 64},
    micro_batches=20,
)
class WarmsUpTwice(ReferencePipeline):
    """With more than 8 stages, ranks warm up as in a pipeline of twice as many stages."""

    @classmethod
    def schedule(cls, options: Mapping[str, Any], ranks: int, micro_batches: int) -> Schedule:
        schedule = super().schedule(options, ranks, micro_batches)
        if ranks <= 8:
            return schedule
        longer = one_f_one_b(2 * ranks, micro_batches).orders[:ranks]
        orders = (tuple(a for a in order if a.op not in MESSAGES) for order in longer)
        return with_messages(replace(schedule, orders=tuple(orders)))
