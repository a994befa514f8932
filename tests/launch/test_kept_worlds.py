"""One mpirun for many cases of a leader: which share it, and how it ends."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from made_case import made_case

from shardproof.backends.mpi import found as mpi_found
from shardproof.case import Case, WorkloadSpec
from shardproof.cases.runner import Session
from shardproof.launch import kept_ranks

HERE = str(Path(__file__).parents[1] / "support")
SMALL = WorkloadSpec("charnames_gpt", params={"layers": 1, "width": 16})
under_mpirun = [
    pytest.mark.launches,
    pytest.mark.skipif(mpi_found.problem() is not None, reason=str(mpi_found.problem())),
]


def cases(backend: str = "mpi") -> list[Case]:
    """Systems of every family, which leave other things in a process each."""
    systems: dict[str, dict[str, int]] = {
        "reference/ddp": {"replicate": 2},
        "pytorch/ddp": {"replicate": 2},
        "pytorch/fsdp2": {"shard": 2},
        "reference/zero3": {"shard": 2},
        "pytorch/tensor_parallel": {"tensor": 2},
        "pytorch/zero_redundancy_optimizer": {"shard": 2},
    }
    return [
        made_case(
            system,
            mesh,
            id=f"{system}::{seed}",
            backend=backend,
            checks=("equivalence", "replicas"),
            steps=2,
            workload=WorkloadSpec("charnames_gpt", seed=seed),
        )
        for system, mesh in systems.items()
        for seed in (0, 1)
    ]


def digests(value: Any) -> list[str]:
    """All digests of tensors anywhere in an account, in its order."""
    if isinstance(value, dict):
        own = [value["digest"]] if isinstance(value.get("digest"), str) else []
        return own + [found for part in value.values() for found in digests(part)]
    return [found for part in value for found in digests(part)] if isinstance(value, list) else []


Started = Callable[[], list[int]]


@pytest.fixture(scope="module", autouse=True)
def keeps_fork_servers() -> None:
    """Sessions of this file have fork servers of their own, which keep leaders."""


@pytest.fixture
def started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Started:
    """Tells the sizes of the worlds that have been started."""
    noted = tmp_path / "started"
    noted.touch()
    monkeypatch.setenv("STARTED", str(noted))
    monkeypatch.syspath_prepend(HERE)
    monkeypatch.setenv("PYTHONPATH", HERE)
    return lambda: [int(line) for line in noted.read_text().splitlines()]


def run(chosen: Sequence[Case]) -> tuple[dict[str, str], dict[str, list[str]]]:
    """Verdicts and digests by case."""
    verdicts: dict[str, str] = {}
    found: dict[str, list[str]] = {}

    def note(result: Any, account: dict[str, Any]) -> None:
        verdicts[result.id] = f"{result.verdict} {result.reason}".strip()
        found[result.id] = digests(account["figures"])

    with Session(1) as session:
        session._pool.fork_server.preload("counted_mpirun")
        session.run(chosen, lambda _: None, on_account=note)
    return verdicts, found


class TestManyCases:
    pytestmark = under_mpirun

    @pytest.mark.timeout(400)
    def test_the_order_of_cases_changes_no_bit(self, started: Started) -> None:
        chosen = cases()
        verdicts, first = run(chosen)
        assert set(verdicts.values()) == {"pass"}, verdicts
        assert started() == [2]
        random.Random(7).shuffle(chosen)
        _, second = run(chosen)
        assert first == second and all(first.values())

    def test_planted_faults_and_systems_of_ones_own_have_a_world_to_themselves(
        self, started: Started
    ) -> None:
        good = [c for c in cases() if c.implementation == "reference/ddp"]
        raises = made_case(
            "faulty_ranks:Raises", {"replicate": 2}, id="raises", backend="mpi", workload=SMALL
        )
        planted = made_case(
            "mutants/ddp_never_reduces",
            {"replicate": 2},
            id="planted",
            backend="mpi",
            checks=("equivalence",),
        )
        verdicts, _ = run([good[0], planted, raises, good[1]])
        assert [verdicts[c.id] for c in good] == ["pass", "pass"]
        assert verdicts["raises"].startswith("crash") and "a fish" in verdicts["raises"]
        assert verdicts["planted"].startswith("fail")
        assert started() == [2, 2, 2], "the last case has the world of the first"

    def test_a_world_size_has_its_world(self, started: Started) -> None:
        two, *_ = (c for c in cases() if c.implementation == "reference/ddp")
        three = replace(two, id="three", mesh={"replicate": 3})
        verdicts, _ = run([two, three, replace(two, id="again"), replace(three, id="3 again")])
        assert set(verdicts.values()) == {"pass"}, verdicts
        assert started() == [2, 3]


class TestEnds:
    pytestmark = under_mpirun

    @pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGKILL])
    def test_nothing_outlives_the_parent(self, signum: int) -> None:
        program = """
            import sys, time
            sys.path.append("tests/support")
            from made_case import made_case
            from shardproof.cases.runner import Session
            case = made_case("reference/ddp", {"replicate": 2}, backend="mpi", steps=1)
            with Session(1) as session:
                session.run([case], lambda result: None)
                print(session._pool.fork_server.pid, session._pool.folder, flush=True)
                time.sleep(1000)
        """
        parent = subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(program)],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            cwd=Path(__file__).parents[2],
        )
        try:
            assert parent.stdout is not None
            pid, folder = parent.stdout.readline().split()
            server = psutil.Process(int(pid))
            everyone = [server, *server.children(recursive=True)]
            names = " ".join(" ".join(process.cmdline()) for process in everyone)
            assert "stand_in.py" in names and len(everyone) >= 6
            os.kill(parent.pid, signum)
            parent.wait(60)
            _, alive = psutil.wait_procs(everyone, timeout=10)
            assert not alive
            # A killed parent's folder is removed by the next run that makes one.
            assert not Path(folder).exists() or signum == signal.SIGKILL
        finally:
            if parent.poll() is None:
                parent.kill()
            parent.communicate()


def test_what_a_program_changed_is_put_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kept_ranks.process_control, "end_adopted", lambda known: set())
    monkeypatch.setattr(
        kept_ranks.threading, "enumerate", lambda: [kept_ranks.threading.main_thread()]
    )
    state = kept_ranks._State.now()
    drawn = torch.rand(3)
    folder = Path.cwd()
    os.environ["LEFT_BY_A_CASE"] = "1"
    os.chdir(tmp_path)
    sys.path.insert(0, "/nowhere")
    torch.set_default_dtype(torch.float64)
    torch.set_grad_enabled(False)
    torch.use_deterministic_algorithms(True)
    assert state.restore() == ""
    assert "LEFT_BY_A_CASE" not in os.environ and Path.cwd() == folder
    assert "/nowhere" not in sys.path
    assert torch.get_default_dtype() == torch.float32 and torch.is_grad_enabled()
    assert not torch.are_deterministic_algorithms_enabled()
    assert torch.equal(torch.rand(3), drawn)
