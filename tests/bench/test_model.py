"""The alpha-beta model against hand counts, planted parameters, and what ranks really send."""

from __future__ import annotations

import math
from dataclasses import replace
from fractions import Fraction
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardproof.bench.lines import ProbedStep, Probes
from shardproof.bench.model import alpha_beta, curve, scorecard, step_time
from shardproof.bench.model.alpha_beta import COSTS, Cost, Fit, Group, Links, cost, fit
from shardproof.bench.model.curve import Compute, Ground
from shardproof.bench.model.step_time import Unmodelled, predict
from shardproof.bench.subjects import Call
from shardproof.costs import ModelFacts, cost_model_class
from shardproof.costs.model import NoCostModel
from shardproof.costs.model_facts import TensorFacts
from shardproof.errors import SelectionError
from shardproof.ledgers import traffic

MIB = 2**20


def of(steps: int, volume: int | Fraction) -> Cost:
    return Cost(Fraction(steps), Fraction(volume))


#: By hand from the papers' formulas, at 2, 4, 5 and 8 ranks.
BY_HAND = [
    ("all_reduce", "ring", 2, of(2, 1)),
    ("all_reduce", "ring", 4, of(6, Fraction(3, 2))),
    ("all_reduce", "ring", 5, of(8, Fraction(8, 5))),
    ("all_reduce", "ring", 8, of(14, Fraction(7, 4))),
    ("all_reduce", "recursive doubling", 8, of(3, 3)),
    ("all_reduce", "recursive doubling", 5, of(4, 4)),
    ("all_reduce", "rabenseifner", 8, of(6, Fraction(7, 4))),
    ("all_reduce", "rabenseifner", 5, of(6, Fraction(18, 5))),
    ("all_reduce", "tree", 8, of(6, 6)),
    ("all_reduce", "tree", 5, of(6, 6)),
    ("all_reduce", "double tree", 8, of(6, 2)),
    ("all_gather", "ring", 4, of(3, Fraction(3, 4))),
    ("reduce_scatter", "ring", 4, of(3, Fraction(3, 4))),
    ("reduce_scatter", "all-reduce ring", 4, of(6, Fraction(3, 2))),
    ("broadcast", "tree", 5, of(3, 3)),
    ("reduce", "tree", 8, of(3, 3)),
    ("broadcast", "pipelined ring", 8, of(7, 1)),
    ("reduce", "pipelined ring", 2, of(1, 1)),
    ("all_to_all", "pairwise", 4, of(3, 1)),
    ("gather", "linear", 4, of(3, 3)),
    ("scatter", "linear", 2, of(1, 1)),
    ("send", "message", 2, of(1, 1)),
    ("all_reduce", "fold", 4, of(4, 4)),
    ("all_reduce", "direct", 4, of(3, 3)),
    ("reduce", "direct", 5, of(4, 4)),
]


@pytest.mark.parametrize(("operation", "algorithm", "ranks", "expected"), BY_HAND)
def test_costs_are_those_of_the_papers(
    operation: str, algorithm: str, ranks: int, expected: Cost
) -> None:
    assert cost(operation, algorithm, ranks) == expected


