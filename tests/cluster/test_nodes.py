"""Ranks on nodes: agents as processes of this machine, which containers only take further apart."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest
from made_case import made_case

from shardproof.backends.mpi import found as mpi_found
from shardproof.case import Case, WorkloadSpec
from shardproof.cases.runner import Session
from shardproof.cluster.nodes.condition import CUT_OFF, QUESTION, WELL, Inquiry
from shardproof.cluster.nodes.doors import door
from shardproof.cluster.nodes.ranks import ClusterNodes
from shardproof.launch.diagnosis import Lost
from shardproof.launch.nodes import Nodes
from shardproof.launch.workspace import Workspace
from shardproof.registry import preflight

HERE = str(Path(__file__).parents[1] / "support")
SMALL = WorkloadSpec("charnames_gpt", params={"layers": 1, "width": 16})


def test_consecutive_ranks_share_a_node() -> None:
    nodes = ClusterNodes(3, 2)
    assert nodes.places == 6
    assert [nodes.ranks_of(node, 5) for node in range(3)] == [(0, 1), (2, 3), (4,)]
    assert nodes.ranks_of(1, 2) == ()


def as_host(node: int) -> list[str]:
    """What gives a process a host's name of its own, by which Open MPI tells nodes apart."""
    rename = ["unshare", "--uts", "sh", "-c", 'hostname "$0" && exec "$@"', f"node{node}"]
    possible = shutil.which("unshare") and not subprocess.call([*rename, "true"], stderr=-3)
    return rename if possible else []


@pytest.fixture(scope="module")
def agents() -> Iterator[tuple[Nodes, list[int]]]:
    """Two nodes of two ranks, and the pids of their agents."""
    # Open MPI takes the addresses of this machine's network for those of two.
    environment = {**os.environ, "PYTHONPATH": HERE, "OMPI_MCA_btl_tcp_if_include": "lo"}
    command = [sys.executable, "-m", "shardproof.cluster.nodes.agent"]
    with Workspace() as folder:
        processes = [
            subprocess.Popen([*as_host(node), *command, str(folder), str(node)], env=environment)
            for node in range(2)
        ]
        try:
            deadline = time.monotonic() + 120
            while not all(door(folder, node).exists() for node in range(2)):
                assert time.monotonic() < deadline
                assert {process.poll() for process in processes} == {None}
                time.sleep(0.05)
            yield ClusterNodes(2, 2, folder=folder), [process.pid for process in processes]
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


def faulty(name: str, **fields: Any) -> Case:
    return case(f"faulty_ranks:{name}", {"replicate": 3}, id=name, **fields)


#: A class that notes at each import what has started its process.
TELLS = """
import os
from pathlib import Path
from shardproof.impls.reference.ddp import ReferenceDDP


def above(pid):
    # psutil's parents() compares times of starts, and stops early if the clock was set.
    while pid > 1:
        pid = int(Path(f"/proc/{{pid}}/stat").read_text().rsplit(")", 1)[1].split()[1])
        yield Path(f"/proc/{{pid}}/cmdline").read_bytes().replace(bytes(1), b" ").decode()


with open("{file}", "a") as file:
    print(*" ".join(above(os.getpid())).split(), file=file)


class Mine(ReferenceDDP):
    pass
"""
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


