"""The work of a rank for one call does not grow with the ranks, and messages stay short.

Work is counted in calls and in tensors looked at, never in seconds.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from local_ranks import succeed, threads
from torch import nn

from shardproof.backends import errors
from shardproof.backends.request import Chunks, Rows
from shardproof.ledgers.memory.installed import watch
from shardproof.ledgers.memory.recorder import MemoryLedger

pytestmark = pytest.mark.usefixtures("one_thread")


def _counted(monkeypatch: pytest.MonkeyPatch, owner: type, *names: str) -> Counter[int]:
    """How often each thread calls the methods ``names`` of ``owner`` from now on."""
    calls = Counter[int]()

    def wrap(original: Callable[..., Any]) -> Callable[..., Any]:
        def method(*args: Any, **kwargs: Any) -> Any:
            calls[threading.get_ident()] += 1
            return original(*args, **kwargs)

        return method

    for name in names:
        monkeypatch.setattr(owner, name, wrap(getattr(owner, name)))
    return calls


def every_kind_of_event(rank: int, world: int) -> int:
    """One call of each kind, a forward, and a storage that is freed and comes back."""
    with MemoryLedger(lambda: "forward"):
        model = nn.Linear(3, 2)
        watch(model)
        whole, part = torch.ones(4 * world), torch.ones(4)
        dist.all_gather_into_tensor(whole, part)
        dist.reduce_scatter_tensor(part, whole)
        dist.all_to_all_single(torch.empty(world), torch.ones(world))
        dist.all_reduce(part)
        model(torch.ones(1, 3))
        whole.untyped_storage().resize_(0)
        peer = rank ^ 1
        (dist.send if rank < peer else dist.recv)(part, peer)
    return threading.get_ident()


@pytest.mark.parametrize(
    ("owner", "names"),
    [
        (MemoryLedger, ("touch", "in_use", "resized", "at_release", "_countable")),
        (Chunks, ("__getitem__",)),
        (Rows, ("__getitem__",)),
    ],
    ids=["ledgers", "views", "views of rows"],
)
def test_the_work_of_a_call_does_not_grow_with_the_ranks(
    owner: type, names: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    calls, each = _counted(monkeypatch, owner, *names), []
    for world in (2, 6, 24):
        calls.clear()
        ranks = succeed(every_kind_of_event, world, ledgers=True)
        # The last rank to arrive computes for all and may look at a tensor of each: so the mean.
        each.append(sum(calls[thread] for thread in ranks) / world)
    assert each[0] > 0
    assert each == [each[0]] * 3


def test_parts_of_one_tensor_are_what_a_list_of_them_holds() -> None:
    """The same results, bit for bit, whether ranks give one tensor or a list of parts."""

    def body(rank: int, world: int) -> None:
        generator = torch.Generator().manual_seed(rank)
        given = torch.randn(world, 5, generator=generator)
        gathered, listed = torch.empty(world * 5), [torch.empty(5) for _ in range(world)]
        dist.all_gather_into_tensor(gathered, given[rank])
        dist.all_gather(listed, given[rank])
        assert torch.equal(gathered, torch.cat(listed))
        for op in (dist.ReduceOp.SUM, dist.ReduceOp.AVG, dist.ReduceOp.MAX):
            one, other = torch.empty(5), torch.empty(5)
            dist.reduce_scatter_tensor(one, given.clone(), op)
            dist.reduce_scatter(other, list(given.clone()), op)
            assert torch.equal(one, other)
        slot = given.view(-1).clone()  # in place: the own part of what is gathered, and reduced
        own = slot[5 * rank : 5 * rank + 5]
        dist.reduce_scatter_tensor(own, slot)
        dist.all_gather_into_tensor(slot, own)
        total = sum(
            torch.randn(world, 5, generator=torch.Generator().manual_seed(r)) for r in range(world)
        )
        assert torch.equal(slot, torch.as_tensor(total).view(-1))

    succeed(body, 7)


def test_rows_of_one_tensor_are_what_a_list_of_them_holds() -> None:
    """Uneven and strided rows, given as one tensor by some ranks and as a list by others."""

    def body(rank: int, world: int) -> None:
        sizes = [(rank + other) % 3 for other in range(world)]  # as many rows as come back
        given = torch.arange(2.0 * sum(sizes)).view(-1, 2) + 1000 * rank
        wanted = [
            (torch.arange(2.0 * sum((r + o) % 3 for o in range(world))).view(-1, 2) + 1000 * r)[
                sum((r + o) % 3 for o in range(rank)) :
            ][: sizes[r]]
            for r in range(world)
        ]
        taken = torch.empty(sum(sizes), 2)
        if rank % 2:
            dist.all_to_all_single(taken, given, sizes, sizes)
        else:
            strided = given.t().contiguous().t()
            dist.all_to_all(list(taken.split(sizes)), [*strided.split(sizes)])
        assert torch.equal(taken, torch.cat(wanted))
        dist.all_to_all_single(given, given, sizes, sizes)  # in place
        assert torch.equal(given, taken)

    succeed(body, 5)


def test_some_give_one_tensor_and_others_a_list() -> None:
    def body(rank: int, world: int) -> None:
        part, listed = torch.full((2,), float(rank)), [torch.empty(2) for _ in range(world)]
        if rank % 2:
            dist.all_gather(listed, part)
        else:
            whole = torch.empty(2 * world)
            dist.all_gather_into_tensor(whole, part)
            listed = list(whole.view(world, 2))
        assert [float(one[1]) for one in listed] == [0.0, 1.0, 2.0, 3.0]

    succeed(body, 4)


def test_a_deadlock_in_which_each_of_many_ranks_waits_for_another() -> None:
    def body(rank: int, world: int) -> None:
        dist.recv(torch.ones(4), (rank + 1) % world)

    _, found = threads(body, 128)
    assert all(type(error) is errors.Deadlock for error in found)
    text = str(found[0])
    assert "rank 0 waits in recv(from 1, float32[4]) of group 0-127 for rank 1" in text
    assert text.endswith("ranks 4-127 wait in 124 other calls")
    assert max(len(str(error)) for error in found) < 600


def test_a_mismatch_of_many_ranks_is_told_briefly() -> None:
    def other(rank: int, world: int) -> None:
        dist.reduce_scatter_tensor(torch.ones(1 + rank % 2), torch.ones(64 * (1 + rank % 2)))

    _, found = threads(other, 64)
    assert all(type(error) is errors.CollectiveMismatch for error in found)
    texts = {str(error) for error in found}
    assert max(map(len, texts)) < 700, texts
    assert "ranks 0,2,4,6,8,10,12,14 and 24 more" in min(texts)


def test_names_of_many_ranks() -> None:
    assert errors.name_ranks([*range(0, 128, 2)]) == "ranks 0,2,4,6,8,10,12,14 and 56 more"
    assert errors.name_ranks([*range(128)]) == "ranks 0-127"
    assert errors.spans([*range(0, 8, 2), 9]) == "0,2,4,6,9"
    lines = errors.who_does("wait", {rank: f"in call {rank // 2}" for rank in range(14)})
    assert lines[0] == "ranks 0-1 wait in call 0"
    assert lines[-1] == "ranks 8-13 wait in 3 other calls"
    assert len(errors.who_does("wait", {rank: f"in call {rank}" for rank in range(5)})) == 5
