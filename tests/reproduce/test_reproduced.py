"""``shardproof reproduce``: the same cases again, and what of each comes out the same."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from made_nodes import MadeNodes
from synthetic import case, case_line, check_line

from shardproof.case import Case, Fault
from shardproof.cases import kinds
from shardproof.checks.results import CaseResult
from shardproof.commands.verify import verify
from shardproof.reproduce import command as reproduce
from shardproof.reproduce import reproduced
from shardproof.reproduce.reproduced import Reproduced
from shardproof.runs import records
from shardproof.runs.header import read_header
from shardproof.runs.run_folder import Run, RunFolder, read

CASES = [case(0), case(1, lane="bitwise"), case(2, lane="dyadic")]


def _run(
    folder: Path,
    change: Callable[[CaseResult], CaseResult | None] = lambda result: result,
    digests: Mapping[str, str] = {},
    told: Mapping[str, Any] = {},
) -> Run:
    """A run of :data:`CASES`; ``digests``: that of the one tensor, by lane; ``told``: of where."""
    with RunFolder(folder, ["shardproof", "run"]) as run:
        run.plan(CASES)
        for each in CASES:
            checks = [check_line("traffic", "pass", figures={"bytes_sent": "7"})]
            line = case_line(each, "pass", "", checks) | {
                "record": _record(folder, each, digests.get(each.lane, "same"))
            }
            if each.lane != "fp64":
                line |= {"worst_error": 0.0, "bound": 0.0}
            if (result := change(CaseResult.from_dict(line))) is not None:
                run.add(result)
            else:
                run.leave_out(each, "no time in a budget of 1 minutes")
        run.close(0)
    header = json.loads((folder / "run.json").read_text())
    for key, value in told.items():
        header["invocations"][0][key] |= value
    (folder / "run.json").write_text(json.dumps(header))
    return read(folder)


def _record(folder: Path, of: Case, digest: str) -> str:
    row = {"step": 0, "point": "after_update", "kind": "parameters", "name": "w", "replica": 0}
    figures = {"tensors": [row | {"digest": digest}], "compared": {}, "records": []}
    account = {"case": of.to_dict(), "timings": {}, "whole": [], "figures": figures}
    return records.write(folder, account)[0]


def _judged(
    before: Run,
    after: Run | None,
    obstacles: Mapping[str, str] = {},
) -> dict[str, Reproduced]:
    ids = frozenset(before.ids)
    outcomes = reproduced.judge(before, after, obstacles, ids)
    assert {outcome.id for outcome in outcomes} == ids
    lanes = {each.id: each.lane for each in CASES}
    return {lanes[outcome.id]: outcome for outcome in outcomes}


def _words(outcomes: Mapping[str, Reproduced]) -> list[str]:
    return [outcomes[each.lane].word for each in CASES]


OTHER = {"fp64": "other", "bitwise": "other", "dyadic": "other"}


def test_the_same_bits_are_equal_wherever_they_were_computed(tmp_path: Path) -> None:
    before = _run(tmp_path / "a")
    after = _run(tmp_path / "b", told={"fingerprint": {"kernels": {"torch": "AVX512"}}})
    outcomes = _judged(before, after)
    assert _words(outcomes) == ["equal"] * 3
    assert outcomes["fp64"].why == "1 digest"
    assert reproduced.exit_code(list(outcomes.values())) == 0


def test_other_bits_agree_where_there_is_a_bound_and_differ_where_there_is_none(
    tmp_path: Path,
) -> None:
    outcomes = _judged(_run(tmp_path / "a"), _run(tmp_path / "b", digests=OTHER))
    assert _words(outcomes) == ["agrees", "differs", "differs"]
    assert "error 9.2e-16 there, 9.2e-16 here, bound 1e-12" in outcomes["fp64"].why
    assert "1 of 1 digests differ, one is: 0 after_update parameters w 0" in outcomes["bitwise"].why
    assert reproduced.exit_code(list(outcomes.values())) == 1


def test_bits_of_other_kernels_prove_nothing_but_where_arithmetic_is_exact(tmp_path: Path) -> None:
    there = {"fingerprint": {"kernels": {"torch": "AVX512"}}}
    before, after = _run(tmp_path / "a", told=there), _run(tmp_path / "b", digests=OTHER)
    outcomes = _judged(before, after)
    assert _words(outcomes) == ["agrees", "cannot be compared", "differs"]
    assert "bits of other kernels: torch=AVX512, here torch=" in outcomes["bitwise"].why
    kinds = [one for one in outcomes.values() if one.word != "differs"]
    assert reproduced.exit_code(kinds) == 3


@pytest.mark.parametrize(
    ("change", "word", "why"),
    [
        (lambda r: replace(r, verdict="fail", reason="no"), "differs", "verdict worse: pass, now"),
        (
            lambda r: replace(
                r, checks=[replace(r.checks[0], figures={**r.checks[0].figures, "bytes_sent": "8"})]
            ),
            *("differs", "traffic.bytes_sent worse: 7, now 8"),
        ),
        (
            lambda r: replace(r, verdict="skip", reason="needs CUDA"),
            *("cannot be compared", "skip here: needs CUDA"),
        ),
        (
            lambda r: replace(r, verdict="refused", reason="no option x"),
            *("cannot be compared", "refused here: no option x"),
        ),
        (lambda r: None, "cannot be compared", "no time in a budget of 1 minutes"),
        (lambda r: replace(r, data="cd" * 32), "cannot be compared", "different data sets"),
    ],
)
def test_what_came_of_a_case_here_is_told(
    tmp_path: Path, change: Callable[[CaseResult], CaseResult | None], word: str, why: str
) -> None:
    before = _run(tmp_path / "a", lambda result: replace(result, data="ab" * 32))
    after = _run(tmp_path / "b", change)
    outcomes = _judged(before, after)
    assert {outcome.word for outcome in outcomes.values()} == {word}
    assert all(why in outcome.why for outcome in outcomes.values()), outcomes
    assert reproduced.exit_code(list(outcomes.values())) == (1 if word == "differs" else 3)


def test_another_torch_compares_nothing(tmp_path: Path) -> None:
    before = _run(tmp_path / "a", told={"packages": {"torch": "2.9.1"}})
    outcomes = _judged(before, _run(tmp_path / "b"))
    assert _words(outcomes) == ["cannot be compared"] * 3
    assert outcomes["fp64"].why.startswith("torch 2.9.1, now 2.")


def test_what_has_nothing_to_compare_anywhere_stands_beside(tmp_path: Path) -> None:
    fault = Fault("kill", 1, 1, "forward", ("crash",))
    before = _run(
        tmp_path / "a",
        lambda r: (
            replace(r, verdict="skip", reason="no GPU")
            if r.case.lane == "fp64"
            else replace(r, case=replace(r.case, fault=fault))
            if r.case.lane == "bitwise"
            else None
        ),
    )
    outcomes = _judged(before, None)
    assert _words(outcomes) == ["not compared"] * 3
    whys = [outcomes[each.lane].why for each in CASES]
    assert whys[0] == "was skipped: no GPU" and whys[1].startswith("a fault plan")
    assert whys[2].startswith("was left out: no time")
    assert reproduced.exit_code(list(outcomes.values())) == 3


# ------------------------------------------------------------------------------------ the command

CELL = "reference/ddp and replicate2 and sgd and fp64"


@pytest.fixture(scope="module")
def first(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One case of one scenario, run and put into a folder whose name tells nothing."""
    from commands import here

    path = tmp_path_factory.mktemp("first") / "run"
    words = ("run", "ddp-gpt", "--backend", "in_memory", "-k", CELL, "--results", str(path))
    done = here(*words)
    assert done.returncode == 0, done.stdout + done.stderr
    return path


