"""The ABBA timer: its statistics on simulated data, its evidence, and what it says no to.

No test here asserts an absolute time, or which side of a real pair is faster.
"""

from __future__ import annotations

import itertools
import json
import math
import shutil
import signal
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from commands import here, started

from shardproof.bench import evidence, ratios, session, sides, stats
from shardproof.bench.judge import alike
from shardproof.bench.lines import MeasuredPair, NoFigures, PairLine
from shardproof.bench.subjects import BLOCKS, LETTERS, ORDERS, Pair, RankTimes
from shardproof.commands.verify import verify
from shardproof.errors import InputError
from shardproof.runs.run_folder import read

pytestmark = pytest.mark.usefixtures("brief_sessions")

ROOT = Path(__file__).parents[2]
SMALL = ("--param", "layers=1", "--blocks", "4", "--launches", "1")
#: Log-ratio SD of a block, as calibrated (results/evidence/bench-calibration.md), rounded up.
SD = 0.10


def simulated(
    ratio: float, sd: float, blocks: int, seed: int, ranks: int = 2
) -> list[stats.TimedStep]:
    """Raw times of a session: a machine that drifts, noisy steps, A ``ratio`` times as slow."""
    rng = np.random.default_rng(seed)
    rows = []
    orders = {"ab": ("a", "b", "b", "a"), "aa": ("a", "twin", "twin", "a")}
    for block, pair in itertools.product(range(blocks), orders):
        machine = math.exp(rng.normal(0, 0.3))  # met by both sides alike
        own = {"a": rng.normal(0, sd), "b": 0.0, "twin": 0.0}
        for segment, side in enumerate(orders[pair]):
            factor = ratio if side == "a" and pair == "ab" else 1.0
            for step, rank in itertools.product(range(2), range(ranks)):
                seconds = machine * factor * math.exp(own[side]) * (1 + 0.001 * rank)
                where = (block % 3, pair, block, segment, side, step, rank)
                rows.append(stats.TimedStep(*where, seconds))
    return rows


# ---------------------------------------------------------------------------------- statistics


def test_interval_covers_the_truth_in_95_of_100() -> None:
    rng = np.random.default_rng(1)
    found = [stats.estimate(list(rng.normal(0.05, SD, BLOCKS))) for _ in range(2000)]
    covered = sum(f.low <= 0.05 <= f.high for f in found) / len(found)
    assert 0.935 <= covered <= 0.965


@pytest.mark.parametrize("heavy", [False, True], ids=["normal", "heavy tails"])
def test_two_equal_sides_are_rarely_called_different(heavy: bool) -> None:
    rng = np.random.default_rng(2)
    alarms = different = 0
    for _ in range(2000):
        draw = rng.standard_t(3, (2, BLOCKS)) if heavy else rng.normal(0, 1, (2, BLOCKS))
        found, same = stats.estimate(list(SD * draw[0])), stats.estimate(list(SD * draw[1]))
        alarms += found.differs
        different += ratios.verdict(found, stats.margin(same)) in ("faster", "slower")
    assert alarms / 2000 <= 0.06  # 5 % and two standard errors of 2,000 draws
    assert different / 2000 <= 0.05


def test_a_slowdown_of_10_percent_is_found() -> None:
    told = [stats.judge(simulated(1.10, SD, BLOCKS, seed))[0] for seed in range(200)]
    assert told.count("slower") >= 180 and "faster" not in told
    told = [stats.judge(simulated(1 / 1.1, SD, BLOCKS, s))[0] for s in range(50)]
    assert told.count("faster") >= 45 and "slower" not in told


def test_permutation_is_exact() -> None:
    rng = np.random.default_rng(3)
    for count in (6, 7, 11):
        values = rng.normal(0.4, 1, count)
        sums = [
            abs(float(np.dot(signs, values))) for signs in itertools.product((1, -1), repeat=count)
        ]
        seen = abs(float(values.sum()))
        expected = sum(s >= seen - 1e-9 for s in sums) / 2**count
        assert stats.sign_flip_p(list(values)) == (pytest.approx(expected), True)
    assert stats.sign_flip_p([0.1] * 10) == (pytest.approx(2 / 2**10), True)
    drawn, exact = stats.sign_flip_p([0.1, -0.1] * 30)
    assert drawn > 0.9 and not exact


