"""The command of the containers in compose.yaml: what it is told by variables is checked."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

NODE = Path(__file__).resolve().parents[3] / "deploy" / "node.sh"
GOOD = {
    "RUN": "by-hand",
    "NODES": "2",
    "RANKS_PER_NODE": "2",
    "DEADLINE": "240",
    "BACKEND": "gloo",
    "SCENARIO": "ddp-gpt",
    "TIER": "quick",
    "EXPRESSION": "",
}


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("RUN", "../elsewhere"),
        ("RUN", ".."),
        ("RUN", "a b"),
        ("RUN", ""),
        ("NODES", "0"),
        ("NODES", "2;id"),
        ("RANKS_PER_NODE", "-1"),
        ("DEADLINE", "soon"),
        ("BACKEND", "mpi"),
        ("SCENARIO", "ddp-gpt --impl mine:Mine"),
    ],
)
def test_a_variable_that_means_nothing_is_told(name: str, value: str) -> None:
    environment = {**os.environ, **GOOD, name: value}
    done = subprocess.run(["sh", NODE, "node"], env=environment, capture_output=True, text=True)
    assert done.returncode == 2
    told = "SCENARIO and TIER are names" if name == "SCENARIO" else f"{name}='{value}' is n"
    assert done.stderr.startswith(told)


def test_a_node_outlives_a_look_up_of_the_head_that_fails(tmp_path: Path) -> None:
    looked = 'echo >> looks; n=$(wc -l < looks); [ "$n" != 2 ] && [ "$n" -lt 6 ]'
    for name, does in (("torchrun", "exit 0"), ("sleep", "exit 0"), ("getent", looked)):
        (tmp_path / name).write_text(f"#!/bin/sh\n{does}\n")
        (tmp_path / name).chmod(0o755)
    environment = {**os.environ, **GOOD, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    done = subprocess.run(["sh", NODE, "node"], env=environment, cwd=tmp_path, timeout=60)
    assert done.returncode == 0
    assert (tmp_path / "looks").read_text() == 10 * "\n"
