"""What a pipeline costs, against hand counts and against the workload's own model."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction
from typing import Any

import pytest
import torch
from made_case import made_case
from test_costs import plan, sums, tensor

from shardproof.case import Case, WorkloadSpec
from shardproof.costs import CostModel, ModelFacts, cost_model_class
from shardproof.costs.expression import facts_of
from shardproof.costs.model_facts import shape_key
from shardproof.costs.stages import place_of, split_units

UNITS = ("b.0", "b.1", "b.2", "b.3", "b.4")
#: 7 elements before the first unit, 1 to 5 in the units, 9 behind them; float32.
MODEL = (
    tensor("embed.w", 7, units=(0,)),
    *(tensor(f"{name}.w", n + 1, units=(n,)) for n, name in enumerate(UNITS)),
    tensor("head.w", 9, units=(4,)),
)
TIED = (replace(MODEL[0], units=(0, 4)), *MODEL[1:-1])


def pipeline(ranks: int, schedule: Any = "1f1b", **more: Any) -> CostModel:
    """Three micro-batches in two windows; 10, 20, 30 and 40 elements between the units."""
    fields: dict[str, Any] = {
        "axes": {"pipe": ranks},
        "options": {"schedule": schedule},
        "parameters": MODEL,
        "units": UNITS,
        "micro_batches": (3,),
        "inputs": (((((2, 8), (2, 8)), ((1, 8),)),),),
        "hidden": {"2x8": (10, 20, 30, 40), "1x8": (5, 10, 15, 20)},
    }
    return cost_model_class("pipeline")(plan("pipeline", **fields | more))


@pytest.mark.parametrize(
    ("options", "units", "stages", "sizes"),
    [
        ({}, 5, 2, [3, 2]),
        ({}, 6, 4, [2, 2, 1, 1]),
        ({"split": []}, 4, 4, [1, 1, 1, 1]),
        ({"split": [1, 4]}, 5, 2, [1, 4]),
    ],
)
def test_larger_stages_come_first(
    options: dict[str, Any], units: int, stages: int, sizes: list[int]
) -> None:
    found = split_units(options, units, stages)
    assert [len(part) for part in found] == sizes
    assert [unit for part in found for unit in part] == list(range(units))


@pytest.mark.parametrize(
    ("schedule", "place"),
    [
        ("1f1b", (0, 1)),
        (None, (0, 1)),
        ("interleaved", (0, 1, 0, 1)),
        ({"name": "interleaved", "chunks": 3}, (0, 1) * 3),
        ("zb_v", (0, 1, 1, 0)),
        ({"orders": [["F0@1", "BW0@1"], ["F0@0", "BW0@0"]]}, (1, 0)),
        ({"orders": [["F0@0"], ["F0@1"]], "place": [1, 0]}, (1, 0)),
    ],
)
def test_stages_lie_where_the_schedule_has_them(schedule: Any, place: tuple[int, ...]) -> None:
    assert place_of({"schedule": schedule}, 2) == place


#: Bytes: 2 ways x 4 bytes x (elements of 2 micro-batches of two samples and one of one).
@pytest.mark.parametrize(
    ("ranks", "schedule", "boundaries"),
    [
        (1, "1f1b", []),
        (2, "1f1b", [3]),
        (5, "gpipe", [1, 2, 3, 4]),
        (2, "interleaved", [2, 3, 4]),
        (2, "zb_v", [2, 4]),
        (1, "zb_v", []),
    ],
)
def test_messages_of_every_boundary_between_ranks(
    ranks: int, schedule: str, boundaries: list[int]
) -> None:
    elements = sum(10 * n * 2 + 5 * n for n in boundaries)
    found = sums(pipeline(ranks, schedule).flows())
    if boundaries:
        calls = 2 * 3 * len(boundaries)
        assert found == {
            ("pipe", "send"): (calls, Fraction(2 * 4 * elements)),
            ("pipe", "recv"): (calls, Fraction(0)),
        }
    else:
        assert found == {}


def test_a_norm_is_one_scalar_over_the_pipe_axis() -> None:
    found = sums(pipeline(2, clipped=True).flows())
    assert found["pipe", "all_reduce"] == (2, Fraction(2 * (2 - 1) * 8))


@pytest.mark.parametrize(
    ("ranks", "schedule", "messages"), [(2, "1f1b", 2), (1, "1f1b", 0), (2, "zb_v", 0)]
)
def test_tied_ends_exchange_their_gradients(ranks: int, schedule: str, messages: int) -> None:
    apart = sums(pipeline(ranks, schedule).flows()).get(("pipe", "send"), (0, Fraction(0)))
    tied = sums(pipeline(ranks, schedule, parameters=TIED).flows())
    calls, total = tied.get(("pipe", "send"), (0, Fraction(0)))
    assert (calls - apart[0], total - apart[1]) == (messages, messages * 7 * 4)


def test_a_rank_holds_its_stages() -> None:
    cost_model = pipeline(2)
    assert dict(cost_model.local(0).parameters) == {
        "embed.w": 7,
        "b.0.w": 1,
        "b.1.w": 2,
        "b.2.w": 3,
    }
    assert dict(cost_model.local(1).parameters) == {"b.3.w": 4, "b.4.w": 5, "head.w": 9}
    held = cost_model.resident(1, 0, 0)
    assert held["parameters"] == held["gradients"] == 18 * 4
    assert held["optimizer_state"] == 2 * 18 * 4 + 3 * 4
    assert cost_model.resident(0, 0, -1)["optimizer_state"] == 0
    assert cost_model.held("parameters") == 18 * 4


def test_tied_ends_hold_a_copy_each() -> None:
    cost_model = pipeline(2, parameters=TIED)
    for rank in range(2):
        assert cost_model.local(rank).parameters["embed.w"] == 7
        assert cost_model.local(rank).gradients["embed.w"] == 7
    once = pipeline(2, "zb_v", parameters=TIED)
    assert "embed.w" not in once.local(1).parameters
    assert once.local(0).parameters["embed.w"] == 7


def case(**more: Any) -> Case:
    workload = WorkloadSpec("charnames_gpt", global_batch=7, micro_batches=3)
    usual = {"mesh": {"pipe": 2}, "workload": workload, "steps": 2}
    return made_case("reference/pipeline", **usual | more)


def test_a_plan_knows_which_units_have_a_tensor_and_what_goes_between_them() -> None:
    found = facts_of(case()).model_facts
    homes = {t.name: t.units for t in found.parameters}
    assert homes["embed.token.weight"] == (0,)
    assert homes["blocks.1.mlp.up.bias"] == (1,)
    assert homes["head.weight"] == (2,)
    assert found.inputs == (((((3, 16), (2, 16), (2, 16)),),),) * 2
    assert found.hidden == {"3x16": (3 * 16 * 32,) * 2, "2x16": (2 * 16 * 32,) * 2}
    assert ModelFacts.from_dict(found.to_dict()) == found
    tied = WorkloadSpec("charnames_gpt", ("tied_over_units",))
    assert facts_of(case(workload=tied)).model_facts.parameters[0].units == (0, 2)


def test_without_a_pipe_axis_nothing_of_it_is_asked() -> None:
    found = facts_of(case(mesh={"replicate": 2})).model_facts
    assert (found.inputs, found.hidden) == ((), {})
    assert not any(t.units for t in found.parameters)


def test_stages_measured_in_one_process() -> None:
    """Against what autograd saves of a stage, counted by hooks."""
    from shardproof import workloads
    from shardproof.checks.schedule.stage_bytes import stage_bytes

    small = WorkloadSpec(
        "charnames_gpt", global_batch=2, micro_batches=1, params={"layers": 2, "width": 8}
    )
    chosen = case(workload=small, steps=1)
    found = stage_bytes(chosen, (range(1), range(1, 2)), lambda place, shape: shape_key(shape))
    workload = workloads.for_case(chosen)
    model = workload.model()
    workload.load(model)
    (micro,) = workload.batch(0, 1)[0].micro_batches
    saved: dict[int, torch.UntypedStorage] = {}
    own = {p.untyped_storage().data_ptr() for p in model.parameters()}

    def pack(value: torch.Tensor) -> torch.Tensor:
        storage = value.untyped_storage()
        if storage.data_ptr() not in own:
            saved[storage.data_ptr()] = storage
        return value

    build = workload.build_for(0)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda value: value):
        hidden = build.stage(model, 0, 1)(micro.inputs)
    kept = {s.data_ptr(): s.nbytes() for s in (*saved.values(), hidden.untyped_storage())}
    given = micro.inputs.untyped_storage()
    kept.pop(given.data_ptr(), None)
    key = "x".join(map(str, micro.inputs.shape))
    assert found[0, key]["input"] == 0
    assert found[1, key]["input"] == hidden.untyped_storage().nbytes()
    assert found[0, key]["F"] == pytest.approx(sum(kept.values()), rel=0.05)
    assert 0 < found[0, key]["W"] < found[0, key]["F"]
