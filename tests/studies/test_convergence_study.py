"""The study `convergence`: trainings to a target, the verdict by hand, and bad input."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy
import pytest
from local_ranks import succeed

from shardproof import registry, verdicts
from shardproof.case import Case
from shardproof.cases.runner import run_cases
from shardproof.errors import ScenarioError, SelectionError
from shardproof.runs.run_folder import RunFolder
from tools.studies.convergence import bands, plan
from tools.studies.convergence import page as pages
from tools.studies.convergence import study as convergence
from tools.studies.convergence import training as trainings
from tools.studies.convergence.judge import judge, soonest
from tools.studies.convergence.training import RankEnd, RankTraining, Run, Trained, together

pytestmark = pytest.mark.usefixtures("one_thread")

SMALL = """
name: small
about: the digits, far from the minimum
workload: {name: digits_cnn, global_batch: 12, params: {channels: 2, layers: 1, norm: group}}
optimizer: {lr: 0.1}
world: 3
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
  - implementation: reference/ddp
    label: no-residual
    options: {compress: {method: topk, density: 0.01, feedback: false}}
    expect: not non-inferior
    reason: planted
  - implementation: mutants/server_answers_from_a_cache
    label: unbounded
    options: {max_staleness: 1000, order: []}
    expect: not non-inferior
    reason: planted
