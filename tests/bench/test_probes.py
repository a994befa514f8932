"""What ranks measure for the model: their calls, their compute, and what is made of it.

No test here asserts an absolute time.
"""

from __future__ import annotations

import dataclasses
import json
import math
import pickle
from collections import Counter
from typing import Any

import pytest
from local_ranks import succeed

from shardproof.bench import sides
from shardproof.bench.arm import comms_along
from shardproof.bench.leader_tasks import LaunchFailed
from shardproof.bench.lines import Probes
from shardproof.bench.model import alpha_beta, curve, probes, scorecard, step_time
from shardproof.bench.session import Session
from shardproof.bench.subjects import (
    AloneSteps,
    Call,
    GroupRecord,
    ProbeRecord,
    RankRounds,
    Rounds,
    Side,
    SideRun,
    WatchedStep,
)
from shardproof.costs import cost_model_of
from shardproof.errors import InputError
from shardproof.files import from_plain, to_plain
from shardproof.ledgers import traffic
from tools.studies import model_check

pytestmark = pytest.mark.usefixtures("brief_sessions")

#: Small enough that a step takes milliseconds; several buckets for the options below.
PARAMS = {"width": 32, "heads": 4, "layers": 2, "seq": 8}
SMALL_BUCKETS = {"first_bucket_bytes": 2**12, "bucket_bytes": 2**15}


def run_of(implementation: str, axis: str, world: int, **options: Any) -> SideRun:
    return SideRun(
        name="probe",
        side=Side(implementation, options),
        axes={axis: world},
        backend="in_memory",
        world=world,
        workload=sides.spec_of("charnames_gpt", "", PARAMS, 12, 1, 0),
        optimizer=sides.default_optimizer("adamw"),
        dtype="float32",
        deadline=900.0,
    )


def watched(run: SideRun, ledgers: bool = True) -> WatchedStep:
    """A step of ``run`` as rank 0 sees it."""
    records = succeed(
        lambda rank, _: dataclasses.asdict(probes.watch(run, rank)), run.world, ledgers=ledgers
    )
    return from_plain(WatchedStep, records[0])


def totals(calls: list[Call]) -> dict[tuple[str, int], tuple[float, float]]:
    """Calls and bytes of one rank by operation and group, floats only."""
    count, payload = Counter[tuple[str, int]](), Counter[tuple[str, int]]()
    for call in calls:
        if call.floating and call.count:
            count[call.operation, call.ranks] += call.count
            payload[call.operation, call.ranks] += call.count * call.bytes
    return {key: (count[key], pytest.approx(payload[key])) for key in count}


STRATEGIES = [
    ("reference/naive_ddp", "naive_ddp", "replicate", {}),
    ("reference/ddp", "ddp", "replicate", SMALL_BUCKETS),
    ("reference/zero1", "zero1", "shard", {"bucket_bytes": 2**15}),
    ("reference/zero2", "zero2", "shard", {"bucket_bytes": 2**15}),
    ("reference/zero3", "zero3", "shard", {}),
    ("reference/fsdp", "fsdp", "shard", {}),
]


@pytest.mark.parametrize("world", [2, 3, 4])
@pytest.mark.parametrize(("implementation", "strategy", "axis", "options"), STRATEGIES)
def test_promised_calls_are_those_that_the_ledger_sees(
    implementation: str, strategy: str, axis: str, options: dict[str, Any], world: int
) -> None:
    run = run_of(implementation, axis, world, **options)
    seen = watched(run).calls
    base = dataclasses.replace(run, axes={axis: 2}).facts()  # of another world: no rank is asked
    cost_model = cost_model_of(strategy, curve.facts_at(base, axis, world))
    assert cost_model is not None
    expected = totals(step_time.promised(cost_model))
    assert expected and totals(seen) == expected
    # With what the ledger saw at this world nothing changes, and control calls come along.
    completed = step_time.promised(cost_model, seen, world)
    assert totals(completed) == expected
    control = [call for call in seen if not call.floating]
    assert [call for call in completed if not call.floating] == control


def test_tensor_parallel_calls_are_those_that_the_ledger_sees() -> None:
    run = run_of("reference/tensor", "tensor", 2)
    cost_model = cost_model_of("tensor", run.facts())
    assert cost_model is not None
    assert totals(watched(run).calls) == totals(step_time.promised(cost_model))


def test_flops_of_a_gpt_by_hand() -> None:
    step = watched(run_of("reference/ddp", "replicate", 2))
    samples, seq, width, vocab, layers = 6, 8, 32, 128, 2
    weights = layers * 12 * width * width + width * vocab
    # A product forward is two backward; scores and mixing are two products a head.
    linear = 6 * samples * seq * weights
    attention = 3 * layers * 2 * 2 * samples * seq * seq * width
    assert step.flops == linear + attention
    assert len(step.products) == probes.SHAPES
    assert step.elements == layers * (12 * width**2 + 13 * width) + 2 * width + (
        vocab * width + seq * width + vocab * width + vocab
    )


