"""The scenarios of many ranks: what they must have, and a fault that only many ranks show."""

from __future__ import annotations

import functools

import pytest
from made_case import made_case

from shardproof.case import Case, WorkloadSpec
from shardproof.cases.runner import run_cases
from shardproof.checks.results import CaseResult
from shardproof.contract import OptimizerSpec
from shardproof.scenarios.load import SHIPPED, find
from shardproof.scenarios.matrix import expand
from shardproof.scenarios.vocabulary import installed

#: Parts of systems, which train nothing.
NO_STRATEGIES = {"reference/algorithms", "reference/sampler", "reference/stopping"}


@functools.cache
def scale() -> list[Case]:
    """All cases of scenarios/scale."""
    files = find([str(SHIPPED / "scale")])
    return [case for file in files for case in expand(file, installed())]


def test_every_case_of_many_ranks_is_exact_and_in_memory() -> None:
    assert {(c.backend, c.tier, c.dtype) for c in scale()} == {("in_memory", "full", "float64")}
    assert all({"equivalence", "replicas", "traffic"} <= {*case.checks} for case in scale())
    # Lane dyadic takes no emulation of ranks that train alone; bitwise asks for equal bits as well.
    alone = {"reference/local_sgd", "reference/diloco"}
    assert {c.implementation for c in scale() if c.lane == "bitwise"} == alone
    assert {c.lane for c in scale()} == {"dyadic", "bitwise"}


@pytest.mark.parametrize("ranks", [64, 128])
def test_each_strategy_trains_48_layers_on_many_ranks(ranks: int) -> None:
    """A pipeline of 64 or 128 ranks has more layers, one a stage."""
    deep = [c for c in scale() if c.world == ranks and c.workload.params["layers"] >= 48]
    known = installed().implementations
    reference = {n for n in known if n.startswith("reference/") and n not in NO_STRATEGIES}
    assert {case.implementation for case in deep} == reference


def test_a_stage_has_a_layer_of_its_own() -> None:
    """A pipeline cannot have more stages than layers, so 128 ranks need 128 layers."""
    deep = [c for c in scale() if c.implementation == "reference/pipeline"]
    assert {case.world for case in deep} == {24, 48, 64, 128}
    assert all(case.world <= case.workload.params["layers"] for case in deep)


def test_512_ranks_make_one_step_of_at_most_four_layers() -> None:
    most = [case for case in scale() if case.world == 512]
    assert {case.steps for case in most} == {1}
    assert max(case.workload.params["layers"] for case in most) <= 4
    assert sorted(len(case.mesh) for case in most) == [1, 1, 1, 4]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_ranks_beyond_a_mask_of_32_bits_are_missed_on_64_ranks_only() -> None:
    found: list[CaseResult] = []
    for system, ranks in (
        ("reference/ddp", 64),
        ("ranks_in_a_mask:Faulty", 32),
        ("ranks_in_a_mask:Faulty", 64),
    ):
        case = made_case(
            system,
            {"replicate": ranks},
            workload=WorkloadSpec(
                "dyadic_mlp",
                global_batch=64,
                micro_batches=1,
                params={"width": 16, "seq": 4, "layers": 2},
            ),
            optimizer=OptimizerSpec("sgd", lr=0.125),
            lane="dyadic",
            checks=("equivalence", "replicas"),
            steps=1,
        )
        run_cases([case], 1, found.append)
    verdicts = [[(c.check, c.status) for c in result.checks] for result in found]
    passes = [("equivalence", "pass"), ("replicas", "pass")]
    assert verdicts == [passes, passes, [("equivalence", "fail"), ("replicas", "pass")]]
    missing = found[-1].checks[0].message
    assert "32" in missing and "63" in missing, missing