"""


def written(folder: Path, text: str = SMALL) -> Path:
    path = folder / "small.yaml"
    path.write_text(text)
    return path


def on_threads(runs: Sequence[tuple[str, Run]]) -> Iterator[tuple[str, Trained]]:
    """Trains on ranks that are threads of this process."""
    for key, run in runs:
        ends = succeed(lambda r, _, run=run: RankTraining(run, r).train(), run.world, ledgers=True)
        yield key, together(ends)


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> tuple[plan.Study, convergence.Ends]:
    (study,) = plan.read([written(tmp_path_factory.mktemp("small"))])
    return study, convergence.trained(study, on_threads)


def test_planted_faults_that_equality_cannot_see_miss_the_target(
    small: tuple[plan.Study, convergence.Ends],
) -> None:
    study, ends = small
    found = convergence.judged(study, ends)
    assert found[study.methods[0].name].verdict == "non-inferior"
    for method in study.methods[1:]:
        assert found[method.name].missed == [0, 1], method.name
        assert found[method.name].verdict != "non-inferior"
        assert found[method.name].holds(method.expect)


def test_steps_bytes_and_losses_are_those_of_the_run(
    small: tuple[plan.Study, convergence.Ends],
) -> None:
    _, ends = small
    for dense, half in zip(ends["reference/ddp"], ends["reference/ddp+fp16"], strict=True):
        assert dense.reached == dense.steps == 4 * len(dense.losses)
        assert dense.losses[-1] <= 1.45 < dense.losses[-2]
        assert "reaches the target" in dense.why
        # 2 (N - 1) bytes a parameter byte, in every step.
        parameters = dense.sent // (dense.steps * 2 * 2 * 4)
        assert dense.sent == parameters * dense.steps * 2 * 2 * 4
        assert half.sent * dense.steps == dense.sent * half.steps / 2
    assert ends["reference/ddp"][0].losses != ends["reference/ddp"][1].losses
    late = ends["mutants/server_answers_from_a_cache+unbounded"]
    assert all(end.steps == 24 and end.why == "the budget of 6 votes is spent" for end in late)


def test_a_rank_without_samples_of_the_fixed_batch_votes_without_data(
    small: tuple[plan.Study, convergence.Ends],
) -> None:
    run = replace(small[0].first, judged_on=2, steps=8, target=0.001)
    ((_, end),) = on_threads([("few", run)])
    assert end.steps == 8 and all(math.isfinite(loss) for loss in end.losses)


def test_a_leader_trains_the_same_bit_for_bit_and_tells_what_broke(
    small: tuple[plan.Study, convergence.Ends],
) -> None:
    study, ends = small
    run = study.dense.runs[0]
    nobody_works = replace(run, system="reference/async_sgd", world=1)
    found = dict(convergence.in_leaders(1)([("again", run), ("broken", nobody_works)]))
    assert found["again"] == ends["reference/ddp"][0]
    assert "of 1 ranks, none remains as a worker" in found["broken"].problem


def test_the_page_its_drawing_and_its_records_made_again(
    small: tuple[plan.Study, convergence.Ends],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    study, ends = small
    kept = tmp_path / "kept.json"
    plain = convergence.recorded(study, ends)
    kept.write_text(json.dumps({"about": "somewhere", "studies": {"small": plain}}))
    with RunFolder(tmp_path / "run", ["shardproof"]) as folder:
        assert convergence.run([study], 1, kept, folder) == verdicts.HELD
    page = (tmp_path / "run/convergence.md").read_text()
    assert page == capsys.readouterr().out and "somewhere" in page
    image = "convergence-small.svg"
    assert "| reference/ddp+fp16 |" in page and f"({image})" in page and "planted" in page
    ElementTree.parse(tmp_path / "run" / image)
    again = tmp_path / "run/convergence.json"
    assert json.loads(again.read_text())["studies"] == json.loads(kept.read_text())["studies"]
    assert convergence.run([study], 1, again) == verdicts.HELD


def test_a_fault_that_trains_as_well_is_told(
    small: tuple[plan.Study, convergence.Ends], tmp_path: Path
) -> None:
    """The command fails if a planted fault does not show."""
    study, ends = small
    spoilt = {**ends, "reference/ddp+no-residual": ends["reference/ddp"]}
    plain = convergence.recorded(study, spoilt)
    kept = tmp_path / "kept.json"
    kept.write_text(json.dumps({"studies": {"small": plain}}))
    assert convergence.run([study], 1, kept) == verdicts.BROKEN


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ("target: 1.45", "target: 1.5", "ddp was trained otherwise: target was 1.45, expected 1.5"),
        ("lr: 0.1", "lr: 0.2", "'lr': 0.1"),
        ("every: 4", "every: 2", "every was 4, expected 2"),
        ("world: 3", "world: 2", "world was 3, expected 2"),
        ("float16", "bfloat16", "ddp[+]fp16 was trained otherwise: options was"),
    ],
)
def test_records_of_another_training_are_refused(
    small: tuple[plan.Study, convergence.Ends], tmp_path: Path, old: str, new: str, says: str
) -> None:
    kept = tmp_path / "kept.json"
    kept.write_text(json.dumps({"studies": {"small": convergence.recorded(*small)}}))
    (asked,) = plan.read([written(tmp_path, SMALL.replace(old, new, 1))])
    with pytest.raises(SelectionError, match=says) as told:
        convergence.run([asked], 1, kept)
    assert "kept.json" in str(told.value)


def test_records_that_do_not_tell_what_was_trained_are_refused(
    small: tuple[plan.Study, convergence.Ends], tmp_path: Path
) -> None:
    study, ends = small
    plain = {name: [end.to_dict() for end in own] for name, own in ends.items()}
    kept = tmp_path / "kept.json"
    kept.write_text(json.dumps({"studies": {"small": plain}}))
    with pytest.raises(SelectionError, match="no records of a convergence study"):
        convergence.run([study], 1, kept)


# ---------------------------------------------------------------------------------------- seconds


def test_seconds_are_those_of_steps_until_they_are_over(
    small: tuple[plan.Study, convergence.Ends], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step takes 1, to come to its end 10, to look 100, to set up 1000."""
    clock = [0.0]

    def takes(name: str, seconds: float, owner: Any = RankTraining) -> None:
        method = getattr(owner, name)

        def slow(self: Any, *given: Any) -> Any:
            clock[0] += seconds
            return method(self, *given)

        monkeypatch.setattr(owner, name, slow)

    monkeypatch.setattr(trainings.time, "perf_counter", lambda: clock[0])
    for name, seconds in (("_set_up", 1000), ("_step", 1), ("_measured", 100)):
        takes(name, seconds)
    takes("drain", 10, registry.load("reference/ddp"))
    run = replace(small[0].first, world=1, steps=8, target=0.001)
    (end,) = succeed(lambda r, _: RankTraining(run, r, timed=True).train(), 1, ledgers=True)
    assert end.seconds == [14.0, 14.0]
    (end,) = succeed(lambda r, _: RankTraining(run, r).train(), 1, ledgers=True)
    assert end.seconds == [], "ranks without cores of their own tell none"


