"""Messages between context ranks, so that attention sees positions of other ranks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cached_property

from shardproof.costs import model
from shardproof.costs.model import Flow, Operation
from shardproof.costs.model_facts import ITEMSIZE, ModelFacts, shape_key

AXIS = "context"


def runs(length: int, ranks: int, place: int, cut: str) -> list[range]:
    """The positions of a rank, of ``length`` that the axis has."""
    if cut == "striped":
        return [range(place, length, ranks)]
    chunks, numbers = ranks, [place]
    if cut == "zigzag":
        chunks, numbers = 2 * ranks, [place, 2 * ranks - 1 - place]
    return [range(n * length // chunks, (n + 1) * length // chunks) for n in numbers]


def shares(length: int, ranks: int, cut: str) -> list[int]:
    """How many of ``length`` positions each rank has."""
    return [sum(map(len, runs(length, ranks, place, cut))) for place in range(ranks)]


@dataclass(frozen=True)
class Exchange:
    """The messages of the attention of all layers along the axis; ``parts``: over how many ranks of
    another axis its heads are split, each of which sends its own.
    """

    facts: ModelFacts
    method: str = "ring"
    cut: str = "contiguous"
    parts: int = 1

    @classmethod
    def of(cls, facts: ModelFacts) -> Exchange:
        """That of the options of ``facts``, which hybrids keep under the name of the axis."""
        own = facts.option(AXIS, None) or facts.options
        own = own if isinstance(own, Mapping) else {}  # a user's system may mean a number by it
        given = {name: own[name] for name in ("method", "cut") if own.get(name)}
        return cls(facts, **given, parts=facts.parts("widths"))

    @property
    def ranks(self) -> int:
        """C."""
        return self.facts.size(AXIS)

    @cached_property
    def behind(self) -> int:
        """How many inputs stand behind the positions of a sample: the key of its dropout masks."""
        return int(any(name.endswith(".dropout_counter") for name in self.facts.modules))

    @cached_property
    def shapes(self) -> list[tuple[int, int]]:
        """Samples and positions of every micro-batch of the step, over all data coordinates."""
        return [(shape[0], shape[1] - self.behind) for shape in self.facts.shapes]

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

    @cached_property
    def backwards(self) -> int:
        """How often a micro-batch goes backward: 0 in a step in which the head learns alone."""
        return int(any(map(self.facts.is_reached, self.facts.heads)))

    @property
    def forwards(self) -> int:
        """How often a micro-batch goes forward."""
        return 1 + bool(self.facts.option("recompute_every", 0)) * self.backwards

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
            *self.each("reduce_scatter", payloads, self.backwards),
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
        return self.each("all_to_all", payloads, self.forwards + self.backwards)

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
                        blocks = (self.forwards + self.backwards) * (link[1] != home)
                        calls += (blocks + self.backwards) * self.parts
                        sizes = blocks * item + self.backwards * wide
                        between[link] += numbers * sizes * self.parts
        sent = {link: Fraction(total) for link, total in between.items()}
        total = sum(sent.values(), Fraction(0))
        # Logical bytes count where they are sent.
        return [
            Flow(AXIS, "send", total, calls, between=sent),
            Flow(AXIS, "recv", Fraction(0), calls),
        ]

    def metadata_bytes(self) -> int:
        """Choices of routers, gathered in each forward; at most all experts are chosen."""
        routers = (t.shape for t in self.facts.parameters if self.facts.role(t) == "router")
        experts = sum(shape[0] for shape in routers if len(shape) > 1)
        padded = sum(n * max(shares(length, self.ranks, self.cut)) for n, length in self.shapes)
        ranks = (self.ranks - 1) * self.ranks * self.parts
        return ranks * padded * experts * 8 * self.forwards

    def cut_facts(self) -> ModelFacts:
        """The facts for axes that cut what a context rank has: each of its parts of a sample is a
        micro-batch of a data coordinate of its own.
        """
        facts = self.facts
        if self.ranks == 1:
            return facts
        hidden = dict(facts.hidden)

        def part(shape: tuple[int, ...], place: int) -> tuple[int, ...]:
            length = shape[1] - self.behind
            own = shares(length, self.ranks, self.cut)[place]
            cut = (shape[0], own + self.behind)
            if whole := facts.hidden.get(shape_key(shape)):
                hidden[shape_key(cut)] = tuple(n // length * own for n in whole)
            return cut

        inputs = tuple(
            tuple(
                tuple(tuple(part(shape, place) for shape in window) for window in share)
                for share in step
                for place in range(self.ranks)
            )
            for step in facts.inputs
        )
        return replace(facts, inputs=inputs, hidden=hidden)

    @property
    def links(self) -> list[tuple[int, int]]:
        """Neighbours on the ring, sender first."""
        return [(rank, (rank + 1) % self.ranks) for rank in range(self.ranks)]

    def attended(self, rank: int) -> int | None:
        """Operations of attention that ``rank`` computes in the forwards of a step: two products
        over each score.  ``None``: its stage has some of the layers only.
        """
        facts = self.facts
        if self.ranks == 1 or facts.parts("layers") > 1:
            return None
        micros = sum(facts.inputs[facts.step][facts.data_coordinate(rank)], ())
        place = facts.place(rank, AXIS)
        scores = sum(shape[0] * self.scores(place, shape[1] - self.behind) for shape in micros)
        of_heads = sum(heads * size for heads, _, size, _ in self.layers)
        return int(4 * of_heads * scores) * self.forwards

    def scores(self, place: int, length: int) -> int | Fraction:
        """Attention scores that rank ``place`` computes of a sample, of each head of a layer.

        Of one document; ``all_to_all`` gives a rank 1/C of the heads, hence as much less.
        """
        ranks, sizes = self.ranks, shares(length, self.ranks, self.cut)
        if self.method == "all_gather" or ranks == 1:
            return sizes[place] * length
        if self.method == "all_to_all":
            return Fraction(length * length, ranks)
        own = self.held(place, length)
        return sum(_rectangle(own, self.held(source, length)) for source in range(ranks))

    def held(self, place: int, length: int) -> list[int]:
        """The positions of a rank."""
        return [p for run in runs(length, self.ranks, place, self.cut) for p in run]


def _rectangle(rows: list[int], columns: list[int]) -> int:
    """Scores of the rows that see some column with the columns that some row sees."""
    seeing = sum(columns[0] <= row for row in rows) if columns else 0
    return seeing * sum(column <= rows[-1] for column in columns) if rows else 0
