"""Run folders survive kills, plans keep to budgets, reports say what happened."""

from __future__ import annotations

import io
import json
import math
import os
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from commands import python
from made_case import made_case
from rich.console import Console

from shardproof import report, verdicts
from shardproof.case import Case, WorkloadSpec
from shardproof.checks import Outcome
from shardproof.checks.results import CaseResult, Kill
from shardproof.errors import SelectionError
from shardproof.report import bubbles, kills, limits, tables
from shardproof.report.coverage import seen
from shardproof.report.environment import environment
from shardproof.report.forms import BEGIN, END
from shardproof.runs import durations
from shardproof.runs.durations import Durations
from shardproof.runs.machine import KERNEL_VARIABLES, fingerprint
from shardproof.runs.run_folder import RunFolder, find_run, read
from shardproof.scenarios.budget import fit_cases
from shardproof.table import Table


def case(name: str = "c", implementation: str = "plain", world: int = 2, **fields: Any) -> Case:
    return made_case(implementation, {"replicate": world}, id=name, **fields)


def result(
    of: Case,
    verdict: str = "pass",
    error: float | None = 1e-16,
    sent: str | None = "12",
    **more: Any,
) -> CaseResult:
    fields: dict[str, Any] = {
        "reason": "because" if verdict != "pass" else "",
        "seconds": 0.25,
        "worst_error": error,
        "bound": 1e-12,
        "bytes_sent": sent,
        "bytes_expected": "12",
        "rerun": f"shardproof run s -k '{of.id}'",
    }
    return CaseResult(of.id, of, verdict, **(fields | more))


def kill(name: str = "fault", killed: bool = True) -> Kill:
    return Kill(
        name=name,
        parent="reference/ddp",
        killed_by=("equivalence",),
        failing=("equivalence", "replicas") if killed else ("replicas",),
        killed=killed,
        why_not="" if killed else "survives equivalence",
        verdict="fail",
        reason="",
        lane="fp64",
        margin=5e9,
        seconds=0.5,
    )


def fill(path: Path) -> Path:
    with RunFolder(path, ["shardproof", "run"]) as folder:
        folder.add(result(case("a", "reference/ddp")))
        folder.add(result(case("b", "reference/ddp", 3), "fail", 0.5, "13"))
        folder.add(result(case("c", "pytorch/ddp", label="view"), "skip", None, None))
        folder.leave_out(case("d"), "no room")
        folder.add(result(case("m")), "mutant case")
        folder.add(kill(), "kill")
        folder.add(kill("other", killed=False), "kill")
        folder.close(1)
    return path


# ------------------------------------------------------------------------------------ folders


def test_a_run_can_be_read_back(tmp_path: Path) -> None:
    run = read(fill(tmp_path / "run"))
    assert [line.id for line in run.cases] == ["a", "b", "c"]
    assert [line.id for line in run.left_out] == ["d"]
    assert [line.id for line in run.mutant_cases] == ["m"]
    assert [line.name for line in run.kills] == ["fault", "other"]
    [invocation] = run.header.invocations
    assert invocation.command == ["shardproof", "run"]
    assert invocation.exit_code == 1
    assert invocation.packages["torch"]
    assert run.cases[0].case == case("a", "reference/ddp")


def test_reasons_cannot_break_out_of_the_markdown(tmp_path: Path) -> None:
    reason = "first\n~~~~\n<script>alert(1)</script>\n![x](http://example.org/x.png)"
    with RunFolder(tmp_path / "run", ["again"]) as folder:
        folder.add(result(case("b", "reference/ddp", 3), "fail", 0.5, "13", reason=reason))
        folder.add(result(case("c"), "skip", None, None, reason=reason))
    text = report.document(read(tmp_path / "run"))
    outside = re.sub(r"(?ms)^  (~{4,})text$.*?^  \1$", "", text)
    assert "~~~~~text" in text and "<script" not in outside and "](http" not in outside


