"""The core works in a tree without the folder of a wing, and then only lacks its commands."""

from __future__ import annotations

import importlib
import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any

import pytest
import typer
from commands import here, in_turn

from shardproof import wings

Words = tuple[str, ...]
ROOT = Path(__file__).parents[1]
#: Folders of tests of the core in which all but a few tests take less than a second.
QUICK = [
    f"tests/{folder}"
    for folder in (
        *("compare", "coverage", "costs", "evidence", "ledgers", "oracle", "registry", "report"),
        *("runs", "scenarios", "workloads"),
    )
]
#: Of them those that use a wing: files, and single tests.
USE = [
    "tests/coverage/test_choose_quick.py",
    "tests/coverage/test_conditions.py",
    "tests/report/test_badges.py",
    "tests/report/test_capability_matrix.py",
    "tests/report/test_report.py::test_every_output_has_one_block_a_cause",
    "tests/runs/test_bundle.py::test_bundle_here_and_verify_there",
    "tests/runs/test_claimed_sizes.py",
    "tests/runs/test_damaged_runs.py::test_a_damaged_run_is_bad_input_or_is_tolerated[badges",
    "tests/runs/test_format.py::test_another_format_is_refused_with_the_remedy[badges",
    "tests/runs/test_hostile_runs.py::test_a_record_outside_of_the_run_is_refused[badges",
    "tests/runs/test_hostile_runs.py::test_a_pipe_in_place_of_a_file_of_the_run_does_not_hang[man",
    "tests/runs/test_hostile_runs.py"
    "::test_a_folder_whose_name_is_no_text_is_refused_at_once[bench data-parallel]",
    "tests/compare/test_baselines.py::test_hardware_tells_the_nodes_that_containers_were",
    "tests/compare/test_compare_command.py::test_the_committed_table_is_what_the_command_makes",
    "tests/runs/test_shards.py::test_every_command_cuts_what_it_has_chosen",
]
CASE = "ddp-gpt::reference/naive_ddp::in_memory::replicate1::sgd::noclip::fp64::full"


def commands(text: str) -> set[str]:
    """The commands that a help text lists."""
    return {
        line.split()[0] for line in text.partition("Commands:")[2].splitlines() if line[2:3].strip()
    }


def added(wing: str) -> set[str]:
    """The commands that the wing in the folder ``wing`` adds."""
    app = typer.Typer()
    importlib.import_module(f"shardproof.{wing}.wing").WING.add_commands(app)
    made: Any = (*app.registered_commands, *app.registered_groups)
    return {one.name or one.callback.__name__ for one in made}


def copied(to: Path, *without: str) -> Path:
    """A copy of the tree in ``to``, without the folders of these wings."""
    to.mkdir()
    listed = ("git", "ls-files", "-z", "--cached", "--others", "--exclude-standard")
    files = subprocess.run(listed, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in filter(None, files.split("\0")):
        if (ROOT / name).exists():
            (to / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, to / name, follow_symlinks=False)
    for made in [*(ROOT / "suite").rglob("__pycache__"), *(ROOT / "impls").rglob("__pycache__")]:
        shutil.copytree(made, to / made.relative_to(ROOT), dirs_exist_ok=True)
    for wing in without:
        shutil.rmtree(to / "suite" / wing)
    # That of an editable install would find in the checkout what the copy lacks.
    for finder in Path(sysconfig.get_path("purelib")).glob("__editable___shardproof_*_finder.py"):
        (to / finder.name).write_text("def install() -> None: ...\n", encoding="utf-8")
    return to


#: What the core does in any tree, and `doctor` in one with that wing.
CORE: list[Words] = [
    ("run", CASE, "--results", "run"),
    ("verify", "run"),
    ("report", "run"),
    ("compare", "run", "run"),
    ("compare", "run", "run", "--by", "hardware"),
    ("gate", "run", "--against", "run"),
    ("doctor",),
    ("list", "cases", "--tier", "quick"),
]
#: What names a wing -> options that only this wing serves.
OPTIONS: dict[str, list[Words]] = {
    "campaign": [
        ("run", "--campaign", "3", "--dry-run"),
        ("run", "--case", "campaign-1::0000::x"),
        ("list", "coverage", "--campaign", "3"),
        ("mutants", "--campaign", "3"),
    ],
    "cluster": [("run", "--on", "ray"), ("doctor", "--cluster")],
}


@pytest.mark.launches
@pytest.mark.timeout(900)
@pytest.mark.parametrize("wing", wings.names())
def test_without_a_wing_the_core_works_and_its_words_are_refused(wing: str, tmp_path: Path) -> None:
    """Its commands are missing, its options are refused; a case is judged, verified, reported."""
    tree = copied(tmp_path / wing, wing)
    before = {path.name for path in (tree / "results").iterdir()}
    refused = OPTIONS.get(wing, [])
    core = [words for words in CORE if words[0] != wing]
    given = [("--help",), *refused, *core]
    help_, *done = in_turn(*given, told=tmp_path / "told", cwd=tree, tree=tree)

    whole = commands(here("--help").stdout)
    assert help_.returncode == 0, help_.stderr
    assert whole - commands(help_.stdout) == added(wing)
    assert commands(help_.stdout) <= whole

    for words, each in zip(refused, done, strict=False):
        assert each.returncode == 2, (words, each)
        assert f"the option needs the folder suite/{wing}" in each.stderr, (words, each.stderr)

    for words, each in zip(core, done[len(refused) :], strict=True):
        good = (0, 3) if words == ("doctor",) else (0,)  # 3: this machine lacks something
        assert each.returncode in good, (words, each.stdout[-2000:], each.stderr[-2000:])
    assert {path.name for path in (tree / "results").iterdir()} == before


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_without_any_wing_the_quick_tests_of_the_core_pass(tmp_path: Path) -> None:
    tree = copied(tmp_path / "core", *wings.names())
    words = ["-m", "pytest", "-n", "2", "-p", "no:cacheprovider"]
    words += [("--deselect=" if "::" in test else "--ignore=") + test for test in USE]
    done = subprocess.run(
        [sys.executable, *words, "-m", "not slow and not launches", *QUICK],
        cwd=tree,
        env={**os.environ, "PYTHONPATH": str(tree)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-8000:]


def test_a_copy_finds_no_wing_in_the_checkout(tmp_path: Path) -> None:
    tree = copied(tmp_path / "core", *wings.names())
    code = "import importlib.util as u; assert u.find_spec('shardproof.case')"
    code += "".join(f"; assert not u.find_spec('shardproof.{name}')" for name in wings.names())
    environment = {**os.environ, "PYTHONPATH": str(tree)}
    subprocess.run([sys.executable, "-c", code], cwd=tree, env=environment, check=True)
