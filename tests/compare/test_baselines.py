"""Baselines say all that their run says; what is damaged or impossible is refused in a sentence."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import synthetic as made
from hypothesis import given, settings
from hypothesis import strategies as st

from shardproof.compare import baseline
from shardproof.errors import SelectionError
from shardproof.runs.header import Fingerprint, Invocation


def test_hardware_is_named_by_its_accelerators_first() -> None:
    gpus = [{"name": "H100", "memory": "80 GB", "driver": "1"}] * 2
    assert (
        Fingerprint.model_validate(made.MACHINE | {"gpus": gpus}).label
        == "2 x H100, Synthetic 9000, 2 cores"
    )
    assert Fingerprint().label == "unknown processor, ? cores"


def test_hardware_tells_the_nodes_that_containers_were(tmp_path: Path) -> None:
    path = made.write(tmp_path / "run", made.results(2))
    header = json.loads((path / "run.json").read_text())
    declared = {"cpus": 1.0, "bits_per_second": 10**8}
    told = {"nodes": [{}, {}], "ranks_per_node": 2, "declared": declared}
    header["invocations"][-1]["cluster"] = told
    (path / "run.json").write_text(json.dumps(header))
    made.seal(path)
    hardware = "Synthetic 9000, 2 cores, as 2 nodes of 1 core, 100 mbit/s"
    assert baseline.load(str(path)).hardware == hardware
    again = Invocation.model_validate(header["invocations"][-1]).run_command
    caps = "--cpus 1 --bandwidth 100mbit"
    assert again == f"shardproof cluster run --nodes 2 --ranks-per-node 2 {caps}"


# -------------------------------------------------------------------------------------- bad input


def test_what_is_no_run_is_refused(tmp_path: Path) -> None:
    lines = made.results(2)
    with pytest.raises(SelectionError, match="no such run"):
        baseline.load(str(tmp_path / "nothing"))
    with pytest.raises(SelectionError, match=r"only a checkout has baselines; .*--save FILE"):
        baseline.load("results/baselines/of-no-machine.json")
    (tmp_path / "text.json").write_text("no json")
    with pytest.raises(SelectionError, match="damaged"):
        baseline.load(str(tmp_path / "text.json"))
    (tmp_path / "list.json").write_text("[]")
    with pytest.raises(SelectionError, match="neither a run folder nor a baseline"):
        baseline.load(str(tmp_path / "list.json"))
    path = made.write(tmp_path / "run", lines)
    header = json.loads((path / "run.json").read_text())
    (path / "run.json").write_text(json.dumps(header | {"format": 99}))
    with pytest.raises(SelectionError, match="format 99"):
        baseline.load(str(path))


def test_a_damaged_line_is_refused_and_one_cut_off_by_a_kill_is_not(tmp_path: Path) -> None:
    path = made.write(tmp_path / "run", made.results(3))
    content = (path / "cases.jsonl").read_text()
    (path / "cases.jsonl").write_text(content[:-30])
    assert len(baseline.load(str(path)).cases) == 2
    (path / "cases.jsonl").write_text(content.replace('"verdict"', '"verdict', 1))
    with pytest.raises(SelectionError, match=r"cases\.jsonl:1: is damaged"):
        baseline.load(str(path))
    first, rest = content.split("\n", 1)
    line = json.loads(first)
    del line["case"]["mesh"]
    (path / "cases.jsonl").write_text(json.dumps(line) + "\n" + rest)
    with pytest.raises(SelectionError, match="mesh"):
        baseline.load(str(path))


@settings(max_examples=40)
@given(data=st.data())
def test_a_damaged_baseline_is_refused_in_a_sentence(
    data: st.DataObject, tmp_path_factory: Any
) -> None:
    folder = tmp_path_factory.mktemp("damaged")
    told = made.snapshot(folder / "run", made.results(2))
    text = baseline.text(told)
    at = data.draw(st.integers(0, len(text) - 2))
    (folder / "b.json").write_text(
        text[:at] + data.draw(st.sampled_from("[{}]x,:")) + text[at + 1 :]
    )
    try:
        baseline.load(str(folder / "b.json"))
    except SelectionError as error:
        assert "b.json" in str(error)


def test_another_format_of_baselines_is_refused(tmp_path: Path) -> None:
    text = baseline.text(made.snapshot(tmp_path / "run", made.results(1)))
    path = tmp_path / "b.json"
    path.write_text(text.replace('"format": 1', '"format": 7'))
    with pytest.raises(SelectionError, match="format 7"):
        baseline.load(str(path))
