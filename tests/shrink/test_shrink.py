"""``shardproof shrink``: smaller cases that fail for the same cause, and nothing else."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from shardproof import registry
from shardproof.case import Case
from shardproof.cases import kills
from shardproof.cases.runner import Session
from shardproof.checks.results import CaseResult
from shardproof.contract import OptimizerSpec
from shardproof.errors import SelectionError
from shardproof.runs import records
from shardproof.runs.run_folder import read
from shardproof.scenarios.load import find
from shardproof.scenarios.matrix import expand
from shardproof.scenarios.vocabulary import installed
from shardproof.shrink import document, reductions, scripts, search
from shardproof.shrink.cause import Cause, cause_of
from shardproof.shrink.search import Limits, Shrinker, Shrunk
from tools.studies import shrink as study

PASSES = "ddp-gpt::reference/naive_ddp::in_memory::replicate1::sgd::noclip::fp64::full"
GRADIENTS = Cause("fail", "equivalence", "gradients", "gradients_final")


@pytest.fixture(scope="module")
def session() -> Iterator[Session]:
    with Session(2) as made:
        yield made


def planted(name: str) -> Case:
    """The case of a planted fault."""
    return kills.pair(registry.load_mutant(name), False).case


def shrink(session: Session, case: Case, **limits: Any) -> Shrunk:
    return Shrinker(session, installed(), Limits(**limits)).shrink(case)


# -------------------------------------------------------------------------------------- causes


def test_a_cause_is_one_of_a_check_a_kind_of_state_and_a_moment() -> None:
    assert GRADIENTS.same(GRADIENTS)
    for other in (
        replace(GRADIENTS, end="crash"),
        replace(GRADIENTS, check="norm"),
        replace(GRADIENTS, state="parameters"),
        replace(GRADIENTS, phase="after_clip"),
    ):
        assert not GRADIENTS.same(other) and not other.same(GRADIENTS)


def test_an_operation_may_be_unknown_but_not_another_one() -> None:
    missing = replace(GRADIENTS, says="the share of data coordinate is missing")
    doubled = replace(GRADIENTS, says="micro-batch counts times")
    assert missing.same(GRADIENTS) and GRADIENTS.same(missing)
    assert not missing.same(doubled)


def test_errors_of_ranks_are_compared_by_their_words() -> None:
    crash = Cause("crash", "", "RuntimeError", "step()", "size of tensor does not match")
    assert not crash.same(replace(crash, says="out of memory"))
    assert not crash.same(replace(crash, says=""))


# ----------------------------------------------------------------------------------- documents


def test_every_planted_fault_has_a_scenario_file_that_says_the_same() -> None:
    for name in registry.mutant_names()[::7]:
        own = planted(name)
        again = document.required(own, installed())
        for field in ("workload", "optimizer", "mesh", "steps", "checks", "membership", "fault"):
            assert getattr(again, field) == getattr(own, field), (name, field)
        assert dict(again.options) == dict(own.options), name


def test_cases_of_scenarios_survive_as_a_file_of_their_own() -> None:
    cases = [case for file in find(["scenarios/conformance"]) for case in expand(file, installed())]
    for case in cases[::97]:
        again = document.as_file(replace(case, xfail=None, skip=None), installed())
        assert again is not None, case.id
        fields = ("workload", "optimizer", "mesh", "steps", "checks", "lane", "dtype", "precision")
        differing = [name for name in fields if getattr(again, name) != getattr(case, name)]
        assert not differing, case.id


def test_a_scenario_can_name_a_planted_fault_exactly_only() -> None:
    known = installed().implementations
    assert "mutants/ddp_reduces_in_fp32" in known
    assert "mutants/ddp_reduces_in" not in known
    assert not any(name.startswith("mutants/") for name in known)


# ---------------------------------------------------------------------------------- reductions


def test_sizes_are_tried_from_the_smallest() -> None:
    assert reductions.ladder(1, 10) == [1, 2, 4, 8, 9]
    assert reductions.ladder(1, 2) == [1]
    assert reductions.ladder(1, 1) == []
    assert [*reductions.parts("abc")] == [(), ("a",), ("b", "c"), ("a", "c"), ("a", "b")]


def test_plans_stay_on_ranks_and_steps_that_are_left() -> None:
    own = next(
        case
        for case in map(planted, registry.mutant_names())
        if case.deaths and len(case.mesh) == 1 and case.world > 2
    )
    axis = next(iter(own.mesh))
    smaller = reductions._with_mesh(own, {axis: 2})
    assert all(death.rank < 2 for death in smaller.deaths)
    assert all(rank < 2 for ranks in smaller.membership.values() for rank in ranks)
    fewer = reductions._with_steps(own, 1)
    assert all(death.step < 1 for death in fewer.deaths)
    assert all(int(step) < 1 for step in fewer.membership)


# ------------------------------------------------------------------------------------ searches


def test_a_fault_over_two_axes_shrinks_to_two_ranks_and_one_step(session: Session) -> None:
    own = planted("hybrid_sums_norms_again")
    assert own.world == 4
    shrunk = shrink(session, own)
    assert shrunk.best.world == 2 and shrunk.best.steps == 1 and not shrunk.stopped
    assert shrunk.best.checks == ("equivalence",) and not shrunk.best.workload.traits
    assert shrunk.best.workload.params["layers"] == 1
    again = shrink(session, own)
    assert (again.best, again.kept, again.tried) == (shrunk.best, shrunk.kept, shrunk.tried)


def test_what_fails_for_another_cause_is_not_kept(
    session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[int, Cause | None]] = []

    def noted(result: Any, account: Mapping[str, Any]) -> Cause | None:
        found = cause_of(result, account)
        seen.append((result.case.world, found))
        return found

    monkeypatch.setattr(search, "cause_of", noted)
    shrunk = shrink(session, planted("server_drops_what_was_overtaken"))
    others = {world for world, cause in seen if cause and not shrunk.cause.same(cause)}
    # One rank alone has no worker: that fails too, by a refusal.
    assert 1 in others and shrunk.best.world == 3
    assert shrunk.cause.check == "equivalence"


@pytest.mark.parametrize(
    ("fault", "end"),
    [("hybrid_axes_in_an_order_of_its_own", "hang"), ("ddp_bucket_order_by_rank", "crash")],
)
def test_hangs_and_crashes_stay_what_they_are(session: Session, fault: str, end: str) -> None:
    shrunk = shrink(session, planted(fault))
    assert shrunk.cause.end == end and shrunk.result.verdict.startswith(end)
    assert shrunk.best.steps == 1 and shrunk.kept


def test_a_case_that_passes_is_refused(session: Session) -> None:
    own = planted("hybrid_sums_norms_again")
    clean = replace(own, implementation=registry.load_mutant("hybrid_sums_norms_again").parent)
    with pytest.raises(SelectionError, match="does not fail, so there is nothing to shrink: pass"):
        shrink(session, clean)


def test_limits_and_interrupts_keep_the_best_so_far(session: Session) -> None:
    own = planted("hybrid_sums_norms_again")
    shrunk = shrink(session, own, runs=2)
    assert shrunk.stopped == "2 attempts" and shrunk.tried == 2
    # The last attempt of a limit counts, if it was one that holds.
    enough = shrink(session, own)
    few = next(n for n in range(2, enough.tried + 1) if len(shrink(session, own, runs=n).kept) > 1)
    assert shrink(session, own, runs=few).tried == few

    def stop(shrunk: Shrunk) -> None:
        if len(shrunk.kept) == 2:
            raise KeyboardInterrupt

    stopped = Shrinker(session, installed(), Limits(), stop).shrink(own)
    assert stopped.stopped == "Ctrl-C" and len(stopped.kept) == 2
    assert stopped.best.world < own.world


# ------------------------------------------------------------------------------------- command


def test_the_file_runs_by_itself_and_fails_for_the_same_cause(
    command: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    code, out, err = command("shrink", "--fault", "tensor_norm_of_own_shards", "--output", "s.yaml")
    assert code == 0, out + err
    assert "shardproof run s.yaml" in out and "fails again" in out
    code, out, err = command("run", "s.yaml", "--results", "r", "--shrink")
    assert code == 1, out + err
    (result,) = read(Path("r")).cases
    account = records.read(Path("r") / str(result.record))
    cause = cause_of(result, account)
    assert cause is not None and f"# Cause: {cause}" in Path("s.yaml").read_text()
    # It is as small as can be already, and `run --shrink` has made a file of it again.
    (again,) = Path("r/shrunk").glob("*.yaml")
    matrix, own = (file.read_text().partition("matrix:")[2] for file in (again, Path("s.yaml")))
    assert matrix == own
    code, out, err = command("shrink", "r", "-k", "no_such_case")
    assert code == 2 and "the run has no failed case to shrink" in err


def test_bad_input_is_refused_with_a_remedy(
    command: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code, _, err = command("shrink")
    assert code == 2 and "name a case, a scenario or a run, or one fault" in err
    code, _, err = command("shrink", PASSES, "--output", str(tmp_path / "s.yaml"))
    assert code == 2 and "nothing to shrink: pass" in err
    assert "name a case that `shardproof run` reports as fail" in err
    assert not (tmp_path / "s.yaml").exists()
    code, _, err = command("shrink", "--fault", "no_such_fault")
    assert code == 2 and "matches no fault" in err


def test_an_upstream_defect_has_a_script_without_the_suite(
    command: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Finding 60, which the suite expects as an ``xfail``."""
    words = "fsdp-divisor", "-k", "divided and replicate2xshard1"
    code, out, err = command("shrink", *words, "--output", str(tmp_path / "s.yaml"))
    assert code == 0, out + err
    script = tmp_path / "s.py"
    text = script.read_text()
    assert len(text.splitlines()) <= 40
    modules = {
        (node.module or "").partition(".")[0]
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.ImportFrom)
    }
    assert modules <= {"torch"} and "shardproof" not in text and str(tmp_path) not in text
    told = re.search(r"^Prints: +(.+)$", text, re.M)
    done = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, timeout=150, check=True
    )
    assert told is not None and told[1] in done.stdout.splitlines()


