"""Faults of nodes: what a plan says, where it strikes, what the engine's client is asked for."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import docker
import pytest
from made_case import made_case
from made_engine import assert_refused_at_once
from real_engine import left_of, real_engine

from shardproof.case import Case, Fault
from shardproof.cluster import fault_plans
from shardproof.cluster.containers import caps
from shardproof.cluster.containers.caps import Caps
from shardproof.cluster.containers.node_faults import NodeFaults
from shardproof.cluster.fault_plans import Plan
from shardproof.cluster.nodes import asking
from shardproof.cluster.nodes.keeper import ended_for_memory
from shardproof.errors import SelectionError
from shardproof.launch.nodes import without_node_faults

ROOT = Path(__file__).resolve().parents[2]


def case(name: str, world: int, **fields: Any) -> Case:
    return made_case("reference/ddp", {"replicate": world}, id=name, **fields)


CASES = [
    case("threads", 4, backend="in_memory"),
    case("one node", 2, backend="gloo"),
    case("first", 4, backend="gloo"),
    case("second", 3, backend="gloo"),
]


def test_a_plan_strikes_the_first_rank_of_a_node_in_one_case() -> None:
    plan = Plan.parse("pause_node,node=1,case=2,step=2,phase=backward,seconds=0.5")
    struck = {c.id: c.fault for c in plan.applied(CASES, 2, 2) if c.fault is not None}
    assert struck == {"second": Fault("pause_node", 2, 2, "backward", (), seconds=0.5)}
    assert Plan.parse(str(plan)) == plan
    assert Plan.parse("stop_head").applied(CASES, 2, 2)[1].fault is not None, "node 0, case 1"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("kil_node", "unknown kind of fault (--fault kil_node) - did you mean kill_node?"),
        ("kill_node,node", "'node' is not a valid field of a fault"),
        ("kill_node,kind=x", "'kind=x' is not a valid field of a fault"),
        ("kill_node,case=0", "'case=0' is not a valid field of a fault"),
        ("kill_node,phase=load", "'phase=load' is not a valid field of a fault"),
        ("pause_node,seconds=-1", "'seconds=-1' is not a valid field of a fault"),
        ("kill_node,node=2", "node 2 is unknown"),
        ("kill_node,node=1,case=3", "2 cases have a rank on node 1"),
        ("kill_node,step=3", "one node has no step 3"),
    ],
)
def test_a_plan_that_says_nothing_that_can_be_done(text: str, says: str) -> None:
    with pytest.raises(SelectionError) as told:
        Plan.parse(text).applied(CASES, 2, 2)
    assert says in str(told.value)


@pytest.mark.parametrize("cut", [("--shard", "2/2"), ("--budget", "1")])
def test_a_fault_whose_case_may_be_left_out_is_refused(
    cut: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would not strike, and the run be green."""
    words = ("run", "ddp-gpt", "--backend", "gloo", *cut, "--fault", "kill_node")
    assert_refused_at_once(monkeypatch, f"{cut[0]} may leave out the case", *words)


def test_a_case_that_trains_nothing_has_no_step_to_strike_at() -> None:
    calls = [case("calls", 4, backend="gloo", steps=0)]
    with pytest.raises(SelectionError, match="calls trains nothing and has no steps"):
        Plan.parse("kill_node,step=0").applied(calls, 2, 2)


def test_without_nodes_such_cases_are_skipped() -> None:
    planned = Fault("kill_node", 2, 1, "forward", ("crash",))
    cases = [case("other", 4), case("planned", 4, backend="gloo", fault=planned)]
    here, there = (
        {c.id: c.skip for c in planned}
        for planned in (without_node_faults(cases), fault_plans.with_planned(cases, FACTS))
    )
    assert here["other"] is None and "fault kill_node: ranks are not on nodes here" in str(here)
    assert there == {"other": None, "planned": None}


FACTS: dict[str, Any] = {"nodes": 2, "ranks_per_node": 2, "faults": {}}


class Box:
    """A container that notes what it is told."""

    def __init__(self, name: str) -> None:
        self.name, self.id, self.told = name, name, list[str]()

    def exec_run(self, words: Sequence[str]) -> None:
        subprocess.run(words, check=True)

    def pause(self) -> None:
        self.told.append("pause")

    def unpause(self) -> None:
        self.told.append("unpause")

    def kill(self) -> None:
        raise docker.errors.APIError("no such container")