def test_between_two_looks_the_slowest_rank_counts() -> None:
    def rank(*seconds: float) -> RankEnd:
        return RankEnd([1.0, 0.9], 8, 8, Fraction(3), "reached", [*seconds])

    assert together([rank(1, 5), rank(4, 2)]).seconds == 9
    assert together([rank(1, 5), rank()]).seconds is None


def test_ranks_that_are_threads_tell_no_seconds(
    small: tuple[plan.Study, convergence.Ends],
) -> None:
    study, ends = small
    assert not study.first.timed and replace(study.first, backend="gloo").timed
    assert all(end.seconds is None for own in ends.values() for end in own)
    page = pages.section(study, ends, convergence.judged(study, ends), "")
    assert "seconds" not in page and "wall time" not in page
    shared = replace(study, dense=replace(study.dense, runs=[replace(study.first, backend="gloo")]))
    page = pages.section(shared, ends, convergence.judged(study, ends), "")
    assert "No seconds are given: ranks had no cores of their own" in page


@pytest.mark.launches
def test_ranks_that_are_processes_train_the_same_and_tell_seconds(
    small: tuple[plan.Study, convergence.Ends],
) -> None:
    """Where there are cores for two."""
    run = replace(small[0].first, world=2)
    other = replace(run, backend="gloo")
    found = dict(convergence.in_leaders(4)([("threads", run), ("processes", other)]))
    seconds = found["processes"].seconds
    assert replace(found["processes"], seconds=None) == found["threads"]
    assert (seconds is not None) == (len(os.sched_getaffinity(0)) >= 2)


def timed(*seconds: float) -> list[Trained]:
    """Runs that reached the target in 8 steps and so many seconds; NaN: it was missed."""
    ends = [Trained([1.0, 0.9], 8, 8, 80, seconds=s) for s in seconds]
    return [replace(e, reached=None) if math.isnan(e.seconds or 0) else e for e in ends]


def test_the_ratio_of_seconds_by_hand() -> None:
    dense = timed(10, 20, 30)
    assert judge(dense, timed(5, 10, 15), 1.25, 8).ratio_of_seconds == "0.50 [0.50, 0.50]"
    assert judge(dense, timed(5, 10, 15), 1.25, 8).ratio == "1.00 [1.00, 1.00]"
    assert judge(dense, timed(5, 10, math.nan), 1.25, 8).ratio_of_seconds == "-"
    assert judge(dense, ends(8, 8, 8), 1.25, 8).ratio_of_seconds == "-", "records without seconds"


def test_which_is_there_first_in_wall_time_is_said(
    small: tuple[plan.Study, convergence.Ends],
) -> None:
    names = list(small[1])

    def said(*systems: Sequence[Trained]) -> str:
        told = dict(zip(names, systems, strict=False))
        return pages.in_wall_time(told)

    first = f"In wall time `{names[1]}` reaches the target first: "
    assert said(timed(10, 20), timed(5, 10), timed(20, 40)) == (
        f"{first}0.50 [0.50, 0.50] of the seconds of `{names[0]}`; "
        f"0.25 [0.25, 0.25] of the seconds of `{names[2]}`."
    )
    torn = said(timed(10, 20), timed(5, 10), timed(12, 6))
    assert f"`{names[1]}` takes the least seconds" in torn
    assert f"the interval next to `{names[2]}` holds 1" in torn and "is not shown" in torn
    late = {names[0]: timed(10, 20), names[1]: timed(5, math.nan), names[2]: timed(30, 40)}
    found = soonest(late)
    assert found is not None and (found.name, list(found.beside)) == (names[0], [names[2]])
    assert "fewer than two" in said(timed(10, 20), timed(5, math.nan))
    assert "fewer than two" in said(timed(10, 20), ends(8, 8))


