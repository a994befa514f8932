"""Parameter servers: all orders of two workers and three steps, the bound, and what is refused."""

from __future__ import annotations

from itertools import combinations, islice

import pytest
import torch
from torch import Tensor

from shardproof.case import WorkloadSpec
from shardproof.contract import Event, OptimizerSpec, Refused
from shardproof.impls.reference.async_sgd import (
    Options,
    ReferenceAsyncSGD,
    Server,
    owned,
)
from shardproof.impls.reference.parts.messages import Message, unpack
from shardproof.impls.reference.parts.turns import Death, Turns, all_orders, in_turn
from shardproof.oracle.replay import behind, fed, replay, truth
from shardproof.oracle.training import train
from shardproof.workloads import make

STEPS = 3
#: Where the six turns of the first of two workers lie among twelve.
INTERLEAVINGS = [
    [0 if place in first else 1 for place in range(4 * STEPS)]
    for first in combinations(range(4 * STEPS), 2 * STEPS)
]


def served(script: list[int], bound: int, dies: Death | None = None) -> tuple[Server, list[int]]:
    """A server after ``script``; the pushes of the workers, each a number of its own."""
    owns = {"w": torch.nn.Parameter(torch.zeros(1, dtype=torch.float64))}
    spec = OptimizerSpec(lr=1.0, momentum=0.0)
    server = Server(owns, spec, 2, Options(bound, order=tuple(script), dies=dies))
    read: dict[int, int] = {}
    pushed: list[int] = []
    while turn := server.turns.next(STEPS - 1, is_over=True):
        if turn.is_push:
            number = -(10 ** (2 * turn.step + turn.worker))
            pushed.append(number)
            gradient = torch.tensor([float(number)], dtype=torch.float64)
            with torch.no_grad():
                server.take(turn, Message({"w": gradient}, read[turn.worker]))
        else:
            _, _, read[turn.worker] = unpack(server.answer(), owns)
            with torch.no_grad():
                server.settle(turn)
    return server, pushed


@pytest.mark.parametrize("bound", [0, 1, 2])
def test_all_924_interleavings_of_two_workers_and_three_steps(bound: int) -> None:
    assert len(INTERLEAVINGS) == 924
    lags = set()
    for script in INTERLEAVINGS:
        server, pushed = served(script, bound)
        assert server.owns["w"].item() == 111111, "an update was lost, or made twice"
        assert len(pushed) == len(server.log) == 2 * STEPS
        lags.add(behind(server.log))
        assert behind(server.log) <= bound, script
    assert lags == set(range(bound + 1)), "the bound is never reached"


