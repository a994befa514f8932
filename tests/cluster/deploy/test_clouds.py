"""deploy/clouds: what the services set, given to what reads it. None is tried on the service."""

from __future__ import annotations

import importlib.util
import os
import string
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import yaml

from shardproof.cluster.launchers.meeting import Entry, mistake
from shardproof.cluster.launchers.place import Place
from shardproof.cluster.torchrun import _parser
from shardproof.errors import LaunchError

ROOT = Path(__file__).resolve().parents[3]
CLOUDS = ROOT / "deploy" / "clouds"
WRAPPER = "-m shardproof.cluster.judge "


def ranks_of(command: str) -> list[str]:
    """The words of the rank program, of a command that judges what ranks leave."""
    before, _, after = command.partition(" -m shardproof.cluster.torchrun ")
    wrapper, _, torchrun = before.partition(" -- ")
    assert WRAPPER in wrapper and "--results" in wrapper and "--node-rank" in torchrun
    return after.split()


# --------------------------------------------------------------------------------------- Azure ML


def azure(node: int, local: int, instances: int, each: int) -> dict[str, str]:
    """What Azure ML sets for one process of a job with PyTorch distribution."""
    return {
        "AZUREML_RUN_ID": "brave_horse_1",
        "AZ_BATCHAI_JOB_MASTER_NODE_IP": "10.0.0.4",
        "MASTER_ADDR": "10.0.0.4",
        "MASTER_PORT": "6105",
        "NODE_RANK": str(node),
        "RANK": str(node * each + local),
        "LOCAL_RANK": str(local),
        "WORLD_SIZE": str(instances * each),
    }


def test_the_job_of_azure_ml_starts_torchrun_on_every_node() -> None:
    job = yaml.safe_load((CLOUDS / "azureml" / "job.yaml").read_text())
    assert job["distribution"] == {"type": "pytorch", "process_count_per_instance": 1}
    nodes, own = job["resources"]["instance_count"], job["environment_variables"]
    assert int(own["NODES"]) == nodes
    command = job["command"].replace("${{outputs.results}}", "/results")
    for node in range(nodes):
        told = string.Template(command).substitute(own | azure(node, 0, nodes, 1))
        assert _parser().parse_args(ranks_of(told)).scenario == ["ddp-gpt"]
        assert f"--node {node} --results /results -- torchrun --nnodes 2 " in told
        assert f"--node-rank {node} " in told
        assert "--master-addr 10.0.0.4 --master-port 6105" in told
    assert job["outputs"]["results"]["mode"] == "rw_mount"


def test_one_process_an_instance_with_ranks_of_nodes_is_a_mistake() -> None:
    """RANK and WORLD_SIZE of nodes, as some services set them, with two processes on each."""
    of_nodes = [azure(node, 0, 2, 1) for node in (0, 0, 1)]
    found = mistake([Entry.of(Place.find(each)) for each in of_nodes])
    assert found is not None and "set RANK to node * ranks per node" in found.remedy


# -------------------------------------------------------------------------------------- SageMaker


