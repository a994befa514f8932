"""A sampler: the samples of each rank, epoch by epoch, also after a resume within an epoch.

*The problem.*  N ranks train on one data set of n samples.  In every epoch each sample is to be
trained on once, by one rank, in another order than before.  Nobody wants to send a list of n
numbers, or to keep one in a checkpoint, and training may go on with another number of ranks.

*The way.*  Every rank makes the same permutation by itself, from seed and epoch, and deals it out
like cards: what lies at position p goes to rank p mod N.  After t samples of each rank the first
t N positions are gone, whoever took them.  So the position says all, and the rest can be dealt out
to any number of ranks:

    position       0  1  2  3  4  5 | 6  7  8  9 10
    sample         7  0  9  4 10  1 | 3  6  2  8  5
    3 ranks, t = 2 0  1  2  0  1  2 |
    then 2 ranks                    | 0  1  0  1  0

*Placement.*

    every rank     seed, epoch, position: three numbers; the permutation (8 n bytes) in its epoch
    checkpoint     epoch and position, the same on all ranks

*One epoch.*

    epoch(e)       permutation of (seed, e) -> from the position on -> made even -> every N-th
    step           each rank takes a batch; a loader may read ahead of that
    state(t)       (e, position + t N): from what was trained on, not from what was read
    load_state     the position counts in epoch e only; other epochs begin at 0

*Cost.*  Nothing is sent.  With r = n - position samples left, each rank takes

    pad            ceil(r / N)        the first (-r) mod N of the epoch's order are repeated
    drop           floor(r / N)       the last r mod N are left out
    uneven         one of these two   nothing is repeated or left out

*Numbers.*  Exact.  Two seeds share no order: the permutation depends on a digest of seed and epoch.
torch's ``DistributedSampler`` adds them, so seed 1 begins with the second order of seed 0.

*Left out.*  Data sets whose length nobody knows, weights and buckets by length; permutations that
need no memory (format-preserving encryption); the reading itself.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from shardproof.axes import names
from shardproof.contract import Capabilities, Options, Refused, SamplerSpec, Sampling


class Sampler(Sampling):
    """Deal out the permutation of (seed, epoch) from a position on."""

    depth = "layout"

    @classmethod
    def capabilities(cls, options: Options) -> Capabilities:
        if options:
            raise Refused(f"unknown option {next(iter(options))!r}; this sampler has no options")
        return Capabilities(axes=names(), needs=("cpu",))

    def start(self, spec: SamplerSpec, options: Options) -> None:
        self.spec = spec
        #: The epoch that was asked for last, and the position at which it begins.
        self.current, self.begin = 0, 0
        #: The epoch that a state was loaded for, and how much of it was trained on.
        self.resumed, self.position = 0, 0

    def epoch(self, number: int) -> Iterator[int]:
        self.current = number
        self.begin = self.position if number == self.resumed else 0
        return iter(self.dealt(self.order(number), self.begin))

    def state(self, taken: int) -> Mapping[str, Any]:
        position = min(self.begin + taken * self.spec.world, self.spec.samples)
        if taken >= self.longest_share(self.spec.samples - self.begin):
            position = self.spec.samples  # what is dropped here is dropped in any world
        return {"epoch": self.current, "position": position}

    def load_state(self, state: Mapping[str, Any]) -> None:
        self.resumed, self.position = state["epoch"], state["position"]

    def order(self, epoch: int) -> list[int]:
        """The order of all samples in ``epoch``, the same on all ranks."""
        if not self.spec.shuffle:
            return list(range(self.spec.samples))
        text = f"{self.spec.seed}/{epoch}"
        seed = int.from_bytes(hashlib.sha256(text.encode()).digest()[:7], "big")
        generator = torch.Generator().manual_seed(seed)  # its own: the global one is the model's
        return torch.randperm(self.spec.samples, generator=generator).tolist()

    def dealt(self, order: Sequence[int], begin: int) -> list[int]:
        """This rank's part of ``order`` from position ``begin`` on."""
        return self.evened(order, order[begin:])[self.spec.rank :: self.spec.world]

    def evened(self, order: Sequence[int], rest: Sequence[int]) -> list[int]:
        """The ``rest`` of an epoch's ``order``, made a multiple of the ranks if requested."""
        over = len(rest) % self.spec.world
        if not over or self.spec.tail == "uneven":
            return [*rest]
        if self.spec.tail == "drop":
            return [*rest[: len(rest) - over]]
        return [*rest, *itertools.islice(itertools.cycle(order), self.spec.world - over)]

    def longest_share(self, rest: int) -> int:
        """The largest number of samples per rank of ``rest``."""
        least, over = divmod(rest, self.spec.world)
        return least + (over > 0 and self.spec.tail != "drop")


IMPLEMENTATION = Sampler
