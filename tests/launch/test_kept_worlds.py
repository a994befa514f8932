"""One mpirun for many cases: which cases share it, what it leaves behind, and how it ends."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from made_case import made_case

from shardproof.backends.mpi import found as mpi_found
from shardproof.case import Case, WorkloadSpec
from shardproof.cases.runner import Session
from shardproof.launch import rank_service
from shardproof.launch.mpi.kept_worlds import KeptWorlds

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


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Sizes of the worlds that were started."""
    sizes: list[int] = []
    take = KeptWorlds.take

    def noted(self: KeptWorlds, size: int) -> Any:
        before = self._made
        task = take(self, size)
        sizes.extend([size] * (self._made - before))
        return task

    monkeypatch.setattr(KeptWorlds, "take", noted)
    return sizes


def run(chosen: Sequence[Case]) -> tuple[dict[str, str], dict[str, list[str]]]:
    """Verdicts and digests by case."""
    verdicts: dict[str, str] = {}
    found: dict[str, list[str]] = {}

    def note(result: Any, account: dict[str, Any]) -> None:
        verdicts[result.id] = f"{result.verdict} {result.reason}".strip()
        found[result.id] = digests(account["figures"])

    with Session(1) as session:
        session.run(chosen, lambda _: None, on_account=note)
    return verdicts, found


class TestManyCases:
    pytestmark = under_mpirun

    @pytest.mark.timeout(400)
    def test_the_order_of_cases_changes_no_bit(self, started: list[int]) -> None:
        chosen = cases()
        verdicts, first = run(chosen)
        assert set(verdicts.values()) == {"pass"}, verdicts
        assert started == [2]
        random.Random(7).shuffle(chosen)
        _, second = run(chosen)
        assert first == second and all(first.values())

    def test_a_case_that_fails_or_breaks_costs_its_world(
        self, started: list[int], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.syspath_prepend(HERE)
        monkeypatch.setenv("PYTHONPATH", HERE)
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
        # The planted fault had an mpirun of its own; the case that raised cost the first world.
        assert started == [2, 2]

    def test_after_a_fail_a_world_is_new_and_module_globals_have_one_of_their_own(
        self, started: list[int], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.syspath_prepend(HERE)
        monkeypatch.setenv("PYTHONPATH", HERE)

        def case(name: str, number: int) -> Case:
            system = f"faulty_ranks:{name}"
            limits = {"backend": "mpi", "workload": SMALL, "checks": ("equivalence",)}
            return made_case(system, {"replicate": 2}, id=f"{name}{number}", **limits)

        verdicts, _ = run([case("HasGlobals", 0), case("HasGlobals", 1)])
        assert set(verdicts.values()) == {"pass"}, verdicts
        assert started == [2]  # neither used it
        verdicts, _ = run([case("Drifts", 0), case("Drifts", 1)])
        assert all(said.startswith("fail") for said in verdicts.values()), verdicts
        assert started == [2, 2, 2]

    def test_a_world_that_has_gone_is_replaced(
        self, started: list[int], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The case has ranks of its own where its world ended after it was handed out."""
        good = [c for c in cases() if c.implementation == "reference/ddp"]
        take = KeptWorlds.take

        def gone(self: KeptWorlds, size: int) -> Any:
            task = take(self, size)
            task.folder.mkdir(exist_ok=True)
            task.closed.touch()
            return task

        monkeypatch.setattr(KeptWorlds, "take", gone)
        verdicts, _ = run(good)
        assert set(verdicts.values()) == {"pass"}, verdicts
        assert len(started) == len(good)  # none was idle


class TestEnds:
    pytestmark = under_mpirun

    @pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGKILL])
    def test_nothing_outlives_the_parent(self, signum: int) -> None:
        program = """
            import time
            from shardproof.cases.runner import Session
            with Session(1) as session:
                task = session._worlds.take(2)
                deadline = time.monotonic() + 60
                while not task.door.exists():
                    assert time.monotonic() < deadline
                    time.sleep(0.02)
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
    monkeypatch.setattr(rank_service.process_control, "end_adopted", lambda known: set())
    monkeypatch.setattr(
        rank_service.threading, "enumerate", lambda: [rank_service.threading.main_thread()]
    )
    state = rank_service._State.now()
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
