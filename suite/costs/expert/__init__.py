"""Expert parallelism: experts divided over an axis, tokens that travel to them and back."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from fractions import Fraction
from functools import cached_property

from shardproof import axes
from shardproof.costs import model
from shardproof.costs.layout import within
from shardproof.costs.model import Bytes, CostModel, Flow, Local, NoCostModel
from shardproof.costs.model_facts import ITEMSIZE, ModelFacts, TensorFacts, used

#: Bytes of losses, norms and factors of a step.
_SCALARS = 256
#: Bytes of a count of rows.
_COUNT = 8


class ExpertParallel(CostModel):
    """A rank of X holds P + G + O bytes: 1/X of those of experts, all of those of the rest.

    How many tokens leave their rank is no matter of shapes: ``ModelFacts.routed`` has it from the
    oracle, for each data coordinate, which is a rank here.
    """

    strategy = "expert"
    unmixed = tuple(ITEMSIZE)
    frees_gradients = True
    divided = (True, True, True)
    source = (
        "dispatch and combine are all-to-alls of rows whose expert lies on another rank, and of "
        "their gradients: GShard (arXiv 2006.16668) section 3.3; gradients as in data parallelism, "
        "of experts over the replicas of their own place: Switch Transformer (arXiv 2101.03961) "
        "section 5.4"
    )

    def __init__(self, facts: ModelFacts) -> None:
        super().__init__(facts)
        self.axis = axes.cutting("experts")
        self.ranks = facts.size(self.axis)

    def is_expert(self, tensor: TensorFacts) -> bool:
        """Whether ``tensor`` is one of stacked experts."""
        return self.facts.role(tensor) == axes.EXPERT

    def elements(self, tensor: TensorFacts) -> int:
        """Elements of ``tensor`` that each rank holds."""
        return tensor.numel // self.ranks if self.is_expert(tensor) else tensor.numel

    # ----------------------------------------------------------------------------------- traffic

    @cached_property
    def layers(self) -> dict[str, TensorFacts]:
        """Layer with experts -> its first tensor of these, ``(experts, outputs, width)``."""
        found: dict[str, TensorFacts] = {}
        for tensor in self.facts.parameters if self.ranks > 1 else ():
            if self.is_expert(tensor):
                #   blocks.0.mlp.experts.up  ->  blocks.0.mlp
                found.setdefault(tensor.name.rsplit(".", 2)[0], tensor)
        return found

    def flows(self) -> list[Flow]:
        """4 T d bytes of rows a layer; gradients once a step; the norm of what is cut."""
        facts = self.facts
        dense = [t for t in facts.trainable if not self.is_expert(t)]
        experts = [t for t in facts.trainable if self.is_expert(t)]
        flows = [self.exchanged()] if self.layers else []
        for tensors in (dense, experts):
            by_dtype: dict[str, int] = {}
            for t in tensors:
                size = self.elements(t) * ITEMSIZE[t.dtype]
                by_dtype[t.dtype] = by_dtype.get(t.dtype, 0) + size
            if tensors and (group := facts.group(tensors[0])):
                flows += model.flow(facts, group, "all_reduce", by_dtype.values())
        return [*flows, *(model.norm_flow(facts, self.axis) if self.layers else [])]

    def exchanged(self, holds: Callable[[int, str], bool] = lambda rank, layer: True) -> Flow:
        """Rows and their gradients, each rank's own, of the layers that it ``holds``.

        forward     dispatch: rows that leave     combine: outputs of rows that came
        backward    combine: gradients of rows that left    dispatch: of rows that came
        """
        by_rank = []
        # How often the rows of a layer travel both ways.
        times = {n: 1 + (1 + self.repeats(n)) * self.facts.is_reached(n) for n in self.layers}
        for rank in range(self.facts.world):
            held = {name: times[name] for name in self.layers if holds(rank, name)}
            rows = sum(n * self.rows(rank, name) * self.row_bytes(name) for name, n in held.items())
            calls = 2 * self.rounds_of(rank) * sum(held.values())
            by_rank.append((calls, Fraction(rows)))
        sent = sum((size for _, size in by_rank), Fraction(0))
        calls = sum(number for number, _ in by_rank)
        return Flow(self.axis, "all_to_all", sent, calls, tuple(by_rank), ranks=self.ranks)

    def repeats(self, layer: str) -> bool:
        """Whether backward repeats the forward of ``layer``, with both of its all-to-alls."""
        every = self.facts.option("recompute_every", 0)
        return bool(every) and any(within(layer, unit) for unit in self.facts.units)

    def row_bytes(self, layer: str) -> int:
        """Bytes of a row: the width that its experts take."""
        tensor = self.layers[layer]
        return tensor.shape[-1] * ITEMSIZE[self.facts.compute(tensor.dtype)]

    def rows(self, rank: int, layer: str) -> int:
        """Rows of a step that leave ``rank``, and those that come to it."""
        at, asked = self.facts.place(rank, self.axis), self.asked[layer]
        come = sum(asked[other][at] for other in self.group_of(rank))
        return sum(asked[rank]) + come - 2 * asked[rank][at]

    @cached_property
    def asked(self) -> dict[str, list[list[int]]]:
        """By layer and rank: its rows in a step that the experts at each place compute."""
        group, asked = self.facts.group(), {}
        for layer, tensor in self.layers.items():
            cuts = range(0, tensor.shape[0], max(tensor.shape[0] // self.ranks, 1))
            sums = [[sum(n[at : at + cuts.step]) for at in cuts] for n in self.chosen(layer)]
            asked[layer] = [sums[self.facts.place(r, group)] for r in range(self.facts.world)]
        return asked

    def chosen(self, layer: str) -> list[tuple[int, ...]]:
        """How many rows of a step each expert of ``layer`` computes, by data coordinate."""
        shares = self.facts.routed[self.facts.step] if self.facts.routed else ()
        # The oracle sees the suite's own layers; a user's mixture has an entry nowhere.
        if not any(layer in counts for counts in shares):
            raise NoCostModel("no traffic formula: the choices of the router are unknown")
        # A rank without micro-batches asks for nothing, and has no entry.
        return [counts.get(layer, ()) for counts in shares]

    def group_of(self, rank: int) -> list[int]:
        """The ranks that share experts with ``rank``, itself among them."""
        names, sizes = [*self.facts.axes, self.axis], [*self.facts.axes.values()]
        stride = math.prod(sizes[names.index(self.axis) + 1 :])
        first = rank - self.facts.place(rank, self.axis) * stride
        return [first + place * stride for place in range(self.ranks)]

    def rounds_of(self, rank: int) -> int:
        """Rounds of the group of ``rank``: as many as its busiest member has micro-batches."""
        facts = self.facts
        coordinates = [facts.data_coordinate(member) for member in self.group_of(rank)]
        return max(facts.micro_batches_of(one, facts.step) for one in coordinates)

    def metadata_bytes(self) -> int:
        """A count for each expert of another rank, in every forward that is no repetition."""
        experts = sum(tensor.shape[0] for tensor in self.layers.values())
        away = experts - experts // self.ranks
        return away and sum(self.rounds_of(r) * away * _COUNT for r in range(self.facts.world))

    # ------------------------------------------------------------------------------------ memory

    def communication_at_rest(self, rank: int, step: int) -> int:
        """The scalars of the norm; summed copies have become gradients."""
        return _SCALARS

    def unclassified_limit(self, rank: int, step: int) -> int:
        """Losses, norms, factors, and the counts of the last forward of each layer."""
        return _SCALARS + sum(_COUNT * tensor.shape[0] for tensor in self.layers.values())

    def by_layout(self, rank: int) -> Mapping[str, Mapping[str, int]]:
        """Elements of experts, and of what every rank has whole."""
        held = {t.name: self.elements(t) for t in self.facts.parameters}
        cut = {t.name for t in self.facts.parameters if self.ranks > 1 and self.is_expert(t)}
        return {
            "split": {name: n for name, n in held.items() if name in cut},
            "replicated": {name: n for name, n in held.items() if name not in cut},
        }

    def resident(self, rank: int, step: int, updated: int) -> Bytes:
        """Own experts and the rest; gradients of what is used."""
        facts = self.facts
        held = [(t, self.elements(t)) for t in facts.parameters]
        now = {t.name for t in used(facts.parameters, step)}
        return {
            "parameters": sum(n * ITEMSIZE[t.dtype] for t, n in held),
            "masters": 0,
            "gradients": sum(n * ITEMSIZE[t.dtype] for t, n in held if t.name in now),
            "optimizer_state": model.state_bytes(
                facts, [(t, n) for t, n in held if t.trainable], updated
            ),
        }

    def local(self, rank: int) -> Local:
        """Elements that ``rank`` holds (name -> count)."""
        return Local.of(self.facts, {t.name: self.elements(t) for t in self.facts.parameters})


def folded(facts: ModelFacts) -> dict[str, int]:
    """The mesh of experts that neighbours on the data axes divide, under which ranks keep their
    numbers: what is left of these axes holds copies or shards of the same experts.
    """
    ranks = facts.option("experts", {}).get("ranks", 1)
    state, positions = axes.cutting("state"), axes.cutting("positions")
    #   shard 4 x context 4 over 8 experts: 4 of context, 2 of shard; shard 2 is left
    near = math.gcd(ranks, facts.size(positions))
    left = {state: facts.size(state) // (ranks // near), positions: facts.size(positions) // near}
    mesh = {**facts.axes, **left, axes.cutting("experts"): ranks}
    return {name: mesh[name] for name in axes.names() if name in mesh}


def cannot_share_experts(facts: ModelFacts) -> str:
    """Why the ranks of the axis cannot share the experts (empty: they can)."""
    axis = axes.cutting("experts")
    ranks = facts.size(axis)
    stacks = [t for t in facts.parameters if facts.role(t) == axes.EXPERT]
    if not stacks:
        return f"mesh axis {axis!r} = {ranks}: the model has no experts; set {axis} to 1"
    for tensor in stacks:
        count = tensor.shape[0]
        if count % ranks:
            valid = ", ".join(str(n) for n in range(1, count + 1) if count % n == 0)
            layer = tensor.name.rpartition(".")[0]
            return (
                f"mesh axis {axis!r} = {ranks}: {layer!r} has {count} experts, which cannot be "
                f"divided among {ranks} ranks; valid: {valid}"
            )
    return ""
