"""A failure that a scenario expects is green only with the words that its rule asks for."""

from __future__ import annotations

from dataclasses import replace

import pytest
from made_case import made_case

from shardproof.cases.verdict import decide_case
from shardproof.evidence.account import Account
from shardproof.scenarios.load import load_text
from shardproof.scenarios.matrix import expand
from shardproof.scenarios.vocabulary import installed

SCENARIO = """\
name: known
about: an example
sees: [nothing]
workload: {name: charnames_gpt}
matrix:
  implementation: [reference/ddp]
  backend: in_memory
  mesh: {replicate: [2, 3]}
  optimizer: sgd
checks: [equivalence]
xfail:
  - {world: 2, reason: known to fail, says: two of three are lost}
  - {world: 3, reason: any failure}
"""


@pytest.mark.parametrize(
    ("says", "verdict"),
    [
        ((), "xfail"),
        (("two are lost",), "xfail"),
        (("tensors", "two are lost"), "xfail"),
        (("tensors", "doubled"), "crash"),
    ],
)
def test_only_the_right_failure_is_green(says: tuple[str, ...], verdict: str) -> None:
    case = replace(
        made_case("reference/ddp", {"replicate": 2}), xfail="known to fail", xfail_says=says
    )
    result = decide_case(Account(case, broken="of three tensors two are lost"))
    assert result.verdict == verdict
    assert "of three tensors two are lost" in result.reason
    assert ("expected a failure that contains 'doubled'" in result.reason) == (verdict == "crash")


def test_the_words_come_from_the_rule_that_matched() -> None:
    cases = expand(load_text(SCENARIO, "f.yaml"), installed())
    assert {case.world: case.xfail_says for case in cases} == {
        2: ("two of three are lost",),
        3: (),
    }
