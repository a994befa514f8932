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