def test_a_step_is_watched_with_ledgers_on_only() -> None:
    with pytest.raises(RuntimeError, match="calls of a step are not recorded"):
        watched(run_of("reference/ddp", "replicate", 2), ledgers=False)


@pytest.mark.parametrize(
    ("implementation", "axis"), [("reference/ddp", "replicate"), ("reference/zero3", "shard")]
)
def test_compute_is_measured_without_a_message_between_ranks(
    implementation: str, axis: str
) -> None:
    run = run_of(implementation, axis, 3)

    def body(rank: int, world: int) -> dict[str, Any]:
        alone = probes.Alone(run, rank)
        ledger = traffic.current()
        assert ledger is not None
        begin = len(ledger.calls)
        alone.segment(2)
        alone.segment(2)
        groups = {len(call.group) for call in ledger.calls[begin:]}
        targets = sum(m.targets.shape[0] for m in alone.arm.batches[0].micro_batches)
        alone.arm.close()
        return {
            "groups": groups,
            "samples": targets,
            "steps": alone.steps,
            "gradients": alone.gradients,
        }

    told = succeed(body, 3, ledgers=True)
    assert all(record["groups"] <= {1} for record in told)
    assert [record["samples"] for record in told] == [4, 4, 4]  # its share of 12, not all
    for record in told:
        for steps, gradients in zip(record["steps"], record["gradients"], strict=True):
            assert len(steps) == 2
            assert all(0 < g < s for s, g in zip(steps, gradients, strict=True))
    slow = [max(record["steps"][0][0] for record in told)]
    assert step_time.slowest([record["steps"] for record in told])[0][0] == slow[0]


OPERATIONS = tuple(op for op in alpha_beta.algorithms_of("gloo"))


@pytest.mark.parametrize("world", [2, 3])
def test_every_operation_with_a_formula_has_a_probe(world: int) -> None:
    from shardproof.comm import Mesh

    sizes = {operation: [64, 4096] for operation in OPERATIONS}

    def body(rank: int, _: int) -> dict[str, Any]:
        comm = Mesh({"replicate": world}).comm("replicate")
        prober = probes.Probes(comm, sizes, [((1, 4, 4, 4), 2), ((2, 3, 4, 5), 1)])
        prober.sweep()
        prober.sweep()
        return dataclasses.asdict(prober.record())

    records = [from_plain(ProbeRecord, each) for each in succeed(body, world, ledgers=False)]
    found = alpha_beta.machine("in_memory", records)
    assert set(found.fits) == set(OPERATIONS) and found.ranks == world
    for operation, each in found.fits.items():
        assert each.alpha >= 0 and each.beta >= 0 and each.alpha + each.beta > 0, operation
        assert each.sizes == (64, 4096)
    assert found.flop_rate is not None and found.flop_rate > 0 and found.byte_rate > 0
    assert json.loads(json.dumps(to_plain(found)))["times"]["all_reduce"].keys() == {"64", "4096"}


@pytest.mark.parametrize("world", [2, 3])
def test_a_probe_sends_what_the_ledger_calls_its_payload(world: int) -> None:
    from shardproof.comm import Mesh

    def body(rank: int, _: int) -> set[tuple[str, int]]:
        comm = Mesh({"replicate": world}).comm("replicate")
        ledger = traffic.current()
        assert ledger is not None
        prober = probes.Probes(comm, {operation: [96] for operation in OPERATIONS})
        begin = len(ledger.calls)
        prober.sweep()
        return {(call.operation, call.payload_bytes) for call in ledger.calls[begin:]}

    seen = set().union(*succeed(body, world, ledgers=True))
    told = {op: n for op, n in seen if op not in ("barrier", "recv")}
    assert told == dict.fromkeys({*OPERATIONS} - {"barrier"}, 96)


