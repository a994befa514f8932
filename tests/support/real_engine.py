"""A container engine with the images of this checkout; without one its tests are skipped."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any, NoReturn

import pytest

from shardproof.cluster.containers import cluster, engine
from shardproof.cluster.containers.engine import NoCluster


def real_engine() -> Any:
    """Its client; in CI (``CI=true``) it is a failure that there is none."""
    try:
        found = engine.client()
        engine.build(found)
    except NoCluster as error:
        missing(str(error))
    return found


def missing(what: str) -> NoReturn:
    """Skip the test, which needs ``what``; in CI that is a failure."""
    if os.environ.get("CI") == "true":
        pytest.fail(f"CI must run the container tests: {what}")
    pytest.skip(what)


def compose() -> list[str]:
    """Compose's command; in CI it is a failure that there is none."""
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    for way in (["docker", "compose"], ["docker-compose"]):
        if shutil.which(way[0]) and not subprocess.call([*way, "version"], **quiet):
            return way
    missing("no Compose")


def left_of(engine: Any, run: Path) -> list[Any]:
    """What is there of the cluster that wrote the run folder ``run``."""
    invocations = json.loads((run / "run.json").read_text())["invocations"]
    return cluster.parts(engine, invocations[-1]["cluster"]["name"])
