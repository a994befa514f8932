"""Axes together: the grid, what lies where, the norm over every axis, ties, groups of one rank."""

from __future__ import annotations

import gc
import math
import weakref
from fractions import Fraction
from typing import Any

import pytest
import torch
from local_ranks import succeed, threads
from made_case import made_case
from pieces import assembled, rows, whole_tensors

from shardproof import workloads
from shardproof.case import Case, WorkloadSpec
from shardproof.cases.runner import run_cases
from shardproof.checks.results import CaseResult
from shardproof.comm import Mesh
from shardproof.contract import KINDS, OptimizerSpec, Piece, Point, Refused
from shardproof.costs import Bound, CostModel, NoCostModel, cost_model_class
from shardproof.costs.expression import facts_of
from shardproof.impls.reference.engine.options import parse_options
from shardproof.impls.reference.hybrid import Options, ReferenceHybrid
from shardproof.impls.reference.hybrid.experts import Choices, Fold
from shardproof.impls.reference.pipeline.stages import Stages
from shardproof.oracle import training
from shardproof.workloads import Workload

pytestmark = pytest.mark.usefixtures("one_thread")

SGD, CLIPPED = OptimizerSpec(), OptimizerSpec(clip_norm=0.05)
BOUND = 1e-12
SIZES = {"width": 12, "heads": 6, "seq": 6, "vocab": 97}
Axes = dict[str, int]


def work(*traits: str, layers: int = 2, experts: int = 0, **values: Any) -> Workload:
    values = {"global_batch": 12, "micro_batches": 2} | values
    params = SIZES | {"layers": layers, "experts": experts}
    return workloads.make(WorkloadSpec("charnames_gpt", traits, **values, params=params))


def make(
    workload: Workload, rank: int, axes: Axes, spec: OptimizerSpec = SGD, **options: Any
) -> ReferenceHybrid:
    """The system on this rank, set up; rank 0 alone has the state."""
    system = ReferenceHybrid()
    state = workload.state() if rank == 0 else None
    mesh = Mesh(
        axes, joint=(("replicate", "shard"),) if {"replicate", "shard"} <= set(axes) else ()
    )
    system.setup(workload.build_for(rank), state, spec, mesh, options)
    return system


def share(workload: Workload, step: int, system: ReferenceHybrid) -> Any:
    """The batch of this rank's data coordinate."""
    at, size = system.mesh.coordinate, system.mesh.size
    number = at.get("replicate", 0) * size("shard") + at.get("shard", 0)
    return workload.batch(step, size("replicate", "shard"))[number]


def train(
    workload: Workload, axes: Axes, spec: OptimizerSpec, steps: int = 2, **options: Any
) -> list[list[dict[str, Any]]]:
    """What every rank held in every step."""

    def body(rank: int, world: int) -> list[dict[str, Any]]:
        system = make(workload, rank, axes, spec, **options)
        told = []
        for step in range(steps):
            seen: dict[str, Any] = {}

            def observe(point: Point, seen: dict[str, Any] = seen) -> None:
                kind = "parameters" if point == "after_update" else "gradients"
                seen[point] = rows(system.local_state(kind))  # type: ignore[arg-type]

            result = system.step(share(workload, step, system), observe)
            told.append(seen | {"loss": result.loss, "norm": result.norm})
        system.close()
        return told

    return succeed(body, math.prod(axes.values()))


def worst(ranks: list[list[dict[str, Any]]], truth: dict[str, Any]) -> float:
    """Largest relative error of norms, gradients and parameters; copies must be equal."""
    errors = [0.0]
    for step, true in enumerate(truth["steps"]):
        for point, wanted in (
            ("gradients_final", true["gradients"]),
            ("after_update", true["parameters"]),
        ):
            held = {rank: told[step][point] for rank, told in enumerate(ranks)}
            for name, whole in whole_tensors(held, wanted).items():
                scale = max(float(wanted[name].norm()), 1e-6)
                errors.append(float((whole - wanted[name]).norm()) / scale)
        norms = {float(told[step]["norm"]) for told in ranks if told[step]["norm"] is not None}
        if norms:
            (norm,) = norms  # the same bits on every rank
            errors.append(abs(norm / float(true["norm"]) - 1))
    return max(errors)


