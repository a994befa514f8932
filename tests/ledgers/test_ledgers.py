"""The traffic ledger and the program-order log, on threads and processes, C++ calls included."""

from __future__ import annotations

import threading
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from local_ranks import processes, succeed
from neutral_checks import data, inputs, model
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

from shardproof.comm import Mesh
from shardproof.ledgers import program_order, traffic
from shardproof.ledgers.program_order import PerRank
from shardproof.schedules import Action

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(params=["in_memory", "gloo"])
def run(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[..., list[Any]]:
    """Run a module's function with ledgers on; arguments and result must be JSON."""

    def launch(body: Callable[..., Any], world: int, *arguments: Any) -> list[Any]:
        if request.param == "in_memory":
            return succeed(lambda rank, n: body(rank, n, *arguments), world, ledgers=True)
        return processes(body, world, tmp_path, True, *arguments)

    return launch


def log() -> program_order.RankLog:
    found = program_order.current()
    assert found is not None
    return found


def ledger() -> traffic.TrafficLedger:
    found = traffic.current()
    assert found is not None
    return found


def total(records: list[list[dict[str, Any]]], **wanted: Any) -> Fraction:
    """Logical bytes over all ranks of the calls that have the ``wanted`` values."""
    return sum(
        (
            Fraction(call["logical_bytes"])
            for calls in records
            for call in calls
            if all(call[key] == value for key, value in wanted.items())
        ),
        Fraction(0),
    )


def one_of_each(rank: int, n: int) -> Any:
    one, full = data(rank, 6), data(rank, 6 * n)
    dist.all_reduce(one)
    dist.all_gather_into_tensor(full, one)
    dist.reduce_scatter_tensor(one, full)
    dist.broadcast(one, n - 1)
    dist.reduce(one, 0)
    dist.gather(one, [torch.empty_like(one) for _ in range(n)] if rank == 0 else None)
    dist.scatter(one, [data(r, 6) for r in range(n)] if rank == 0 else None)
    dist.all_to_all_single(full.clone(), full)
    if n > 1 and rank == 0:
        dist.send(one, 1)
    if n > 1 and rank == 1:
        dist.recv(one, 0)
    dist.barrier()
    return [call.to_dict() for call in ledger().calls]


@pytest.mark.parametrize("world", [1, 2, 3, 5])
def test_each_collective_sends_what_the_model_says(run: Any, world: int) -> None:
    records, size = run(one_of_each, world), 6 * 8
    expected = {
        "all_reduce": 2 * (world - 1) * size,
        "all_gather": (world - 1) * world * size,
        "reduce_scatter": (world - 1) * world * size,
        "broadcast": (world - 1) * size,
        "reduce": (world - 1) * size,
        "gather": (world - 1) * size,
        "scatter": (world - 1) * size,
        "all_to_all": (world - 1) * world * size,
        "send": size if world > 1 else 0,
        "recv": 0,
        "barrier": 0,
    }
    for operation, value in expected.items():
        assert total(records, operation=operation) == value, operation
    assert {call["phase"] for calls in records for call in calls} == {"setup"}
    # Symmetric collectives: every rank has the same share, an exact fraction.
    shares = {call["logical_bytes"] for calls in records for call in calls if call["sequence"] == 0}
    share = Fraction(2 * (world - 1) * size, world)
    assert shares == {f"{share.numerator}/{share.denominator}"}


def integers_for_all(rank: int, n: int) -> Any:
    comm = Mesh({"replicate": n}).comm("replicate")
    own, before = [rank, -rank, True], len(ledger().calls)
    agreed = [comm.agree(own, "max"), comm.agree(own, "min"), comm.agree(own, "sum")]
    agreed.append(comm.agree(own, "first", dtype=torch.int64))
    under_way = comm.begin_agreement(own, "sum")
    sent = [call.to_dict() for call in ledger().calls[before:]]
    return agreed, under_way.wait(), sent


def test_ranks_agree_on_integers_in_one_control_message_each(run: Any) -> None:
    for agreed, later, sent in run(integers_for_all, 3):
        assert agreed == [[2, 0, 1], [0, -2, 1], [3, -3, 3], [0, 0, 1]] and later == agreed[2]
        assert [call["operation"] for call in sent] == [
            *["all_reduce"] * 3,
            "broadcast",
            "all_reduce",
        ]
        assert [call["payload_bytes"] for call in sent] == [12, 12, 12, 24, 12]
        assert not any(call["floating"] for call in sent)
        # Who asks for a handle waits for it later; the others have the integers on return.
        assert [call["waited"] is None for call in sent] == [False] * 4 + [True]


def three_ddp_steps(rank: int, _: int) -> Any:
    built = model()
    program_order.watch(built, ["first", "inner", "last"])
    wrapped = DistributedDataParallel(built, bucket_cap_mb=1e-4)
    optimizer = torch.optim.SGD(built.parameters(), lr=0.1)
    bounds = []
    for step in range(3):
        first = len(ledger().calls)
        with log().step(step):
            x, y = inputs(rank, step)
            nn.functional.mse_loss(wrapped(x), y).backward()
            with log().observe("gradients_final"):
                dist.all_reduce(torch.ones(1000))
            optimizer.step()
        bounds.append((first, len(ledger().calls)))
    return {
        "calls": [call.to_dict() for call in ledger().calls],
        "bounds": bounds,
        "events": log().events,
    }


@pytest.mark.parametrize("world", [2, 3])
def test_native_ddp_sends_its_closed_form(run: Any, world: int) -> None:
    answers = run(three_ddp_steps, world)
    bytes_ = sum(p.numel() for p in model().parameters()) * 8
    for step in range(3):
        records = [a["calls"][slice(*a["bounds"][step])] for a in answers]
        assert total(records, floating=True, phase="backward") == 2 * (world - 1) * bytes_
        assert total(records, floating=True, phase="forward") == 0
        assert total(records, floating=True, phase="update") == 0
        assert total(records, phase="observe") == 2 * (world - 1) * 4000
    setup = [a["calls"] for a in answers]
    assert total(setup, operation="broadcast", phase="setup", floating=True) == (world - 1) * bytes_
    # Last step: buckets leave inside backward, before the last unit's, and are waited for after.
    for answer in answers:
        first, last = answer["bounds"][2]
        reductions = [
            call for call in answer["calls"][first:last] if call["operation"] == "all_reduce"
        ][:-1]
        starts = [n for n, kind, _ in answer["events"] if kind == "backward"]
        assert len(reductions) > 2
        assert all(call["inside_backward"] and call["axis"] == "world" for call in reductions)
        assert all(call["waited"] > starts[-1] > reductions[0]["issued"] for call in reductions)
        assert reductions[0]["units_before"] < reductions[-1]["units_before"]


def two_fsdp2_steps(rank: int, world: int, reshard: bool) -> Any:
    from torch.distributed.fsdp import fully_shard

    built = model()
    units = ["first", "inner", "last"]
    program_order.watch(built, units)
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("shard",))
    for name in units:
        fully_shard(built.get_submodule(name), mesh=mesh, reshard_after_forward=reshard)
    fully_shard(built, mesh=mesh, reshard_after_forward=reshard)
    for step in range(2):
        first = len(ledger().calls)
        with log().step(step):
            x, y = inputs(rank, step)
            nn.functional.mse_loss(built(x), y).backward()
    kinds = [[kind, name] for _, kind, name in log().events]
    return {"calls": [call.to_dict() for call in ledger().calls][first:], "events": kinds}


