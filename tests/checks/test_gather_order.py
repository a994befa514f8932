"""Gathers are needed in the order of their issue: what is in order, and what is told of it."""

from __future__ import annotations

from fractions import Fraction

import pytest

from shardproof.checks.overlap import _out_of_order
from shardproof.ledgers.traffic import LoggedCall


def gather(issued: int, waited: int | None, group: tuple[int, ...] = (0, 1)) -> LoggedCall:
    return LoggedCall(
        sequence=issued,
        operation="all_gather",
        group=group,
        axis="shard",
        dtype="float64",
        payload_bytes=100 + issued,
        logical_bytes=Fraction(1),
        phase="forward",
        inside_backward=False,
        units_before=0,
        issued=issued,
        waited=waited,
    )


@pytest.mark.parametrize(
    "waited",
    [(4, 5, 6), (1, 5, 6), (4, None, 6), (None, 5, 6)],
    ids=["ahead", "at once", "never needed", "first never needed"],
)
def test_what_is_needed_in_the_order_of_issue_is_right(waited: tuple[int | None, ...]) -> None:
    assert not _out_of_order([gather(n, at) for n, at in enumerate(waited)])


def test_a_gather_that_is_needed_before_one_issued_earlier_is_told() -> None:
    told = _out_of_order([gather(0, 4), gather(1, 6), gather(2, 5)])
    assert told.startswith("a gather of 101 bytes is issued before one of 102")


def test_groups_do_not_wait_for_each_other() -> None:
    assert not _out_of_order([gather(0, 6), gather(1, 5, group=(0, 2))])
