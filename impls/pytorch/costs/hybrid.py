"""The bytes of torch 2.13's pipelining x ``fully_shard`` x tensor parallelism."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from shardproof.axes import cutting
from shardproof.costs.layout import chunk, within
from shardproof.costs.model import CostModel, Flow, NoCostModel, grouped_flow, norm_flow
from shardproof.costs.model_facts import ITEMSIZE, ModelFacts, TensorFacts
from shardproof.costs.pipeline import exchanged
from shardproof.costs.stages import stages_of
from shardproof.impls.pytorch.costs.pipelining import TorchPipelining
from shardproof.impls.pytorch.costs.tensor import TorchTensorParallel

#: Stages of a rank that torch keeps gathered at once.
MOST_ACTIVE = 3


class TorchHybrid(TorchTensorParallel):
    """A rank's stages: the tensor rank's part of each layer, and the shard's part of its rows.

    Sums over ``tensor`` are those of tensor parallelism: every layer lies on one stage.  Units are
    gathered once a window and reduced at its end; what is partial over ``tensor`` is summed then.
    """

    strategy, textbook = "torch_hybrid", "hybrid"
    source = (
        "as torch_tensor_parallel, fsdp2 and torch_pipelining; pipelining/stage.py: "
        "backward_maybe_with_nosync neither reduces nor reshards, perform_reduce_grad does both "
        "after the last micro-batch of a window; fsdp/_fully_shard/_fsdp_param.py, "
        "_get_grad_inner_tensor: gradients are laid out over the tensor axis before"
    )

    def __init__(self, facts: ModelFacts) -> None:
        super().__init__(facts)
        self.stages, self.pipeline = stages_of(facts), TorchPipelining(facts)
        self.shards, self.replicas = facts.shards, facts.replicas
        self.is_sharded = self.pads_gradients = bool(facts.sharded)

    def rows(self, tensor: TensorFacts, rank: int) -> tuple[int, int]:
        """Rows, and elements per row, of a tensor on the tensor rank of ``rank`` before
        sharding.
        """
        whole, rows = super().elements(tensor, rank), tensor.shape[0]
        if not tensor.numel:
            return 0, 0
        if self.is_split_by_columns(tensor):
            return rows, whole // rows
        rest = tensor.numel // rows
        return whole // rest, rest

    def elements(self, tensor: TensorFacts, rank: int) -> int:
        """Elements of ``tensor`` that ``rank`` holds of its rows."""
        if not self.is_sharded:
            return super().elements(tensor, rank)
        rows, rest = self.rows(tensor, rank)
        return chunk(rows, self.shards, self.facts.shard_of(rank)) * rest

    def padded_elements(self, tensor: TensorFacts, rank: int) -> int:
        """The same number with the padding of uneven rows."""
        rows, rest = self.rows(tensor, rank)
        return -(-rows // self.shards) * rest

    def parts(self, rank: int) -> list[tuple[TensorFacts, int]]:
        """Parameters of the stages of ``rank`` with their elements there."""
        mine = self.facts.place(rank, cutting("layers"))
        held = (t for t in self.facts.parameters if mine in self.stages.ranks(t))
        return [(t, self.elements(t, rank)) for t in held]

    def units(self) -> Iterator[list[TensorFacts]]:
        """The tensors of every unit of ``fully_shard``: blocks, and the rest of a stage."""
        for units in self.stages.units:
            rest = [t for t in self.facts.parameters if any(u in units for u in t.units)]
            for name in (self.facts.units[unit] for unit in units):
                yield [t for t in rest if all(within(owner, name) for owner in t.owners)]
                rest = [t for t in rest if not all(within(owner, name) for owner in t.owners)]
            yield rest

    @property
    def windows(self) -> int:
        """Schedule calls of every data coordinate in the step."""
        return len(self.facts.inputs[self.facts.step][0]) if self.facts.inputs else 0

    def flows(self) -> list[Flow]:
        """Calls and bytes of one step, summed over the axes."""
        facts = self.facts
        if facts.option("reshard_after_forward", False):
            raise NoCostModel(
                "there is no traffic formula for a pipeline with reshard_after_forward = true, "
                "because the schedule decides how often units are gathered"
            )
        if self.shards > 1 and len(self.stages.of(0)) > MOST_ACTIVE:
            raise NoCostModel(
                f"no traffic formula for more than {MOST_ACTIVE} stages per rank: torch then frees "
                "the parameters of some stages and gathers them again (pipelining/schedules.py, "
                "_add_unshard_reshard)"
            )
        return [
            *(super().flows() if self.ranks > 1 else self.norms()),
            *self.messages(),
            *norm_flow(facts, cutting("layers")),
            *(flow for unit in self.units() for flow in self.of_unit(unit)),
        ]

    def messages(self) -> list[Flow]:
        """Activations and their gradients; under sequence parallelism, those of own positions."""
        return exchanged(self.pipeline.messages(), self.ranks if self.is_sequence else 1)

    def of_unit(self, members: list[TensorFacts]) -> Iterator[Flow]:
        """Gathers, reductions and sums over replicas of a unit, on every tensor rank."""
        along, across = self.facts.sharded, self.facts.replicated
        for rank in range(self.ranks):
            whole = self.payload_of(members, rank)
            ever = [t for t in members if t.trainable and t.first_use is not None]
            reduced = self.payload_of(ever, rank)
            groups, crossing = self.replicas * self.windows, self.shards * self.windows
            yield from grouped_flow(along, "all_gather", [whole], self.shards, groups)
            yield from grouped_flow(along, "reduce_scatter", [reduced], self.shards, groups)
            parts = [reduced // self.shards]
            yield from grouped_flow(across, "all_reduce", parts, self.replicas, crossing)

    def payload_of(self, members: Iterable[TensorFacts], rank: int) -> int:
        """Bytes of one gather of ``members``, over all ranks of the shard group."""
        if not self.is_sharded:
            return 0
        return sum(self.padded_elements(t, rank) * self.shards * ITEMSIZE[t.dtype] for t in members)

    def sums(self) -> list[Flow]:
        """Sums of terms when a window is reduced; without data axes, once per step."""
        shares = len(self.facts.inputs[self.facts.step]) if self.facts.inputs else 0
        times = shares * self.windows if self.is_sharded else shares
        terms = [n * ITEMSIZE[t.dtype] for t, n in self.terms() if n]
        return [f for n in terms for f in self.each("all_reduce", [n] * times)]

    def norms(self) -> list[Flow]:
        """Norms, stacked by mesh and pipe rank, summed along each axis that cuts tensors."""
        facts, flows = self.facts, list[Flow]()
        if not facts.clipped:
            return flows
        item, copies = ITEMSIZE[self.table.dtype], self.replicas * self.ranks
        for pipe in range(facts.parts("layers")):
            mine = [t for t in facts.trainable if pipe in self.stages.ranks(t)]
            mine = [t for t in mine if t.first_use is not None]
            split = (
                [t for t in mine if self.is_styled(t)] if cutting("widths") in facts.axes else []
            )
            stacked = [len(split) * item, (len(mine) - len(split)) * item]
            flows += self.each("all_reduce", stacked[:1] * (self.replicas * self.shards))
            flows += grouped_flow(facts.sharded, "all_reduce", stacked, self.shards, copies)
        return flows

    def held_elements(self, tensor: TensorFacts, rank: int) -> int:
        """Elements of ``tensor`` in the memory of ``rank``, including padding."""
        if self.is_sharded:
            return self.padded_elements(tensor, rank)
        return super().held_elements(tensor, rank)

    #: Buffers of received activations stay, and shards that reductions gave.
    communication_at_rest = CostModel.communication_at_rest  # type: ignore[assignment]
    unclassified_limit = CostModel.unclassified_limit  # type: ignore[assignment]