@pytest.fixture
def ranks() -> ModuleType:
    spec = importlib.util.spec_from_file_location("ranks", CLOUDS / "sagemaker" / "ranks.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def sagemaker(*hosts: str, **more: str) -> dict[str, str]:
    return {
        "SM_HOSTS": "[" + ", ".join(f'"{host}"' for host in hosts) + "]",
        "SM_CURRENT_HOST": hosts[0],
        "SM_NETWORK_INTERFACE_NAME": "eth0",
        "SM_NUM_GPUS": "4",
        "SM_OUTPUT_DATA_DIR": "/opt/ml/output/data",
        "SCENARIO": "ddp-gpt fsdp-gpt",
    } | more


def test_the_entry_point_of_sagemaker_starts_torchrun(ranks: ModuleType) -> None:
    def told(environment: dict[str, str]) -> str:
        return WRAPPER + " ".join(ranks.arguments(environment))

    command = told(sagemaker("algo-1"))
    options = _parser().parse_args(ranks_of(command))
    assert options.scenario == ["ddp-gpt", "fsdp-gpt"] and options.backend == "nccl"
    assert f"{WRAPPER}/opt/ml/output/data/records --node 0 " in command
    assert "--nnodes 1 --node-rank 0 --nproc-per-node 4 " in command
    shared = sagemaker("algo-1", "algo-2", SM_CHANNEL_RECORDS="/opt/ml/input/data/records")
    command = told(shared | {"BACKEND": "gloo", "SM_CURRENT_HOST": "algo-2", "SM_NUM_GPUS": "0"})
    assert _parser().parse_args(ranks_of(command)).backend == "gloo"
    where = "/opt/ml/input/data/records/job --node 1 --results /opt/ml/output/data -- "
    assert f"{WRAPPER}{where}" in command
    assert "--nnodes 2 --node-rank 1 --nproc-per-node 1 --master-addr algo-1 " in command


def test_instances_that_share_no_folder_are_explained(
    ranks: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        ranks.arguments(sagemaker("algo-1", "algo-2"))
    assert ended.value.code == 2
    assert "2 instances share no folder - give launch.py --efs" in capsys.readouterr().err


def test_what_torchrun_sets_on_sagemaker() -> None:
    def torchrun(host: int, local: int) -> dict[str, str]:
        return {
            "RANK": str(4 * host + local),
            "WORLD_SIZE": "8",
            "LOCAL_RANK": str(local),
            "LOCAL_WORLD_SIZE": "4",
            "GROUP_RANK": str(host),
            "GROUP_WORLD_SIZE": "2",
            "MASTER_ADDR": "algo-1",
            "MASTER_PORT": "7777",
        }

    assert Place.find(torchrun(1, 2)) == Place(6, 8, "algo-1", 7777, 2, 4)
    with pytest.raises(LaunchError, match="is a loopback address"):
        Place.find(torchrun(1, 2) | {"MASTER_ADDR": "127.0.0.1"})


# ---------------------------------------------------------------------------------------- vast.ai


def vast(tmp_path: Path, **changed: str) -> subprocess.CompletedProcess[str]:
    """The on-start script with programs that print how they are called."""
    for name in ("torchrun", "python", "git"):
        program = tmp_path / name
        does = f'[ "$1" = -c ] && echo 4 || echo {name} "$@"'
        program.write_text(f"#!/bin/sh\n{does}\n")
        program.chmod(0o755)
    (tmp_path / "checkout").mkdir()
    lines = (CLOUDS / "vast" / "environment").read_text().splitlines()
    given = dict(line.split("=", 1) for line in lines if line and not line.startswith("#"))
    path = f"{tmp_path}:{os.environ['PATH']}"
    own = given | {"PATH": path, "CHECKOUT": str(tmp_path / "checkout")} | changed
    return subprocess.run(
        [CLOUDS / "vast" / "onstart.sh"], env=own, capture_output=True, text=True, check=False
    )


@pytest.mark.parametrize(
    ("changed", "nodes"),
    [
        ({}, "torchrun --standalone --nproc-per-node 4 "),
        (
            {"NNODES": "2", "NODE_RANK": "1", "MASTER_ADDR": "10.1.0.2"},
            "torchrun --nnodes 2 --node-rank 1 --master-addr 10.1.0.2 --master-port 29500 "
            "--nproc-per-node 4 ",
        ),
    ],
)
def test_the_on_start_script_of_vast(tmp_path: Path, changed: dict[str, str], nodes: str) -> None:
    done = vast(tmp_path, **changed)
    assert done.returncode == 0, done.stderr
    said = done.stdout.splitlines()[-1]
    node = changed.get("NODE_RANK", "0")
    # Without --results: each launch has a run folder of its own.
    wrapper = f"python {WRAPPER}/workspace/results/records --node {node} -- "
    assert said.startswith(wrapper + nodes)
    options = _parser().parse_args(said.partition(" -m shardproof.cluster.torchrun ")[2].split())
    assert options.scenario == ["ddp-gpt"] and options.backend == "nccl"


def test_several_instances_of_vast_need_the_address_of_the_first(tmp_path: Path) -> None:
    done = vast(tmp_path, NNODES="2")
    assert done.returncode != 0
    assert "set MASTER_ADDR to the address of instance 0" in done.stderr


def test_no_sdk_is_needed() -> None:
    told = subprocess.run(
        [sys.executable, CLOUDS / "sagemaker" / "launch.py", "--help"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert told.returncode == 0 and "--role" in told.stdout
