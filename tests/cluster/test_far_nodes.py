"""Messages between nodes that come late, and one node that has less than the others."""

from __future__ import annotations

import json
import os
import struct
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import docker
import pytest
import torch
from made_case import made_case
from made_engine import MadeEngine, assert_refused_at_once, made_cluster
from real_engine import left_of, real_engine

from shardproof.backends.disturbances import Disturbances
from shardproof.backends.request import Request
from shardproof.cluster import shape
from shardproof.cluster.containers import caps, cluster, node_caps
from shardproof.cluster.containers.caps import Caps
from shardproof.cluster.containers.engine import NoCluster
from shardproof.cluster.nodes import far as far_nodes
from shardproof.cluster.nodes.far import FarNodes
from shardproof.cluster.nodes.ranks import ClusterNodes
from shardproof.launch.nodes import ENVIRONMENT, Nodes
from shardproof.launch.rank_process import RankLaunch

FAR = FarNodes(0.25, ranks_per_node=2)
TWO_NODES, ONE_NODE = (0, 1, 2, 3), (2, 3)


@pytest.mark.parametrize(
    ("operation", "members", "messages"),
    [
        ("all_reduce", TWO_NODES, 3),  # six around the ring of four, every second one crosses
        ("all_reduce", (0, 2), 2),
        ("all_reduce", (0, 2, 4, 6), 6),
        ("all_gather", (0, 2, 4, 6), 3),
        ("reduce_scatter", (0, 2), 2),
        ("broadcast", (0, 2, 4, 6), 2),
        ("broadcast", TWO_NODES, 1),
        ("all_to_all", TWO_NODES, 1),
        ("all_reduce", ONE_NODE, 0),
        ("send", TWO_NODES, 0),
    ],
)
def test_a_call_is_late_by_its_messages_between_nodes(
    operation: str, members: tuple[int, ...], messages: int
) -> None:
    assert FAR.late(Request(operation), members, 0) == messages * 0.25


def test_a_message_is_late_where_it_comes_from_another_node() -> None:
    late = [FAR.late(Request("recv", peer=peer), TWO_NODES, 1) for peer in (0, 2, None)]
    assert late == [0, 0.25, 0.25]
    assert FAR.late(Request("recv"), ONE_NODE, 0) == 0, "any rank of the same node"


def test_what_is_late_comes_at_its_time_whoever_waits() -> None:
    """A caller that computes meanwhile does not wait for it once more."""
    result = torch.ones(2)
    work = SimpleNamespace(wait=lambda: None)
    began = time.monotonic()
    handle = far_nodes._Late(Request("all_reduce", outputs=[[result]]), work, 0.2)
    assert not handle.is_completed()
    future = handle.get_future()
    time.sleep(0.1)
    handle.wait()
    assert time.monotonic() - began >= 0.2 and handle.is_completed()
    assert future.value()[0] is result


def test_a_call_that_breaks_under_way_breaks_where_it_is_waited_for() -> None:
    def broken() -> None:
        raise ConnectionError("peer closed")

    handle = far_nodes._Late(Request("all_reduce"), SimpleNamespace(wait=broken), 0.0)
    with pytest.raises(ConnectionError, match="peer closed"):
        handle.wait()


