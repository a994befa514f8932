"""Every relation holds on a sound system and breaks on a fault; stored rows decide the same."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from suite.case import Case, WorkloadSpec
from suite.checks import relations
from suite.contract import OptimizerSpec
from suite.runner import run_cases
from suite.scenarios.load import find
from suite.scenarios.matrix import expand
from suite.scenarios.vocabulary import installed

DECAY = OptimizerSpec(weight_decay=0.1)
ADAMW = OptimizerSpec("adamw", lr=3e-3, weight_decay=0.1)


def _case(name: str, relation: str, world: int, **more: Any) -> Case:
    case = Case(
        id=f"{name}-{relation}-{world}-{'-'.join(more)}",
        scenario="relations",
        implementation=name,
        backend="in_memory",
        mesh={"replicate": world},
        workload=WorkloadSpec("charnames_gpt", traits=("unequal_tokens",)),
        optimizer=DECAY,
        lane="fp64",
        checks=("relations",),
        steps=2,
        expect={"relation": relation},
    )
    return dataclasses.replace(case, **more)


CLIP = dataclasses.replace(DECAY, clip_norm=0.05)
HOLD = [
    _case("reference/ddp", "split", 3),
    _case("reference/ddp", "permute", 3),
    _case("reference/ddp", "permute", 3, optimizer=CLIP),
    _case("reference/ddp", "world1", 1),
    _case("reference/ddp", "scale", 2),
    _case("pytorch/ddp", "scale", 2, optimizer=ADAMW, backend="gloo"),
    _case("reference/ddp", "permute", 2, workload=WorkloadSpec("digits_cnn")),
]
BREAK = [
    (_case("mutants/ddp_mean_of_means", "split", 2), "split does not hold"),
    (_case("mutants/ddp_never_reduces", "permute", 2), "permute does not hold"),
    (_case("mutants/ddp_reduces_in_fp32", "world1", 1), "world1 does not hold"),
    (_case("mutants/ddp_mean_of_means", "scale", 2), "scale does not hold"),
]
BY_BRANCH = WorkloadSpec("charnames_gpt", traits=("conditional_by_micro_batch",))
SKIP = [
    (_case("reference/ddp", "split", 2, workload=WorkloadSpec("digits_cnn")), "by definition"),
    (_case("reference/ddp", "split", 3, workload=BY_BRANCH), "conditional_by_micro_batch"),
    (_case("reference/ddp", "scale", 2, optimizer=CLIP), "clipping off"),
    (_case("reference/ddp", "permute", 1), "nothing to exchange"),
]


@pytest.fixture(scope="module")
def results() -> dict[str, dict[str, Any]]:
    cases = [*HOLD, *(case for case, _ in (*BREAK, *SKIP))]
    found: list[dict[str, Any]] = []
    run_cases(cases, 2, found.append)
    return {result["id"]: result for result in found}


@pytest.mark.parametrize("case", HOLD, ids=lambda case: case.id)
def test_relations_hold(results: dict[str, dict[str, Any]], case: Case) -> None:
    result = results[case.id]
    assert result["verdict"] == "pass", result["reason"]
    assert result["checks"][0]["figures"]["compared"] > 20


@pytest.mark.parametrize(("case", "says"), BREAK, ids=[case.id for case, _ in BREAK])
def test_faults_break_them(results: dict[str, dict[str, Any]], case: Case, says: str) -> None:
    result = results[case.id]
    assert result["verdict"] == "fail", result["reason"]
    assert says in result["reason"]


@pytest.mark.parametrize(("case", "says"), SKIP, ids=[case.id for case, _ in SKIP])
def test_skips_give_the_reason(results: dict[str, dict[str, Any]], case: Case, says: str) -> None:
    result = results[case.id]
    assert result["verdict"] == "skip", result["reason"]
    assert says in result["reason"]


@pytest.mark.parametrize(
    ("row", "status"),
    [
        ({"error": 1e-15, "bound": 1e-12}, "pass"),
        ({"error": 1e-9, "bound": 1e-12}, "fail"),
        ({"error": float("nan"), "bound": 1e-12}, "fail"),
        ({"problem": "in the second run rank 1 raised"}, "fail"),
        ({"skip": "one share"}, "skip"),
        ({"tested": False}, "undecidable"),
    ],
)
def test_stored_rows_decide(row: dict[str, Any], status: str) -> None:
    place = {"step": 0, "phase": "gradients_final", "name": "w", "owner": "replica 0"}
    case = _case("reference/ddp", "split", 2)
    figures = SimpleNamespace(case=case, compared={"relations": [place | row]})
    assert relations.decide(figures).status == status  # type: ignore[arg-type]


def test_the_second_run_travels_as_plain_data() -> None:
    case = _case("plain", "scale", 1, shares=(1, 0), loss_scale=2.0)
    assert Case.from_dict(case.to_dict()) == case


def test_the_scenario_has_a_quick_tier_of_every_relation() -> None:
    (file,) = find([str(Path(__file__).parents[1] / "scenarios/conformance/relations.yaml")])
    quick = [case for case in expand(file, installed()) if case.tier == "quick"]
    assert {case.expect["relation"] for case in quick} == {"split", "permute", "world1", "scale"}
    assert len(quick) <= 12
