"""Every sample once an epoch, in another order each epoch, on any number of ranks, also resumed.

Judged in cases of workload ``epochs``: ranks ask a sampler for several epochs and note what it
gives (``workload.py``).  Their shares together must be all samples; what ranks cannot
share evenly is repeated or left out, no more of it than that takes.  A shuffle is one permutation
of all samples, the same on all ranks, another one in each epoch and for another seed, and the same
when an epoch is asked for again; no global generator moves, but for the one number that a
``DataLoader`` draws when it begins.  A run that stops in the middle of an
epoch and goes on, perhaps on other ranks and after a loader has read ahead, repeats no sample and
leaves none out; in the same world it goes on exactly as if it had not stopped, and the epochs that
follow are those of a run that never did.

*Cannot see* whether a permutation is a good one, what becomes of an index on its way to the model,
and an equal order of data sets so small that two permutations may be equal by chance.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from itertools import pairwise
from typing import Any

from shardproof.backends.errors import name_ranks
from shardproof.cases.kinds import judged
from shardproof.cases.kinds.samples import workload
from shardproof.checks import Needs, Outcome
from shardproof.evidence.assembled import Evidence, Figures
from shardproof.evidence.records import ComparisonRow, RankRecord
from shardproof.table import some

NEEDS: Needs = ("every rank",)

#: Two orders that are equal by chance more often than this are not compared.
CHANCE = 1e-9
#: Samples that are named one by one.
NAMED = 6
#: By data coordinate: the samples of an epoch, in order.
Shares = list[list[int]]


def measure(evidence: Evidence) -> list[ComparisonRow]:
    """A row per question and epoch, with what is wrong."""
    if not evidence.records or not evidence.records[0].drawn:
        return []
    legs = [evidence.records, *evidence.later_legs]
    found = _Judged(workload.resolve(evidence.case.workload), evidence.case.workload.seed)
    for records, mesh in zip(legs, workload.meshes(evidence.case), strict=True):
        found.add_leg(_Leg(records, workload.coordinates(mesh)))
    found.resumes()
    return found.rows


def decide(figures: Figures) -> Outcome:
    """By the rows alone."""
    nothing = "no sampler was asked: it judges workload epochs only"
    return judged.outcome("data", figures, nothing)


class _Leg:
    """The samples that the ranks of one leg recorded, by data coordinate."""

    def __init__(self, records: Sequence[RankRecord], coordinates: Mapping[int, int]) -> None:
        self.records, self.coordinates = records, coordinates
        self.world = max(coordinates.values()) + 1
        self.first_ranks = [
            next(rank for rank, own in coordinates.items() if own == coordinate)
            for coordinate in range(self.world)
        ]

    def shares(self, asked: str, epoch: int) -> Shares | None:
        """The samples that the coordinates received; ``None``: this was not asked for."""
        place = asked, epoch
        given = [
            next((d.samples for d in self.records[rank].drawn if place == (d.asked, d.epoch)), None)
            for rank in self.first_ranks
        ]
        return None if given[0] is None else [samples or [] for samples in given]

    def ranks(self, coordinates: Collection[int]) -> str:
        """``ranks 0 and 2``."""
        return name_ranks(sorted(self.first_ranks[c] for c in coordinates))


class _Judged:
    def __init__(self, params: Mapping[str, Any], seed: int) -> None:
        self.samples, self.tail = params["samples"], params["tail"]
        self.shuffle, self.params, self.seed = params["shuffle"], params, seed
        self.rows: list[ComparisonRow] = []
        self.legs: list[_Leg] = []

    def _row(self, epoch: int, phase: str, name: str, problem: str) -> None:
        self.rows.append(judged.row(epoch, phase, name, problem))

    # ----------------------------------------------------------------- runs that nothing interrupts

    def add_leg(self, leg: _Leg) -> None:
        """Judge the whole runs of a leg, one epoch after the other."""
        self.legs.append(leg)
        self._row(0, "whole", "coordinates", _parted(leg))
        before: dict[int, Shares] = {}
        for epoch in range(self.params["epochs"]):
            if (shares := leg.shares("whole", epoch)) is None:
                continue
            self._row(epoch, "whole", "coverage", self._coverage(leg, epoch, shares))
            if not self.shuffle or self._tells_orders_apart():
                self._row(epoch, "whole", "order", self._order(epoch, shares, before))
            before[epoch] = shares
        again, other_seed = leg.shares("again", 0), leg.shares("seed", 0)
        if again is not None:
            what = "what a sampler gives must depend on seed and epoch alone"
            problem = f"epoch 0 differs when it is asked for again: {what}"
            self._row(0, "again", "order", problem if again != before[0] else "")
        if other_seed is not None and self._tells_orders_apart():
            problem = f"another seed gives the order of seed {self.seed}: the seed does not matter"
            self._row(0, "seed", "order", problem if other_seed == before[0] else "")
        self._row(0, "whole", "generators", _moved(leg))

    def _coverage(self, leg: _Leg, epoch: int, shares: Shares) -> str:
        """The problem of the shares in an epoch that begins and ends in ``leg``."""
        where = f"in epoch {epoch}"
        sizes = workload.shares(self.samples, leg.world, self.tail)
        if problem := self._foreign(leg, shares, where):
            return problem
        lengths = sorted(map(len, shares), reverse=True)
        if lengths != sizes:
            return self._lengths(shares, sizes, where)
        same = [c for c in range(leg.world) if shares.count(shares[c]) > 1 and shares[c]]
        if same and self.samples >= leg.world:
            twins = [c for c in same if shares[c] == shares[same[0]]]
            return f"{leg.ranks(twins)} take the same samples {where}"
        counts = Counter(sample for share in shares for sample in share)
        if not (wrong := self._miscounted(counts, sum(sizes))):
            return ""
        twice, lost = wrong
        holders = {c for c, share in enumerate(shares) if {*share} & {*twice}}
        by = ("by " if len(holders) > 1 else "both times by ") + leg.ranks(holders)
        parts = [f"{_named(twice)} seen twice {where}: {by}"] if twice else []
        parts += [f"{_named(lost)} seen by no rank {where}"] if lost else []
        text = "; ".join(parts)
        own_repeats = any(len({*share}) < len(share) for share in shares)
        if self.shuffle and not own_repeats and len(lost) > max(2, self.samples // 20):
            return f"ranks draw different permutations: {text}"
        if lost == [self.samples - 1]:
            text += ", the last of the data set"
        return text

    def _miscounted(self, counts: Counter[int], total: int) -> tuple[list[int], list[int]] | None:
        """Samples that are seen too often and too seldom, where ``total`` are to be given."""
        lost = [sample for sample in range(self.samples) if not counts[sample]]
        repeats = max(0, total - self.samples)
        # Where some are lost, no repeat is one of the padding.
        most = 1 if self.tail == "pad" and lost else 1 + math.ceil(repeats / self.samples)
        twice = sorted(sample for sample, count in counts.items() if count > most)
        return (twice, lost) if twice or len(lost) > max(0, self.samples - total) else None

    def _foreign(self, leg: _Leg, shares: Shares, where: str) -> str:
        for coordinate, share in enumerate(shares):
            if odd := [sample for sample in share if not 0 <= sample < self.samples]:
                owner, last = leg.ranks([coordinate]), self.samples - 1
                return f"{owner} takes sample {odd[0]} {where}: there are samples 0 to {last}"
        return ""

    def _lengths(self, shares: Shares, sizes: Sequence[int], where: str) -> str:
        lengths = [len(share) for share in shares]
        given, asked, count = sum(lengths), sum(sizes), self.samples
        text = f"{_sizes(lengths)}, expected {_sizes(sizes)}"
        if len({*lengths}) > len({*sizes}):
            return f"shares are unequal {where}: {text}"
        if self.tail == "drop" and given > asked:
            return f"the tail is not dropped {where}: {text}"
        if self.tail == "drop":
            return f"{count - given} samples are left out {where}, expected {count - asked}: {text}"
        if given > asked:
            return f"{given - count} samples are repeated {where}, expected {asked - count}: {text}"
        lost = count - len({sample for share in shares for sample in share})
        return f"{lost} of {count} samples are seen by no rank {where}: {text}"

    # ------------------------------------------------------------------------------------- orders

    def _order(self, epoch: int, shares: Shares, before: Mapping[int, Shares]) -> str:
        if not self.shuffle:
            first = next(iter(before.values()), shares)
            if shares != first:
                return f"epoch {epoch} has another order than epoch 0, though nothing is shuffled"
            return self._natural(shares)
        for earlier, others in before.items():
            if shares == others:
                return f"epoch {epoch} has the order of epoch {earlier}"
        if _is_order_of_the_data_set(shares, self.samples):
            return f"epoch {epoch} has the order of the data set: nothing is shuffled"
        ways = math.lgamma(self.samples + 1) - sum(math.lgamma(len(s) + 1) for s in shares)
        for earlier, others in before.items() if ways > -math.log(CHANCE) else ():
            if [*map(set, shares)] == [*map(set, others)]:
                what = "only their order within its share is another"
                return f"every rank takes the same samples in epochs {earlier} and {epoch}: {what}"
        return ""

    def _natural(self, shares: Shares) -> str:
        """Whether ranks take samples in the order of the data set; repeats may start it again."""
        repeats = sum(map(len, shares)) > self.samples
        for share in shares:
            falls = [pair for pair in pairwise(share) if pair[0] >= pair[1]]
            if len(falls) > repeats and len(share) <= self.samples:
                first, then = falls[0]
                return f"sample {then} comes after {first}, though nothing is shuffled"
        return ""

    def _tells_orders_apart(self) -> bool:
        return math.lgamma(self.samples + 1) > -math.log(CHANCE)

    # ------------------------------------------------------------------------------------ resumes

    def resumes(self) -> None:
        """Judge the epoch in which the run stopped, and those after it."""
        if len(self.legs) == 1:
            return
        epoch, last = self.params["resume_epoch"], self.legs[-1]
        for number, leg in enumerate(self.legs[:-1]):
            told = [record.told_state for record in leg.records]
            own = "state_by_rank" in leg.records[0].declaration.features
            odd = [rank for rank, state in enumerate(told) if state != told[0] and not own]
            states = [f"{rank} report different states: {told[0]} and {told[rank]}" for rank in odd]
            problem = f"ranks 0 and {states[0]}" if states else ""
            self._row(epoch, f"stop {number + 1}", "state", problem)
        taken = [leg.shares("leg", epoch) or [] for leg in self.legs]
        self._row(epoch, "resumed", "coverage", self._resumed(epoch, taken))
        whole = self.legs[0].shares("whole", epoch)
        if all(leg.world == last.world for leg in self.legs) and whole is not None:
            goes_on = [[s for part in taken for s in part[c]] for c in range(last.world)]
            problem = f"epoch {epoch} continues differently after a resume than without one"
            self._row(epoch, "resumed", "order", problem if goes_on != whole else "")
        for later in range(epoch + 1, self.params["epochs"]):
            given, whole = last.shares("leg", later), last.shares("whole", later)
            problem = ""
            if given != whole:
                wrong = self._coverage(last, later, given or [])
                other = f"epoch {later} differs after a resume in epoch {epoch}"
                problem = f"after a resume {wrong}" if wrong else other
            self._row(later, "resumed", "order", problem)

    def _resumed(self, epoch: int, taken: Sequence[Shares]) -> str:
        """The problem of the shares in an epoch that several legs share."""
        left, quota = self.samples, self.params["resume_at"] * self.params["batch"]
        total, earlier = 0, Counter[int]()
        for number, (leg, shares) in enumerate(zip(self.legs, taken, strict=True)):
            where = f"in epoch {epoch}" + (", resumed" if number else "")
            if problem := self._foreign(leg, shares, where):
                return problem
            sizes = workload.shares(left, leg.world, self.tail)
            is_last = number == len(self.legs) - 1
            wanted = sizes if is_last else [min(quota, size) for size in sizes]
            lengths = sorted(map(len, shares), reverse=True)
            now = Counter(sample for share in shares for sample in share)
            if number and (problem := self._repeated(epoch, earlier, now, shares, leg)):
                return problem
            if lengths != wanted:
                lost = [s for s in range(self.samples) if not earlier[s] and not now[s]]
                if is_last and self.tail != "drop" and lost:
                    return self._gap(epoch, lost)
                given = _sizes([len(share) for share in shares])
                if not left:
                    return f"epoch {epoch} was complete, but continues after a resume: {given}"
                wanted_of = f"{_sizes(wanted)} of the {left} samples that are left"
                return f"shares are wrong {where}: {given}, expected {wanted_of}"
            earlier += now
            total += sum(wanted)
            left = 0 if quota >= max(sizes) else left - sum(wanted)
        wrong = self._miscounted(earlier, total)
        if wrong and wrong[1]:
            return self._gap(epoch, wrong[1])
        return f"{_named(wrong[0])} seen twice in epoch {epoch}, resumed" if wrong else ""

    def _repeated(
        self, epoch: int, earlier: Counter[int], now: Counter[int], shares: Shares, leg: _Leg
    ) -> str:
        """The samples seen before a stop and again after it; padding may repeat a few."""
        again = sorted(sample for sample in now if earlier[sample])
        may = leg.world - 1 if self.tail == "pad" else 0
        if len(again) <= may:
            return ""
        if again == sorted(earlier) and shares == leg.shares("whole", epoch):
            what = f"all {len(again)} samples that were taken come again"
            return f"epoch {epoch} starts again after a resume: {what}"
        return f"{_named(again)} seen twice in epoch {epoch}: before a resume and after it"

    def _gap(self, epoch: int, lost: Sequence[int]) -> str:
        text = f"{_named(lost)} lost in a resume in epoch {epoch}: seen neither before nor after it"
        ahead = [leg.shares("ahead", epoch) or [] for leg in self.legs]
        read = {sample for shares in ahead for share in shares for sample in share}
        if read and {*lost} <= read:
            text += " (a loader had prefetched them, and no rank trained on them)"
        return text


def _parted(leg: _Leg) -> str:
    """Ranks of one data coordinate that were given different samples."""
    for rank, coordinate in leg.coordinates.items():
        first = leg.first_ranks[coordinate]
        mine, others = leg.records[rank].drawn, leg.records[first].drawn
        for own, other in zip(mine, others, strict=True):
            if own.samples != other.samples:
                where = f"take different samples in epoch {own.epoch}"
                return f"ranks {first} and {rank} are of one data coordinate, and {where}"
    return ""


def _moved(leg: _Leg) -> str:
    moved = ((record.rank, d.moved) for record in leg.records for d in record.drawn if d.moved)
    for rank, generator in moved:
        what = f"the global generator of {generator}"
        why = "which differs between ranks and belongs to the model"
        return f"the sampler of rank {rank} draws from {what}, {why}"
    return ""


def _is_order_of_the_data_set(shares: Shares, samples: int) -> bool:
    """Whether whole rounds are dealt out one by one, or in blocks."""
    world = len(shares)
    each = samples // world
    dealt = [share[:each] for share in shares]
    one_by_one = [list(range(each * world))[c::world] for c in range(world)]
    blocks = [list(range(c * each, (c + 1) * each)) for c in range(world)]
    return math.lgamma(each * world + 1) > -math.log(CHANCE) and dealt in (one_by_one, blocks)


def _named(samples: Sequence[int]) -> str:
    """``samples 3, 7 are``."""
    if len(samples) == 1:
        return f"sample {samples[0]} is"
    return f"samples {some([str(s) for s in samples], NAMED)} are"


def _sizes(sizes: Sequence[int]) -> str:
    """``3 shares of 8``, ``shares of 8, 8 and 7``."""
    if len({*sizes}) == 1:
        return f"{len(sizes)} share{'s' * (len(sizes) > 1)} of {sizes[0]}"
    return f"shares of {', '.join(map(str, sizes[:-1]))} and {sizes[-1]}"
