"""A folder of records, judged: nothing in it but what this launch left."""

from __future__ import annotations

from pathlib import Path

from made_case import made_case

from shardproof.cluster.launchers import foreign_records
from shardproof.cluster.launchers.foreign_records import case_folder, write_plan
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
        RankOutcome(rank, "ok").store(folder / f"rank{rank}.end")


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