# ------------------------------------------------------------------------------ the rank grid


def test_the_tensor_axis_is_innermost_and_every_group_is_an_index_into_the_grid() -> None:
    axes = {"pipe": 2, "replicate": 1, "shard": 3, "tensor": 2}

    def body(rank: int, world: int) -> dict[str, Any]:
        system = make(work(), rank, axes, data="zero1")
        at = system.mesh.coordinate
        number = ((at["pipe"] * 1 + at["replicate"]) * 3 + at["shard"]) * 2 + at["tensor"]
        groups = {axis: sorted(system.mesh.comm(axis).all_gather_object(rank)) for axis in (*axes,)}
        held = {piece.name: piece.slices for piece in system.local_state("parameters")}
        return {"number": number, "groups": groups, "held": held, "at": at}

    found = succeed(body, 12)
    assert [told["number"] for told in found] == list(range(12))
    assert found[7]["groups"] == {
        "pipe": [1, 7],
        "replicate": [7],
        "shard": [7, 9, 11],
        "tensor": [6, 7],
    }
    for told in found:
        stage, part = told["at"]["pipe"], told["at"]["tensor"]
        assert ("embed.token.weight" in told["held"]) == (stage == 0)
        assert ("head.weight" in told["held"]) == (stage == 1)
        up = next(name for name in told["held"] if name.endswith("mlp.up.weight"))
        assert up == f"blocks.{stage}.mlp.up.weight"
        assert told["held"][up][0] == (24 * part, 24 * (part + 1))


def test_a_mesh_that_does_not_match_the_world() -> None:
    _, errors = threads(lambda rank, world: make(work(), rank, {"pipe": 2, "tensor": 2}), 3)
    for error in errors:
        assert str(error) == "mesh pipe=2 x tensor=2 has 4 ranks, but the group has 3"


def test_shards_without_replicas_say_what_would_do_on_every_rank() -> None:
    def body(rank: int, world: int) -> str:
        with pytest.raises(Refused) as error:
            make(work(), rank, {"replicate": 2, "shard": 1}, data="zero3")
        return str(error.value)

    for told in succeed(body, 2):
        assert "option 'data' = 'zero3'" in told
        assert "replicate = 2: set replicate to 1, or data to 'fsdp'" in told


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"data": "zero4"}, "did you mean 'zero3'"),
        (
            {"all_reduce": "ring"},
            "unknown option 'all_reduce' next to 'data': it belongs to the strategy on the data "
            "axes (ddp, fsdp); write data_options: {all_reduce: ...}",
        ),
        ({"shcedule": "1f1b"}, "unknown option 'shcedule'; did you mean 'schedule'"),
        ({"data_options": {"bucket_byte": 1}}, "did you mean 'data_options.bucket_bytes'"),
        ({"data_options": {"checkpoint": {}}}, "move 'checkpoint' out of 'data_options'"),
        ({"checkpoint": {"keep": 0}}, "'checkpoint.keep' must be at least 1, not 0"),
        ({"checkpoint": {"format": "ful"}}, "did you mean 'full'"),
        ({"data": "ddp", "offload": "optimizer"}, "'offload' does not exist for 'data' = 'ddp'"),
        ({"schedule": "zb_v", "recompute_every": 1}, "this schedule computes weight gradients"),
    ],
)
def test_options_are_refused_in_words(options: dict[str, Any], text: str) -> None:
    with pytest.raises(Refused) as error:
        ReferenceHybrid.capabilities(options)
    assert text in str(error.value)


