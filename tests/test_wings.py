"""The core works in a tree without the folder of a wing, and then only lacks its commands."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from shardproof import wings

ROOT = Path(__file__).parents[1]
#: Folders of tests of the core in which all but a few tests take less than a second.
QUICK = [
    f"tests/{folder}"
    for folder in (
        *("compare", "coverage", "costs", "evidence", "ledgers", "oracle", "registry", "report"),
        *("runs", "scenarios", "workloads"),
    )
]
#: Of them those that use a wing.
USE = {
    "bench": "tests/compare/test_compare_command.py"
    "::test_the_committed_table_is_what_the_command_makes",
    "campaign": "tests/runs/test_shards.py::test_every_command_cuts_what_it_has_chosen",
}
CASE = "ddp-gpt::reference/naive_ddp::in_memory::replicate1::sgd::noclip::fp64::full"


def shardproof(tree: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """``shardproof`` of the copy ``tree``."""
    environment = {**os.environ, "PYTHONPATH": str(tree), "COLUMNS": "100"}
    command = [sys.executable, "-m", "shardproof", *words]
    return subprocess.run(
        command, cwd=tree, env=environment, capture_output=True, text=True, check=False
    )


def commands(text: str) -> set[str]:
    """The commands that a help text lists."""
    return {
        line.split()[0] for line in text.partition("Commands:")[2].splitlines() if line[2:3].strip()
    }


@pytest.fixture(params=wings.names())
def tree(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A copy of the tree without the folder of a wing, whose name is the copy's."""
    copy = tmp_path / str(request.param)
    copy.mkdir()
    listed = ("git", "ls-files", "-z", "--cached", "--others", "--exclude-standard")
    files = subprocess.run(listed, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in filter(None, files.split("\0")):
        if (ROOT / name).exists():
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, copy / name, follow_symlinks=False)
    shutil.rmtree(copy / "suite" / str(request.param))
    return copy


@pytest.mark.launches
@pytest.mark.timeout(900)
def test_without_a_wing_only_its_commands_are_missing(tree: Path) -> None:
    whole = commands(shardproof(ROOT, "--help").stdout)
    done = shardproof(tree, "--help")
    assert done.returncode == 0, done.stderr
    assert whole - commands(done.stdout) == {tree.name} & whole
    assert commands(done.stdout) <= whole


#: What names a wing -> options that only this wing serves.
OPTIONS = {
    "campaign": (
        ("run", "--campaign", "3", "--dry-run"),
        ("run", "--case", "campaign-1::0000::x"),
        ("list", "coverage", "--campaign", "3"),
        ("mutants", "--campaign", "3"),
    ),
    "cluster": (("run", "--on", "ray"), ("doctor", "--cluster")),
}


@pytest.mark.launches
@pytest.mark.timeout(900)
@pytest.mark.parametrize("tree", OPTIONS, indirect=True)
def test_without_a_wing_its_options_are_refused(tree: Path) -> None:
    before = {path.name for path in (tree / "results").iterdir()}
    for words in OPTIONS[tree.name]:
        done = shardproof(tree, *words)
        assert done.returncode == 2, (words, done.stdout, done.stderr)
        assert f"it needs the wing suite/{tree.name}" in done.stderr, (words, done.stderr)
    assert {path.name for path in (tree / "results").iterdir()} == before


@pytest.mark.launches
@pytest.mark.timeout(900)
def test_without_a_wing_a_case_is_judged_verified_and_reported(tree: Path) -> None:
    run = tree / "run"
    for words in (
        ("run", CASE, "--results", str(run)),
        ("verify", str(run)),
        ("report", str(run)),
        ("compare", str(run), str(run)),
        ("compare", str(run), str(run), "--by", "hardware"),
        ("gate", str(run), "--against", str(run)),
        ("doctor",),
        ("list", "cases", "--tier", "quick"),
    ):
        done = shardproof(tree, *words)
        assert done.returncode in (0, 1) if words == ("doctor",) else done.returncode == 0, (
            words,
            done.stdout[-2000:],
            done.stderr[-2000:],
        )


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_without_a_wing_the_quick_tests_of_the_core_pass(tree: Path) -> None:
    words = ["-m", "pytest", "-n", "2", "-p", "no:cacheprovider"]
    words += ["--deselect", USE[tree.name]] if tree.name in USE else []
    done = subprocess.run(
        [sys.executable, *words, "-m", "not slow and not launches", *QUICK],
        cwd=tree,
        env={**os.environ, "PYTHONPATH": str(tree)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-8000:]