def sound(**changes: Any) -> Shrunk:
    """A case of a system without a defect, as if it had been shrunk."""
    (file,) = find(["fsdp-divisor"])
    case = next(c for c in expand(file, installed()) if "replicate2" in c.id)
    usual = {"options": {}, "label": "", "checks": ("equivalence",), "lane": "fp64"}
    own = replace(case, **{**usual, "dtype": "float64", "xfail": None, "steps": 1, **changes})
    result = CaseResult(own.id, own, "fail", reason="none")
    return Shrunk(own, GRADIENTS, own, result)


def test_a_sound_system_gets_no_script() -> None:
    """Clipping changes gradients in place: what is compared must be read after it."""
    clipped = OptimizerSpec("sgd", clip_norm=0.001)
    with pytest.raises(scripts.NoScript, match="plain code does not show it"):
        scripts.made(sound(optimizer=clipped))


def test_words_of_an_error_cannot_break_a_script() -> None:
    odd = 'a """ b \\N{ c'
    text = scripts.render(sound().best, sound(), scripts._system("pytorch/fsdp2"), {}, odd)
    ast.parse(text)


def test_lines_of_two_ranks_that_ran_together_show_nothing() -> None:
    line = "step 0, rank 0: largest relative error of a gradient: "
    for out, shown in ((f"{line}8.5e-17step 0, rank 1", False), (f"{line}5.0e-01", True)):
        assert bool(scripts.shows(scripts.Said(out, "", 0), GRADIENTS)) is shown


