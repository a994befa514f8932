"""``tools/faults.py``: which planted faults a change is answered with."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from shardproof import registry
from shardproof.cases.kills import kinds
from tools import faults


@pytest.fixture(scope="module")
def every() -> dict[str, Any]:
    return {name: registry.load_mutant(name) for name in registry.mutant_names()}


def test_all_are_planted_where_no_recent_planting_is_on_record(
    every: dict[str, Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert [*faults.choose(every, None, "").names] == [*every]
    monkeypatch.setattr(faults, "STAMP", tmp_path / "faults.json")
    assert faults.changed_files() is None
    head = faults._git("rev-parse", "HEAD")
    for date, commit in (("2001-01-01T00:00:00+00:00", head), ("not a date", head)):
        faults.STAMP.write_text(json.dumps({"commit": commit, "date": date}))
        assert faults.changed_files() is None
    faults.STAMP.write_text(
        json.dumps({"commit": "0" * 40, "date": faults._head_date().isoformat()})
    )
    assert faults.changed_files() is None
    faults.write_stamp()
    assert faults.changed_files() == []


def test_a_strategy_is_answered_with_all_faults_that_load_it(every: dict[str, Any]) -> None:
    chosen = {*faults.choose(every, ["impls/reference/zero2.py"], "").names}
    of_zero2 = {name for name, fault in every.items() if fault.parent == "reference/zero2"}
    assert of_zero2 and of_zero2 <= chosen
    assert not [name for name in chosen if every[name].parent == "reference/naive_ddp"]


def test_a_fault_s_own_file_and_a_check_are_answered(every: dict[str, Any]) -> None:
    own = {*faults.choose(every, ["impls/mutants/tensor/tensor.py"], "").names}
    assert own == {
        n for n, f in every.items() if "impls/mutants/tensor/tensor.py" in faults.files_of(f)
    }
    assert own
    by_norm = {name for name, fault in every.items() if "norm" in fault.killed_by}
    assert by_norm and by_norm <= {*faults.choose(every, ["suite/checks/norm.py"], "").names}


def test_a_change_of_the_suite_is_answered_with_one_fault_of_each_kind(
    every: dict[str, Any],
) -> None:
    first, second = (faults.choose(every, ["suite/cases/leader.py"], salt).names for salt in "ab")
    wanted = {kind for fault in every.values() for kind in kinds(fault)}
    for chosen in (first, second):
        assert {kind for name in chosen for kind in kinds(every[name])} == wanted
        assert len(chosen) <= len(wanted) < len(every)
    assert [*first] != [*second]


def test_pages_are_answered_with_none(every: dict[str, Any]) -> None:
    assert not faults.choose(every, ["README.md", "docs/gpu.md"], "").names