def test_one_policy_of_precision_for_all_axes() -> None:
    chosen = parse_options(Options, {"data": "zero2", "precision": {"reduce": "float32"}})
    assert chosen.strategy_options.precision == chosen.precision
    assert chosen.on_layers.sum_each_backward
    assert ReferenceHybrid.schedule({}, 1, 4) is None
    made = ReferenceHybrid.schedule({"schedule": "gpipe"}, 2, 4)
    assert made is not None and made.name == "gpipe"


# ------------------------------------------------- experts folded over the data axes


def test_expert_groups_are_neighbours_on_shard_x_context() -> None:
    axes = {"shard": 4, "context": 2, "tensor": 1}

    def body(rank: int, world: int) -> tuple[list[int], list[int]]:
        joint = (("shard", "context"),)
        made = Fold(Mesh(axes, joint=joint), Choices(ranks=4))
        groups = made.across, made.comms["replicate"]
        across, alike = (sorted(comm.all_gather_object(rank)) for comm in groups)
        return across, alike

    found = succeed(body, 8)
    assert [across for across, _ in found] == [[0, 1, 2, 3]] * 4 + [[4, 5, 6, 7]] * 4
    assert [alike for _, alike in found] == [[r % 4, r % 4 + 4] for r in range(8)]


def test_ranks_of_an_expert_group_need_as_many_micro_batches() -> None:
    workload = work(global_batch=3, experts=4)
    options = {"experts": {"ranks": 2}}
    assert "unequal_micro_batches" in ReferenceHybrid.capabilities(options).declines

    def body(rank: int, world: int) -> None:
        system = make(workload, rank, {"shard": 2}, experts={"ranks": 2})
        system.step(share(workload, 0, system), lambda point: None)

    _, errors = threads(body, 2)
    for error in errors:
        assert isinstance(error, Refused)
        assert "some ranks have 1 and others 2; give all data-parallel ranks the same" in str(error)


@pytest.mark.parametrize(
    ("axes", "options", "text"),
    [
        (
            {"shard": 2},
            {"experts": {"ranks": 3}},
            "axes 'shard' and 'context', which is 2 in this mesh",
        ),
        (
            {"replicate": 2},
            {"experts": {"ranks": 2}},
            "axes 'shard' and 'context', which is 1 in this mesh",
        ),
        (
            {"shard": 2},
            {"data": "fsdp", "experts": {"ranks": 2}, "offload": "optimizer"},
            "leave 'offload' out",
        ),
        (
            {"shard": 2},
            {"experts": {"ranks": 2}, "data_options": {"compress": {"method": "sign"}}},
            "gradients of experts are not compressed",
        ),
    ],
)
def test_what_does_not_suit_folded_experts_is_refused(
    axes: Axes, options: dict[str, Any], text: str
) -> None:
    workload = work(experts=4)
    _, errors = threads(lambda rank, world: make(workload, rank, axes, **options), 2)
    for error in errors:
        assert isinstance(error, Refused), error
        assert text in str(error)


# ------------------------------------------------------------------- numbers on any mesh


ODD = ("tied_over_units", "frozen", "two_groups", "unequal_tokens", "prime_sized")


