"""Scenarios of the checkout are read and expanded once for all commands in this process.

A command that names no scenario reads 460 files and makes 11,000 cases: three CPU seconds, which
hundreds of tests would spend on the same files again.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from shardproof.case import Case
from shardproof.scenarios import load, matrix
from shardproof.scenarios.load import SHIPPED, ScenarioFile
from shardproof.scenarios.vocabulary import Vocabulary


def reads() -> Iterator[None]:
    """Inside, a file that has not changed is not read again, and gives the cases that it gave."""
    files: dict[tuple[object, ...], ScenarioFile] = {}
    kept: set[int] = set()
    cases: dict[tuple[object, ...], tuple[tuple[object, ...], list[Case]]] = {}
    read, expand = load.load, matrix._Expansion.cases

    def read_once(path: Path) -> ScenarioFile:
        try:
            real = path.resolve()
            found = real.stat()
        except OSError:
            return read(path)
        if not real.is_relative_to(SHIPPED):
            return read(path)
        key = real, found.st_ino, found.st_mtime_ns, found.st_size
        if key not in files:
            files[key] = read(path)
            kept.add(id(files[key].scenario))
        return replace(files[key], file=load._shown(path))

    def expand_once(self: Any) -> list[Case]:
        file: ScenarioFile = self.file
        words: Vocabulary = self.vocabulary
        if id(file.scenario) not in kept:
            return expand(self)
        # Cases name the suite's files from scenarios/ on, whatever the working folder is.
        shown = Path(file.file)
        if shown.is_relative_to(SHIPPED):
            shown = Path("scenarios", shown.relative_to(SHIPPED))
        key = id(file.scenario), id(words), shown
        if key not in cases:
            cases[key] = (file, words), expand(self)  # which are kept, so that no id is another's
        return [*cases[key][1]]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(load, "load", read_once)
        patch.setattr(matrix._Expansion, "cases", expand_once)
        yield
