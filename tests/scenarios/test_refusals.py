"""What scenarios expect to be refused is refused, in the words that they quote."""

from __future__ import annotations

from shardproof.cases.runner import run_cases
from shardproof.scenarios.load import find
from shardproof.scenarios.matrix import expand
from shardproof.scenarios.vocabulary import installed


def test_every_refusal_is_worded_as_its_scenario_says() -> None:
    vocabulary = installed()
    cases = [
        case for file in find([]) for case in expand(file, vocabulary) if "refuses" in case.expect
    ]
    assert len(cases) >= 190
    results = run_cases(cases, 1, lambda result: None)[0]
    assert not {r.id: r.reason for r in results if r.verdict not in ("pass", "skip")}