@pytest.mark.parametrize("reshard", [True, False])
def test_fsdp2_sends_its_closed_form(run: Any, reshard: bool) -> None:
    world = 2  # every first dimension but the last layer's 5 divides: that one is padded to 6
    answers = run(two_fsdp2_steps, world, reshard)
    units = [(6 + 1) * 8, (8 + 1) * 12 + (12 + 1) * 8, (8 + 1) * 6]
    padded = sum(units) * 8
    records = [a["calls"] for a in answers]
    gathers = 2 if reshard else 1
    assert total(records, operation="all_gather") == gathers * (world - 1) * padded
    assert total(records, operation="reduce_scatter") == (world - 1) * padded
    assert total(records) == (gathers + 1) * (world - 1) * padded
    phases_of_gathers = {c["phase"] for c in records[0] if c["operation"] == "all_gather"}
    assert phases_of_gathers == ({"forward", "backward"} if reshard else {"forward"})
    # Hooks outlive the class swap.
    seen = answers[0]["events"]
    assert ["forward", "inner"] in seen
    assert ["backward", "inner"] in seen


def calls_on_sub_groups(rank: int, world: int) -> Any:
    mesh = init_device_mesh("cpu", (1, world), mesh_dim_names=("replicate", "shard"))
    dist.all_reduce(torch.ones(3), group=mesh.get_group("replicate"))
    group = dist.new_group([0, 1])
    if rank < 2:
        dist.all_reduce(torch.ones(3), group=group)
    return [call.to_dict() for call in ledger().calls]