def test_a_page_of_trainings_that_were_timed_tells_seconds(
    small: tuple[plan.Study, convergence.Ends],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    study, every = small
    told = {
        name: [replace(end, seconds=3.0 + seed) for seed, end in enumerate(own)]
        for name, own in every.items()
    }
    kept = tmp_path / "kept.json"
    kept.write_text(json.dumps({"studies": {"small": convergence.recorded(study, told)}}))
    convergence.run([study], 1, kept)
    page = capsys.readouterr().out
    assert "| ratio of seconds [95 %] |" in page and "| 3.5 (3.0 to 4.0) |" in page
    assert "In wall time `reference/ddp` takes the least seconds" in page, "the same beside fp16"


# ------------------------------------------------------------------------------------ the verdict


def ends(*steps: float, budget: int = 1000) -> list[Trained]:
    """Runs that reached the target after so many steps; NaN: it was missed."""
    return [
        Trained([1.0], None if math.isnan(n) else int(n), budget if math.isnan(n) else int(n), 80)
        for n in steps
    ]


def test_verdicts_by_hand() -> None:
    dense = ends(100, 200, 100, 200)
    assert judge(dense, dense, 1.25, 1000).verdict == "non-inferior"
    twice = judge(dense, ends(200, 400, 200, 400), 1.25, 1000)
    assert (twice.verdict, twice.ratio) == ("inferior", "2.00 [2.00, 2.00]")
    torn = judge(dense, ends(60, 400, 60, 400), 1.25, 1000)
    assert torn.verdict == "not shown"
    missed = judge(dense, ends(100, math.nan, 100, 200, budget=201), 1.25, 201)
    assert (missed.verdict, missed.missed) == ("not shown", [1])
    assert missed.ratio.startswith("at least 1.00")
    assert not missed.holds("non-inferior") and missed.holds("not non-inferior")
    assert twice.holds("inferior") and not missed.holds("inferior") and not torn.holds("inferior")


def test_a_seed_that_diverges_counts_with_the_whole_budget() -> None:
    """It ends at its first vote, long before the dense system's."""
    dense = ends(100, 100, 100)
    diverged = [Trained([math.nan], None, 4, 80)] * 3
    found = judge(dense, diverged, 1.25, 1000)
    assert (found.verdict, found.missed) == ("inferior", [0, 1, 2])
    assert found.ratio == "at least 10.00 [10.00, 10.00]"


def test_without_a_dense_system_that_gets_there_nothing_is_decided() -> None:
    found = judge(ends(100, math.nan), ends(100, 100), 1.25, 1000)
    assert found.verdict == "precondition" and "with seeds [1]" in found.problem
    broke = [*ends(100), Trained(problem="rank 1 raised")]
    found = judge(ends(100, 100), broke, 1.25, 1000)
    assert (found.verdict, found.problem) == ("precondition", "method: rank 1 raised")
    assert not found.holds("not non-inferior")


def test_at_the_margin_a_claim_errs_as_seldom_as_it_says() -> None:
    """2.5 of 100: one end of a 95 % interval.  At most 4 in 400 draws has a chance of 98 %."""
    draws = numpy.random.default_rng(17).normal(math.log(1.25), 0.2, (400, 8))
    dense = ends(*[10_000] * 8)
    wrong = sum(
        judge(dense, ends(*numpy.exp(logs) * 10_000), 1.25, 10_000).verdict == "non-inferior"
        for logs in draws
    )
    assert wrong <= 17, wrong


# -------------------------------------------------------------------------------------- bad input


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ("target: 1.45", "target: 0", "target"),
        ("seeds: 2", "seeds: 1", "seeds"),
        ("steps: 24", "steps: 7", "two evaluations at least, so 8 or more"),
        ("    reason: planted\n", "", "belong together"),
        ("dense: reference/ddp", "dense: reference/dpp", "did you mean reference/ddp"),
        ("label: fp16", "label: no-residual", "two methods of one name"),
        (
            "dense: reference/ddp",
            "dense: {implementation: reference/ddp, label: fp16}",
            "two methods of one name (the dense system is one)",
        ),
        ("digits_cnn", "digits_cn", "did you mean digits_cnn"),
        ("methods:", "margin: 1.0\nmethods:", "margin"),
        ("density: 0.01", "density: 1.5", "option 'compress.density' = 1.5"),
        ("max_staleness: 1000", "max_stale: 1000", "did you mean 'max_staleness'"),
        ("world: 3", "world: 3\nbackend: glo", "did you mean gloo"),
        ("world: 3", "world: 3\nbackend: nccl", "trainings to a target are on CPUs"),
    ],
)
def test_faulty_files_are_told_with_their_line(
    tmp_path: Path, old: str, new: str, says: str
) -> None:
    assert old in SMALL
    with pytest.raises(ScenarioError) as told:
        plan.read([written(tmp_path, SMALL.replace(old, new, 1))])
    assert says in str(told.value) and "small.yaml:" in str(told.value), str(told.value)