@pytest.mark.parametrize(
    ("axes", "options"),
    [
        ({"shard": 2, "tensor": 3}, {"data": "zero2", "sequence_parallel": True}),
        ({"pipe": 2, "shard": 3}, {"data": "zero3"}),
        ({"pipe": 2, "replicate": 2, "tensor": 2}, {"schedule": "zb_h1"}),
        ({"pipe": 2, "shard": 2, "tensor": 2}, {"data": "fsdp", "sequence_parallel": True}),
        (
            {"replicate": 2, "shard": 2, "tensor": 2},
            {"data": "fsdp", "data_options": {"sharding_strategy": "HYBRID_SHARD"}},
        ),
        ({"pipe": 2, "replicate": 1, "shard": 1, "tensor": 1}, {"schedule": "zb_v"}),
        ({"pipe": 1, "replicate": 1, "shard": 3, "tensor": 1}, {"data": "zero1"}),
        ({"pipe": 1, "replicate": 3, "shard": 1, "tensor": 1}, {}),
        ({"pipe": 1, "replicate": 1, "shard": 1, "tensor": 3}, {"data": "zero3"}),
    ],
    ids=lambda value: "x".join(f"{k}{n}" for k, n in value.items()) if "data" not in value else "",
)
def test_equals_the_oracle_and_the_norm_counts_every_element_once(
    axes: Axes, options: dict[str, Any]
) -> None:
    workload = work(*ODD, layers=4 if options.get("schedule") == "zb_v" else 2)
    shares = axes.get("replicate", 1) * axes.get("shard", 1)
    truth = training.train(workload, CLIPPED, shares, 2).to_dict()
    assert float(truth["steps"][0]["norm"]) > 0.05  # clipping is at work
    assert worst(train(workload, axes, CLIPPED, **options), truth) <= BOUND


@pytest.mark.parametrize("data", ["ddp", "zero1", "zero2", "zero3", "fsdp"])
def test_one_rank_on_every_axis_is_ordinary_training_bit_for_bit(data: str) -> None:
    workload = work("tied_over_units", "frozen")
    truth = training.train(workload, SGD, 1, 2).to_dict()
    axes = {"pipe": 1, "replicate": 1, "shard": 1, "tensor": 1}
    assert worst(train(workload, axes, SGD, data=data), truth) == 0.0


def test_the_norm_is_reduced_along_every_axis_of_more_than_one_rank() -> None:
    axes = {"pipe": 2, "replicate": 1, "shard": 2, "tensor": 2}
    workload = work("tied_over_units")

    def body(rank: int, world: int) -> tuple[float, float]:
        system = make(workload, rank, axes, CLIPPED, data="zero1")
        own: list[float] = []

        def observe(point: Point) -> None:
            if point == "gradients_final":
                held = system.local_state("gradients")
                own.append(sum(float((p.tensor**2).sum()) for p in held if p.replica == 0))

        result = system.step(share(workload, 0, system), observe)
        assert result.norm is not None
        return own[0], float(result.norm)

    found = succeed(body, 8)
    (norm,) = {norm for _, norm in found}
    assert norm == pytest.approx(math.sqrt(sum(own for own, _ in found)), rel=1e-13)
    assert all(0 < own < norm**2 for own, _ in found)


# ---------------------------------------------------------------------------------------- memory


