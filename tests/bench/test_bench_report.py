"""Many comparisons in one report: Holm's adjustment, the tables, the table of peers, the budget.

Lines are made up as ``shardproof bench`` writes them; nothing here is timed.
"""

from __future__ import annotations

import itertools
import json
import math
import re
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy import stats as distributions
from typer.testing import CliRunner

from shardproof import registry
from shardproof.bench import compared, evidence, ratios, session, sides, stats, tables
from shardproof.bench.command import measuring, time_budget
from shardproof.bench.command.options import How
from shardproof.bench.command.plan import TimedPlan
from shardproof.bench.command.time_budget import Passes
from shardproof.bench.lines import MeasuredPair, NoFigures, PairLine
from shardproof.bench.subjects import BLOCKS, RankTimes, Subject
from shardproof.commands.main import app
from shardproof.commands.verify import verify
from shardproof.compare.snapshot import Version
from shardproof.contract import Untrained
from shardproof.errors import SelectionError
from shardproof.runs import run_folder
from shardproof.runs.durations import Durations
from tools import peers

ROOT = Path(__file__).parents[2]
SD = 0.05
#: Losses of sides that train the same.
ALIKE = {"a": [2.0, 1.9], "b": [2.0, 1.9]}


def logs(mean: float, blocks: int = BLOCKS, sd: float = SD) -> list[float]:
    """Log ratios with exactly this mean and standard deviation."""
    raw = np.linspace(-1, 1, blocks)
    raw = raw / raw.std(ddof=1) * sd
    return [float(value) for value in raw + mean]


def line(name: str, mean: float, **more: Any) -> dict[str, Any]:
    """A stored comparison whose A takes exp(``mean``) times as long."""
    (pair,) = [p for p in sides.read(["peers"]) if p.name == name]
    log = stats.estimate(logs(mean))
    same = stats.estimate(logs(0.0))
    stored = {
        "kind": "bench",
        "id": pair.id,
        "pair": pair.to_dict(),
        "meshes": {"a": dict(pair.a.mesh), "b": dict(pair.b.mesh)},
        "verdict": ratios.verdict(log, stats.margin(same)),
        "reason": "",
        "blocks": log.blocks,
        "launches": 3,
        "seconds": 60.0,
        **log.ratios(),
        "sd": log.sd,
        "p": log.p,
        "p_exact": log.exact,
        "margin": 0.05,
        "smallest_effect": 0.06,
        "aa": {"ratio": 1.0, "low": 0.99, "high": 1.01, "half_width": 0.01, "sd": SD}
        | {"blocks": log.blocks, "blocks_needed": 9},
        "median_seconds": {"a": 0.1, "b": 0.1},
        "launches_differ_p": None,
        "targets_per_step": {"a": 512, "b": 512},
        "targets_per_second": {"a": 5120.0, "b": 5120.0},
        "samples_per_second": {"a": 160.0, "b": 160.0},
        "log": asdict(log),
        "memory": {"kind": "ledger", "a": 2**20, "b": 2**20, "ratio": 1.0},
    }
    return stored | more


def lines(*stored: dict[str, Any]) -> list[PairLine]:
    """What is stored, as it is read."""
    return [PairLine.model_validate(one) for one in stored]


# ---------------------------------------------------------------------------------------- Holm


def test_holm_by_hand() -> None:
    # 0.005 x 4, 0.01 x 3, 0.03 x 2; 0.04 x 1 is less than the one before it.
    assert ratios.holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert ratios.holm([0.5, 0.6]) == [1.0, 1.0]
    assert ratios.holm([0.03]) == [0.03]
    assert ratios.holm([]) == []
    assert ratios.holm([0.02, 0.02, 0.02]) == pytest.approx([0.06, 0.06, 0.06])


def step_down(ps: list[float], level: float) -> set[int]:
    """Holm 1979 as written: the k-th smallest of m against level / (m - k + 1), until one stays."""
    rejected: set[int] = set()
    for place, index in enumerate(sorted(range(len(ps)), key=lambda i: ps[i])):
        if ps[index] > level / (len(ps) - place):
            break
        rejected.add(index)
    return rejected


