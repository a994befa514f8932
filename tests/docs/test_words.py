"""Texts for readers use the words of the field: no page, help text or message has the old dialect.

``make test`` runs it, so that later texts keep to it.  ``NOT_YET`` names the places that are still
to be rewritten; a place without a hit must leave the list.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
import words
from words import ROOT, first_lines, found, messages, prose

from shardproof.commands import main

PAGES = {
    str(path.relative_to(ROOT)): path
    for path in (
        *(ROOT / f"{name}.md" for name in ("README", "CONTRIBUTING", "SECURITY", "CHANGELOG")),
        *sorted((ROOT / "docs").glob("*.md")),
        *sorted((ROOT / "docs/strategies").glob("*.md")),
        *sorted((ROOT / "deploy").rglob("*.md")),
        ROOT / "results/README.md",
        ROOT / "scenarios/conformance/quick.md",
    )
}
#: Folders and modules whose messages and docstrings are read: ``room/part`` of each file.
SOURCES = {
    room: sorted((ROOT / room).rglob("*.py")) for room in ("suite", "impls", "examples", "tools")
}
SOURCES["suite"] = [path for path in SOURCES["suite"] if path.parts[len(ROOT.parts) + 1] != "impls"]


def part_of(path: Path) -> str:
    """``suite/checks`` or ``suite/contract.py``: what ``NOT_YET`` names."""
    return "/".join(path.relative_to(ROOT).parts[:2])


PARTS: dict[str, list[Path]] = {}
for _path in (path for room in SOURCES.values() for path in room):
    PARTS.setdefault(part_of(_path), []).append(_path)

#: Sort of text -> places that still have the dialect.  Shorten it; never add to it.
NOT_YET: dict[str, set[str]] = {
    "page": set(),
    "message": set(),
    "docstring": set(),
}


def hits(sort: str, name: str) -> list[str]:
    """The dialect of one place, with where it stands."""
    if sort == "page":
        return found(prose(PAGES[name].read_text(encoding="utf-8")))
    texts = messages if sort == "message" else first_lines
    return [
        f"{path.relative_to(ROOT)}:{line}: {hit}"
        for path in PARTS[name]
        for line, text in texts(path.read_text(encoding="utf-8"))
        for hit in found(text)
    ]


PLACES = [
    *(("page", name) for name in PAGES),
    *((sort, name) for sort in ("message", "docstring") for name in PARTS),
]


@pytest.mark.parametrize(("sort", "name"), PLACES)
def test_a_place_has_the_words_of_the_field(sort: str, name: str) -> None:
    told = hits(sort, name)
    if name in NOT_YET[sort]:
        assert told, f"{name} is rewritten: take it out of NOT_YET"
    else:
        assert not told, f"write it as a reader would say it ({words.__name__}.py): {told}"


def test_every_place_that_is_not_yet_rewritten_exists() -> None:
    for sort, names in NOT_YET.items():
        assert {(sort, name) for name in names} <= {*PLACES}


def helps() -> Iterator[tuple[str, str]]:
    """Every text of ``--help``: of commands, options and arguments."""

    def of(command: Any, name: str) -> Iterator[tuple[str, str]]:
        for text in (command.help, command.short_help, command.epilog):
            yield name, text or ""
        for parameter in command.params:
            yield f"{name} {parameter.name}", getattr(parameter, "help", None) or ""
        for below, one in getattr(command, "commands", {}).items():
            yield from of(one, f"{name} {below}")

    yield from of(typer.main.get_command(main.app), "shardproof")


def test_help_has_the_words_of_the_field() -> None:
    texts = [*helps()]
    assert len(texts) > 150
    told = [f"{name}: {hit}" for name, text in texts for hit in found(text)]
    assert not told


@pytest.mark.parametrize(
    "text",
    [
        "Who loads what no update came before holds no optimizer state.",
        "It passes. What was kept is right.",
        "rank 0 beside rank 1",
        "Judged is DDP as a whole.",
        "It goes on from step 3.",
        "the worker starts anew",
        "nobody waits",
        "three cases are told by name",
        "asked are 2 seeds",
        "it was loaded, and yet it differs",
        "rank 1 goes no further",
    ],
)
def test_the_dialect_is_seen(text: str) -> None:
    assert found(text)


@pytest.mark.parametrize("text", ["What does it cost?", "A rank resumes.", "Who is it for?"])
def test_plain_sentences_are_not(text: str) -> None:
    assert not found(text)