@pytest.mark.parametrize("bound", [0, 1, 2])
@pytest.mark.parametrize("turns", range(2 * STEPS))
def test_who_dies_leaves_what_it_pushed_and_nobody_waits_for_it(turns: int, bound: int) -> None:
    """Worker 0 makes all of its steps, worker 1 half of its turns, rounded down."""
    want = 10101 + sum(10 ** (2 * step + 1) for step in range(turns // 2))
    for script in INTERLEAVINGS[::10]:
        server, _ = served(script, bound, Death(1, turns))
        assert server.owns["w"].item() == want, script
        assert behind(server.log) <= bound, script
        assert not server.kept


def test_the_judge_knows_whose_gradients_must_come() -> None:
    """One that is told for another's, or not at all, is no history."""
    assert fed({}, 3, 2) == [3, 3]
    assert fed({"dies": {"worker": 1, "turns": 3}}, 3, 2) == [3, 1]
    workload = make(WorkloadSpec("dyadic_mlp", params={"layers": 1}), "float64")
    events = [Event(0, 0, 0, 0), Event(1, 0, 1, 1), Event(2, 1, 0, 2)]
    assert truth(workload, OptimizerSpec(), [2, 1], events).problem is None
    found = truth(workload, OptimizerSpec(), [1, 2], events).problem
    assert found == "no reported update uses the gradient of worker 1 in step 1"
    assert "the system reported 3 updates, expected 4" in (
        truth(workload, OptimizerSpec(), [2, 2], events).problem or ""
    )


def test_workers_that_all_wait_are_an_error_and_no_endless_search() -> None:
    turns = Turns(in_turn(3, 0), 3, bound=0)
    turns.may = lambda worker: False  # type: ignore[method-assign]
    with pytest.raises(RuntimeError, match=r"every worker waits .*each worker: \[0, 0, 0\]"):
        turns.next(clock=0)
    alone = Turns(in_turn(2, 0), 2, bound=0, dies=Death(worker=1, turns=0))
    alone.may = lambda worker: False  # type: ignore[method-assign]
    with pytest.raises(RuntimeError, match="every worker waits"):
        alone.next(clock=0)


def test_the_order_of_all_orders_has_each_of_them_once_and_begins_again() -> None:
    turns = all_orders(2, bound=1)
    tried = [list(islice(turns, 4 * STEPS)) for _ in INTERLEAVINGS]
    assert sorted(tried) == sorted(INTERLEAVINGS)
    assert list(islice(turns, 4 * STEPS)) == tried[0]
    assert STEPS * len(tried) == 2772, "the steps of scenarios/conformance/local/async-orders.yaml"


@pytest.mark.parametrize("traits", [(), ("dropout_stateful",)])
def test_without_staleness_the_history_is_that_of_data_parallelism(traits: tuple[str, ...]) -> None:
    """Every order gives the updates of a step as one, by gradients of the step before; workers draw
    apart.
    """
    params = {"layers": 1, "width": 16, "seq": 8}
    workload = make(WorkloadSpec("charnames_gpt", traits=traits, params=params), "float64")
    spec = OptimizerSpec()
    server, _ = served([1, 0, 0, 1, 1, 1, 0, 0, 0, 1, 1, 0], 0)
    events = [type(e)(e.order, e.worker, e.step, e.version) for e in server.log]
    found = replay(workload, spec, 2, events)[-1]
    for name, want in train(workload, spec, 2, STEPS).steps[-1].parameters.items():
        torch.testing.assert_close(found[name], want, rtol=1e-12, atol=1e-13)


def test_one_gradient_that_is_held_back_is_stale_however_many_came_since() -> None:
    """Worker 0's step 0 comes last: nobody has seen it, and in step 5 that is 5 steps behind."""
    order = [(0, step) for step in range(1, 6)] + [(1, step) for step in range(6)] + [(0, 0)]
    events = [Event(n, worker, step, n) for n, (worker, step) in enumerate(order)]
    assert behind(events) == 5


def test_gradients_of_one_update_are_of_one_step() -> None:
    workload = make(WorkloadSpec("dyadic_mlp"), "float64")
    events = [Event(0, 0, 0, 0), Event(0, 1, 1, 0)]
    with pytest.raises(ValueError, match="is impossible"):
        replay(workload, OptimizerSpec(), 2, events)


def test_every_parameter_has_one_owner_and_every_server_some() -> None:
    tensors: dict[str, Tensor] = {
        name: torch.zeros(size) for name, size in zip("abcd", (9, 5, 4, 0), strict=True)
    }
    assert owned(tensors, 2) == [["a", "d"], ["b", "c"]]
    assert sorted(name for share in owned(tensors, 4) for name in share) == list("abcd")
    assert all(owned(tensors, 4))
    with pytest.raises(Refused, match="'servers' = 5: each server must hold at least 1 trainable"):
        owned(tensors, 5)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"max_staleness": -1}, "'max_staleness' must be at least 0, not -1"),
        ({"servers": 0}, "'servers' must be at least 1, not 0"),
        ({"order": "in_turn", "max_staleness": 1}, "set max_staleness to 0 or set order to 'slow'"),
        ({"order": "fast"}, "use in_turn, slow, burst"),
        ({"dies": {"worker": -1, "turns": 0}}, "'dies.worker' must be at least 0, not -1"),
    ],
)
def test_what_makes_no_sense_is_refused(options: dict[str, object], says: str) -> None:
    with pytest.raises(Refused, match=says):
        ReferenceAsyncSGD.capabilities(options)


def test_somebody_must_work() -> None:
    with pytest.raises(Refused, match="of 2 ranks, none remains as a worker"):
        ReferenceAsyncSGD.role(0, 2, {"servers": 2})
