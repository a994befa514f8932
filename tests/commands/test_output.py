"""How much commands print, in which form, and what they expect of a project."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import synthetic
from commands import here
from made_case import made_case
from rich.console import Console

from shardproof import report, verdicts
from shardproof.checks import Outcome
from shardproof.checks.results import CaseResult, Kill
from shardproof.explain.command import explain, meanings
from shardproof.report import brief
from shardproof.table import Table

CASE = "ddp-gpt::reference/ddp+small_buckets::in_memory::replicate2::sgd::noclip::fp64::quick"
#: More systems than the quick tier has.
MANY = [
    f"{origin}/system_with_a_long_name_{n}" for origin in ("reference", "mine") for n in range(17)
]


def results(names: list[str], verdict: str = "pass") -> list[CaseResult]:
    made = [
        (f"{name}::{number}", made_case(name, {"replicate": 2}, id=f"{name}::{number}"))
        for name in names
        for number in range(12)
    ]
    return [CaseResult(id, case, verdict, "", rerun=f"shardproof run '{id}'") for id, case in made]


def kill(name: str, parent: str, why_not: str = "") -> Kill:
    return Kill(name, parent, ("traffic",), (), not why_not, why_not, "fail", "", "fp64", 3e9, 0.5)


def printed(width: int, *tables: Table) -> list[str]:
    console = Console(width=width, record=True, quiet=True)
    with console.capture() as text:
        console.quiet = False
        console.print(*tables, sep="")
    return text.get().splitlines()


@pytest.mark.parametrize("width", [80, 120])
def test_a_green_run_fits_a_terminal(width: int) -> None:
    lines = printed(width, brief.of_cases(results(MANY)))
    assert len(lines) <= 36 and all(len(line) <= width for line in lines)
    assert lines[1].split()[:2] == [sorted(MANY)[0], "12"]
    faults = [kill(f"{name}_{n}", name) for name in MANY for n in range(20)]
    lines = printed(width, brief.of_kills(faults))
    assert len(lines) <= 36 and "20 of 20" in lines[1]


def test_more_systems_than_lines_are_shown_by_their_origin() -> None:
    table = brief.of_cases(results([*MANY, "other/one", "package.module:Class"]))
    assert [row[0] for row in table.rows] == [
        "mine/*",
        "other/*",
        "package.module:Class",
        "reference/*",
    ]


def test_what_did_not_pass_is_counted_and_marked() -> None:
    made = [*results(["a/good"]), *results(["a/bad"], "fail")[:2], *results(["a/bad"], "skip")]
    table = brief.of_cases(made)
    assert [list(row[:3]) for row in table.texts] == [
        ["a/bad", "0", "2 fail, 12 skip"],
        ["a/good", "12", "-"],
    ]
    assert table.marks == ["bad", ""]


def test_a_class_that_is_held_to_its_family_is_told_how_to_get_more() -> None:
    own = results(["mine:Mine"])
    assert not brief.of_cases(own).notes
    checks = [Outcome("traffic", "pass")]
    held = [replace(result, depth="family", checks=checks) for result in own]
    [note] = brief.of_cases(held).notes
    assert "depth = 'layout'" in note and "cost model" in note


@pytest.mark.parametrize("width", [60, 80])
def test_the_name_of_a_row_is_not_broken(width: int) -> None:
    name = "reference/system+label_of_its_options"
    headings = ("system", "worst error / bound", "bytes sent / formula", "verdicts")
    row = (name, "5.3e-20 / 4e-18", "691,200 = formula", "2 pass")
    lines = printed(width, Table("", headings, [row]))
    assert any(name in line for line in lines) and all(len(line) <= width for line in lines)


def test_survivors_are_grouped_by_their_reason(capsys: pytest.CaptureFixture[str]) -> None:
    why = "survives traffic; failing: norm [fail: rank {} sends {} bytes]"
    lines = [kill(f"f{n}", "reference/ddp", why.format(n, n)) for n in range(3)]
    console = Console(width=200)
    report.show_survivors([*lines, kill("dead", "reference/ddp")], console.print)
    assert capsys.readouterr().out.splitlines() == [
        f"SURVIVES f0: {why.format(0, 0)}",
        "    rerun: shardproof mutants --impl f0",
        "    the same in 2 more faults: f1, f2",
    ]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return synthetic.write(tmp_path_factory.mktemp("made") / "run", synthetic.results(60))


def test_a_report_is_brief_unless_every_row_is_asked_for(run: Path) -> None:
    few, every = here("report", str(run)), here("report", str(run), "-v")
    assert few.returncode == every.returncode == 0
    assert len(few.stdout.splitlines()) <= 40 < len(every.stdout.splitlines())


def test_json_is_one_document_with_every_row(run: Path) -> None:
    done = here("report", str(run), "--json")
    made = json.loads(done.stdout)
    rows = made["tables"][0]["rows"]
    assert len(rows) > 20 and isinstance(rows[0]["median s"], float)
    assert any("judged" in line for line in made["text"])


@pytest.mark.parametrize(
    ("words", "code"),
    [
        (("list", "checks"), verdicts.HELD),
        (("list", "coverage", "ddp-gpt"), verdicts.HELD),
        (("doctor",), None),
        (("explain", "fail"), verdicts.HELD),
    ],
)
def test_commands_with_tables_have_json(words: tuple[str, ...], code: int | None) -> None:
    done = here(*words, "--json")
    made = json.loads(done.stdout)
    assert code is None or done.returncode == code
    assert made["text"] or made["tables"][0]["rows"]


def test_a_faulty_command_prints_no_document() -> None:
    done = here("report", "nowhere", "--json")
    assert (done.returncode, done.stdout) == (verdicts.BAD_INPUT, "") and "nowhere" in done.stderr


def test_numbers_of_a_table_are_numbers_in_json() -> None:
    table = Table("", ("a", "b", "c"), [("1,024", "-", "2.5"), ("x1", "", "1e-16")])
    assert table.records() == [{"a": 1024, "b": None, "c": 2.5}, {"a": "x1", "b": None, "c": 1e-16}]


@pytest.mark.parametrize("quiet", [True, False])
def test_a_run_prints_one_line_or_one_for_each_system(quiet: bool, tmp_path: Path) -> None:
    words = ("run", CASE, "--results", "one", *(("-q",) if quiet else ("--no-progress",)))
    done = here(*words, cwd=tmp_path)
    summary = "1 judged (1 pass), 0 xfailed, 0 skipped, 0 left out"
    lines = done.stdout.splitlines()
    assert done.returncode == 0, done.stdout + done.stderr
    if quiet:
        assert lines == [f"{summary}; evidence: one"]
    else:
        assert [line.split()[0] for line in lines[:2]] == [
            "implementation",
            "reference/ddp+small_buckets",
        ]
        assert lines[2:] == [summary, "evidence: one"]


def test_failures_are_in_full_whatever_is_asked(tmp_path: Path) -> None:
    words = ("run", CASE.replace("reference/ddp+small_buckets", "mutants/ddp_never_reduces"))
    done = here(*words, "-q", "-x", cwd=tmp_path)
    assert done.returncode == 1 and "rerun: shardproof run" in done.stdout, (
        done.stdout + done.stderr
    )
    again = here("run", "--last-failed", "--collect-only", cwd=tmp_path)
    assert again.stdout.splitlines() == [words[1]], again.stderr


def test_without_a_command_it_says_what_to_do_first() -> None:
    done = here()
    assert done.returncode == 0 and done.stderr == ""
    commands = re.findall(r"  (shardproof \S+)", done.stdout)
    assert {"shardproof run", "shardproof report", "shardproof doctor"} <= {*commands}
    assert len(done.stdout.splitlines()) <= 12
    for command in {*commands} - {"shardproof --help"}:
        assert here(command.split()[1], "--help").returncode == 0, command


# ------------------------------------------------------------------------------------- explain


def test_every_verdict_and_check_is_explained(capsys: pytest.CaptureFixture[str]) -> None:
    assert [*meanings()] == [*verdicts.VERDICTS]
    for name in (*verdicts.VERDICTS, "hang(rank 2 waits)", "traffic"):
        explain(name)
        first, *rest = capsys.readouterr().out.splitlines()
        assert first.split()[0] in ("verdict", "check") and rest


def test_a_case_is_explained_with_its_newest_verdict(tmp_path: Path) -> None:
    assert here("run", CASE, cwd=tmp_path).returncode == 0
    done = here("explain", CASE, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    for part in ("scenario ddp-gpt: ", "2 on in_memory", "checks traffic: ", "run: shardproof run"):
        assert part in done.stdout
    assert re.search(r"^in results/\S+: pass$", done.stdout, re.MULTILINE)


def test_what_cannot_be_explained_is_told_with_the_nearest() -> None:
    done = here("explain", "checkpont")
    assert done.returncode == 2 and "did you mean checkpoint?" in done.stderr
    assert here("explain", CASE + "x").returncode == 2


# --------------------------------------------------------------------------- [tool.shardproof]


def project(folder: Path, *lines: str) -> Path:
    (folder / "pyproject.toml").write_text("\n".join(lines) + "\n")
    (folder / "below").mkdir(exist_ok=True)
    return folder / "below"


def planned(folder: Path, *words: str) -> list[str]:
    done = here("run", "ddp-gpt", "--dry-run", *words, cwd=folder)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_a_project_has_defaults_that_typed_options_replace(tmp_path: Path) -> None:
    below = project(
        tmp_path, "[tool.shardproof]", 'backend = "gloo"', "[tool.shardproof.run]", 'tier = "full"'
    )
    found = planned(below)
    assert found and all("::gloo::" in name for name in found)
    assert any(name.endswith("::full") for name in found)
    quick = planned(below, "--tier", "quick", "--backend", "in_memory")
    assert quick and all("::in_memory::" in name and name.endswith("::quick") for name in quick)
    drawn = here("run", "--campaign", "2", "--dry-run", cwd=below)
    assert drawn.returncode == 0, "defaults that choose cases are none for random ones"


@pytest.mark.parametrize(
    ("lines", "says"),
    [
        (['teir = "full"'], "[tool.shardproof]: unknown key (teir) - did you mean tier?"),
        (["[tool.shardproof.rum]", "x = 1"], "unknown key (rum) - did you mean run?"),
        (
            ['results = "here"'],
            "[tool.shardproof]: this option cannot be set here (results) - give the option "
            "on the command line",
        ),
        (['tier = "all"'], "'all' is not one of 'quick', 'full'"),
        (["tier ="], "cannot be read: "),
    ],
)
def test_a_faulty_default_is_bad_input(lines: list[str], says: str, tmp_path: Path) -> None:
    below = project(tmp_path, "[tool.shardproof]", *lines)
    done = here("run", "ddp-gpt", "--dry-run", cwd=below)
    assert done.returncode == verdicts.BAD_INPUT
    assert done.stderr.startswith(f"{tmp_path / 'pyproject.toml'}: ") and says in done.stderr
    assert "Value error" not in done.stderr


def test_a_project_without_the_table_says_nothing(tmp_path: Path) -> None:
    below = project(tmp_path, "[tool.other]", "tier =")
    assert planned(below)


# ----------------------------------------------------------------------------- rough edges


def test_a_wrong_choice_is_told_without_the_library_s_words() -> None:
    done = here("run", "--tier", "all")
    assert done.returncode == 2 and "Value error" not in done.stderr
    assert "'all' is not one of 'quick', 'full'" in done.stderr


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("class Mine: ...\n", "did you mean mine:Mine?"),
        ("class A: ...\nclass B: ...\n", "did you mean mine:A, mine:B?"),
        ("x = 1\n", "name a class of mine.py as module:Class"),
        ("class\n", "name a class of mine.py as module:Class"),
    ],
)
def test_a_module_of_ones_own_is_told_by_its_classes(text: str, says: str, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(text)
    for name in ("mine", "mine.py"):
        done = here("run", "ddp-gpt", "--impl", name, "--dry-run", cwd=tmp_path)
        assert done.returncode == 2 and says in done.stderr, done.stderr


def test_an_option_keeps_its_older_name() -> None:
    told: Any = here("run", "--help").stdout
    for names in ("--fail-fast, --maxfail", "--rerun-failed, --last-failed, --lf"):
        assert names in told
