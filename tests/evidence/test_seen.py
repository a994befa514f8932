"""Events that records tell: each occurs where it should, and nowhere else."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from types import SimpleNamespace
from typing import Any

import pytest
from made_case import made_case

from shardproof.cases.kinds.calls.workload import described
from shardproof.contract import OptimizerSpec
from shardproof.evidence import seen
from shardproof.evidence.records import ComparisonRow, StepRecord
from shardproof.ledgers.traffic import LoggedCall


def call(issued: int = 0, waited: int | None = 1, **more: Any) -> LoggedCall:
    given: dict[str, Any] = {
        "sequence": 0,
        "operation": "all_reduce",
        "group": (0, 1),
        "axis": "replicate",
        "dtype": "float64",
        "payload_bytes": 8,
        "logical_bytes": Fraction(8),
        "phase": "backward",
        "inside_backward": False,
        "units_before": 0,
    }
    return LoggedCall(**{**given, **more}, issued=issued, waited=waited)


def figures(*ranks: Sequence[Sequence[LoggedCall]], steps: dict[str, Any] | None = None) -> Any:
    """The calls of each step of each rank; ``steps``: fields of every step."""
    records = []
    for number, of_steps in enumerate(ranks):
        made, traffic = [], list[LoggedCall]()
        for step, calls in enumerate(of_steps):
            span = len(traffic), len(traffic) + len(calls)
            traffic += calls
            fields = {"share": number, "loss": 0.0, "norm": 1.0, "windows": (2,), **(steps or {})}
            made.append(StepRecord(step, **fields, calls=span))
        record = SimpleNamespace(steps=made, traffic=traffic, events=[], actions=[])
        record.calls_of = lambda step, m=made, t=traffic: t[slice(*m[step].calls)]
        records.append(record)
    clip = OptimizerSpec(name="sgd", clip_norm=0.5)
    case = made_case("reference/ddp", {"replicate": len(ranks)}, optimizer=clip, steps=2)
    return SimpleNamespace(case=case, records=records)


USUAL = {"gradients that are clipped"}


def test_usual_calls_are_no_events() -> None:
    assert {*seen.of(figures([[call()]], [[call()]]))} == USUAL


@pytest.mark.parametrize(
    ("event", "calls"),
    [
        ("a call of a strided tensor", [call(strided=True)]),
        ("a collective without elements", [call(payload_bytes=0)]),
        ("a call of integers", [call(floating=False)]),
        ("a call in a narrow dtype", [call(dtype="bfloat16")]),
        ("a call of one rank alone", [call(), call(2, 3, group=(0,))]),
        ("a message between two ranks", [call(operation="send", peer=1)]),
        ("a call inside of backward", [call(inside_backward=True)]),
        ("a call that nobody waited for", [call(0, None)]),
        ("two calls in flight", [call(0, 2), call(1, 3)]),
        ("a step that sends nothing", []),
    ],
)
def test_a_call_is_an_event(event: str, calls: list[LoggedCall]) -> None:
    assert {*seen.of(figures([calls], [calls]))} == {*USUAL, event}


def test_calls_of_no_step_are_none() -> None:
    setup = call(strided=True, phase="setup")
    assert "a call of a strided tensor" not in seen.of(figures([[setup]], [[setup]]))


def test_events_of_several_calls_ranks_and_steps() -> None:
    other = [call(0, 3), call(1, 2)]
    assert "calls waited for in another order" in seen.of(figures([other], [other]))
    assert "ranks that make different calls" in seen.of(figures([[call()]], [[call(), call(2, 3)]]))
    some = figures([[call()]], [[call()]], [[call()]])
    assert "a call of some of the ranks" in seen.of(some)
    small, large = (call(inside_backward=True, payload_bytes=size) for size in (8, 16))
    rank = [[small, large], [large, small]]
    assert "buckets cut anew in a later step" in seen.of(figures(rank, rank))
    rank = [[small, large], [small, large]]
    assert "buckets cut anew in a later step" not in seen.of(figures(rank, rank))


@pytest.mark.parametrize(
    ("event", "fields"),
    [
        ("a window without micro-batches", {"windows": (2, 0)}),
        ("a step that is skipped", {"metrics": {"skipped": 1.0}}),
        ("members that change", {"present": False}),
        ("a step taken again", {"attempt": "died"}),
        (
            "a parameter without a gradient",
            {
                "held": {
                    "gradients_final": {"gradients": {"a": 1}},
                    "after_update": {"parameters": {"a": 1, "b": 1}},
                }
            },
        ),
    ],
)
def test_what_a_step_tells_is_an_event(event: str, fields: dict[str, Any]) -> None:
    found = seen.of(figures([[call()]], [[call()]], steps=fields))
    assert {*found} == {*USUAL, event}


def test_a_norm_is_held_against_the_clip() -> None:
    found = seen.of(figures([[call()]], [[call()]], steps={"norm": 0.25}))
    assert found == ("gradients below the clip",)


def test_events_of_units_and_stages() -> None:
    one = figures([[call()]], [[call()]])
    one.records[0].events.append((0, "recompute", "blocks.0"))
    one.records[1].actions.append(SimpleNamespace(op="W"))
    found = {*seen.of(one)} - USUAL
    assert found == {"a unit that is computed again", "a weight gradient by itself"}


@pytest.mark.parametrize(
    ("layouts", "found"),
    [
        (["contiguous"], ()),
        (["strided"], ("a call of a strided tensor",)),
        (["empty", "strided"], ("a call of a strided tensor", "a collective without elements")),
    ],
)
def test_what_trains_nothing_has_the_events_of_the_calls_that_it_makes(
    layouts: list[str], found: tuple[str, ...]
) -> None:
    one = figures([[call(strided=True)]], [[call()]])
    one.case = made_case("reference/ddp", {"replicate": 2}, steps=0)
    for record in one.records:
        record.calls = [
            ComparisonRow(
                0, "all_reduce", described({"operation": "all_reduce", "form": "tensor"} | cell)
            )
            for cell in ({"dtype": "float32", "layout": layout} for layout in layouts)
        ]
    assert seen.of(one) == found
