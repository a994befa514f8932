"""Cases of workload epochs from end to end: what breaks the contract, and what cannot be asked."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from shardproof.case import Case, WorkloadSpec
from shardproof.cases.kinds.samples import workload as epochs
from shardproof.cases.runner import run_cases
from shardproof.contract import OptimizerSpec
from shardproof.errors import ScenarioError
from shardproof.scenarios.load import load_text
from shardproof.scenarios.matrix import expand
from shardproof.scenarios.vocabulary import installed
from shardproof.workloads import WorkloadError

HERE = Path(__file__).parents[1] / "support"
EXPECTED = {
    "bad_samplers:Sound": ("pass", ""),
    "bad_samplers:NeverEnds": ("fail", "samples are repeated in epoch 0, expected 1: 2 shares of"),
    "bad_samplers:GivesSamples": ("fail", ".5, expected the index of a sample"),
    "bad_samplers:TellsATensor": (
        "fail",
        "state() gave {'position': tensor(2)}, which is not JSON",
    ),
    "bad_samplers:HasNoState": ("fail", "Refused: HasNoState has no state"),
    "bad_samplers:DeclinesNothingKnown": ("fail", "did you mean resume?"),
    "bad_samplers:DeclinesOtherWorlds": ("skip", "declines other_world: not yet"),
    "bad_samplers:RaisesAfterAResume": ("crash", "KeyError: 'begin'"),
    "reference/ddp": ("skip", "trains models and is not a sampler"),
    "pytorch/collectives": ("skip", "is not a sampler"),
}


def case(name: str, workload: WorkloadSpec, **fields: Any) -> Case:
    usual: dict[str, Any] = {
        "id": f"samples::{name}",
        "scenario": "samples",
        "implementation": name,
        "backend": "in_memory",
        "mesh": {"replicate": 2},
        "optimizer": OptimizerSpec(),
        "lane": "bitwise",
        "checks": ("data",),
        "steps": 0,
    }
    return Case(**{**usual, **fields}, workload=workload)


@pytest.fixture(scope="module")
def results() -> dict[str, Any]:
    resumed = WorkloadSpec("epochs", params={"resume_at": 1, "into": 3})
    cases = [case(name, resumed) for name in EXPECTED]
    cases.append(
        case(
            "reference/sampler",
            WorkloadSpec("charnames_gpt"),
            lane="fp64",
            checks=("equivalence",),
            steps=1,
        )
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(HERE))
        patch.setenv("PYTHONPATH", str(HERE))
        found, _ = run_cases(cases, 2, lambda result: None)
    return {result.case.implementation: result for result in found}


@pytest.mark.parametrize("name", EXPECTED)
def test_verdict_and_sentence(results: dict[str, Any], name: str) -> None:
    verdict, says = EXPECTED[name]
    assert results[name].verdict == verdict, results[name].reason
    assert says in results[name].reason, results[name].reason


def test_a_sampler_trains_nothing(results: dict[str, Any]) -> None:
    result = results["reference/sampler"]
    assert result.verdict == "skip"
    assert result.reason == (
        "is a sampler and trains no model: judge it by a scenario of workload epochs"
    )


@pytest.mark.parametrize(
    ("params", "says"),
    [
        ({"sample": 3}, "unknown parameter of epochs 'sample': did you mean 'samples'?"),
        ({"samples": 0}, "epochs: samples = 0: must be an integer >= 1"),
        ({"shuffle": 1}, "epochs: shuffle = 1: must be one of True, False"),
        ({"tail": "padded"}, "epochs: tail = 'padded': must be one of 'pad', 'drop', 'uneven'"),
        ({"into": 2}, "epochs: into = 2 also needs resume_at"),
        ({"resume_at": 1, "into": 1025}, "epochs: into = 1025; valid: up to 1024"),
        (
            {"resume_at": 1, "resume_epoch": 3},
            "resume_epoch = 3 does not exist; valid: 0 to 2",
        ),
    ],
)
def test_knobs_that_mean_nothing_are_refused(params: dict[str, Any], says: str) -> None:
    with pytest.raises(WorkloadError) as error:
        epochs.resolve(WorkloadSpec("epochs", params=params))
    assert says in str(error.value)


def test_traits_are_of_models_and_batches() -> None:
    with pytest.raises(WorkloadError, match="epochs takes no traits"):
        epochs.resolve(WorkloadSpec("epochs", traits=("tied",)))


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"checks": ["data", "norm"]}, "workload epochs and the check `data` belong together"),
        ({"checks": ["equivalence"]}, "workload epochs and the check `data` belong together"),
        ({"checks": ["collectives"]}, "workload calls and the check `collectives` belong"),
        ({"matrix": {"optimizer": "sgd"}}, "workload epochs trains nothing"),
        ({"matrix": {"lane": "fp64"}}, "epochs are compared bit for bit"),
    ],
)
def test_what_does_not_go_with_the_workload_is_refused(changes: dict[str, Any], says: str) -> None:
    matrix = {
        "implementation": "reference/sampler",
        "backend": "in_memory",
        "mesh": {"replicate": 2},
        "lane": "bitwise",
    }
    scenario = {
        "name": "mine",
        "about": "a sampler",
        "sees": "its faults",
        "workload": {"name": "epochs"},
        "checks": ["data"],
        **changes,
        "matrix": matrix | changes.get("matrix", {}),
    }
    with pytest.raises(ScenarioError) as error:
        expand(load_text(json.dumps(scenario), "mine.yaml"), installed())
    assert says in str(error.value)


@pytest.mark.parametrize(
    ("mesh", "into", "other"),
    [
        ({"replicate": 3}, 2, {"replicate": 2}),
        ({"replicate": 2, "tensor": 2}, 3, {"replicate": 3, "tensor": 2}),
        ({"replicate": 2, "shard": 3}, 4, {"replicate": 4, "shard": 1}),
        ({"tensor": 2}, 2, {"tensor": 2, "replicate": 2}),
        ({"replicate": 2, "shard": 3}, 6, {"replicate": 2, "shard": 3}),
    ],
)
def test_legs_take_turns_between_two_meshes(
    mesh: dict[str, int], into: int, other: dict[str, int]
) -> None:
    spec = WorkloadSpec("epochs", params={"resume_at": 1, "into": into, "resumes": 2})
    assert epochs.meshes(case("reference/sampler", spec, mesh=mesh)) == [mesh, other, mesh]
    assert max(epochs.coordinates(other).values()) + 1 == into
