"""Every claim has a verdict that its figures decide, and the pages are what the files say."""

from __future__ import annotations

from pathlib import Path

import pytest

from shardproof.by_path import import_module
from shardproof.errors import ScenarioError
from shardproof.estimate import claims

ROOT = Path(__file__).parents[2]
FILES = sorted((ROOT / "scenarios/claims").rglob("*.yaml"))
#: What ground truth says of each: true, true under a condition, wrong, open.
VERDICTS = {
    "true": {5, 8, 10, 27},
    "true if": {1, 2, 3, 6, 15, 17, 18, 25, 28, 29, 30, 31},
    "wrong": {4, 7, 9, 11, 12, 13, 14, 16, 19, 20, 21, 22, 23, 24, 26},
    "open": set[int](),
}


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_computed_figures_are_the_honest_ones(path: Path) -> None:
    claim = claims.read(path)
    for one in claim.computed:
        assert one.is_right, (one.what, one.found, one.honest)
    assert claim.cases() or claim.computed or claim.file.needs


def test_31_claims_have_the_verdict_of_ground_truth() -> None:
    found = {
        int(c.file.claim): c.verdict() for c in map(claims.read, FILES) if c.file.claim.isdecimal()
    }
    assert sorted(found) == [*range(1, 32)]
    for word, numbers in VERDICTS.items():
        for number in numbers:
            assert found[number].startswith(word), (number, found[number])
            assert word != "true" or found[number] == "true"
    assert not [n for n, verdict in found.items() if "open" in verdict]


def test_reading_a_claim_simulates_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def simulated(*_: object) -> None:
        raise AssertionError("simulated")

    monkeypatch.setattr(claims, "required", simulated)
    claim = claims.read(ROOT / "scenarios/claims/31-utilization.yaml")
    assert [one.found for one in claim.computed] == ["not run"] * 3
    with pytest.raises(AssertionError, match="simulated"):
        _ = claim.simulated


@pytest.mark.slow
@pytest.mark.parametrize("path", [path for path in FILES if "machine:" in path.read_text()])
def test_simulated_figures_are_the_honest_ones(path: Path) -> None:
    claim = claims.read(path)
    for one in claim.simulated:
        assert one.is_right, (one.what, one.found, one.honest)


def test_a_wrong_simulated_figure_is_told(tmp_path: Path) -> None:
    text = (ROOT / "scenarios/claims/31-utilization.yaml").read_text()
    file = tmp_path / "claim.yaml"
    file.write_text(text.replace("model: gpt2,", "model: gpt2, batch: 2,"))
    with pytest.raises(ScenarioError, match="unknown argument"):
        _ = claims.read(file).simulated
    # Only the share of peak is left, and it is small.
    kept = text.partition("  - what: ")[0] + "  - what: " + text.split("  - what: ")[2]
    file.write_text(kept.replace('honest: "0.07"', 'honest: "0.50"'))
    (one,) = claims.read(file).simulated
    assert not one.is_right and float(one.found) < 0.2


def test_tables_of_papers_are_reproduced() -> None:
    papers = [claims.read(path) for path in FILES if path.parent.name == "papers"]
    assert len(papers) == 3 and {paper.verdict() for paper in papers} == {"true"}


def test_a_wrong_figure_and_a_wrong_setting_are_told(tmp_path: Path) -> None:
    text = (ROOT / "scenarios/claims/17-ddp-up-to-7b.yaml").read_text()
    file = tmp_path / "claim.yaml"
    file.write_text(text.replace('honest: "112"', "honest: 111"))
    assert [one.is_right for one in claims.read(file).computed] == [True, False]
    file.write_text(text.replace("impl: ddp", "impl: dpp", 1))
    with pytest.raises(ScenarioError, match=r"claim.yaml:7: .*did you mean ddp\?"):
        claims.read(file)
    file.write_text("".join(x for x in text.splitlines(True) if not x.startswith("condition")))
    with pytest.raises(ScenarioError, match="no condition"):
        claims.read(file)


def test_pages_are_what_the_files_say() -> None:
    module = import_module(str(ROOT / "docs/make_claims.py"))
    for path, text in module.pages().items():
        assert path.read_text(encoding="utf-8") == text, f"{path.name} is stale"
