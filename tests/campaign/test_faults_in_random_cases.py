"""Planted faults under random clean cases: in their order, beside their parents, in a budget."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import pytest
from commands import here

from shardproof import registry, report
from shardproof.campaign import draws
from shardproof.campaign.kills import GROUP, plant
from shardproof.case import Case
from shardproof.checks import Outcome
from shardproof.checks.results import CaseResult
from shardproof.errors import SelectionError
from shardproof.runs import random_kills
from shardproof.runs.random_kills import RandomKill, RandomKills
from shardproof.runs.run_folder import read

FAULTS = [
    registry.load_mutant(name)
    for name in ("ddp_divides_by_world", "ddp_never_reduces", "zero1_all_reduces")
]


def result(case: Case, verdict: str = "pass") -> CaseResult:
    return CaseResult(
        id=case.id,
        case=case,
        verdict=verdict,
        reason="",
        checks=[Outcome("norm", "pass" if verdict == "pass" else "fail")],
    )


class Judging:
    """Parents pass but in the cases ``failing``; faults die in the case of that index."""

    def __init__(self, dies: dict[str, int], alarms: Sequence[int] = (), stops: int = 99) -> None:
        self.dies, self.alarms, self.stops = dies, alarms, stops
        self.asked: list[list[Case]] = []
        self._parents: dict[str, list[str]] = {}

    def __call__(self, cases: Sequence[Case]) -> dict[str, CaseResult]:
        self.asked.append(list(cases))
        if len(self.asked) > self.stops:
            return {}
        told = {}
        for case in cases:
            short = case.implementation.removeprefix(registry.MUTANTS)
            if short == case.implementation:
                own = self._parents.setdefault(short, [])
                own.append(case.id)
                bad = len(own) - 1 in self.alarms
            else:
                bad = len(self.asked) - 1 == self.dies.get(short, -1)
            told[case.id] = result(case, "fail" if bad else "pass")
        return told


def test_faults_die_in_the_first_case_that_their_parent_passes() -> None:
    judge = Judging(
        {"ddp_never_reduces": 0, "zero1_all_reduces": 2, "ddp_divides_by_world": 1}, [1]
    )
    found = plant(FAULTS, 4, 3, judge)
    assert {one.name: (one.killed, one.cases) for one in found.faults} == {
        "ddp_never_reduces": (True, 1),
        "zero1_all_reduces": (True, 3),
        "ddp_divides_by_world": (False, 4),  # only where its parent fails, too
    }
    assert len(judge.asked) == 4
    assert [found.killed_by(n) for n in (1, 2, 3, 4)] == [1, 1, 2, 2]
    assert [row[:2] for row in found.table().rows] == [("1", "1"), ("2", "1"), ("4", "2")]
    drawn = [case for cases in judge.asked for case in cases]
    assert len({case.id for case in drawn}) == len(drawn), "a parent's case is judged once"
    of_ddp = [case for case in drawn if case.implementation == "reference/ddp"]
    assert of_ddp == draws.first_cases(4, 3, ["reference/ddp"])
    assert [one.split("::")[2] for one in found.alarms] == ["reference/ddp", "reference/zero1"]
    planted = next(case for case in drawn if case.implementation == "mutants/ddp_never_reduces")
    assert draws.by_id(planted.id) == planted
    again = plant(FAULTS[::-1], 4, 3, Judging(judge.dies, [1]))
    assert {*again.faults} == {*found.faults}


def test_what_a_budget_cuts_counts_for_nothing() -> None:
    many = [registry.load_mutant(name) for name in registry.mutant_names() if "ddp_" in name]
    many = [one for one in many if one.parent == "reference/ddp"][: GROUP + 3]
    found = plant(many, 3, 0, Judging({one.name: 0 for one in many}, stops=1))
    assert len(found.faults) == GROUP
    assert all(one.killed and one.cases == 1 for one in found.faults)
    assert {*found.left_out} == {one.name for one in many} - {one.name for one in found.faults}
    assert "3 left out by the budget" in found.sentence()
    sampler = next(
        fault
        for name in registry.mutant_names()
        if (fault := registry.load_mutant(name)).parent == "reference/sampler"
    )
    nothing = plant([sampler], 3, 0, Judging({}))
    assert (nothing.faults, nothing.not_drawn) == ((), (sampler.name,))


def test_what_is_kept_is_read_again_or_told_to_be_damaged(tmp_path: Path) -> None:
    one = RandomKill("a", "reference/ddp", 2, "case", "fail", ("norm",))
    kept = RandomKills(7, 5, (one, RandomKill("b", "reference/ddp", 5)), ("late",))
    assert random_kills.read(tmp_path) is None
    (tmp_path / random_kills.FILE).write_text(kept.text())
    assert random_kills.read(tmp_path) == kept
    assert '"killed by N": {\n  "1": 0,\n  "2": 1,\n  "5": 1\n }' in kept.text()
    (tmp_path / random_kills.FILE).write_text(kept.text().replace('"parent"', '"parents"'))
    with pytest.raises(SelectionError, match="is damaged"):
        random_kills.read(tmp_path)


def test_faults_die_in_random_cases_and_the_report_tells_how_many(tmp_path: Path) -> None:
    words = ("mutants", "--impl", "ddp_never_reduces", "--campaign", "2", "--seed", "5", "-j", "1")
    done = here(*words, "-v", "--results", str(tmp_path / "run"))
    assert done.returncode == 0, done.stdout + done.stderr
    closing = "1 fault in up to 2 cases of seed 5: 1 killed"
    assert closing in done.stdout and "1 of 1 faults, 1 killed" in done.stderr
    assert re.search(r"^ *ddp_never_reduces +reference/ddp +1 +equivalence", done.stdout, re.M)
    quiet = here(*words, "-q", "--results", "quiet", cwd=tmp_path)
    assert (quiet.stdout, quiet.stderr) == (f"{closing}; evidence: quiet\n", "")
    run = read(tmp_path / "run")
    assert report.document(run).count("Planted faults under random cases") == 1
    assert "Measured: 1 fault in up to 2 cases" in report.html(run)
    assert here("verify", str(tmp_path / "run")).returncode == 0


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("--seed", "3"), "--seed needs --campaign"),
        (("--campaign", "3", "--depth", "family"), "leave out --depth"),
        (("--campaign", "3", "--shard", "1/2"), "leave out --shard"),
        (("--campaign", "3", "--tier", "quick"), "leave out --tier quick"),
    ],
)
def test_options_that_do_not_go_together_are_refused(words: tuple[str, ...], says: str) -> None:
    refused = here("mutants", *words)
    assert refused.returncode == 2
    assert says in refused.stderr