def test_signs_that_are_drawn_in_portions_are_the_same_as_all_at_once() -> None:
    """So that `verify` finds what was stored when they were."""
    for count in (41, 120):
        values = np.random.default_rng(count).normal(0.02, 0.1, count)
        drawn = np.random.default_rng(0).integers(0, 2, (200_000, count), dtype=np.int8) * 2 - 1
        extreme = int((np.abs(drawn @ values) >= abs(values.sum()) - 1e-9).sum())
        assert stats.sign_flip_p(list(values)) == ((extreme + 1) / 200_001, False)


@pytest.mark.parametrize(
    ("mean", "half", "least", "expected"),
    [
        (0.12, 0.02, 0.05, "slower"),
        (-0.12, 0.02, 0.05, "faster"),
        (0.00, 0.03, 0.05, "same"),
        (0.02, 0.01, 0.05, "same"),
        (0.04, 0.03, 0.05, "small difference"),
        (0.04, 0.06, 0.05, "inconclusive"),
        (0.08, 0.05, 0.30, "small difference"),
        (0.20, 0.05, 0.30, "inconclusive"),
        (0.02, 0.15, 0.30, "inconclusive"),  # not "the same" on a machine that cannot tell
    ],
)
def test_verdicts(mean: float, half: float, least: float, expected: str) -> None:
    found = ratios.Estimate(20, mean, mean - half, mean + half, half, None, True)
    assert ratios.verdict(found, least) == expected


def test_smallest_effect_is_found_as_often_as_said() -> None:
    rng = np.random.default_rng(4)
    least = stats.margin(None)
    typical = ratios.Estimate(BLOCKS, 0, -1, 1, 0.3, None, True)
    effect = ratios.smallest_effect(typical, least)
    found = [stats.estimate(list(rng.normal(effect, 0.3, BLOCKS))) for _ in range(1000)]
    seen = sum(ratios.verdict(f, least) == "slower" for f in found) / 1000
    assert 0.76 <= seen <= 0.85


def test_blocks_needed_are_the_fewest() -> None:
    for sd in (0.05, 0.1, 0.2):
        count = stats.blocks_needed(sd)

        def half(blocks: int, sd: float = sd) -> float:
            return ratios.t_quantile(0.95, blocks - 1) * sd / math.sqrt(blocks)

        assert half(count) <= math.log1p(0.05) < half(count - 1)


def test_a_step_takes_as_long_as_its_slowest_rank() -> None:
    rows = simulated(1.0, 0.0, 2, 0)
    times = stats.step_times(rows)
    longest: dict[Any, float] = {}
    for row in rows:
        key = row.launch, row.pair, row.block, row.side
        longest[key] = max(longest.get(key, 0.0), row.seconds)
    assert {key: max(seen) for key, seen in times.items()} == longest


def test_blocks_that_were_cut_off_do_not_count() -> None:
    rows = simulated(1.0, SD, 6, 5)
    assert stats.judge(rows)[1] == 6
    cut = [row for row in rows if not (row.block == 5 and row.rank == 1)]
    assert stats.judge(cut)[1] == 5
    cut = [row for row in rows if not (row.block == 5 and row.segment > 1)]
    assert stats.judge(cut)[1] == 5
    assert stats.judge(rows[:8])[0] == "inconclusive"


def test_launches_that_differ_are_told() -> None:
    rng = np.random.default_rng(6)
    alike = [(launch, value) for launch in range(3) for value in rng.normal(0, SD, 8)]
    apart = [(launch, value + 0.3 * launch) for launch, value in alike]
    assert (stats.launches_differ(alike) or 0) > 0.01 > (stats.launches_differ(apart) or 0)
    assert stats.launches_differ(alike[:8]) is None


# ------------------------------------------------------------------------------------ planning


def test_segments_are_balanced() -> None:
    """Each side follows itself once and another once, in the order in which blocks run."""
    order = [side for pair in ("ab", "aa") for side in ORDERS[pair]] * 2
    for pair, start in (("ab", 8), ("aa", 12)):
        after_itself = [order[i] for i in range(start, start + 4) if order[i] == order[i - 1]]
        assert sorted(after_itself) == sorted(set(ORDERS[pair]))


def test_speed_scenarios_can_be_read_and_pairs_travel() -> None:
    pairs = sides.read([])
    assert {"ddp"} <= {pair.name for pair in pairs}
    assert len({pair.id for pair in pairs}) == len(pairs)
    for pair in pairs:
        assert Pair.from_dict(json.loads(json.dumps(pair.to_dict()))) == pair


