"""Tutorials are followed from top to bottom, and their commands print what they show."""

from __future__ import annotations

import re
import textwrap
from pathlib import Path

import pytest
from tutorial import blocks, follow, steps

ROOT = Path(__file__).parents[2]
#: Page -> the least number of lines of output that it shows.
TUTORIALS = {
    "first-verdict": 3,
    "tutorial-script": 7,
    "tutorial-gate": 10,
    "tutorial-train": 6,
    "train-settings": 8,
    "tutorial-zero2": 2,
    "tutorial-scaling": 3,
}
#: tests/cluster/test_nodes_tutorial.py follows it: it needs a container engine.
ON_NODES = "tutorial-nodes"


def page(name: str) -> str:
    return (ROOT / f"docs/{name}.md").read_text()


@pytest.mark.launches
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("name", TUTORIALS)
def test_it_prints_what_it_shows(tmp_path: Path, name: str) -> None:
    assert follow(page(name), tmp_path) >= TUTORIALS[name]


def test_every_tutorial_is_followed() -> None:
    found = {path.stem for path in (ROOT / "docs").glob("tutorial-*.md")}
    assert found <= {*TUTORIALS, ON_NODES}


def test_a_command_that_prints_something_else_is_seen(tmp_path: Path) -> None:
    text = "```console\n$ printf 'one\\ntwo\\n'\no...e\n...\n{}\n```\n"
    assert follow(text.format("two"), tmp_path) == 2
    for other in ("three", "one"):
        with pytest.raises(AssertionError, match="did not print"):
            follow(text.format(other), tmp_path)


def test_the_code_that_the_tutorial_of_zero2_reads_is_that_of_the_file() -> None:
    source = (ROOT / "impls/reference/zero2.py").read_text()
    lines = {line.strip() for line in source.splitlines()}
    shown = re.findall(
        r"(?m)^\n((?:    .+\n)+)", page("tutorial-zero2").partition("## The step")[2]
    )
    assert len(shown) == 4
    for block in shown:
        assert {line.strip() for line in textwrap.dedent(block).splitlines()} <= lines


@pytest.mark.parametrize("name", [*TUTORIALS, ON_NODES])
def test_commands_of_a_page_have_output_to_show(name: str) -> None:
    consoles = [text for language, text in blocks(page(name)) if language == "console"]
    assert any(lines for text in consoles for _, lines in steps(text))
