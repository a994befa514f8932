"""docs/bug-zoo.md is what the declarations say, and every id in it is of use."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from shardproof.by_path import import_module

ROOT = Path(__file__).parents[2]


zoo: Any = import_module(str(ROOT / "docs/make_bug_zoo.py"))


@pytest.fixture(scope="module")
def faults() -> dict[str, Any]:
    return zoo.read()


@pytest.fixture(scope="module")
def mutants() -> list[Any]:
    return zoo.planted()


def test_ids_that_are_cited_and_ids_that_are_told_are_the_same(
    faults: dict[str, Any], mutants: list[Any]
) -> None:
    cited = {name for mutant in mutants for name in mutant.zoo}
    assert cited - {*faults} == set(), "cited, but not in zoo.yaml"
    assert {*faults} - cited == set(), "in zoo.yaml, but cited by no planted fault"


def test_no_id_stands_twice(faults: dict[str, Any], mutants: list[Any]) -> None:
    """YAML takes the last of two equal keys in silence."""
    assert re.findall(r"^(\w+):", zoo.DATA.read_text(), re.MULTILINE) == [*faults]
    assert all(len({*mutant.zoo}) == len(mutant.zoo) for mutant in mutants)


def test_the_committed_page_is_what_the_generator_makes(
    faults: dict[str, Any], mutants: list[Any]
) -> None:
    made = zoo.page(faults, mutants)
    assert made == zoo.PAGE.read_text(), "stale: run `make generated`"
    shown = re.findall(r"\[`(\w+)`\]\(\.\./([\w/.]+)\)", made)
    assert {name for name, _ in shown} == {mutant.name for mutant in mutants}
    assert all((ROOT / path).is_file() for path in {path for _, path in shown})


def test_links_are_well_formed(faults: dict[str, Any]) -> None:
    links = re.findall(r"\]\((https?:[^)]*)\)", zoo.PAGE.read_text())
    assert len(links) == sum(len(fault.references) for fault in faults.values()) > 100
    form = r"https://github\.com/[\w-]+/[\w.-]+/(issues|pull|discussions)/[1-9]\d*"
    assert [link for link in links if not re.fullmatch(form, link)] == []


def test_every_row_has_the_cells_of_its_head() -> None:
    width = 0
    for line in zoo.PAGE.read_text().splitlines():
        cells = len(re.findall(r"(?<!\\)\|", line)) if line.startswith("|") else 0
        assert not width or cells in (0, width), line
        width = cells


@pytest.mark.parametrize(
    "told",
    [
        {"class": "unheard"},
        {"kind": []},
        {"kind": ["quiet"]},
        {"references": []},
        {"evidence": "rumour"},
        {"references": [{"at": "https://github.com/a/b/issues/1"}]},
    ],
)
def test_what_the_data_may_not_say(tmp_path: Path, told: dict[str, Any]) -> None:
    good = {
        "title": "T",
        "class": "ddp",
        "kind": ["silent"],
        "references": [{"at": "a/b/issues/1"}],
        "cause": "C.",
        "trigger": "t",
    }
    data = tmp_path / "zoo.yaml"
    data.write_text(str({"D01": good}))
    assert zoo.read(data)["D01"].sources == "[a/b#1](https://github.com/a/b/issues/1)"
    data.write_text(str({"D01": good | told}))
    with pytest.raises(ValueError):
        assert zoo.read(data)["D01"].sources


def test_check_tells_a_stale_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(zoo, "PAGE", tmp_path / "page.md")
    assert zoo.main(["--check"]) == 1
    assert "stale: run `make generated`" in capsys.readouterr().err
    assert zoo.main([]) == 0
    assert zoo.main(["--check"]) == 0
