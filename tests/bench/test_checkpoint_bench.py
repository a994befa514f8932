"""``shardproof bench checkpoint``: what is timed, what is counted, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast
from unittest.mock import Mock

import pytest
import torch
import torch.distributed.checkpoint as dcp

from shardproof.bench import lines as stored
from shardproof.bench import sides, tables
from shardproof.bench.checkpoint.timed_saves import Saves
from shardproof.bench.evidence import SMALLEST, conclude, counted
from shardproof.bench.lines import MeasuredPair, PairLine
from shardproof.bench.sides import parse_parameters, sized
from shardproof.bench.subjects import Action, RankCounts, RankTimes
from shardproof.contract import Piece
from shardproof.runs.run_folder import read

MIB = 1 << 20


def ranks(*counts: RankCounts) -> list[RankTimes]:
    """What the ranks of a launch return."""
    return [
        RankTimes(rank, {}, {}, {}, {}, threads=1, cores=[], counts=one)
        for rank, one in enumerate(counts)
    ]


@pytest.mark.parametrize(
    ("text", "count"), [("200M", 200_000_000), ("1.5B", 1_500_000_000), ("60K", 60_000)]
)
def test_sizes_are_written_as_people_write_them(text: str, count: int) -> None:
    assert parse_parameters(text) == count
    (pair, *_) = sized(sides.read(["checkpoint"]), text)
    knobs = pair.workload.params
    made = 12 * knobs["width"] ** 2 * knobs["layers"]
    assert made == pytest.approx(count, rel=0.2) and pair.size == text
    assert knobs["width"] == 64 * knobs["heads"]


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["checkpoint", "--parameters", "many"], "--parameters: not a valid number (many)"),
        (["checkpoint", "--parameters", "0.001B1"], "e.g. 20M, 200M or 1.5B"),
        (["checkpoint", "--parameters", "3"], "at least 49,152"),
        (["peers", "--parameters", "20M"], "or use `bench checkpoint`"),
        (["checkpoint", "peers", "--parameters", "20M"], "of charnames_gpt (ddp)"),
        (["strong", "--parameters", "20M"], "--parameters is not an option of `bench scaling`"),
        (
            ["collectives", "--parameters", "20M"],
            "--parameters is not an option of `bench collectives`",
        ),
    ],
)
def test_bad_input_ends_with_2_and_a_remedy(command: Any, words: list[str], says: str) -> None:
    code, _, errors = command("bench", *words)
    assert code == 2 and says in errors


def test_the_scenario_asks_for_all_measures() -> None:
    pairs = {pair.name: pair for pair in sides.read(["checkpoint"])}
    assert {name: (pair.action, pair.goal) for name, pair in pairs.items()} == {
        "save": ("save", 1.10),
        "load": ("load", 1.10),
        "stall": ("stall", 1.10),
        "stall-over-save": ("stall", 0.10),
    }
    assert {pair.world for pair in pairs.values()} == {4}


# ----------------------------------------------------------------------------------------- counted


def test_bytes_read_are_those_of_all_ranks_of_the_worst_launch() -> None:
    good = ranks(RankCounts(needed=100, read=102), RankCounts(needed=100, read=104), RankCounts())
    bad = ranks(RankCounts(needed=100, read=112), RankCounts(needed=100, read=100), RankCounts())
    (one,) = counted(3, [good])
    assert (one.ratio, one.bytes, one.limit) == (1.03, (206, 200), 1.05) and not one.missed
    (worst,) = counted(3, [bad, good])
    assert worst.ratio == 1.06 and worst.missed and "3 ranks to 2" in worst.what


def test_a_peak_is_that_of_the_worst_rank_and_only_ours_is_judged() -> None:
    largest = 2 * SMALLEST
    a, b = counted(
        2,
        [
            ranks(
                RankCounts({"a": SMALLEST, "b": 9 * largest}, largest),
                RankCounts({"a": 3 * SMALLEST, "b": 0}, largest),
            )
        ],
    )
    assert (a.ratio, a.limit, a.missed) == (1.5, 1.0, True)
    assert (b.ratio, b.limit, b.missed) == (9.0, None, False)


def test_a_small_tensor_is_no_measure_of_a_peak() -> None:
    (one,) = counted(2, [ranks(RankCounts({"a": MIB}, 1000))])
    assert one.limit is None and not one.missed


def test_what_is_counted_can_miss_a_goal_that_times_meet() -> None:
    (pair, *_) = sides.read(["checkpoint"])
    line = MeasuredPair(id=pair.id, pair=pair, counted=counted(2, [ranks(RankCounts())]))
    judged = conclude(line, [])
    fine = PairLine.model_validate(line.to_dict() | judged.to_dict() | {"goal_met": True})
    assert not fine.missed
    figure = stored.Counted(what="bytes read", ratio=1.2, bytes=(120, 100), limit=1.05)
    wrong = fine.model_copy(update={"counted": [figure]})
    assert wrong.missed
    said = "\n".join(tables.details(wrong))
    assert "counted: bytes read 1.200 (120 / 100 bytes), at most 1.05: missed" in said
    assert "time until a save is committed, adamw, float32, 4 ranks" in said


# ------------------------------------------------------------------------------------- one segment


class Memory:
    """An implementation that saves into itself; with ``loses`` a load does nothing."""

    def __init__(self, loses: bool = False) -> None:
        self.values, self.kept, self.loses = torch.arange(1.0, 5.0), torch.empty(0), loses
        self.waited = 0

    def local_state(self, kind: str) -> list[Piece]:
        return [Piece.whole("w", self.values)] if kind == "parameters" else []

    def save(self, path: Path, extra: object) -> Any:
        self.kept = self.values.clone()
        return Mock(wait=self.wait, waited=1000.0)

    def wait(self) -> None:
        self.waited += 1

    def load(self, path: Path) -> None:
        if not self.loses:
            self.values.copy_(self.kept)


def saves(implementation: Any, action: Action, root: Path) -> Saves:
    return Saves(Mock(implementation=implementation, steps=1), action, root, Mock(), 0)


def test_a_load_is_timed_over_zeros_and_must_bring_back_what_was_saved(tmp_path: Path) -> None:
    sound = saves(Memory(), "load", tmp_path)
    sound.warm_up()
    assert sound.act() > 0 and sound.arm.implementation.values.tolist() == [1, 2, 3, 4]
    with pytest.raises(AssertionError, match="the loaded state differs from the saved state"):
        saves(Memory(loses=True), "load", tmp_path).warm_up()


@pytest.mark.parametrize("action", ["save", "stall"])
def test_what_was_saved_is_removed_and_every_save_is_waited_for(
    action: Action, tmp_path: Path
) -> None:
    (tmp_path / "step-1").mkdir()
    (tmp_path / "lock").touch()
    one = saves(Memory(), action, tmp_path)
    seconds = one.act()
    assert 0 < seconds < 1000 if action == "save" else seconds > 1000  # the update's wait counts
    assert cast("Mock", one.arm.step).call_count == (action == "stall")
    assert one.arm.implementation.waited == 1
    assert [path.name for path in tmp_path.iterdir()] == ["lock"]


def test_of_who_calls_dcp_only_that_call_is_timed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Calls(Memory):
        def save(self, path: Path, extra: object) -> Any:
            dcp.save({}, checkpoint_id=path)
            return super().save(path, extra)

    clock = iter(range(100))
    monkeypatch.setattr(dcp, "save", Mock())
    monkeypatch.setattr("time.perf_counter", lambda: next(clock))
    assert saves(Memory(), "save", tmp_path).act() == 1  # two looks at the clock
    assert saves(Calls(), "save", tmp_path).act() == 1  # of four the two inside


# --------------------------------------------------------------------------------------- all of it


@pytest.mark.launches
@pytest.mark.timeout(600)
def test_saves_and_loads_end_in_a_run_that_is_judged_again(command: Any, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    words = ["--world", "2", "--parameters", "60K", "--blocks", "2", "--launches", "1"]
    code, out, errors = command("bench", "checkpoint", *words, "--results", str(folder))
    assert code in (0, 3), out + errors  # 3: an interval of two blocks decides nothing
    found = {line.pair.name: line for line in stored.pairs(read(folder))}
    assert list(found) == ["save", "load", "stall", "stall-over-save"]
    for line in found.values():
        assert line.problem is None and line.blocks == 2 and line.figures is not None
        assert min(line.figures.median_seconds.values()) > 0
        assert not line.samples_per_second and not line.targets_per_second
    (read_bytes,) = found["load"].counted
    assert "2 ranks to 1" in read_bytes.what and read_bytes.ratio > 1
    assert [one.what[:9] for one in found["save"].counted] == ["peak of A", "peak of B"]
    code, out, errors = command("verify", str(folder))
    assert code == 0, out + errors
    code, out, _ = command("report", str(folder), "-v")
    assert code == 0 and "bytes read, 2 ranks to 1" in out
