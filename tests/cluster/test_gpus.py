"""GPUs for nodes: who gets which, what is told where there are none, and the way by hand."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml
from made_case import made_case
from made_engine import MadeEngine, made_cluster
from real_engine import compose

from shardproof.cluster.containers import cluster
from shardproof.cluster.containers import engine as engine_room
from shardproof.cluster.containers.engine import NoCluster
from shardproof.cluster.containers.needs import Gpus, Needs, require_gpus
from shardproof.commands import main as command_line
from shardproof.verdicts import NOT_DECIDED

ROOT = Path(__file__).resolve().parents[2]


def engine_with(*runtimes: str) -> SimpleNamespace:
    """Says which runtimes it has."""
    return SimpleNamespace(info=lambda: {"Runtimes": {name: {} for name in runtimes}})


def test_gpus_are_for_backends_that_were_asked_for_or_can_run() -> None:
    here = made_case("reference/ddp", {"replicate": 2}, backend="nccl")
    skipped = replace(here, skip="no GPU")
    assert Needs.of_cases([here], 2).gpus == Gpus(2)
    assert Needs.of_cases([skipped], 2).gpus == Gpus(0)
    assert Needs.of_cases([skipped], 2, ["nccl"]).gpus == Gpus(2)


def test_without_a_runtime_for_gpus_nothing_is_built(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(engine_room, "client", lambda: engine_with("runc"))
    monkeypatch.setattr(engine_room, "build", lambda *_, **__: pytest.fail("it builds"))
    words = ["cluster", "run", "ddp-gpt", "--backend", "nccl", "--world", "2"]
    monkeypatch.setattr(sys, "argv", ["shardproof", *words])
    with pytest.raises(SystemExit) as left:
        command_line.main()
    assert left.value.code == NOT_DECIDED
    said = capsys.readouterr().err
    assert "precondition: the engine gives no GPUs to containers" in said
    assert "install the NVIDIA container toolkit" in said


def test_a_torch_for_cpus_is_told_and_how_to_have_another() -> None:
    with pytest.raises(NoCluster, match=r"contain a torch without CUDA.*TORCH=torch==2\.13\.0\+cu"):
        require_gpus(engine_with("runc", "nvidia"), "torch==2.13.0")
    require_gpus(engine_with("runc", "nvidia"), "torch==2.13.0+cu130")


def test_each_rank_has_a_gpu_of_its_own(tmp_path: Path) -> None:
    made = made_cluster(tmp_path)
    engine = MadeEngine()
    cluster.run(engine, made, ["run"], print)
    assert not any(
        "device_requests" in part.asked[2] for part in engine.made if part.name != made.name
    )
    assert Gpus.of([], 3) == Gpus.of(["gloo"], 3) == Gpus(0)
    assert Gpus.of(["gloo_cuda"], 3) == Gpus(1)
    made = replace(made, gpus=Gpus.of(["nccl"], made.ranks_per_node))
    cluster.run(engine := MadeEngine(), made, ["run"], print)
    head, _, *nodes = engine.made
    given = []
    for part in (head, *nodes):
        (request,) = part.asked[2]["device_requests"]
        assert request["Driver"] == "nvidia" and request["Capabilities"] == [["gpu"]]
        given.append(request["DeviceIDs"])
    assert given == [["0", "1", "2", "3", "4", "5"], ["0", "1", "2"], ["3", "4", "5"]]
    assert made.facts["gpus"] == [[0, 1, 2], [3, 4, 5]]


def test_compose_reserves_gpus() -> None:
    command = [*compose(), "-f", "compose.yaml", "-f", "compose.gpu.yaml", "config"]
    chosen = {"TORCH": "torch==2.13.0+cu130", "RANKS_PER_NODE": "1"}
    environment = {**os.environ, **chosen}
    text = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, check=True)
    services = yaml.safe_load(text.stdout)["services"]
    for name, number in (("head", "0"), ("node", "1")):
        service = services[name]
        (device,) = service["deploy"]["resources"]["reservations"]["devices"]
        assert device == {"driver": "nvidia", "device_ids": [number], "capabilities": ["gpu"]}
        assert service["environment"]["BACKEND"] == "nccl"
        assert service["build"]["args"]["TORCH"] == "torch==2.13.0+cu130"
        assert service["read_only"] and service["cap_drop"] == ["ALL"]
    without = {name: value for name, value in environment.items() if name != "TORCH"}
    told = subprocess.run(command, cwd=ROOT, env=without, capture_output=True, text=True)
    assert told.returncode and "name a torch for CUDA" in told.stderr