def test_a_run_is_reproduced_from_its_bundle_alone(
    command: Any, first: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bundle = str(tmp_path / "run.tar.gz")
    assert command("bundle", str(first), "-o", bundle)[0] == 0
    monkeypatch.chdir(tmp_path)
    again = tmp_path / "again"
    code, out, err = command("reproduce", bundle, "--results", str(again))
    assert code == 0, out + err
    (result,) = read(first).cases
    assert f"equal: {result.id}: 360 digests" in out
    assert "1 equal in every digest, 0 within their bound only, 0 not reproduced" in out
    assert verify(again).problems == []
    header = read_header(again)
    assert header is not None and header.last.reproduces == "run"
    (line,) = map(json.loads, (again / "reproduced.jsonl").read_text().splitlines())
    assert line == {"id": result.id, "word": "equal", "why": "360 digests"}


def test_a_system_that_is_gone_is_told_and_nothing_runs(command: Any, tmp_path: Path) -> None:
    gone = [
        case(0, id="a", implementation="reference/no_such"),
        case(1, id="b", implementation="mine_that_is_gone:Mine"),
        case(2, id="c", backend="carrier_pigeon"),
        case(3, id="d", workload=replace(case(3).workload, name="no_such_model")),
    ]
    with RunFolder(tmp_path / "run", ["run"]) as folder:
        folder.plan(gone)
        for each in gone:
            folder.add(CaseResult(each.id, each, "pass"))
    code, out, err = command("reproduce", str(tmp_path / "run"), "--results", str(tmp_path / "x"))
    assert code == 3, out + err
    for name, why in (
        ("a", "the system is missing: "),
        ("b", "the system is missing: "),
        ("c", "no longer supported: backend carrier_pigeon"),
        ("d", "no longer supported: workload no_such_model"),
    ):
        assert f"cannot be compared: {name}: {why}" in out
    assert not (tmp_path / "x").exists()


def test_workloads_that_train_no_model_are_run_again() -> None:
    names = [*kinds.UNTRAINED]
    of = case(0)
    cases = [replace(of, id=n, workload=replace(of.workload, name=n)) for n in names]
    assert names and reproduce._obstacles(cases) == {}


def test_what_does_not_fit_the_nodes_cannot_be_compared() -> None:
    cases = [case(n, id=f"{b}{w}", backend=b, mesh={"shard": w}) for n, (b, w) in enumerate(ROOM)]
    told = reproduce._obstacles(cases, MadeNodes(2, 2))
    assert told == {"gloo5": "5 ranks do not fit on 2 nodes x 2 ranks"}
    assert reproduce._obstacles(cases, None) == {}


#: Ranks of in_memory are threads of the head.
ROOM = [("gloo", 4), ("gloo", 5), ("in_memory", 5)]


def test_bad_input_is_refused(command: Any, first: Path, tmp_path: Path) -> None:
    for words, says in (
        (("no-such-run",), "no such run (no-such-run)"),
        ((str(first), "-k", "nothing_of_it"), "no case to run again (nothing_of_it)"),
        ((str(first), "--results", str(first)), f"--results: is not empty ({first})"),
        ((str(first), "--nodes", "3"), "nodes need --cluster"),
    ):
        code, out, err = command("reproduce", *words)
        assert (code, out) == (2, "") and says in err, err
