"""The bytes of sharded systems of PyTorch 2.13, with the source of each term.

Paths are those below ``torch/distributed``.  The terms were found by reading the source and
confirmed call by call with the traffic ledger.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Iterable
from dataclasses import replace
from functools import cached_property

from shardproof.costs import model
from shardproof.costs.layout import Flat, chunk, unit_names, units, within
from shardproof.costs.model import Bytes, CostModel, Flow, Local
from shardproof.costs.model_facts import ITEMSIZE, ModelFacts, TensorFacts


def whole_units(facts: ModelFacts) -> list[tuple[str, tuple[TensorFacts, ...]]]:
    """Name and tensors of each unit, the root first, in order of registration.

    torch wants all owners of a tied parameter in one unit: a unit that shares one with what lies
    outside is left to the root.
    """
    torn = {
        name
        for tensor in facts.parameters
        for name in unit_names(facts)
        if 0 < sum(within(owner, name) for owner in tensor.owners) < len(tensor.owners)
    }
    kept = [name for name in unit_names(facts) if name not in torn]
    chosen = units(replace(facts, options={**facts.options, "wrap": {"units": kept}}), 1)
    order = {tensor.name: index for index, tensor in enumerate(facts.parameters)}
    return [
        (unit.name, tuple(sorted(unit.members, key=lambda tensor: order[tensor.name])))
        for unit in chosen
    ]


#: At most this for a norm, or a part of one.
SCALAR_BYTES = 8


class _Upstream(CostModel):
    divided = (True, True, True)
    rests_as_built = True

    @property
    def reductions(self) -> int:
        silent = self.facts.option("accumulate_without_communication", False)
        return 1 if silent else self.facts.rounds

    def recomputed(self, units: Iterable[str]) -> str | None:
        """The first of ``units`` inside a recomputed block, if any."""
        blocks = tuple(f"{block}." for block in self.facts.units)
        again = self.facts.option("recompute_every", 0)
        return next((name for name in units if again and name.startswith(blocks)), None)

    def overflow(self, axis: str) -> list[Flow]:
        """The scaler's agreement on an overflow: one fp32 number."""
        return model.flow(self.facts, axis, "all_reduce", [4] if self.facts.scaled else [])

    @abstractmethod
    def kept(self, rank: int) -> list[tuple[TensorFacts, int]]:
        """``(tensor, elements)`` of the parameters of which ``rank`` holds a part."""

    @abstractmethod
    def reduced_bytes(self) -> list[int]:
        """Payload of each unit's reduction."""

    def communication_at_rest(self, rank: int, step: int) -> int:
        """The shard that a reduction returned, until it is added; partial norms."""
        shard = max(self.reduced_bytes(), default=0) // self.facts.shards
        return shard + SCALAR_BYTES * (2 + len(self.facts.trainable))

    def local(self, rank: int) -> Local:
        return Local.of(self.facts, {t.name: n for t, n in self.kept(rank) if n})


