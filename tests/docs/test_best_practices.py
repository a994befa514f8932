"""docs/best-practices.md: figures of `estimate` and of claims are those that the commands print."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
from commands import here

PAGE = (Path(__file__).parents[2] / "docs/best-practices.md").read_text(encoding="utf-8")
#: Command of the page -> figures that the page gives from it.
FIGURES = {
    "shardproof estimate 1b --gpus 8 --memory 80GB": ("19.12", "8.62", "7.05", "5.64"),
    "shardproof estimate 7b --gpus 8 --memory 80GB": (
        *("121.29", "47.79", "36.13", "25.35"),
        *("24.50", "36.75"),
    ),
    "shardproof estimate gpt3-175b --impl reference/pipeline --mesh pipe=8 --gpus 8 "
    "--micro-batches 8": ("1.02",),
    "shardproof estimate gpt3-175b --impl reference/zero3 --gpus 8 --micro-batches 8": (
        "7,333.87",
    ),
    "shardproof estimate 7b --impl reference/zero3 --gpus 8 --batch 8": ("74.31", "90.37"),
    "shardproof estimate 7b --impl reference/zero3 --gpus 8 --batch 8 --recompute 1": (
        *("6.66", "22.72"),
    ),
    "shardproof estimate 7b --impl reference/ddp --gpus 8 --accounting A32": (
        *("112.00", "18.31", "49.00"),
    ),
    "shardproof estimate 7b --impl reference/ddp --gpus 8 --accounting A16": (
        *("112.00", "9.29", "24.50"),
    ),
}


def test_every_estimate_of_the_page_has_its_figures_here() -> None:
    found = re.findall(r"(?m)^    (shardproof estimate .+)$", PAGE)
    assert {*found} == {*FIGURES}


@pytest.mark.parametrize("command", FIGURES)
def test_an_estimate_prints_the_figures_of_the_page(command: str) -> None:
    done = here(*shlex.split(command)[1:])
    assert done.returncode == 0, done.stdout + done.stderr
    for figure in FIGURES[command]:
        assert figure in PAGE and figure in done.stdout, figure


def test_every_piece_of_advice_has_a_command() -> None:
    pieces = PAGE.split("\n## ")[1:]
    assert len(pieces) >= 8
    for piece in pieces:
        assert re.search(r"(?m)^(    )?(shardproof|python) ", piece), piece.splitlines()[0]
