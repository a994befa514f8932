"""Faults of experts folded over data axes, planted in ``reference/hybrid``.

They need groups that differ: the ranks that share out the experts, those that hold the same ones,
and all that hold the rest.  So most need two groups of two, which lie on shard x context.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor, nn

from shardproof.case import CheckpointPlan
from shardproof.contract import Piece
from shardproof.impls.mutants import declare
from shardproof.impls.mutants.expert.expert import mixture
from shardproof.impls.mutants.triggers import ADAMW, CLIP
from shardproof.impls.reference.checkpoint.agreement import State
from shardproof.impls.reference.checkpoint.contents import Contents
from shardproof.impls.reference.context.choices import WholeChoices
from shardproof.impls.reference.engine.handle import Handle
from shardproof.impls.reference.engine.norm import power_sum, total_norm
from shardproof.impls.reference.engine.state import broadcast_tensors
from shardproof.impls.reference.expert.exchange import Exchange, Plan
from shardproof.impls.reference.hybrid import ReferenceHybrid
from shardproof.impls.reference.hybrid.experts import Folded

RING: Mapping[str, Any] = {"context": {"method": "ring"}, "experts": {"ranks": 2}}
SHARDS: Mapping[str, Any] = {"experts": {"ranks": 2, "data": "fsdp"}}

mutant = declare.family(
    ReferenceHybrid,
    mesh={"shard": 2, "context": 2},
    workload=mixture(global_batch=4),
    options=RING,
    killed_by=("equivalence",),
)


@mutant(
    "fold_groups_in_another_order",
    says="every expert was chosen as often as in the oracle .* the outputs",
    steps=1,
)
class GroupsInAnotherOrder(Exchange):
    """The ranks of a group hold the experts in the reverse of the order in which rows are sent."""

    @property
    def own(self) -> slice:
        each = self.total // self.comm.size
        place = self.comm.size - 1 - self.comm.rank
        return slice(place * each, (place + 1) * each)


@mutant(
    "fold_experts_summed_over_neighbours",
    says="every gradient|not (reduced|summed)|axis",
    killed_by=("equivalence", "traffic"),
)
class ExpertsSummedOverNeighbours(Folded):
    """Gradients of experts are summed over the ranks that share them out, not over those that hold
    the same.
    """

    def divided(self, module: nn.Module) -> Handle:
        handle: Any = super().divided(module)
        handle.comm = self.fold.across
        return handle


@mutant(
    "fold_experts_averaged_over_all_data_ranks",
    says="every gradient is 2 times too small",
)
class ExpertsAveragedOverAllDataRanks(Folded):
    """Gradients of experts are divided by the ranks of their group, as a mean over data ranks."""

    def finish(self) -> None:
        super().finish()
        self.own.scale_gradients(torch.tensor(1 / self.fold.across.size, dtype=torch.float64))


@mutant(
    "fold_rest_summed_over_expert_group",
    says="not (reduced|summed)|is missing",
    killed_by=("equivalence", "replicas", "traffic"),
)
class RestSummedOverExpertGroup(ReferenceHybrid):
    """The rest is summed over the expert group, as experts are over those that hold the same."""

    def wrap_rest(self, module: nn.Module) -> Any:
        handle: Any = super().wrap_rest(module)
        if self.fold is not None:
            handle.comm = self.fold.across
        return handle


class _Norm(ReferenceHybrid):
    """A norm of all pieces that :meth:`counts` says to count."""

    def norm(self) -> Tensor:
        held = [piece for piece in self.local_state("gradients") if self.counts(piece)]
        total = sum((power_sum(piece.tensor, 2.0) for piece in held), torch.zeros(()).double())
        axes = tuple(axis for axis, ranks in self.mesh.axes.items() if ranks > 1)
        return total_norm([(total, axes)], self.mesh.comm)

    def counts(self, piece: Piece) -> bool:
        """Whether this rank's ``piece`` counts."""
        raise NotImplementedError