def test_faults_of_a_speed_scenario_have_a_line(tmp_path: Path) -> None:
    text = (ROOT / "scenarios" / "speed" / "data-parallel.yaml").read_text()
    path = tmp_path / "mine.yaml"
    for old, new, told in (
        ("goal: 1.10", "gaol: 1.10", "gaol"),
        ("size: 20m", "size: 25x", "20m"),
        ("a: reference/ddp", "a: reference/dpd", "reference/ddp"),
        ("backend: gloo", "backend: glue", "gloo"),
    ):
        path.write_text(text.replace(old, new))
        with pytest.raises(InputError, match=told):
            sides.read([str(path)])


def test_options_nest_and_are_yaml() -> None:
    told = sides.parse_assignments(["a=1", "b.c=true", "b.d=x", "e=[1, 2]"], "--option-a")
    assert told == {"a": 1, "b": {"c": True, "d": "x"}, "e": [1, 2]}
    assert sides.parse_mesh("replicate=2,shard=3", "--mesh-a") == {"replicate": 2, "shard": 3}


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("reference/dpd", "pytorch/ddp"), "reference/ddp"),
        (("reference/ddp",), "two implementations"),
        (("nothing-like-it",), "data-parallel"),
        (("reference/ddp", "pytorch/ddp", "--size", "7z"), "20m"),
        (("reference/ddp", "pytorch/ddp", "--param", "wdith=3"), "width"),
        (("reference/ddp", "pytorch/ddp", "--param", "width"), "key=value"),
        (("reference/ddp", "pytorch/ddp", "--workload", "gtp"), "charnames_gpt"),
        (("reference/ddp", "pytorch/ddp", "--backend", "glue"), "gloo"),
        (("reference/ddp", "pytorch/ddp", "--dtype", "float23"), "float32"),
        (("reference/ddp", "pytorch/ddp", "--mesh-a", "replicate=3"), "the product 2"),
        (("reference/ddp", "pytorch/ddp", "--mesh-a", "rows=2"), "replicate"),
        (("reference/ddp", "pytorch/ddp", "--launches", "9", "--blocks", "4"), "launch"),
        (("data-parallel", "-k", "dpd"), "ddp"),
        (("data-parallel", "--option-a", "a=1"), "or use `bench pair`"),
        (("data-parallel", "--batch", "16"), "--batch is not an option of `bench speed`"),
        (("reference/ddp", "pytorch/ddp", "-k", "zero3"), "-k is not an option of `bench pair`"),
        (("reference/ddp", "pytorch/ddp", "--fail-on", "goal"), "no pair here has a goal"),
        (("against-ddp", "--fail-on", "goal"), "no pair here has a goal"),
    ],
)
def test_bad_input_names_the_valid_values(arguments: tuple[str, ...], told: str) -> None:
    from typer.testing import CliRunner

    from shardproof.commands.main import app

    outcome = CliRunner().invoke(app, ["bench", *arguments, "--dry-run"])
    assert isinstance(outcome.exception, InputError), outcome.output
    assert told in str(outcome.exception)


def test_two_comparisons_of_one_id_are_refused(tmp_path: Path) -> None:
    """The second one would take the place of the first in the evidence."""
    from typer.testing import CliRunner

    from shardproof.commands.main import app

    text = (ROOT / "scenarios" / "speed" / "data-parallel.yaml").read_text()
    path = tmp_path / "mine.yaml"
    path.write_text(text + "  - {name: ddp, a: reference/ddp, b: pytorch/ddp, world: 3}\n")
    assert CliRunner().invoke(app, ["bench", str(path), "--dry-run"]).exit_code == 0
    outcome = CliRunner().invoke(app, ["bench", str(path), "--world", "2", "--dry-run"])
    assert isinstance(outcome.exception, InputError), outcome.output
    assert "two comparisons have the same id (bench::ddp::reference/ddp" in str(outcome.exception)


# ------------------------------------------------------------------------------ whole sessions


def test_a_refused_option_is_bad_input() -> None:
    done = here("bench", "reference/ddp", "pytorch/ddp", "--option-a", "bucket_byte=1")
    assert done.returncode == 2 and "bucket_bytes" in done.stderr


