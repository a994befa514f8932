"""docs/troubleshooting.md: at least 40 symptoms, each with a command of the suite that exists."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import typer
from commands import here

from shardproof.commands import main
from shardproof.doctor import findings, settings
from shardproof.registry import mutant_names

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/troubleshooting.md").read_text(encoding="utf-8")
SYMPTOMS = PAGE.split("## Symptoms of distributed training")[1].split("\n## ")[0]


class Row(NamedTuple):
    """A symptom; ``shown``: the cell with the command."""

    symptom: str
    cause: str
    shown: str
    remedy: str


def cells(line: str) -> list[str]:
    return [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]


ROWS = [
    Row(*cells(line))
    for line in SYMPTOMS.splitlines()
    if line.startswith("| ") and not line.startswith("| symptom |")
]
COMMANDS = sorted({c for row in ROWS for c in re.findall(r"`(shardproof [^`]+)`", row.shown)})


def test_there_are_enough_symptoms_each_with_cause_command_and_remedy() -> None:
    assert len(ROWS) >= 40
    assert len({row.symptom for row in ROWS}) == len(ROWS)
    for row in ROWS:
        assert all(row), row
        assert re.search(r"`shardproof [^`]+`", row.shown), f"name a command: {row}"


def test_they_are_grouped_by_when_they_happen() -> None:
    titles = re.findall(r"(?m)^### (.+)", SYMPTOMS)
    assert len(titles) >= 6 and len({*titles}) == len(titles)


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_parses(command: str) -> None:
    """Every word is a command, an option or an argument that it takes; nothing is run."""
    found: Any = typer.main.get_command(main.app)
    words, context = shlex.split(command)[1:], None
    while hasattr(found, "commands"):
        context = found.context_class(found, parent=context)
        # `bench A B` and `bench strong`: the group puts the subcommand before the words.
        found.parse_args(context, [*words])
        words = [*context._protected_args, *context.args]
        _, found, words = found.resolve_command(context, words)
        assert found is not None, command
    found.make_context("shardproof", [*words], parent=context, resilient_parsing=True)
    options = {flag for parameter in found.params for flag in parameter.opts}
    assert {word for word in words if word.startswith("-")} <= options, command


@pytest.mark.parametrize("command", [c for c in COMMANDS if " mutants " in c])
def test_a_planted_fault_exists(command: str) -> None:
    names = {name.split("/")[-1] for name in mutant_names()}
    assert command.split()[-1] in names


@pytest.mark.parametrize("command", [c for c in COMMANDS if c.startswith("shardproof run ")])
def test_a_command_that_runs_cases_chooses_some(command: str) -> None:
    done = here(*shlex.split(command)[1:], "--dry-run")
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("command", [c for c in COMMANDS if c.startswith("shardproof estimate ")])
def test_an_estimate_prints_what_the_row_names(command: str) -> None:
    done = here(*shlex.split(command)[1:])
    assert done.returncode == 0, done.stdout + done.stderr
    for row in (row for row in ROWS if command in row.shown):
        for heading in re.findall(r"\*(.+?)\*", row.shown.split("`")[-1]):
            assert heading in done.stdout, heading


def test_findings_of_doctor_that_rows_name_exist() -> None:
    named = {
        name
        for row in ROWS
        if "`shardproof doctor`" in row.shown
        for name in re.findall(r"\*(.+?)\*", row.shown)
    }
    sources = "".join(
        (ROOT / "suite/doctor" / f"{module}.py").read_text()
        for module in ("findings", "network", "settings")
    )
    assert len(named) >= 8
    for name in named - {name for name, _ in settings.HINDRANCES}:
        assert f'"{name}"' in sources, name


#: Names that the page warns of: no library reads them.
UNREAD = {"NCCL_SOKET_IFNAME", *settings.NO_TIMEOUTS}


def test_variables_that_the_page_names_are_read() -> None:
    names = set(re.findall(r"\b(?:TORCH_)?NCCL_[A-Z0-9_]+", PAGE)) - UNREAD
    assert len(names) > 8 and names <= findings.known_variables()


def faults() -> Iterator[str]:
    yield from sorted({c.split()[-1] for c in COMMANDS if " mutants " in c})


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_every_fault_of_the_page_is_caught(tmp_path: Path) -> None:
    words = [word for name in faults() for word in ("--impl", name)]
    done = here("mutants", *words, "--results", str(tmp_path / "run"))
    assert done.returncode == 0, done.stdout + done.stderr
