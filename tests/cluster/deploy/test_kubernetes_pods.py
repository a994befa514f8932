"""deploy/kubernetes in containers: the pods' image, user, mounts, names and commands."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from real_engine import real_engine
from test_kubernetes import pod, variables

from shardproof.cluster.containers import engine
from shardproof.runs import machine
from shardproof.runs.run_folder import read

#: Of this test alone.
NAME = f"shardproof-pods-{os.getpid()}"


@pytest.fixture
def network() -> Iterator[tuple[Any, Any]]:
    """The engine, and a private network, of which nothing stays."""
    client = real_engine()
    made = client.networks.create(NAME, internal=True)
    try:
        yield client, made
    finally:
        for box in client.containers.list(all=True, filters={"name": f"{NAME}-"}):
            box.remove(force=True)
        made.remove()


def start(client: Any, network: Any, index: int, results: Path) -> Any:
    """Pod ``index``, with what job.yaml says of it; the volume is ``results``."""
    container, whole = pod()["containers"][0], pod()["securityContext"]
    rights, mounts = container["securityContext"], container["volumeMounts"]
    assert {mount["mountPath"] for mount in mounts} == {"/results", "/tmp", "/dev/shm"}
    assert rights["allowPrivilegeEscalation"] is False
    smaller = {"RANKS_PER_NODE": "1", "TIER": "full", "EXPRESSION": "naive and bitwise and sgd"}
    box = client.containers.create(
        engine.image_name("judge"),
        entrypoint=container["command"],
        command=container["args"],
        environment=variables("uid-1") | smaller | {"JOB_COMPLETION_INDEX": str(index)},
        name=f"{NAME}-{index}",
        hostname=f"shardproof-{index}",
        user=f"{whole['runAsUser']}:{whole['runAsGroup']}",
        read_only=rights["readOnlyRootFilesystem"],
        cap_drop=rights["capabilities"]["drop"],
        security_opt=["no-new-privileges:true"],
        volumes={str(results): {"bind": "/results", "mode": "rw"}},
        tmpfs={"/tmp": ""},
        shm_size="512m",
        network=NAME,
    )
    network.disconnect(box)  # to come back with the names that the headless service gives
    network.connect(box, aliases=[f"shardproof-{index}.{pod()['subdomain']}"])
    box.start()
    return box


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_pods_from_the_image_give_verdicts(network: tuple[Any, Any], tmp_path: Path) -> None:
    results = tmp_path / "volume"
    results.mkdir()
    results.chmod(0o777)
    boxes = [start(*network, index, results) for index in range(2)]
    codes = [box.wait(timeout=300)["StatusCode"] for box in boxes]
    said = [box.logs().decode() for box in boxes]
    assert codes == [0, 0], said
    assert "1 judged (1 pass" in said[0]
    last = read(results / "uid-1").header.last
    assert last.cluster is not None
    nodes = [{"name": f"shardproof-{index}", "ranks": [index]} for index in range(2)]
    assert last.cluster["nodes"] == nodes
    # What the image tells: it may be older than the last commit, never of other files.
    image = network[0].images.get(engine.image_name("judge"))
    source = image.labels[engine.SOURCE]
    commit = {} if machine.commit() is None else {"commit": last.commit}
    assert last.cluster["image"] == {"source": source} | commit