@pytest.fixture(scope="module")
def scored(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The run of a comparison with scorecards, and what was printed."""
    run = tmp_path_factory.mktemp("scored") / "run"
    more = ("--score", "--results", str(run))
    done = here("bench", "reference/zero1", "reference/ddp", *SMALL, *more)
    assert done.returncode in (0, 3), done.stdout + done.stderr
    return run, done.stdout


def is_evidence(run: Path, printed: str, backend: str) -> None:
    """A session left whole figures and raw times, and changed times are found."""
    (line,) = read(run).others["bench"]
    assert line["blocks"] == 4 and line["launches"] == 1 and line["aa"]["blocks"] == 4
    assert line["memory"]["kind"] == "ledger" and line["targets_per_step"] == {"a": 256, "b": 256}
    assert "tokens/s" in printed and "in this report" in printed
    for side in ("a", "b"):
        seconds = line["median_seconds"][side]
        assert line["samples_per_second"][side] == pytest.approx(16 / seconds)
        assert line["targets_per_second"][side] == pytest.approx(256 / seconds)
    told = line["telemetry"]
    assert told["launches"]["resident_bytes"] > 2**20 and told["launches"]["gpus"] == []
    assert told["no_gpu"] == f"{backend} computes on the CPU"
    assert set(told["sides"]) == (set() if backend == "in_memory" else {"a", "b"})
    assert all(side["resident_bytes"] > 0 for side in told["sides"].values())
    rows = evidence.load_times(run / line["times"])
    assert {row.rank for row in rows} == {0, 1}
    found = verify(run)
    assert not found.problems and sum(found.others.values()) == 1

    rows[::2] = [replace(row, seconds=100 * row.seconds) for row in rows[::2]]
    forged: Any = SimpleNamespace(path=run, write=lambda n, data: (run / n).write_bytes(data))
    evidence.write_times(forged, line["id"], rows)
    assert any("was changed" in problem for problem in verify(run).problems)
    assert any("raw times give" in problem for problem in verify(run).problems)


@pytest.mark.slow
def test_a_session_on_threads_leaves_evidence_that_verifies(tmp_path: Path) -> None:
    run = tmp_path / "run"
    more = ("--backend", "in_memory", "--results", str(run))
    done = here("bench", "reference/ddp", "pytorch/ddp", *SMALL, *more)
    assert done.returncode in (0, 3), done.stdout + done.stderr
    assert "reference/ddp v pytorch/ddp" in done.stdout
    is_evidence(run, done.stdout, "in_memory")


def test_a_session_leaves_evidence_that_verifies(scored: tuple[Path, str], tmp_path: Path) -> None:
    run, printed = scored
    assert "reference/zero1 v reference/ddp" in printed
    is_evidence(Path(shutil.copytree(run, tmp_path / "run")), printed, "gloo")


def test_a_scorecard_of_both_sides_is_made_again_by_verify(scored: tuple[Path, str]) -> None:
    run, printed = scored
    (line,) = read(run).others["bench"]
    assert line["strategies"] == {"a": "zero1", "b": "ddp"}
    for letter in ("a", "b"):
        card = line["scorecard"][letter]
        assert card["achieved_over_predicted"] > 0 and 0 <= card["exposed_share"] < 1
        assert card["memory_over_formula"] > 1 and card["achieved_over_probed"] > 0
        assert f"scorecard of {letter.upper()}: achieved / predicted" in printed
    assert not verify(run).problems
    assert "achieved over predicted, B" in here("compare", str(run), "--by", "hardware").stdout
    slower = MeasuredPair.model_validate(line | {"probed": _twice_as_long(line["probed"])})
    again = evidence.conclude(slower, []).to_dict()
    first = line["scorecard"]["a"]["achieved_over_predicted"]
    assert again["scorecard"]["a"]["achieved_over_predicted"] == pytest.approx(first / 2)


def _twice_as_long(probed: dict[str, Any]) -> dict[str, Any]:
    """The same probes, and steps that took twice as long."""
    sides = {
        letter: side | {"together": 2 * side["together"]}
        for letter, side in probed["sides"].items()
    }
    return probed | {"sides": sides}


def test_what_cannot_be_predicted_says_why() -> None:
    from shardproof.bench import tables
    from shardproof.bench.model import scorecard

    assert scorecard.unscored("gloo", {"replicate": 2, "shard": 2}) == ""
    assert "pipe and tensor" in scorecard.unscored("gloo", {"pipe": 2, "tensor": 2})
    assert "no cost formulas for backend ucc" in scorecard.unscored("ucc", {"shard": 2})
    pair = sides.read(["peers"])[0]
    line = PairLine(id="x", pair=pair, verdict="same")
    assert scorecard.cards(line) is None and tables._scorecards(line) == []
    line = line.model_copy(update={"scorecard": {"a": NoFigures(problem="so")}})
    assert tables._scorecards(line) == ["no scorecard of A: so"]


@pytest.mark.slow
def test_sides_that_train_differently_are_not_compared(tmp_path: Path) -> None:
    run = tmp_path / "run"
    more = ("--optimizer", "sgd", "--no-memory", "--results", str(run))
    done = here("bench", "reference/ddp", "mutants/ddp_divides_by_world", *SMALL, *more)
    (line,) = read(run).others["bench"]
    assert line["verdict"] == "fail" and "do not train the same" in line["reason"]
    assert done.returncode == 1


def test_a_side_that_raises_is_a_crash_with_its_sentence(tmp_path: Path) -> None:
    run = tmp_path / "run"
    (tmp_path / "falls.py").write_text(
        "from shardproof.impls.pytorch.ddp import PyTorchDDP\n"
        "class Falls(PyTorchDDP):\n"
        "    def step(self, batch, observe):\n"
        "        raise OverflowError('on purpose')\n"
    )
    more = ("--results", str(run))
    done = here("bench", "reference/ddp", "falls:Falls", *SMALL, *more, cwd=tmp_path)
    assert done.returncode == 1, done.stdout + done.stderr
    (line,) = read(run).others["bench"]
    assert line["verdict"] == "crash" and "OverflowError: on purpose" in line["reason"]


def test_a_side_that_refuses_the_model_is_a_precondition(tmp_path: Path) -> None:
    run = tmp_path / "run"
    sides = ("reference/tensor", "pytorch/tensor_parallel")
    done = here("bench", *sides, *SMALL, "--world", "3", "--results", str(run))
    assert done.returncode == 3, done.stdout + done.stderr
    (line,) = read(run).others["bench"]
    assert line["verdict"] == "precondition" and "which cannot be divided among 3" in line["reason"]


def test_ledgers_that_are_on_stop_a_timed_run(monkeypatch: pytest.MonkeyPatch) -> None:
    from shardproof.bench.arm import assert_nothing_is_recorded
    from shardproof.ledgers import program_order

    assert_nothing_is_recorded("gloo")
    monkeypatch.setattr(program_order, "current", lambda: program_order.RankLog())
    with pytest.raises(RuntimeError, match="a timed run cannot record"):
        assert_nothing_is_recorded("gloo")


@pytest.mark.slow
def test_ctrl_c_keeps_what_was_measured(tmp_path: Path) -> None:
    run = tmp_path / "run"
    more = ("--param", "layers=1", "--blocks", "400", "--results", str(run))
    with started("bench", "reference/ddp", "pytorch/ddp", *more) as process:
        assert process.stdout is not None
        for text in process.stdout:
            if "/400 blocks in" in text:
                break
        process.send_signal(signal.SIGINT)
        rest = process.stdout.read()
        assert process.wait() == 130
    assert "stopped" in rest
    (line,) = read(run).others["bench"]
    assert 0 < line["blocks"] < 400 and not verify(run).problems
    assert (line["verdict"], line["trained_alike"]) == ("inconclusive", None)


def test_sides_that_lose_precision_each_in_its_own_way_may_say_how_much() -> None:
    (fp16, *_) = sides.read(["compression"])
    assert fp16.loss_tolerance == 0.01
    assert alike([2.0], [2.01], fp16.loss_tolerance) == (True, "")
    found, why = alike([2.0, 2.0], [2.01, 2.1], fp16.loss_tolerance)
    assert found is False and "loss of step 1 is 2 and 2.1" in why
    assert sides.read(["data-parallel"])[0].loss_tolerance is None


def test_losses_are_those_of_the_ranks_that_learn_them() -> None:
    """Of a pipeline that is the last stage: sides that differ there do not train the same."""
    pair = sides.read(["pipeline"])[0]

    def record(rank: int, coordinate: int, loss: float | None) -> RankTimes:
        places = dict.fromkeys("ab", coordinate)
        return RankTimes(rank, {}, {side: [loss, loss] for side in "ab"}, places, {}, 1, [])

    ranks = [record(0, 0, None), record(1, 0, 2.0), record(2, 1, 3.0), record(3, 1, 3.0)]
    found = evidence.losses(session.Measured(pair, records=[ranks]), LETTERS)
    assert found == {"a": [5.0, 5.0], "b": [5.0, 5.0]}
