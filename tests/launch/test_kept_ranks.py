"""Rank processes that a leader keeps: who serves again, who is replaced, and what none sees."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from shardproof.backends.mpi import found as mpi_found
from shardproof.launch.pool import Pool

HERE = str(Path(__file__).parents[1] / "support")
sys.path.insert(0, HERE)
import launch_programs  # noqa: E402 - leaders import it by this name

sys.path.remove(HERE)

Launches = list[tuple[str, int, str]]
MPI = pytest.param(
    "mpi",
    marks=pytest.mark.skipif(mpi_found.problem() is not None, reason=str(mpi_found.problem())),
)


@pytest.fixture(scope="module", autouse=True)
def keeps_fork_servers() -> None:
    """The pool of this file is its own."""


@pytest.fixture(scope="module")
def pool() -> Iterator[Pool]:
    sys.path.insert(0, HERE)
    with Pool(1, [launch_programs.in_kept_ranks]) as pool:
        yield pool
    sys.path.remove(HERE)


@pytest.fixture
def told(pool: Pool, tmp_path: Path) -> Any:
    """What every rank of every launch told, one leader for all of them."""

    def run(launches: Launches) -> list[Any]:
        payload = {"folder": str(tmp_path), "launches": launches}
        (end,) = pool.run(launch_programs.in_kept_ranks, [("ranks", payload, 300.0)])
        assert end.value is not None, end.output
        return list(end.value)

    return run


def pids(launch: list[Any]) -> list[int]:
    assert all(status == "ok" for status, _ in launch), launch
    return [record["pid"] for _, record in launch]


@pytest.mark.parametrize("backend", ["in_memory", "gloo"])
def test_ranks_serve_several_launches_and_see_nothing_of_the_last(
    backend: str, told: Any, tmp_path: Path
) -> None:
    first, second, more, fewer = told(
        [(backend, 2, "state"), (backend, 2, ""), (backend, 3, ""), (backend, 1, "")]
    )
    assert pids(first) == pids(second)
    assert set(pids(fewer)) <= set(pids(first)) <= set(pids(more))
    for launch, total in ((first, 6.0), (second, 6.0), (more, 18.0), (fewer, 1.0)):
        assert {record["total"] for _, record in launch} == {total}
        assert {tuple(record["seen"][:2]) for _, record in launch} == {("", "torch.float32")}
    draws = [{record["seen"][2] for _, record in launch} for launch in (first, second)]
    assert draws[0] & draws[1], "each begins with the same draws"
    assert (tmp_path / "1" / "rank0.out").read_text().splitlines() == ["hello from rank 0"]
    assert (tmp_path / "3" / "children").read_text() == ("1" if backend == "in_memory" else "3")


@pytest.mark.parametrize("backend", ["in_memory", "gloo", MPI])
@pytest.mark.parametrize("leave", ["thread", "memory", "a case that did not hold"])
def test_ranks_in_which_something_stays_are_replaced(backend: str, leave: str, told: Any) -> None:
    first, second = told([(backend, 2, leave), (backend, 2, "")])
    assert not set(pids(first)) & set(pids(second))
    assert not any(map(psutil.pid_exists, pids(first)))


@pytest.mark.parametrize("backend", ["in_memory", "gloo", MPI])
def test_ranks_that_ended_while_they_waited_are_replaced(backend: str, told: Any) -> None:
    first, second, third, last = told([(backend, 2, "gone"), *[(backend, 2, "")] * 3])
    assert not set(pids(first)) & set(pids(second)), "forked for the launch alone"
    assert not set(pids(second)) & set(pids(third))
    assert pids(third) == pids(last)


@pytest.mark.parametrize("backend", ["in_memory", "gloo", MPI])
@pytest.mark.parametrize(
    ("leave", "status"),
    [("raise", "raised"), ("os_exit", "exited"), ("kill_self", "killed"), ("stop_self", "hung")],
)
def test_a_launch_that_does_not_hold_costs_its_processes(
    backend: str, leave: str, status: str, told: Any
) -> None:
    first, broken, last = told([(backend, 2, ""), (backend, 2, leave), (backend, 2, "")])
    assert status in {each for each, _ in broken}, broken
    assert not set(pids(first)) & set(pids(last))
    assert not any(map(psutil.pid_exists, pids(first)))
