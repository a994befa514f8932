"""The implementations themselves, on rank threads, against the oracle; and their parts."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from local_ranks import processes, succeed
from torch import Tensor, nn

from shardproof import registry, workloads
from shardproof.backends.disturbances import Disturbances
from shardproof.case import WorkloadSpec
from shardproof.comm import Comm, Mesh
from shardproof.contract import (
    KINDS,
    Batch,
    Implementation,
    Kind,
    MicroBatch,
    OptimizerSpec,
    Point,
    Refused,
)
from shardproof.impls.reference.ddp import DDP, Options
from shardproof.impls.reference.engine.norm import clip_factor, power_sum, total_norm
from shardproof.impls.reference.engine.options import parse_options
from shardproof.impls.reference.engine.state import broadcast_tensors, load_state
from shardproof.impls.reference.parts.buckets import GradientBucket, plan_buckets
from shardproof.oracle import training
from shardproof.strategies import in_tree
from shardproof.workloads import Workload, suggested_groups

pytestmark = pytest.mark.usefixtures("one_thread")

SMALL = {"bucket_bytes": 6_000, "first_bucket_bytes": 1_500}
OPTIONS: dict[str, dict[str, Any]] = {
    "reference/ddp": SMALL,
    "reference/naive_ddp": {},
    "pytorch/ddp": {"bucket_cap_mb": 0.006, "find_unused_parameters": True},
}
MIXED = (
    "unused",
    "frozen",
    "conditional_by_rank",
    "conditional_by_micro_batch",
    "conditional_late_step",
    "conditional_early_step",
    "rebound_buffer",
    "unequal_tokens",
    "scalar",
    "empty",
    "non_contiguous",
)
CLIPPED = OptimizerSpec(weight_decay=0.01, clip_norm=0.05, warmup_steps=2)
BOUND = 1e-12


def workload(*traits: str, name: str = "charnames_gpt", **knobs: Any) -> Workload:
    """A small workload: width 8 (or 4 channels), 2 layers."""
    sizes = {"width": 8, "heads": 2, "seq": 8} if name == "charnames_gpt" else {"channels": 4}
    knobs = {"global_batch": 12, "micro_batches": 2} | knobs
    return workloads.make(WorkloadSpec(name, traits=traits, params=sizes | {"layers": 2}, **knobs))


def drive(
    name: str,
    work: Workload,
    spec: OptimizerSpec,
    rank: int,
    world: int,
    steps: int = 3,
    options: dict[str, Any] | None = None,
    look: Callable[[Implementation], Any] | None = None,
) -> dict[str, Any]:
    """Run one rank; everything that the oracle records, and what ``look`` saw after each step."""
    implementation = registry.load(name)()
    mesh = Mesh({"replicate": world})
    state = work.state() if rank == 0 else None
    chosen = OPTIONS.get(name, {}) if options is None else options
    implementation.setup(work.build_for(rank), state, spec, mesh, chosen)
    record: dict[str, Any] = {"steps": [], "seen": []}
    for step in range(steps):
        seen: dict[str, dict[str, Tensor]] = {}

        def observe(point: Point, seen: dict[str, dict[str, Tensor]] = seen) -> None:
            for kind in KINDS:
                pieces = implementation.local_state(kind)
                assert all(piece.replica == rank for piece in pieces) or name == "plain"
                seen[f"{point} {kind}"] = {p.name: p.tensor.clone() for p in pieces}

        result = implementation.step(work.batch(step, world)[rank], observe)
        assert not implementation.local_state("gradients"), "gradients must be cleared"
        assert result.loss is not None
        record["steps"].append(seen | {"loss": float(result.loss), "norm": result.norm})
        record["seen"].append(look(implementation) if look else None)
    implementation.drain()
    implementation.close()
    return record


def error(actual: Tensor, truth: Tensor) -> float:
    """Relative Frobenius error."""
    assert actual.shape == truth.shape and actual.dtype == truth.dtype
    difference = float((actual.double() - truth.double()).norm())
    return difference / float(truth.double().norm()) if difference else 0.0


def worst(
    records: list[dict[str, Any]], truth: dict[str, Any], spec: OptimizerSpec, buffers: bool = True
) -> float:
    """Largest error of any tensor, rank and step; names must agree exactly."""
    errors = [0.0]
    for step, true in enumerate(truth["steps"]):
        parts = [record["steps"][step] for record in records]
        errors.append(abs(sum(p["loss"] for p in parts) / true["loss"] - 1))
        for rank, part in enumerate(parts):
            wanted = {
                "gradients_final gradients": true["gradients"],
                "after_update parameters": true["parameters"],
                "after_update optimizer": true["optimizer"],
            }
            if spec.clip_norm is not None:
                wanted["after_clip gradients"] = true["clipped"]
                errors.append(error(part["norm"].double(), true["norm"].double()))
            if buffers:
                wanted["after_update buffers"] = true["buffers"][rank]
            for moment, tensors in wanted.items():
                assert set(part[moment]) == set(tensors), f"step {step}, rank {rank}, {moment}"
                errors += [error(part[moment][name], tensors[name]) for name in tensors]
                for name in tensors if "buffers" not in moment else ():
                    assert torch.equal(part[moment][name], parts[0][moment][name]), name
    return max(errors)


# ------------------------------------------------------------------------------ against the oracle


@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize("traits", [(), MIXED], ids=["simple", "mixed"])
@pytest.mark.parametrize("spec", [OptimizerSpec(), CLIPPED], ids=["sgd", "clip"])
@pytest.mark.parametrize("name", ["reference/ddp", "reference/naive_ddp", "pytorch/ddp"])
def test_equals_the_oracle(
    name: str, spec: OptimizerSpec, traits: tuple[str, ...], world: int
) -> None:
    work = workload(*traits)
    rule = registry.load(name).capabilities(OPTIONS[name]).buffers
    truth = training.train(work, spec, world, 3, rule).to_dict()
    records = succeed(lambda rank, size: drive(name, work, spec, rank, size), world)
    assert worst(records, truth, spec) <= BOUND


@pytest.mark.parametrize("traits", [(), ("tied_over_units", "module_twice")])
@pytest.mark.parametrize("micro_batches", [1, 3])
def test_plain_is_the_oracle_bit_for_bit(traits: tuple[str, ...], micro_batches: int) -> None:
    for spec in (OptimizerSpec(), CLIPPED, OptimizerSpec("adamw", lr=0.01, weight_decay=0.1)):
        work = workload(*traits, micro_batches=micro_batches)
        truth = training.train(work, spec, 1, 3).to_dict()
        records = succeed(lambda rank, size: drive("plain", work, spec, rank, size), 1)  # noqa: B023
        assert worst(records, truth, spec) == 0.0


@pytest.mark.parametrize("name", ["reference/ddp", "reference/naive_ddp", "pytorch/ddp"])
def test_two_ranks_equal_the_oracle_bit_for_bit(name: str) -> None:
    work, spec = workload("unequal_tokens", micro_batches=3), OptimizerSpec()
    truth = training.train(work, spec, 2, 3).to_dict()
    records = succeed(lambda rank, size: drive(name, work, spec, rank, size), 2)
    assert worst(records, truth, spec) == 0.0


def test_batch_norm_and_groups_and_unequal_micro_batches() -> None:
    work = workload("two_groups", "unequal_micro_batches", name="digits_cnn")
    spec = OptimizerSpec(weight_decay=0.01, groups=suggested_groups(work.traits))
    for name in ("reference/ddp", "pytorch/ddp"):
        truth = training.train(work, spec, 3, 3).to_dict()
        records = succeed(lambda rank, size: drive(name, work, spec, rank, size), 3)  # noqa: B023
        assert worst(records, truth, spec) <= BOUND


@pytest.mark.parametrize("name", ["reference/ddp", "reference/naive_ddp"])
def test_ranks_without_micro_batches(name: str) -> None:
    work, spec = workload(global_batch=2), CLIPPED
    rule = registry.load(name).capabilities(OPTIONS[name]).buffers
    truth = training.train(work, spec, 4, 3, rule).to_dict()
    records = succeed(lambda rank, size: drive(name, work, spec, rank, size), 4)
    assert worst(records, truth, spec) <= BOUND


def test_late_results_and_poisoned_buffers_change_nothing() -> None:
    work, spec = workload(*MIXED), CLIPPED
    truth = training.train(work, spec, 3, 3).to_dict()
    records = succeed(
        lambda rank, size: drive("reference/ddp", work, spec, rank, size),
        3,
        disturbances=Disturbances(delay=True, poison=True, skew_s=0.002),
    )
    assert worst(records, truth, spec) <= BOUND


def error_over_gloo(rank: int, size: int) -> float:
    """Error of this rank; the loss is checked on threads."""
    work, spec = workload(*MIXED), CLIPPED
    truth = training.train(work, spec, size, 3).to_dict()
    record = drive("reference/ddp", work, spec, rank, size)
    worst = 0.0
    for seen, true in zip(record["steps"], truth["steps"], strict=True):
        for moment, wanted in (
            ("gradients_final gradients", true["gradients"]),
            ("after_update parameters", true["parameters"]),
        ):
            assert set(seen[moment]) == set(wanted)
            worst = max(worst, *(error(seen[moment][n], t) for n, t in wanted.items()))
    return worst


def test_processes_over_gloo(tmp_path: Path) -> None:
    assert max(processes(error_over_gloo, 2, tmp_path, ledgers=False)) <= BOUND


def test_evaluation_and_full_state() -> None:
    work = workload("rebound_buffer", name="digits_cnn")

    def body(rank: int, size: int) -> float:
        share = 0.0
        for name in ("reference/ddp", "pytorch/ddp"):
            it = registry.load(name)()
            state = work.state() if rank == 0 else None
            mesh = Mesh({"replicate": size})
            it.setup(work.build_for(rank), state, OptimizerSpec(), mesh, OPTIONS[name])
            kinds: tuple[Kind, ...] = ("parameters", "buffers")
            before = {kind: it.full_state(kind) for kind in kinds}
            share = float(it.evaluate(work.batch(0, size)[rank]))
            for kind in kinds:
                after = {piece.name: piece.tensor for piece in it.local_state(kind)}
                assert all(torch.equal(after[n], t) for n, t in before[kind].items())
            assert float(it.evaluate(Batch(0, ()))) == 0.0
            it.close()
        return share

    shares = succeed(body, 2)
    micro_batches = [micro for batch in work.batch(0, 2) for micro in batch.micro_batches]
    want = training.evaluator(work)(work.state(), micro_batches)
    assert math.isclose(sum(shares), want, rel_tol=1e-12)


# ------------------------------------------------------------------------- the reference's buckets


def layout(implementation: Any) -> tuple[list[list[str]], list[str]]:
    """Names per bucket, and the late parameters."""
    handle: DDP = implementation.handle
    buckets = [[handle.names[i] for i in bucket.members] for bucket in handle.buckets]
    return buckets, sorted(handle.names[i] for i in handle.late)


def seen_layouts(work: Workload, world: int, steps: int = 3) -> list[Any]:
    """The layout after each step, which must be the same on all ranks."""
    records = succeed(
        lambda rank, size: drive(
            "reference/ddp", work, OptimizerSpec(), rank, size, steps, look=layout
        ),
        world,
    )
    assert all(record["seen"] == records[0]["seen"] for record in records)
    seen: list[Any] = records[0]["seen"]
    return seen


def test_buckets_follow_the_backward_pass() -> None:
    buckets, late = seen_layouts(workload(), 2)[-1]
    flat = [name for bucket in buckets for name in bucket]
    assert late == [] and len(set(flat)) == len(flat)
    assert 2 < len(buckets) < len(flat)
    order = [flat.index(f"blocks.{block}.mlp.up.weight") for block in (1, 0)]
    assert flat.index("head.weight") < order[0] < order[1] < flat.index("embed.token.weight")


def test_unused_parameters_share_a_last_bucket() -> None:
    work = workload("unused")
    for buckets, late in seen_layouts(work, 2):
        assert late == sorted(work.unused) == sorted(buckets[-1])


def test_late_parameters_stay_late_on_all_ranks() -> None:
    seen = seen_layouts(workload("conditional_by_rank", "conditional_late_step"), 2, steps=4)
    branches = [[name for name in late if "conditional" in name] for _, late in seen]
    assert len(branches[0]) == 4 and all(branch == branches[0] for branch in branches)
    assert all(set(late) == set(buckets[-1]) for buckets, late in seen)


def test_new_use_is_agreed_anew() -> None:
    """A branch used in the first micro-batch only is late as well: the last backward counts."""
    buckets, late = seen_layouts(workload("conditional_by_micro_batch"), 2)[-1]
    assert late and set(late) == set(buckets[-1])


def test_frozen_model_takes_its_steps() -> None:
    def body(rank: int, size: int) -> None:
        module = nn.Linear(2, 2).requires_grad_(False)
        handle = DDP(module, Mesh({"replicate": size}).comm("replicate"), Options())
        for _ in range(2):
            handle.before_step(1)
            handle.finish()
            assert handle.norm_parts() == []
            handle.after_step()

    succeed(body, 2)


# ---------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("name", "options", "words"),
    [
        ("reference/ddp", {"bucket_byte": 1}, "did you mean 'bucket_bytes'"),
        ("reference/ddp", {"bucket_bytes": 0}, "at least 1"),
        ("reference/ddp", {"bucket_bytes": 1.5}, "type int, not 1.5"),
        ("reference/ddp", {"bucket_bytes": True}, "type int, not true"),
        ("reference/ddp", {"join": True}, "'join' = True"),
        ("reference/naive_ddp", {"bucket_bytes": 1}, "unknown option 'bucket_bytes'"),
        ("pytorch/ddp", {"find_unused": True}, "did you mean 'find_unused_parameters'"),
        ("pytorch/ddp", {"bucket_cap_mb": math.nan}, "not nan"),
        ("pytorch/ddp", {"bucket_cap_mb": "1"}, "type float or int or null"),
        ("plain", {"x": 1}, "no options"),
    ],
)
def test_bad_options_are_refused(name: str, options: dict[str, Any], words: str) -> None:
    with pytest.raises(Refused, match=words):
        registry.load(name).capabilities(options)


def test_plain_refuses_a_second_rank() -> None:
    with pytest.raises(Refused, match="trains on 1 rank, but this mesh has 2"):
        succeed(lambda rank, n: drive("plain", workload(), OptimizerSpec(), rank, n), 2)


def test_pytorch_refuses_what_ddp_cannot_do() -> None:
    static = {"static_graph": True}

    def run(rank: int, size: int) -> None:
        drive("pytorch/ddp", workload(), OptimizerSpec(), rank, size, options=static)

    with pytest.raises(Refused, match="1 micro-batch, not 2"):
        succeed(run, 2)
    with pytest.raises(Refused, match="this rank has no micro-batch"):
        succeed(
            lambda rank, size: drive(
                "pytorch/ddp", workload(global_batch=1), OptimizerSpec(), rank, size
            ),
            2,
        )


def test_static_graph_with_one_micro_batch() -> None:
    work, spec = workload("unused", micro_batches=1), OptimizerSpec()
    options = {"static_graph": True, "gradient_as_bucket_view": True}
    truth = training.train(work, spec, 2, 3).to_dict()
    records = succeed(
        lambda rank, size: drive("pytorch/ddp", work, spec, rank, size, options=options), 2
    )
    assert worst(records, truth, spec) <= BOUND


@pytest.mark.parametrize("name", ["plain", "reference/ddp", "reference/naive_ddp", "pytorch/ddp"])
def test_claims_cover_the_profile(name: str) -> None:
    implementation = registry.load(name)
    capabilities = implementation.capabilities({})
    assert in_tree()[implementation.strategy].profile <= capabilities.features
    assert not set(capabilities.declines) - {*workloads.TRAITS, "loss_scale"}


@pytest.mark.parametrize("name", ["reference/ddp", "pytorch/ddp"])
def test_buffers_may_stay_local(name: str) -> None:
    options = {"broadcast_buffers": False}
    local = registry.load(name).capabilities(options)
    assert local.buffers == "per_rank" and "buffer_broadcast" not in local.features
    work, spec = workload(name="digits_cnn"), OptimizerSpec()
    truth = training.train(work, spec, 2, 3, "per_rank").to_dict()
    records = succeed(lambda rank, size: drive(name, work, spec, rank, size, options=options), 2)
    assert worst(records, truth, spec) <= BOUND


# ------------------------------------------------------------------------------------------- parts


@settings(max_examples=60)
@given(
    sizes=st.lists(st.tuples(st.integers(0, 9), st.booleans()), max_size=14),
    first=st.integers(1, 60),
    limit=st.integers(1, 80),
    data=st.data(),
)
def test_buckets_hold_every_parameter_once(
    sizes: list[tuple[int, bool]], first: int, limit: int, data: st.DataObject
) -> None:
    wide = {True: torch.float64, False: torch.float32}
    parameters = [torch.zeros(size, dtype=wide[double]) for size, double in sizes]
    order = data.draw(st.permutations(range(len(parameters))))
    plan = plan_buckets(order, parameters, first, limit)
    assert sorted(index for bucket in plan for index in bucket) == list(range(len(parameters)))
    place = {index: position for position, index in enumerate(order)}
    assert [place[b[-1]] for b in plan] == sorted(place[b[-1]] for b in plan)
    for bucket in plan:
        assert len({parameters[index].dtype for index in bucket}) == 1
        assert [place[index] for index in bucket] == sorted(place[index] for index in bucket)
        size = sum(parameters[index].nbytes for index in bucket)
        assert len(bucket) == 1 or size <= max(first, limit)
    whole = plan_buckets(order, parameters, None, None)
    assert len(whole) == len({parameter.dtype for parameter in parameters})


def test_the_first_bucket_has_its_own_limit() -> None:
    parameters = [torch.zeros(4, dtype=torch.float64)] * 6
    assert plan_buckets(range(6), parameters, 32, 64) == [[0], [1, 2], [3, 4], [5]]
    assert plan_buckets(range(6), parameters, 64, 8) == [[0, 1], [2], [3], [4], [5]]


def test_packing() -> None:
    parameters = [torch.zeros(2, 2), torch.zeros(()), torch.zeros(0)]
    bucket = GradientBucket([1, 0, 2], ["a", "b", "c"], parameters)
    bucket.flat.fill_(9.0)
    bucket.pack([None, torch.arange(4.0).view(2, 2).t(), None])
    assert bucket.flat.tolist() == [0.0, 0.0, 2.0, 1.0, 3.0]
    assert bucket.views[0].tolist() == [[0.0, 2.0], [1.0, 3.0]]


def test_norm_and_clip_are_torchs() -> None:
    generator = torch.Generator().manual_seed(0)
    gradients = [torch.randn(7, 3, generator=generator, dtype=torch.float64) for _ in range(5)]

    def no_comm(*axes: str) -> Comm:
        raise AssertionError(f"local parts need no communication along {axes}")

    norm = total_norm([(power_sum(g), ()) for g in gradients], no_comm)
    parameters = [nn.Parameter(torch.zeros_like(g)) for g in gradients]
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient.clone()
    want = nn.utils.clip_grad_norm_(parameters, 0.5)
    assert math.isclose(float(norm), float(want), rel_tol=1e-15)
    factor = clip_factor(norm, 0.5)
    for parameter, gradient in zip(parameters, gradients, strict=True):
        torch.testing.assert_close(gradient * factor, parameter.grad, rtol=1e-15, atol=0.0)
    assert float(clip_factor(norm, 1e9)) == 1.0


def test_norm_adds_parts_over_their_axes() -> None:
    def body(rank: int, size: int) -> float:
        mesh = Mesh({"replicate": size})
        # Roots of squares: every sum is exact on any CPU.
        own = power_sum(torch.full((4,), float(rank + 1)))
        whole = power_sum(torch.tensor([5.0]))
        return float(total_norm([(own, ("replicate",)), (whole, ())], mesh.comm))

    found = succeed(body, 3)
    assert len(set(found)) == 1
    # The last root is taken as a power, which some kernels round to the neighbour.
    assert abs(found[0] - math.sqrt(4 * (1 + 4 + 9) + 25)) <= math.ulp(9.0)


def test_norm_of_small_fp32_gradients() -> None:
    tiny = torch.full((4,), 1e-30)
    assert math.isclose(float(total_norm([(power_sum(tiny), ())], None)), 2e-30, rel_tol=1e-6)  # type: ignore[arg-type]


def test_broadcast_of_mixed_tensors() -> None:
    def body(rank: int, size: int) -> bool:
        tensors = [
            torch.full((2, 3), rank + 0.5, dtype=torch.float64).t(),
            torch.tensor(rank),
            torch.zeros(0),
            torch.tensor([rank == 1, True]),
            torch.full((3,), float(rank)),
        ]
        broadcast_tensors(tensors, Mesh({"replicate": size}).comm("replicate"), root=1)
        broadcast_tensors([], Mesh({"replicate": size}).comm("replicate"))
        right = [torch.full((3, 2), 1.5, dtype=torch.float64), torch.tensor(1), torch.zeros(0)]
        right += [torch.tensor([True, True]), torch.ones(3)]
        return all(torch.equal(a, b) for a, b in zip(tensors, right, strict=True))

    assert succeed(body, 2) == [True, True]


def test_state_must_fit() -> None:
    module = nn.Linear(2, 1)
    with pytest.raises(ValueError, match=r"missing \['bias'\], unexpected \['bais'\]"):
        load_state(module, {"weight": torch.zeros(1, 2), "bais": torch.zeros(1)})
    with pytest.raises(ValueError, match="'weight' has shape"):
        load_state(module, {"weight": torch.zeros(2, 1), "bias": torch.zeros(1)})


def test_options_become_a_dataclass() -> None:
    assert parse_options(Options, {"bucket_bytes": 5}) == Options(bucket_bytes=5)


def test_weights_are_taken_as_they_are() -> None:
    """Scaling every weight scales the gradient: nothing is normalised on the way."""

    def body(rank: int, size: int) -> Tensor:
        work = workload()
        gradients: list[Tensor] = []
        for scale in (1.0, 4.0):
            it = registry.load("reference/ddp")()
            state = work.state() if rank == 0 else None
            it.setup(work.build_for(rank), state, OptimizerSpec(), Mesh({"replicate": size}), {})
            windows = tuple(
                tuple(
                    MicroBatch(m.inputs, m.targets, m.weights * scale, m.sample_ids) for m in window
                )
                for window in work.batch(0, size)[rank].windows
            )

            def observe(point: Point, it: Implementation = it) -> None:
                if point == "gradients_final":
                    gradients.append(it.local_state("gradients")[0].tensor.clone())

            it.step(Batch(0, windows), observe)
        return gradients[1] / gradients[0]

    for ratio in succeed(body, 2):
        assert ratio[ratio.isfinite()].eq(4.0).all()