def test_events_that_no_case_saw_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with RunFolder(tmp_path / "run", ["shardproof", "run"]) as folder:
        folder.add(result(case("a"), seen=("a call of a strided tensor",)))
        folder.add(result(case("b"), seen=("a call of a strided tensor", "a call of integers")))
        folder.add(result(case("c"), "skip", None, None))
    run = read(tmp_path / "run")
    assert run.cases[0].seen == ("a call of a strided tensor",) and run.cases[2].seen is None
    counts = seen(run.cases)
    assert counts["a call of a strided tensor"] == 2 and counts["a call of integers"] == 1
    assert counts["buckets cut anew in a later step"] == 0
    text = report.document(run)
    assert "Conditions that the checks met" in text and "Never seen" not in text
    monkeypatch.setattr(limits, "MANY", 3)
    told = report.document(run).partition("Never seen")[2]
    assert "buckets cut anew" in told and "strided" not in told
    assert "a call of a strided tensor" in report.html(run)
    assert not seen(read(fill(tmp_path / "older")).cases)


def test_what_is_left_out_later_keeps_its_result(tmp_path: Path) -> None:
    """A small budget must not make a failure vanish."""
    fill(tmp_path / "run")
    with RunFolder(tmp_path / "run", ["again"]) as folder:
        folder.leave_out(case("b", "reference/ddp", 3), "no room")
        folder.add(result(case("d")))
        folder.add(replace(kill("other", False), verdict="left out", why_not="no room"), "kill")
    run = read(tmp_path / "run")
    assert {line.name: line.verdict for line in run.kills}["other"] == "fail"
    assert {line.id: line.verdict for line in run.cases}["b"] == "fail"
    assert run.left_out == [] and len(run.cases) == 4


def test_invocations_append_and_the_last_line_of_a_case_counts(tmp_path: Path) -> None:
    fill(tmp_path / "run")
    with RunFolder(tmp_path / "run", ["again"]) as folder:
        folder.add(result(case("b", "reference/ddp", 3)))
        folder.add(result(case("d")))
    run = read(tmp_path / "run")
    assert {line.id: line.verdict for line in run.cases} == {
        "a": "pass",
        "b": "pass",
        "c": "skip",
        "d": "pass",
    }
    assert run.left_out == []
    assert [i.command for i in run.header.invocations] == [["shardproof", "run"], ["again"]]


def test_a_line_cut_off_by_a_kill_loses_itself_only(tmp_path: Path) -> None:
    path = fill(tmp_path / "run") / "cases.jsonl"
    content = path.read_bytes()
    for cut in range(1, 60):
        path.write_bytes(content[:-cut])
        assert [line.name for line in read(path.parent).kills] == (
            ["fault", "other"] if cut == 1 else ["fault"]
        )
    with RunFolder(path.parent, ["again"]) as folder:
        folder.add(result(case("e")))
    assert "e" in [line.id for line in read(path.parent).cases]