@pytest.mark.timeout(60)
def test_who_asks_goes_on_when_it_is_done(tmp_path: Path) -> None:
    """By the pipe and the answers of the real thing; only the containers are made up."""

    def start(words: list[str], **_: Any) -> Any:
        process = subprocess.Popen([*words[:-1], str(tmp_path / asking.PIPE)], stdout=-1)
        assert process.stdout is not None
        processes.append(process)
        return iter(process.stdout.readline, b"")

    processes: list[subprocess.Popen[bytes]] = []
    api = SimpleNamespace(exec_create=lambda _, words: {"Id": words}, exec_start=start)
    node = Box("node1")
    boxes, declared = [Box("node0"), node], [Caps(cpus=1)] * 2
    engine = SimpleNamespace(api=api)
    faults = NodeFaults(engine, Box("head"), boxes, declared, lambda *_: None)
    with faults.served():
        asking.ask(tmp_path, "pause_node", 1)
        assert node.told == ["pause"]
        asking.ask(tmp_path, asking.HEAL, 1)
        asking.ask(tmp_path, asking.HEAL, 1)
        assert node.told == ["pause", "unpause"], "it is undone once"
        asking.ask(tmp_path, "pause_node", 1, seconds=0.01)
        while len(node.told) < 4:
            threading.Event().wait(0.01)
        with pytest.raises(asking.NotDone, match="kill_node for node 0: no such container"):
            asking.ask(tmp_path, "kill_node", 0)
        with pytest.raises(asking.NotDone, match="capped already: leave out --cpus"):
            asking.ask(tmp_path, "slow_node", 1)
    for process in processes:
        process.kill()
        process.communicate()
    assert not list(tmp_path.glob("answer*"))
    with pytest.raises(asking.NotDone, match="this run cannot inject faults into nodes"):
        asking.ask(tmp_path / "nowhere", "pause_node", 1)


def test_a_node_that_starts_again_has_its_weather(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bandwidth and delay went with its network."""
    told: list[tuple[object, ...]] = []
    node = SimpleNamespace(kill=lambda: None, start=lambda: told.append(("start",)))
    head = SimpleNamespace(exec_run=lambda _: None)
    monkeypatch.setattr(caps, "wait", lambda *_: told.append(("wait",)))
    own = Caps(bits_per_second=10**8, delay_seconds=0.005)
    helper = lambda _, *words: told.append(words)  # noqa: E731
    NodeFaults(None, head, [node], [own], helper, delays=True)._kill_node(0)()
    weather = [("shape", 12_500_000), ("delay", 5000, "below")]
    assert told == [("start",), *weather, ("wait",)]


def test_the_kernel_tells_whom_it_ended_for_memory(tmp_path: Path) -> None:
    assert ended_for_memory(tmp_path) == 0
    (tmp_path / "memory").mkdir()
    (tmp_path / "memory" / "memory.oom_control").write_text("under_oom 0\noom_kill 3\n")
    assert ended_for_memory(tmp_path) == 3
    (tmp_path / "memory.events").write_text("max 9\noom 2\noom_kill 1\n")
    assert ended_for_memory(tmp_path) == 1


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_faults_of_nodes_in_containers(tmp_path: Path) -> None:
    """The scenarios as one runs them; no pause, which the tests of agents have."""
    engine = real_engine()
    chosen = [
        "cluster",
        "cluster-checkpoint",
        "--tier",
        "full",
        "-k",
        "not pause and not slow_node",
    ]
    command = [sys.executable, "-m", "shardproof", "cluster", "run", *chosen]
    done = subprocess.run(
        [*command, "--results", str(tmp_path / "run")], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    lines = (tmp_path / "run" / "cases.jsonl").read_text().splitlines()
    assert [json.loads(line)["verdict"] for line in lines] == ["pass"] * 7
    verified = [sys.executable, "-m", "shardproof", "verify", str(tmp_path / "run")]
    assert subprocess.run(verified, cwd=ROOT).returncode == 0
    assert not left_of(engine, tmp_path / "run")
