"""Promises against hand counts: bytes by class, calls and bytes by axis, ratios."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from fractions import Fraction
from typing import Any

import pytest

from shardproof.costs import Bound, ModelFacts, cost_model_class, memory_ratio
from shardproof.costs.accounting import KNOWN, accounting_of
from shardproof.costs.layout import Flat, buckets, units
from shardproof.costs.model import Flow, NoCostModel
from shardproof.costs.model_facts import TensorFacts
from shardproof.costs.zero import Zero3


def tensor(name: str, *shape: int, **more: Any) -> TensorFacts:
    fields = {"dtype": "float32", "owners": (name.rpartition(".")[0],)} | more
    return TensorFacts(name, shape, **fields)


#: 7 + 5 + 3 elements: padding shows at 2, 4 and 8 ranks.
MODEL = (tensor("head.w", 7), tensor("b.0.w", 5), tensor("b.1.w", 3))
MODULES = {"": "M", "head": "L", "b": "ModuleList", "b.0": "B", "b.1": "B"}


def plan(strategy: str = "zero3", ranks: int = 2, **more: Any) -> ModelFacts:
    axis = "replicate" if strategy in ("ddp", "naive_ddp", "single") else "shard"
    fields: dict[str, Any] = {
        "axes": {axis: ranks},
        "options": {},
        "parameters": MODEL,
        "modules": MODULES,
        "units": ("b.0", "b.1"),
        "optimizer": "adamw",
    }
    return ModelFacts(**fields | more)


def sums(flows: list[Flow]) -> dict[tuple[str, str], tuple[int, Fraction]]:
    found: dict[tuple[str, str], tuple[int, Fraction]] = {}
    for one in flows:
        calls, total = found.get((one.axis, one.operation), (0, Fraction(0)))
        assert isinstance(one.calls, int)
        found[one.axis, one.operation] = calls + one.calls, total + one.bytes
    return found


def test_a_flat_layout_is_padded_to_the_ranks_and_cut_anywhere() -> None:
    flat = Flat((MODEL[0], MODEL[1]), 4)
    assert (flat.numel, flat.padded, flat.shard_numel) == (12, 12, 3)
    assert [[(t.name, n) for t, n in flat.parts(r)] for r in range(4)] == [
        [("head.w", 3)],
        [("head.w", 3)],
        [("head.w", 1), ("b.0.w", 2)],
        [("b.0.w", 3)],
    ]
    assert Flat((MODEL[0],), 4).padded == 8


def test_buckets_hold_at_most_the_limit_and_one_dtype() -> None:
    wide = tensor("x", 2, dtype="float64")
    found = buckets([MODEL[0], MODEL[1], wide, MODEL[2]], limit=33, shards=1)
    assert sorted([t.name for t in f.members] for f in found) == [
        ["b.0.w", "b.1.w"],
        ["head.w"],
        ["x"],
    ]


def test_units_are_innermost_and_what_is_tied_over_them_is_the_roots() -> None:
    tied = tensor("b.0.t", 4, owners=("b.0", "head"))
    found = units(plan(parameters=(*MODEL, tied)), 2)
    assert {u.name: [t.name for t in u.members] for u in found} == {
        "": ["head.w", "b.0.t"],
        "b.0": ["b.0.w"],
        "b.1": ["b.1.w"],
    }
    frozen = tensor("b.0.f", 4, trainable=False)
    found = units(plan(parameters=(*MODEL, frozen)), 2)
    assert [len(u.flats) for u in found] == [1, 2, 1]
    assert [len(u.trained) for u in found] == [1, 1, 1]


@pytest.mark.parametrize(
    ("wrap", "names"),
    [
        ({}, ["", "b.0", "b.1"]),
        ({"units": ["b.1"]}, ["", "b.1"]),
        ({"module_class": ["B"]}, ["", "b.0", "b.1"]),
        ({"minimum_parameters": 5}, ["", "head", "b.0"]),
    ],
)
def test_wrap_policies(wrap: dict[str, Any], names: list[str]) -> None:
    assert [u.name for u in units(plan(options={"wrap": wrap}), 2)] == names


# bytes of fp32: 15 elements = 60 bytes; 2 ranks: one bucket padded to 16; units padded to 8+6+4.
RESIDENT = {
    # strategy: parameters, gradients, elements of state on rank 0 and 1
    "ddp": (60, 60, (15, 15)),
    "zero1": (64, 64, (8, 7)),
    "zero2": (64, 32, (8, 7)),
    "zero3": (36, 36, (9, 6)),
    "fsdp": (36, 36, (9, 6)),
}


@pytest.mark.parametrize("strategy", RESIDENT)
def test_resident_bytes_are_those_counted_by_hand(strategy: str) -> None:
    cost_model = cost_model_class(strategy)(plan(strategy))
    parameters, gradients, elements = RESIDENT[strategy]
    for rank in range(2):
        before = cost_model.resident(rank, 0, -1)
        assert before["optimizer_state"] == 0
        after = cost_model.resident(rank, 0, 0)
        assert after["parameters"] == parameters
        assert after["gradients"] == gradients
        state = sum(cost_model.local(rank).optimizer.values())
        assert state == elements[rank]
        assert after["optimizer_state"] == 2 * 4 * elements[rank] + 4 * len(
            cost_model.local(rank).optimizer
        )


@pytest.mark.parametrize(
    ("strategy", "ranks", "options", "more", "lifted"),
    [
        ("zero3", 2, {}, 16, 3),
        ("fsdp", 2, {}, 16, 3),
        ("fsdp", 2, {"reshard_after_forward": 2}, 16, 3),  # over all: the shards themselves
        ("fsdp", 4, {"reshard_after_forward": 2}, 2 * 16, 1),
        ("fsdp", 2, {"sharding_strategy": "SHARD_GRAD_OP"}, 0, 1),
    ],
)
def test_a_unit_is_gathered_for_every_call(
    strategy: str, ranks: int, options: dict[str, Any], more: int, lifted: int
) -> None:
    twice = cost_model_class(strategy)(plan(strategy, ranks, options=options, calls={"b.1": 2}))
    once = cost_model_class(strategy)(plan(strategy, ranks, options=options))
    assert twice.payload() - once.payload() == more
    assert isinstance(twice, Zero3)
    assert [twice.gathers_per_step(unit) for unit in twice.units if unit.name == "b.1"] == [lifted]


@pytest.mark.parametrize("strategy", ["zero3", "fsdp"])
def test_a_unit_that_nothing_calls_sends_nothing(strategy: str) -> None:
    unused = tensor("b.1.w", 3, first_use=None)
    fields = {"parameters": (*MODEL[:2], unused), "calls": {"b.1": 0}}
    without = plan(strategy, parameters=MODEL[:2], units=("b.0",))
    assert cost_model_class(strategy)(plan(strategy, **fields)).payload() == (
        cost_model_class(strategy)(without).payload()
    )


def test_what_ends_with_the_root_is_reduced_as_late() -> None:
    wrap = {"wrap": {"units": ["head", "b.0"]}}
    late = [
        cost_model_class("zero3")(plan(options=wrap, parameters=(*MODEL[:2], last))).prefetch()
        for last in (MODEL[2], tensor("b.1.w", 3, first_use=None))
    ]
    # With the root, which ``b.1`` is left to, ``head``, whose inputs may need no gradient.
    assert [found.late_when_computing if found else -1 for found in late] == [0, 2]


def test_what_is_late_over_replicas() -> None:
    axes = {"replicate": 2, "shard": 2}
    late = tensor("b.1.w", 3, first_use=None)
    wrap = {"units": ["b.0"]}

    def prefetch(parameters: tuple[TensorFacts, ...], **options: Any) -> Any:
        return cost_model_class("fsdp")(
            plan("fsdp", axes=axes, parameters=parameters, options={"wrap": wrap, **options})
        ).prefetch()

    # A root that is whole in time holds nothing up; all of an idle round comes late.
    prompt = prefetch(MODEL)
    assert [prompt.after_backward(*rounds) for rounds in ((2, 0), (1, 1))] == [0, 4]
    # One that is not: a reduction a round; in the last one the way over the replicas as well, of
    # the root and of ``b.0``, which waits for the reduction after it.
    held_up = prefetch((*MODEL[:2], late))
    assert [held_up.after_backward(n, 0) for n in (1, 2)] == [3, 4]
    silent = prefetch((*MODEL[:2], late), accumulate_without_communication=True)
    assert [silent.after_backward(n, 0) for n in (1, 2)] == [3, 3]
    assert silent.after_backward(2, 1) == 4


@pytest.mark.parametrize(("strategy", "more"), [("fsdp1", 1), ("fsdp2", 2)])
def test_upstream_systems_gather_a_unit_for_every_forward(strategy: str, more: int) -> None:
    wrap = {"wrap": {"units": ["b.0"]}, "sharding_strategy": "FULL_SHARD"}

    def gathers(**calls: int) -> int:
        found = cost_model_class(strategy)(plan(strategy, options=wrap, calls=calls)).flows()
        return sum(f.range[0] for f in found if f.operation == "all_gather")

    # FSDP2 frees it after every backward, too.
    assert (gathers(**{"b.0": 2}) - gathers()) // 2 == more * plan(strategy).rounds


def test_sgd_keeps_one_slot_or_none() -> None:
    one = cost_model_class("zero1")(plan(optimizer="sgd")).resident(0, 0, 0)["optimizer_state"]
    assert one == 4 * 8
    none = cost_model_class("zero1")(plan(optimizer="sgd", momentum=0.0))
    assert none.resident(0, 0, 0)["optimizer_state"] == 0
    assert none.local(0).optimizer == {}


def test_a_parameter_that_is_never_used_has_no_state() -> None:
    late = tensor("b.1.w", 3, first_use=1)
    cost_model = cost_model_class("ddp")(plan("ddp", parameters=(*MODEL[:2], late)))
    assert cost_model.resident(0, 0, 0)["optimizer_state"] == 2 * 4 * 12 + 2 * 4
    assert cost_model.resident(0, 1, 1)["optimizer_state"] == 2 * 4 * 15 + 3 * 4


@pytest.mark.parametrize("strategy", ["ddp", "zero1", "zero3"])
def test_a_parameter_that_only_skipped_steps_used_has_no_state(strategy: str) -> None:
    early = tensor("b.1.w", 3, first_use=0, last_use=0)
    facts = plan(strategy, 1, parameters=(*MODEL[:2], early), steps=3)

    def state(skipped: set[int]) -> int:
        cost_model = cost_model_class(strategy)(facts.after_skips(skipped))
        assert ("b.1.w" in cost_model.local(0).optimizer) == (0 not in skipped)
        held: int = cost_model.resident(0, 2, 2)["optimizer_state"]
        return held

    assert state(set()) == state({1}) > state({0})


def test_kept_buffers_are_for_gradients_from_the_first_step_on_and_new_ones_of_their_step() -> None:
    late = tensor("b.1.w", 3, first_use=1)
    early = replace(late, first_use=0, last_use=0)
    for strategy, bytes_late, bytes_early in (
        ("zero1", [60, 60], [60, 60]),
        ("zero2", [48, 60], [60, 48]),
        ("zero3", [48, 60], [60, 48]),
    ):
        for last, wanted in ((late, bytes_late), (early, bytes_early)):
            model = {"parameters": (*MODEL[:2], last), "options": {"bucket_bytes": 12}, "steps": 2}
            cost_model = cost_model_class(strategy)(plan(strategy, 1, **model))
            held = [cost_model.resident(0, step, 1)["gradients"] for step in (0, 1)]
            assert held == wanted, strategy
        once = model | {"parameters": (*MODEL[:2], late), "steps": 1}
        never = cost_model_class(strategy)(plan(strategy, 1, **once)).resident(0, 0, 0)["gradients"]
        assert never == 48, strategy


def test_zero2_holds_three_buckets_whole_and_all_behind_one_that_is_held_up() -> None:
    # Six buckets of 12 bytes, sent from t.5 to t.0; on one rank a shard is as large: 12 bytes.
    names = [f"t.{number}" for number in range(6)]

    def most(completed: tuple[str, ...] = (), **more: Any) -> int:
        tensors = tuple(tensor(n, 3, **more.get(n.replace(".", ""), {})) for n in names)
        facts = plan("zero2", 1, parameters=tensors, options={"bucket_bytes": 12})
        cost_model = cost_model_class("zero2")(replace(facts, completed=completed))
        bound = cost_model.peaks(0, "backward", 0)["communication"]
        at_rest = cost_model.communication_at_rest(0, 0)
        assert at_rest is not None and bound.low == 0
        return bound.high - at_rest - 12

    in_order, unused = tuple(reversed(names)), {"first_use": None}
    assert most() == most(in_order) == 3 * 12
    # The bucket before the one that is held up is still being reduced.
    assert [most(**{f"t{n}": unused}) for n in (5, 4, 2, 1, 0)] == [72, 72, 48, 36, 36]
    assert most(t2={"first_use": 1}) == most(t2={"last_use": 0}) == 48
    # A tied tensor may be complete late, unless the order says when.
    tied = {"owners": ("t", "head")}
    assert most(t3=tied) == 60 and most(in_order, t3=tied) == 36
    assert most(tuple(names)) == 72  # registered in the order of backward, not of forward
    assert most(in_order[1:]) == 72  # nothing depends on t.5
    assert most((names[5], names[3], names[4], *names[2::-1])) == 36


# 2 ranks, m = 3 micro-batches on the busiest: (calls, bytes) over both ranks.
FLOWS = {
    "naive_ddp": {("replicate", "all_reduce"): (6, 2 * 60)},
    "zero1": {("shard", "reduce_scatter"): (2, 64), ("shard", "all_gather"): (2, 64)},
    "zero2": {("shard", "reduce_scatter"): (6, 3 * 64), ("shard", "all_gather"): (2, 64)},
    "zero3": {("shard", "all_gather"): (36, 6 * 72), ("shard", "reduce_scatter"): (18, 3 * 72)},
    # The root's 32 bytes are gathered once a round, not twice.
    "fsdp": {
        ("shard", "all_gather"): (30, 6 * 72 - 3 * 32),
        ("shard", "reduce_scatter"): (18, 3 * 72),
    },
}


@pytest.mark.parametrize("strategy", FLOWS)
def test_calls_and_bytes_by_axis(strategy: str) -> None:
    cost_model = cost_model_class(strategy)(plan(strategy, micro_batches=(2, 3)))
    assert sums(cost_model.flows()) == FLOWS[strategy]
    assert cost_model.payload() == sum(total for _, total in FLOWS[strategy].values())


def test_an_algorithm_over_send_and_recv_sends_what_its_formula_says() -> None:
    """The same payloads as above: 60 bytes in 3 tensors; 64 in one bucket; 32 and two of 20."""
    chosen = {"all_reduce": "recursive_doubling"}
    found = sums(cost_model_class("naive_ddp")(plan("naive_ddp", ranks=3, options=chosen)).flows())
    # Three ranks: one folds, two exchange, one gets the result: four messages of each tensor.
    assert found == {("replicate", "send"): (3 * 4, 4 * 60), ("replicate", "recv"): (3 * 4, 0)}
    rings = {"reduce_scatter": "ring", "all_gather": "ring"}
    found = sums(cost_model_class("zero1")(plan("zero1", options=rings)).flows())
    assert found == {("shard", "send"): (2 + 2, 64 + 64), ("shard", "recv"): (4, 0)}
    half = sums(cost_model_class("zero1")(plan("zero1", options={"all_gather": "ring"})).flows())
    assert half["shard", "reduce_scatter"] == (2, 64) and half["shard", "send"] == (2, 64)
    assert cost_model_class("zero1")(plan("zero1", ranks=1, options=rings)).flows() == []


def test_every_rank_is_promised_its_own_calls_and_bytes() -> None:
    chosen = {"all_reduce": "binomial_tree"}
    sends, _ = cost_model_class("naive_ddp")(plan("naive_ddp", ranks=4, options=chosen)).flows()
    assert sends.by_rank is not None
    # The tree 0 <- 1, 0 <- 2 <- 3, of 3 tensors: each edge carries 60 bytes up and 60 down.
    assert sends.by_rank == ((6, 120), (3, 60), (6, 120), (3, 60))
    assert sum(size for _, size in sends.by_rank) == sends.bytes
    assert sum(calls for calls, _ in sends.by_rank) == sends.calls
    # Two groups of three: places along the axis, not numbers of ranks, count.
    axes = {"replicate": 2, "shard": 3}
    options = {"sharding_strategy": "HYBRID_SHARD", "all_reduce": "binomial_tree"}
    found = cost_model_class("fsdp")(plan(axes=axes, options=options)).flows()
    (sends,) = [flow for flow in found if flow.operation == "send"]
    assert sends.by_rank is not None and len(set(sends.by_rank)) == 1


def test_buckets_of_an_algorithm_send_between_one_message_set_and_one_a_tensor() -> None:
    chosen = {"all_reduce": "ring"}
    sends, receives = cost_model_class("ddp")(plan("ddp", ranks=2, options=chosen)).flows()
    # A ring of two ranks: each sends half of the vector twice.
    assert (sends.operation, sends.bytes, sends.calls) == ("send", 2 * 60, (4, 3 * 4))
    assert (receives.operation, receives.bytes, receives.calls) == ("recv", 0, (4, 3 * 4))


def test_clipping_costs_one_scalar_over_shards() -> None:
    found = sums(cost_model_class("zero1")(plan(clipped=True)).flows())
    assert found["shard", "all_reduce"] == (2, 2 * 8)
    assert ("replicate", "all_reduce") not in sums(
        cost_model_class("naive_ddp")(plan("naive_ddp", ranks=1, clipped=True)).flows()
    )


def test_hybrid_sums_shards_over_replicas() -> None:
    options = {"sharding_strategy": "HYBRID_SHARD"}
    found = sums(
        cost_model_class("fsdp")(plan(axes={"replicate": 3, "shard": 2}, options=options)).flows()
    )
    # Three units' shards, 36 bytes in all, are summed over 3 replicas in each of 2 groups.
    assert found["replicate", "all_reduce"] == (3 * 6, 2 * (3 - 1) * 36 * 2)
    assert found["shard", "reduce_scatter"] == (3 * 6, 3 * 72)


@pytest.mark.parametrize("data", ["ddp", "zero1", "zero2", "zero3", "fsdp"])
def test_a_hybrid_without_data_axes_gives_no_gradient_to_what_is_unused(data: str) -> None:
    """No strategy is asked then, whose buckets would have one."""
    unused = tensor("b.1.w", 3, first_use=None)
    fields = {"parameters": (*MODEL[:2], unused), "options": {"data": data}}
    held = cost_model_class("hybrid")(plan(axes={"tensor": 1}, **fields)).resident(0, 0, -1)
    assert held["gradients"] == 4 * sum(one.numel for one in MODEL[:2])


def test_precision_narrows_what_travels_and_adds_masters() -> None:
    policy = {"precision": {"parameters": "bfloat16", "reduce": "float32"}}
    cost_model = cost_model_class("zero1")(plan(options=policy))
    assert sums(cost_model.flows()) == {
        ("shard", "reduce_scatter"): (2, 64),
        ("shard", "all_gather"): (2, 32),
    }
    assert cost_model.resident(0, 0, 0)["masters"] == 4 * 8
    assert accounting_of(cost_model.facts).id == "M18"
    whole = cost_model_class("zero3")(plan(options=policy))
    assert whole.resident(0, 0, 0)["masters"] == 0
    assert whole.resident(0, 0, 0)["parameters"] == 36


@pytest.mark.parametrize(
    ("strategy", "ranks", "ratio", "limit"),
    [
        ("zero1", 2, Fraction(16, 10), 4),
        ("zero1", 64, Fraction(16 * 64, 4 * 64 + 12), 4),
        ("zero2", 8, Fraction(16 * 8, 2 * 8 + 14), 8),
        ("zero3", 64, Fraction(64), None),
    ],
)
def test_ratios_are_exact_functions_of_the_ranks(
    strategy: str, ranks: int, ratio: Fraction, limit: int | None
) -> None:
    cost_model = cost_model_class(strategy)
    assert KNOWN["A16"].ratio(cost_model, ranks) == ratio
    assert KNOWN["A16"].ratio(cost_model, None) == limit
    assert KNOWN["A32"].ratio(cost_model_class("zero1"), None) == 2


def test_zero_table_one_comes_out() -> None:
    """ZeRO, Table I: 7.5 billion parameters, GB a rank."""
    for ranks, rows in {4: (52.5, 41.25, 30.0), 64: (31.4, 16.6, 1.88)}.items():
        for stage, gigabytes in enumerate(rows, 1):
            ratio = KNOWN["A16"].ratio(cost_model_class(f"zero{stage}"), ranks)
            assert ratio is not None
            assert float(Fraction(120) / ratio) == pytest.approx(gigabytes, rel=3e-3)


def test_the_measured_ratio_counts_padding_and_counters() -> None:
    cost_model = cost_model_class("zero1")(plan())
    held = 64 + 64 + 2 * 4 * 8 + 4 * len(cost_model.local(0).optimizer)
    assert memory_ratio(cost_model) == Fraction(60 + 60 + 120 + 12, held)


def test_whole_copies_are_counted_under_the_same_accounting() -> None:
    policy = {"precision": {"parameters": "bfloat16"}}
    cost_model = cost_model_class("zero3")(plan(options=policy, optimizer="sgd", momentum=0.0))
    whole = (
        memory_ratio(cost_model_class("zero1")(cost_model.facts))
        * cost_model_class("zero1")(cost_model.facts).total()
    )
    assert whole == (2 + 2 + 4) * 15


def test_a_plan_survives_as_plain_data() -> None:
    import json

    found = plan(groups=(("head.w",), ("b.0.w", "b.1.w")))
    assert ModelFacts.from_dict(json.loads(json.dumps(found.to_dict()))) == found


def test_fsdp1_lays_frozen_tensors_where_they_are_registered() -> None:
    frozen = tensor("b.0.f", 8, trainable=False, dtype="float64")
    wide = tensor("b.0.w", 4, dtype="float64")
    found = cost_model_class("fsdp1")(plan("fsdp1", 2, parameters=(frozen, wide), units=("b.0",)))
    assert found.local(0).parameters == {"b.0.f": 6}
    assert found.local(1).parameters == {"b.0.f": 2, "b.0.w": 4}


def test_fsdp1_aligns_what_it_computes_with() -> None:
    parts = (tensor("b.0.v", 3), tensor("b.0.w", 5))
    fields: dict[str, Any] = {"parameters": parts, "units": ("b.0",)}
    for options, elements in (({}, 10), ({"precision": {"parameters": "bfloat16"}}, 14)):
        found = cost_model_class("fsdp1")(plan("fsdp1", 2, options=options, **fields))
        # 16 bytes are 4 elements of fp32 and 8 of bf16; the last tensor's 5 and 1 for the ranks
        assert found.resident(0, 0, 0)["parameters"] == elements // 2 * 4


def test_fsdp1_owns_no_gradient_where_its_shard_has_frozen_tensors_and_padding_only() -> None:
    frozen = tensor("b.0.f", 8, trainable=False)
    parts = (frozen, tensor("b.0.w", 3), tensor("b.1.v", 1))
    found = cost_model_class("fsdp1")(plan("fsdp1", 4, parameters=parts, units=("b.0", "b.1")))
    # 3 elements of b.0 and 1 of b.1 a rank: rank 3 has 2 of b.0.w, rank 0 alone has b.1.v
    assert [found.resident(rank, 0, 0)["parameters"] for rank in range(4)] == [16, 12, 12, 12]
    assert [found.resident(rank, 0, 0)["gradients"] for rank in range(4)] == [4, 0, 12, 12]
    # Ranks 1 to 3 hold padding alone of b.1: 4 bytes, which are no parameter
    assert [
        found.communication_at_rest(rank, 0) - found.communication_at_rest(1, 0)
        for rank in range(4)
    ] == [-8, 0, -12, -12]


def test_fsdp1_counts_a_tensor_of_no_elements_where_it_lies_inside_a_shard() -> None:
    parts = (tensor("b.0.w", 8), tensor("b.0.e", 0, 4), tensor("b.0.v", 12))
    found = cost_model_class("fsdp1")(plan("fsdp1", 2, parameters=parts, units=("b.0",)))
    held = [found.resident(rank, 0, 0)["optimizer_state"] for rank in range(2)]
    # 10 elements a rank; 8 and 2 of two tensors with the empty one between, then 10 of one
    assert held == [10 * 8 + 3 * 4, 10 * 8 + 1 * 4]


@pytest.mark.parametrize(
    ("strategy", "chosen", "says"),
    [
        ("fsdp1", {"sharding_strategy": "FULL_SHARD"}, "no traffic formula"),
        ("fsdp1", {"sharding_strategy": "SHARD_GRAD_OP"}, ""),
        ("fsdp2", {"prefetch_forward": 1}, "no traffic formula for prefetch_forward"),
        ("fsdp2", {"prefetch_forward": 1, "reshard_after_forward": False}, "prefetch_forward"),
        ("fsdp2", {}, ""),
    ],
)
def test_some_gathers_of_units_inside_blocks_that_run_again_are_not_promised(
    strategy: str, chosen: dict[str, Any], says: str
) -> None:
    inner = [tensor("b.0.l.w", 8), tensor("b.1.l.w", 12)]
    modules = {**MODULES, "b.0.l": "L", "b.1.l": "L"}
    options = {"recompute_every": 1, "wrap": {"module_class": ["L"]}, **chosen}
    fields: dict[str, Any] = {"parameters": tuple(inner), "modules": modules}
    cost_model = cost_model_class(strategy)(plan(strategy, 2, options=options, **fields))
    with pytest.raises(NoCostModel, match=says) if says else nullcontext():
        assert cost_model.flows()


def test_ddp_copies_buffers_only_where_it_is_told_to() -> None:
    def copied(**options: Any) -> Fraction:
        cost_model = cost_model_class("ddp")(
            plan("ddp", buffers=(tensor("b.0.mean", 5),), options=options)
        )
        flows = (one for one in cost_model.flows() if one.operation == "broadcast")
        return sum((one.bytes for one in flows), start=Fraction(0))

    assert (copied(), copied(broadcast_buffers=True), copied(broadcast_buffers=False)) == (
        20,
        20,
        0,
    )


def test_a_scaler_costs_one_number_and_a_skipped_step_no_broadcast() -> None:
    for strategy in ("fsdp1", "fsdp2"):
        plain = cost_model_class(strategy)(plan(strategy, 2)).payload()
        assert cost_model_class(strategy)(plan(strategy, 2, scaled=True)).payload() - plain == 2 * 4
    owner = cost_model_class("zero_redundancy_optimizer")
    whole, less = owner(plan(ranks=2)).payload(), owner(plan(ranks=2, skipped=True)).payload()
    assert whole == Fraction(3, 2) * less


def test_kept_units_are_whole_where_they_are_called() -> None:
    options = {"sharding_strategy": "SHARD_GRAD_OP"}
    late = (*MODEL[:2], tensor("b.1.w", 3, first_use=1))

    def bound(**more: Any) -> Bound:
        return cost_model_class("fsdp")(plan(options=options, **more)).peaks(0, "forward", 0)[
            "parameters"
        ]

    whole = bound()
    assert whole.low == whole.high
    never = bound(calls={"b.1": 0})  # 4 elements with padding
    assert never == Bound(whole.low - 4 * 4, whole.high - 4 * 4)
    assert bound(parameters=late) == Bound(whole.low - 4 * 4, whole.high)


def test_a_layout_of_strided_tensors_alone_lies_beside_the_parameters() -> None:
    parameters = (tensor("b.0.w", 8), tensor("b.1.w", 6, strided=True))
    fields: dict[str, Any] = {"parameters": parameters, "modules": MODULES}
    small = {"bucket_bytes": 24}  # a bucket each
    alone = cost_model_class("zero1")(plan("zero1", options=small, **fields))
    shared = cost_model_class("zero1")(plan("zero1", **fields))
    assert alone.resident(0, 0, 0)["parameters"] == 4 * (8 + 6)
    assert alone.resident(0, 0, 0)["masters"] == 4 * 6, "what the optimizer updates"
    assert shared.resident(0, 0, 0)["parameters"] == 4 * (8 + 6 + 6)
    assert shared.resident(0, 0, 0)["masters"] == 0
    offloaded = cost_model_class("zero1")(
        plan("zero1", options={**small, "offload": "optimizer"}, **fields)
    )
    assert offloaded.communication_at_rest(0, 0) == alone.communication_at_rest(0, 0) + 4 * 6


def test_fsdp2_reduces_what_was_kept_before_the_last_of_several_backwards() -> None:
    silent = {"accumulate_without_communication": True}
    for options, more in ((silent, 4 * 4), ({}, 0)):
        found = [
            sum(
                flow.bytes
                for flow in cost_model_class("fsdp2")(
                    plan("fsdp2", options=options, micro_batches=(2, 2), calls=calls)
                ).flows()
                if flow.operation == "reduce_scatter"
            )
            for calls in ({"b.1": 2}, {})
        ]
        assert found[0] - found[1] == more  # 3 elements, 4 with padding
