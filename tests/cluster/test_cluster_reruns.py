"""What a run in containers leaves for who reads it: how a case is run again."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import pytest
from made_case import made_case
from made_engine import MadeEngine
from synthetic import case, case_line

from shardproof.cases.verdict import decide_case
from shardproof.checks.results import CaseResult
from shardproof.cluster import shape
from shardproof.cluster.containers import engine
from shardproof.evidence.account import Account
from shardproof.runs.header import Invocation
from shardproof.runs.run_folder import RunFolder


def test_a_case_of_a_cluster_is_run_again_in_one(tmp_path: Path) -> None:
    account = Account(made_case("reference/ddp", {"replicate": 2}, backend="gloo"), fault="it died")
    alone, there = decide_case(account), decide_case(account)
    stored = json.loads(json.dumps(account.to_dict(), default=str))
    declared = {"cpus": 1.0, "bits_per_second": 10**8}
    told = {"nodes": [{}, {}], "ranks_per_node": 1, "declared": declared}
    for result, cluster in ((alone, None), (there, told)):
        with RunFolder(tmp_path / str(cluster is None), ["run"]) as folder:
            if cluster is not None:
                folder.tell_cluster(cluster)
            folder.plan([account.case])
            folder.keep(result, stored)
    assert alone.rerun.startswith("shardproof run ")
    caps = "--cpus 1 --bandwidth 100mbit"
    again = f"shardproof cluster run --nodes 2 --ranks-per-node 1 {caps} "
    assert there.rerun == alone.rerun.replace("shardproof run ", again)


def invocation(*benches: str, **cluster: Any) -> Invocation:
    told = {"nodes": [{}, {}], "ranks_per_node": 2, "declared": {}} | cluster
    fields = {"command": ["run"], "suite": "1", "python": "3", "packages": {}}
    fields |= {"fingerprint": {"cpu": "EPYC", "cores": 2}, "cluster": told}
    return Invocation.model_validate(fields | {"benches": list(benches)})


SLOW: Any = {"slow_nodes": {"node1": {"bits_per_second": 50 * 10**6}}}


@pytest.mark.parametrize(
    ("told", "says"),
    [
        (invocation(), ""),
        (invocation(**SLOW), ", node1 of 50 mbit/s"),
        (invocation("a bench"), " of 2 ranks"),
        (invocation("a bench", ranks_per_node=1), ""),
        (
            invocation(declared={"delay_seconds": 0.01}, delayed_by="ranks"),
            " of 10 ms a message, delayed by ranks",
        ),
    ],
)
def test_what_changes_a_figure_is_a_part_of_the_hardware(told: Invocation, says: str) -> None:
    assert told.hardware == f"EPYC, 2 cores, as 2 nodes{says}"


@pytest.mark.parametrize(
    ("nodes", "says"),
    [
        ([{"name": "a", "ranks": [0, 1]}, {"name": "b", "ranks": [2, 3]}], ", as 2 nodes"),
        ([{"name": "a", "ranks": [0, 1]}], ""),
        ([{"name": "a", "cpus": 2}, {"name": "b", "cpus": 2}], ""),  # of Ray
    ],
)
def test_hosts_that_ranks_came_from_are_a_part_of_the_hardware(nodes: Any, says: str) -> None:
    told = invocation(nodes=nodes, ranks_per_node=None, declared=None)
    assert told.hardware == f"EPYC, 2 cores{says}"
    assert told.run_command == "shardproof run"


def test_the_command_that_runs_a_case_again_can_be_typed() -> None:
    """Whatever was: each option takes what it says, and means the same."""
    size = 1234567 << 10
    command = invocation(declared={"memory_bytes": size, "delay_seconds": 0.0015}, **SLOW)
    words = shlex.split(command.run_command)
    given = dict(zip(words[3::2], words[4::2], strict=True))
    assert shape.memory(given["--memory"]) == size
    assert shape.memory(f"{size}") == size
    assert float(given["--delay"]) == 1.5
    node, caps = shape.slow_node(given["--slow-node"])
    assert (node, caps.bits_per_second) == (1, 50 * 10**6)


def test_a_cluster_runs_the_same_command_in_its_head(
    command: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = tmp_path / "first"
    with RunFolder(first, ["shardproof", "run"]) as run:
        run.plan([case(0)])
        run.add(CaseResult.from_dict(case_line(case(0), "pass", "", [])))
        run.close(0)
    made = MadeEngine()
    monkeypatch.setattr(engine, "client", lambda: made)
    monkeypatch.setattr(engine, "build", lambda *_, **__: {"rank": "sha256:1", "judge": "sha256:2"})
    again = tmp_path / "again"
    words = ("--cluster", "--nodes", "3", "--results", str(again), "-k", "adamw", "-j", "2")
    code, out, err = command("reproduce", str(first), *words)
    assert code == 0, out + err
    ((_, words_there),) = made.executed[-1][:1]
    told = ["reproduce", str(first.resolve()), "-k", "adamw", "-j", "2", "--results", str(again)]
    assert words_there[-len(told) :] == told
    head, _, *nodes = made.made
    assert len(nodes) == 3, "two ranks on each, for the run itself had no nodes"
    mounts = {mount["Target"]: mount["ReadOnly"] for mount in head.asked[2]["mounts"]}
    assert mounts == {str(first.resolve()): True, str(again): False}
