"""The time of a simulated step: operators, calls, overlap and pipelines, against hand counts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from fractions import Fraction
from typing import Any

import pytest
import torch
from torch import Tensor

from shardproof.contract import OptimizerSpec
from shardproof.costs import shapes
from shardproof.costs.shapes import BatchSize, Shape
from shardproof.ledgers.memory.log import MemoryLog
from shardproof.ledgers.program_order import Done, RankLog
from shardproof.ledgers.traffic import LoggedCall
from shardproof.schedules import Action, Schedule, with_messages
from shardproof.simulate import machines, work
from shardproof.simulate.fakes.known import known_integers
from shardproof.simulate.machines import Link
from shardproof.simulate.rank import SimulatedRank, simulate
from shardproof.simulate.seconds import call_seconds, message_seconds, step_seconds
from shardproof.simulate.sources import ShapeSource
from shardproof.simulate.work import Operator, Work, WorkLedger

#: Round figures: 1 TFLOP/s, 100 GB/s of memory, links of 10 and 1 GB/s, hops of 1 and 10 us.
ROUND = replace(
    machines.machine("h100"), flops={"float32": 1e12}, matrix_share=1.0, attention_share=0.5,
    bandwidth=1e11, bandwidth_share=1.0, gap=0.0, node=8, intra=Link(1e10, 1e-6),
    inter=Link(1e9, 1e-5), call=0.0)  # fmt: skip


# ------------------------------------------------------------------------------------- operators


@contextmanager
def noting() -> Iterator[WorkLedger]:
    """A ledger that notes operators of fakes."""
    log = RankLog()
    with known_integers(), WorkLedger(log) as ledger, work.noted_by(ledger):
        ledger.noting = True
        with log.step(0):
            yield ledger


def noted(run: Callable[..., Any], *sizes: Sequence[int]) -> Work:
    """The operators of ``run`` on tensors of ``sizes``, which are there before."""
    with noting() as ledger:
        ledger.noting = False
        given = [torch.empty(*size) for size in sizes]
        ledger.noting = True
        kept = run(*given)
        done = ledger.finish()
        del kept
    return done


def test_a_product_has_the_flops_and_the_bytes_of_its_three_matrices() -> None:
    (one,) = noted(torch.mm, (8, 16), (16, 4)).eager
    assert one.flops == 2 * 8 * 16 * 4
    assert one.size == 4 * (8 * 16 + 16 * 4 + 8 * 4)
    assert (one.dtype, one.phase, one.is_attention) == ("float32", "forward", False)


@pytest.mark.parametrize(
    ("run", "elements"),
    [
        (lambda a, b: a + b, 3),
        (lambda a, b: a.add_(b), 3),
        (lambda a, b: a.copy_(b), 2),
        (lambda a, b: a.zero_(), 1),
        (lambda a, b: torch.zeros_like(a), 1),
        (lambda a, b: torch.empty_like(a), 0),
        (lambda a, b: a.view(-1), 0),
        (lambda a, b: a * a, 2),
        # A row that is repeated is read once.
        (lambda a, b: a + b[:1].expand(100, 10), 2.01),
        (lambda a, b: torch._foreach_add_([a, b], 1.0), 4),
        # Some rows of a table: as many are read as are written.
        (lambda a, b: torch.nn.functional.embedding(torch.zeros(10, dtype=torch.int64), a), 0.22),
    ],
)
def test_bytes_of_other_operators(run: Callable[..., Any], elements: float) -> None:
    """Tensors have 1,000 elements; zeros of int64 are made and read: 2 x 80 bytes."""
    numbers = 2 * 80 if elements == 0.22 else 0
    rows = 200 * 4 if numbers else round(elements * 4000)
    assert sum(one.size for one in noted(run, (100, 10), (100, 10)).eager) == rows + numbers


def test_fused_operators_read_what_was_there_and_write_what_stays() -> None:
    def run(a: Tensor, b: Tensor) -> Tensor:
        return ((a + b).relu() * 2 + b).mul(3)

    made = noted(run, (100, 10), (100, 10))
    assert (
        len(made.eager) == 5 and sum(one.size for one in made.eager) == (3 + 2 + 2 + 3 + 2) * 4000
    )
    (one,) = made.fused
    assert one.size == 3 * 4000


def test_a_product_ends_a_run_of_fused_operators() -> None:
    made = noted(lambda a, b: (a.relu() @ b.relu()).relu(), (8, 8), (8, 8))
    assert [bool(one.flops) for one in made.fused] == [False, True, False]
    # The first run writes both factors; the last one frees nothing that it reads.
    assert [one.size for one in made.fused] == [4 * 256, 3 * 256, 2 * 256]


def test_causal_attention_counts_half_of_the_scores() -> None:
    """2 samples, 4 heads, 16 rows of 8 take 2 products in forward and 5 in backward."""
    with noting() as ledger:
        query, key, value = (torch.empty(2, 4, 16, 8) for _ in range(3))
        work.attention(query, key, value, backward=False)
        work.attention(query, key, value, backward=True)
        made = [one for one in ledger.finish().eager if one.is_attention]
    scores = 2 * 4 * 16 * 16
    assert [one.flops for one in made] == [2 * scores * 8 * 2 / 2, 2 * scores * 8 * 5 / 2]
    assert ROUND.seconds(made[0].flops, 0, "float32", True) == made[0].flops / 5e11


def test_attention_of_torch_counts_as_the_one_of_a_shape() -> None:
    """The kernel of scaled_dot_product_attention, causal or not."""
    attend = torch.nn.functional.scaled_dot_product_attention
    found = [
        sum(one.flops for one in noted(run, *[(2, 4, 16, 8)] * 3).eager)
        for run in (attend, lambda q, k, v: attend(q, k, v, is_causal=True))
    ]
    assert found[0] == 2 * found[1] == 2 * 2 * (2 * 4 * 16 * 16) * 8


# ----------------------------------------------------------------------------------------- calls


def test_calls_inside_a_node_by_hand() -> None:
    """Four ranks at 10 GB/s and 1 us a hop."""
    four, size = (0, 1, 2, 3), 4e9
    half = 3 * 1e-6 + 3 / 4 * size / 1e10
    assert call_seconds("all_gather", size, four, ROUND) == pytest.approx(half)
    assert call_seconds("reduce_scatter", size, four, ROUND) == pytest.approx(half)
    ring = 6 * 1e-6 + 2 * 3 / 4 * size / 1e10
    assert call_seconds("all_reduce", size, four, ROUND) == pytest.approx(ring)
    assert call_seconds("all_to_all", size, four, ROUND) == pytest.approx(3e-6 + size / 1e10)
    assert call_seconds("all_reduce", size, (3,), ROUND) == 0.0
    assert message_seconds(1e9, 0, 7, ROUND) == pytest.approx(1e-6 + 0.1)
    assert message_seconds(1e9, 7, 8, ROUND) == pytest.approx(1e-5 + 1.0)
    fixed = replace(ROUND, call=1e-3)
    assert call_seconds("all_gather", size, four, fixed) == pytest.approx(1e-3 + half)


def test_calls_between_nodes_leave_each_node_over_all_its_links() -> None:
    """16 ranks on two nodes of eight: eight links of 1 GB/s are faster than one of 10 within."""
    group, size = range(16), 16e9
    hops = 14 * 1e-6 + 1e-5
    gather = call_seconds("all_gather", size, group, ROUND)
    assert gather == pytest.approx(hops + 15 / 16 * size / 8e9)
    # One rank of each of 16 nodes: a link each.
    apart = call_seconds("all_gather", size, range(0, 128, 8), ROUND)
    assert apart == pytest.approx(15 * 1e-5 + 15 / 16 * size / 1e9)
    # Half of a rank's parts go out of its node, through its own link.
    shuffle = call_seconds("all_to_all", 15e9, group, ROUND)
    assert shuffle == pytest.approx(7e-6 + 8e-5 + 8.0)


def test_a_small_all_reduce_of_many_nodes_goes_down_a_tree() -> None:
    """An all-reduce of 0 bytes takes 2 lg 64 hops between nodes, not 126."""
    group = range(0, 512, 8)
    assert call_seconds("all_reduce", 0, group, ROUND) == pytest.approx(2 * 6 * 1e-5)
    assert call_seconds("barrier", 0, group, ROUND) == pytest.approx(2 * 6 * 1e-5)


# --------------------------------------------------------------------------------------- overlap


def call(issued: int, waited: int | None, size: float, operation: str = "all_gather",
         group: tuple[int, ...] = (0, 1), peer: int | None = None) -> LoggedCall:  # fmt: skip
    return LoggedCall(0, operation, group, "", "float32", int(size), Fraction(0), "forward", False,
                      0, issued, waited, peer=peer)  # fmt: skip


def rank(operators: Sequence[Operator], calls: Sequence[LoggedCall] = (), **more: Any) -> Any:
    made = Work([*operators], [*operators])
    return SimulatedRank(0, MemoryLog(), [[*calls]], made, tokens=100, **more)


def second(at: int, seconds: float = 1.0) -> Operator:
    return Operator(at, "forward", seconds * 1e12, 0, "float32")


#: A gather of two ranks that takes a second and a hop.
SECOND = 2e10


@pytest.mark.parametrize(
    ("waited", "exposed"),
    [
        # Issued after the first of three operators, waited for at once, after one, after two.
        (2, 1.0), (3, 0.0), (4, 0.0), (None, 0.0),
    ],
)  # fmt: skip
def test_a_call_hides_behind_what_is_computed_before_its_wait(
    waited: int | None, exposed: float
) -> None:
    operators = [second(1), second(3), second(4)]
    found = step_seconds([rank(operators, [call(1, waited, SECOND)])], ROUND, {"shard": 2})
    hop = 1e-6
    assert found.compute == 3.0 and found.communication == pytest.approx(1.0 + hop)
    assert found.exposed == pytest.approx(exposed, abs=2 * hop)
    assert found.seconds == pytest.approx(3 + exposed, abs=2 * hop)
    assert found.least == 3.0 <= found.seconds and found.idle == 0.0


@pytest.mark.parametrize(("busy", "exposed"), [(0.0, 0.0), (0.25, 0.25), (1.0, 1.0)])
def test_no_compute_hides_the_share_of_a_call_that_the_computing_core_carries_out(
    busy: float, exposed: float
) -> None:
    operators = [second(1), second(3), second(4)]
    made = [rank(operators, [call(1, 4, SECOND)])]
    found = step_seconds(made, replace(ROUND, busy=busy), {"shard": 2})
    assert found.exposed == pytest.approx(exposed, abs=1e-5)
    assert found.seconds == pytest.approx(3 + exposed, abs=1e-5) and found.compute == 3.0


def test_a_call_takes_as_long_as_the_one_that_the_backend_carries_it_out_as() -> None:
    as_sum = replace(ROUND, carried_out={"reduce_scatter": "all_reduce"})
    whole = call_seconds("all_reduce", 1e9, range(4), ROUND)
    assert call_seconds("reduce_scatter", 1e9, range(4), as_sum) == whole
    assert call_seconds("reduce_scatter", 1e9, range(4), ROUND) == pytest.approx(whole / 2)


def test_calls_of_one_group_follow_each_other_and_those_of_two_do_not() -> None:
    for groups, exposed in ((((0, 1), (0, 1)), 1.0), (((0, 1), (0, 2)), 0.0)):
        calls = [call(n, 5 + n, SECOND, group=group) for n, group in enumerate(groups, 1)]
        found = step_seconds([rank([second(3)], calls)], ROUND, {"shard": 2})
        assert found.exposed == pytest.approx(exposed, abs=1e-5)
        assert found.communication == pytest.approx(2.0, abs=1e-5)


def test_a_call_that_nobody_waits_for_ends_before_the_step_does() -> None:
    found = step_seconds([rank([second(1)], [call(1, None, 3 * SECOND)])], ROUND, {"shard": 2})
    assert found.seconds == pytest.approx(4.0, abs=1e-5)
    assert found.least == pytest.approx(3.0, abs=1e-5)


def test_rates_of_a_step() -> None:
    """10 of 20 seconds in forward, at half of a peak of 1 TFLOP/s; backward computes it again."""
    halved = replace(ROUND, matrix_share=0.5)
    again = second(2)._replace(phase="backward", flops=1e13)
    found = step_seconds([rank([second(1, 5.0), again])], halved, {"replicate": 4, "tensor": 2})
    assert (found.seconds, found.flops, found.model_flops) == (30.0, 1.5e13, 1.5e13)
    assert found.share_of_peak == 0.5 and (found.world, found.tokens) == (8, 400)
    assert found.tokens_per_second == pytest.approx(400 / 30)


# ------------------------------------------------------------------------------------- pipelines


def one_forward_one_backward(ranks: int, micros: int) -> Schedule:
    """1F1B (Narayanan et al., 2021) with a computation of each direction."""
    orders = []
    for place in range(ranks):
        ahead = min(ranks - place - 1, micros)
        order = [Action("F", place, n) for n in range(ahead)]
        for n in range(micros - ahead):
            order += [Action("F", place, ahead + n), Action("BW", place, n)]
        order += [Action("BW", place, n) for n in range(micros - ahead, micros)]
        orders.append(tuple(order))
    return with_messages(Schedule("1f1b", micros, tuple(range(ranks)), tuple(orders)))


def stage(schedule: Schedule, place: int, forward: float, backward: float) -> SimulatedRank:
    operators, actions = [], []
    for n, action in enumerate(schedule.computed(place)):
        took = forward if action.op == "F" else backward
        operators.append(second(2 * n + 1, took))
        actions.append(Done(0, 0, *action, 2 * n, 2 * n + 1, 0, 0, 0))
    return rank(operators, actions=actions, place=place, schedule=schedule)


@pytest.mark.parametrize(("ranks", "micros"), [(2, 4), (4, 8), (8, 8)])
def test_the_bubble_of_1f1b_is_that_of_the_paper(ranks: int, micros: int) -> None:
    """(p - 1) (F + B) of (m + p - 1) (F + B), whichever stages are simulated."""
    schedule = one_forward_one_backward(ranks, micros)
    for places in (range(ranks), (0, 1, ranks - 1), (0,)):
        made = [stage(schedule, place, 1.0, 2.0) for place in places]
        found = step_seconds(made, ROUND, {"pipe": ranks})
        assert found.seconds == pytest.approx(3.0 * (micros + ranks - 1))
        assert found.compute == pytest.approx(3.0 * micros)
        assert found.bubble == pytest.approx((ranks - 1) / (micros + ranks - 1))


def test_a_slow_stage_sets_the_pace_of_all() -> None:
    """Its computations follow each other; before and after them the other stage works once."""
    schedule = one_forward_one_backward(2, 4)
    made = [stage(schedule, 0, 1.0, 2.0), stage(schedule, 1, 2.0, 4.0)]
    found = step_seconds(made, ROUND, {"pipe": 2})
    assert found.seconds == pytest.approx(1.0 + 4 * 6.0 + 2.0)


# ------------------------------------------------------------------------------------ real ranks

SMALL = Shape("small", layers=4, hidden=64, heads=4, vocab=128, seq=32, positions=32)


def source(implementation: str, mesh: dict[str, int], batch: int = 1) -> ShapeSource:
    adam = OptimizerSpec("adamw", momentum=0.0)
    return ShapeSource(SMALL, implementation, mesh, adam, work=BatchSize(batch, 32, 4))


def test_products_of_a_rank_are_six_flops_a_parameter_and_token() -> None:
    """6 FLOPs for each parameter in a product; attention takes 3.5 times its FLOPs of forward."""
    (made,) = simulate(source("reference/fsdp", {"shard": 2}), [0])
    products = sum(t.numel for t in shapes.tensors(SMALL, "") if "norm" not in t.name)
    products -= (SMALL.vocab + SMALL.positions) * SMALL.hidden  # embeddings look rows up
    tokens = 4 * SMALL.seq
    attention = SMALL.layers * 4 * 2 * SMALL.seq**2 * SMALL.hidden
    found = sum(one.flops for one in made.work.eager)
    assert found == 6 * products * tokens + 3.5 * attention
    assert made.tokens == tokens
    assert {one.phase for one in made.work.eager} == {"forward", "backward", "update"}


@pytest.mark.parametrize("implementation", ["reference/fsdp", "pytorch/fsdp2", "reference/ddp"])
def test_time_grows_with_work_and_with_slower_machines(implementation: str) -> None:
    axis = "replicate" if implementation.endswith("ddp") else "shard"
    few, more = (simulate(source(implementation, {axis: 16}, batch), [0]) for batch in (1, 8))
    mesh, h100 = {axis: 16}, machines.machine("h100")
    usual = step_seconds(few, h100, mesh)
    assert usual.least <= usual.seconds == pytest.approx(usual.compute + usual.exposed)
    assert step_seconds(more, h100, mesh).seconds > usual.seconds
    assert step_seconds(few, h100, mesh, "fused").seconds < usual.seconds
    assert step_seconds(few, machines.machine("a100"), mesh).seconds > usual.seconds
    assert step_seconds(few, h100.with_nodes(2), mesh).seconds > usual.seconds


def test_functional_collectives_are_waited_for() -> None:
    """Tensor parallelism by DTensor waits for each call, and none is hidden."""
    (made,) = simulate(source("pytorch/tensor_parallel", {"tensor": 4}), [0])
    calls = [one for one in made.calls[-1] if one.floating and one.phase != "observe"]
    assert calls and all(one.waited is not None for one in calls)
    found = step_seconds([made], machines.machine("h100"), {"tensor": 4})
    assert 0.0 < found.exposed <= found.communication


def test_a_pipeline_waits_and_ends_with_its_slowest_rank() -> None:
    given = source("reference/pipeline", {"pipe": 4})
    made = simulate(given, range(4))
    found = step_seconds(made, machines.machine("h100"), given.axes)
    assert found.idle > 0.0 and 0.2 < found.bubble < 0.8 and not found.unknown
    alone = [step_seconds([replace(one, schedule=None)], machines.machine("h100"), given.axes)
             for one in made]  # fmt: skip
    assert found.seconds > max(one.seconds for one in alone)
    assert all(one.unknown.startswith("no schedule is announced") for one in alone)
    assert max(one.flops for one in alone) == alone[-1].flops  # it has the head
