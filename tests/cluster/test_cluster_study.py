"""Trainings to a target on nodes: what is told before anything is built, and a real study."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from commands import shardproof, study
from real_engine import left_of, real_engine

from shardproof.cluster import head
from shardproof.cluster.containers import engine as engine_room
from shardproof.launch.nodes import ENVIRONMENT
from shardproof.verdicts import BAD_INPUT, HELD
from tools.studies.convergence import plan
from tools.studies.convergence import study as studies

ON_NODES = "convergence-on-nodes"
SMALL = """
name: small
about: the digits, far from the minimum
workload: {name: digits_cnn, global_batch: 12, params: {channels: 2, layers: 1, norm: group}}
optimizer: {lr: 0.1}
backend: gloo
world: 2
target: 1.45
steps: 24
every: 4
judged_on: 48
seeds: 2
dense: reference/ddp
methods:
  - implementation: reference/ddp
    label: fp16
    options: {compress: {method: cast, dtype: float16}}
"""


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["clusters"], "did you mean cluster"),
        (["cluster", "--sise", "1m"], "No such option: --sise"),
        (["digits"], "ranks of in_memory are threads, which cannot be on nodes"),
        (["digits", "--backend", "gloo"], "digits: 3 ranks do not fit on 2 nodes x 1 ranks"),
        (["cluster", "--method", "reference/ddp+topk2"], "unknown method"),
        (["cluster", "--from", "kept.json"], "--from does not work in a cluster"),
        (["cluster", "--bandwidth", "1gbit", "--nodes", "1", "--ranks-per-node", "2"], "--nodes 2"),
    ],
)
def test_bad_input_is_told_before_anything_is_built(
    words: list[str], says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_room, "client", lambda: pytest.fail("it asked for the engine"))
    done = study(ON_NODES, *words)
    assert done.returncode == BAD_INPUT, done.stdout + done.stderr
    assert says in " ".join(done.stderr.split())


def test_words_go_on_to_the_study_in_the_head(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Any] = []

    def note(*given: Any, **_: Any) -> int:
        asked.append(given)
        return HELD

    monkeypatch.setattr(head, "run", note)
    words = ["cluster", "--seeds", "3", "--method", "reference/ddp+topk1"]
    capped = ["--bandwidth", "100mbit", "--results", str(tmp_path)]
    assert study(ON_NODES, *words, *capped).returncode == HELD
    ((there, wanted, *_),) = asked
    assert there == ["convergence", *words] and wanted.results == tmp_path
    assert (wanted.nodes, wanted.ranks_per_node, wanted.bits_per_second) == (2, 1, 10**8)


def test_a_head_trains_what_its_nodes_have_room_for_and_tells_the_network(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rates = {"bits_per_second": 10**8}, {"bits_per_second": [95e6, 96e6]}
    told = {"declared": rates[0], "measured": rates[1], "slow_nodes": {"node1": {"cpus": 0.5}}}
    facts = {"nodes": 2, "ranks_per_node": 1, "told": told}
    monkeypatch.setenv(ENVIRONMENT, json.dumps(facts))
    done = study("convergence", "charnames", "--backend", "gloo")
    assert done.returncode == BAD_INPUT and "3 ranks do not fit on 2 nodes x 1 ranks" in done.stderr
    (tmp_path / "small.yaml").write_text(SMALL)
    about = studies._about(plan.read([tmp_path / "small.yaml"]), 4, 7.0)
    assert about.startswith("7 s with -j 1;"), "one at a time, where seconds are told"
    assert about.endswith(
        "Ranks on 2 nodes x 1 ranks; declared 100 mbit/s, measured 95 mbit/s and 96 mbit/s; "
        "node1 has 0.5 cores."
    )


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_study_in_containers_is_that_of_this_machine(tmp_path: Path) -> None:
    """Losses, steps and bytes; its seconds are those of its network."""
    engine = real_engine()
    tmp_path.chmod(0o755)
    (tmp_path / "small.yaml").write_text(SMALL)
    words = ["small.yaml", "--bandwidth", "20mbit", "--results", "run"]
    done = study(ON_NODES, *words, cwd=tmp_path)
    assert done.returncode == HELD, done.stdout + done.stderr
    run = tmp_path / "run"
    assert not left_of(engine, run)
    page = (run / "convergence.md").read_text()
    assert "In wall time" in page and "declared 20 mbit/s, measured" in page
    assert (run / "convergence-small.svg").exists()
    assert "verified: 0 cases" in shardproof("verify", str(run)).stdout, "files are as they were"
    here = ["small.yaml", "--backend", "in_memory", "--results", "here"]
    assert study("convergence", *here, cwd=tmp_path).returncode == HELD
    there, local = (
        json.loads(file.read_text())["studies"]["small"]
        for file in (run / "convergence.json", tmp_path / "here/convergence.json")
    )
    for name, own in there.items():
        for one, other in zip(own["ends"], local[name]["ends"], strict=True):
            assert one.pop("seconds") > 0 and other.pop("seconds", None) is None
            assert one == other, name
