"""Every collective and upstream system on every backend; failures that name ranks, quickly."""

from __future__ import annotations

import functools
import threading
import time
import traceback
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from local_ranks import processes, succeed, threads
from neutral_checks import NEUTRAL, STRICTER, data
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from shardproof.backends import Joining, errors, joined
from shardproof.backends.disturbances import Disturbances, disturbances_of
from shardproof.backends.in_memory.hub import Hub
from shardproof.comm import Mesh
from shardproof.ledgers import program_order, traffic

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize("world", [1, 2, 3, 4])
@pytest.mark.parametrize("name", [*NEUTRAL, *STRICTER])
def test_in_memory(name: str, world: int) -> None:
    succeed({**NEUTRAL, **STRICTER}[name], world)


def every_neutral_check(rank: int, world: int, ledgers: bool) -> str:
    group = dist.group.WORLD
    assert (type(group) is dist.ProcessGroup) is not ledgers
    assert dist.get_backend() == "gloo"
    for name, check in NEUTRAL.items():
        try:
            check(rank, world)
        except BaseException:  # noqa: BLE001 - reported by name; the ranks are out of step now
            return f"{name}: {traceback.format_exc()}"
    return ""


@pytest.mark.parametrize("ledgers", [True, False], ids=["logged", "native"])
def test_gloo(ledgers: bool, tmp_path: Path) -> None:
    """All neutral checks in one launch of three processes, with and without the wrapper."""
    failed = processes(every_neutral_check, 3, tmp_path, ledgers, ledgers)
    assert not any(failed), "\n".join(failed)


# ------------------------------------------------------------------------- failures on in_memory


def _fail(body: Any, world: int = 4, hub: Hub | None = None) -> list[BaseException | None]:
    """The ranks' errors; unless the hub is given, none comes from its time limit."""
    _, found = threads(body, world, hub)
    assert hub is not None or not any(isinstance(error, errors.PeerTimeout) for error in found)
    return found


def _all_say(found: list[BaseException | None], kind: type[BaseException], *words: str) -> None:
    for error in found:
        assert type(error) is kind, found
        for word in words:
            assert word in str(error), error


def test_other_size() -> None:
    found = _fail(lambda rank, _: dist.all_reduce(torch.ones(5 if rank == 2 else 4)))
    _all_say(found, errors.CollectiveMismatch, "rank 2 calls all_reduce(sum, float32[5])")


def test_other_dtype_operation_root_and_call() -> None:
    def dtype(rank: int, _: int) -> None:
        dist.all_reduce(torch.ones(4, dtype=torch.float64 if rank else torch.float32))

    def operation(rank: int, _: int) -> None:
        dist.all_reduce(torch.ones(4), op=dist.ReduceOp.MAX if rank else dist.ReduceOp.SUM)

    def root(rank: int, _: int) -> None:
        dist.broadcast(torch.ones(4), src=int(rank == 1))

    def call(rank: int, _: int) -> None:
        if rank == 1:
            dist.broadcast(torch.ones(4), src=0)
        else:
            dist.all_reduce(torch.ones(4))

    for body in (dtype, operation):
        words = "does not match", "group 0-3", "rank 0 calls", "; ranks 1-3 call"
        _all_say(_fail(body), errors.CollectiveMismatch, *words)
    for body in (root, call):
        words = "does not match", "group 0-3", "ranks 0,2-3 call", "; rank 1 calls"
        _all_say(_fail(body), errors.CollectiveMismatch, *words)