def test_other_stages_are_let_go_without_a_garbage_collector() -> None:
    def body(rank: int, world: int) -> dict[str, bool]:
        workload = work()
        build, state = workload.build_for(rank), workload.state() if rank == 0 else None
        seen: list[tuple[str, weakref.ref[torch.nn.Module]]] = []

        class Watched:
            """The build, with weak references to what it built."""

            def __call__(self, device: str = "cpu") -> torch.nn.Module:
                module = build(device)
                seen.extend((name, weakref.ref(part)) for name, part in module.named_modules())
                return module

            def __getattr__(self, name: str) -> Any:
                return getattr(build, name)

        system = ReferenceHybrid()
        mesh = Mesh({"pipe": 2, "tensor": 2})
        system.setup(Watched(), state, SGD, mesh, {"sequence_parallel": True})  # type: ignore[arg-type]
        return {name: part() is not None for name, part in seen}

    succeed(body, 4)  # what torch does at first use only may keep the frames of its caller
    gc.disable()
    try:
        found = succeed(body, 4)
    finally:
        gc.enable()
    for rank, alive in enumerate(found):
        for block in (0, 1):
            names = [name for name in alive if name.startswith(f"blocks.{block}.")]
            assert {alive[name] for name in names} == {block == rank // 2}


def promised(axes: Axes, **options: Any) -> CostModel:
    """What is promised of the model of :func:`work`, which is built in fp64."""
    spec = WorkloadSpec("charnames_gpt", params=SIZES | {"layers": 2}, global_batch=12)
    case = made_case(
        "reference/hybrid",
        axes,
        workload=spec,
        optimizer=OptimizerSpec("adamw"),
        checks=("memory",),
        options=options,
    )
    return cost_model_class("hybrid")(facts_of(case).model_facts)


def test_bytes_of_a_rank_are_those_counted_by_hand() -> None:
    """Two stages, two shards, two parts of every layer; 97 names in the vocabulary."""
    axes = {"pipe": 2, "shard": 2, "tensor": 2}
    block = 4 * 12 + 18 * (12 + 1) + (12 * 6 + 12) + 24 * (12 + 1) + (12 * 24 + 12)
    first, last = block + 6 * 12, block + 2 * 12  # positions; the norm before the head
    elements = [first + 49 * 12, first + 48 * 12] * 2 + [last + 49 * 13, last + 48 * 13] * 2
    whole, shards = promised(axes, data="zero1"), promised(axes, data="zero3")
    for rank, own in enumerate(elements):
        padded = 8 * (own + own % 2)
        held = whole.resident(rank, 0, -1)
        assert sum(whole.local(rank).parameters.values()) == own
        assert held == {"parameters": padded, "masters": 0, "gradients": padded} | {
            "optimizer_state": 0
        }
        assert shards.resident(rank, 0, -1)["parameters"] == padded // 2
        peak = padded // 2 + padded  # a shard, and all stages of the rank gathered
        assert shards.peaks(rank, "forward", 0)["parameters"] == Bound(peak, peak)
        assert not whole.peaks(rank, "forward", 0)
        assert (whole.unclassified_limit(rank, 0) or 0) < 400  # not even one layer
    counters = sum(len(whole.local(rank).optimizer) for rank in (0, 2)) * 4
    state = sum(whole.resident(rank, 0, 0)["optimizer_state"] for rank in (0, 2))
    assert state == 2 * 8 * elements[0] + counters
    apart = whole.by_layout(0)
    assert sum(apart["replicated"].values()) == 4 * 12 + 2 * 12 + 6 * 12
    assert set(apart["split"]) | set(apart["replicated"]) == set(whole.local(0).parameters)


# ---------------------------------------------------------------------------------- tied weights


def test_tied_weights_are_a_unit_of_their_own_reduced_once_a_step() -> None:
    axes = {"pipe": 2, "shard": 2, "tensor": 2}
    workload = work("tied_over_units", windows=2)
    table = "embed.token.weight"

    def body(rank: int, world: int) -> tuple[list[str], list[bool], list[str]]:
        system = make(workload, rank, axes, data="zero1")
        stages = system.handle
        assert isinstance(stages, Stages)
        (tied,) = stages.tied
        apart = [n for s in stages.stages.values() for n, _ in s.handle.module.named_parameters()]
        told: list[bool] = []
        accumulate = tied.handle.accumulate

        def note(is_last: bool) -> None:
            told.append(is_last)
            accumulate(is_last)

        tied.handle.accumulate = note  # type: ignore[method-assign]
        system.step(share(workload, 0, system), lambda point: None)
        return [name for name, _ in tied.handle.module.named_parameters()], told, apart

    for own, told, apart in succeed(body, 8):
        assert own == [table]
        assert told == [True]  # of two windows of two micro-batches
        assert table not in apart and "head.weight" not in apart


def test_tied_shards_lie_alike_on_both_ends() -> None:
    """Stages of unequal size: a tied tensor's shards do not depend on what lies beside it."""
    workload = work("tied_over_units", layers=3)
    told = train(workload, {"pipe": 2, "shard": 3}, SGD, steps=1, data="zero3")
    places = [
        [
            row["flat_range"]
            for row in rank[0]["after_update"]
            if row["name"] == "embed.token.weight"
        ]
        for rank in told
    ]
    assert places[:3] == places[3:]
    assert all(len(place) == 1 for place in places)
    assert worst(told, {"steps": training.train(workload, SGD, 3, 1).to_dict()["steps"]}) <= BOUND


# --------------------------------------------------------------------------------------- the state


@pytest.mark.parametrize(
    ("axes", "options"),
    [
        ({"pipe": 2, "shard": 2, "tensor": 2}, {"data": "zero3"}),
        ({"shard": 2, "tensor": 3}, {"data": "zero1", "sequence_parallel": True}),
    ],
)
def test_state_is_gathered_under_its_names_and_a_fresh_instance_goes_on(
    axes: Axes, options: dict[str, Any]
) -> None:
    workload, spec = work("tied_over_units", "rebound_buffer"), OptimizerSpec("adamw", lr=1e-2)

    def body(rank: int, world: int) -> dict[str, torch.Tensor]:
        first = make(workload, rank, axes, spec, **options)
        for step in range(2):
            first.step(share(workload, step, first), lambda point: None)
        second = make(workload, rank, axes, spec, **options)
        for kind in KINDS:
            if kind != "gradients":
                held = first.local_state(kind)
                copies = [Piece(**{**vars(p), "tensor": p.tensor.clone()}) for p in held]
                second.load_pieces(kind, copies)
        for system in (first, second):
            system.step(share(workload, 2, system), lambda point: None)
        for kind in KINDS:
            pairs = zip(first.local_state(kind), second.local_state(kind), strict=True)
            for one, two in pairs:
                assert (one.name, one.slices, one.flat_range) == (
                    *(two.name, two.slices, two.flat_range),
                )
                assert torch.equal(one.tensor, two.tensor), one.name
        whole = first.full_state("parameters")
        state = assembled({0: rows(first.local_state("parameters"))})
        assert set(state.tensors) <= set(whole)
        return whole

    found = succeed(body, math.prod(axes.values()))
    model = workload.build_for(0)("meta")
    assert set(found[0]) == {name for name, _ in model.named_parameters()}
    for told in found[1:]:
        assert all(torch.equal(told[name], found[0][name]) for name in found[0])


def test_evaluation_is_known_where_the_last_stage_lies() -> None:
    axes = {"pipe": 2, "shard": 1, "tensor": 2}
    workload = work()
    batch = workload.batch(0, 1)[0]

    def body(rank: int, world: int) -> float | None:
        system = make(workload, rank, axes, data="zero3")
        found = system.evaluate(batch)
        return None if found is None else float(found)

    told = succeed(body, 4)
    module = workload.build_for(0)()
    workload.load(module)
    module.eval()
    build = workload.build_for(0)
    with torch.no_grad():
        true = sum(float(build.loss(module(m.inputs), m)) for m in batch.micro_batches)
    assert told[:2] == [None, None]
    assert told[2] == told[3] == pytest.approx(true, rel=1e-13)


# --------------------------------------------------------------------------------------- promises


def gathered(name: str, *traits: str, strategy: str = "hybrid", **options: Any) -> Fraction:
    """Bytes that a step's gathers along the tensor axis send, for two stages of two ranks."""
    spec = WorkloadSpec(name, traits=traits, global_batch=8, micro_batches=2, params={"layers": 4})
    case = Case(
        id="",
        scenario="",
        implementation="reference/hybrid",
        backend="in_memory",
        mesh={"pipe": 2, "tensor": 2 if name == "charnames_gpt" else 1},
        workload=spec,
        optimizer=OptimizerSpec(),
        lane="fp64",
        checks=("traffic",),
        options=options,
    )
    flows = cost_model_class(strategy)(facts_of(case).model_facts).flows()
    found = (flow.bytes for flow in flows if flow.axis == "tensor")
    return sum(found, start=Fraction(0))


def test_backwards_in_two_parts_gather_again_for_weights_that_are_trained() -> None:
    """Four layers of two row-parallel products each, of which one may be frozen."""
    hidden = 8 * 16 * 32 * 8  # each of two ranks sends half
    for traits, products in (((), 8), (("frozen",), 7)):
        once, twice = (
            gathered("charnames_gpt", *traits, schedule=schedule, sequence_parallel=True)
            for schedule in ("1f1b", "zb_h1")
        )
        assert twice - once == products * hidden
    once, twice = (
        gathered("charnames_gpt", strategy="torch_hybrid", schedule=name, sequence_parallel=True)
        for name in ("gpipe", "zb_v")
    )
    assert once == twice


def test_models_without_positions_have_promises_where_no_layer_is_split() -> None:
    assert gathered("digits_cnn", schedule="gpipe", sequence_parallel=True) == 0


def test_sums_in_backward_are_promised_where_every_micro_batch_makes_them() -> None:
    with pytest.raises(NoCostModel, match="not every backward pass uses"):
        gathered("charnames_gpt", "conditional_by_rank", sequence_parallel=True)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zb_h1"])
@pytest.mark.parametrize("stages", [2, 3])
def test_what_one_rank_does_not_use_holds_no_other_up(stages: int, schedule: str) -> None:
    """A bucket that stays unsent until the next backward, and with it messages, is a deadlock."""
    found: list[CaseResult] = []
    case = made_case(
        "reference/hybrid",
        {"pipe": stages, "shard": 2},
        options={"data": "zero2", "data_options": {"bucket_bytes": 1024}, "schedule": schedule},
        workload=WorkloadSpec(
            "charnames_gpt",
            traits=("conditional_by_rank",),
            global_batch=12,
            micro_batches=4,
            windows=2,
            params={"layers": 3, "width": 16, "heads": 2, "seq": 8},
        ),
        steps=2,
        checks=("equivalence", "traffic", "memory"),
    )
    run_cases([case], 1, found.append)
    assert [(result.verdict, result.reason) for result in found] == [("pass", "")]


@pytest.mark.parametrize("sums", ["backend", "binomial_tree"])
def test_parameters_gathered_by_sending_are_no_reduction(sums: str) -> None:
    found: list[CaseResult] = []
    options = {
        "sharding_strategy": "HYBRID_SHARD",
        "accumulate_without_communication": True,
        "reduce_scatter": "ring",
        "all_gather": "ring",
        "all_reduce": sums,
    }
    case = made_case(
        "reference/fsdp",
        {"replicate": 2, "shard": 2},
        options=options,
        workload=WorkloadSpec("charnames_gpt", micro_batches=2, params={"layers": 1, "width": 16}),
        steps=2,
        checks=("active", "traffic"),
    )
    run_cases([case], 1, found.append)
    assert [result.verdict for result in found] == ["pass"], found[0].reason


@pytest.mark.parametrize("data", ["ddp", "zero1"])
def test_a_coordinate_without_work_follows_stages_whose_backward_ends_in_its_own_order(
    data: str,
) -> None:
    """The last stage of rank 0 ends last: in the orders of generators it ends first."""
    orders = [
        ["F0@0", "F0@3", "B0@3", "B0@0", "W0@0", "W0@3"],
        ["F0@1", "F0@2", "B0@2", "B0@1", "W0@1", "W0@2"],
    ]
    found: list[CaseResult] = []
    case = made_case(
        "reference/hybrid",
        {"pipe": 2, "shard": 2} if data == "zero1" else {"pipe": 2, "replicate": 2},
        options={"data": data, "schedule": {"orders": orders}},
        workload=WorkloadSpec(
            "charnames_gpt",
            ("rotating_shares",),
            global_batch=1,
            micro_batches=1,
            params={"layers": 4, "width": 16, "seq": 8},
        ),
        steps=3,
        checks=("equivalence", "traffic"),
    )
    run_cases([case], 1, found.append)
    assert [(result.verdict, result.reason) for result in found] == [("pass", "")]