def test_every_line_is_on_disk_when_add_returns(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run", [])
    folder.add(result(case("a")))
    assert json.loads((tmp_path / "run" / "cases.jsonl").read_text())["id"] == "a"
    folder.close(0)


def test_lines_are_standard_json_even_for_nan(tmp_path: Path) -> None:
    with RunFolder(tmp_path / "run", []) as folder:
        checks = [Outcome("traffic", "fail", figures={"x": math.inf})]
        folder.add(result(case("a"), "fail", math.nan, checks=checks))

    def forbid(name: str) -> None:
        raise AssertionError(name)

    text = (tmp_path / "run" / "cases.jsonl").read_text()
    assert json.loads(text, parse_constant=forbid)["checks"][0]["figures"] == {"x": "inf"}
    [row] = tables.table(read(tmp_path / "run").cases).texts
    assert row[4].startswith("nan / ")


def test_nothing_of_the_environment_is_recorded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SECRET_TOKEN", "hunter2-hunter2")
    path = fill(tmp_path / "run")
    (path / "report.html").write_text(report.html(read(path)))
    for file in path.iterdir():
        assert "hunter2" not in file.read_text()
        assert os.uname().nodename not in file.read_text() or len(os.uname().nodename) < 5
    allowed = {"cpu", "cores", "memory_bytes", "system", "machine", "gpus", "kernels"}
    assert set(fingerprint().model_dump()) == allowed


def _of_row(table: Table, name: str) -> list[str]:
    """What stands behind ``name``."""
    [row] = [texts for texts in table.texts if texts[0] == name]
    return row[1:]


def test_a_run_tells_which_kernels_ran(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in KERNEL_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    assert fingerprint().kernels.items() >= {("MKL_CBWR", "AUTO")}, "what ranks are given"
    assert {*fingerprint().kernels} == {"torch", "MKL_CBWR"}
    chosen = {"ATEN_CPU_CAPABILITY": "default", "MKL_CBWR": "COMPATIBLE"}
    code = "from shardproof.runs.machine import fingerprint; print(fingerprint().model_dump_json())"
    kernels = json.loads(python("-c", code, **chosen).stdout)["kernels"]
    assert kernels == chosen | {"torch": "DEFAULT"}
    path = fill(tmp_path / "run")
    header = json.loads((path / "run.json").read_text())
    row = "fingerprint kernels torch"
    assert _of_row(environment(read(path)), row) == [torch.backends.cpu.get_cpu_capability()]
    older = header["invocations"][0]
    header["invocations"].append(json.loads(json.dumps(older)))
    del older["fingerprint"]["kernels"]  # as runs were written before they told
    (path / "run.json").write_text(json.dumps(header))
    assert _of_row(environment(read(path)), row)[0] == "-"
    assert "fingerprint kernels torch" in report.html(read(path))


def test_runs_are_found_by_folder_id_and_age(tmp_path: Path) -> None:
    with pytest.raises(SelectionError, match="no run yet"):
        find_run(None, tmp_path)
    first, second = (fill(tmp_path / name) for name in ("one", "two"))
    os.utime(first / "run.json", (1, 1))
    assert find_run(None, tmp_path) == second
    assert find_run("one", tmp_path) == find_run(str(first), Path("elsewhere")) == first
    with pytest.raises(SelectionError, match="no such run"):
        find_run("three", tmp_path)
    (first / "run.json").write_text("{")
    with pytest.raises(SelectionError, match="damaged"):
        read(first)


def test_new_folders_never_collide(tmp_path: Path) -> None:
    paths = set()
    for _ in range(4):
        with RunFolder.create(tmp_path, []) as folder:
            paths.add(folder.path)
    assert len(paths) == 4


# ------------------------------------------------------------------------------------ verdicts


@pytest.mark.parametrize(
    ("found", "code"),
    [
        (["pass", "pass"], 0),
        (["pass", "xfail", "skip"], 0),
        (["pass (working precision only)"], 0),
        (["pass", "fail"], 1),
        (["pass", "xpass"], 1),
        (["hang(rank 2 never came)", "pass"], 1),
        (["crash(rank 1)", "undecidable"], 1),
        (["refused", "pass", "undecidable"], 2),
        (["refused", "fail"], 1),
        (["pass", "inconclusive(7 %)"], 3),
        (["pass", "precondition(disk)"], 3),
        (["skip"], 3),
        ([], 3),
        (["no such verdict"], 3),
    ],
)
def test_exit_codes(found: list[str], code: int) -> None:
    assert verdicts.exit_code(verdicts.count(result(case(), v) for v in found)) == code


def test_the_closing_line_counts_judged_xfailed_skipped_and_left_out() -> None:
    counts = verdicts.count(result(case(), v) for v in ["pass", "pass", "fail", "xfail", "skip"])
    expected = "3 judged (1 fail, 2 pass), 1 xfailed, 1 skipped, 7 left out"
    assert verdicts.summary(counts, 7) == expected


# ------------------------------------------------------------------------------------- budgets


def test_a_plan_keeps_to_the_budget_and_touches_everything(tmp_path: Path) -> None:
    known = Durations(tmp_path / "durations.json")
    cases = [
        case(f"{name}-{backend}-{n}", name, backend=backend)
        for name in ("a", "b", "c")
        for backend in ("in_memory", "gloo")
        for n in range(20)
    ]
    for item in cases:
        known.note(item.id, 2.0)
    planned = fit_cases(cases, known, jobs=2, minutes=0.5)
    assert planned.seconds <= 30
    assert len(planned.chosen) == 26
    assert len(planned.chosen) + len(planned.left_out) == len(cases)
    assert len({(c.implementation, c.backend) for c in planned.chosen}) == 6
    everything = fit_cases(cases, known, jobs=2, minutes=None)
    assert everything.chosen == cases
    assert everything.left_out == []


def test_durations_are_medians_of_the_last_runs(tmp_path: Path) -> None:
    path = tmp_path / "new" / "durations.json"
    known = Durations(path)
    for seconds in (100, 100, 1, 2, 3, 4, 5):
        known.note("a", seconds)
    known.save()
    assert Durations(path).estimate("a") == 3
    assert Durations(path).estimate("b") is None
    for damaged in ("{", "[]", '{"a": 3}', '{"a": ["x"]}'):
        path.write_text(damaged)
        assert Durations(path).estimate("a") is None


def test_durations_that_cannot_be_kept_do_without(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "shardproof").write_text("a file where the folder should be")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    known = Durations.of_user()
    known.note("a", 1.0)
    known.save()
    assert known.estimate("a") == 1.0 and Durations.of_user().estimate("a") is None
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert Durations.of_user().path == tmp_path / "home/.cache/shardproof/durations.json"


def test_durations_of_the_cases_run_last_are_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(durations, "_CASES", 2)
    known = Durations(tmp_path / "durations.json")
    for name in ("a", "b", "c", "a"):
        known.note(name, 1.0)
    known.save()
    kept = Durations(tmp_path / "durations.json")
    assert [kept.estimate(name) for name in "abc"] == [1.0, None, 1.0]


# -------------------------------------------------------------------------------------- tables


def test_rows_show_the_worst_error_and_the_bytes(tmp_path: Path) -> None:
    cells = [tuple(row) for row in tables.table(read(fill(tmp_path / "run")).cases).rows]
    assert cells == [
        ("pytorch/ddp+view", "in_memory", "2", "1 skip", "-", "-", "0.25"),
        ("reference/ddp", "in_memory", "2", "1 pass", "1e-16 / 1e-12", "12 = formula", "0.25"),
        ("reference/ddp", "in_memory", "3", "1 fail", "0.5 / 1e-12", "13 / 12 (x1.08)", "0.25"),
    ]


def test_exact_fractions_are_compared_exactly() -> None:
    third = result(case("a"), sent="1/3", bytes_expected="1/3")
    [row] = tables.table([third, third, third]).texts
    assert row[5] == "1 = formula"
    off = result(case("a"), sent="1000000000000000000001", bytes_expected="1000000000000000000000")
    [row] = tables.table([off]).texts
    assert "formula" not in row[5]


def test_upstream_bytes_stand_beside_the_textbooks() -> None:
    one = result(case("a"), sent="9", bytes_expected="9")
    figures = {"textbook": "zero1", "textbook_bytes": "6"}
    one.checks = [Outcome("traffic", "pass", figures=figures)]
    [row] = tables.table([one, one]).texts
    assert row[5] == "18 = formula (1.5 x zero1)"


def test_the_kill_matrix_marks_named_other_and_silent_checks() -> None:
    table = kills.table([kill(), kill("other", killed=False)])
    assert list(map(str, table.headings[2:4])) == ["equivalence", "replicas"]
    assert [(row[0], row[2:4]) for row in table.texts] == [
        ("fault", ["K", "x"]),
        ("other", ["!", "x"]),
    ]


def test_markdown_goes_between_the_markers(tmp_path: Path) -> None:
    text = report.markdown(read(fill(tmp_path / "run")))
    assert "| reference/ddp | in_memory | 2, 3 | 1 fail, 1 pass |" in text
    assert "2 judged (1 fail, 1 pass), 0 xfailed, 1 skipped, 1 left out." in text
    assert "Planted faults: 1 of 2 killed" in text
    assert text.startswith("## What broke\n") and "because" in text.split("| reference/ddp")[0]
    readme = tmp_path / "README.md"
    readme.write_text(f"before\n{BEGIN}\nold\n{END}\nafter\n")
    for _ in range(2):
        report.insert(text, readme)
    assert readme.read_text() == f"before\n{BEGIN}\n{text.rstrip()}\n{END}\nafter\n"
    for broken in ("nothing", f"{END}\n{BEGIN}", BEGIN * 2 + END):
        readme.write_text(broken)
        with pytest.raises(SelectionError, match="expected 1 pair of marker lines"):
            report.insert(text, readme)
        assert readme.read_text() == broken
    with pytest.raises(SelectionError, match="No such file"):
        report.insert(text, tmp_path / "absent.md")


def test_html_is_self_contained_and_escapes(tmp_path: Path) -> None:
    path = tmp_path / "run"
    with RunFolder(path, []) as folder:
        folder.add(result(case("<script>x</script>"), "fail"))
        folder.leave_out(case("left"), "no room")
        folder.add(kill(), "kill")
    page = report.html(read(path))
    assert page.count("<script") == page.count("</script>") == 1
    assert "&lt;script&gt;" in page
    assert "http://" not in page
    assert "https://" not in page
    assert "1: no room" in page
    assert "because" in page


def test_an_empty_run_has_a_report(tmp_path: Path) -> None:
    with RunFolder(tmp_path / "run", []) as folder:
        folder.close(3)
    run = read(tmp_path / "run")
    assert "Nothing was judged." in report.html(run)
    assert "0 judged" in report.markdown(run)


def test_terminal_tables_name_survivors(tmp_path: Path) -> None:
    run = read(fill(tmp_path / "run"))
    console = Console(width=200, record=True, file=open(os.devnull, "w"))  # noqa: SIM115, PTH123
    report.show(run.cases, console.print)
    late = replace(run.kills[0], name="late", killed=False, verdict="left out")
    report.show_kills([*run.kills, late], console.print)
    report.show_survivors([*run.kills, late], console.print)
    text = console.export_text()
    assert "SURVIVES other: survives equivalence" in text
    assert "late" not in text
    assert "13 / 12 (x1.08)" in text


def test_reasons_of_skipped_cases_are_counted() -> None:
    skipped = [result(case(f"s::{n}"), "skip") for n in range(3)]
    other = result(case("s::other"), "skip", reason="[no] such axis")
    told = report.skips([*skipped, other, result(case("s::fine"))])
    assert told == [
        "skipped (3): plain: because",
        "skipped (1): plain: [no] such axis",
    ]
    many = [result(case(f"s::{n}"), "skip", reason=f"reason {n}") for n in range(20)]
    assert len(report.skips(many)) == 13 and "8 more reasons" in report.skips(many)[-1]


# ------------------------------------------------------------------------------------- bubbles


def piped(name: str, backend: str, micro_batches: int, figures: dict[str, Any]) -> CaseResult:
    of = replace(
        case(name, "reference/pipeline", backend=backend, label="1f1b"),
        scenario="bubble",
        mesh={"pipe": 2},
        workload=WorkloadSpec("charnames_gpt", micro_batches=micro_batches),
    )
    return result(of, checks=[Outcome("schedule", "pass", figures=figures)])


def bubble(span: float | None, makespan: float | None) -> dict[str, float | None]:
    return {"span_bubble_over_ideal": span, "makespan_bubble_over_ideal": makespan}


def pipeline_results(cores: int) -> list[CaseResult]:
    """One cell on processes, which is timed, and on threads, where activations are weighed."""
    window = bubble(0.125, 0.125) | {"closed": bubble(0.125, None), "in_flight": [2, 1]}
    measured = bubble(0.25, 0.3) | {
        "ranks": 2,
        "cores": cores,
        "cpu_seconds": {"F": 0.0101, "BW": 0.02},
        "simulated": bubble(0.126, 0.127),
        "replayed": bubble(0.2, 0.21),
    }
    slow = measured | {"cpu_seconds": {"F": 9.0, "BW": 9.0}}
    common = {"window of 8": window, "in_flight": {"0": 2, "1": 1}}
    weighed = {
        "0": {"peak": 2000, "least": 1900, "most": 2100},
        "1": {"peak": 9, "least": 8, "most": 10},
    }
    return [
        piped("t", "in_memory", 8, common | {"measured": slow, "activations": weighed}),
        piped("p", "gloo", 8, common | {"measured": measured, "activations": "not judged: why"}),
    ]


def test_bubbles_are_told_by_processes_and_bytes_by_threads() -> None:
    [timed, held] = bubbles.tables(pipeline_results(cores=2))
    name = "reference/pipeline+1f1b"
    assert timed.rows == [
        (
            *(name, "2 x 8", "10.1 20.0 (B+W)", "0.125 / -", "0.125 / 0.125"),
            *("0.126 / 0.127", "0.200 / 0.210", "0.250 / 0.300"),
        )
    ]
    assert held.rows == [(name, "2 x 8", "2 1", "2 1", "2,000", "1,900", "2,100")]
    assert timed.notes == [bubbles.NOTE]


def test_more_ranks_than_cores_are_marked() -> None:
    [timed, _] = bubbles.tables(pipeline_results(cores=1))
    assert timed.rows[0][-1] == "0.250 / 0.300*"
    assert "2 ranks, 1 core" in timed.notes[1]


def test_a_scenario_of_bubbles_alone_has_these_tables(tmp_path: Path) -> None:
    assert bubbles.tables([result(case("a"))]) == []
    with RunFolder(tmp_path / "run", []) as folder:
        for line in pipeline_results(cores=2):
            folder.add(line)
        folder.close(0)
    run = read(tmp_path / "run")
    for text in (report.markdown(run), report.html(run)):
        assert bubbles.BUBBLE_TITLE in text
        assert "0.126 / 0.127" in text
    console = Console(record=True, width=200)
    report.show(run.cases, console.print)
    assert "2,000" in console.export_text()


def test_every_output_has_one_block_a_cause(tmp_path: Path) -> None:
    """The terminal, the page and the Markdown show the simplest case, and count the others."""
    reason = "equivalence: gradients are {} times too small ({} = ranks): differs from the oracle"
    with RunFolder(tmp_path / "run", ["shardproof", "run"]) as folder:
        for world in (4, 3, 2):
            of = case(f"w{world}", "mine:Mine", world)
            folder.add(result(of, "fail", 0.5, reason=reason.format(world, world)))
        folder.add(result(case("crashed", "mine:Mine"), "crash", reason="rank 1 raised KeyError"))
    run = read(tmp_path / "run")
    console = Console(width=60, record=True)
    report.show_broken(run.cases, console.print)
    shown = console.export_text()
    assert shown == (
        "\nfailed or undecided: 4 cases, 2 causes\n"
        "fail: w2\n"
        "    equivalence: gradients are 2 times too small (2 = ranks): differs from the oracle\n"
        "    rerun: shardproof run s -k 'w2'\n"
        "    locate: shardproof locate w2\n"
        "    the same in 2 more cases: w3, w4\n"
        "crash: crashed\n"
        "    rank 1 raised KeyError\n"
        "    rerun: shardproof run s -k 'crashed'\n"
    )
    page, document = report.html(run), report.document(run)
    assert page.count('<article class="broken"') == 2
    assert "and 2 more cases of this cause" in page and "<li>w4</li>" in page
    assert page.count('<a href="#b-1">w') == 3, "each case leads to the block of its cause"
    assert document.count("- **fail**") == 1 and "the same in 2 more cases: w3, w4" in document


def test_a_run_that_is_shown_again_tells_what_the_run_told(tmp_path: Path, command: Any) -> None:
    path = tmp_path / "run"
    with RunFolder(path, ["shardproof", "run"]) as folder:
        folder.add(result(case("broken"), "fail", 0.5, reason="the learning rate is a fish"))
        folder.add(result(case("later"), "skip", reason="not today"))
        folder.leave_out(case("late"), "no room")
    code, out, _ = command("report", str(path))
    console = Console(record=True, width=200, file=io.StringIO())
    report.show_broken(read(path).cases, console.print)
    assert code == 0 and console.export_text() in out
    assert "fail: broken\n    the learning rate is a fish\n    rerun: " in out
    assert out.endswith(
        "skipped (1): plain: not today\n"
        "left out (1): no room\n"
        "1 judged (1 fail), 0 xfailed, 1 skipped, 1 left out\n"
    )


def test_planted_faults_that_are_shown_again_are_counted(tmp_path: Path, command: Any) -> None:
    with RunFolder(tmp_path / "run", ["shardproof", "mutants"]) as folder:
        folder.add(kill("one"), "kill")
        folder.add(kill("two", killed=False), "kill")
    code, out, _ = command("report", str(tmp_path / "run"))
    assert code == 0 and "0 judged" not in out
    assert out.endswith("Planted faults: 1 of 2 killed by their named check.\n")


def test_what_was_left_out_is_named_in_every_form(tmp_path: Path) -> None:
    with RunFolder(tmp_path / "run", ["shardproof", "run"]) as folder:
        folder.add(result(case("done")))
        for number in range(5):
            folder.leave_out(case(f"late{number}"), "no room")
    run = read(tmp_path / "run")
    reasons = {line.id: line.reason for line in run.left_out}
    assert report.left_out(reasons) == ["left out (5): no room: late0, late1, late2 and 2 more"]
    for found in (report.document(run), report.html(run)):
        assert all(name in found for name in reasons)
