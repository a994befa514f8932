"""Initial buffers are compared as initial parameters are: with the name and the rank."""

from __future__ import annotations

from pathlib import Path

import pytest
from made_case import made_case

from shardproof.case import Case, WorkloadSpec
from shardproof.cases.runner import run_cases
from shardproof.checks.results import CaseResult

SUPPORT = Path(__file__).parents[1] / "support"
CNN = WorkloadSpec("digits_cnn", global_batch=15, params={"layers": 1})


def _case(implementation: str, world: int, axis: str = "replicate") -> Case:
    name = f"{implementation} {world}"
    fields = {"id": name, "workload": CNN, "checks": ("equivalence",)}
    return made_case(implementation, {axis: world}, **fields)


SOUND = [
    *(_case("reference/naive_ddp", world) for world in range(1, 6)),
    *(_case("reference/ddp", world) for world in (2, 3)),
    *(_case("reference/zero3", world, "shard") for world in (2, 5)),
    _case("pytorch/ddp", 2),
]
#: System -> what is said of its buffers, in three ranks.
BROKEN = {
    "Spoilt": r"the buffer 'blocks.0.norm1.running_var'",
    "NotFinite": "the buffer ",
    "KeepsBuilt": "rank 1 starts ",
}


@pytest.fixture(scope="module")
def results() -> dict[str, CaseResult]:
    names = (*BROKEN, "NothingPromised", "RankZeroSends")
    cases = [*SOUND, *(_case(f"spoilt_buffers:{name}", 3) for name in names)]
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(SUPPORT))
        patch.setenv("PYTHONPATH", str(SUPPORT))
        found, _ = run_cases(cases, 2, lambda result: None)
    return {result.id: result for result in found}


@pytest.mark.parametrize("case", SOUND, ids=lambda case: case.id)
def test_sound_systems_pass(results: dict[str, CaseResult], case: Case) -> None:
    assert results[case.id].verdict == "pass", results[case.id].reason


@pytest.mark.parametrize("name", BROKEN)
def test_a_wrong_buffer_is_named_with_its_ranks(results: dict[str, CaseResult], name: str) -> None:
    result = results[f"spoilt_buffers:{name} 3"]
    assert result.verdict == "fail"
    assert result.reason.startswith("equivalence: "), result.reason
    for words in ("running_var'", "initial buffers", "rank"):
        assert words in result.reason, result.reason
    if name == "KeepsBuilt":
        assert "rank 1 starts " in result.reason and "the values that were built" in result.reason
    else:
        assert "on ranks 1-2" in result.reason, result.reason


def test_where_nothing_is_promised_or_rank_0_sends_the_start_is_not_compared(
    results: dict[str, CaseResult],
) -> None:
    for name in ("NothingPromised", "RankZeroSends"):
        assert "initial buffers" not in results[f"spoilt_buffers:{name} 3"].reason
