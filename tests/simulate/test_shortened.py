"""Short first steps, remembered results and few reruns: equal figures in less time."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from test_simulate import SMALL, World, source_of

from shardproof.ledgers.memory.summary import summary
from shardproof.simulate import figures, rank
from shardproof.simulate.fakes import remembered
from shardproof.simulate.fakes.known import known_integers
from shardproof.simulate.rank import SimulatedRank, simulate
from shardproof.simulate.sources import ShapeSource

_SCHEDULES = ("gpipe", "1f1b", "interleaved", "zb_h1", "zb_v")
WORLDS = [
    World("reference/ddp", {"replicate": 2}, 4),
    World("reference/zero1", {"shard": 2}, 4),
    World("reference/zero2", {"shard": 2}, 4),
    World("reference/zero3", {"shard": 2}, 4),
    World("reference/fsdp", {"shard": 2}, 4),
    World("reference/fsdp", {"shard": 2}, 4, {"offload": "optimizer"}),
    World("reference/tensor", {"tensor": 2}, 4),
    World("reference/context", {"context": 2}, 4),
    *(World("reference/pipeline", {"pipe": 2}, 4, {"schedule": name}) for name in _SCHEDULES),
    World("reference/hybrid", {"pipe": 2, "shard": 2, "tensor": 2}, 4, {"data": "fsdp"}),
]


class Whole(ShapeSource):
    """All steps with all micro-batches."""

    def micro_batches(self, step: int) -> int:
        return self.work.micro_batches


def told(made: SimulatedRank) -> tuple[Any, ...]:
    """Bytes, calls and operators of the last step."""
    rows = [row for row in summary(made.log) if row.step == len(made.calls) - 1]
    calls = [(c.operation, c.payload_bytes, c.group, c.phase) for c in made.calls[-1]]
    return rows, calls, [one._replace(at=0) for one in made.work.eager]


@pytest.mark.parametrize("world", WORLDS, ids=lambda w: "-".join([w.implementation, *w.options]))
def test_a_short_first_step_changes_nothing_in_the_last(world: World) -> None:
    short = source_of(SMALL, world)
    assert short.micro_batches(0) < short.micro_batches(1) == 4
    whole, ranks = Whole(**vars(short)), figures.looked_at(short.axes)
    for one, other in zip(simulate(short, ranks), simulate(whole, ranks), strict=True):
        assert told(one) == told(other)


def test_an_adapter_gets_whole_steps() -> None:
    """torch's pipelines learn shapes in the first step of each number of micro-batches."""
    source = source_of(SMALL, World("pytorch/pipelining", {"pipe": 2}, 4))
    assert source.micro_batches(0) == source.micro_batches(1) == 4


@pytest.mark.parametrize("name", ["reference/fsdp", "reference/zero1", "pytorch/fsdp2"])
def test_remembered_results_change_nothing(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    source = source_of(SMALL, World(name, {"shard": 3}))
    monkeypatch.setattr(remembered, "_results", {})
    first, again = (simulate(source, [2])[0] for _ in range(2))
    assert remembered._results
    monkeypatch.setattr(remembered, "key_of", lambda *_: None)
    (slow,) = simulate(source, [2])
    for fast in (first, again):
        assert fast.log.events == slow.log.events and fast.log.storages == slow.log.storages
        assert fast.calls == slow.calls
        assert fast.work == slow.work


def test_what_is_remembered_keeps_shapes_storages_and_identities(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(remembered, "_results", {})
    with known_integers():
        for _ in range(2):
            wide = torch.empty(3, 4)
            narrow, turned = wide[1:], wide.t()
            assert narrow.shape == (2, 4) and narrow.storage_offset() == 4
            assert turned.stride() == (1, 4)
            assert narrow.untyped_storage()._cdata == wide.untyped_storage()._cdata
            assert wide.add_(1) is wide
            assert (wide + 1).untyped_storage()._cdata != wide.untyped_storage()._cdata
            assert (turned + 1).stride() == (1, 4)
            # Equal as numbers, but other dtypes come out.
            integers = wide.to(torch.int64)
            assert (integers * 2).dtype is torch.int64 and (integers * 2.0).dtype is torch.float32
            parts = torch.empty(4, 2).unbind()
            assert [part.storage_offset() for part in parts] == [0, 2, 4, 6]
            assert torch.arange(3).tolist() == [0, 1, 2]  # values stay known


def test_a_view_of_a_listed_tensor_is_not_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    """A place says which argument is shared, so it would come back as a new tensor."""
    monkeypatch.setattr(remembered, "_results", {})
    with known_integers():
        wide = torch.empty(4)
        remembered.remember("view", ([wide],), wide[:4])
        remembered.remember("new", ([wide],), torch.empty(4))
    assert "view" not in remembered._results and "new" in remembered._results


def test_only_ranks_with_a_wrong_answer_run_again() -> None:
    """A rank of the first stage gets a message before its sender ran; the others never wait."""
    begun = list[int]()
    source = source_of(SMALL, World("reference/hybrid", {"pipe": 2, "shard": 2}, 2))
    simulate(source, (ranks := figures.looked_at(source.axes)), begun.append)
    assert begun[: len(ranks)] == ranks and len(ranks) < len(begun) < 2 * len(ranks)


def test_operators_are_noted_on_request_only() -> None:
    source = source_of(replace(SMALL, layers=2), World("reference/fsdp", {"shard": 2}))
    (with_, without) = (rank.simulate(source, [0], notes_work=on)[0] for on in (True, False))
    assert with_.work.eager and not without.work.eager
    assert with_.log.events == without.log.events
