"""One set of cells on several backends: what is compared, and what is said of differences."""

from __future__ import annotations

import dataclasses

import pytest
from made_case import made_case

from shardproof.backends.mpi import found as mpi_found
from shardproof.case import Case, WorkloadSpec
from tests.support.commands import study as run_study
from tools.studies import backends as study
from tools.studies.backends import Cell, Run

SMALL = WorkloadSpec("charnames_gpt", params={"layers": 1, "width": 16}, micro_batches=1)


def cell(name: str, lane: str, adding: int = 2, **cpu: float) -> Cell:
    runs = {backend: Run("pass", "", ["a", "b"], seconds) for backend, seconds in cpu.items()}
    again = dataclasses.replace(list(runs.values())[-1])
    return Cell(name, adding, lane, adding, runs, again)


def test_digests_are_found_wherever_an_account_has_them() -> None:
    account = {"steps": [{"x": {"digest": "1", "y": [{"digest": "2"}]}}, 3], "digest": None}
    assert list(study.digests_of(account)) == ["1", "2"]


@pytest.mark.parametrize(
    ("lane", "adding", "promised"),
    [
        ("dyadic", 4, (True, True)),
        ("bitwise", 2, (True, True)),
        ("bitwise", 3, (True, False)),
        ("fp64", 2, (False, False)),
    ],
)
def test_bits_are_promised_where_sums_have_one_order(
    lane: str, adding: int, promised: tuple[bool, bool]
) -> None:
    made = cell("c", lane, adding, mpi=1.0)
    asked = [study.promises_bits(made, other, "mpi") for other in ("in_memory", "gloo")]
    assert tuple(asked) == promised


def test_cells_that_train_nothing_are_left_out() -> None:
    """They put a backend itself on trial, and have expected failures on one backend alone."""
    cases = [
        made_case(system, {"replicate": 3}, id=f"s::{system}::in_memory::r::quick", workload=spec)
        for system, spec in (
            ("pytorch/collectives", WorkloadSpec("calls")),
            ("reference/ddp", SMALL),
        )
    ]
    kept = study.cells_of(cases, ["in_memory", "gloo"])
    assert [cell.name for cell, _ in kept] == ["s::reference/ddp::r::quick"]


def test_other_bits_are_told_by_cell() -> None:
    cells = [cell(name, "dyadic", in_memory=1, gloo=1, mpi=1) for name in ("one", "two", "three")]
    cells[1].runs["gloo"].digests[0] = "c"
    assert cells[2].again is not None
    cells[2].again.digests = ["a"]
    said, wrong = study.summary(cells, ["in_memory", "gloo", "mpi"])
    assert "equal in 3 of 3 cells (6 digests)" in said[4]
    assert "equal in 2 of 3 cells (6 digests)" in said[5]
    assert wrong == [
        "two: other bits on mpi than on gloo",
        "three: other bits in another order of the cases",
    ]


def test_a_case_that_does_not_hold_is_told_and_costs_nothing() -> None:
    cells = [cell("one", "fp64", 4, gloo=1.0, mpi=1.0), cell("two", "fp64", 4, gloo=1.0, mpi=9.0)]
    cells[1].runs["mpi"].verdict = "fail"
    _, wrong = study.summary(cells, ["gloo", "mpi"])
    assert wrong == ["two on mpi: fail: "]
    said, dear = study.costs(cells, ["gloo", "mpi"])
    assert "median of 1: 1.00 on gloo, 1.00 on mpi; mpi over gloo: 1.00" in said[0] and not dear


def test_more_than_twice_the_cpu_of_gloo_at_four_ranks_is_wrong() -> None:
    for adding, cpu, verdict in ((4, 2.1, True), (4, 1.9, False), (3, 2.1, False)):
        cells = [cell(str(n), "fp64", adding, gloo=1.0, mpi=cpu) for n in range(3)]
        _, dear = study.costs(cells, ["gloo", "mpi"])
        assert bool(dear) is verdict


@pytest.mark.launches
@pytest.mark.skipif(mpi_found.problem() is not None, reason=str(mpi_found.problem()))
@pytest.mark.timeout(400)
def test_real_cells_have_equal_bits_and_take_cpu() -> None:
    """And another seed has other bits: the comparison can fail."""
    cases = [
        made_case(
            system,
            {axis: 2},
            id=f"s::{system}::gloo::{axis}2::sgd::noclip::bitwise::quick",
            backend="gloo",
            lane="bitwise",
            checks=("equivalence", "replicas"),
            steps=2,
            workload=SMALL,
        )
        for system, axis in (("reference/ddp", "replicate"), ("pytorch/fsdp2", "shard"))
    ]
    names = ["in_memory", "gloo", "mpi"]
    cells = study.cells_of(cases, names)
    assert [c.name.split("::")[1] for c, _ in cells] == ["reference/ddp", "pytorch/fsdp2"]
    measured = study.measure(cells, 3)
    said, wrong = study.summary(measured, names)
    assert not wrong, wrong
    assert sum("equal in 2 of 2 cells" in line for line in said) == 3, said
    assert all(run.cpu > 0 for each in measured for run in each.runs.values())
    other = [
        (dataclasses.replace(made, runs={}), each | {"mpi": _reseeded(each["mpi"])})
        for made, each in cells[:1]
    ]
    _, wrong = study.summary(study.measure(other, 3), names)
    assert wrong[:2] == [f"{other[0][0].name}: other bits on mpi than on {n}" for n in names[:2]]


def _reseeded(case: study.Case) -> study.Case:
    return dataclasses.replace(case, workload=dataclasses.replace(case.workload, seed=5))


def test_cells_of_the_full_tier_are_taken_where_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[int] = []

    def run(cases: list[Case], backends: list[str], *rest: object) -> tuple[list[str], list[str]]:
        assert backends == ["in_memory"]
        taken.append(len(cases))
        return [], []

    monkeypatch.setattr(study, "run", run)
    for tier in ("quick", "full"):
        done = run_study("backends", "ddp-gpt", "--backend", "in_memory", "--tier", tier)
        assert done.returncode == 0, done.stderr
    assert 0 < taken[0] < taken[1]


def test_a_choice_without_such_cells_is_bad_input() -> None:
    done = run_study("backends", "samplers", "--backend", "in_memory", "--backend", "gloo")
    assert done.returncode == 2
    assert "no cell that trains a model and is expected to hold on in_memory, gloo" in done.stderr