def test_shrinking_after_a_run_leaves_its_exit_code(
    command: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An expected failure that passes is red, and is nothing to shrink."""
    monkeypatch.chdir(tmp_path)
    document_of = document.text(sound().best, "passes", "none", "")
    text = document_of.replace("matrix:", "xfail:\n  - reason: it is expected to fail\nmatrix:")
    Path("s.yaml").write_text(text)
    code, out, err = command("run", "s.yaml", "--results", "r", "--shrink")
    assert code == 1 and "xpass" in out, out + err
    assert "the run has no failed case to shrink" in err


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("--fault", "ddp_sums_instead_of_mean", "-k", "adamw"), "--fault names one case"),
        ((PASSES, "--output", "s.py"), "--output: the script is written there"),
        ((PASSES, "--output", "."), "--output: is a folder"),
        (("x" * 300 + "::y",), "not a path"),
    ],
)
def test_words_that_do_not_go_together_are_refused(
    command: Any, words: tuple[str, ...], says: str
) -> None:
    code, _, err = command("shrink", *words)
    assert code == 2 and says in err, err


# --------------------------------------------------------------------------------------- study


def test_the_sample_of_the_study_is_fixed_and_its_cases_are_larger() -> None:
    first = study.sample(20)
    assert first == study.sample(100)[:20] and len({*first}) == 20
    own = planted("hybrid_sums_norms_again")
    larger = next(study.grown(own))
    assert larger.world > own.world and larger.steps == 4
    assert larger.workload.global_batch > own.workload.global_batch