def test_sub_groups_are_logged_by_axis(run: Any) -> None:
    records = run(calls_on_sub_groups, 3)
    for call in (call for calls in records for call in calls):
        call["group"] = tuple(call["group"])
    assert total(records, group=(0, 1)) == 2 * 12
    assert {c["axis"] for c in records[2] if c["group"] == (2,)} == {"replicate"}


def waits_out_of_order(rank: int, world: int) -> Any:
    a, b, c = torch.ones(1), torch.ones(1), torch.ones(1)
    first = dist.all_reduce(a, async_op=True)
    second = dist.all_reduce(b, async_op=True)
    second.wait()
    first.wait()
    first.wait()
    never = dist.all_reduce(c, async_op=True)
    dist.barrier()
    numbers = [[call.issued, call.waited] for call in ledger().calls]
    never.wait()
    return numbers


def test_waits_are_numbered_in_program_order(run: Any) -> None:
    assert run(waits_out_of_order, 2) == [[[0, 3], [1, 2], [4, None], [5, 6]]] * 2


def functional_and_coalesced(rank: int, world: int) -> Any:
    import torch.distributed._functional_collectives as fc

    assert dist.group.WORLD is not None
    fc.all_gather_tensor(torch.ones(4), 0, dist.group.WORLD) + 0
    with dist.distributed_c10d._coalescing_manager():
        for k in range(3):
            dist.all_reduce(torch.ones(k + 1))
    dist.all_gather_object([None] * world, rank)
    return [call.to_dict() for call in ledger().calls]


def test_functional_and_coalesced_calls_are_logged(run: Any) -> None:
    records = run(functional_and_coalesced, 2)
    first, coalesced = records[0][:2]
    assert (first["operation"], first["payload_bytes"]) == ("all_gather", 32)
    assert first["waited"] is not None
    assert (coalesced["operation"], coalesced["payload_bytes"]) == ("all_reduce", 24)
    assert not any(call["floating"] for call in records[0][2:])


def test_recomputation_is_not_a_forward() -> None:
    from torch.utils.checkpoint import checkpoint

    def body(rank: int, _: int) -> list[str]:
        unit = nn.Linear(2, 2)
        program_order.watch(unit)
        with log().step(0):
            checkpoint(unit, torch.ones(1, 2), use_reentrant=False).sum().backward()
        return [kind for _, kind, _ in log().events]

    assert succeed(body, 1, ledgers=True) == [["step", "forward", "backward", "recompute"]]


