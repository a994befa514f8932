"""A folder of records, judged and compared: nothing in it but what this launch left."""

from __future__ import annotations

from pathlib import Path

import pytest
from made_case import made_case

from shardproof.cluster.launchers import foreign_records
from shardproof.cluster.launchers.foreign_records import RankEnd, case_folder, write_end, write_plan
from shardproof.launch.outcome import RankOutcome

CASES = [
    made_case("reference/naive_ddp", {"replicate": 2}, backend="gloo", id=name)
    for name in ("one", "two")
]


def leave(records: Path, number: int, *ranks: int, began: int = 2) -> None:
    """What a case leaves whose first ``began`` ranks came to it and whose ``ranks`` ended well."""
    folder = case_folder(records, number)
    folder.mkdir(exist_ok=True)
    for rank in range(began):
        (folder / f"rank{rank}.began").touch()
    for rank in ranks:
        (folder / f"rank{rank}.rec").touch()
        write_end(folder, RankEnd(RankOutcome(rank, "ok"), {"step0/loss": "f64 [] 0"}))


def verdicts_of(records: Path) -> dict[str, str]:
    found = foreign_records.results_of(records, records)
    return {case.id: judged[1].verdict if judged else "left out" for case, judged in found}


def test_nothing_of_an_earlier_launch_is_judged(tmp_path: Path) -> None:
    write_plan(tmp_path, CASES, 2)
    leave(tmp_path, 0, 0, 1)
    leave(tmp_path, 1, 0, 1)
    (tmp_path / foreign_records.OUT_OF_TIME).touch()
    write_plan(tmp_path, CASES, 2)
    # Both ranks die in the first case.
    leave(tmp_path, 0)
    assert verdicts_of(tmp_path) == {"one": "crash", "two": "left out"}


@pytest.fixture
def both(tmp_path: Path) -> tuple[Path, Path]:
    """Two launches of the same cases, with the same digests."""
    pair = tmp_path / "nodes", tmp_path / "local"
    for records in pair:
        write_plan(records, CASES, 2)
        leave(records, 0, 0, 1)
        leave(records, 1, 0, 1)
    return pair


@pytest.mark.parametrize("cut", [0, 1], ids=["nodes", "local"])
def test_what_the_clock_ended_is_not_compared(cut: int, both: tuple[Path, Path]) -> None:
    for path in case_folder(both[cut], 1).glob("*.end"):
        path.unlink()
    (row,) = foreign_records.compare(*both)
    assert (row.equal, row.unequal, row.left) == (2, 2, 0)
    (both[cut] / foreign_records.OUT_OF_TIME).touch()
    (row,) = foreign_records.compare(*both)
    assert (row.cases, row.equal, row.unequal, row.left) == (1, 2, 0, 1)
    assert row.sentence().endswith("of 1 cases identical; 1 left out, which the clock ended")
