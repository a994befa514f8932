"""Messages between context ranks, so that attention sees positions of other ranks."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cached_property

from shardproof.costs import model
from shardproof.costs.model import Flow, Operation
from shardproof.costs.model_facts import ITEMSIZE, ModelFacts, shape_key

AXIS = "context"


def shares(length: int, ranks: int, cut: str) -> list[int]:
    """How many of ``length`` positions each rank has."""
    if cut == "striped":
        return [len(range(rank, length, ranks)) for rank in range(ranks)]
    chunks = ranks if cut == "contiguous" else 2 * ranks
    sizes = [(n + 1) * length // chunks - n * length // chunks for n in range(chunks)]
    if cut == "contiguous":
        return sizes
    return [one + other for one, other in zip(sizes[:ranks], reversed(sizes[ranks:]), strict=True)]


@dataclass(frozen=True)
class Exchange:
    """The messages of the attention of all layers along the axis; ``parts``: over how many ranks of
    another axis its heads are split, each of which sends its own.
    """

    facts: ModelFacts
    method: str = "ring"
    cut: str = "contiguous"
    parts: int = 1

    @property
    def ranks(self) -> int:
        """C."""
        return self.facts.size(AXIS)

    @cached_property
    def shapes(self) -> list[tuple[int, int]]:
        """Samples and positions of every micro-batch of the step, over all data coordinates."""
        key = any(name.endswith(".dropout_counter") for name in self.facts.modules)
        return [(shape[0], shape[1] - key) for shape in self.facts.shapes]  # behind the positions

    @cached_property
    def layers(self) -> list[tuple[int, int, int, int]]:
        """Of every attention: query heads, KV heads, their size, bytes of an element."""
        found = []
        for name, (heads, kv) in self.facts.heads.items():
            own = [t for t in self.facts.parameters if self.facts.role(t) == "heads"]
            weight = next(t for t in own if t.name.startswith(f"{name}.") and len(t.shape) > 1)
            size = weight.shape[0] // (heads + 2 * kv)
            queries, pairs = heads // self.parts, max(1, kv // self.parts)
            found.append((queries, pairs, size, ITEMSIZE[self.facts.compute(weight.dtype)]))
        return found

    @property
    def forwards(self) -> int:
        """How often a micro-batch goes forward."""
        return 2 if self.facts.option("recompute_every", 0) else 1

    def flows(self) -> list[Flow]:
        """Calls and bytes of one step."""
        if self.ranks == 1:
            return []
        return [*{"ring": self.ring, "all_to_all": self.turns}.get(self.method, self.gathers)()]

    def each(self, operation: Operation, payloads: Iterable[int], times: int) -> list[Flow]:
        """A call per payload in each context group, ``times`` over."""
        return model.grouped_flow(AXIS, operation, payloads, self.ranks, times * self.parts)

    def gathers(self) -> list[Flow]:
        """Keys and values of all positions forward, their gradients scattered backward."""
        payloads = [
            self.ranks * max(shares(length, self.ranks, self.cut)) * 2 * samples * kv * size * item
            for samples, length in self.shapes
            for _, kv, size, item in self.layers
        ]
        return [
            *self.each("all_gather", payloads, self.forwards),
            *self.each("reduce_scatter", payloads, 1),
        ]

    def turns(self) -> list[Flow]:
        """Queries, keys and values to heads, results back to positions; in backward the reverse."""
        payloads = []
        for samples, length in self.shapes:
            for heads, kv, size, item in self.layers:
                # Each rank gets at least one KV head.
                kept = kv * max(1, self.ranks // kv)
                of_head = samples * length * size * item
                payloads += [of_head * n // self.ranks for n in (heads + 2 * kept, heads)]
        return self.each("all_to_all", payloads, self.forwards + 1)

    def ring(self) -> list[Flow]:
        """Blocks make C-1 hops forward, and again backward; their gradients make C."""
        #     link r -> r+1 carries every block but that of rank r+1, which stops there,
        #     and every gradient
        calls, between = 0, dict.fromkeys(self.links, 0)
        for samples, length in self.shapes:
            for _, kv, size, item in self.layers:
                wide = max(item, ITEMSIZE["float32"])
                for home, share in enumerate(shares(length, self.ranks, self.cut)):
                    numbers = 2 * samples * share * kv * size
                    for link in self.links if numbers else ():
                        blocks = (self.forwards + 1) * (link[1] != home)
                        calls += (blocks + 1) * self.parts
                        between[link] += numbers * (blocks * item + wide) * self.parts
        sent = {link: Fraction(total) for link, total in between.items()}
        total = sum(sent.values(), Fraction(0))
        # Logical bytes count where they are sent.
        return [
            Flow(AXIS, "send", total, calls, between=sent),
            Flow(AXIS, "recv", Fraction(0), calls),
        ]

    def cut_facts(self) -> ModelFacts:
        """The facts for axes that cut what a context rank has: each of its parts of a sample is a
        micro-batch of a data coordinate of its own.
        """
        facts, key = self.facts, any(n.endswith(".dropout_counter") for n in self.facts.modules)
        if self.ranks == 1:
            return facts
        hidden = dict(facts.hidden)
        inputs = []
        for step in facts.inputs:
            coordinates = []
            for share in step:
                for place in range(self.ranks):
                    windows = []
                    for window in share:
                        shapes = []
                        for shape in window:
                            length = shape[1] - key
                            own = shares(length, self.ranks, self.cut)[place]
                            part = (shape[0], own + key)
                            if whole := facts.hidden.get(shape_key(shape)):
                                hidden[shape_key(part)] = tuple(n // length * own for n in whole)
                            shapes.append(part)
                        windows.append(tuple(shapes))
                    coordinates.append(tuple(windows))
            inputs.append(tuple(coordinates))
        return replace(facts, inputs=tuple(inputs), hidden=hidden)

    @property
    def links(self) -> list[tuple[int, int]]:
        """Neighbours on the ring, sender first."""
        return [(rank, (rank + 1) % self.ranks) for rank in range(self.ranks)]

    def scores(self, place: int, length: int) -> int:
        """Attention scores that rank ``place`` computes of a sample, of each head of a layer.

        Of one document; ``all_to_all`` gives a rank 1/C of the heads, hence as much less.
        """
        ranks, sizes = self.ranks, shares(length, self.ranks, self.cut)
        if self.method == "all_gather" or ranks == 1:
            return sizes[place] * length
        if self.method == "all_to_all":
            return length * length // ranks
        own = self.held(place, length)
        return sum(_rectangle(own, self.held(source, length)) for source in range(ranks))

    def held(self, place: int, length: int) -> list[int]:
        """The positions of a rank."""
        ranks = self.ranks
        if self.cut == "striped":
            return [*range(place, length, ranks)]
        chunks, numbers = ranks, [place]
        if self.cut == "zigzag":
            chunks, numbers = 2 * ranks, [place, 2 * ranks - 1 - place]
        return [p for n in numbers for p in range(n * length // chunks, (n + 1) * length // chunks)]


def _rectangle(rows: list[int], columns: list[int]) -> int:
    """Scores of the rows that see some column with the columns that some row sees."""
    seeing = sum(columns[0] <= row for row in rows) if columns else 0
    return seeing * sum(column <= rows[-1] for column in columns) if rows else 0
