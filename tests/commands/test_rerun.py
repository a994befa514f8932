"""The command that a failing case prints runs that case, wherever its scenario file lies."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from shardproof import registry
from shardproof.case import Case
from shardproof.cases.kills import mutant_cases, pair
from shardproof.cases.verdict import decide_case
from shardproof.commands.execution import Planting
from shardproof.evidence.account import Account
from shardproof.scenarios.selection import Selection
from shardproof.scenarios.vocabulary import installed

SUPPORT = Path(__file__).parents[1] / "support"
SCENARIO = """\
name: mine
about: a scenario outside of the suite's folder
sees: [nothing]
workload: {name: charnames_gpt}
matrix:
  implementation: [{name: reference/ddp, label: small, options: {bucket_mb: 0.001}}, plain]
  backend: in_memory
  mesh: {replicate: 1}
  optimizer: sgd
  clip: [0.5, null]
checks: [equivalence]
tier: full
"""


def _reruns(cases: Sequence[Case], command: Any) -> None:
    assert cases
    for case in cases:
        rerun = decide_case(Account(case, fault="anything")).rerun
        program, *words = shlex.split(rerun)
        assert program == "shardproof"
        code, out, err = command(*words, "--dry-run")
        assert (code, out.splitlines()) == (0, [case.id]), (rerun, err)


@pytest.fixture(
    params=["mine.yaml", "a folder/with spaces & more.yml", "scenarios/mine.yaml", "-x/it's.yaml"]
)
def file(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A scenario of a user, as named from the working folder."""
    (tmp_path / request.param).parent.mkdir(exist_ok=True)
    (tmp_path / request.param).write_text(SCENARIO)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(SUPPORT))
    monkeypatch.setenv("PYTHONPATH", str(SUPPORT))
    return str(request.param)


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"implementations": ["mutants/ddp_never_reduces"]},
        {"implementations": ["bad_implementations:NanLoss"], "seed": 7},
        {"seed": 5},
    ],
    ids=str,
)
def test_of_a_file_elsewhere(file: str, command: Any, more: dict[str, Any], tmp_path: Path) -> None:
    for named, number in ((str(tmp_path / file), 0), (f"./{file}", -1)):
        cases = Selection([named], tier="full", **more).cases(installed())
        _reruns([cases[number]], command)


def test_of_the_suites_own(command: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(SUPPORT))
    monkeypatch.setenv("PYTHONPATH", str(SUPPORT))
    for more in ([], ["bad_implementations:NanLoss"]):
        selection = Selection(["ddp-gpt"], more, ["in_memory"], [2], "adamw and clip and fp64")
        _reruns(selection.cases(installed())[:2], command)


@pytest.mark.parametrize("options", [{}, {"weigh_all": False}, {"depth": "family"}], ids=str)
@pytest.mark.parametrize("name", ["ddp_never_reduces", "zero3_unties_weight"])
def test_of_planted_faults(
    command: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str, options: Any
) -> None:
    """The fault beside its parent; a parent beside all its faults."""
    planted: list[list[str]] = []

    def plant(self: Planting) -> int:
        assert self.shard is None
        planted.append([case.id for case in mutant_cases(self.pairs)])
        return 0

    monkeypatch.setattr(Planting, "run", plant)
    monkeypatch.chdir(tmp_path)
    of = pair(registry.load_mutant(name), **options)
    for case in (of.case, of.parent):
        program, *words = shlex.split(decide_case(Account(case, fault="anything")).rerun)
        assert program == "shardproof"
        assert command(*words)[0] == 0
        assert case.id in planted[-1]
    assert len(planted[0]) == 2