class FSDP2(_Upstream):
    """``fully_shard``: every parameter is cut into chunks on dim 0, padded to the first chunk's
    size; the chunks of a unit are sent together.
    """

    strategy, textbook = "fsdp2", "fsdp"
    source = (
        "fsdp/_fully_shard: padding per parameter on dim 0 (_fsdp_param.py, padded_sharded_size); "
        "a gather of every unit before forward and, where it was resharded, before backward, over "
        "k ranks for an int k (_fsdp_param_group.py, unshard; fully_shard: the root is not "
        "resharded by default); a reduce-scatter of what has a gradient, then an all-reduce of the "
        "shards over replicas (_fsdp_collectives.py, foreach_reduce); clip_grad_norm_ "
        "all-reduces one scalar a gradient, because torch.stack makes every partial norm whole "
        "(nn/utils/clip_grad.py, _get_total_norm); a scaler's overflow is one fp32 scalar "
        "(tensor/_dispatch.py, found_inf_reduce_handler)"
    )

    @property
    def ranks(self) -> int:
        """Ranks that share each parameter."""
        return self.facts.shards

    @cached_property
    def units(self) -> list[tuple[str, tuple[TensorFacts, ...]]]:
        """Names of the wrapped units with their tensors."""
        return whole_units(self.facts)

    #   FSDP2   a a | a .    b | b     2 ranks, a of 3 rows, b of 2: each is cut and padded
    #   FSDP1   a a a | . b b          fp32: one vector, b begins at a multiple of 16 bytes
    def padded(self, tensor: TensorFacts) -> int:
        """Elements of ``tensor`` once its rows are padded to a multiple of the ranks."""
        rows, *rest = tensor.shape
        return -(-rows // self.ranks) * self.ranks * math.prod(rest)

    def rows(self, tensor: TensorFacts, rank: int) -> int:
        """Elements of the rows of ``tensor`` that ``rank`` holds."""
        rows, *rest = tensor.shape
        return chunk(rows, self.ranks, self.facts.shard_of(rank)) * math.prod(rest)

    def reduced(self, tensor: TensorFacts) -> bool:
        """Whether the gradient of ``tensor`` is part of a reduce-scatter."""
        if self.facts.option("reduce_scatter_unused_params", False):
            return tensor.trainable
        return tensor.trainable and tensor.first_use is not None

    def regathered(self, name: str) -> int:
        """The number of ranks over which unit ``name`` is gathered before backward (1: not
        gathered).
        """
        chosen = self.facts.options.get("reshard_after_forward")
        if chosen is None:
            chosen = name != ""
        return int(chosen) if not isinstance(chosen, bool) else (self.ranks if chosen else 1)

    def refuse_recomputed(self) -> None:
        """Raise if a recomputed forward gathers units ahead (_fsdp_state.py, _pre_forward), because
        the backward of some of them is over.
        """
        facts = self.facts
        if not facts.option("prefetch_forward", 0):
            return
        name = self.recomputed(name for name, _ in self.units)
        if name is not None and self.ranks > 1:
            raise model.NoCostModel(
                "no traffic formula for prefetch_forward with recomputation: the forward of "
                f"unit {name!r} runs again in the backward pass and prefetches other units there"
            )

    def flows(self) -> list[Flow]:
        """Calls and bytes of one step: gathers and reductions unit by unit."""
        facts, flows = self.facts, list[Flow]()
        self.refuse_recomputed()
        for (name, members), reduced in zip(self.units, self.reduced_bytes(), strict=True):
            gathered = sum(self.padded(t) * ITEMSIZE[facts.compute(t.dtype)] for t in members)
            # Called c times: all but the first backward find it sharded, as the first forward does.
            first = facts.rounds * self.called(name)
            flows += model.flow(facts, facts.sharded, "all_gather", [gathered], first)
            flows += self.second(name, gathered)
            # The first backward of several finds the gradients that were kept, the last its own.
            kept = self.called(name) > 1 and self.reductions < facts.rounds
            times = self.reductions + kept
            flows += model.flow(facts, facts.sharded, "reduce_scatter", [reduced], times)
            flows += model.flow(
                facts, facts.replicated, "all_reduce", [reduced // self.ranks], times
            )
        flows += model.flow(facts, facts.sharded, "all_gather", self.gathered_in_vain())
        if facts.clipped:
            norms = [ITEMSIZE[t.dtype] for t in facts.parameters if self.reduced(t)]
            flows += model.flow(facts, facts.sharded, "all_reduce", [sum(norms)])  # coalesced
        return [*flows, *self.overflow(facts.sharded)]

    def gathered_in_vain(self) -> list[int]:
        """Bytes that the first backward after an evaluation gathers without need, if any.

        A forward without a backward leaves its units in the list from which each unit's backward
        gathers the one before it (_fsdp_param_group.py, post_forward_order).  So the first unit's
        backward gathers the last one of the evaluation.  A root that has parameters is that one,
        and whole at the time.
        """
        #     order   [0 1 2] [0 1 2]     evaluation, then the forward of the step
        #                   ^--'          backward of 0 gathers what stands before it
        names = [name for name, _ in self.units]
        if not self.facts.evaluated or "" in names or len(names) < 2:
            return []
        outer = [n for n in names if not any(n != o and within(n, o) for o in names)]
        first, last = self.units[0][1], dict(self.units)[outer[-1]]
        if not any(self.reduced(tensor) for tensor in first):
            return []  # nothing asks for its backward
        return [sum(self.padded(t) * ITEMSIZE[self.facts.compute(t.dtype)] for t in last)]

    def reduced_bytes(self) -> list[int]:
        """Bytes of each unit's reduce-scatter, including padding."""
        return [
            sum(
                self.padded(t) * ITEMSIZE[self.facts.reduction(t.dtype)]
                for t in members
                if self.reduced(t)
            )
            for _, members in self.units
        ]

    def second(self, name: str, payload: int) -> list[Flow]:
        """The gathers of unit ``name`` before its first backward and its further forwards."""
        facts, k = self.facts, self.regathered(name)
        times = facts.world // k * facts.rounds * self.called(name)
        return model.grouped_flow(facts.sharded, "all_gather", [payload], k, times)

    def called(self, name: str) -> int:
        """The number of calls of unit ``name`` in one forward; one for the root."""
        return self.facts.called(name) if name else 1

    def kept(self, rank: int) -> list[tuple[TensorFacts, int]]:
        """Chunks, including empty ones, which the optimizer gets too."""
        return [(t, self.rows(t, rank)) for t in self.facts.parameters]

    def resident(self, rank: int, step: int, updated: int) -> Bytes:
        """Padded chunks of parameters and gradients; state of the actual elements."""
        return {
            "parameters": sum(self._chunk(t) for t in self.facts.parameters),
            "masters": 0,
            "gradients": sum(self._chunk(t) for t in self.facts.parameters if self.reduced(t)),
            "optimizer_state": model.state_bytes(self.facts, self.kept(rank), updated),
        }

    def _chunk(self, tensor: TensorFacts) -> int:
        return self.padded(tensor) // self.ranks * ITEMSIZE[tensor.dtype]


#: Bytes at whose multiples FSDP1 lays what it computes with (``_get_aligned_numel``).
ALIGNMENT = 16


class FlatParameter(Flat):
    """FSDP1's flat parameter: members at multiples of 16 bytes of the compute dtype."""

    def parts(self, shard: int) -> list[tuple[TensorFacts, int]]:
        """The parts of every layout; an empty tensor at the edge of a shard has no part."""
        inside = {
            tensor.name
            for tensor, (start, _) in zip(self.members, self.spans, strict=True)
            if self.shard_numel and start % self.shard_numel
        }
        return [(t, n) for t, n in super().parts(shard) if n or t.name in inside]


class FSDP1(_Upstream):
    """``FullyShardedDataParallel`` with ``use_orig_params``: one flat parameter per unit."""

    strategy, textbook = "fsdp1", "fsdp"
    source = (
        "fsdp: parameters at multiples of 16 bytes of what they are computed in, the end padded to "
        "the ranks, NO_SHARD too (_flat_param.py, _init_flat_param_and_metadata); a gather of "
        "every unit before each forward and, but for SHARD_GRAD_OP and the root, before backward "
        "(_runtime_utils.py, _post_forward_reshard); SHARD_GRAD_OP keeps what it gathered through "
        "no_sync (_should_free_in_backward); a reduce-scatter a unit, then an all-reduce over "
        "replicas (_reduce_grad; NO_SHARD: an all-reduce); clip_grad_norm_ all-reduces one fp32 "
        "scalar, where the adapter computes the norm an fp64 one; a scaler's overflow is one more "
        "(sharded_grad_scaler.py, unscale_)"
    )

    @property
    def kind(self) -> str:
        """The sharding strategy chosen by the options."""
        return str(self.facts.option("sharding_strategy", "FULL_SHARD"))

    @property
    def shards(self) -> int:
        """Ranks that share each flat parameter."""
        return 1 if self.kind == "NO_SHARD" else self.facts.shards

    @cached_property
    def flats(self) -> list[tuple[str, FlatParameter]]:
        """Unit and flat parameter, the root first; whole ones are padded for the ranks."""
        facts = self.facts
        multiple = facts.replicas if self.kind == "NO_SHARD" else 1
        alignment = {dtype: ALIGNMENT // ITEMSIZE[facts.compute(dtype)] for dtype in ITEMSIZE}
        return [
            (name, FlatParameter(members, self.shards, multiple, alignment[members[0].dtype]))
            for name, members in whole_units(facts)
        ]

    @staticmethod
    def trained(flat: FlatParameter) -> bool:
        """Whether any member of ``flat`` gets a gradient."""
        return any(t.trainable and t.first_use is not None for t in flat.members)

    def flows(self) -> list[Flow]:
        """Calls and bytes of one step: gathers and reductions of flat parameters."""
        facts, flows = self.facts, list[Flow]()
        self.refuse_recomputed()
        silent = self.reductions < facts.rounds
        for (name, flat), reduced in zip(self.flats, self.reduced_bytes(), strict=True):
            gathered = [flat.padded_bytes(facts.compute(flat.dtype))]
            if self.kind == "NO_SHARD":
                flows += model.flow(
                    facts, facts.replicated, "all_reduce", [reduced], self.reductions
                )
                continue
            if self.kind == "SHARD_GRAD_OP":
                times = 1 if silent else facts.rounds
            else:
                times = facts.rounds * (facts.called(name) + 1 if name else 1)
            flows += model.flow(facts, facts.sharded, "all_gather", gathered, times)
            flows += model.flow(facts, facts.sharded, "reduce_scatter", [reduced], self.reductions)
            crossing = [reduced // self.shards]
            flows += model.flow(facts, facts.replicated, "all_reduce", crossing, self.reductions)
        if facts.clipped and self.kind != "NO_SHARD":
            wide = facts.trainable[0].dtype == "float64"
            flows += model.flow(facts, facts.sharded, "all_reduce", [8 if wide else 4])
        return [
            *flows,
            *self.overflow(facts.replicated if self.kind == "NO_SHARD" else facts.sharded),
        ]

    def refuse_recomputed(self) -> None:
        """Raise if units lie inside recomputed blocks.

        Each is gathered a third time, but the last that runs again: torch stops there as soon as it
        has what backward wants (utils/checkpoint.py, early_stop), which depends on the model.
        """
        if self.kind not in ("FULL_SHARD", "HYBRID_SHARD") or self.shards == 1:
            return
        name = self.recomputed(name for name, _ in self.flats)
        if name is not None:
            raise model.NoCostModel(
                f"no traffic formula: unit {name!r} is in a recomputed block; recomputation may "
                "stop early, so it is not known whether this unit is gathered again"
            )

    def reduced_bytes(self) -> list[int]:
        """Whole flat parameters that have a trained member."""
        reduction = self.facts.reduction
        return [
            flat.padded_bytes(reduction(flat.dtype)) * self.trained(flat) for _, flat in self.flats
        ]

    def parts(self, flat: FlatParameter, rank: int) -> list[tuple[TensorFacts, int]]:
        """``(tensor, elements)`` of the members of ``flat`` in the shard of ``rank``."""
        return flat.parts(self.facts.shard_of(rank) if self.shards > 1 else 0)

    def kept(self, rank: int) -> list[tuple[TensorFacts, int]]:
        """Tensors with their elements in the shards of ``rank``."""
        return [part for _, flat in self.flats for part in self.parts(flat, rank)]

    def gradient_bytes(self, rank: int) -> int:
        """Whole shards in which ``rank`` owns a part of a trained parameter."""
        return sum(
            flat.shard_bytes()
            for _, flat in self.flats
            if any(t.trainable and t.first_use is not None for t, _ in self.parts(flat, rank))
        )

    def resident(self, rank: int, step: int, updated: int) -> Bytes:
        """Bytes by class on ``rank`` after ``step``."""
        return {
            "parameters": sum(f.shard_bytes() for _, f in self.flats if self.parts(f, rank)),
            "masters": 0,
            "gradients": self.gradient_bytes(rank),
            "optimizer_state": model.state_bytes(self.facts, self.kept(rank), updated),
        }

    def communication_at_rest(self, rank: int, step: int) -> int:
        """Shards of padding, and gradients of those or of frozen parameters: FSDP keeps them with
        the others'.
        """
        padding = sum(f.shard_bytes() for _, f in self.flats if not self.parts(f, rank))
        every = sum(flat.shard_bytes() for _, flat in self.flats if self.trained(flat))
        kept = padding + every - self.gradient_bytes(rank)
        return super().communication_at_rest(rank, step) + kept
