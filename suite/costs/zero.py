"""ZeRO 1 to 3: what is sharded, gathered and reduced.

Letters: N ranks of the axis ``shard``; m rounds, the micro-batches of the busiest rank.  P, G and O
are total bytes of the whole model (not bytes an element): of its trained parameters, of their
gradients, both padded to whole shards, and of their optimizer state.

            sent in a step, all ranks   held by one rank   ZeRO (arXiv 1910.02054)
    Zero1   (N-1) (G + P)               P + G + O/N        sections V-A, VII-A
    Zero2   (N-1) (m G + P)             P + (G + O)/N      sections V-B, VII-B
    Zero3   (N-1) (m G + 2 m P)         (P + G + O)/N      sections V-C, VII-B

The table counts floating-point bytes; integer messages (rounds, votes) are control calls of their
own.  Other axes multiply the group: each of its groups sends as much.  Zero2 reduces gradients in
every round.  Zero3 also gathers frozen parameters, which every rank of Zero1 and Zero2 holds beside
P.  In a ``source``, Psi is the paper's number of elements: its volumes count elements.

Where gradients are clipped, one float64 is all-reduced as well (``norm_flow``).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from functools import cached_property
from itertools import takewhile

from shardproof.costs import collectives, compression, model
from shardproof.costs.layout import Flat, Unit, buckets, units
from shardproof.costs.model import Bound, Bytes, CostModel, Flow, Local, Prefetch
from shardproof.costs.model_facts import ITEMSIZE, ModelFacts, TensorFacts, used, used_by

_ZERO = "ZeRO (arXiv 1910.02054)"
#: Bytes of the single numbers that ranks exchange in a step: counts of rounds, norms, overflows.
_SCALARS = 64


class Zero1(CostModel):
    """Optimizer state sharded: a rank holds P + G + O/N bytes.

    Gradients lie in flat buckets, each reduced and scattered once a step, whatever the number of
    micro-batches; updated shards are gathered again.
    """

    strategy = "zero1"
    source = (
        f"{_ZERO} section V-A and VII-A: reduce-scatter of gradients + all-gather of parameters = "
        "2 Psi, an all-reduce's volume; one fp64 scalar is all-reduced where gradients are clipped"
    )
    divided = (False, False, True)
    #: Default of the option ``bucket_bytes``.
    bucket_bytes = 25 * 2**20

    @cached_property
    def flats(self) -> list[Flat]:
        """Buckets of the trained parameters in backward order."""
        # Backward makes the gradients of the last layers first, so their bucket is full first.
        order = list(reversed(self.facts.trainable))
        limit = int(self.facts.option("bucket_bytes", self.bucket_bytes))
        return buckets(order, limit, self.facts.shards)

    def flows(self) -> list[Flow]:
        """(N-1) (m G + P) bytes: gradients are reduced m times, parameters gathered once."""
        facts = self.facts
        parameters = [flat.payload(facts.compute(flat.dtype)) for flat in self.flats]
        return [
            # (N-1) G each time, and (N-1) P
            *compression.flows(facts, facts.sharded, "reduce_scatter", self.flats, self.reductions),
            *collectives.flow(facts, facts.sharded, "all_gather", parameters),
            *model.norm_flow(facts, facts.sharded),
        ]

    def parts(self, rank: int) -> list[tuple[TensorFacts, int]]:
        """Tensors with their elements in the shards of ``rank``."""
        shard = self.facts.shard_of(rank)
        return [part for flat in self.flats for part in flat.parts(shard)]

    def resident(self, rank: int, step: int, updated: int) -> Bytes:
        """Bytes by class on ``rank`` after ``step``."""
        facts = self.facts
        narrow = any(facts.compute(flat.dtype) != flat.dtype for flat in self.flats)
        parts = self.parts(rank)
        return {
            "parameters": self.parameter_bytes(),
            # What the optimizer updates: copies, or a layout that only lies beside parameters.
            "masters": sum(n * ITEMSIZE[t.dtype] for t, n in parts)
            if narrow
            else self.strided_copies,
            "gradients": self.gradient_bytes(rank, step),
            "optimizer_state": model.state_bytes(facts, parts, updated) + self.kept(rank, step),
        }

    def kept(self, rank: int, step: int) -> int:
        """The residuals of reductions."""
        return kept_bytes(self.facts, self.flats, rank, step)

    @property
    def strided_copies(self) -> int:
        """Bytes of layouts that hold nothing but copies of tensors with strides of their own."""
        flats = [flat for flat in self.flats if all(t.strided for t in flat.members)]
        return sum(flat.padded_bytes(self.facts.compute(flat.dtype)) for flat in flats)

    def parameter_bytes(self) -> int:
        """Whole, in the layouts that they are gathered into, with frozen and strided ones."""
        facts = self.facts
        own = sum(
            t.numel * ITEMSIZE[facts.compute(t.dtype)]
            for t in facts.parameters
            if t.strided or not t.trainable
        )
        whole = sum(flat.padded_bytes(facts.compute(flat.dtype)) for flat in self.flats)
        return own + whole - self.strided_copies

    def gradient_bytes(self, rank: int, step: int) -> int:
        """Those that this rank owns a part of; kept permanently, from the first step on."""
        ever = used_by(self.facts.parameters, self.facts.steps - 1)
        return sum(map(self.kept_bytes, owned(self.facts, self.flats, rank, ever)))

    def kept_bytes(self, flat: Flat) -> int:
        """Whole gradients, in the flat layouts that they are reduced from."""
        return flat.padded_bytes(self.facts.reduction(flat.dtype))

    def communication_at_rest(self, rank: int, step: int) -> int:
        """Buffers of gradients that this rank owns no part of; layouts that lie next to parameters
        where the optimizer updates copies of them on the host.
        """
        buffers = sum(map(self.kept_bytes, self.flats))
        offloaded = self.facts.option("offload", "none") != "none"
        copies = self.strided_copies if offloaded else 0
        return buffers - self.gradient_bytes(rank, step) + copies + votes(self.facts)

    def unclassified_limit(self, rank: int, step: int) -> int:
        """Losses, norms and factors, and the same buffers where they were never sent."""
        return self.communication_at_rest(rank, step)

    def peaks(self, rank: int, phase: str, step: int) -> dict[str, Bound]:
        """Both collectives work in place: in backward no more than the buffers of gradients, in the
        update no more than they and what is agreed on and summed there (the norm).
        """
        most = self.communication_at_rest(rank, step) + _SCALARS
        # In flight until the step's end, each with what its rounds receive.
        scratch = sum(scratch_of(self.facts, self.flats)) if phase == "backward" else 0
        buffers = Bound(0, most + scratch)
        if phase == "update":
            return {"communication": buffers}
        if phase != "backward":
            return {}
        return {"communication": buffers, "gradients": Bound(0, self.gradient_bytes(rank, step))}

    def local(self, rank: int) -> Local:
        """Elements (name -> count): whole parameters, own parts of optimizer state."""
        whole = {t.name: t.numel for t in self.facts.parameters}
        return Local.of(self.facts, whole, {t.name: n for t, n in self.parts(rank)})


class Zero2(Zero1):
    """Gradients sharded as well: a rank holds P + (G + O)/N bytes.

    Every micro-batch is reduced and scattered into the kept shard: m reductions, one gather.
    """

    strategy = "zero2"
    frees_gradients = True
    source = (
        f"{_ZERO} section V-B and VII-B; with m micro-batches every one is reduced: "
        "(m + 1) (N-1)/N Psi a rank"
    )
    divided = (False, True, True)
    bucket_bytes = 4 * 2**20

    def gradient_bytes(self, rank: int, step: int) -> int:
        """Those of this step: their memory is new in each."""
        now = used(self.facts.parameters, step)
        return sum(map(self.kept_bytes, owned(self.facts, self.flats, rank, now)))

    def kept_bytes(self, flat: Flat) -> int:
        """The shard alone: whole gradients are freed."""
        return flat.shard_bytes(self.facts.reduction(flat.dtype))

    def peaks(self, rank: int, phase: str, step: int) -> dict[str, Bound]:
        """During backward the buckets that hold whole gradients, the shard that receives a sum, and
        what the rounds of one reduction receive.
        """
        facts, bounds = self.facts, super().peaks(rank, phase, step)
        if phase != "backward":
            return bounds
        shard = max(map(self.kept_bytes, self.flats), default=0)
        high = self.whole_at_once + shard + self.communication_at_rest(rank, step)
        high += max(scratch_of(facts, self.flats), default=0)
        return bounds | {"communication": Bound(0, high)}

    @cached_property
    def whole_at_once(self) -> int:
        """Most bytes of buckets that hold whole gradients: at least three, and those that wait for
        a gradient of a bucket before them.
        """
        #     bucket      1  2  3  4  5          sent from the left
        #     state       r  f  b                r: being reduced, f: filling, b: next, begun
        #     held up     .  r  h  w  w          h: lacks a gradient; w: full, and sent after h
        facts, flats = self.facts, self.flats
        sizes = [flat.padded_bytes(facts.reduction(flat.dtype)) for flat in flats]
        bucket = {t.name: n for n, flat in enumerate(flats) for t in flat.members}
        missing = [{t.name for t in flat.members} for flat in flats]
        # Without an order it is not known where a tied parameter is used first, and so completed.
        tied = {t.name for t in facts.trainable if len(t.owners) > 1 and not facts.completed}
        late = tied | {t.name for t in facts.trainable if not t.in_every_backward}
        waiting, sent, most = set[int](), 0, sum(sorted(sizes, reverse=True)[:3])
        for name in (name for name in facts.completed or bucket if name in bucket):
            waiting.add(bucket[name])
            reduced = sizes[sent - 1] if sent else 0
            most = max(most, reduced + sum(sizes[number] for number in waiting))
            missing[bucket[name]] -= {name} - late
            while sent < len(flats) and not missing[sent]:
                waiting.discard(sent)
                sent += 1
        # What backward has left is sent at its end, a bucket of no gradient at all among them.
        return max(most, sum(sizes[max(sent - 1, 0) :]) if sent < len(flats) else 0)


class Zero3(CostModel):
    """Everything sharded: (P + G + O)/N bytes a rank, plus the units that are gathered right now.

    Each micro-batch gathers a unit twice, before its forward (before each, if it is called again)
    and before its backward, and reduces its gradients once.
    """

    strategy = "zero3"
    frees_gradients = True
    source = (
        f"{_ZERO} section V-C and VII-B: 3 (N-1)/N Psi a rank and micro-batch; padding: FSDP "
        "(arXiv 2304.11277) section 3.2.1"
    )
    divided = (True, True, True)
    rests_as_built = True

    @cached_property
    def units(self) -> list[Unit]:
        """Units of the model with their flat buffers."""
        return units(self.facts, self.facts.shards)

    @property
    def flats(self) -> list[Flat]:
        """Flat buffers of all units, in forward order."""
        return [flat for unit in self.units for flat in unit.flats]

    @property
    def trained(self) -> list[Flat]:
        """Flat buffers that get gradients."""
        return [flat for unit in self.units for flat in unit.trained]

    @property
    def reduced(self) -> list[Flat]:
        """Those that are reduced: none of a unit that nothing calls."""
        called = self.facts.called
        return [flat for unit in self.units if called(unit.name) for flat in unit.trained]

    def flows(self) -> list[Flow]:
        """(N-1) (m G + 2 m P) bytes: each round gathers a unit twice and reduces it once."""
        facts, reduced = self.facts, self.reduced
        for name in self.uncalled:
            text = f"no traffic formula: unit {name!r} is not called by every micro-batch"
            raise model.NoCostModel(text)
        called = (unit for unit in self.units if facts.called(unit.name))
        return [
            *(one for unit in called for one in self.gathers(unit)),
            *compression.flows(facts, facts.sharded, "reduce_scatter", reduced, self.reductions),
            *self.crossing(),
            *model.norm_flow(facts, facts.sharded),
        ]

    def gathers(self, unit: Unit) -> list[Flow]:
        """The gathers of a unit in a step."""
        gathered, times = self.gathered(unit), self.gathers_per_step(unit)
        return collectives.flow(self.facts, self.facts.sharded, "all_gather", gathered, times)

    def gathered(self, unit: Unit) -> list[tuple[int, int]]:
        """Elements, and bytes of one, that a gather of ``unit`` makes, layout by layout."""
        return [flat.payload(self.facts.compute(flat.dtype)) for flat in unit.flats]

    def crossing(self) -> list[Flow]:
        """The sums of shards over replicas, of which there are none."""
        return []

    @cached_property
    def uncalled(self) -> set[str]:
        """Units that some micro-batches call and others do not.

        Whether they are gathered ahead in vain depends on the forwards before.
        """
        return {
            unit.name
            for unit in self.units
            if unit.name
            and self.facts.called(unit.name)
            and all(t.trainable and not t.in_every_backward for t in unit.members)
        }

    def gathers_per_step(self, unit: Unit) -> int:
        """How often a step gathers ``unit`` from shards, which may come up from the host."""
        forwards = self.facts.called(unit.name)
        return (forwards + 1) * self.facts.rounds if forwards else 0

    def parts(self, rank: int) -> list[tuple[TensorFacts, int]]:
        """Tensors with their elements in the shards of ``rank``."""
        return [part for flat in self.flats for part in flat.parts(self.facts.shard_of(rank))]

    def resident(self, rank: int, step: int, updated: int) -> Bytes:
        """Shards as built, which are their own masters; one of padding only does not count."""
        mine = self.facts.shard_of(rank)
        return {
            "parameters": sum(f.shard_bytes() for f in self.flats if f.parts(mine)),
            "masters": 0,
            "gradients": self.gradient_bytes(rank, used(self.facts.parameters, step)),
            "optimizer_state": model.state_bytes(self.facts, self.parts(rank), updated)
            + self.kept(rank, step),
        }

    def kept(self, rank: int, step: int) -> int:
        """The residuals of reductions."""
        called = [flat for flat in self.reduced if used_by(flat.members, step)]
        return kept_bytes(self.facts, called, rank, step)

    def gradient_bytes(self, rank: int, tensors: Iterable[TensorFacts]) -> int:
        """Shards in which ``rank`` owns a part of some of ``tensors``."""
        return sum(f.shard_bytes() for f in owned(self.facts, self.trained, rank, tensors))

    def communication_at_rest(self, rank: int, step: int) -> int:
        """Shards that hold nothing but padding, or gradients of what no rank used."""
        shards = sum(f.shard_bytes() for f in (*self.flats, *self.trained))
        held = self.resident(rank, step, step)
        return shards - held["parameters"] - held["gradients"] + votes(self.facts)

    def unclassified_limit(self, rank: int, step: int) -> int:
        """Losses, norms and factors, and the same buffers where they were never sent."""
        return self.communication_at_rest(rank, step)

    def local(self, rank: int) -> Local:
        """Elements of the shards that ``rank`` owns (name -> count)."""
        own = Counter[str]()
        for tensor, count in self.parts(rank):
            own[tensor.name] += count
        return Local.of(self.facts, own)

    def prefetch(self) -> Prefetch:
        """In both directions the next unit is gathered while one computes.  A unit that ends with
        the whole backward is reduced late if that may end without one of its gradients.
        """
        inner = [unit for unit in self.units if unit.name in self.facts.units]
        count = sum(len(unit.flats) for unit in inner)
        #     unit         1  2  3  4  5         forward, one unit ahead
        #     computes           x
        #     gathered           x  x            4 comes while 3 computes; 1 and 2 have been freed
        gathers = 0
        if self.facts.shards > 1 and not (self.is_silent and self.rests == 1):
            if self._prefetched("forward") and not self.uncalled:
                gathers += count  # it follows the order of the forward before
            if self._prefetched("backward") and self.rests > 1:
                # What is kept whole (rests over 1 rank) has nothing to gather in backward.  Where
                # the model itself owns nothing, no unit computes before the one that begins it.
                owns_nothing = all(unit.name for unit in self.units)
                gathers += count - (len(inner[-1].flats) if inner and owns_nothing else 0)
        late = sum(len(unit.trained) for unit in self.held_up)
        watched = all(not unit.name or unit.name in self.facts.units for unit in self.units)
        depth = {}
        # What comes next is known where every forward calls the same units once.
        once = all(self.facts.called(unit.name) <= 1 for unit in self.units if unit.name)
        if once and not self.uncalled and self.facts.shards > 1:
            depth = {way: self.depth(self._prefetched(way)) for way in ("forward", "backward")}
        # Units of a group that is computed again as one are gathered forwards, and used backwards.
        # Units inside of others, or of the ends, are gathered with those around them.
        in_order = bool(depth) and watched and self._recomputed() < 2
        return Prefetch(
            gathers, late, len(self.trained), watched=watched, depth=depth, in_order=in_order
        )

    @property
    def rests(self) -> int:
        """Over how many ranks parameters are sharded between forward and backward (1: whole)."""
        return self.facts.shards

    @property
    def is_silent(self) -> bool:
        """Whether gradients of all but the last round stay on their rank."""
        return False

    def depth(self, prefetched: int) -> tuple[int, int]:
        """Least and most gathers under way when a unit begins that is one of the ``prefetched``
        next ones: one a layout of each.
        """
        called = [unit for unit in self.units if unit.name and self.facts.called(unit.name)]
        calls = sorted(sum(1 for flat in unit.flats if flat.numel) for unit in called)
        begins = sum(unit.name in self.facts.units for unit in called)
        return sum(calls[: min(prefetched, begins)]), sum(calls[::-1][:prefetched])

    @property
    def held_up(self) -> list[Unit]:
        """Units that may end after backward has returned: the root, and those whose inputs may need
        no gradient (blocks are none of these), if a parameter of any of them may go unused.
        """
        ends = [unit for unit in self.units if unit.name not in self.facts.units]
        return ends if any(not t.in_every_backward for u in ends for t in u.members) else []

    def peaks(self, rank: int, phase: str, step: int) -> dict[str, Bound]:
        """Whole parameters in addition to the shards: at least root and largest unit, with the
        units around it; at most also those gathered ahead, recomputed together or gathered
        without need.
        """
        if phase not in ("forward", "backward") or self.facts.shards == 1:
            return {}
        bounds = {}
        if phase == "backward":
            held = self.resident(rank, step, step)["gradients"]
            bounds = {
                "communication": Bound(0, self.in_flight(rank, step)),
                "gradients": Bound(0, held),
            }
        if not self.facts.micro_batches_of(self.facts.data_coordinate(rank), step):
            return bounds
        sizes = self.whole_bytes()
        root = sizes.pop("", 0)
        in_vain = sum(sizes.pop(name) for name in self.uncalled)
        others = self._prefetched(phase)
        if phase == "backward":
            others = max(others, self._recomputed() - 1)
        least = most = 0
        for name in sizes:
            chain = {outer: sizes[outer] for outer in sizes if f"{name}.".startswith(f"{outer}.")}
            running = sum(chain.values())
            rest = sorted((sizes[unit] for unit in sizes if unit not in chain), reverse=True)
            least, most = max(least, running), max(most, running + sum(rest[:others]))
        if phase == "backward":
            most = max(most, sum(sizes[name] for name in self._ahead_of_blocks() if name in sizes))
        resting = self.resident(rank, step, step)["parameters"]
        level = resting + root
        return bounds | {"parameters": Bound(level + least, level + most + in_vain)}

    def in_flight(self, rank: int, step: int) -> int:
        """Most bytes of class ``communication`` in backward: whole gradients of the root and of
        one other unit (of all where several rounds are reduced at once), shards that their sums
        arrive in, and what gathers read, where it is not the shard itself.
        """
        facts = self.facts
        reduced = {
            unit.name: sum(f.padded_bytes(facts.reduction(f.dtype)) for f in unit.trained)
            for unit in self.units
        }
        # Without communication whole gradients of all units wait for the last round.
        adds_up = self.is_silent and facts.rounds > 1
        whole = reduced.values() if adds_up else _with_root(reduced, 1)
        shards = facts.shards
        arriving = sum(_with_root(reduced, 1)) // shards
        # Sums in another dtype than the shard's wait in buffers of their own until they crossed.
        cast = any(facts.reduction(flat.dtype) != flat.dtype for flat in self.trained)
        on_host = facts.option("offload", "none") == "parameters"
        if on_host or (cast and facts.replicas > 1):
            held = sum(reduced.values()) // shards  # until they have come down, or crossed
            # Of several rounds, sums arrive beside totals; over replicas go totals alone.
            arriving = held + arriving if on_host and facts.rounds > 1 else held
        sent = [
            sum(f.shard_bytes(facts.compute(f.dtype)) for f in unit.flats)
            for unit in self.units
            if on_host or any(facts.compute(f.dtype) != f.dtype for f in unit.flats)
        ]
        gathers = 2 + max(self._prefetched("backward"), self._recomputed())
        reading = sum(sorted(sent, reverse=True)[:gathers])
        resting = self.communication_at_rest(rank, step)
        return sum(whole) + arriving + reading + resting + _SCALARS + self.scratch()

    def scratch(self) -> int:
        """Bytes that rounds of collectives in flight receive: of the root and one other unit."""
        by_unit = {u.name: sum(scratch_of(self.facts, u.trained)) for u in self.units}
        return sum(_with_root(by_unit, 1))

    def why_overlap_is_not_judged(self) -> str:
        """Rounds of several units are alike in the log."""
        kinds = "reduce_scatter", "all_gather", "all_reduce"
        chosen = collectives.over_send_recv(self.facts, *kinds)
        compressed = compression.BY_OTHER_CALLS if compression.chosen(self.facts) else ""
        return collectives.ROUNDS_ARE_ALIKE if chosen else compressed

    def whole_bytes(self) -> dict[str, int]:
        """Bytes of each called unit once it is gathered, padding included."""
        compute, called = self.facts.compute, self.facts.called
        return {
            unit.name: sum(flat.padded_bytes(compute(flat.dtype)) for flat in unit.flats)
            for unit in self.units
            if called(unit.name)
        }

    def _prefetched(self, phase: str) -> int:
        return int(self.facts.option(f"prefetch_{phase}", 1))

    def _ahead_of_blocks(self) -> list[str]:
        """Units registered before all blocks: their inputs may need no gradient, and then they end
        together with the backward.
        """
        blocks = tuple(f"{block}." for block in self.facts.units)
        names = (unit.name for unit in self.units if unit.name)
        return list(takewhile(lambda name: not f"{name}.".startswith(blocks), names))

    def _recomputed(self) -> int:
        """Units that lie in a group of blocks that is computed again as one: whole together, and
        what is gathered ahead of all but the last to be freed is one of them.
        """
        inside = [
            sum(f"{unit.name}.".startswith(f"{block}.") for unit in self.units)
            for block in self.facts.units
        ]
        return int(self.facts.option("recompute_every", 0)) * max(inside, default=0)


def scratch_of(facts: ModelFacts, flats: Iterable[Flat]) -> list[int]:
    """Bytes that a rank receives in addition to its own gradients while each of ``flats`` is
    reduced.
    """
    ranks = facts.shards
    return [
        collectives.scratch(facts, "reduce_scatter", ranks, flat.padded)
        * ITEMSIZE[facts.reduction(flat.dtype)]
        + compression.scratch(facts, flat, ranks)
        for flat in flats
    ]


def kept_bytes(facts: ModelFacts, flats: Iterable[Flat], rank: int, step: int) -> int:
    """The residuals of compressed reductions of ``flats`` on ``rank``: of whole parameters."""
    axis = facts.sharded or facts.replicated
    place, ranks = facts.place(rank, axis), facts.size(axis)
    members = (tensor for flat in flats for tensor in flat.members)
    return compression.state_bytes(facts, members, place, ranks, step)


def _with_root(sizes: Mapping[str, int], others: int) -> list[int]:
    inner = sorted((size for name, size in sizes.items() if name), reverse=True)
    return [sizes.get("", 0), *inner[:others]]


def votes(facts: ModelFacts) -> int:
    """Bytes of the integers by which ranks agree on what was used."""
    return model.VOTE_BYTES * (1 + len(facts.parameters))


def owned(
    facts: ModelFacts, flats: Iterable[Flat], rank: int, tensors: Iterable[TensorFacts]
) -> list[Flat]:
    """Layouts of which ``rank`` owns a part that belongs to one of ``tensors``.

    To a rank that owns nothing of it a buffer of gradients is one for communication.
    """
    shard, names = facts.shard_of(rank), {t.name for t in tensors}
    return [flat for flat in flats if any(t.name in names for t, _ in flat.parts(shard))]
