"""The page of choices: a row for each model and number of GPUs, and the command behind it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from shardproof.by_path import import_module
from shardproof.costs import shapes
from shardproof.simulate.machines import machine
from shardproof.simulate.plan import search
from shardproof.simulate.plan.candidates import Job, Rejected

ROOT = Path(__file__).parents[2]


page = import_module(str(ROOT / "docs/make_choice.py"))
LINES = page.PAGE.read_text(encoding="utf-8").splitlines()


def test_the_page_has_every_row_of_the_script_in_its_order() -> None:
    shown = [line for line in LINES if line.startswith("| ") and "`shardproof plan " in line]
    commands = [re.findall(r"`(.+?)`", line)[0] for line in shown]
    assert commands == [row.command for row in page.ROWS], "run docs/make_choice.py"
    assert "| " + " | ".join(page.HEADINGS) + " |" in LINES
    assert {row.gpus for row in page.ROWS} >= {1, 8, 64, 1024}


@pytest.mark.parametrize(
    "row",
    [
        pytest.param(
            row,
            id=f"{row.model}-{row.gpus}",
            # Of these 128 layers a look at the candidates alone takes 6 s.
            marks=pytest.mark.slow if row.model == "gpt-1t" else (),
        )
        for row in page.ROWS
    ],
)
def test_each_plan_of_the_page_is_a_candidate_with_these_figures(row: Any) -> None:
    """The formulas of today give its speed; ``make slow`` simulates the cheapest row again."""
    (line,) = [one for one in LINES if f"`{row.command}`" in one]
    _, gpus, mesh, how, size, speed, bubble, exposed, _ = line.strip("| ").split(" | ")
    assert gpus == f"{row.gpus:,}"
    shape, on = shapes.model(row.model), machine(page.MACHINE, 0)
    job = Job(shape, page.ACCOUNTING, row.gpus, on.node, page.TOKENS, shape.seq)
    plans = search.ranked(job, on, Rejected())
    if mesh == "none fits":
        return
    assert float(size) <= on.memory / 1e9
    (own,) = [
        plan
        for plan in plans
        if plan.candidate.shown_mesh() == mesh
        and f"{plan.candidate.implementation} {plan.candidate.how()}" == how
    ]
    times = own.estimated
    assert speed == f"{job.tokens / times.seconds:,.0f}", "run docs/make_choice.py"
    assert bubble == f"{times.bubble / times.seconds:.1%}"
    assert exposed == f"{times.exposed / times.seconds:.1%}"


@pytest.mark.slow
def test_a_row_is_what_its_plan_is_today() -> None:
    row = page.ROWS[0]
    (line,) = [one for one in LINES if f"`{row.command}`" in one]
    assert page.table([row.cells(row.found())]).splitlines()[-1] == line


def test_the_table_takes_the_place_of_the_one_before() -> None:
    text = "before <!-- choice:begin -->\nold\n<!-- choice:end --> behind"
    put = page.put(text, "new")
    assert put == "before <!-- choice:begin -->\n\nnew\n\n<!-- choice:end --> behind"
    assert page.put(put, "new") == put


def test_rows_of_other_commands_are_not_kept(tmp_path: Path) -> None:
    file = tmp_path / "kept.json"
    assert page.kept(None) == page.kept(file) == {}
    file.write_text(f'{{"{page.ROWS[0].command}": ["a"], "another": ["b"]}}')
    assert page.kept(file) == {page.ROWS[0].command: ["a"]}