def nothing_stays(pids: Sequence[int]) -> None:
    """What cases had is gone, at most a moment later."""
    deadline = time.monotonic() + 30
    while left := [process for pid in pids for process in descendants(pid)]:
        assert time.monotonic() < deadline, left
        time.sleep(0.05)


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
        odd = [faulty(name, memory_gib=0.75) for name in broken]
        found = run([*odd, *CLEAN], nodes)
        for name, (verdict, words) in broken.items():
            told, _ = found.pop(name)
            assert told.startswith(verdict) and words in told, told
        assert {verdict for verdict, _ in found.values()} == {"pass"}, found
        assert found == run(CLEAN, None) and all(digests for _, digests in found.values())
        nothing_stays(pids)

    def test_a_users_class_is_imported_by_agents_only(
        self,
        agents: tuple[Nodes, list[int]],
        monkeypatch: pytest.MonkeyPatch,
        tmp_path: Path,
    ) -> None:
        """Neither by a leader, nor where its options are asked for before a run."""
        nodes, pids = agents
        monkeypatch.syspath_prepend(HERE)
        monkeypatch.setattr(Nodes, "here", lambda: nodes)
        (tmp_path / "tells_its_place.py").write_text(TELLS.format(file=tmp_path / "places"))
        name = f"{tmp_path / 'tells_its_place.py'}:Mine"
        assert preflight.check([name]) == {name: ["replicate"]}
        cases = [
            case(name, {"replicate": 2}, id=backend, backend=backend)
            for backend in ("gloo", "in_memory")
        ]
        told = [verdict for verdict, _ in run(cases, nodes).values()]
        assert told == ["pass", "pass"], told
        places = (tmp_path / "places").read_text().splitlines()
        # Before the run one, one for each case, two ranks of gloo, and one for both threads.
        assert len(places) == 1 + 2 + 2 + 1, places
        elsewhere = [place for place in places if "shardproof.cluster.nodes.agent" not in place]
        assert not elsewhere, "\n".join(elsewhere)
        nothing_stays(pids)

    @pytest.mark.skipif(mpi_found.problem() is not None, reason=str(mpi_found.problem()))
    @pytest.mark.skipif(not as_host(0), reason="needs hosts' names of its own")
    def test_agents_start_the_daemons_of_an_mpirun(
        self, agents: tuple[Nodes, list[int]], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        nodes, pids = agents
        monkeypatch.syspath_prepend(HERE)
        cases = [
            case("reference/zero3", {"shard": 4}, lane="bitwise", backend="mpi"),
            case("faulty_ranks:IsKilled", {"replicate": 3}, backend="mpi"),
        ]
        found = run(cases, nodes)
        assert "rank 1 killed" in found["faulty_ranks:IsKilled"][0]
        memory = case("reference/zero3", {"shard": 4}, lane="bitwise", backend="in_memory")
        assert found["reference/zero3"] == run([memory], None)["reference/zero3"]
        nothing_stays(pids)

    def test_a_paused_node_is_told_and_serves_again(
        self, agents: tuple[Nodes, list[int]], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        nodes, pids = agents
        monkeypatch.syspath_prepend(HERE)
        monkeypatch.setenv("PYTHONPATH", HERE)
        pauses = faulty("PausesItsNode", deadline=3.0)
        try:
            found = run([pauses, CLEAN[2]], nodes)
        finally:
            agent = psutil.Process(pids[0])
            for process in (agent, *agent.children(recursive=True)):
                # The agent ends its ranks as soon as it runs again.
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.resume()
        told, _ = found["PausesItsNode"]
        assert told.startswith("hang lost node: node0 (ranks 0-1) is paused; rank 2 waits in "), (
            told
        )
        told, _ = found[CLEAN[2].id]
        assert told == "judge error node0 (ranks 0-1) is paused, and this case needs it"
        assert run([CLEAN[2]], nodes)[CLEAN[2].id][0] == "pass"

    def test_a_node_that_ends_costs_its_cases_and_is_named(
        self, agents: tuple[Nodes, list[int]], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        nodes, pids = agents
        monkeypatch.syspath_prepend(HERE)
        monkeypatch.setenv("PYTHONPATH", HERE)
        os.kill(pids[1], signal.SIGKILL)
        found = run([CLEAN[0], CLEAN[2]], nodes)
        assert found["reference/tensor"][0] == "pass", "it lies on the other node"
        told, _ = found["reference/zero3"]
        assert told == "judge error node1 (ranks 2-3) has ended, and this case needs it"
        last = case("faulty_ranks:EndsItsNode", {"replicate": 2}, id="last")
        told, _ = run([last], nodes)["last"]
        assert told.startswith("crash rank 0 killed: node0 (ranks 0-1) has ended, and all its"), (
            told
        )


def test_an_agent_that_lost_its_network_says_so() -> None:
    ours, agent = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, agent:
        inquiry = Inquiry(ours)
        told = []
        for answer in (WELL, CUT_OFF, WELL):
            inquiry.how()
            assert agent.recv(64) == QUESTION
            agent.send(answer)
            told.append(inquiry.how())
        assert told == [None, "cut off", None]
        agent.close()
        inquiry.how()
        assert inquiry.how() == "ended"
    assert str(Lost(1, (2,), "cut off")) == "node1 (rank 2) is cut off from the network"
