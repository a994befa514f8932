"""Who is named where ranks wait for ever, and why."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from shardproof.backends.heartbeat import Noted
from shardproof.launch import autopsy, frames
from shardproof.launch.autopsy import Standing


def collective(number: int, size: int = 4, group: int = 1, ranks: str = "ranks 0-2") -> Noted:
    text = f"all_reduce(sum, float64[{size}]) on {ranks}"
    return Noted(number, group, number, size, text)


def message(text: str, sequence: int = 9, ranks: str = "ranks 0-2") -> Noted:
    return Noted(sequence, 1, 0, 0, f"{text} on {ranks}")


def waiting(rank: int, *calls: Noted, order: Sequence[tuple[int, int]] = ()) -> Standing:
    place = f"in step (mine.py:{rank})"
    return Standing(rank, "waits", calls=calls, awaited=calls[-1], place=place, order=order)


def found(*standings: Standing) -> autopsy.Autopsy:
    one = autopsy.find(standings)
    assert one is not None
    return one


@pytest.mark.parametrize(
    ("how", "cause", "says"),
    [
        ("stopped", "dead peer", "its process was stopped"),
        ("gone", "dead peer", "it was killed: SIGKILL"),
        ("ended", "desync", "it has returned"),
        ("stands", "desync", "it stands in load (mine.py:7)"),
        ("computes", "desync", "it computes in load (mine.py:7)"),
    ],
)
def test_who_does_not_wait_keeps_the_others(how: autopsy.How, cause: str, says: str) -> None:
    late = Standing(1, how, "was killed: SIGKILL", [collective(1)], place="in load (mine.py:7)")
    one = found(
        waiting(0, collective(1), collective(2)), late, waiting(2, collective(1), collective(2))
    )
    assert (one.cause, one.rank) == (cause, 1)
    assert one.sentence.startswith(
        f"{cause}: ranks 0,2 wait in all_reduce(sum, float64[4]), call 1 of group 0-2 "
        "in step (mine.py:0); rank 1 never came: "
    )
    assert says in one.sentence and "its last call: all_reduce(sum, float64[4])" in one.sentence


def test_a_message_to_a_rank_that_is_none() -> None:
    sent = message("send(to 2, float64[4])", ranks="ranks 0,2")
    one = found(waiting(0, sent), Standing(1, "ended"), waiting(2, collective(1)))
    assert (one.cause, one.rank) == ("desync", 0)
    assert one.sentence == (
        "desync: rank 0 waits in send(to 2, float64[4]), group 0,2 in step (mine.py:0), "
        "a group of 2: the group has no such rank"
    )


def test_calls_that_differ_are_told_before_all_else_and_the_fewer_are_blamed() -> None:
    calls = [collective(1), collective(2)], [collective(1), collective(2, size=5)]
    one = found(waiting(0, *calls[1]), waiting(1, *calls[0]), waiting(2, *calls[0]))
    assert (one.cause, one.rank) == ("desync", 0)
    assert "call 1 of group 0-2 does not match: rank 0 calls all_reduce(sum, float64[5])" in (
        one.sentence
    )
    assert "ranks 1-2 call all_reduce(sum, float64[4])" in one.sentence
    assert one.sentence.endswith("(rank 0 in step (mine.py:0), rank 1 in step (mine.py:1))")


def test_of_two_that_differ_the_one_that_left_its_own_order_is_blamed() -> None:
    usual, other = [(1, 7), (1, 8), (2, 7)], [(1, 7), (1, 8), (2, 8)]
    pair = {"ranks": "ranks 0-1"}
    one = found(
        waiting(0, collective(3, 5, **pair), order=other),
        waiting(1, collective(3, **pair), order=usual),
    )
    assert one.rank == 0
    again = found(waiting(0, collective(3, 5, **pair)), waiting(1, collective(3, **pair)))
    assert again.rank == 1, "nothing tells: the one that is not the first"


def test_of_ranks_that_wait_in_a_ring_the_one_that_left_its_order_is_blamed() -> None:
    """Its message was never sent, and both ends wait for the other."""
    usual, other = [(1, 7), (1, 8), (2, 7)], [(1, 7), (1, 8), (2, 8)]
    ends = message("recv(from 0, float64[4])"), message("recv(from 1, float64[4])")
    one = found(waiting(0, ends[1], order=other), waiting(1, ends[0], order=usual))
    assert (one.cause, one.rank) == ("desync", 0)
    assert "rank 1 waits in recv(from 0, float64[4]), group 0-2" in one.sentence
    assert "rank 0 never came: it waits in recv(from 1, float64[4])" in one.sentence


def test_a_ring_of_which_nothing_is_known_blames_nobody() -> None:
    ends = message("recv(from 0, float64[4])"), message("recv(from 1, float64[4])")
    one = found(waiting(0, ends[1]), waiting(1, ends[0]))
    assert one.rank is None and "each waits for another" in one.sentence


def test_of_one_in_a_message_and_one_in_a_collective_the_first_is_late() -> None:
    one = found(
        waiting(0, collective(2, ranks="ranks 0-1")),
        waiting(1, message("recv(from 0, float64[1])", ranks="ranks 0-1")),
    )
    assert one.rank == 1 and "rank 1 never came: it waits in recv(from 0, float64[1])" in (
        one.sentence
    )


def test_who_waits_for_one_that_waits_is_told_last() -> None:
    chain = [
        waiting(0, message("recv(from 1, float64[4])")),
        waiting(1, message("recv(from 2, float64[4])")),
        Standing(2, "stands", place="in load (mine.py:7)"),
    ]
    one = found(*chain)
    assert one.rank == 2 and one.sentence.endswith("it made no call; rank 0 waits in turn")
    assert "rank 1 waits in recv(from 2, float64[4])" in one.sentence


def test_a_rank_that_joins_a_group_alone() -> None:
    one = found(
        Standing(0, "joins", place="in setup (mine.py:3)"),
        Standing(1, "stands", place="in load (mine.py:7)"),
    )
    assert (one.cause, one.rank) == ("rendezvous", 1)
    assert "rank 0 waits for a group to be made in setup (mine.py:3); rank 1 never came" in (
        one.sentence
    )


def test_where_the_call_is_not_noted_it_is_the_first_that_somebody_lacks() -> None:
    """DDP waits in C++, for the first of the buckets that it has sent."""
    calls = [collective(1), collective(2), collective(3)]
    one = found(
        Standing(0, "waits", calls=calls, place="in backward"),
        Standing(1, "stands", calls=calls[:1]),
        waiting(2, *calls[:2]),
    )
    assert one.rank == 1 and "ranks 0,2 wait in all_reduce(sum, float64[4]), call 1 of" in (
        one.sentence
    )


def test_nothing_is_said_where_nobody_waits_for_another() -> None:
    assert autopsy.find([Standing(0, "stands"), Standing(1, "computes")]) is None
    done = [waiting(rank, collective(1)) for rank in range(3)]
    assert autopsy.find(done) is None


def test_calls_match_where_groups_differ() -> None:
    ranks = {0: [collective(1, 4, group=1)], 1: [collective(1, 5, group=2)]}
    assert autopsy.mismatch(ranks) is None


@pytest.mark.parametrize(
    ("place", "is_named"),
    [
        ("in step (/home/me/shardproof/mine.py:3)", True),  # the README's name for a clone
        (f"in step ({frames.SUITE}/impls/reference/ddp.py:3)", False),
    ],
)
def test_of_the_other_rank_a_line_of_the_users_is_named(place: str, is_named: bool) -> None:
    calls = [[collective(1, size)] for size in (4, 4, 8)]
    at = [place, place, "in step (mine.py:2)"]
    ranks = [Standing(r, "waits", calls=calls[r], place=at[r]) for r in range(3)]
    one = autopsy.find_mismatch(ranks)
    assert one is not None and one.rank == 2 and "rank 2 in step (mine.py:2)" in one.sentence
    assert (f"rank 0 {place}" in one.sentence) == is_named