def test_names_and_records_that_there_are_not(tmp_path: Path) -> None:
    with pytest.raises(SelectionError, match="did you mean digits"):
        plan.files(["digit"])
    (study,) = plan.read([written(tmp_path)])
    with pytest.raises(SelectionError, match="fp16"):
        study.only(["reference/ddp+fp8"])
    with pytest.raises(SelectionError, match=r"give the convergence\.json of a run folder"):
        convergence.run([study], 1, tmp_path / "small.yaml")
    (tmp_path / "few.json").write_text(json.dumps({"studies": {}}))
    with pytest.raises(SelectionError, match="has 0 seeds there, expected 2"):
        convergence.run([study], 1, tmp_path / "few.json")
    with pytest.raises(SelectionError, match="did you mean gloo"):
        plan.read([written(tmp_path)], backend="gloop")
    (study,) = plan.read([written(tmp_path)], backend="gloo")
    assert {run.backend for method in study.every for run in method.runs} == {"gloo"}


def test_what_is_planted_passes_every_check_of_equality() -> None:
    """As the judge of single steps is told of it, by an option or by a bound."""
    studies = plan.read(plan.files(["charnames"]))
    planted = [m for m in studies[0].methods if m.reason.startswith("planted")]
    cases = [
        Case(
            id=f"planted::{method.name}",
            scenario="planted",
            implementation=method.runs[0].system,
            options=method.runs[0].options,
            backend="in_memory",
            mesh={"replicate": 3},
            workload=replace(method.runs[0].workload, micro_batches=1),
            optimizer=method.runs[0].optimizer,
            lane="fp64",
            checks=("equivalence", "compression"),
            steps=4,
        )
        for method in planted
    ]
    results, _ = run_cases(cases, 1, lambda result: None)
    assert [(result.case.id, result.verdict) for result in results] == [
        (case.id, "pass") for case in cases
    ], [result.reason for result in results]


def test_shipped_scenarios_plant_both_faults_and_take_their_options() -> None:
    studies = plan.read(plan.files([]))
    assert {study.name for study in studies} == {"digits", "charnames", "cluster"}
    for study in studies:
        planted = [m for m in study.methods if m.reason.startswith("planted")]
        if not study.first.timed:
            assert len(study.dense.runs) >= 8
            labels = [m.name.rpartition("+")[2] for m in planted]
            assert labels == ["topk1-no-residual", "unbounded"]
        for method in (study.dense, *study.methods):
            run = method.runs[0]
            registry.load(run.system).capabilities(run.options)
            # All turns of a burst are over, and all ranks have met, when ranks vote.
            assert run.every % (run.options.get("every") or 1) == 0
            if run.options.get("order") == "burst":
                assert run.every % (run.options["max_staleness"] + 1) == 0


def test_bands_hold_where_a_run_ended_and_where_a_loss_is_none() -> None:
    rows = bands.bands([[3.0, 1.0], [5.0, 4.0, 2.0], [4.0, math.nan]], 10, 40)
    assert [row[0] for row in rows] == [10, 20, 30, 40]
    assert rows[0] == (10, 3.0, 4.0, 5.0)
    assert rows[1] == (20, 1.0, 4.0, math.inf)
    assert rows[3] == (40, 1.0, 2.0, math.inf)
    text = bands.drawing("t", [[3.0, 1.0]], {"a<b": [[4.0, math.nan]]}, 10, 1.0)
    assert "inf" not in text and "nan" not in text
    ElementTree.fromstring(text)