def test_a_call_says_its_axis_and_the_layer_whose_activations_it_moves() -> None:
    def body(rank: int, _: int) -> None:
        mesh = Mesh({"replicate": 2, "tensor": 2})
        groups = [mesh.subgroup(pair, axis="expert") for pair in ([0, 1], [2, 3])]
        group = groups[rank // 2]
        log = program_order.current()
        assert log is not None
        with log.step(0):
            log.unit("forward", "")
            log.unit("forward", "blocks.2")
            mesh.comm("replicate").all_reduce(torch.ones(2))
            if rank != 1:
                group.all_reduce(torch.ones(3))

    _, found = threads(body, 4, ledgers=True)
    assert "all_reduce(sum, float32[3]) of axis expert, layer blocks.2" in str(found[0])


def test_a_layer_is_said_while_it_computes() -> None:
    log = program_order.RankLog()
    with log.step(0):
        log.unit("forward", "")
        assert log.layer == ""
        log.unit("forward", "blocks.0")
        assert log.layer == "blocks.0"
        log.unit_ended()
        assert log.layer == ""
        log.unit("backward", "blocks.0")
        log.unit("forward", "blocks.0")
        log.unit_ended()
        assert log.layer == "blocks.0"
        with log.observe("gradients_final"):
            assert log.layer == ""
        assert log.layer == ""


def test_a_mismatch_that_cannot_complete() -> None:
    """Rank 2 never comes, or waits elsewhere: the mismatch of the others is still the cause."""

    def ended(rank: int, _: int) -> None:
        if rank == 2:
            time.sleep(0.1)  # else rank 0 may learn of the end before rank 1 differs
        else:
            dist.all_reduce(torch.ones(4 + rank))

    def elsewhere(rank: int, _: int) -> None:
        if rank == 2:
            dist.recv(torch.ones(1), 0)
        dist.all_reduce(torch.ones(4 + rank))

    for body in (ended, elsewhere):
        _all_say(_fail(body, 3)[:2], errors.CollectiveMismatch, "rank 2 has not made the call yet")


def test_uneven_parts() -> None:
    def gather(rank: int, world: int) -> None:
        dist.all_gather_into_tensor(torch.empty(2 * world), torch.ones(2 + (rank == 1)))

    def scatter(rank: int, world: int) -> None:
        parts = [torch.ones(2 + (rank == 1)) for _ in range(world)]
        dist.reduce_scatter(torch.empty(2 + (rank == 1)), parts)

    found = _fail(gather)  # rank 1 sees by itself that what it gives has no room
    own = found.pop(1)
    assert isinstance(own, ValueError) and "this rank's 3 elements do not fit its part of 2" in str(
        own
    )
    _all_say(found, errors.RankFailed, f"rank 1 raised ValueError: {own}")
    _all_say(_fail(scatter), errors.CollectiveMismatch, "rank 1")


def test_message_of_another_size() -> None:
    def body(rank: int, _: int) -> None:
        if rank == 0:
            dist.send(torch.ones(4), 1)
        elif rank == 1:
            dist.recv(torch.ones(5), 0)

    found = _fail(body)
    assert isinstance(found[0], errors.CollectiveMismatch)
    assert "rank 0 calls send(to 1, float32[4]), but rank 1 calls recv" in str(found[0])


def test_a_rank_raises() -> None:
    def body(rank: int, _: int) -> None:
        if rank == 2:
            raise ValueError("the reason")
        dist.all_reduce(torch.ones(4))

    found = _fail(body)
    assert str(found.pop(2)) == "the reason"
    _all_say(found, errors.RankFailed, "rank 2 raised ValueError: the reason")
    assert all(isinstance(e, errors.RankFailed) and e.rank == 2 for e in found)


def test_a_rank_raises_inside_ddp() -> None:
    def body(rank: int, _: int) -> None:
        built = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        wrapped = DistributedDataParallel(built, bucket_cap_mb=1e-5)
        if rank == 1:
            built[0].weight.register_hook(lambda gradient: 1 / 0)
        wrapped(torch.ones(2, 4)).sum().backward()

    found = _fail(body)
    assert isinstance(found.pop(1), ZeroDivisionError)
    _all_say(found, errors.RankFailed, "rank 1 raised ZeroDivisionError")


def test_a_rank_returns_early() -> None:
    found = _fail(lambda rank, _: None if rank == 3 else dist.all_reduce(torch.ones(4)))
    assert found.pop() is None
    _all_say(found, errors.RankEnded, "rank 3 ended without joining all_reduce(sum, float32[4])")


def test_a_rank_makes_fewer_steps_with_ddp() -> None:
    def body(rank: int, _: int) -> None:
        wrapped = DistributedDataParallel(nn.Linear(4, 4))
        for _ in range(2 if rank == 0 else 3):
            wrapped(torch.ones(2, 4)).sum().backward()

    found = _fail(body, world=2)
    assert found[0] is None
    assert isinstance(found[1], errors.RankEnded)


def test_receive_while_others_reduce() -> None:
    def body(rank: int, _: int) -> None:
        if rank == 0:
            dist.recv(torch.ones(4), 1)
        dist.all_reduce(torch.ones(4))

    _all_say(
        _fail(body),
        errors.Deadlock,
        "rank 0 waits in recv(from 1, float32[4])",
        "ranks 1-3 wait in all_reduce(sum, float32[4]) of group 0-3, its call 0 for rank 0",
    )


def test_head_to_head_sends() -> None:
    def body(rank: int, _: int) -> None:
        dist.send(torch.ones(4), 1 - rank)
        dist.recv(torch.ones(4), 1 - rank)

    _all_say(_fail(body, world=2), errors.Deadlock, "rank 0 waits in send(to 1", "for rank 1")


def test_groups_in_different_order() -> None:
    def body(rank: int, _: int) -> None:
        first, second = dist.new_group(), dist.new_group()
        for group in (first, second) if rank else (second, first):
            dist.all_reduce(torch.ones(1), group=group)

    _all_say(_fail(body, world=3), errors.Deadlock, "ranks 1-2 wait in")


def test_nobody_is_left_to_send() -> None:
    def body(rank: int, _: int) -> None:
        if rank == 0:
            dist.recv(torch.ones(1))

    found = _fail(body, world=3)
    _all_say(found[:1], errors.Deadlock, "from any rank", "ranks 1-2 have ended")


def test_a_rank_dies_before_new_group() -> None:
    def body(rank: int, _: int) -> None:
        if rank == 0:
            raise KeyError("gone")
        dist.all_reduce(torch.ones(1), group=dist.new_group())

    found = _fail(body)
    assert isinstance(found.pop(0), KeyError)
    _all_say(found, errors.RankFailed, "rank 0 raised KeyError")


def test_a_rank_is_late() -> None:
    def body(rank: int, _: int) -> None:
        if rank == 0:
            time.sleep(0.6)
        dist.all_reduce(torch.ones(1))

    found = _fail(body, world=3, hub=Hub(3, 0.2))
    _all_say(found, errors.PeerTimeout, "no answer from rank 0 in 0.2 s")


def test_a_rank_that_waits_late_does_not_hold_on_to_the_tensors_of_others() -> None:
    """What one rank has let go is free, wherever the others are in their programs."""
    gone: list[bool] = []
    ready = threading.Barrier(2)

    def body(rank: int, _: int) -> None:
        tensor = torch.ones(4)
        storage = weakref.ref(tensor.untyped_storage())
        work = dist.all_reduce(tensor, async_op=True)
        ready.wait(10)
        if rank == 0:
            work.wait()
            del work, tensor
            gone.append(storage() is None)
        ready.wait(10)
        if rank == 1:
            work.wait()

    for delay in (False, True):
        succeed(body, 2, hub=Hub(2, 20.0, delay=delay))
    assert gone == [True, True]


def test_a_world_of_no_ranks_and_an_unknown_backend_are_refused() -> None:
    with pytest.raises(ValueError, match="at least one rank, not 0"):
        Hub(0, 1.0)
    with pytest.raises(ValueError, match="unknown backend 'glo'; known: in_memory, gloo"):
        joined.join("glo", Joining(0, 1, Path(), 1.0, False))
    with pytest.raises(ValueError, match=r"pass the same Hub\(2, \.\.\.\) to all ranks"):
        joined.join("in_memory", Joining(0, 2, Path(), 1.0, False, Hub(3, 1.0)))


# ---------------------------------------------------------------------------------- disturbances


@pytest.mark.parametrize("trait", ["late_results", "poisoned_buffers", "skewed_ranks"])
def test_correct_programs_do_not_notice_the_weather(trait: str) -> None:
    disturbances = disturbances_of(("tied", trait))
    for name in (*NEUTRAL, *STRICTER):
        succeed({**NEUTRAL, **STRICTER}[name], 3, disturbances=disturbances)


def test_a_call_has_no_success_before_it_is_over() -> None:
    started = threading.Barrier(2)

    def body(rank: int, _: int) -> tuple[bool, bool]:
        if rank == 1:
            started.wait(10)
        handle = dist.all_reduce(torch.ones(4), async_op=True)
        before = handle.is_success()
        if rank == 0:
            started.wait(10)
        handle.wait()
        return before, handle.is_success()

    assert succeed(body, 2)[0] == (False, True)


def test_a_missing_wait_shows_every_time() -> None:
    def body(rank: int, world: int) -> tuple[float, float]:
        tensor = data(rank, 1)
        handle = dist.all_reduce(tensor, async_op=True)
        dist.barrier()
        before = tensor.item()
        handle.wait()
        return before, tensor.item()

    total = sum(data(r, 1).item() for r in range(3))
    assert succeed(body, 3) == [(total, total)] * 3  # luck: the barrier came later
    late = succeed(body, 3, disturbances=Disturbances(delay=True))
    assert late == [(data(r, 1).item(), total) for r in range(3)]
    poisoned = succeed(body, 3, disturbances=Disturbances(poison=True))
    assert all(before != before and after == total for before, after in poisoned)


def test_no_weather_is_asked_for() -> None:
    assert disturbances_of(("tied", "frozen")) is None


# --------------------------------------------------------------------------- threads as ranks


def test_threads_leave_no_trace() -> None:
    import sys

    hook = sys.excepthook
    succeed(lambda rank, _: dist.get_rank(), 3)
    assert sys.excepthook is hook
    assert not dist.is_initialized()


def test_requests_can_be_changed_on_their_way() -> None:
    """The place for faults: here the third call of rank 1 sends zeros."""
    seen = []

    def transform(rank: int, request: Any) -> Any:
        if rank == 1:
            seen.append(request.text())
            if len(seen) == 3:
                request.inputs = [[torch.zeros_like(t) for t in item] for item in request.inputs]
        return request

    def body(rank: int, _: int) -> list[float]:
        group: Any = dist.group.WORLD
        group.transform = functools.partial(transform, rank)
        tensors = [torch.ones(1) for _ in range(3)]
        for tensor in tensors:
            dist.all_reduce(tensor)
        return [tensor.item() for tensor in tensors]

    found = succeed(body, 2)
    assert found == [[2.0, 2.0, 1.0]] * 2
    assert seen == ["all_reduce(sum, float32[1])"] * 3


def nothing_is_installed(rank: int, _: int, process: bool = False) -> None:
    dist.all_reduce(torch.ones(1))
    module = nn.Linear(2, 2)
    program_order.watch(module)
    assert traffic.current() is None
    assert program_order.current() is None
    assert not module._forward_pre_hooks
    assert not module._forward_hooks
    if process:
        assert type(dist.group.WORLD) is dist.ProcessGroup
        assert type(dist.new_group()) is dist.ProcessGroup
        assert dist.distributed_c10d.ProcessGroupGloo is dist.ProcessGroupGloo


def test_ledgers_off_installs_nothing(tmp_path: Path) -> None:
    succeed(nothing_is_installed, 2)
    processes(nothing_is_installed, 2, tmp_path, False, True)


def test_a_deadlock_of_many_ranks_is_told_briefly() -> None:
    """Ranks that wait alike are named together: 48 of them fill no screen."""

    def body(rank: int, _: int) -> None:
        if rank == 0:
            dist.recv(torch.ones(4), 1)
        dist.all_reduce(torch.ones(4))

    found = _fail(body, world=48)
    _all_say(found, errors.Deadlock, "ranks 1-47 wait in all_reduce")
    assert max(len(str(error)) for error in found) < 300
