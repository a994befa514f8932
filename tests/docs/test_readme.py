"""The README and its first pages tell the truth: their examples pass, and fail when broken."""

from __future__ import annotations

import re
import runpy
import shlex
import subprocess
import textwrap
from pathlib import Path

import pytest
from commands import here, script

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
OWN_CLASS = (ROOT / "docs/own-class.md").read_text()
OWN_SCHEDULE = (ROOT / "docs/own-schedule.md").read_text()
COMMANDS = (ROOT / "docs/commands.md").read_text()


def example() -> str:
    found = re.search(r"```python\n# mine\.py\n(.*?)```", OWN_CLASS, re.DOTALL)
    assert found, "the page lost its example"
    return found[1]


def judge(folder: Path, *selection: str) -> subprocess.CompletedProcess[str]:
    command = re.search(r"^ +shardproof (run .*--impl mine:Mine)$", OWN_CLASS, re.MULTILINE)
    assert command, "the page does not say how to judge mine.py"
    arguments = (*command[1].split(), *selection, "--results", str(folder))
    return here(*arguments, paths=[folder.parent])


def test_the_example_passes_its_proof(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(example())
    done = judge(tmp_path / "run", "-k", "fp64 and sgd and noclip and (replicate2 or replicate3)")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "0 xfailed, 0 skipped, 0 left out" in done.stdout + done.stderr


def test_with_the_depth_of_a_layout_its_bytes_equal_the_formula(tmp_path: Path) -> None:
    strategy = '    strategy = "naive_ddp"\n'
    assert 'add `depth = "layout"` below' in " ".join(OWN_CLASS.split())
    exact = example().replace(strategy, f'{strategy}    depth = "layout"\n')
    for text, says in ((example(), "within family bounds"), (exact, "= formula")):
        (tmp_path / "mine.py").write_text(text)
        chosen = "fp64 and sgd and noclip and in_memory and replicate2"
        done = judge(tmp_path / f"run-{len(text)}", "-k", chosen)
        assert done.returncode == 0 and says in done.stdout, done.stdout + done.stderr


def test_without_its_reduction_the_example_fails(tmp_path: Path) -> None:
    broken = example().replace("self.comm.all_reduce(parameter.grad)", "pass")
    assert broken != example()
    (tmp_path / "mine.py").write_text(broken)
    done = judge(tmp_path / "run", "-k", "fp64 and sgd and noclip and in_memory and replicate2")
    assert done.returncode == 1, done.stdout + done.stderr
    assert "differs from the oracle" in done.stdout + done.stderr
    assert "rerun: shardproof run" in done.stdout + done.stderr


def test_the_proof_from_python_holds(tmp_path: Path) -> None:
    """The lines as they stand there, beside the class of the example."""
    found = re.search(
        r"^    from shardproof import prove\n    (verdicts = .*)$", OWN_CLASS, re.MULTILINE
    )
    assert found, "the page lost its example of prove"
    (tmp_path / "mine.py").write_text(example())
    (tmp_path / "judge.py").write_text(
        textwrap.dedent(found[0]) + "\nfor row in verdicts.itertuples():\n"
        "    print(row.world, row.lane, row.workload, row.verdict, row.reason)\n"
    )
    done = script(tmp_path / "judge.py", cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert [line.strip() for line in done.stdout.splitlines()] == [
        f"{world} {lane} {workload} pass"
        for world in (2, 3)
        for lane, workload in (("fp64", "charnames_gpt"), ("dyadic", "dyadic_mlp"))
    ]


def own_schedule(folder: Path, leave_out: str = "") -> subprocess.CompletedProcess[str]:
    """What the page's schedule comes to, without the action ``leave_out``."""
    found = re.search(r"```yaml\n(# mine\.yaml\n.*?)```", OWN_SCHEDULE, re.DOTALL)
    assert found and re.search(r"^ +shardproof run mine\.yaml$", OWN_SCHEDULE, re.MULTILINE)
    (folder / "mine.yaml").write_text(found[1].replace(leave_out, "") if leave_out else found[1])
    return here("run", "mine.yaml", "--results", "run", cwd=folder)


def test_the_schedule_passes_its_proof(tmp_path: Path) -> None:
    done = own_schedule(tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "2 judged (2 pass)" in done.stdout


def test_without_one_of_its_actions_the_schedule_is_refused(tmp_path: Path) -> None:
    done = own_schedule(tmp_path, leave_out=", W1@1")
    assert done.returncode == 2, done.stdout + done.stderr
    assert "mine.yaml:8: option 'schedule.orders': rank 1 never does W1@1" in done.stdout


@pytest.mark.parametrize(
    "command",
    [
        runpy.run_path(str(ROOT / "docs/make_images.py"))["COMMANDS"][0],
        *re.findall(r"^ {4}(shardproof run -k .*)$", COMMANDS, re.MULTILINE),
    ],
)
def test_every_selection_that_it_shows_finds_cases(command: str) -> None:
    done = here(*shlex.split(command)[1:], "--dry-run")
    assert done.returncode == 0 and done.stdout, done.stderr


@pytest.mark.parametrize("target", sorted(set(re.findall(r"make ([a-z]+)", README))))
def test_every_make_target_that_the_readme_names_exists(target: str) -> None:
    assert re.search(rf"^{target}:", (ROOT / "Makefile").read_text(), re.MULTILINE)


@pytest.mark.parametrize("link", sorted(set(re.findall(r"\]\(([^)#]+)\)", README))))
def test_links_lead_somewhere(link: str) -> None:
    assert "://" in link or (ROOT / link).exists(), link


def test_the_readme_is_short() -> None:
    assert len(README.splitlines()) <= 120


def test_the_changelog_of_a_first_release_fits_a_screen_or_two() -> None:
    assert len((ROOT / "CHANGELOG.md").read_text().splitlines()) <= 80


def test_the_first_example_shows_its_fault(tmp_path: Path) -> None:
    """The file of the first minute, as it stands there, and with its division."""
    found = re.search(r"```python\n# broken\.py\n(.*?)```", README, re.DOTALL)
    said = re.search(r"^    (fail equivalence: .*?), \.\.\.$", README, re.MULTILINE)
    assert found and said, "the README lost its first minute"
    (tmp_path / "broken.py").write_text(found[1])
    done = script(tmp_path / "broken.py", cwd=tmp_path)
    assert done.stdout.startswith(said[1]), done.stdout + done.stderr
    mended = found[1].replace("value()[0]", "value()[0] / dist.get_world_size(group)")
    (tmp_path / "mended.py").write_text(mended)
    done = script(tmp_path / "mended.py", cwd=tmp_path)
    assert done.stdout.strip() == "pass", done.stdout + done.stderr
