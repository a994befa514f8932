"""The picture of memory over time: its data, and that the file stands alone."""

from __future__ import annotations

import xml.etree.ElementTree as ET
from collections.abc import Sequence
from pathlib import Path

import pytest
from commands import here

from shardproof.contract import OptimizerSpec
from shardproof.costs.shapes import BatchSize, Shape
from shardproof.ledgers.memory.log import CLASSES, FILE, MemoryLog, Storage
from shardproof.simulate import figures
from shardproof.simulate.picture import columns, moments, picture
from shardproof.simulate.rank import SimulatedRank, simulate
from shardproof.simulate.sources import ShapeSource

SMALL = Shape("small", layers=4, hidden=32, heads=4, vocab=61, seq=16, positions=16)


def made(implementation: str, axis: str, micro_batches: int = 1) -> SimulatedRank:
    adam = OptimizerSpec("adamw", momentum=0.0)
    work = BatchSize(1, 16, micro_batches)
    return simulate(ShapeSource(SMALL, implementation, {axis: 2}, adam, work=work), [0])[0]


@pytest.mark.parametrize(
    ("implementation", "axis"), [("reference/fsdp", "shard"), ("reference/pipeline", "pipe")]
)
def test_the_highest_column_is_the_peak_of_the_table(implementation: str, axis: str) -> None:
    """Any number of columns shows the same bytes, in the same phase, of the same classes."""
    one = made(implementation, axis, 4)
    found = figures.figures(one, {axis: 2})
    for most in (10_000, 100, 5):
        highest = max(columns(one.log, 1, most), key=lambda each: each.bytes)
        assert (highest.phase, highest.bytes) == (found.phase, found.peak)
        held = dict.fromkeys(CLASSES, 0)
        for each in found.held:
            held[each.kind] += each.bytes
        assert highest.sizes == held


def test_columns_keep_the_order_of_phases() -> None:
    one = made("reference/fsdp", "shard")
    every = [*moments(one.log, 1)]
    few = columns(one.log, 1, 40)
    assert 40 <= len(few) <= 44 < len(every)
    for shown in (every, few):
        phases = [each.phase for each in shown]
        assert list(dict.fromkeys(phases)) == ["forward", "backward", "update"]
        assert phases == sorted(phases, key=["forward", "backward", "update"].index)
    # After the update the rank holds what it keeps.
    assert every[-1].sizes["parameters"] == figures.figures(one, {"shard": 2}).kept["parameters"]


def test_moments_follow_the_log_by_hand() -> None:
    """Two storages of the device, one in a file; another step does not count."""
    storages = [Storage("cpu", "", "setup", -1, "own", "parameters"),
                Storage("cpu", "", "forward", 0, "own", "gradients"),
                Storage(FILE, "", "forward", 0, "own", "optimizer_state")]  # fmt: skip
    events = [(0, 100, "setup", -1), (-1, 0, "forward", 0), (1, 7, "forward", 0),
              (2, 1000, "forward", 0), (-1, 0, "observe", 0), (1, 0, "update", 0),
              (0, 5, "update", 1)]  # fmt: skip
    log = MemoryLog(storages, events)
    told = [(one.phase, one.sizes["parameters"], one.sizes["gradients"]) for one in moments(log, 0)]
    assert told == [("forward", 100, 0), *[("forward", 100, 7)] * 2, ("update", 100, 0)]
    assert {one.sizes["optimizer_state"] for one in moments(log, 0)} == {0}
    assert [one.bytes for one in columns(log, 0, 2)] == [107, 107, 100]


def drawn(text: str) -> tuple[list[str], Sequence[ET.Element]]:
    root = ET.fromstring(text)
    space = "{http://www.w3.org/2000/svg}"
    assert root.tag == f"{space}svg" and root.get("role") == "img"
    return [each.text or "" for each in root.iter(f"{space}text")], [*root.iter(f"{space}path")]


def test_the_file_stands_alone_and_says_the_peak() -> None:
    one = made("reference/fsdp", "shard")
    texts, areas = drawn(picture("Memory <of> a rank", one.log, 1))
    peak = figures.figures(one, {"shard": 2}).peak
    assert any(f"{peak / 1e9:,.3f} GB" in text for text in texts)
    assert {"forward", "backward"} <= {*texts}
    kinds = {(area.get("class") or "").removeprefix("k-") for area in areas}
    assert {"parameters", "activations", "optimizer_state", "gradients"} <= kinds <= {*CLASSES}
    assert all((area.get("d") or "").startswith("M") for area in areas)
    assert drawn(picture("Nothing", MemoryLog(), 0))[1] == []


def test_the_command_draws_and_says_what_is_wrong(tmp_path: Path) -> None:
    quick = ("simulate", "gpt2", "--layers", "2", "--seq", "32", "--mesh", "shard=8", "--rank", "0")
    file = tmp_path / "made" / "memory.svg"
    done = here(*quick, "--plot", str(file), "--machine", "a100", "--node", "4")
    assert done.returncode == 0, done.stderr
    assert drawn(file.read_text())[1]
    assert "Seconds of the step on 8 x a100, 4 a node" in done.stdout
    for command in (("simulate", *quick[1:], "--plot"), ("plan", "gpt2", "--gpus", "8", "--write")):
        lost = here(*command, str(tmp_path))
        assert lost.returncode == 2 and f"{command[-1]}: Is a directory" in lost.stderr, lost.stderr
        assert "simulating" not in lost.stderr, "asked before anything runs"
    wrong = here(*quick, "--machine", "h1000")
    assert wrong.returncode == 2 and "unknown machine (h1000) - did you mean h100" in wrong.stderr
