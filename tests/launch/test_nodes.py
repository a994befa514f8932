"""Ranks on nodes: agents as processes of this machine, which containers only take further apart."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest
from made_case import made_case

from shardproof.case import Case, WorkloadSpec
from shardproof.cases.runner import Session
from shardproof.launch.nodes.nodes import Nodes, door
from shardproof.launch.workspace import Workspace

HERE = str(Path(__file__).parents[1] / "support")
SMALL = WorkloadSpec("charnames_gpt", params={"layers": 1, "width": 16})


def test_consecutive_ranks_share_a_node() -> None:
    nodes = Nodes(Path(), 3, 2)
    assert nodes.places == 6
    assert [nodes.ranks_of(node, 5) for node in range(3)] == [(0, 1), (2, 3), (4,)]
    assert nodes.ranks_of(1, 2) == ()


@pytest.fixture(scope="module")
def agents() -> Iterator[tuple[Nodes, list[int]]]:
    """Two nodes of two ranks, and the pids of their agents."""
    environment = {**os.environ, "PYTHONPATH": HERE}
    command = [sys.executable, "-m", "shardproof.launch.nodes.agent"]
    with Workspace() as folder:
        processes = [
            subprocess.Popen([*command, str(folder), str(node)], env=environment)
            for node in range(2)
        ]
        try:
            deadline = time.monotonic() + 120
            while not all(door(folder, node).exists() for node in range(2)):
                assert time.monotonic() < deadline
                assert {process.poll() for process in processes} == {None}
                time.sleep(0.05)
            yield Nodes(folder, 2, 2), [process.pid for process in processes]
        finally:
            for process in processes:
                process.terminate()
            assert {process.wait(30) for process in processes} <= {0, -signal.SIGKILL}


def case(system: str, mesh: dict[str, int], **fields: Any) -> Case:
    usual: dict[str, Any] = {
        "id": system,
        "backend": "gloo",
        "checks": ("equivalence", "replicas", "traffic"),
        "steps": 2,
        "workload": SMALL,
    }
    return made_case(system, mesh, **(usual | fields))


CLEAN = [
    case("reference/zero3", {"shard": 4}, lane="bitwise"),
    case("pytorch/ddp", {"replicate": 3}, lane="bitwise"),
    case("reference/tensor", {"tensor": 2}),
    case("reference/ddp", {"replicate": 2}, id="threads", backend="in_memory"),
]


def run(cases: Sequence[Case], nodes: Nodes | None) -> dict[str, tuple[str, list[str]]]:
    """Verdict and digests by case."""
    found: dict[str, tuple[str, list[str]]] = {}

    def note(result: Any, account: dict[str, Any]) -> None:
        found[result.id] = f"{result.verdict} {result.reason}".strip(), digests(account["figures"])

    with Session(1, nodes) as session:
        session.run(cases, lambda _: None, on_account=note)
    return found


def digests(value: Any) -> list[str]:
    """All digests of tensors anywhere in an account, in its order."""
    if isinstance(value, dict):
        own = [value["digest"]] if isinstance(value.get("digest"), str) else []
        return own + [found for part in value.values() for found in digests(part)]
    return [found for part in value for found in digests(part)] if isinstance(value, list) else []


def descendants(pid: int) -> list[psutil.Process]:
    """Those of an agent but for its fork server."""
    return psutil.Process(pid).children(recursive=True)[1:]


@pytest.mark.launches
class TestAgents:
    def test_verdicts_and_bits_are_those_of_local_ranks_and_nothing_stays(
        self, agents: tuple[Nodes, list[int]], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        nodes, pids = agents
        monkeypatch.syspath_prepend(HERE)
        monkeypatch.setenv("PYTHONPATH", HERE)
        broken = {
            "Raises": ("crash", "rank 1 raised ValueError"),
            "IsKilled": ("crash", "rank 1 killed"),
            "CallsAnother": ("crash", "rank 1 calls broadcast"),
            "AllocatesWithoutEnd": ("crash", "memory limit"),
        }
        odd = [
            case(f"faulty_ranks:{name}", {"replicate": 3}, id=name, memory_gib=0.75)
            for name in broken
        ]
        found = run([*odd, *CLEAN], nodes)
        for name, (verdict, words) in broken.items():
            told, _ = found.pop(name)
            assert told.startswith(verdict) and words in told, told
        assert {verdict for verdict, _ in found.values()} == {"pass"}, found
        assert found == run(CLEAN, None) and all(digests for _, digests in found.values())
        deadline = time.monotonic() + 30
        while left := [process for pid in pids for process in descendants(pid)]:
            assert time.monotonic() < deadline, left
            time.sleep(0.05)

    def test_a_node_that_ends_costs_its_cases_and_is_named(
        self, agents: tuple[Nodes, list[int]]
    ) -> None:
        nodes, pids = agents
        os.kill(pids[1], signal.SIGKILL)
        found = run([CLEAN[0], CLEAN[2]], nodes)
        assert found["reference/tensor"][0] == "pass", "it lies on the other node"
        assert "node 1" in found["reference/zero3"][0], found
