"""A class under test that attacks its judge, in a cluster of containers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from commands import shardproof
from real_engine import real_engine

#: Writes into the run folder and ends the judge by whatever process it can reach, at import, when
#: it is asked what it can do, and as a rank.
HOSTILE = """
import os
import signal
from pathlib import Path

from shardproof.impls.reference.ddp import ReferenceDDP


def attack(where):
    me = os.getpid()
    mine = {me}
    while me > 1:
        me = int(Path(f"/proc/{me}/stat").read_text().rpartition(")")[2].split()[1])
        mine.add(me)
    done = []
    for process in Path("/proc").iterdir():
        if not process.name.isdigit() or int(process.name) in mine:
            continue
        try:
            words = (process / "cmdline").read_bytes().split(b"\\0")
        except OSError:
            continue
        if b"shardproof.cluster.nodes.agent" in words or b"fork_server_main" in b" ".join(words):
            continue  # of the nodes: their own affair
        for root in RESULTS:
            try:
                (process / "root" / root / f"written-{where}").write_text("x")
                done.append(f"{where} wrote by {process.name}")
            except OSError:
                pass
    for process in Path("/proc").iterdir():
        if process.name.isdigit() and os.stat(process).st_uid != os.getuid():
            try:
                os.kill(int(process.name), signal.SIGKILL)
                done.append(f"{where} killed {process.name}")
            except OSError:
                pass
    if done:
        raise RuntimeError("; ".join(done))


RESULTS = [%r]
attack("import")


class Mine(ReferenceDDP):
    @classmethod
    def capabilities(cls, options):
        attack("capabilities")
        return super().capabilities(options)

    def step(self, batch, observe):
        attack("step")
        return super().step(batch, observe)
"""


SCENARIO = """
name: hostile
about: A class that attacks its judge.
sees: [a class that ends its judge]
workload: {name: charnames_gpt, params: {layers: 1, width: 16}}
matrix:
  implementation: "hostile:Mine"
  backend: [in_memory, gloo]
  mesh: {replicate: 2}
  optimizer: sgd
  lane: fp64
checks: [equivalence, replicas]
steps: 2
"""


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_hostile_class_reaches_neither_the_run_folder_nor_the_judge(tmp_path: Path) -> None:
    real_engine()
    tmp_path.chmod(0o755)
    results = tmp_path / "run"
    (tmp_path / "hostile.py").write_text(HOSTILE % str(results).lstrip("/"))
    (tmp_path / "hostile.yaml").write_text(SCENARIO)
    words = ("cluster", "run", "hostile.yaml", "--tier", "full", "--results", str(results))
    run = shardproof(*words, cwd=tmp_path)
    assert run.returncode == 0, run.stdout + run.stderr
    lines = (results / "cases.jsonl").read_text().splitlines()
    found = [json.loads(line) for line in lines]
    assert [case["verdict"] for case in found] == ["pass", "pass"], found
    assert not [*results.glob("written-*")]
