"""Which steps are compared: the cost decides, and every rank comes to the same."""

from __future__ import annotations

import math

import pytest
import torch

from shardproof.watch import compare
from shardproof.watch.compare import SHARE, Compared
from shardproof.watch.record import RankRecord


def compared(rank: int = 0, every: int | None = None) -> Compared:
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1)
    record = RankRecord(rank, 2, 1, "host", "train.py", "2.13")
    return Compared(optimizer, 0, None, record, None, every)


def row(cost: float, step: float) -> list[int]:
    """A row that tells seconds of a comparison and of a step."""
    numbers = [0] * compare._ROW
    numbers[compare._COST], numbers[compare._TIME] = int(1e6 * cost), int(1e6 * step)
    return numbers


def next_after(one: Compared, step: int, *rows: list[int]) -> int:
    one._sent = step
    one._schedule([*rows])
    return one._next


@pytest.mark.parametrize("cost", [0.0001, 0.004, 0.03, 0.2, 1.0])
def test_comparing_costs_its_share_at_most(cost: float) -> None:
    one, step = compared(), 0.1
    assert next_after(one, 1, row(cost, 0)) == 2, "the first steps are compared whatever they cost"
    assert next_after(one, 2, row(cost, step)) == 3
    k = next_after(one, 3, row(cost, step)) - 3
    assert cost / (k * step) <= SHARE
    assert k == 1 or cost / ((k - 1) * step) > SHARE, "no rarer than needed"


def test_the_slowest_rank_counts_and_all_come_to_the_same() -> None:
    rows = [row(0.01, 0.1), row(0.08, 0.1)]
    chosen = {next_after(compared(rank), 3, *rows) for rank in (0, 1)}
    assert chosen == {3 + math.ceil(0.8 / SHARE)}


def test_one_slow_comparison_does_not_count() -> None:
    one = compared()
    for step, cost in ((3, 0.01), (5, 0.01), (7, 9.0)):
        after = next_after(one, step, row(cost, 0.1))
    assert after == 7 + math.ceil(0.1 / SHARE)


def test_users_may_say_it() -> None:
    assert next_after(compared(every=5), 1, row(9.0, 0.1)) == 6
