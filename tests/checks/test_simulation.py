"""The check ``simulation`` says what the comparison of real ranks with simulated ones found."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from made_case import made_case

from shardproof import checks
from shardproof.checks import simulation
from shardproof.evidence.records import ComparisonRow
from shardproof.simulate.compared import Compared


def measured(monkeypatch: pytest.MonkeyPatch, found: Compared | None) -> list[ComparisonRow]:
    monkeypatch.setattr(simulation, "first", lambda _: found)
    evidence: Any = SimpleNamespace(case=made_case("reference/ddp", {"replicate": 2}), records=[])
    return simulation.measure(evidence)


def decided(rows: list[ComparisonRow]) -> checks.Outcome:
    figures: Any = SimpleNamespace(compared={"simulation": rows})
    return simulation.decide(figures)


def test_equal_figures_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    outcome = decided(measured(monkeypatch, Compared("a case", 1250, ())))
    assert outcome.status == "pass" and outcome.figures == {"equal figures": 1250}


def test_the_first_difference_is_told_and_the_others_counted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    wrong = [f"rank {rank}: 8 bytes real, 0 simulated" for rank in range(50)]
    rows = measured(monkeypatch, Compared("a case", 1250, wrong))
    assert len(rows) == 20
    outcome = decided(rows)
    assert outcome.status == "fail"
    assert outcome.message == "rank 0: 8 bytes real, 0 simulated (and 19 more)"


def test_a_simulation_that_breaks_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = measured(monkeypatch, Compared("a case", 0, (), error="its simulation failed: no"))
    assert decided(rows).message == "its simulation failed: no"


@pytest.mark.parametrize("found", [None, Compared("a case", 0, (), "values steer it")])
def test_what_cannot_be_simulated_is_skipped(
    monkeypatch: pytest.MonkeyPatch, found: Compared | None
) -> None:
    outcome = decided(measured(monkeypatch, found))
    assert outcome.status == "skip"
    assert outcome.message == (found.skip if found else "suite/simulate is missing here")


def test_code_of_a_users_own_is_not_run_by_the_judge() -> None:
    case = made_case("my_package:System", {"replicate": 2})
    evidence: Any = SimpleNamespace(case=case, records=[])
    outcome = decided(simulation.measure(evidence))
    assert outcome.status == "skip" and "simulate --against" in outcome.message