def test_holm_rejects_what_the_procedure_rejects() -> None:
    rng = np.random.default_rng(1)
    for count, level in itertools.product((1, 2, 3, 7, 20), (0.01, 0.05, 0.2)):
        for _ in range(50):
            ps = [float(p) for p in rng.beta(0.4, 2, count)]
            found = {i for i, p in enumerate(ratios.holm(ps)) if p <= level}
            assert found == step_down(ps, level)


def test_the_p_that_counts_is_that_of_the_interval() -> None:
    rng = np.random.default_rng(2)
    for _ in range(300):
        sample = list(rng.normal(rng.normal(0, 0.03), SD, int(rng.integers(2, 30))))
        found = stats.estimate(sample)
        p = ratios.difference_p(found)
        assert (p < 0.05) == found.differs
        assert p == pytest.approx(float(distributions.ttest_1samp(sample, 0).pvalue))
    flat = ratios.Estimate(4, 0.0, 0.0, 0.0, 0.0, None, True)
    assert ratios.difference_p(flat) == 1.0
    assert ratios.difference_p(replace(flat, mean=0.1)) == 0.0


def test_alone_a_comparison_says_in_a_report_what_it_says() -> None:
    for mean in (-0.2, -0.03, 0.0, 0.02, 0.2):
        (one,) = lines(line("ddp", mean))
        assert stats.family([one])[one.id].verdict == one.verdict


def test_a_difference_that_does_not_survive_is_inconclusive() -> None:
    reach = ratios.t_quantile(0.95, BLOCKS - 1) * SD / math.sqrt(BLOCKS)
    names = [pair.name for pair in sides.read(["peers"])]
    log = asdict(stats.estimate(logs(1.02 * reach)))
    small = line(names[0], max(0.06, 1.02 * reach), log=log, verdict="small difference")
    shown = lines(small, *(line(name, 0.0) for name in names[1:]))
    first, *others = shown
    assert stats.family([first])[first.id].verdict == "small difference"
    report = stats.family(shown)
    assert report[first.id].verdict == "inconclusive"
    assert report[first.id].p_holm == pytest.approx(report[first.id].p * len(names))
    assert all(report[one.id].verdict == "same" for one in others)
    text = tables.table(shown).markdown()
    assert "small difference" in text and "inconclusive" in text
    assert "may be chance" in tables.lost(shown)


def test_what_broke_is_not_counted() -> None:
    broken = line("zero1", 0.5, verdict="crash", reason="OverflowError")
    del broken["ratio"]
    shown = lines(line("ddp", 0.2), broken, line("zero2", 0.3, verdict="fail"))
    report = stats.family(shown)
    assert list(report) == [shown[0].id]
    assert report[shown[0].id].p == report[shown[0].id].p_holm


def test_reports_of_alike_code_rarely_tell_a_difference() -> None:
    """20 comparisons without a difference: one report in twenty, where every second would err."""
    rng = np.random.default_rng(3)
    reports, blocks = 400, 8
    sample = rng.normal(0, 1, (reports, 20, blocks))
    ps = distributions.ttest_1samp(sample, 0, axis=2).pvalue
    erring = sum(min(ratios.holm([float(p) for p in row])) < 0.05 for row in ps)
    alone = sum(min(float(p) for p in row) < 0.05 for row in ps)
    assert erring / reports <= 0.08 and alone / reports >= 0.5


def test_an_effect_at_the_margin_is_found_as_often_as_said() -> None:
    """Where the interval is narrow the margin is the hurdle, and the mean has to clear it."""
    rng = np.random.default_rng(4)
    least = stats.margin(None)
    typical = ratios.Estimate(BLOCKS, 0, -1, 1, SD, None, True)
    effect = ratios.smallest_effect(typical, least)
    drawn = [stats.estimate(list(rng.normal(effect, SD, BLOCKS))) for _ in range(1000)]
    seen = sum(ratios.verdict(f, least) == "slower" for f in drawn) / 1000
    assert 0.76 <= seen <= 0.85