def test_ranks_are_told_that_nodes_are_far(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told = {"nodes": 2, "ranks_per_node": 2, "far_seconds": 0.25}
    monkeypatch.setenv(ENVIRONMENT, json.dumps(told))
    nodes = Nodes.here()
    assert isinstance(nodes, ClusterNodes)
    given = Disturbances(skew_s=0.1)
    launch = RankLaunch("gloo", 4, lambda rank, world: {}, tmp_path, 1.0, disturbances=given)
    assert nodes.host()._delayed(launch).disturbances == replace(given, far=FAR)


def test_cases_whose_messages_nobody_delays_are_skipped() -> None:
    cases = [
        made_case("reference/ddp", {"replicate": 2}, backend=backend)
        for backend in ("in_memory", "gloo", "mpi", "nccl")
    ]
    far = ClusterNodes(2, 2, far_seconds=0.01)
    reasons = {case.backend: case.skip for case in far.with_room(cases) if case.skip}
    assert list(reasons) == ["mpi", "nccl"] and "only messages of gloo" in reasons["mpi"]
    assert replace(far, far_seconds=0.0).with_room(cases) == cases


def delayed(engine: MadeEngine, results: Path, exit_status: int) -> list[str]:
    """Run a cluster whose kernel ends `delay` with that code; what the run says."""
    start, said = engine.containers.run, list[str]()

    def run(image: str, command: list[str], **options: object) -> object:
        if "delay" in command and exit_status:
            raise docker.errors.ContainerError(options["name"], exit_status, command, image, b"no")
        return start(image, command, **options)

    engine.containers = SimpleNamespace(run=run, list=engine.containers.list)
    made = replace(made_cluster(results), caps=Caps(delay_seconds=0.01))
    cluster.run(engine, made, ["run"], said.append)
    return said


@pytest.mark.parametrize(
    ("exit_status", "by", "says"),
    [(0, "kernel", []), (node_caps.NO_NETEM, "ranks", ["no netem: ranks delay"])],
)
def test_the_kernel_delays_or_else_the_ranks(
    exit_status: int, by: str, says: list[str], tmp_path: Path
) -> None:
    engine = MadeEngine()
    engine.probed["round_trip"] = b"0.021 0.0204"
    said = delayed(engine, tmp_path, exit_status)
    assert len(said) == len(says) + 1 and all(text in said[0] for text in says)
    (_, named) = engine.executed[-1]
    told = json.loads(named["environment"]["SHARDPROOF_CLUSTER"])
    assert told.get("far_seconds") == (0.01 if by == "ranks" else None)
    assert told["told"]["delayed_by"] == by
    assert told["told"]["measured"] == {"delay_seconds": [0.0105, 0.0102]}


def test_a_delay_that_is_too_far_off_ends_the_run(tmp_path: Path) -> None:
    engine = MadeEngine()
    engine.probed["round_trip"] = b"0.05 0.02"
    with pytest.raises(NoCluster) as refused:
        delayed(engine, tmp_path, 0)
    assert "node 0: declared 10 ms a message, measured 25 ms a message" in str(refused.value)
    with pytest.raises(NoCluster, match="no"):
        delayed(MadeEngine(), tmp_path, 1)


def test_the_kernel_is_asked_for_a_delay() -> None:
    message = node_caps.delaying(7, 10_000_000, below=False)
    length, kind, _, _, _ = struct.unpack_from("=IHHII", message)
    _, interface, _, parent, _ = struct.unpack_from("=BxxxiIII", message, 16)
    assert (length, kind, interface, parent) == (len(message), 36, 7, 0xFFFFFFFF)
    assert b"netem\0" in message
    assert message.endswith(struct.pack("=HHq", 12, 10, 10_000_000)), "in nanoseconds"
    below = node_caps.delaying(7, 10_000_000, below=True)
    assert struct.unpack_from("=BxxxiIII", below, 16)[3] == 0x10001, "of what shape has set"


def test_one_node_has_less(tmp_path: Path) -> None:
    engine = MadeEngine()
    engine.probed["cores"] = b"0.52"
    slow = replace(made_cluster(tmp_path), slow={1: Caps(cpus=0.5)})
    assert cluster.run(engine, slow, ["run"], print) == 0
    nodes = [part for part in engine.made if part.name[-5:-1] == "node"]
    assert [part.asked[2].get("nano_cpus") for part in nodes] == [None, 500_000_000]
    (_, named) = engine.executed[-1]
    told = json.loads(named["environment"]["SHARDPROOF_CLUSTER"])["told"]
    assert told["declared"] == {"memory_bytes": 1 << 30}
    assert told["slow_nodes"] == {"node1": {"cpus": 0.5}}
    assert told["measured"] == {"memory_bytes": [1 << 30, 1 << 30], "cpus": [None, 0.52]}
    assert len([words for (_, words), _ in engine.executed if "cores" in words]) == 1
    assert caps.declared_of(slow.node_caps)["cpus"] == [None, 0.5]


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--delay", "0.1"], "--delay"),
        (["--delay", "5", "--nodes", "1"], "choose --nodes 2"),
        (["--slow-node", "1"], "'1' is not of the form N:cpus=C or N:bandwidth=RATE"),
        (["--slow-node", "1:cpus=0"], "'0' is not valid: give 0.05 cores or more"),
        (["--slow-node", "1:cpus=1e3"], "'1e3' is not valid: give 0.05 cores or more"),
        (["--slow-node", "1:cpus=9999"], "'9999' is too large: this machine has"),
        (["--cpus", "9999"], "'9999' is too large: this machine has"),
        (["--cpus", "inf"], "'inf' is not valid: give 0.05 cores or more"),
        (["--cpus", "nan"], "'nan' is not valid: give 0.05 cores or more"),
        (["--delay", "nan"], "--delay"),
        (["--memory", "900000g"], "'900000g' is too large: this"),
        (["--slow-node", "1:bandwidth=fast"], "'fast' is not a rate"),
        (["--slow-node", "2:cpus=0.5"], "there is no node 2"),
        (
            ["--slow-node", "0:cpus=0.5", "--nodes", "1"],
            "a single node cannot be slower than others",
        ),
    ],
)
def test_bad_weather_is_told_before_anything_is_built(
    words: list[str], says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert_refused_at_once(monkeypatch, says, "run", "ddp-gpt", *words)


def test_words_of_a_slow_node() -> None:
    assert shape.slow_node("1:cpus=0.5") == (1, Caps(cpus=0.5))
    assert shape.slow_node("0:bandwidth=10mbit") == (0, Caps(bits_per_second=10**7))


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_far_nodes_compute_the_same_bits(tmp_path: Path) -> None:
    """With a kernel that delays and with one that cannot; `reproduce` compares digests."""
    engine = real_engine()
    tmp_path.chmod(0o755)
    (tmp_path / "s.yaml").write_text(
        "name: far\nabout: nodes are far from each other\nsees: nothing\n"
        "workload: {name: charnames_gpt}\n"
        "matrix: {implementation: reference/naive_ddp, backend: gloo,\n"
        "  mesh: {replicate: 2}, optimizer: sgd, lane: bitwise}\n"
        "checks: equivalence\n"
    )
    python = [sys.executable, "-m", "shardproof"]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    where: dict[str, Any] = {"cwd": tmp_path, "env": environment, "timeout": 280}
    far = ["cluster", "run", "s.yaml", "--ranks-per-node", "1", "--delay", "200"]
    assert subprocess.call([*python, *far, "--results", "run"], **where) == 0
    assert not left_of(engine, tmp_path / "run")
    told = json.loads((tmp_path / "run/run.json").read_text())["invocations"][-1]["cluster"]
    assert told["delayed_by"] in ("kernel", "ranks")
    assert told["measured"]["delay_seconds"] == pytest.approx([0.2, 0.2], rel=caps.TOLERANCE)
    assert subprocess.call([*python, "reproduce", "run", "--results", "here"], **where) == 0