@mutant(
    "fold_norm_counts_copies_of_experts",
    says="tensors that only some ranks hold count with every copy",
    killed_by=("norm", "equivalence"),
    optimizer=CLIP,
)
class NormCountsCopiesOfExperts(_Norm):
    """All ranks add their experts to the norm, also those that hold the same ones."""

    def counts(self, piece: Piece) -> bool:
        return piece.replica == 0 or ".experts." in piece.name


@mutant(
    "fold_norm_of_first_experts",
    says="this is the norm of the part that rank 0 holds itself",
    killed_by=("norm", "equivalence"),
    optimizer=CLIP,
)
class NormOfFirstExperts(_Norm):
    """Only the first rank of an expert group adds its experts to the norm, as if all held them."""

    def counts(self, piece: Piece) -> bool:
        is_first = self.fold is None or self.fold.across.rank == 0
        return piece.replica == 0 and (is_first or ".experts." not in piece.name)


@mutant(
    "fold_recomputation_takes_newest_plan",
    says="chose other experts than its forward",
    killed_by=("crash",),
    crash_says="chose other experts than its forward",
    mesh={"pipe": 2, "shard": 2},
    workload=mixture(layers=2, global_batch=4, micro_batches=2),
    options={"experts": {"ranks": 2}, "schedule": "gpipe", "recompute_every": 1},
)
class RecomputationTakesNewestPlan(Exchange):
    """A recomputation takes the plan of the newest forward, which is another micro-batch's."""

    def plan(self, numbers: Tensor, again: bool) -> Plan:
        self.plans.rotate(again)
        return super().plan(numbers, again)


@mutant(
    "fold_recomputation_routes_again",
    says="chose other experts than its forward",
    killed_by=("crash",),
    crash_says="chose other experts than its forward",
    workload=mixture(capacity=0.5, global_batch=4),
    options={**RING, "recompute_every": 1},
)
class RecomputationRoutesAgain(WholeChoices):
    """A recomputation shares out places among the positions of its rank, as its forward did not."""

    def places(self, experts: Tensor, samples: int) -> Tensor:
        placed = super().places(experts, samples)
        again = torch._C._current_graph_task_id() != -1
        return self.places_of(experts, samples) if again else placed


@mutant(
    "fold_capacity_of_own_positions",
    says="other choices than in the oracle got no place|tokens chose other experts",
    workload=mixture(capacity=0.5, global_batch=4),
)
class CapacityOfOwnPositions(WholeChoices):
    """Each context rank shares out the places of an expert among its own positions."""

    def places(self, experts: Tensor, samples: int) -> Tensor:
        super().places(experts, samples)
        placed: Tensor = self.places_of(experts, samples)
        return placed


@mutant(
    "fold_load_of_own_positions",
    says=r"blocks\.0\.mlp\.load",
)
class LoadOfOwnPositions(WholeChoices):
    """Each context rank counts only the choices of its positions."""

    def count(self, routing: Any) -> None:
        self.count_of(routing)


@mutant(
    "fold_starts_experts_from_rank_0",
    says="from rank 0's part",
)
class StartsExpertsFromRank0(Folded):
    """The experts of the first rank are sent to the others of its group, as copies would be."""

    def divided(self, module: nn.Module) -> Handle:
        broadcast_tensors([p.data for p in module.parameters()], self.fold.across)
        return super().divided(module)


@mutant(
    "fold_saves_first_experts_only",
    says=r"experts\.up\.exp_avg': element 2048 lies in no part",
    killed_by=("crash",),
    crash_says="lies in no part",
    mesh={"shard": 2},
    options=SHARDS,
    optimizer=ADAMW,
    steps=4,
    checkpoint=CheckpointPlan(save_at=2),
)
class SavesFirstExpertsOnly(Contents):
    """The optimizer state of experts is saved by the first rank of an expert group, as if all its
    ranks had the same.
    """

    def state(self, extra: Mapping[str, Any]) -> State:
        state, system = super().state(extra), cast(ReferenceHybrid, self.system)
        if system.fold is None or system.fold.across.rank == 0:
            return state
        slots = [one for one in state.pieces["optimizer"] if ".experts." not in one.name]
        return replace(state, pieces={**state.pieces, "optimizer": slots})
