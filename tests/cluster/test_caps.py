"""Caps of nodes: what is asked of the kernel, how they are measured, and what is too far off."""

from __future__ import annotations

import json
import struct
import threading
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import MagicMock

import docker
import pytest
from made_engine import MadeEngine, made_cluster

from shardproof.cluster.containers import caps, cluster, node_caps
from shardproof.cluster.containers.caps import Caps
from shardproof.cluster.containers.engine import NoCluster

MBIT = 10**6


def capped(results: Path, declared: Caps) -> cluster.Cluster:
    return replace(made_cluster(results), caps=declared)


def test_only_what_caps_bandwidth_may_change_a_network(tmp_path: Path) -> None:
    engine = MadeEngine()
    engine.probed["receive"] = b"12000000.0"
    declared = Caps(bits_per_second=100 * MBIT)
    assert cluster.run(engine, capped(tmp_path, declared), ["run"], print) == 0
    helpers = [part for part in engine.made if part.name.endswith("-caps")]
    assert [part.asked[2]["network_mode"] for part in helpers] == [
        "container:id-of-shardproof-1-2-node0",
        "container:id-of-shardproof-1-2-node1",
    ]
    for part in helpers:
        _, command, options = part.asked
        assert command[-2:] == ["shape", "12500000"]
        assert options["cap_drop"] == ["ALL"] and options["cap_add"] == ["NET_ADMIN"]
        assert options["read_only"] and options["remove"] and not options.get("mounts")
    others = [part for part in engine.made if part not in helpers]
    assert not any("cap_add" in part.asked[2] for part in others if isinstance(part.asked, tuple))
    (_, told) = engine.executed[-1]
    facts = json.loads(told["environment"]["SHARDPROOF_CLUSTER"])["told"]
    assert facts["declared"] == {"bits_per_second": 100 * MBIT}
    assert facts["measured"] == {"bits_per_second": [96 * MBIT, 96 * MBIT]}
    senders = [where for (where, words), _ in engine.executed if "send" in words]
    assert senders == ["id-of-shardproof-1-2-node0", "id-of-shardproof-1-2-node1"]


@pytest.mark.parametrize(
    ("declared", "probed", "says"),
    [
        (
            Caps(bits_per_second=100 * MBIT),
            {"receive": b"500000000"},
            "node 0: declared 100 mbit/s, measured 4000 mbit/s, more than 20% off: the",
        ),
        (
            Caps(cpus=2),
            {"cores": b"0.9"},
            "node 1: declared 2 cores, measured 0.9 cores, more than 20% off: end other work",
        ),
        (
            Caps(memory_bytes=1 << 30),
            {"memory": b"0"},
            "declared 1024 MiB, measured no limit of memory, more than 20% off: the",
        ),
        (Caps(cpus=1), {"cores": b"1.19"}, ""),
        (Caps(), {}, ""),
    ],
)
def test_a_cap_that_is_too_far_off_ends_the_run(
    declared: Caps, probed: dict[str, bytes], says: str, tmp_path: Path
) -> None:
    engine = MadeEngine()
    engine.probed |= probed
    run = capped(tmp_path, declared)
    if not says:
        assert cluster.run(engine, run, ["run"], print) == 0
        return
    with pytest.raises(NoCluster) as refused:
        cluster.run(engine, run, ["run"], print)
    assert says in str(refused.value)
    assert not engine.parts


def test_a_moment_of_another_program_spoils_no_measure() -> None:
    half = [0.5, 0.5]
    tries = iter([[0.2, 0.5], [0.45, 0.5], [0.1, 0.1]])
    assert caps._best(lambda _: next(tries), half) == [0.45, 0.5]
    tries = iter([[0.2, 0.5], [0.3, 0.3], [0.1, 0.1]])
    assert caps._best(lambda _: next(tries), half) == [0.3, 0.3], "the nearest is told"
    tries = iter([[None, 0.5]])
    assert caps._best(lambda _: next(tries), [None, 0.5]) == [None, 0.5], "one node is capped"


def test_a_kernel_that_takes_no_cap_is_told(tmp_path: Path) -> None:
    engine = MadeEngine()
    start = engine.containers.run

    def refuse(image: str, command: list[str], **options: object) -> object:
        if "shape" in command:
            said = b"bandwidth cannot be capped: no tbf; load the kernel module sch_tbf\n"
            raise docker.errors.ContainerError(options["name"], 1, command, image, said)
        return start(image, command, **options)

    engine.containers = SimpleNamespace(run=refuse, list=engine.containers.list)
    with pytest.raises(NoCluster, match="load the kernel module sch_tbf"):
        cluster.run(engine, capped(tmp_path, Caps(bits_per_second=MBIT)), ["run"], print)
    assert not engine.parts


def test_the_kernel_is_asked_for_a_token_bucket() -> None:
    message = node_caps.shaping(7, 12_500_000)
    length, kind, _, _, _ = struct.unpack_from("=IHHII", message)
    family, interface, _, parent, _ = struct.unpack_from("=BxxxiIII", message, 16)
    assert (length, kind, family, interface) == (len(message), 36, 0, 7)
    assert parent == 0xFFFFFFFF and b"tbf\0" in message
    assert struct.pack("=III", 12_500_000, 0, 0) in message, "the rate, and no peak"
    assert message.endswith(struct.pack("=HHI", 8, 6, 25_000)), "what passes in 2 ms"
    slow = node_caps.shaping(7, 125_000)
    assert struct.pack("=I", (1 << 14) + (1 << 18)) in slow, "room for what TCP hands over at once"


def test_bytes_are_sent_and_received() -> None:
    """A megabyte over this machine's loopback."""
    found: list[float] = []
    receiver = threading.Thread(target=lambda: found.append(node_caps.receive("65536", port=29417)))
    receiver.start()
    node_caps.send("127.0.0.1", str(1 << 20), port=29417)
    receiver.join()
    assert found[0] > 0


def test_what_comes_at_once_is_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """64 KiB at once in two pieces, then 1000 bytes a second, by a clock of its own."""
    now, parts = [0.0], iter([(0.0, 32768), (0.0, 32768), *[(0.5, 500)] * 3, (0.0, 0)])

    def recv(_: int) -> bytes:
        seconds, count = next(parts)
        now[0] += seconds
        return bytes(count)

    sender = MagicMock(recv=recv)
    server = SimpleNamespace(settimeout=lambda _: None, accept=lambda: (sender, None))
    monkeypatch.setattr(node_caps.socket, "create_server", lambda _: nullcontext(server))
    monkeypatch.setattr(node_caps.time, "monotonic", lambda: now[0])
    assert node_caps.receive("65536") == 1000.0


def test_cores_and_memory_of_a_node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node_caps, "_BUSY_SECONDS", 0.1)
    assert 0 < float(node_caps.cores("1")) < 1.5
    assert node_caps.memory(str(tmp_path)) == 0
    (tmp_path / "memory").mkdir()
    (tmp_path / "memory/memory.limit_in_bytes").write_text("1073741824\n")
    assert node_caps.memory(str(tmp_path)) == 1 << 30
    (tmp_path / "memory.max").write_text("536870912\n")
    assert node_caps.memory(str(tmp_path)) == 1 << 29


def test_an_agent_that_does_not_come_is_named(tmp_path: Path) -> None:
    (tmp_path / "node0").touch()
    node_caps.wait(str(tmp_path / "node0"))
    with pytest.raises(node_caps.NoCap, match="the agent of node1 has not started"):
        node_caps.wait(str(tmp_path / "node1"), seconds=0.0)
