"""Timed scenarios on nodes: what is chosen before anything is built, and where ranks run."""

from __future__ import annotations

import json
import pickle
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import typer
from made_engine import assert_refused_at_once

from shardproof.bench import leader_tasks, sides
from shardproof.bench.drawings import by_bandwidth
from shardproof.bench.lines import Efficiency, Estimate
from shardproof.bench.scaling import matrix
from shardproof.bench.subjects import Cell, Room, side_run
from shardproof.cluster import head
from shardproof.cluster.nodes.ranks import ClusterNodes
from shardproof.commands import main as command_line
from shardproof.launch.nodes import ENVIRONMENT
from shardproof.launch.outcome import RankOutcome
from shardproof.launch.rank_process import RankLaunch
from shardproof.launch.ranks import Forked, ProcessHost
from shardproof.verdicts import BAD_INPUT, HELD, NOT_DECIDED

PAIR = ("reference/ddp", "pytorch/ddp")


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ([*PAIR, "--sise", "1m"], "No such option: --sise"),
        (
            [*PAIR, "--world", "4"],
            "no comparison fits on 2 nodes x 1 ranks: the smallest needs 4 ranks",
        ),
        (["strong", "-k", "nothing"], "-k matches no cell"),
        (["collectives", "--world", "4"], "4 ranks do not fit on 2 nodes x 1 ranks"),
        (["strong", "--dry-run"], "--dry-run does not work in a cluster"),
        ([*PAIR, "--bandwidth", "1gbit", "--nodes", "1"], "choose --nodes 2"),
        (["cluster-strong", "--nodes", "1", "--ranks-per-node", "2"], "choose --nodes 2"),
        (["strong", "cluster-strong"], "run them in two commands"),
    ],
)
def test_bad_input_is_told_before_anything_is_built(
    words: list[str], says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert_refused_at_once(monkeypatch, says, "bench", *words)


def test_words_go_on_to_the_command_in_the_head(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ["strong", "--world", "2", "-k", "ddp and gloo", "--blocks", "4"]
    asked: list[Any] = []

    def note(*given: Any, **_: Any) -> int:
        asked.append(given)
        return HELD

    monkeypatch.setattr(head, "run", note)
    capped = ["--cpus", "0.5", "--nodes", "4", "--results", str(tmp_path)]
    assert _exit_code(monkeypatch, "bench", *words[:2], *capped, *words[2:]) == HELD
    ((there, wanted, *_),) = asked
    assert there == ["bench", *words]
    assert (wanted.nodes, wanted.limits().cpus, wanted.results) == (4, 0.5, tmp_path)


def test_each_bandwidth_of_a_scenario_is_timed_in_nodes_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Any] = []
    codes = iter([HELD, NOT_DECIDED, HELD])

    def note(*given: Any, **_: Any) -> int:
        asked.append(given)
        if (code := next(codes)) == NOT_DECIDED:
            raise typer.Exit(code)  # its caps are not kept: told
        return code

    monkeypatch.setattr(head, "run", note)
    words = "cluster-strong", "-k", "zero3"
    code = _exit_code(monkeypatch, "bench", *words, "--results", str(tmp_path))
    assert code == NOT_DECIDED, "the gravest"
    rates = [wanted.bits_per_second for _, wanted, *_ in asked]
    assert rates == [None, 10**9, 10**8]
    assert {(one.results, *command) for command, one, *_ in asked} == {(tmp_path, "bench", *words)}
    asked.clear()
    codes = iter([HELD])
    assert _exit_code(monkeypatch, "bench", *words, "--bandwidth", "100mbit") == HELD
    assert [wanted.bits_per_second for _, wanted, *_ in asked] == [10**8]


@pytest.mark.parametrize(
    ("declared", "timed"), [({}, "unlimited"), ({"bits_per_second": 10**8}, "100mbit")]
)
def test_a_head_times_the_cells_of_its_network(
    declared: dict[str, int],
    timed: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    told = {"nodes": 2, "ranks_per_node": 1, "told": {"declared": declared}}
    monkeypatch.setenv(ENVIRONMENT, json.dumps(told))
    words = ["shardproof", "bench", "cluster-weak", "-k", "zero1", "--dry-run"]
    monkeypatch.setattr(sys, "argv", words)
    with pytest.raises(SystemExit) as left:
        command_line.main()
    assert left.value.code == HELD
    name = f"scaling::cluster-weak::reference/zero1::gloo::2::charnames_gpt+1m::{timed}"
    assert capsys.readouterr().out.split() == [name]


def test_cells_between_nodes_are_not_timed_on_one_machine(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["shardproof", "bench", "cluster-strong", "--dry-run"])
    with pytest.raises(SystemExit) as left:
        command_line.main()
    assert left.value.code == BAD_INPUT
    assert "need nodes with a bandwidth of unlimited, 1gbit, 100mbit" in capsys.readouterr().err


def test_efficiency_by_bandwidth_is_drawn() -> None:
    """A mark for each system and bandwidth, the least first, and the same in words."""
    scenario = sides.files(["cluster-strong"])
    lines = []
    for cell in matrix.read(scenario):
        if cell.world != 2:
            continue
        share = {"unlimited": 0.9, "1gbit": 0.7, "100mbit": 0.2}[cell.bandwidth]
        found = Efficiency(
            ratio=share,
            low=share - 0.05,
            high=share + 0.05,
            half_width=0.05,
            log=Estimate(8, 0.0, 0.0, 0.0, 0.1, None, True),
        )
        lines.append(_Line(cell, cell.world, cell.title, {"plain": found}, cell.target, share))
    given: Any = lines
    assert by_bandwidth.rates(given) == ["100mbit", "1gbit", "unlimited"]
    ((heading, drawing),) = by_bandwidth.panels(given)
    assert heading == "cluster-strong: efficiency of 2 ranks by bandwidth"
    assert "reference/zero3 at 100mbit: 20.0% (15.0% to 25.0%), modelled 20.0%." in drawing
    assert drawing.index(">100mbit<") < drawing.index(">1gbit<") < drawing.index(">unlimited<")
    assert by_bandwidth.panels(given[:1]) == [], "one bandwidth is no curve"


@dataclass
class _Line:
    cell: Cell
    world: int
    title: str
    efficiency: dict[str, Efficiency]
    target: float
    modelled_efficiency: float


def test_timed_ranks_start_on_the_nodes_that_this_is_the_head_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And what they run travels there."""
    seen: list[Any] = []

    def noted(host: ProcessHost, launch: RankLaunch) -> list[RankOutcome]:
        seen.append((pickle.loads(pickle.dumps(launch.program)), host))
        return [RankOutcome(rank, "ok") for rank in range(launch.world)]  # nothing came back

    monkeypatch.setattr(ProcessHost, "run", noted)
    run = _Where()
    leader_tasks.on_ranks(run, tmp_path / "one", int, _twice)
    told = {"nodes": 2, "ranks_per_node": 1}
    monkeypatch.setenv(ENVIRONMENT, json.dumps(told))
    leader_tasks.on_ranks(run, tmp_path / "two", int, _twice)
    cell = next(cell for cell in matrix.read(sides.files(["strong"])) if cell.world == 2)
    for what in ("memory", "alone"):
        one = side_run(cell, "ranks", {"replicate": 2})
        assert leader_tasks.one_side((what, one, tmp_path / what)) == {"answer": []}
    (_, here), (program, there), *_ = seen
    assert isinstance(here, Forked) and there._nodes == ClusterNodes(2, 1)
    assert program(3, 4) == {"record": 6} and len(seen) == 4


def test_nodes_have_room_for_no_more_ranks_than_places() -> None:
    four = ClusterNodes(4, 1)
    assert Room.here(8, four) == Room(4, "node places")
    assert Room.here(2, four) == Room(2, "GPUs")


class _Where:
    backend, world, deadline = "gloo", 2, 1.0


def _twice(rank: int) -> int:
    return 2 * rank


def _exit_code(monkeypatch: pytest.MonkeyPatch, *words: str) -> object:
    monkeypatch.setattr(sys, "argv", ["shardproof", "cluster", *words])
    with pytest.raises(SystemExit) as left:
        command_line.main()
    return left.value.code
