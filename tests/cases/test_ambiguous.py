"""A factor that may be either of two numbers is told apart by one more run."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from shardproof import registry
from shardproof.cases.ambiguous import resolved
from shardproof.cases.kills import pair
from shardproof.cases.leader import judge_case
from shardproof.checks.results import ALIKE

BOTH = f"every gradient is 2 times too small (2 = ranks or micro-batches{ALIKE}): differs"


@pytest.mark.parametrize(
    ("other", "said"),
    [
        ("every gradient is 2 times too small (2 = ranks): differs", "(2 = ranks)"),
        ("every gradient is 3 times too small (3 = micro-batches)", "(2 = micro-batches)"),
        ("", f"(2 = ranks or micro-batches{ALIKE})"),
        ("every gradient is 5 times too small (5 = loss scale)", f"micro-batches{ALIKE})"),
    ],
)
def test_what_another_run_leaves_of_a_factor(other: str, said: str) -> None:
    assert said in resolved(BOTH, other)


def test_a_mean_over_2_ranks_is_none_over_2_micro_batches(tmp_path: Path) -> None:
    own = pair(registry.load_mutant("ddp_divides_by_world"), weigh_all=False).case
    workload = replace(own.workload, micro_batches=2, windows=1, global_batch=12)
    case = replace(own, mesh={"replicate": 2}, workload=workload, checks=("equivalence",))
    account, result = judge_case(case, tmp_path, tmp_path / "oracles")
    assert "every gradient is 2 times too small (2 = ranks)" in result.reason, result.reason
    assert account.figures is not None


def test_of_two_axes_of_one_size_another_mesh_tells_which(tmp_path: Path) -> None:
    own = pair(registry.load_mutant("hybrid_compensates_for_one_axis"), weigh_all=False).case
    case = replace(own, checks=("equivalence",), mesh={"replicate": 2, "shard": 2, "tensor": 1})
    _, result = judge_case(case, tmp_path, tmp_path / "oracles")
    assert "2 times too small (2 = ranks of the axis 'shard')" in result.reason, result.reason
