"""A faulty implementation costs its own case only: the right verdict, a sentence that helps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import bad_implementations
import pytest

from shardproof.case import Case, WorkloadSpec
from shardproof.cases.runner import run_cases
from shardproof.contract import OptimizerSpec

HERE = Path(__file__).parents[1] / "support"

EXPECTED = {
    "raises_on_import:Mine": ("crash", "libfast.so"),
    "bad_implementations:NOT_A_CLASS": ("crash", "NOT_A_CLASS"),
    "bad_implementations:Absent": ("crash", "Absent"),
    "bad_implementations:NanLoss": ("fail", "loss of rank 0 is nan"),
    "bad_implementations:SpoilsInputs": ("pass", ""),
    "bad_implementations:RetellsFlat": ("pass", ""),
    "bad_implementations:RetellsFirstElements": (
        "fail",
        "evaluate() keeps the values, but changes the pieces, of parameters on rank 0",
    ),
    "bad_implementations:RetellsOtherValues": ("fail", "evaluate() changes parameters on rank 0"),
    "bad_implementations:RenamedParameters": ("fail", "'module."),
    "bad_implementations:OwnedTwice": ("fail", "owned more than once"),
    "bad_implementations:OwnedByNobody": ("fail", "owned by no rank"),
    "bad_implementations:MissingParameter": ("fail", "no rank holds"),
    "bad_implementations:WrongShape": ("fail", "expected torch.float64"),
    "bad_implementations:WrongDtype": ("fail", "torch.float16"),
    "bad_implementations:RaisesInStep": ("crash", "the bucket has no elements"),
    "bad_implementations:ObservesNothing": ("fail", "was never called"),
    "bad_implementations:ReturnsNonsense": ("fail", "StepResult"),
    "bad_implementations:ClaimsTooMuch": ("fail", "without declaring"),
    "bad_implementations:UnknownStrategy": ("fail", "unknown strategy 'dpd'"),
    "bad_implementations:RefusesForNoReason": ("fail", "Refused: not today"),
    "bad_implementations:RefusesTheAxis": ("refused", "one rank on the axis 'replicate'"),
    "bad_implementations:UnknownFeature": ("fail", "did you mean clipping?"),
    "bad_implementations:MisspeltDecline": ("fail", "did you mean tied?"),
    "bad_implementations:UnknownBufferRule": ("fail", "did you mean rank0?"),
    "bad_implementations:NamesNoEmulator": ("fail", "NamesNoEmulator has no emulator"),
    "bad_implementations:AsksItsPeers": ("fail", "local_state('parameters') called broadcast"),
    "plain": ("pass", ""),
    # Methods that return another type than the contract asks for.
    **{
        f"bad_implementations:{name}": ("fail", says)
        for name, (_, _, says) in bad_implementations.WRONG_TYPES.items()
    },
}


@pytest.fixture(scope="module")
def results() -> dict[str, dict[str, Any]]:
    cases = [
        Case(
            id=f"bad::{name}",
            scenario="bad",
            implementation=name,
            backend="in_memory",
            mesh={"replicate": 1},
            workload=WorkloadSpec("charnames_gpt", params={"layers": 1, "width": 16}),
            optimizer=OptimizerSpec(),
            lane="fp64",
            checks=("equivalence", "replicas", "active"),
            steps=2,
        )
        for name in EXPECTED
    ]
    found: list[dict[str, Any]] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(HERE))
        patch.setenv("PYTHONPATH", str(HERE))
        run_cases(cases, 2, found.append)
    return {result.case.implementation: result for result in found}


@pytest.mark.parametrize("name", EXPECTED)
def test_verdict_and_sentence(results: dict[str, dict[str, Any]], name: str) -> None:
    verdict, says = EXPECTED[name]
    result = results[name]
    assert result.verdict == verdict, result.reason
    assert says in result.reason, result.reason
    assert result.rerun.startswith("shardproof run")
    if (own := name.partition(":")[2]) in bad_implementations.WRONG_TYPES:
        said = ("not in contract", "observe(", "is not a known word")
        assert own in result.reason or any(words in says for words in said)
