"""Turns at a parameter server: the order of pulls and pushes, and the staleness bound.

A worker pulls parameters and pushes a gradient, once each in every step.  In what order the pulls
and pushes of several workers come decides everything else, so it is a list of worker numbers here,
the same on all servers: the n-th time that a worker stands in it is its n-th pull or push, pulls
and pushes in turns.  A pull that would read too old a version waits, and so does what that worker
does after it; the slowest worker never waits, so the list always ends.  A worker that dies has no
turns any more, and nobody waits for it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from shardproof.contract import Refused
from shardproof.impls.reference.engine.options import at_least


class Turn(NamedTuple):
    """Worker ``worker`` pulls for its step ``step``, or pushes its gradient."""

    worker: int
    step: int
    is_push: bool


@dataclass(frozen=True)
class Death:
    """Worker ``worker`` dies after ``turns`` pulls and pushes."""

    worker: int
    turns: int

    def __post_init__(self) -> None:
        at_least("dies.worker", self.worker, 0)
        at_least("dies.turns", self.turns, 0)


class Turns:
    """The turns of ``workers`` in the order ``arrivals``, with a lag of at most ``bound`` steps.

    A pull for step t waits until all gradients of steps before t - bound are in.  Nobody is asked
    for more steps than there are: those after ``clock`` come later, or never where all ``is_over``.
    """

    def __init__(
        self, arrivals: Iterator[int], workers: int, bound: int, dies: Death | None = None
    ) -> None:
        self.arrivals, self.bound, self.dies = arrivals, bound, dies
        self.waiting: list[int] = []
        self.early: int | None = None  # an arrival after the clock
        self.taken = [0] * workers  # pulls and pushes so far

    def next(self, clock: int, is_over: bool = False) -> Turn | None:
        """The next turn: the first waiting worker that may continue, else an arrival.

        ``None``: what comes next is after ``clock``, or nothing is left.
        """
        self.waiting = [worker for worker in self.waiting if self.lives(worker)]
        for place, worker in enumerate(self.waiting):
            if self.may(worker):
                del self.waiting[place]
                return self.take(worker)
        while not is_over or self.fewest() < 2 * (clock + 1):
            worker = next(self.arrivals) if self.early is None else self.early
            is_early = self.taken[worker] + self.waiting.count(worker) >= 2 * (clock + 1)
            self.early = worker if is_early and not is_over else None
            if is_early and not is_over:
                return None
            if not is_early and self.lives(worker):
                if worker not in self.waiting and self.may(worker):
                    return self.take(worker)
                self.waiting.append(worker)
                self.check_progress()
        return None

    def check_progress(self) -> None:
        """Raise if every worker waits; the slowest one never has to."""
        if all(worker in self.waiting for worker in range(len(self.taken)) if self.lives(worker)):
            raise RuntimeError(
                "deadlock: every worker waits for another worker (pulls and pushes so far of each "
                f"worker: {self.taken})"
            )

    def lives(self, worker: int) -> bool:
        """Whether ``worker`` has another turn."""
        dies = self.dies
        return dies is None or worker != dies.worker or self.taken[worker] < dies.turns

    def fewest(self) -> int:
        """The number of turns of the slowest living worker."""
        return min(taken for worker, taken in enumerate(self.taken) if self.lives(worker))

    def may(self, worker: int) -> bool:
        """Whether the next turn of ``worker`` is a push, or a pull within the bound."""
        step, is_push = divmod(self.taken[worker], 2)
        return bool(is_push) or self.fewest() // 2 >= step - self.bound

    def take(self, worker: int) -> Turn:
        """Record the turn."""
        step, is_push = divmod(self.taken[worker], 2)
        self.taken[worker] += 1
        return Turn(worker, step, bool(is_push))


def in_turn(workers: int, bound: int) -> Iterator[int]:
    """All workers pull, then all push; another one is first each time."""
    step = 0
    while True:
        order = [(step + n) % workers for n in range(workers)]
        yield from order + order
        step += 1


def slow(workers: int, bound: int) -> Iterator[int]:
    """The last worker is ``bound`` steps behind the others."""
    fast = range(workers - 1)
    for _ in range(bound):
        for worker in fast:
            yield from (worker, worker)
    while True:
        for worker in fast:
            yield from (worker, worker)
        yield from (workers - 1, workers - 1)


def burst(workers: int, bound: int) -> Iterator[int]:
    """Every worker makes as many consecutive steps as the bound allows."""
    while True:
        for worker in range(workers):
            yield from (worker, worker) * (bound + 1)


def all_orders(workers: int, bound: int) -> Iterator[int]:
    """Every possible order of three steps of all workers, one after another: with two workers 924
    orders of 12 turns each, so 2772 steps cover them all.
    """

    def merged(left: Sequence[int]) -> Iterator[tuple[int, ...]]:
        if not any(left):
            yield ()
        for worker, turns in enumerate(left):
            if turns:
                for rest in merged([*left[:worker], turns - 1, *left[worker + 1 :]]):
                    yield (worker, *rest)

    while True:
        for order in merged([2 * 3] * workers):
            yield from order


#: Orders by name.
ORDERS = {"in_turn": in_turn, "slow": slow, "burst": burst, "all_orders": all_orders}


def scripted(script: Sequence[int], workers: int) -> Iterator[int]:
    """``script``, and after its end round-robin, starting with the workers that are behind.

    :raises Refused: it names a worker that there is not.
    """
    odd = [worker for worker in script if not 0 <= worker < workers]
    if odd:
        raise Refused(
            f"option 'order' = {list(script)}: worker {odd[0]} does not exist, there are "
            f"{workers} workers; valid: 0 to {workers - 1}"
        )
    counts = [list(script).count(worker) for worker in range(workers)]

    def arrivals() -> Iterator[int]:
        yield from script
        while True:
            worker = counts.index(min(counts))
            counts[worker] += 1
            yield worker

    return arrivals()