# ------------------------------------------------------------------------------------- evidence


def written(path: Path, told: list[dict[str, Any]]) -> run_folder.Run:
    """A run folder with these comparisons and their report."""
    with run_folder.RunFolder(path, ["shardproof", "bench"]) as folder:
        folder.plan_others([one["id"] for one in told])
        for one in told:
            folder.add({k: v for k, v in one.items() if k != "kind"}, "bench")
        evidence.keep_report(folder)
        folder.close(0)
    return run_folder.read(path)


def test_the_report_is_made_again_by_verify(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(evidence, "verify_line", lambda run, told: None)  # no raw times here
    told = [line("ddp", 0.2), line("zero1", 0.0)]
    written(tmp_path / "run", told)
    assert not verify(tmp_path / "run").problems
    with run_folder.RunFolder(tmp_path / "run", ["shardproof", "bench"]) as folder:
        wrong = stats.family(lines(told[0]))  # as if nothing stood beside it
        stored = {name: beside.to_dict() for name, beside in wrong.items()}
        folder.add({"id": "report", "comparisons": stored}, "bench report")
        folder.close(0)
    (first, *_) = verify(tmp_path / "run").problems
    assert "in the report over all comparisons" in first


def test_an_older_report_is_held_against_what_stood_before_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(evidence, "verify_line", lambda run, told: None)
    written(tmp_path / "run", [line("ddp", 0.2)])
    written(tmp_path / "run", [line("ddp", 0.0), line("zero1", 0.0)])
    assert not verify(tmp_path / "run").problems


# ---------------------------------------------------------------------------------------- tables


def test_tokens_and_samples_of_both_sides_are_told() -> None:
    told = line("ddp", 0.1, samples_per_second={"a": 160.0, "b": 176.0})
    told["targets_per_second"] = {"a": 5120.0, "b": 5632.0}
    (one,) = lines(told)
    cells = dict(zip(tables.HEADINGS, *tables.rows([one]), strict=True))
    assert cells["A a second"] == "5,120 tokens/s, 160.0 samples/s"
    assert cells["B a second"] == "5,632 tokens/s, 176.0 samples/s"
    (classifier,) = lines(told | {"targets_per_second": told["samples_per_second"]})
    assert tables.rates(classifier, "a") == "160.0 samples/s"
    del told["samples_per_second"]
    (older,) = lines(told)
    assert tables.rates(older, "a") == "5,120 targets"


def test_rates_come_from_medians_and_the_batch() -> None:
    (one,) = lines(line("ddp", 0.0, losses=ALIKE, problem=None))
    judged = evidence.conclude(one, half_as_fast())
    assert judged.samples_per_second == {"a": 16 / 0.2, "b": 16 / 0.1}
    assert judged.targets_per_second == {"a": 512 / 0.2, "b": 512 / 0.1}


def half_as_fast() -> list[stats.TimedStep]:
    """Raw times of four blocks: A and its twin take 0.2 s, B takes 0.1 s."""
    rows = []
    for block, pair in itertools.product(range(4), ("ab", "aa")):
        order = ("a", "b", "b", "a") if pair == "ab" else ("a", "twin", "twin", "a")
        for segment, side in enumerate(order):
            seconds = {"a": 0.2, "b": 0.1, "twin": 0.2}[side]
            rows.append(stats.TimedStep(0, pair, block, segment, side, 0, 0, seconds))
    return rows


def test_times_without_losses_have_figures_and_no_verdict() -> None:
    """Ctrl-C in the first launch leaves blocks, and nobody knows what the ranks trained."""
    stored = line("ddp", 0.0, losses={}, problem=None, samples_per_second=None)

    def judged(stored: dict[str, Any]) -> PairLine:
        measured = MeasuredPair.model_validate(stored)
        return lines(stored | evidence.conclude(measured, half_as_fast()).to_dict())[0]

    one = judged(stored)
    assert one.figures is not None
    assert one.figures.ratio == pytest.approx(2.0) and one.figures.low > 1.1
    assert (one.verdict, one.trained_alike) == ("inconclusive", None)
    assert "whether the sides train the same is not known" in one.reason
    assert one.goal_met is None and one.pair.goal == 1.1
    assert stats.family([one]) == {}  # no hypothesis for others to be adjusted for
    version = Version("0", "0")
    entry = compared._of_pair(one, version)
    assert entry.verdict == "inconclusive" and not entry.samples
    known = judged(stored | {"losses": ALIKE})
    assert known.verdict == "slower" and known.goal_met is False
    assert known.trained_alike is True and compared._of_pair(known, version).samples


def test_a_line_is_written_as_it_was_read() -> None:
    """Figures stand in the line itself, and nothing is written that was not there."""
    for stored in (line("ddp", 0.1), line("ddp", 0.1, scorecard={"a": {"problem": "so"}})):
        again = lines(stored)[0].to_dict() | {"kind": "bench"}
        assert again == stored
        assert json.loads(json.dumps(again)) == json.loads(json.dumps(stored))
    (bare,) = lines({"id": "x", "pair": stored["pair"], "verdict": "crash"})
    assert bare.to_dict().keys() == {"id", "pair", "verdict"}


# ----------------------------------------------------------------------------------------- peers


def test_every_reference_strategy_has_a_peer() -> None:
    """In the file behind the README's table, and none is compared with its own family."""
    pairs = sides.read(["peers"])
    ours = {name for name in registry.names() if name.startswith("reference/")}
    ours = {name for name in ours if not issubclass(registry.load(name), Untrained)}
    # Steps of ranks that train alone are another training than those of a peer, and PyTorch has
    # no elastic group that goes on without a restart.
    ours -= {"reference/local_sgd", "reference/diloco", "reference/async_sgd", "reference/elastic"}
    # No upstream peer of these is timed so far: they stand against copies.
    ours -= (cutting := {"reference/context", "reference/expert"})
    # The naive form of `ddp` teaches what `ddp` improves on: it is compared with that one.
    assert {pair.a.implementation for pair in pairs} == ours - {"reference/naive_ddp"}
    assert {pair.b.implementation.split("/")[0] for pair in pairs} == {"pytorch", "deepspeed"}
    against = sides.read(["against-ddp", "against-copies"])
    assert {p.b.implementation for p in against} == {"reference/ddp"}
    assert {p.a.implementation for p in against} >= (ours | cutting) - {"reference/ddp"}
    assert {p.world for p in pairs} == {2, 4}


def every_peer() -> list[dict[str, Any]]:
    """A line of every pair of the scenario."""
    means = {"sequence": -0.2, "hybrid": 0.3}
    return [line(pair.name, means.get(pair.name, 0.0)) for pair in sides.read(["peers"])]


def into(run: Path, page: Path) -> int:
    return peers.main([str(run), str(page)])


def test_the_table_of_peers_stands_between_its_markers(tmp_path: Path) -> None:
    told = {one["pair"]["name"]: one for one in every_peer()}
    told["hybrid"]["meshes"] = {side: {"pipe": 2, "shard": 2} for side in "ab"}
    broken = told["zero1-deepspeed"]
    broken |= {"verdict": "precondition", "reason": "package is not installed"}
    for key in ("log", "ratio", "margin", "memory"):
        broken.pop(key)
    with_ddp = line("zero1", 0.0)
    with_ddp["pair"]["b"]["implementation"] = "reference/ddp"
    written(tmp_path / "run", [*told.values(), with_ddp | {"id": "another"}])
    page = tmp_path / "page.md"
    page.write_text(f"above\n{peers.BEGIN}\nold\n{peers.END}\nbelow\n")
    assert into(tmp_path / "run", page) == 0
    text = page.read_text()
    assert text.startswith("above\n") and text.endswith("below\n") and "old" not in text
    rows = [row for row in text.splitlines() if row.startswith("| reference/")]
    assert len(rows) == len(told) and "reference/ddp | pytorch/ddp | same" in rows[0]
    by_name = dict(zip(told, rows, strict=True))
    assert "sequence_parallel" in by_name["sequence"] and "| faster |" in by_name["sequence"]
    assert "pipe 2 x shard 2" in by_name["hybrid"] and "1.350 [" in by_name["hybrid"]
    assert "precondition: package is not installed" in by_name["zero1-deepspeed"]
    assert "2 to 4 gloo ranks" in text and "`shardproof bench peers --blocks 24`" in text
    assert into(tmp_path / "run", page) == 0 and page.read_text() == text
    shown = CliRunner().invoke(app, ["report", str(tmp_path / "run"), "--format", "markdown"])
    assert shown.stdout.startswith("| pair | verdict") and "0 judged" not in shown.stdout


def test_only_the_whole_scenario_replaces_the_table_of_peers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "page.md"
    old = f"{peers.BEGIN}\nold\n{peers.END}\n"
    page.write_text(old)
    by_hand = line("zero1", 0.0)
    by_hand["pair"]["name"] = "pair"
    for name, lines in (
        ("one", [line("ddp", 0.0)]),
        ("all-but-one", every_peer()[1:]),
        ("by-hand", [*every_peer()[2:], by_hand]),
    ):
        assert into(written(tmp_path / name, lines).path, page) == 2 and page.read_text() == old
        assert "only a run of the whole scenario `peers`" in capsys.readouterr().err


def test_without_markers_or_peers_nothing_is_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "page.md"
    page.write_text("nothing\n")
    assert into(written(tmp_path / "run", every_peer()).path, page) == 2
    assert peers.BEGIN in capsys.readouterr().err and page.read_text() == "nothing\n"
    own = line("ddp", 0.0)
    own["pair"]["b"]["implementation"] = "reference/ddp"
    run = str(written(tmp_path / "none", [own]).path)
    assert into(Path(run), page) == 2 and "shardproof bench peers" in capsys.readouterr().err
    done = CliRunner().invoke(app, ["report", run, "--into", str(page)])
    assert isinstance(done.exception, SelectionError) and "the run has no cases" in str(
        done.exception
    )


# -------------------------------------------------------------------------------------- budget


def known(tmp_path: Path, seconds: dict[str, float]) -> Durations:
    found = Durations(tmp_path / "durations.json")
    for name, value in seconds.items():
        found.note(name, value)
    return found


def planned(
    pairs: list[sides.Pair], durations: Durations, minutes: float | None
) -> time_budget.Schedule:
    return time_budget.choose([session.Measured(pair) for pair in pairs], durations, minutes)


def test_a_budget_chooses_by_past_durations(tmp_path: Path) -> None:
    pairs = sides.read(["peers"])[:4]
    seconds = dict(
        zip((time_budget.duration_name(p, Passes()) for p in pairs), (40, 50, 15, 30), strict=True)
    )
    durations = known(tmp_path, {k: float(v) for k, v in seconds.items()})
    schedule = planned(pairs, durations, 1.0)
    assert [item.subject.name for item in schedule.chosen] == ["ddp", "zero2"]
    assert [item.subject.name for item in schedule.left_out] == ["zero1", "zero3"]
    assert schedule.seconds == 55
    assert planned(pairs, durations, None).left_out == []
    assert planned(pairs, durations, 0.1).chosen == []


def test_what_is_unknown_takes_as_long_as_its_like(tmp_path: Path) -> None:
    first, second, *_ = sides.read(["peers"])
    durations = known(tmp_path, {time_budget.duration_name(first, Passes()): 33.0})
    assert time_budget.estimates([first, second], durations, Passes())[second.id] == 33.0
    fewer = replace(first, blocks=6)  # another number of blocks is another comparison
    assert time_budget.estimates([fewer], durations, Passes())[fewer.id] != 33.0
    guess = time_budget.estimates([first], known(tmp_path / "none", {}), Passes(alone=False))[
        first.id
    ]
    assert guess > first.blocks * 8 * sides.SEGMENT_SECONDS


def test_a_dry_run_tells_the_plan(tmp_path: Path) -> None:
    arguments = ["bench", "peers", "--dry-run", "--budget", "2", "--results", str(tmp_path / "r")]
    done = CliRunner().invoke(app, arguments)
    names = [text for text in done.stdout.splitlines() if text.startswith("bench::")]
    assert done.exit_code == 0 and 0 < len(names) < len(sides.read(["peers"]))
    late = {pair.id for pair in sides.read(["peers"])} - set(names)
    assert late == set(re.findall("left out by the budget: (.*)", done.stderr))
    assert "left out by the budget" in done.stderr and not (tmp_path / "r").exists()


def _told(capsys: pytest.CaptureFixture[str]) -> str:
    return capsys.readouterr().out


class _Clockwork(session.Session):
    """A session whose comparisons take as long as a clock says."""

    def __init__(self, clock: list[float], each: float) -> None:
        self.clock, self.each = clock, each

    def examine(self, subjects: Sequence[Subject]) -> list[session.Measured]:
        return [session.Measured(subject) for subject in subjects]

    def time(self, measured: session.Measured, on_blocks: Any) -> None:
        self.clock[0] += self.each
        losses: dict[str, list[float | None]] = {side: [*ALIKE["a"]] for side in "ab"}
        ones = {"a": 1, "b": 1}
        measured.records.append([RankTimes(0, ones, losses, {"a": 0, "b": 0}, ones, 1, [])])
        for block, (segment, side) in itertools.product(range(3), enumerate("abba")):
            measured.rows.append(stats.TimedStep(0, "ab", block, segment, side, 0, 0, 1.0))

    def run_alone(self, measured: session.Measured) -> None:
        """No side runs here."""

    def measure_memory(self, measured: session.Measured) -> None:
        measured.memory = NoFigures(problem="not measured here")


def test_what_does_not_fit_is_left_out_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Guesses let two in; the clock shows that the second no longer fits."""
    clock = [0.0]
    monkeypatch.setattr(measuring.time, "monotonic", lambda: clock[0])
    pairs = sides.read(["peers"])[:3]
    durations = known(tmp_path, {})
    guess = time_budget.estimates(pairs, durations, Passes())[pairs[0].id]
    minutes = 2.5 * guess / 60
    assert len(planned(pairs, durations, minutes).chosen) == 2
    run = tmp_path / "run"
    plan = TimedPlan((), pairs, How(budget=minutes, results=run))
    code = measuring.run(_Clockwork(clock, 2 * guess), plan, durations)
    found = run_folder.read(run)
    assert [one["pair"]["name"] for one in found.others["bench"]] == ["ddp"] and code == 0
    assert [one.pair and one.pair["name"] for one in found.left_out] == ["zero1", "zero2"]
    assert all("no time in a budget" in one.reason for one in found.left_out)
    assert capsys.readouterr().out.count("left out by the budget: bench::") == 2
    assert not [text for text in verify(run).problems if "missing" in text]
    stored = json.loads((tmp_path / "durations.json").read_text())
    assert stored == {time_budget.duration_name(pairs[0], Passes()): [pytest.approx(2 * guess)]}

    # Left out later, figures of before stay.
    measuring.run(_Clockwork(clock, 1.0), plan, durations)
    assert [one["pair"]["name"] for one in run_folder.read(run).others["bench"]] == ["ddp"]
    assert "(kept: " in _told(capsys)

    # A failure among them counts.
    (line,) = run_folder.read(run).others["bench"]
    with run_folder.RunFolder(run, ["bench"]) as folder:
        folder.add(line | {"verdict": "crash"}, "bench")
    assert measuring.run(_Clockwork(clock, 1.0), plan, durations) == 1
    assert "(kept: crash)" in _told(capsys)


def test_a_budget_without_room_judges_nothing(tmp_path: Path) -> None:
    pairs = sides.read(["peers"])[:1]
    durations = known(tmp_path, {})
    plan = TimedPlan((), pairs, How(budget=0.01, results=tmp_path / "run"))
    code = measuring.run(_Clockwork([0.0], 1.0), plan, durations)
    assert code == 3 and not run_folder.read(tmp_path / "run").others
