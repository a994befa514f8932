"""The check of collectives: clean backends pass, a wrong call is named in one sentence."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from shardproof import registry
from shardproof.case import Case, WorkloadSpec
from shardproof.cases.kills import pair
from shardproof.cases.kinds.calls import buffers as call_buffers
from shardproof.cases.kinds.calls import check as collectives
from shardproof.cases.kinds.calls import large as large_call
from shardproof.cases.kinds.calls import workload as calls
from shardproof.cases.kinds.calls import wrong as wrong_calls
from shardproof.cases.runner import run_cases
from shardproof.comm import Call
from shardproof.contract import OptimizerSpec
from shardproof.evidence.records import ComparisonRow
from shardproof.verdicts import JUDGE_ERROR


def case(operation: str, backend: str, world: int, **knobs: Any) -> Case:
    layouts: dict[str, Any] = {} if operation == "barrier" else {"layouts": "dense"}
    if operation in ("send_recv", "batch"):  # what gloo makes of wrong messages is an xfail
        layouts |= {"mistakes": "self", "differs": "none"}
    return Case(
        id=f"calls[{operation}]::{backend}{world}",
        scenario="calls",
        implementation="pytorch/collectives",
        backend=backend,
        mesh={"replicate": world},
        workload=WorkloadSpec("calls", params={"operation": operation, **layouts, **knobs}),
        optimizer=OptimizerSpec(),
        lane="bitwise",
        checks=("collectives",),
        steps=0,
    )


def test_sound_backends_pass_at_every_world() -> None:
    operations = list(calls.OPERATIONS)
    asked = [
        case(operations[(world + 5 * turn) % len(operations)], backend, world, strength=1)
        for backend in ("in_memory", "gloo")
        for world in range(1, 6)
        for turn in range(2)
    ]
    asked = [
        c
        for c in asked
        if c.world > 1 or c.workload.params["operation"] not in ("send_recv", "batch")
    ]
    others = {"others": "undefined"}
    asked = [
        replace(c, workload=replace(c.workload, params={**c.workload.params, **others}))
        if c.workload.params["operation"] == "reduce"
        else c
        for c in asked
    ]
    results, _ = run_cases(asked, 2, lambda result: None)
    assert {r.id: r.verdict for r in results if r.verdict != "pass"} == {}
    assert {r.reason for r in results} == {"judged: collectives"}


@pytest.mark.parametrize("backend", ["in_memory", "gloo"])
def test_algorithms_are_tried_on_every_dtype_layout_and_reduce_operation(backend: str) -> None:
    system = registry.load("reference/algorithms")
    options = {"all_reduce": "ring", "reduce_scatter": "ring", "all_gather": "ring"}
    offered = system.offers(options, backend, 3)
    assert list(offered) == ["broadcast", "all_reduce", "reduce_scatter", "all_gather"]
    for operation, taken in offered.items():
        factors = calls.factors_of(operation, 3, "all", taken)
        whole = calls.OPERATIONS[operation]
        assert {name: factors[name] for name in whole if name != "form"} == {
            name: list(values) for name, values in whole.items() if name != "form"
        }
        ways = {
            cell["differs"]
            for world in range(2, 6)
            for cell in wrong_calls.differing(operation, world, "one", taken)
        }
        assert ways == (set() if backend == "gloo" else {"dtype", "shape"})
    own = {"implementation": "reference/algorithms", "options": options}
    asked = [replace(case(name, backend, 3, strength=1, layouts="all"), **own) for name in offered]
    results, _ = run_cases(asked, 2, lambda result: None)
    assert {r.id: r.reason for r in results if r.verdict != "pass"} == {}


def decide(*rows: ComparisonRow) -> Any:
    return collectives.decide(SimpleNamespace(compared={"collectives": list(rows)}))  # type: ignore[arg-type]


def test_a_failure_names_the_first_wrong_call_and_counts_the_others() -> None:
    right = ComparisonRow(0, "gather", "gather", "rank 0", 0.0, 0.0)
    wrong = ComparisonRow(1, "gather", "gather, int32", "rank 1", 4.0, 0.0, problem="it is wrong")
    again = replace(wrong, step=2, problem="and again")
    outcome = decide(right, wrong, again)
    assert (outcome.status, outcome.message) == ("fail", "it is wrong (and 1 more of 3 calls)")
    assert outcome.worst is not None and outcome.worst.error == 4.0
    assert decide(right).status == "pass"
    assert decide().status == "skip"
    assert decide(right, ComparisonRow(1)).status == JUDGE_ERROR


def test_the_first_cause_is_told_and_not_what_follows_from_it() -> None:
    follows = ComparisonRow(3, problem="rank 0 raises RankEnded: rank 1 ended")
    cause = ComparisonRow(3, problem="rank 1 raises ValueError: no")
    records = [SimpleNamespace(calls=[follows]), SimpleNamespace(calls=[cause])]
    assert collectives.measure(SimpleNamespace(records=records)) == [cause]  # type: ignore[arg-type]


def test_ranks_that_differ_are_told_of_by_one_of_them_at_least() -> None:
    told = ComparisonRow(3, collectives.DIFFERS, "gather", "rank 1", 0.0, 0.0)
    silent = replace(told, owner="rank 0", error=1.0, problem="raised no error")
    records = [SimpleNamespace(calls=[silent]), SimpleNamespace(calls=[told])]
    assert collectives.measure(SimpleNamespace(records=records)) == [told]  # type: ignore[arg-type]
    assert collectives.measure(SimpleNamespace(records=records[:1])) == [silent]  # type: ignore[arg-type]
    assert ComparisonRow.from_dict(silent.to_dict()) == silent


def test_a_large_broadcast_shows_an_end_that_does_not_come_and_what_comes_shifted() -> None:
    count = large_call.BLOCK + 100
    right = large_call._block().repeat(2)[:count]

    def judged(fill: Any) -> tuple[int, str]:
        def perform(call: Call) -> list[Any]:
            fill(call.outputs[0])
            return []

        system = SimpleNamespace(perform=perform)
        return large_call.broadcast(system, None, rank=0, root=1, count=count)

    assert judged(lambda view: view.copy_(right)) == (0, "")
    wrong, sentence = judged(lambda view: view[:-9].copy_(right[:-9]))
    assert wrong == 9 and f"the result[{count - 9}]" in sentence and "is 254" in sentence
    assert judged(lambda view: view.copy_(right.roll(1 << 20)))[0]
    beyond = judged(lambda view: view.as_strided((count + 1,), (1,)).fill_(0))
    assert "memory beyond" in beyond[1]


@pytest.mark.parametrize("layout", calls.LAYOUTS)
@pytest.mark.parametrize("dtype", calls.DTYPES)
def test_what_is_written_beyond_a_tensor_and_what_is_wrong_in_it_shows(
    layout: str, dtype: str
) -> None:
    kind = call_buffers.dtype_of(dtype)
    shape = call_buffers.shape_of(layout)
    buffer = call_buffers.made("the result", kind, layout, shape)
    values = call_buffers.operand(kind, shape, 1, 0, None, 3)
    buffer.fill(None)
    buffer.expect(values)
    if values.numel():
        assert buffer.problem()[0]  # poison is no result
        buffer.view.copy_(values)
    assert buffer.problem() == (0, "")
    buffer.base[-1] = call_buffers.operand(kind, (1,), 2, 9, None, 3)[0]
    changed = bool((buffer.base[-1] != buffer.before[-1]).item())
    assert ("memory beyond the result" in buffer.problem()[1]) == changed
    buffer.base[-1] = buffer.before[-1]
    if values.numel():
        buffer.view.copy_(~values if kind == torch.bool else values + 1)
        assert buffer.problem()[1].startswith("the result")


@pytest.mark.parametrize("dtype", calls.DTYPES)
@pytest.mark.parametrize("size", range(1, 6))
def test_answers_are_exact_in_any_order(dtype: str, size: int) -> None:
    kind = call_buffers.dtype_of(dtype)
    for reduce in calls.REDUCTIONS:
        if not calls.reducible(dtype, reduce):
            continue
        values = [call_buffers.operand(kind, (40,), m, 0, reduce, size) for m in range(size)]
        expected = call_buffers.reduced(reduce, values)
        for order in (values, values[::-1]):
            total = order[0].clone()
            for value in order[1:]:
                total = {
                    "product": torch.mul,
                    "min": torch.minimum,
                    "max": torch.maximum,
                    "band": torch.bitwise_and,
                    "bor": torch.bitwise_or,
                    "bxor": torch.bitwise_xor,
                }.get(reduce, torch.add)(total, value)
            total = total / size if reduce == "avg" else total
            assert torch.equal(total.to(kind), expected), (reduce, dtype)


@pytest.mark.parametrize(("dtype", "narrow"), [("int64", torch.float64), ("int32", torch.float32)])
@pytest.mark.parametrize("size", range(1, 6))
def test_no_floating_point_number_holds_what_integers_give(
    dtype: str, narrow: torch.dtype, size: int
) -> None:
    kind = call_buffers.dtype_of(dtype)
    values = [call_buffers.operand(kind, (40,), m, 0, "sum", size) for m in range(size)]
    rounded = sum(value.to(narrow) for value in values)
    assert not torch.equal(torch.as_tensor(rounded).to(kind), call_buffers.reduced("sum", values))
    copied = call_buffers.operand(kind, (40,), 0, 0, None, size)
    assert not torch.equal(copied.to(narrow).to(kind), copied)


def test_each_fault_of_a_backend_is_declared_for_this_check() -> None:
    faults = [registry.load_mutant(name) for name in registry.mutant_names()]
    planted = [fault for fault in faults if fault.parent == "pytorch/collectives"]
    assert len(planted) >= 16
    for fault in planted:
        assert fault.killed_by == ("collectives",)
        assert pair(fault).case.checks == ("collectives",)
