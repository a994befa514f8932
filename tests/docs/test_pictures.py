"""The pictures of the README show what they say, whole and with a legend."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import pytest

from shardproof.scenarios.load import SHIPPED, USUAL, find
from shardproof.scenarios.matrix import expand
from shardproof.scenarios.vocabulary import installed

ROOT = Path(__file__).parents[2]
IMAGES = ROOT / "docs/images"
MAKE = runpy.run_path(str(ROOT / "docs/make_images.py"))


def test_the_terminal_is_never_empty() -> None:
    """A picture of a page cannot wait until an animation has shown its text."""
    text = (IMAGES / "caught.svg").read_text()
    assert "animation" not in text and "opacity" not in text
    assert text.index("$ shardproof run") < text.index("$ shardproof mutants")


def test_a_wrapped_line_has_one_colour() -> None:
    """Its second piece has the words of neither style."""
    line = "fail: every gradient is wrong, " + "as these words say of it " * 8
    drawn = MAKE["terminal"]([["$ command", line]])
    pieces = re.findall(r'<text class="(\w*)"[^>]*>([^<]*)<', drawn)
    assert len(pieces) > 3 and {kind for kind, text in pieces[1:] if text} == {"bad"}
    assert max(len(text) for _, text in pieces) <= MAKE["WIDTH"]


def test_the_matrix_has_a_row_for_every_system_of_the_main_job() -> None:
    shown = {*re.findall(r'text-anchor="end">([^<]*)<', (IMAGES / "matrix.svg").read_text())}
    folders = [str(SHIPPED / name) for name in USUAL]
    cases = [case for file in find(folders) for case in expand(file, installed())]
    wanted = {case.implementation for case in cases if case.tier == "quick"}
    assert {name for name in wanted if "/" in name} <= shown


@pytest.mark.parametrize("what", ["measured, with its 95 % interval", "alpha-beta model", "target"])
def test_the_efficiency_has_a_legend_for_its_marks(what: str) -> None:
    assert f">{what}<" in (IMAGES / "efficiency.svg").read_text()