@pytest.mark.parametrize("changed", [False, True])
def test_an_input_that_is_handed_on_is_computed_if_it_was_changed(changed: bool) -> None:
    class Into(nn.Linear):
        def forward(self, hidden: torch.Tensor) -> torch.Tensor:
            return hidden.add_(super().forward(hidden.clone())) if changed else hidden

    def body(rank: int, _: int) -> list[str]:
        unit = Into(2, 2)
        program_order.watch(unit)
        with log().step(0):
            unit(torch.ones(1, 2, requires_grad=True) * 1).sum().backward()
        return [kind for _, kind, _ in log().events]

    expected = ["step", "forward", *["backward"] * changed]
    assert succeed(body, 1, ledgers=True) == [expected]


def test_phases_follow_the_program() -> None:
    seen: list[str] = []

    def body(rank: int, _: int) -> None:
        built = nn.Linear(2, 2)
        program_order.watch(built)
        built.weight.register_hook(lambda gradient: seen.append(log().phase))
        seen.append(log().phase)
        for step in range(2):
            with log().step(step):
                loss = built(torch.ones(1, 2)).sum()
                seen.append(log().phase)
                loss.backward()
                seen.append(log().phase)
                with log().observe("gradients_final"):
                    seen.append(log().phase)
                seen.append(log().phase)
                with log().observe("after_update"):
                    seen.append(log().phase)
                seen.append(log().phase)
        seen.append(log().phase)

    succeed(body, 1, ledgers=True)
    step = ["forward", "backward", "backward", "observe", "update", "observe", "update"]
    assert seen == ["setup", *step, *step, "setup"]


def test_watching_an_unknown_unit_is_an_error() -> None:
    def body(rank: int, _: int) -> None:
        program_order.watch(nn.Linear(2, 2), ["nowhere"])

    with pytest.raises(AttributeError, match="nowhere"):
        succeed(body, 1, ledgers=True)


def test_an_operation_without_a_model_is_an_error() -> None:
    with pytest.raises(ValueError, match="no traffic model for 'teleport'"):
        traffic.share_sent("teleport", 2, 0, None, 8)


def test_traced_computations_set_the_phase_and_know_their_window() -> None:
    """What is computed outside of a step, an evaluation say, is not logged."""
    own = program_order.RankLog()
    with own.action(Action("F", 0, 0)):
        pass
    seen = []
    with own.step(3):
        for op, micro in (("F", 0), ("BW", 0), ("F", 0), ("F", 1)):
            with own.action(Action(op, 2, micro)):
                seen.append(own.phase)
                own.unit("forward", "b")
    assert [(d.step, d.window, d.op, d.stage, d.micro) for d in own.actions] == [
        (3, 0, "F", 2, 0),
        (3, 0, "BW", 2, 0),
        (3, 1, "F", 2, 0),
        (3, 0, "F", 2, 1),
    ]
    assert seen == ["forward", "backward", "forward", "forward"]
    units = [number for number, kind, _ in own.events if kind == "forward"]
    for done, unit in zip(own.actions, units, strict=True):
        assert done.begin < unit < done.end
        assert done.began <= done.ended
    with own.step(4):
        own._stage = "update"
        with own.action(Action("W", 2, 0)):
            assert own.phase == "update"
    assert own.actions[-1].window == 0


def test_a_computation_that_waits_has_no_core() -> None:
    own = program_order.RankLog()
    with own.step(0):
        with own.action(Action("F", 0, 0)):
            threading.Event().wait(0.05)
        with own.action(Action("BW", 0, 0)):
            torch.ones(300, 300) @ torch.ones(300, 300)
    waited, computed = own.actions
    assert 2 * waited.cpu < waited.ended - waited.began
    assert computed.cpu > 0


def test_a_value_of_the_process_replaces_that_of_the_thread_which_sets_it() -> None:
    value: PerRank[str] = PerRank()
    value.set("of a rank", process=False)
    value.set("of the process", process=True)
    assert value.get() == "of the process"
    value.set("of another rank", process=False)
    assert value.get() == "of another rank"
