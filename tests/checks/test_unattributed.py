"""Temporaries at their largest, against those of one process."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from made_case import made_case
from test_costs import plan

from shardproof.case import WorkloadSpec
from shardproof.cases.runner import run_cases
from shardproof.checks.memory import unattributed
from shardproof.checks.results import CaseResult
from shardproof.contract import OptimizerSpec
from shardproof.costs import cost_model_class
from shardproof.evidence.records import RankRecord
from shardproof.ledgers.memory.summary import MemoryRow
from shardproof.registry.declaration import Declaration

ADAMW = OptimizerSpec("adamw")
SMALL = WorkloadSpec("charnames_gpt", params={"layers": 2, "width": 16, "seq": 8}, global_batch=12)


def evidence(strategy: str = "zero1", options: dict[str, Any] | None = None, **of_case: Any) -> Any:
    fields = {"workload": SMALL, "optimizer": ADAMW, "checks": ("memory",), **of_case}
    implementation = fields.pop("implementation", f"reference/{strategy}")
    case = made_case(implementation, {"shard": 2}, **fields)
    facts = cost_model_class(strategy)(plan(strategy, 2)).facts
    return SimpleNamespace(
        case=case,
        declaration=Declaration(strategy=strategy, backends=("in_memory", "gloo")),
        model_facts=replace(facts, options={**facts.options, **(options or {})}),
        family=None,
        compared={},
    )


def with_peaks(**peaks: int) -> RankRecord:
    """A rank that has so many bytes of temporaries at the peak of each phase."""
    rows = [MemoryRow("peak", 1, phase, "cpu", "temporary", n) for phase, n in peaks.items()]
    return RankRecord(0, 2, Declaration(strategy="zero1"), memory=rows)


def test_what_one_process_takes_is_measured_in_each_phase() -> None:
    found = {row.phase: row.bound for row in unattributed.measure(evidence())}
    assert found.keys() == {"forward", "backward", "update"}
    assert all(size > 0 for size in found.values())


def test_a_model_with_gradients_in_its_loss_is_timed_as_on_ranks() -> None:
    """Its backward begins inside its forward, so temporaries of both are those of backward."""
    found: list[CaseResult] = []
    work = WorkloadSpec(
        "digits_penalty",
        ("tied", "tied_over_units"),
        global_batch=24,
        micro_batches=1,
        params={"channels": 4, "layers": 2},
    )
    case = made_case(
        "reference/zero1", {"shard": 1}, workload=work, optimizer=ADAMW, checks=("memory",)
    )
    run_cases([case], 1, found.append)
    [memory] = found[0].checks
    assert (memory.status, memory.message) == ("pass", "")


@pytest.mark.parametrize("strategy", ["zero2", "fsdp"])
def test_a_step_of_the_head_alone_and_one_of_all_are_both_measured(strategy: str) -> None:
    """One keeps nothing for backward, the other has all of a backward."""
    found: list[CaseResult] = []
    knobs = {"layers": 6, "width": 16, "heads": 4, "seq": 32, "first_step": "head"}
    work = WorkloadSpec("charnames_gpt", params=knobs, global_batch=48, micro_batches=1)
    fields: dict[str, Any] = {"workload": work, "optimizer": ADAMW, "checks": ("memory",)}
    case = made_case(f"reference/{strategy}", {"shard": 2}, backend="in_memory", **fields)
    run_cases([case], 1, found.append)
    [memory] = found[0].checks
    assert (memory.status, memory.message) == ("pass", "")


def test_a_rank_may_have_a_unit_and_a_parameter_more_and_no_byte_beyond() -> None:
    told = evidence()
    told.compared["memory"] = rows = list(unattributed.measure(told))
    bound = {row.phase: int(row.bound) for row in rows}
    at_most = {p: size + unattributed.in_addition(told, p) for p, size in bound.items()}
    assert unattributed.exceeds(told, with_peaks(**at_most)) is None
    for phase, most in at_most.items():
        found = unattributed.exceeds(told, with_peaks(**{**at_most, phase: most + 1}))
        assert found == (1, phase, most + 1, most)


def test_buckets_for_a_step_that_never_comes_are_no_temporaries() -> None:
    """DDP cuts them after its first update; a second step shows that they are communication."""
    found: list[CaseResult] = []
    fields: dict[str, Any] = {"workload": SMALL, "optimizer": ADAMW, "checks": ("memory",)}
    for steps in (1, 2):
        mesh = {"replicate": 2}
        run_cases([made_case("reference/ddp", mesh, steps=steps, **fields)], 1, found.append)
    assert [result.checks[0].status for result in found] == ["pass", "pass"]
    told = evidence(steps=1)
    told.compared["memory"] = list(unattributed.measure(told))
    assert unattributed.exceeds(told, with_peaks(update=2**30)) is None
    assert unattributed.exceeds(told, with_peaks(backward=2**30)) is not None


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_sums_of_earlier_micro_batches_may_lie_apart_until_the_update(strategy: str) -> None:
    one, several = evidence(strategy), evidence(strategy)
    several.model_facts = replace(several.model_facts, micro_batches=(2, 2))
    gradients = sum(4 * tensor.numel for tensor in one.model_facts.trainable)
    for phase, more in {"forward": gradients, "backward": gradients, "update": 0}.items():
        added = [unattributed.in_addition(each, phase) for each in (one, several)]
        assert added[1] - added[0] == more


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({"options": {"recompute_every": 1}}, "option recompute_every"),
        ({"options": {"data_options": {"offload": "parameters"}}}, "option offload"),
        ({"options": {"schedule": "zb_h1"}}, "gradients wait for the pass of their weights"),
        ({"precision": {"parameters": "bfloat16"}}, "mixed precision"),
        ({"backend": "gloo"}, "temporaries are not measured on gloo"),
        ({"strategy": "local_sgd"}, "no strategy of which it is known"),
        ({"implementation": "mine:Zero1"}, "only temporaries of reference systems are judged"),
    ],
)
def test_what_makes_temporaries_of_its_own_is_not_judged(changed: Any, why: str) -> None:
    told = evidence(**changed)
    assert unattributed.why_not(told) == why
    assert list(unattributed.measure(told)) == []
