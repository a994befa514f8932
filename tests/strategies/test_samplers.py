"""Samplers: the drawing of the reference's docstring, and what torch's do otherwise."""

from __future__ import annotations

from typing import Any

import pytest

from shardproof.contract import Refused, SamplerSpec, Sampling, Tail
from shardproof.impls.pytorch.distributed_sampler import TorchSampler
from shardproof.impls.pytorch.elastic_distributed_sampler import TorchElasticSampler
from shardproof.impls.reference.sampler import Sampler


def started(kind: type[Sampling], world: int, samples: int, **more: Any) -> list[Any]:
    """The samplers of all ranks."""
    made: list[Any] = [kind() for _ in range(world)]
    for rank, sampler in enumerate(made):
        sampler.start(SamplerSpec(samples, rank, world, **more), {})
    return made


def given(samplers: list[Any], epoch: int = 0) -> list[list[int]]:
    return [list(sampler.epoch(epoch)) for sampler in samplers]


def test_an_order_is_dealt_out_from_a_position_on() -> None:
    """Of 11 samples 3 ranks take 2 each; the other 5 are dealt out to 2 ranks."""
    three = started(Sampler, 3, 11, tail="uneven", seed=3)
    order = three[0].order(1)
    assert sorted(order) == list(range(11))
    assert given(three, 1) == [order[rank::3] for rank in range(3)]
    states = [sampler.state(2) for sampler in three]
    assert states == [{"epoch": 1, "position": 6}] * 3
    two = started(Sampler, 2, 11, tail="uneven", seed=3)
    for sampler in two:
        sampler.load_state(states[0])
    assert given(two, 1) == [[order[6], order[8], order[10]], [order[7], order[9]]]
    assert given(two, 2) == given(started(Sampler, 2, 11, tail="uneven", seed=3), 2)


@pytest.mark.parametrize(
    ("tail", "shares"),
    [
        ("pad", [[0, 3], [1, 4], [2, 0]]),
        ("drop", [[0], [1], [2]]),
        ("uneven", [[0, 3], [1, 4], [2]]),
    ],
)
def test_what_does_not_go_up_evenly(tail: Tail, shares: list[list[int]]) -> None:
    assert given(started(Sampler, 3, 5, shuffle=False, tail=tail)) == shares


def test_a_finished_epoch_stays_finished_in_any_world() -> None:
    four = started(Sampler, 4, 11, tail="drop")
    assert [len(share) for share in given(four)] == [2] * 4
    (state,) = {tuple(sampler.state(2).items()) for sampler in four}
    two = started(Sampler, 2, 11, tail="drop")
    for sampler in two:
        sampler.load_state(dict(state))
    assert given(two) == [[], []]


def test_two_seeds_share_no_order_but_torchs_do() -> None:
    for kind, share in ((Sampler, False), (TorchSampler, True)):
        (first,) = started(kind, 1, 50, seed=0)
        (other,) = started(kind, 1, 50, seed=1)
        assert (given([first], 1) == given([other], 0)) == share


def test_options_that_nobody_takes_are_refused() -> None:
    for kind in (Sampler, TorchElasticSampler):
        with pytest.raises(Refused, match="unknown option 'seed'; this sampler has no options"):
            kind.capabilities({"seed": 1})
    with pytest.raises(Refused, match=r"unknown option 'samplers'; did you mean 'sampler'\?"):
        TorchSampler.capabilities({"samplers": "mine:Mine"})
    with pytest.raises(Refused, match="resume"):
        TorchSampler.capabilities({"resume": "sometimes"})


def test_torchs_own_declines_what_it_has_no_state_for() -> None:
    assert set(TorchSampler.capabilities({}).declines) == {"uneven", "read_ahead", "resume"}