def test_a_planted_mistake_in_a_formula_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is often written instead of 2(N-1)/N: twice the payload, whatever the ranks."""
    monkeypatch.setitem(COSTS, ("all_reduce", "ring"), lambda n: of(2 * (n - 1), 2))
    wrong = [row for row in BY_HAND if cost(*row[:3]) != row[3]]
    assert [row[:2] for row in wrong] == [("all_reduce", "ring")] * 4


@given(
    pair=st.sampled_from(sorted(COSTS)),
    ranks=st.integers(1, 1500),
    payload=st.integers(0, 2**40),
    alpha=st.floats(0, 1),
    beta=st.floats(0, 1e-3),
)
def test_costs_are_monotone_and_nothing_in_a_group_of_one(
    pair: tuple[str, str], ranks: int, payload: int, alpha: float, beta: float
) -> None:
    found = cost(*pair, ranks)
    seconds = found.seconds(payload, alpha, beta)
    assert cost(*pair, 1).seconds(payload, alpha, beta) == 0
    assert 0 <= seconds <= found.seconds(payload + 4096, alpha, beta)
    assert seconds <= found.seconds(payload, alpha + 1e-3, beta)


@given(st.integers(2, 1024))
def test_a_ring_moves_the_least_bytes_and_pays_for_it_in_steps(ranks: int) -> None:
    ring, tree = (cost("all_reduce", name, ranks) for name in ("ring", "tree"))
    assert ring.volume == Fraction(2 * (ranks - 1), ranks) <= tree.volume
    assert ring.steps == 2 * (ranks - 1) >= tree.steps


def test_an_unknown_algorithm_is_named() -> None:
    with pytest.raises(SelectionError, match="all_reduce by butterfly"):
        cost("all_reduce", "butterfly", 4)
    assert cost("recv", "anything", 4) == alpha_beta.FREE


# --------------------------------------------------------------------------------------- the fit


@pytest.mark.parametrize("ranks", [2, 3, 8])
def test_a_fit_recovers_planted_alpha_and_beta(ranks: int) -> None:
    rng = np.random.default_rng(ranks)
    alpha, beta = 40e-6, 0.9e-9
    true = cost("all_reduce", "ring", ranks)
    times = {
        n: true.seconds(n, alpha, beta) * math.exp(rng.normal(0, 0.03))
        for n in (64, 4096, 65536, MIB, 4 * MIB, 25 * MIB)
    }
    found = fit("all_reduce", "ring", ranks, times)
    assert found.alpha == pytest.approx(alpha, rel=0.08)
    assert found.beta == pytest.approx(beta, rel=0.08)
    assert 0 < found.residual < 0.06 and found.residual <= abs(found.worst)


def test_a_fit_counts_small_messages_as_much_as_large_ones() -> None:
    """Absolute errors would leave alpha to the noise of 25 MiB messages."""
    times = {64: 100e-6, 1024: 101e-6, MIB: 1.1e-3, 25 * MIB: 27e-3, 24 * MIB: 23e-3}
    found = fit("all_reduce", "ring", 2, times)
    assert 2 * found.alpha == pytest.approx(100e-6, rel=0.05)


def test_a_fit_is_never_negative_and_takes_one_size() -> None:
    steep = fit("all_reduce", "ring", 2, {1000: 1e-6, 2000: 4e-6})
    assert steep.alpha == 0 and steep.beta > 0
    falling = fit("all_reduce", "ring", 2, {10: 2e-6, 1_000_000: 1e-6})
    assert falling.beta == 0 and falling.alpha > 0
    assert fit("barrier", "tree", 2, {0: 3e-5}).alpha == pytest.approx(3e-5)
    one = fit("send", "message", 2, {1000: 1e-3})
    assert (one.alpha, one.beta) == (0, pytest.approx(1e-6))
    with pytest.raises(ValueError, match="positive"):
        fit("all_reduce", "ring", 2, {})
    with pytest.raises(ValueError, match="positive"):
        fit("all_reduce", "ring", 2, {8: 0.0})
    with pytest.raises(ValueError, match="all_reduce sends nothing in a group of size 1"):
        fit("all_reduce", "ring", 1, {8: 1.0})


# --------------------------------------------------------------------------------- the prediction

RING = Fit("all_reduce", 2, 10e-6, 1e-9, busy=0.5)
FITS = {
    "all_reduce": RING,
    "all_gather": Fit("all_gather", 2, 20e-6, 2e-9),
    "reduce_scatter": Fit("reduce_scatter", 2, 30e-6, 1e-9),
    "broadcast": Fit("broadcast", 2, 5e-6, 1e-9),
    "send": Fit("send", 2, 7e-6, 1e-9),
}
LINKS = Links(FITS)


def test_a_step_is_compute_and_every_call_by_hand() -> None:
    calls = [Call("all_reduce", 4, 1e6, 3), Call("all_reduce", 4, 8, floating=False)]
    found = predict(calls, 0.050, LINKS, "gloo")
    latency, volume = 4 * 6 * 10e-6, (3e6 + 8) * 1.5 * 1e-9
    assert found.alpha_seconds == pytest.approx(latency)
    assert found.beta_seconds == pytest.approx(volume)
    assert found.communication_seconds == pytest.approx(latency + volume)
    assert (found.overlap, found.step_seconds) == ("none", found.high_seconds)
    assert found.high_seconds == pytest.approx(0.050 + latency + volume)
    assert found.exposed_share == pytest.approx((latency + volume) / found.high_seconds)


def test_each_call_costs_what_its_own_groups_were_probed_at() -> None:
    """Two ranks a node: shards are gathered in 3 ms inside it, sums of them cross in 30 ms."""
    inside = Group(2, {"all_gather": Fit("all_gather", 2, 1e-3, 2e-9)}, {})
    across = Group(2, {"all_reduce": Fit("all_reduce", 2, 5e-3, 20e-9)}, {})
    links = Links({"all_reduce": RING}, {"shard": inside, "replicate": across})
    calls = [
        Call("all_gather", 2, 2e6, axis="shard"),  # 1 alpha, and half of 2 MB
        Call("all_reduce", 2, 1e6, axis="replicate"),  # 2 alpha, and all of 1 MB
        Call("all_reduce", 4, 1e6, axis="world"),  # 6 alpha of all ranks, and 3/2 of 1 MB
    ]
    made = [predict([call], 0.0, links, "gloo").step_seconds for call in calls]
    assert made == pytest.approx([0.003, 0.030, 0.00156])
    whole = predict(calls, 0.05, links, "gloo")
    assert whole.step_seconds == pytest.approx(0.05 + sum(made))
    with pytest.raises(Unmodelled, match="reduce along replicate was not timed on gloo"):
        predict([Call("reduce", 2, 8, axis="replicate")], 0.05, links, "gloo")


def test_bounds_and_which_of_them_is_the_prediction() -> None:
    calls = [Call("all_reduce", 2, 100e6)]  # 100.02 ms, half a core busy
    free = predict(calls, 0.3, LINKS, "gloo", cores_per_rank=2)
    assert (free.overlap, free.step_seconds) == ("full", 0.3)
    crowded = predict(calls, 0.3, LINKS, "gloo", cores_per_rank=1)
    assert crowded.overlap == "none" and crowded.step_seconds == pytest.approx(0.40002)
    assert crowded.low_seconds == pytest.approx(0.35001)
    assert predict(calls, 0.3, LINKS, "nccl").step_seconds == 0.3
    assert predict(calls, 0.01, LINKS, "nccl").step_seconds == pytest.approx(0.10002)


def test_nothing_is_sent_in_a_group_of_one_and_receivers_pay_nothing() -> None:
    calls = [Call("all_reduce", 1, 1e9), Call("recv", 2, 1e9)]
    assert predict(calls, 0.1, Links({}), "gloo").step_seconds == 0.1


def test_nccl_takes_the_cheaper_of_ring_and_tree() -> None:
    small, large = ([Call("all_reduce", 1024, n)] for n in (8, 1e9))
    latency = predict(small, 0.0, LINKS, "nccl").communication_seconds
    assert latency == pytest.approx(20 * 10e-6, rel=1e-3)
    ring = cost("all_reduce", "ring", 1024).seconds(1e9, RING.alpha, RING.beta)
    assert predict(large, 0.0, LINKS, "nccl").communication_seconds <= ring


def test_what_was_not_probed_is_said() -> None:
    with pytest.raises(step_time.Unmodelled, match="all_to_all was not timed on gloo"):
        predict([Call("all_to_all", 2, 8)], 0.1, LINKS, "gloo")
    with pytest.raises(step_time.Unmodelled, match="ucc"):
        predict([], 0.1, LINKS, "ucc")


# ------------------------------------------------------------------------------ calls by formula


def tensor(name: str, *shape: int) -> TensorFacts:
    return TensorFacts(name, shape, "float32", owners=(name.rpartition(".")[0],))


def plan(axis: str, ranks: int, **more: Any) -> ModelFacts:
    fields: dict[str, Any] = {
        "axes": {axis: ranks},
        "options": {},
        "parameters": (tensor("a.w", 1000), tensor("b.w", 500), tensor("c.w", 24)),
        "modules": {"": "M", "a": "L", "b": "L", "c": "L"},
        "units": ("a", "b", "c"),
        "optimizer": "adamw",
    }
    return ModelFacts(**fields | more)


def test_calls_of_ddp_by_formula() -> None:
    one = step_time.promised(cost_model_class("ddp")(plan("replicate", 4)))
    assert one == [Call("all_reduce", 4, 4 * 1524, 1, axis="replicate")]
    small = plan("replicate", 4, options={"first_bucket_bytes": 90, "bucket_bytes": 3000})
    three = step_time.promised(cost_model_class("ddp")(small))
    assert three == [Call("all_reduce", 4, pytest.approx(4 * 1524 / 3), 3, axis="replicate")]
    assert step_time.promised(cost_model_class("ddp")(plan("replicate", 1))) == []


def test_what_no_formula_tells_comes_from_the_ledger() -> None:
    known = [Call("all_reduce", 2, 3048, 2), Call("all_reduce", 2, 40, 1, floating=False)]
    calls = step_time.promised(cost_model_class("ddp")(plan("replicate", 64)), known, 2)
    assert calls == [
        Call("all_reduce", 64, pytest.approx(3048), 2, axis="replicate"),
        Call("all_reduce", 64, 40, 1, floating=False),
    ]


def test_what_the_ledger_saw_grows_along_its_own_axis() -> None:
    facts = plan("replicate", 4, axes={"replicate": 4, "shard": 2})
    known = [
        Call("all_reduce", 2, 3048, 2, axis="replicate"),
        Call("all_reduce", 2, 100, 7, axis="shard"),
        Call("all_reduce", 2, 40, floating=False, axis="replicate"),
        Call("all_reduce", 2, 40, floating=False, axis="shard"),
        Call("all_reduce", 4, 40, floating=False, axis="world"),
    ]
    calls = step_time.promised(cost_model_class("fsdp")(facts), known, 4)
    control = [call for call in calls if not call.floating]
    assert [(call.axis, call.ranks) for call in control] == [
        *(("replicate", 4), ("shard", 2), ("world", 8))
    ]
    assert {(call.axis, call.ranks) for call in calls if call.floating} == {("shard", 2)} | {
        ("replicate", 4)
    }


def test_calls_of_zero_by_formula() -> None:
    calls = step_time.promised(cost_model_class("zero1")(plan("shard", 8)))
    assert [(c.operation, c.ranks, c.count) for c in calls] == [
        ("reduce_scatter", 8, 1),
        ("all_gather", 8, 1),
    ]
    assert {c.bytes for c in calls} == {8 * 191 * 4}  # 1524 elements, padded to 8 shards of 191


def test_sizes_are_those_of_the_calls() -> None:
    calls = [Call("all_reduce", 2, 40), Call("all_reduce", 2, 8), Call("recv", 2, 3)]
    assert step_time.sizes(calls) == {"all_reduce": [8, 40]}


def test_rows_of_the_ledger_become_calls() -> None:
    row = traffic.LoggedCall(
        *(0, "all_reduce", (0, 1), "replicate", "float32", 64, Fraction(64)),
        *("backward", True, 0, 0),
    )
    alone = replace(row, group=(0,))
    other = replace(row, axis="shard")
    assert step_time.seen([row, row, alone, other]) == [
        Call("all_reduce", 2, 64, 2, axis="replicate"),
        Call("all_reduce", 2, 64, 1, axis="shard"),
    ]


# -------------------------------------------------------------------------------- modelled curves


#: Worlds of a modelled curve.
WORLDS = tuple(2**power for power in range(1, 11))


def test_weak_scaling_of_ddp_by_hand_up_to_1024_ranks() -> None:
    compute = Compute(0.0, 0.001, 0.004)
    ground = Ground("ddp", plan("replicate", 2), compute, LINKS, "gloo")
    steps = [ground.step_at(world, "replicate", "weak", 16) for world in WORLDS]
    last = steps[-1]
    seconds = 2 * 1023 * 10e-6 + 2 * 1023 / 1024 * 4 * 1524 * 1e-9
    assert last.communication_seconds == pytest.approx(seconds)
    assert last.step_seconds == pytest.approx(0.020 + seconds)
    assert last.exposed_share == pytest.approx(1 - 0.020 / (0.020 + seconds))
    times = [step.step_seconds for step in steps]
    assert times == sorted(times)


def test_strong_scaling_shares_the_batch_and_ends_with_it() -> None:
    compute = Compute(0.002, 0.001, 0.004)
    ground, grows = Ground("ddp", plan("replicate", 2), compute, LINKS, "gloo"), "replicate"
    steps = {world: ground.step_at(world, grows, "strong", 16) for world in WORLDS[:4]}
    assert steps[4].compute_seconds == pytest.approx(0.002 + 0.004 + 0.004)
    assert steps[4].step_seconds > steps[4].compute_seconds
    for world in WORLDS[4:]:
        with pytest.raises(Unmodelled, match=f"^16 samples are too few for {world} ranks$"):
            ground.step_at(world, grows, "strong", 16)
    # 16 samples on 3 ranks: one of them has 6, and the others wait for it.
    three = ground.step_at(3, grows, "strong", 16)
    assert three.compute_seconds == pytest.approx(0.002 + 0.006 + 0.004)


def test_sharding_divides_the_update() -> None:
    compute = Compute(0.0, 0.001, 0.064)
    base = plan("shard", 2)
    four = Ground("zero1", base, compute, LINKS, "gloo").step_at(4, "shard", "weak", 16)
    assert four.compute_seconds == pytest.approx(0.016 + 0.016)
    assert curve.update_share(cost_model_class("ddp")(plan("replicate", 4))) == 1.0


def test_what_is_hidden_still_takes_core_time_at_modelled_worlds() -> None:
    """Two cores a rank, one of which computes: 100 ms of calls keep 1.9 of them busy."""
    links = Links({"all_reduce": Fit("all_reduce", 2, 0.0, 0.05 / 4 / 1524, busy=1.9)})
    compute = Compute(0.0, 0.1, 0.0)
    ground = Ground("ddp", plan("replicate", 2), compute, links, "gloo", cores_per_rank=2)
    made = ground.step_at(1024, "replicate", "weak", 1)
    assert made.overlap == "full"
    assert made.communication_seconds == pytest.approx(0.1, rel=0.01)
    assert made.step_seconds == pytest.approx((0.1 + 0.19) / 2, rel=0.01)


def test_a_rank_with_fewer_samples_has_fewer_micro_batches() -> None:
    """None is empty: ZeRO-3 gathers once for each that there is, not as often as when probed."""
    base = plan("shard", 2, micro_batches=(4, 4))
    assert curve.facts_at(base, "shard", 8).micro_batches == (4,) * 8
    assert curve.facts_at(base, "shard", 8, samples=1).micro_batches == (1,) * 8
    compute = Compute(0.0, 0.001, 0.004)
    how = compute, LINKS, "gloo"
    for world, count in ((4, 4), (8, 2), (16, 1)):
        few = plan("shard", 2, micro_batches=(count, count))
        one, other = (
            Ground("zero3", facts, *how).step_at(world, "shard", "strong", 16)
            for facts in (base, few)
        )
        assert one == other


def test_a_pipeline_is_as_long_as_its_bubble() -> None:
    eight = plan("pipe", 3, micro_batches=(8,), options={"schedule": "1f1b"})
    assert curve.pipeline_stretch(eight) == pytest.approx(1 + 2 / 8)
    assert curve.pipeline_stretch(plan("replicate", 3)) == 1.0
    with pytest.raises(NoCostModel, match="4 stages need 4 units, but the model has 3"):
        curve.facts_at(eight, "pipe", 4)


def test_compute_goes_through_what_was_measured() -> None:
    line = Compute.through({4: 0.010, 16: 0.034}, 0.002)
    assert line.seconds(4) == pytest.approx(0.012)
    assert line.seconds(16) == pytest.approx(0.036)
    assert line.seconds(8) == pytest.approx(0.020)
    assert Compute.through({8: 0.016}, 0.0).seconds(2) == pytest.approx(0.004)
    for odd in ({4: 0.010, 16: 0.090}, {4: 0.050, 16: 0.040}):  # superlinear, falling
        bent = Compute.through(odd, 0.0)
        assert bent.fixed >= 0 and bent.per_sample >= 0
        assert bent.seconds(16) == pytest.approx(odd[16])
    with pytest.raises(ValueError, match="at least 1 timed sample"):
        Compute.through({}, 0.0)


def test_what_cannot_be_cut_is_not_modelled_and_says_why() -> None:
    compute = Compute(0.0, 0.001, 0.0)
    how = compute, LINKS, "gloo"
    with pytest.raises(Unmodelled, match="strategy nothing has no cost formulas"):
        Ground("nothing", plan("replicate", 2), *how).step_at(2, "replicate", "weak", 4)
    # Torch's hybrid is cut by a pipe axis; without one its promise says nothing of ranks.
    with pytest.raises(Unmodelled, match=r"\w"):
        Ground("torch_hybrid", plan("shard", 2), *how).step_at(2, "shard", "weak", 4)


# ---------------------------------------------------------------------------------- the scorecard


def test_a_scorecard_by_hand() -> None:
    calls = [Call("all_reduce", 2, 20e6)]  # predicted: 100.02 ms
    step = ProbedStep(alone=0.080, calls=calls, flops=30_000_000, elements=0)
    run: Any = SimpleNamespace(axes={"replicate": 2}, optimizer=SimpleNamespace(name="sgd"))

    def machine(flop_rate: float | None) -> Probes:
        made = alpha_beta.Machine("gloo", 2, FITS, {}, flop_rate, byte_rate=1e9)
        return Probes(machine=made, cores_per_rank=None, threads=1)

    found = scorecard.card(machine(1e9), step, 0.125, run, peak_bytes=300, formula_bytes=200)
    assert found.achieved_over_predicted == pytest.approx(0.10002 / 0.125)
    assert found.exposed_share == pytest.approx(1 - 0.080 / 0.125)
    assert found.memory_over_formula == 1.5
    assert found.achieved_over_probed == pytest.approx(0.05002 / 0.125)
    bare = scorecard.card(machine(None), step, 0.07, run)
    assert (bare.exposed_share, bare.memory_over_formula) == (0.0, None)
    assert bare.achieved_over_probed is None


def test_probed_compute_by_hand() -> None:
    found = step_time.probed_compute(6e9, 1e6, "adamw", flop_rate=60e9, byte_rate=10e9)
    assert found == pytest.approx(0.1 + 28e6 / 10e9)
    assert step_time.probed_compute(0, 1e6, "sgd", 1.0, 10e9) == pytest.approx(20e6 / 10e9)
