"""Any input ends with a documented exit code: what once broke a command, and hundreds of others."""

from __future__ import annotations

import itertools
from pathlib import Path

import fuzzing
import pytest


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return fuzzing.bases(tmp_path_factory.mktemp("fuzz"))


@pytest.fixture(autouse=True)
def here(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(place)


@pytest.mark.parametrize("path", sorted(fuzzing.CORPUS.glob("*.json")), ids=lambda path: path.stem)
def test_what_once_broke_a_command(path: Path, place: Path) -> None:
    assert fuzzing.run(fuzzing.Input.load(path), place) == ""


@pytest.mark.parametrize("part", range(4))
def test_inputs_that_nobody_would_write(place: Path, part: int) -> None:
    numbers = iter(range(part * 60, part * 60 + 60))
    failures = fuzzing.broken(place, numbers, lambda: False)
    assert list(itertools.islice(failures, 3)) == []


def test_the_same_number_gives_the_same_input(place: Path) -> None:
    for number in range(40):
        assert fuzzing.draw(place, number) == fuzzing.draw(place, number)