def test_the_groups_of_each_axis_are_probed_apart() -> None:
    """Of replicas of shards: what is gathered in shards, and what is summed over replicas."""
    from shardproof.comm import Mesh

    axes = {"replicate": 2, "shard": 2}
    told = [
        Call("all_gather", 2, 4096, axis="shard"),
        Call("all_reduce", 2, 64, axis="replicate"),
        Call("send", 2, 64, axis="replicate"),
        Call("all_reduce", 4, 8, axis="world"),
    ]
    sizes = {axis: step_time.sizes(calls) for axis, calls in step_time.apart(axes, told).items()}
    assert sizes == {
        "": {"all_reduce": [8]},
        "shard": {"all_gather": [4096]},
        "replicate": {"all_reduce": [64], "send": [64]},
    }
    assert list(step_time.apart({"replicate": 4, "shard": 1}, told)) == [""]

    def body(rank: int, _: int) -> dict[str, Any]:
        mesh = Mesh({"replicate": 4}).comm("replicate")
        groups = comms_along(axes, "in_memory", ["shard", "replicate"])
        along = {axis: (comm, sizes[axis]) for axis, comm in groups.items()}
        prober = probes.Probes(mesh, sizes[""], along=along)
        ledger = traffic.current()
        assert ledger is not None
        begin = len(ledger.calls)
        prober.sweep()
        calls = [call for call in ledger.calls[begin:] if call.operation != "barrier"]
        seen = {(call.operation, call.group) for call in calls}
        return {"record": dataclasses.asdict(prober.record()), "seen": seen}

    records = succeed(body, 4, ledgers=True)
    rows, columns = [(0, 1), (2, 3)], [(0, 2), (1, 3)]
    for rank, record in enumerate(records):
        shard, replica = rows[rank // 2], columns[rank % 2]
        expected = {("all_gather", shard), ("all_reduce", replica), ("all_reduce", (0, 1, 2, 3))}
        assert {one for one in record["seen"] if one[0] not in ("send", "recv")} == expected
        assert {one[1] for one in record["seen"] if one[0] in ("send", "recv")} == {replica}
    found = alpha_beta.machine(
        "in_memory", [from_plain(ProbeRecord, record["record"]) for record in records]
    )
    assert set(found.fits) == {"all_reduce"} and found.fits["all_reduce"].ranks == 4
    assert {axis: set(group.fits) for axis, group in found.along.items()} == {
        "shard": {"all_gather"},
        "replicate": {"all_reduce", "send"},
    }
    assert all(fit.ranks == 2 for group in found.along.values() for fit in group.fits.values())
    kept = Probes(machine=found, cores_per_rank=1, threads=1)
    assert Probes.model_validate(json.loads(json.dumps(kept.to_dict()))) == kept


def test_an_operation_without_a_probe_is_named() -> None:
    class Nowhere:
        device, size, rank = "cpu", 2, 0

    with pytest.raises(ValueError, match="no probe measures 'gossip'"):
        probes.Probes(Nowhere(), {"gossip": [8]}).sweep()  # type: ignore[arg-type]


def test_a_machine_is_as_fast_as_its_slowest_rank_in_the_median_sweep() -> None:
    def record(*seconds: float, used: float, flops: float) -> ProbeRecord:
        group = GroupRecord(2, [("all_reduce", 1000, list(seconds))], {"all_reduce": (2.0, used)})
        return ProbeRecord(
            {"": group},
            flop_rates=[flops, 5.0, 6.0],
            byte_rates=[3.0, 4.0, 100.0],
        )

    found = alpha_beta.machine(
        "gloo",
        [record(1.0, 2.0, 9.0, used=1.0, flops=9.0), record(3.0, 1.0, 1.0, used=2.0, flops=4.0)],
    )
    assert found.times == {"all_reduce": {1000: 3.0}}  # of 3, 2 and 9
    assert (found.flop_rate, found.byte_rate) == (5.0, 4.0)
    assert found.fits["all_reduce"].busy == pytest.approx(3.0 / 4.0)


# ----------------------------------------------------------------- the tool, on made-up records


def told_of(factor: float, compute: float = 0.02, rounds: int = 5) -> Rounds:
    """Records in which steps take ``factor`` times what compute and planted alpha, beta give."""
    alpha, beta = 50e-6, 1e-9
    ring = alpha_beta.cost("all_reduce", "ring", 2)
    rows = [Call("all_reduce", 2, n) for n in (300_000, 900_000)]
    step = compute + sum(ring.seconds(row.bytes, alpha, beta) for row in rows)
    wobble = [1.0, 1.02, 0.98, 1.01, 0.99][:rounds]
    sides = len(model_check.SIZES)
    group = GroupRecord(
        2,
        [("all_reduce", n, [ring.seconds(n, alpha, beta)] * rounds) for n in model_check.LADDER],
        {"all_reduce": (1.0, 0.8)},
    )
    probe = ProbeRecord({"": group}, flop_rates=[2e10], byte_rates=[1e10])
    alone = [[compute * w] * 2 for w in wobble for _ in range(2)]
    record = RankRounds(
        *(0, [0], 1),
        alone=[AloneSteps(alone, alone)] * sides,
        together=[[[factor * step * w] * 4 for w in wobble]] * sides,
        probes=probe,
    )
    return Rounds([WatchedStep(rows, 200_000_000, [], 1_000_000)] * sides, [record, record])


@pytest.mark.parametrize(("factor", "held"), [(1.0, True), (1.10, True), (1.30, False)])
def test_the_tool_finds_a_planted_disagreement(factor: float, held: bool) -> None:
    given = model_check.runs_of("reference/ddp", "gloo", 2)
    rows, found = model_check.judge(given, told_of(factor))
    assert [model_check.verdict(row.low, row.high) for row in rows] == [
        "holds" if held else "broken"
    ] * len(model_check.SIZES)
    restless = dataclasses.replace(rows[0], low=-0.3, high=0.3)
    assert model_check.verdict(restless.low, restless.high) == "inconclusive"
    for row in rows:
        assert row.error == pytest.approx(factor - 1, abs=0.02)
        assert row.low <= row.error <= row.high
        assert row.card.achieved_over_predicted == pytest.approx(1 / factor, rel=0.02)
        assert row.card.achieved_over_probed is not None
    assert found.fits["all_reduce"].residual < 1e-9
    text = model_check.markdown(given, rows, found)
    assert text.count("| broken |") == (0 if held else len(rows))
    assert math.isclose(found.fits["all_reduce"].beta, 1e-9)


def test_a_size_that_alpha_and_beta_come_from_is_refused() -> None:
    told = told_of(1.0)
    told.watched[0].calls[0] = Call("all_reduce", 2, model_check.LADDER[3])
    with pytest.raises(ValueError, match="probed at its own sizes"):
        model_check.judge(model_check.runs_of("reference/ddp", "gloo", 2), told)


def test_sizes_are_named_after_their_parameters() -> None:
    from shardproof import workloads

    for given in model_check.runs_of("reference/ddp", "gloo", 2):
        made = workloads.make(given.workload, "float32", "working_precision")
        count = sum(math.prod(shape) for shape in made.shapes.values())
        assert given.name == f"{count / 1e6:.2g}m"
    assert len(model_check.SIZES) == 3


def test_probes_lie_between_the_sizes_that_the_ledger_saw() -> None:
    calls = [
        Call("all_reduce", 2, 400),
        Call("all_reduce", 2, 25 * 2**20),
        Call("broadcast", 2, 2**16),
        Call("send", 2, 4),
    ]
    found = step_time.ladder(calls)
    assert found["all_reduce"][0] == 400 and found["all_reduce"][-1] == 25 * 2**20
    assert len(found["all_reduce"]) == step_time.RUNGS
    assert (found["broadcast"][0], found["broadcast"][-1]) == (2**12, 2**16)
    assert found["send"] == [8]


def test_ranks_that_break_are_told() -> None:
    given = model_check.runs_of("reference/ddp", "in_memory", 2)[:1]
    broken = dataclasses.replace(given[0], side=Side("reference/ddp", {"x": 1}))
    with Session() as session, pytest.raises(LaunchFailed, match="x"):
        session.measure_rounds([broken], 2)


def test_a_score_on_real_ranks() -> None:
    """Two processes, a tiny model: figures exist, add up, and survive JSON."""
    run = run_of("reference/ddp", "replicate", 2, **SMALL_BUCKETS)
    run = dataclasses.replace(run, backend="gloo")
    assert pickle.loads(pickle.dumps(run)) == run
    with Session() as session:
        rounds = session.measure_rounds([run], 2)
    (scored,), found = model_check.scores_of([run], rounds)
    made = scored.prediction
    cores = len(rounds.measured[0].cores) or None
    assert made.overlap == step_time.overlap_of("gloo", cores)[0]
    assert made.compute_seconds <= made.low_seconds <= made.step_seconds <= made.high_seconds
    assert made.high_seconds == made.compute_seconds + made.communication_seconds
    assert made.alpha_seconds + made.beta_seconds == pytest.approx(made.communication_seconds)
    assert scored.measured_seconds > 0 and math.isfinite(scored.error)
    found_probes, (step,) = scorecard.digest("gloo", rounds)
    card = scorecard.card(found_probes, step, scored.measured_seconds, run, 3e6, 2e6)
    assert card == dataclasses.replace(scored.card, memory_over_formula=1.5)
    assert scored.card.achieved_over_predicted == pytest.approx(
        made.step_seconds / scored.measured_seconds
    )
    assert found.flop_rate is not None
    compute = curve.Compute.through({6: made.compute_seconds}, 0.0)
    ground = curve.Ground("ddp", run.facts(), compute, found.links, "gloo", scored.calls)
    grown = ground.step_at(1024, "replicate", "weak", 6)
    assert grown.compute_seconds == pytest.approx(compute.seconds(6))
    assert grown.step_seconds > grown.compute_seconds


def test_the_study_says_what_is_wrong_with_its_input() -> None:
    with pytest.raises(InputError, match="reference/ddp"):
        model_check.run("reference/dpd")
    with pytest.raises(InputError, match="at least 2 of each"):
        model_check.run(world=1)
    with pytest.raises(InputError, match="no cost formulas"):
        model_check.run(backend="ucc")
