"""Control numbers of ranks that are simulated one after the other."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from shardproof.backends.errors import CollectiveMismatch
from shardproof.backends.request import Request
from shardproof.contract import OptimizerSpec
from shardproof.costs.shapes import BatchSize, Shape
from shardproof.errors import SelectionError
from shardproof.ledgers import program_order, traffic
from shardproof.simulate.group import Hearsay
from shardproof.simulate.rank import simulate
from shardproof.simulate.sources import ShapeSource

BOTH = (0, 1)
LARGEST = Request("all_reduce", reduce="max")
SMALL = Shape("small", layers=2, hidden=64, heads=4, vocab=128, seq=16)


def source() -> ShapeSource:
    adam = OptimizerSpec("adamw", momentum=0.0)
    work = BatchSize(1, SMALL.seq, 1)
    return ShapeSource(SMALL, "reference/ddp", {"replicate": 2}, adam, {}, work, torch.float32)


def say(heard: Hearsay, rank: int, *numbers: int, end: bool = True) -> list[list[int]]:
    """The answers that ``rank`` gets, which says each of ``numbers`` in a call of its own."""
    heard.begin()
    found = [heard.answer(BOTH, rank, LARGEST, torch.tensor([n])).tolist() for n in numbers]
    if end:
        heard.end(rank)
    return found


def test_ranks_agree_when_each_has_heard_the_others() -> None:
    heard = Hearsay()
    assert say(heard, 0, 3) == [[3]]
    assert say(heard, 1, 5) == [[5]]
    assert not heard.is_settled and heard.unsettled() == {0}
    assert say(heard, 0, 3) == [[5]]
    assert heard.is_settled


def test_calls_that_a_rank_does_not_repeat_are_forgotten() -> None:
    heard = Hearsay()
    say(heard, 0, 3, 4, 9)
    say(heard, 1, 3, 4)
    say(heard, 0, 3, 4)
    assert heard.is_settled
    # Nobody hears the third number any more.
    assert say(heard, 1, 3, 4, 1)[2] == [1]


def test_a_rank_that_waits_in_vain_is_stopped() -> None:
    heard = Hearsay()
    say(heard, 0, 1)
    with pytest.raises(LookupError, match="rank 1 waits for ranks that have not answered yet"):
        say(heard, 1, 1, *[-1] * 1000)
    assert heard.guessed


def test_ranks_that_call_different_things_are_told() -> None:
    heard = Hearsay()
    say(heard, 0, 3)
    heard.begin()
    heard.answer(BOTH, 1, LARGEST, torch.tensor([3, 3]))
    with pytest.raises(CollectiveMismatch, match=r"rank 0 calls all_reduce of \(1,\), but rank 1"):
        heard.require_alike()


def test_a_guessed_message_gives_way_to_one_without_values() -> None:
    heard, blank = Hearsay(), torch.zeros(2, dtype=torch.int64)
    heard.begin()
    heard.send(0, 1, torch.tensor([7, 7]))
    heard.begin()
    guess = heard.receive(2, 3, blank)
    assert guess is not None and guess.tolist() == [7, 7] and heard.guessed
    heard.begin()
    heard.send(2, 3, None)
    assert not heard.is_settled
    heard.begin()
    assert heard.receive(2, 3, blank) is None
    assert heard.is_settled


def test_a_simulation_leaves_no_ledger_behind() -> None:
    simulate(source(), [0])
    assert program_order.current() is None and traffic.current() is None


def test_a_process_group_of_the_caller_survives() -> None:
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    try:
        with pytest.raises(SelectionError, match="this process has a process group"):
            simulate(source(), [0])
        assert dist.is_initialized()
    finally:
        dist.destroy_process_group()
