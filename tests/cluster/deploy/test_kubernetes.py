"""deploy/kubernetes: held against the API's schema, and its very commands run as processes."""

from __future__ import annotations

import copy
import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

ROOT = Path(__file__).resolve().parents[3]
FILES = sorted((ROOT / "deploy" / "kubernetes").glob("*.yaml"))
SCHEMA = json.loads(Path(__file__).with_name("kubernetes-1.37.json").read_text())


def objects() -> dict[str, dict[str, Any]]:
    return {made["kind"]: made for file in FILES for made in yaml.safe_load_all(file.read_text())}


def check(made: dict[str, Any]) -> None:
    jsonschema.validate(made, {"$ref": f"#/$defs/{made['kind']}", "$defs": SCHEMA["$defs"]})


def pod() -> dict[str, Any]:
    return dict(objects()["Job"]["spec"]["template"]["spec"])


def variables(uid: str) -> dict[str, str]:
    """What Kubernetes sets in the pods of a Job of that uid."""
    label, found = "metadata.labels['batch.kubernetes.io/controller-uid']", dict[str, str]()
    for entry in pod()["containers"][0]["env"]:
        if "valueFrom" in entry:
            assert entry["valueFrom"] == {"fieldRef": {"fieldPath": label}}
        value = entry.get("value", uid)
        for name, known in found.items():
            value = value.replace(f"$({name})", known)
        found[entry["name"]] = value
    return found


def test_the_files_are_of_the_api() -> None:
    assert set(objects()) == {"Job", "Service", "NetworkPolicy", "PersistentVolumeClaim"}
    for made in objects().values():
        check(made)


@pytest.mark.parametrize(
    ("key", "value"), [("completion", 2), ("completions", "two"), ("template", None)]
)
def test_the_schema_refuses_what_the_api_would(key: str, value: object) -> None:
    job = copy.deepcopy(objects()["Job"])
    if value is None:
        del job["spec"][key]
    else:
        job["spec"][key] = value
    with pytest.raises(jsonschema.ValidationError):
        check(job)


def test_names_and_numbers_that_hang_together() -> None:
    """What the schema does not know."""
    service, job, claim = (objects()[k] for k in ("Service", "Job", "PersistentVolumeClaim"))
    environment = variables("uid-1")
    assert environment["RESULTS"] == "/results/uid-1"
    assert job["spec"]["completionMode"] == "Indexed"
    assert pod()["restartPolicy"] == "Never"
    assert int(environment["NODES"]) == job["spec"]["completions"] == job["spec"]["parallelism"]
    assert service["spec"]["clusterIP"] == "None"
    assert service["spec"]["selector"] == {"job-name": job["metadata"]["name"]}
    first = f"{job['metadata']['name']}-0.{pod()['subdomain']}"
    assert environment["MASTER_ADDR"] == first
    assert pod()["subdomain"] == service["metadata"]["name"]
    claims = [v["persistentVolumeClaim"]["claimName"] for v in pod()["volumes"][:1]]
    assert claims == [claim["metadata"]["name"]]
    assert claim["spec"]["accessModes"] == ["ReadWriteMany"]


def test_only_pods_of_the_job_reach_its_pods() -> None:
    spec = objects()["NetworkPolicy"]["spec"]
    own = {"matchLabels": objects()["Service"]["spec"]["selector"]}
    assert spec["podSelector"] == own and spec["policyTypes"] == ["Ingress", "Egress"]
    assert spec["ingress"] == [{"from": [{"podSelector": own}]}]
    names = {"ports": [{"port": 53, "protocol": way} for way in ("UDP", "TCP")]}
    assert spec["egress"] == [{"to": [{"podSelector": own}]}, names]


def test_the_schema_knows_policies() -> None:
    policy = copy.deepcopy(objects()["NetworkPolicy"])
    policy["spec"]["ingress"] = [{"form": []}]
    with pytest.raises(jsonschema.ValidationError):
        check(policy)


@pytest.mark.launches
def test_the_commands_of_the_pods_give_verdicts(tmp_path: Path) -> None:
    """Two pods as processes: what Kubernetes sets, and one address for both."""
    container = pod()["containers"][0]
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = str(probe.getsockname()[1])
    environment = {
        **os.environ,
        **variables("uid-1"),
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "RESULTS": str(tmp_path),
        "RANKS_PER_NODE": "1",
        "TIER": "full",
        "EXPRESSION": "naive and bitwise and sgd",
        # All pods are this machine.
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
        "GLOO_SOCKET_IFNAME": "lo",
    }
    pods = [
        subprocess.Popen(
            [*container["command"], *container["args"]],
            cwd=ROOT,
            env=environment | {"JOB_COMPLETION_INDEX": str(index)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for index in range(2)
    ]
    try:
        said = [process.communicate(timeout=160)[0] for process in pods]
    finally:
        for process in pods:
            process.kill()
    assert [process.returncode for process in pods] == [0, 0], said
    assert "1 judged (1 pass" in said[0]
