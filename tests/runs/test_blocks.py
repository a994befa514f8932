"""Failures of one cause are one block, led by the simplest case."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from made_case import made_case

from shardproof.case import WorkloadSpec
from shardproof.checks import Outcome
from shardproof.checks.results import ALIKE, CaseResult
from shardproof.contract import OptimizerSpec
from shardproof.runs.blocks import blocks, cause, of_result

MINE = "mine:Mine"


def failed(number: int, reason: str, verdict: str = "fail", **fields: Any) -> CaseResult:
    """A red result of the class ``mine:Mine``; ``fields`` are those of its case."""
    world = fields.pop("world", 2)
    name = fields.pop("implementation", MINE)
    of = made_case(name, {"replicate": world}, **{"id": f"s::{name}::{number}", **fields})
    return CaseResult(of.id, of, verdict, reason, rerun=f"shardproof run s -k '{of.id}'")


def differs(times: str, world: int, step: int = 0, name: str = "blocks.0.up") -> str:
    ranks = f"ranks {list(range(world))}" if world > 1 else "rank 0"
    return (
        f"equivalence: {times}differs from the oracle: {name!r} at step {step}, gradients_final, "
        f"{ranks}: error 0.{step}5 against bound 1e-12"
    )


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (
            differs(
                "every gradient is 2 times too small (2 = ranks or micro-batches, as many): ", 2
            ),
            differs("every gradient is 4 times too small (4 = ranks): ", 4, 1, "final.norm"),
        ),
        (
            differs("the share of data coordinate 1 is missing: ", 2),
            differs(
                "the share of data coordinate 1 is missing; the share of data coordinate 2 is "
                "missing: ",
                3,
            ),
        ),
        (differs("", 2), differs("", 5, 1, "blocks.3.up")),
        (
            "equivalence: differs from the oracle: 'w' at step 1, after_update parameters, ranks "
            "[0, 1]: error 0.00494 against bound 1e-12",
            "equivalence: differs from a one-step replay: 'w' at step 2, replayed update of "
            "parameters, rank 0: error 3.69e+16 against bound 4 ULP",
        ),
        (
            "rank 0 raised ValueError: 2 and 3 (mine.py:46 in helper) [its last call: all_reduce("
            "sum, float64[32]) on ranks 0-1]",
            "rank 2 raised ValueError: 4 and 3 (mine.py:46 in helper)",
        ),
        (differs("no update was made: ", 2), differs("no update was made: ", 2) + "\nnorm: wrong"),
        (differs("", 2), differs("no cause could be determined (KeyError('w')): ", 2)),
        (
            "equivalence: step 0, gradients_final: no rank holds 'w'",
            'equivalence: no cause could be determined (ValueError("a (b): it\'s", (2, 3))): '
            "step 0, gradients_final: no rank holds 'w'",
        ),
        (
            "call 4 of group 0-1 does not match: rank 0 calls all_reduce(sum, float64[32]); rank 1 "
            "calls broadcast(root 0, float64[32]) (in step(), mine.py:28 in finish)",
            "the calls on ranks 0-2 do not match: rank 0 calls all_reduce(sum, float64[32]); rank "
            "1 calls broadcast(root 0, float64[32]) (still in finish (mine.py:30) under step())",
        ),
    ],
)
def test_one_cause(one: str, other: str) -> None:
    assert cause("fail", one) == cause("fail", other)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (differs("no update was made: ", 2), differs("every gradient is zero: ", 2)),
        (differs("", 2, name="up.weight"), differs("", 2, name="down.weight")),
        (differs("no update was made: ", 2), "norm: no update was made"),
        ("rank 0 raised ValueError: a (mine.py:46 in f)", "rank 0 raised ValueError: a (m.py:9)"),
    ],
)
def test_other_causes(one: str, other: str) -> None:
    assert cause("fail", one) != cause("fail", other)


def test_the_simplest_case_leads() -> None:
    """Smallest world, fewest micro-batches, then steps, cheapest backend, no clipping."""
    reason = differs("no update was made: ", 2)
    fields: list[dict[str, Any]] = [
        {"world": 4},
        {"steps": 4},
        {"workload": WorkloadSpec("charnames_gpt", micro_batches=8)},
        {"backend": "gloo"},
        {"optimizer": OptimizerSpec(clip_norm=0.5)},
        {},
    ]
    results = [failed(number, reason, **of) for number, of in enumerate(fields)]
    [block] = blocks(map(of_result, results))
    assert block.first.id == "s::mine:Mine::5" and block.first.rerun.endswith("5'")
    numbers = [failure.id[-1] for failure in block.failures]
    assert numbers == ["5", "4", "3", "1", "2", "0"]
    assert block.more() == (
        "the same in 5 more cases: s::mine:Mine::4, s::mine:Mine::3, s::mine:Mine::1 and 2 more"
    )


def test_a_sentence_that_leaves_no_question_open_leads() -> None:
    """Of a factor that may be either of two numbers the case that tells which is shown first."""
    either = f"every gradient is 2 times too small (2 = ranks or micro-batches{ALIKE}): "
    plain = "every gradient is 3 times too small (3 = ranks): "
    longer = differs(plain, 3) + "\nnorm: this is wrong as well"
    results = [
        failed(0, differs(either, 2)),
        failed(1, longer, world=3),
        failed(2, differs(plain, 3), world=3),
    ]
    [block] = blocks(map(of_result, results))
    assert [failure.id[-1] for failure in block.failures] == ["2", "1", "0"]


def test_all_names_are_told_that_a_sentence_only_begins() -> None:
    result = failed(0, "checkpoint: 4 of 9 parameters were not loaded ('a', 'b', 'c' and 1 more)")
    assert of_result(result).names == ""
    found = Outcome("checkpoint", "fail", figures={"names": ["a", "b", "c", "d"]})
    assert of_result(replace(result, checks=[found])).names == "all of them: a, b, c, d"


def test_each_system_has_its_own_blocks_and_the_gravest_comes_first() -> None:
    reason = differs("no update was made: ", 2)
    results = [
        failed(0, "judged nothing", "undecidable"),
        failed(1, "rank 0 still running", "hang"),
        failed(2, reason),
        failed(3, reason, implementation="reference/ddp"),
        failed(4, reason),
    ]
    found = blocks(map(of_result, results))
    assert [[failure.id[-1] for failure in block.failures] for block in found] == [
        ["2", "4"],
        ["3"],
        ["1"],
        ["0"],
    ]
    assert not found[1].more()


def test_what_is_no_case_stands_alone() -> None:
    one = of_result(failed(0, "survived"))
    faults = [replace(one, kind="fault", id=name) for name in ("a", "b")]
    assert len(blocks(faults)) == 2
