"""No verdict is green without a comparison with the oracle, or without naming what was judged."""

from __future__ import annotations

import math
from fractions import Fraction
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from made_case import made_case
from torch import Tensor

from shardproof import verdicts
from shardproof.case import Case, WorkloadSpec
from shardproof.cases.runner import run_cases
from shardproof.cases.verdict import verdict_of
from shardproof.checks import Outcome
from shardproof.checks.equivalence import _check_names
from shardproof.checks.numbers import Lacking, Tally
from shardproof.checks.results import CaseResult
from shardproof.contract import OptimizerSpec
from shardproof.costs.families import Family, HeldByRank
from shardproof.costs.model_facts import TensorFacts
from shardproof.evidence.assembled import Assembled
from shardproof.evidence.records import ComparisonRow, OracleFacts
from shardproof.oracle.truth import Truth, TruthStep
from shardproof.report.capability_matrix import outcome
from shardproof.report.tables import error_of

SMALL = WorkloadSpec("charnames_gpt", params={"layers": 1, "width": 16})

#: A pipeline of one rank, and a parameter in its first and its last unit.
ON_ONE_RANK: dict[str, Any] = {
    "backend": "in_memory",
    "mesh": {"pipe": 1},
    "workload": WorkloadSpec(
        "digits_cnn", ("tied_over_units",), global_batch=15, micro_batches=3, params={"layers": 4}
    ),
}


def bitwise(name: str, implementation: str, **fields: Any) -> Case:
    """Three ranks over gloo add in an order of their own: the lane promises no equal bits."""
    usual: dict[str, Any] = {
        "id": name,
        "backend": "gloo",
        "workload": SMALL,
        "lane": "bitwise",
        "dtype": "float32",
        "steps": 2,
        "checks": ("equivalence", "replicas", "norm"),
    }
    mesh = fields.pop("mesh", {"replicate": 3})
    return made_case(implementation, mesh, **(usual | fields))


@pytest.fixture(scope="module")
def judged() -> dict[str, CaseResult]:
    doubled, clean = "tests.support.oracle_systems:DoubledDDP", "pytorch/ddp"
    cases = [
        bitwise("doubled", doubled),
        bitwise("clean", clean),
        bitwise("doubled in fp64", doubled, dtype="float64"),
        bitwise("clean in fp64", clean, dtype="float64"),
        bitwise("replicas", doubled, checks=("replicas",)),
        bitwise("bytes", clean, checks=("traffic",)),
        *(
            bitwise(name, "reference/pipeline", **ON_ONE_RANK, options={"schedule": name})
            for name in ("1f1b", "zb_v")
        ),
        bitwise("diverges", clean, lane="fp64", dtype="float64", optimizer=OptimizerSpec(lr=1e300)),
    ]
    results, _ = run_cases(cases, 2, lambda result: None)
    return {result.id: result for result in results}


def test_a_fault_of_all_replicas_fails_where_no_equal_bits_are_promised(
    judged: dict[str, CaseResult],
) -> None:
    """Doubled gradients leave the replicas equal: the bound of the dtype must see them."""
    for name in ("doubled", "doubled in fp64"):
        assert judged[name].verdict == "fail", (name, judged[name].reason)
        assert judged[name].check("replicas").status == "pass"  # type: ignore[union-attr]
    assert judged["clean"].verdict == "pass (working precision only)", judged["clean"].reason
    assert judged["clean in fp64"].verdict == "pass", judged["clean in fp64"].reason
    assert judged["clean"].figures("equivalence")["judged_in"] == "working_precision"
    assert judged["clean in fp64"].figures("equivalence")["judged_in"] == "fp64"


def test_stages_that_share_a_parameter_promise_no_equal_bits_on_one_rank_either(
    judged: dict[str, CaseResult],
) -> None:
    """Two stages add up its gradient each for itself; with one stage the rank is the oracle."""
    one, two = judged["1f1b"], judged["zb_v"]
    assert (one.verdict, two.verdict) == ("pass", "pass (working precision only)"), two.reason
    assert "judged_in" not in one.figures("equivalence")
    assert two.figures("equivalence")["judged_in"] == "working_precision"


def test_replicas_alone_are_not_green(judged: dict[str, CaseResult]) -> None:
    result = judged["replicas"]
    assert result.verdict == "pass (replicas only)"
    assert "nothing was compared with the oracle" in result.reason
    assert verdicts.exit_code(verdicts.count([result])) == verdicts.NOT_DECIDED
    assert outcome(result, "numbers") == "pass (replicas only)"


