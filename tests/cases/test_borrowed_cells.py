"""A cell of another system that a class cannot take is left out with a word, not bad input."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from made_case import made_case

from shardproof.case import Case
from shardproof.cases.leader import judge_case
from shardproof.scenarios.matrix import substitute

BF16 = {"parameters": "bfloat16"}


def cell(axis: str) -> Case:
    """One of ZeRO-1's in bf16."""
    return made_case(
        "reference/zero1",
        {axis: 2},
        id=f"s::reference/zero1::in_memory::{axis}2::sgd::noclip::working_precision-bf16::full",
        options={"precision": BF16, "offload": "optimizer"},
        precision=BF16,
        lane="working_precision",
        dtype="float32",
        source="s.yaml:7",
    )


@pytest.mark.parametrize(
    ("axis", "says"),
    [
        ("shard", "has no axis shard; its axes: replicate"),
        (
            "replicate",
            "refuses the precision: unknown option 'precision'; valid: all_reduce",
        ),
    ],
)
def test_a_policy_that_a_class_does_not_take(axis: str, says: str, tmp_path: Path) -> None:
    (own,) = substitute([cell(axis)], "reference/ddp")
    _, result = judge_case(own, tmp_path, tmp_path)
    assert (result.verdict, result.reason.startswith(says)) == ("skip", True), result.reason


def test_a_policy_that_its_own_file_gives_is_refused(tmp_path: Path) -> None:
    own = replace(cell("replicate"), implementation="reference/ddp", options={"precision": BF16})
    _, result = judge_case(own, tmp_path, tmp_path)
    assert result.verdict == "refused"
    assert result.reason.startswith("s.yaml:7: unknown option 'precision'; valid: all_reduce")
