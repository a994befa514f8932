"""Evaluations between steps: who evaluates once must not refuse the next time."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

from shardproof.checks import between_steps
from shardproof.evidence.records import Evaluation


def test_a_system_that_evaluates_and_then_refuses_is_told() -> None:
    first = Evaluation(2, 0, 1.0, [])
    records = [SimpleNamespace(rank=rank, evaluations=[first], full_state=None) for rank in (0, 1)]
    evidence: Any = SimpleNamespace(records=records, ranks=dict(enumerate(records)), steps=range(4))
    (row,) = between_steps.measure(evidence, 1e-12)
    assert row.problem == "evaluate() works before step 2, not before the last step"
    silent = SimpleNamespace(rank=0, evaluations=[], full_state=None)
    never: Any = SimpleNamespace(records=[silent], ranks={0: silent}, steps=range(4))
    assert between_steps.measure(never, 1e-12) == []


def test_a_loss_that_is_no_number_is_told_as_that() -> None:
    told = Evaluation(1, 0, math.nan, [])
    records = [SimpleNamespace(rank=rank, evaluations=[told], full_state=None) for rank in (0, 1)]
    evidence: Any = SimpleNamespace(records=records, ranks=dict(enumerate(records)), steps=range(2))
    (row,) = between_steps.measure(evidence, 1e-12)
    assert row.problem == "evaluation: the loss of rank 0 is nan"