def test_a_case_that_asks_for_no_numbers_names_what_it_judged(
    judged: dict[str, CaseResult],
) -> None:
    assert (judged["bytes"].verdict, judged["bytes"].reason) == ("pass", "judged: traffic")


def test_an_oracle_that_diverges_decides_nothing(judged: dict[str, CaseResult]) -> None:
    """NaN beside NaN is equal bits, so nothing may be compared with NaN."""
    result = judged["diverges"]
    assert result.verdict == "precondition", result.reason
    assert "the oracle itself diverges" in result.reason


@pytest.mark.parametrize(
    ("outcomes", "verdict"),
    [
        ([], "undecidable"),
        ([Outcome("replicas", "pass")], "pass (replicas only)"),
        ([Outcome("equivalence", "skip"), Outcome("replicas", "pass")], "pass (replicas only)"),
        ([Outcome("equivalence", "skip"), Outcome("traffic", "skip")], "skip"),
        ([Outcome("equivalence", "pass"), Outcome("replicas", "skip")], "pass"),
        ([Outcome("equivalence", "precondition"), Outcome("replicas", "pass")], "precondition"),
    ],
)
def test_what_checks_add_up_to(outcomes: list[Outcome], verdict: str) -> None:
    assert verdict_of(outcomes)[0] == verdict


def test_what_a_call_asks_by_name_must_be_judged() -> None:
    numbers, relation = Outcome("equivalence", "pass"), Outcome("relations", "skip", "one share")
    assert verdict_of([numbers, relation]) == ("pass", "")
    found = verdict_of([numbers, relation], ["relations"])
    assert found == ("skip", "relations: one share (other checks passed)")
    broken = Outcome("replicas", "fail", "differ")
    assert verdict_of([numbers, relation, broken], ["relations"])[0] == "fail"


def test_what_is_frozen_is_no_part_of_what_a_family_cuts() -> None:
    """Gradients of frozen parameters are said to be just that."""
    two = tuple(TensorFacts(n, (4,), "float64", trainable=n == "w") for n in ("w", "still"))
    facts = SimpleNamespace(parameters=two, step=0, sharded=("shard",), size=lambda along: 2)
    half = {"gradients": {"w": 2, "still": 2}}
    shown = {rank: HeldByRank(half, {}) for rank in range(2)}
    family = Family("zero3", lambda facts: (Fraction(0), Fraction(0)), cut=("gradients",))
    assert family.problem(cast(Any, facts), shown, 2.0) == ""
    whole = {rank: HeldByRank({"gradients": {"w": 4}}, {}) for rank in range(2)}
    assert "each holds all 4 elements" in family.problem(cast(Any, facts), whole, 2.0)
    state = Assembled()
    state.tensors = {name: {0: torch.ones(4)} for name in ("w", "still")}
    with pytest.raises(Lacking, match="frozen parameters have gradients: 'still'"):
        _check_names(state, {"w": None}, 0, "gradients_final", {"still"})


def step(**fields: Any) -> TruthStep:
    one: dict[str, Tensor] = {"w": torch.ones(2)}
    usual: dict[str, Any] = {
        "loss": 1.0,
        "losses": [1.0],
        "norm": torch.ones(()),
        "gradients": one,
        "clipped": None,
        "parameters": one,
        "optimizer": {},
        "buffers": [{}],
        "scale": 1.0,
        "skipped": False,
    }
    return TruthStep(**(usual | fields))


def diverges(*steps: TruthStep) -> str:
    return OracleFacts.of(Truth(steps=list(steps))).diverges()


def test_what_of_an_oracle_must_be_finite() -> None:
    odd = {"w": torch.tensor([1.0, math.nan])}
    assert diverges(step()) == ""
    for kind in ("gradients", "clipped", "parameters", "optimizer"):
        assert "'w' at step 1" in diverges(step(), step(**{kind: odd}))
    assert "its loss at step 0 is inf" in diverges(step(loss=math.inf))
    # An overflow that was skipped, and a mask of infinities, are as they must be.
    assert diverges(step(gradients=odd, loss=math.inf, skipped=True)) == ""
    assert diverges(step(buffers=[{"mask": torch.tensor(-math.inf)}])) == ""


def test_nan_is_the_worst_error_and_never_equal_bits() -> None:
    rows = [
        ComparisonRow(0, "gradients_final", name, "rank 0", error, 0.0)
        for name, error in (("a", 0.0), ("b", math.nan))
    ]
    tally = Tally.of(rows)
    assert tally.worst == tally.failed and tally.worst is not None and tally.worst.name == "b"
    result = CaseResult("c", bitwise("c", "plain"), "fail", worst_error=math.nan, bound=0.0)
    assert error_of(result) == "nan / equal bits"
