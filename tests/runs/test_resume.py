"""``run --resume`` and ``--rerun-failed``: a run goes on with what it had planned, nothing else."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from shardproof.case import Case
from shardproof.checks.results import CaseResult
from shardproof.errors import SelectionError
from shardproof.runs.run_folder import RunFolder
from shardproof.scenarios.selection import Selection
from shardproof.scenarios.vocabulary import installed

FILTER = "(replicate1 or replicate2) and sgd and fp64 and noclip and small_buckets"


def _planned() -> list[Case]:
    return Selection(["ddp-gpt"], ["reference/ddp"], expression=FILTER).cases(installed())


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run that was killed before its first case ended."""
    with RunFolder(tmp_path / "x" / "int", ["run", "ddp-gpt"]) as folder:
        folder.plan(_planned())
        return folder.path


def _goes_on(command: Any, run: Path, *words: str) -> set[str]:
    code, out, err = command("run", "--resume", "--results", str(run), "--dry-run", *words)
    assert code == 0, err
    return set(out.split())


def test_resume_goes_on_with_what_was_planned(command: Any, run: Path) -> None:
    ids = {case.id for case in _planned()}
    assert len({case.backend for case in _planned()}) == 2
    assert _goes_on(command, run) == ids
    assert _goes_on(command, run, "ddp-gpt") == ids
    assert _goes_on(command, run, "scenarios/conformance", "--tier", "quick") == ids
    assert _goes_on(command, run, "--seed", "0") == ids


def test_filters_narrow_within_the_plan(command: Any, run: Path) -> None:
    gloo = {case.id for case in _planned() if case.backend == "gloo"}
    assert gloo
    assert _goes_on(command, run, "--backend", "gloo") == gloo
    assert _goes_on(command, run, "-k", "gloo") == gloo
    assert _goes_on(command, run, "--impl", "reference/*", "--backend", "gloo") == gloo
    one = _planned()[0].id
    assert _goes_on(command, run, one) == _goes_on(command, run, "-k", one) == {one}


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("--seed", "9"), "--seed: not planned in this run (9) - planned: 0"),
        (("zero-gpt",), "SCENARIO: not planned in this run (zero-gpt)"),
        (("ddp-gtp",), "did you mean ddp-gpt?"),
        (("--impl", "plain"), "--impl: not planned in this run (plain) - planned: reference/ddp+"),
        (("--backend", "in_memory", "--backend", "nccl"), "--backend: not planned in this run"),
        (("--world", "4"), "--world: not planned in this run (4) - planned: 1, 2"),
        (("-k", "adamw"), "-k matches nothing (adamw)"),
        (("--rerun-failed",), "--resume and --rerun-failed cannot be combined - choose one"),
        (("--tier", "full"), "--tier: not planned in this run (full) - planned: quick"),
        (("--campaign", "3"), "--campaign and --case draw their own cases - leave out --resume"),
    ],
)
def test_what_was_not_planned_is_refused(
    command: Any, run: Path, words: tuple[str, ...], says: str
) -> None:
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    code, out, err = command("run", "--resume", "--results", str(run), *words)
    assert (code, out) == (2, ""), out
    assert says in err and len(err.splitlines()) == 1, err
    assert {path: path.read_bytes() for path in run.rglob("*") if path.is_file()} == before


def test_a_run_named_as_a_scenario_is_told_its_option(command: Any, run: Path) -> None:
    for words in (("--resume",), ("--resume", "--results", str(run)), ()):
        code, _, err = command("run", *words, str(run))
        assert code == 2 and f"write --results {run} with --resume" in err
    _, out, _ = command("run", "--help")
    assert "shardproof run --resume --results results/RUN" in out


def test_nothing_left_takes_no_time(command: Any, run: Path) -> None:
    with RunFolder(run, ["run"]) as folder:
        for case in _planned():
            folder.add(CaseResult(case.id, case, "pass", record="run.json"))
    code, out, err = command("run", "--resume", "--results", str(run), "--dry-run")
    assert (code, out) == (0, ""), err
    assert err.strip() == f"nothing to run: {len(_planned())} results are there"


def test_another_case_of_a_planned_id_is_refused(run: Path) -> None:
    """Its result would hide that of the first."""
    before = (run / "planned.jsonl").read_bytes()
    first = _planned()[0]
    other = replace(first, steps=first.steps + 1)
    with (
        RunFolder(run, ["run"]) as folder,
        pytest.raises(SelectionError, match="another case with the same id"),
    ):
        folder.plan([other])
    assert (run / "planned.jsonl").read_bytes() == before
    with RunFolder(run, ["run"]) as folder:
        folder.plan([replace(first, source="elsewhere.yaml:3")])
