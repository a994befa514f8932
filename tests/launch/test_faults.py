"""Whatever one rank does, its case gets the right verdict and a sentence; the others go on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import psutil
import pytest

from shardproof.backends.mpi import found as mpi_found
from shardproof.case import Case, WorkloadSpec
from shardproof.cases.runner import run_cases
from shardproof.contract import OptimizerSpec

HERE = Path(__file__).parents[1] / "support"
#: Verdict, and what the sentence says on every backend.  gloo may wait where threads can see that
#: calls do not match.  On ``in_memory`` a signal or ``os._exit`` takes all ranks along: the process
#: is named, with each rank's last call.
EXPECTED: dict[str, tuple[str, tuple[str, ...]]] = {
    "Raises": (
        "crash",
        ("rank 1 raised ValueError", "the learning rate is a fish (in step(), ", "in misbehave"),
    ),
    "Exits": ("crash", ("rank 1 exited",)),
    "ExitsAtOnce": ("crash", ("rank 1 exited",)),
    "IsKilled": ("crash", ("rank 1 killed",)),
    "IsStopped": ("hang", ("rank",)),
    "LoopsForEver": ("over budget", ("rank 1 computes in misbehave", "faulty_ranks.py:")),
    "NeverComes": ("hang", ("rank 1",)),
    "AllocatesWithoutEnd": ("crash", ("memory limit",)),
    "CallsAnother": ("crash|hang", ("rank 1 calls broadcast", "all_reduce")),
    "OtherShape": ("crash", ("rank 1", "float32[5]", "float32[8]")),
    "OtherDtype": ("crash", ("rank 1", "int32", "float32")),
    "ReturnsEarly": ("crash", ("rank 1",)),
    "clean": ("pass", ()),
}
WITH_MPI = [
    pytest.mark.launches,
    pytest.mark.skipif(mpi_found.problem() is not None, reason=str(mpi_found.problem())),
]
BACKENDS = ("in_memory", "gloo", pytest.param("mpi", marks=WITH_MPI))
Results = dict[str, dict[str, Any]]


def _case(name: str, backend: str) -> Case:
    clean = name == "clean"
    return Case(
        id=f"fault::{name}::{backend}",
        scenario="fault",
        implementation="reference/naive_ddp" if clean else f"faulty_ranks:{name}",
        backend=backend,
        mesh={"replicate": 3},
        workload=WorkloadSpec("charnames_gpt", params={"layers": 1, "width": 16}),
        optimizer=OptimizerSpec(),
        lane="fp64",
        checks=("equivalence", "replicas"),
        steps=2,
        deadline=4.0 if EXPECTED[name][0] in ("hang", "over budget") else 60.0,
        memory_gib=1.0,
    )


def _run(backends: Sequence[str]) -> Results:
    found: list[dict[str, Any]] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(HERE))
        patch.setenv("PYTHONPATH", str(HERE))
        run_cases([_case(n, b) for n in EXPECTED for b in backends], 4, found.append)
    return {result.id: result for result in found}


@pytest.fixture(scope="module")
def results_of() -> Callable[[str], Results]:
    """Those of a backend; threads and processes, which run in no ``make launches``, together."""
    run = cache(_run)
    return lambda backend: run(("mpi",) if backend == "mpi" else ("in_memory", "gloo"))


@pytest.mark.timeout(300)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", EXPECTED)
def test_verdict_and_sentence(
    results_of: Callable[[str], Results], name: str, backend: str
) -> None:
    verdict, says = EXPECTED[name]
    result = results_of(backend)[f"fault::{name}::{backend}"]
    assert result.verdict in verdict.split("|"), result.reason
    for text in says:
        assert text in result.reason, result.reason


def test_nothing_is_left(results_of: Callable[[str], Results]) -> None:
    """Of leaders and ranks; the fork server itself is kept for the next test."""
    assert results_of("gloo")
    kept = [c for c in psutil.Process().children() if "fork_server_main" in " ".join(c.cmdline())]
    assert kept and not [child for server in kept for child in server.children(recursive=True)]
