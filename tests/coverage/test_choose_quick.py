"""The choice of the quick tier: what it keeps, what it takes for its CPU seconds, its rules."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

from test_pairs import case

from shardproof.case import Case, WorkloadSpec
from shardproof.scenarios.load import find, load_text
from shardproof.scenarios.matrix import cells, expand
from shardproof.scenarios.vocabulary import installed
from tools import choose_quick

ROOT = Path(__file__).parents[2]
#: CPU seconds of the quick tier of conformance before cases were chosen by what they meet; whoever
#: measures all anew on another machine measures this anew, too.  And 7 for a sample of the covering
#: array of three conditions, 3 for triggers, state and loss terms that no case had, and 6 for cells
#: that combine most conditions: seven of them cost 16, and samples for 13 left the tier for them.
#: The axes context and expert have six cases for 14.3.
ALLOWANCE = 175.1 + 16.0 + 14.3


def named(name: str, tier: str, *traits: str) -> Case:
    spec = WorkloadSpec("charnames_gpt", traits)
    return case(id=f"{name}::{tier}", scenario="a", tier=tier, workload=spec)


def test_cases_stay_only_for_what_nobody_cheaper_meets() -> None:
    pool = [
        named("few", "quick", "tied"),
        named("same", "quick", "tied"),
        named("own", "quick", "frozen"),
        named("many", "full", "tied", "unused", "scalar"),
        named("dear", "full", "empty", "prime_sized"),
    ]
    costs = {"few": 2.0, "same": 1.0, "own": 1.0, "many": 1.2, "dear": 9.0}

    def names(room: float) -> set[str]:
        chosen = choose_quick.choose([], pool, costs, room)
        return {one.id.partition("::")[0] for one in chosen}

    assert names(2.5) == {"many", "own"}
    assert names(11.5) == {"many", "own", "dear"}
    chosen = choose_quick.choose([], pool, {**costs, "many": 5.0}, 8.0)
    assert {one.id.partition("::")[0] for one in chosen} == {"same", "own", "many"}
    chosen = choose_quick.choose([], pool, {**costs, "many": 5.0}, 4.0)
    assert {one.id for one in chosen} == {"same::quick", "own::quick"}


def test_what_stands_meets_its_part() -> None:
    standing, pool = [named("home", "quick", "tied")], [named("few", "quick", "tied")]
    assert not choose_quick.choose(standing, pool, {"few": 1.0}, 5.0)


def test_a_case_is_needed_for_a_fault_a_name_or_what_is_not_counted() -> None:
    one, measured = named("one", "quick"), {"one": 1.0}
    assert not choose_quick.stands(one, measured, (), "")
    assert choose_quick.stands(one, {}, (), "")
    assert choose_quick.stands(one, measured, {one.id}, "")
    assert choose_quick.stands(one, measured, (), f"see {one.id}")
    refusing = replace(one, expect={"refuses": "words"})
    assert choose_quick.stands(refusing, measured, (), "")


TEXT = """\
name: small
about: an example
sees: [nothing]
workload: {name: charnames_gpt}
matrix:
  implementation: [reference/naive_ddp, reference/ddp, pytorch/ddp]
  backend: [in_memory, gloo]
  mesh: {replicate: [1, 2]}
  optimizer: sgd
checks: [equivalence]
tier: full
quick:
  - {world: 1, backend: in_memory, implementation: [reference/ddp, pytorch/ddp]}
  - {world: 2}  # all of them
  - {world: 1, backend: gloo, implementation: plain*}
"""


def test_rules_of_which_all_stays_stay_and_others_are_narrowed() -> None:
    text = TEXT.replace("plain*", "reference/naive_ddp")
    file = load_text(text, "small.yaml")
    every = {cell.key[1:4]: cell for cell in cells(file, installed())}
    stay = [
        every["reference/naive_ddp", "gloo", "replicate1"],
        every["pytorch/ddp", "in_memory", "replicate1"],
        every["pytorch/ddp", "gloo", "replicate2"],
        every["reference/ddp", "in_memory", "replicate2"],
    ]
    made = choose_quick.rules(file, text, stay)
    assert "  - {world: 1, backend: gloo, implementation: reference/naive_ddp}\n" in made
    again = expand(load_text(made, "small.yaml"), installed())
    quick = {tuple(c.id.split("::")[1:4]) for c in again if c.tier == "quick"}
    assert quick == {cell.key[1:4] for cell in stay}
    assert choose_quick.rules(load_text(made, "small.yaml"), made, stay) == made
    none = choose_quick.rules(file, text, [])
    assert none == TEXT[: TEXT.index("quick:")]


def test_cells_without_a_rule_get_one() -> None:
    text = TEXT[: TEXT.index("quick:")]
    file = load_text(text, "small.yaml")
    every = cells(file, installed())
    made = choose_quick.rules(file, text, [cell for cell in every if cell.backend == "gloo"])
    assert made == text + "quick:\n  - {backend: gloo}\n"


def test_the_tier_keeps_its_allowance() -> None:
    """By the CPU seconds that were measured when it was chosen."""
    measured = json.loads(choose_quick.CPU.read_text())
    files = find([str(ROOT / "scenarios/conformance")])
    quick = [c for file in files for c in expand(file, installed()) if c.tier == "quick"]
    lacking = [c.id for c in quick if choose_quick.name_of(c) not in measured]
    assert not lacking, f"measure: `python -m tools.choose_quick --measure`: {lacking}"
    assert sum(measured[choose_quick.name_of(case)] for case in quick) <= ALLOWANCE
