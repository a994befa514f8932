"""Adapters around systems that people use: short, without options, and each with a known verdict.

None needs its system here; ``make ecosystem`` runs them beside it.
"""

from __future__ import annotations

import ast
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from whole_systems import EachMicroBatch, SaysLast

from shardproof import prove, registry
from shardproof.contract import Refused
from shardproof.scenarios.load import find
from shardproof.scenarios.matrix import expand
from shardproof.scenarios.vocabulary import installed

ROOT = Path(__file__).parents[2]
NAMES = [name for name in registry.names() if name.startswith("ecosystem/")]
SCENARIOS = ROOT / "scenarios/ecosystem"


def code_lines(path: Path) -> int:
    """Lines without docstrings, comments, blank ones and imports."""
    tree, skipped = ast.parse(path.read_text()), set()
    for node in ast.walk(tree):
        is_text = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        if is_text or isinstance(node, (ast.Import, ast.ImportFrom)):
            skipped |= set(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    lines = enumerate(path.read_text().splitlines(), 1)
    return sum(
        bool(text.strip()) and not text.strip().startswith("#") and number not in skipped
        for number, text in lines
    )


@pytest.mark.parametrize("path", sorted((ROOT / "impls/ecosystem").glob("*.py")), ids=str)
def test_adapters_are_short(path: Path) -> None:
    assert code_lines(path) < 60


@pytest.mark.parametrize("name", NAMES)
def test_takes_no_options_and_says_what_it_needs(name: str) -> None:
    system = registry.load(name)
    assert system.capabilities({}).packages
    assert system.capabilities({}).backends == ("gloo",), "state in module globals"
    with pytest.raises(Refused, match="unknown option 'anything'"):
        system.capabilities({"anything": 1})


def test_each_system_has_known_verdicts_and_failures_say_their_words() -> None:
    cases = [c for file in find([str(SCENARIOS)]) for c in expand(file, installed())]
    judged = Counter(case.implementation for case in cases)
    assert {*NAMES} <= {*judged}
    assert all(case.tier == "full" for case in cases), "the main job has no time for them"
    for case in cases:
        if case.xfail is not None:
            check, colon, words = case.xfail_says[0].partition(": ")
            assert check in case.checks and colon and words, case.id


def test_whole_promises_only_what_an_adapter_names() -> None:
    """One that reduces after every micro-batch is sound, unless it says that it does not."""
    given: dict[str, Any] = {"worlds": 2, "backends": "gloo"}
    (row,) = prove(EachMicroBatch, **given).to_dict("records")
    assert row["verdict"] == "pass", row["reason"]
    (row,) = prove(SaysLast, **given).to_dict("records")
    assert row["verdict"] == "fail"
    assert "accumulation should not communicate" in row["reason"], row["reason"]
