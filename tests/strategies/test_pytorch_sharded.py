"""PyTorch's own sharded systems: what they refuse, what their pieces cover, what a fresh one takes
over, and torch's private parts that the adapters stand on.
"""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import own_models
import pytest
import torch
from local_ranks import succeed
from pieces import complete, held_in_a_step
from torch.amp import GradScaler
from torch.distributed.fsdp import FSDPModule

from shardproof import registry, workloads
from shardproof.case import WorkloadSpec
from shardproof.comm import Mesh
from shardproof.commands.prove import prove
from shardproof.contract import (
    KINDS,
    Implementation,
    OptimizerSpec,
    Piece,
    Refused,
    ScalerSpec,
)
from shardproof.impls.pytorch import fsdp2
from shardproof.registry.declaration import Declaration
from shardproof.workloads import Workload

pytestmark = pytest.mark.usefixtures("one_thread")

FSDP1, FSDP2 = "pytorch/fsdp1", "pytorch/fsdp2"
ZRO = "pytorch/zero_redundancy_optimizer"
ADAMW = OptimizerSpec("adamw", lr=1e-2, clip_norm=0.05)


def workload(*traits: str) -> Workload:
    """A GPT of width 8 and 2 layers."""
    sizes = {"width": 8, "heads": 2, "seq": 8, "layers": 2}
    spec = WorkloadSpec(
        "charnames_gpt", traits=traits, params=sizes, global_batch=12, micro_batches=2
    )
    return workloads.make(spec)


def make(
    name: str, work: Workload, rank: int, axes: dict[str, int], spec: OptimizerSpec, **options: Any
) -> Implementation:
    """The system on this rank, set up; rank 0 alone has the state."""
    system = registry.load(name)()
    state = work.state() if rank == 0 else None
    system.setup(work.build_for(rank), state, spec, Mesh(axes, joint=[tuple(axes)]), options)
    return system


def copies(pieces: list[Piece]) -> list[Piece]:
    """Pieces that stay as they are."""
    return [Piece(**{**vars(piece), "tensor": piece.tensor.clone()}) for piece in pieces]


# ------------------------------------------------------------------------------------ refusals

HYBRID = {"sharding_strategy": "HYBRID_SHARD"}
REFUSED = [
    (FSDP2, {"offload": "optimizer"}, "can offload only parameters"),
    (FSDP2, {"recompute_every": 2}, "valid: 0, 1"),
    (FSDP2, {"precision": {"buffers": "bfloat16"}}, "does not cast buffers"),
    (FSDP2, {"precision": {"parameters": "bf16"}}, "bfloat16"),
    (FSDP2, {"prefetch_backward": 0}, "at least 1"),
    (FSDP2, {"reshard_after_backward": True}, "did you mean 'reshard_after_forward'"),
    (FSDP1, {"sharding_strategy": "FULL"}, "NO_SHARD, SHARD_GRAD_OP, FULL_SHARD"),
    (
        "reference/fsdp",
        {"sharding_strategy": "FULL"},
        r"'FULL' is .* did you mean 'FULL_SHARD'\?",
    ),
    ("reference/fsdp", {"sharding_strategy": "hybrid"}, "did you mean 'HYBRID_SHARD'"),
    (
        "reference/fsdp",
        {"sharding_strategy": "x"},
        "'x' is .* valid: .*, HYBRID_SHARD$",
    ),
    (
        "reference/zero3",
        {"wrap": "NoSuchLayer"},
        r"'wrap' must be .*keys: units, module_class, minimum_parameters\), not 'NoSuchLayer'$",
    ),
    (
        FSDP1,
        {"sharding_strategy": "NO_SHARD", "offload": "parameters"},
        "contradicts sharding_strategy NO_SHARD",
    ),
    (FSDP1, {"prefetch_forward": 2}, "only 0 and 1"),
    (FSDP1, {"recompute_every": -1}, "at least 0"),
    (FSDP1, {"precision": {"output": "float32"}}, "does not cast outputs"),
    (
        FSDP1,
        {
            "accumulate_without_communication": True,
            "precision": {"parameters": "bfloat16", "reduce": "float32"},
        },
        "accumulates gradients in torch.bfloat16; set",
    ),
    (ZRO, {"recompute_every": 3}, "valid: 0, 1"),
    (ZRO, {"bucket_bytes": 4096}, "valid: "),
]


@pytest.mark.parametrize(("name", "options", "told"), REFUSED)
def test_options_are_refused_with_what_is_valid(
    name: str, options: dict[str, Any], told: str
) -> None:
    with pytest.raises(Refused, match=told):
        registry.load(name).capabilities(options)


@pytest.mark.parametrize(
    ("name", "axes", "options", "told"),
    [
        (FSDP2, {"replicate": 2}, {}, "needs the axis 'shard'"),
        (FSDP2, {"shard": 2}, {"reshard_after_forward": 3}, "valid: true, false, null, 1, 2"),
        (FSDP2, {"shard": 2}, {"wrap": {"units": ["block.0"]}}, "did you mean 'blocks.0'"),
        (FSDP1, {"shard": 2}, HYBRID, "replicate, shard, e.g. mesh {replicate: 2, shard: 2}"),
        (FSDP1, {"replicate": 2, "shard": 1}, HYBRID, "use NO_SHARD on .*replicate: 2}"),
        ("reference/fsdp", {"shard": 2}, HYBRID, r"e\.g\. {replicate: 2, shard: 2}; this mesh"),
        (FSDP1, {"shard": 2}, {"offload": "parameters"}, "accelerator"),
    ],
)
def test_what_the_mesh_does_not_allow_is_refused_on_every_rank(
    name: str, axes: dict[str, int], options: dict[str, Any], told: str
) -> None:
    work = workload()

    def body(rank: int, world: int) -> None:
        with pytest.raises(Refused, match=told):
            make(name, work, rank, axes, ADAMW, **options)

    succeed(body, 2)


@pytest.mark.parametrize(
    ("name", "told"),
    [
        (FSDP1, "FSDP1 wraps 'blocks.0.norm'"),
        (FSDP2, "torch refuses; leave precision.parameters out, because fully_shard"),
    ],
)
def test_batch_norms_in_narrow_parameters_are_refused(name: str, told: str) -> None:
    work = workloads.make(WorkloadSpec("digits_cnn", params={"layers": 1}))

    def body(rank: int, world: int) -> None:
        narrow = {"precision": {"parameters": "bfloat16"}}
        with pytest.raises(Refused, match=told):
            make(name, work, rank, {"shard": 2}, ADAMW, **narrow)

    succeed(body, 2)


# -------------------------------------------------------------------------------------- pieces

SYSTEMS: list[tuple[str, dict[str, int], dict[str, Any]]] = [
    (FSDP2, {"shard": 3}, {}),
    (FSDP2, {"replicate": 2, "shard": 2}, {"reshard_after_forward": 2}),
    (FSDP1, {"shard": 3}, {}),
    (FSDP1, {"replicate": 2, "shard": 2}, {"sharding_strategy": "HYBRID_SHARD"}),
    (FSDP1, {"replicate": 2}, {"sharding_strategy": "NO_SHARD"}),
    (ZRO, {"shard": 3}, {"recompute_every": 1}),
]


@pytest.mark.parametrize(("name", "axes", "options"), SYSTEMS)
def test_pieces_cover_all_that_there_is(
    name: str, axes: dict[str, int], options: dict[str, Any]
) -> None:
    work = workload("frozen", "prime_sized", "smaller_than_world")
    world = math.prod(axes.values())

    def body(rank: int, world: int) -> dict[str, Any]:
        system = make(name, work, rank, axes, ADAMW, **options)
        return held_in_a_step(system, work.batch(0, world)[rank])

    found = succeed(body, world)
    complete(work, found)


@pytest.mark.parametrize(
    ("name", "options"),
    [(FSDP2, {}), (FSDP2, {"recompute_every": 1}), (FSDP1, {}), (FSDP1, {"recompute_every": 1})],
)
def test_a_fresh_instance_goes_on_from_local_pieces(name: str, options: dict[str, Any]) -> None:
    work = workload("rebound_buffer", "frozen")

    def body(rank: int, world: int) -> None:
        first = make(name, work, rank, {"shard": world}, ADAMW, **options)
        for step in range(2):
            first.step(work.batch(step, world)[rank], lambda point: None)
        second = make(name, work, rank, {"shard": world}, ADAMW, **options)
        for kind in KINDS:
            if kind != "gradients":
                second.load_pieces(kind, copies(first.local_state(kind)))
        for system in (first, second):
            system.step(work.batch(2, world)[rank], lambda point: None)
        for kind in KINDS:
            for one, two in zip(first.local_state(kind), second.local_state(kind), strict=True):
                assert one.name == two.name
                assert torch.equal(one.tensor, two.tensor), one.name

    succeed(body, 2)


def test_a_piece_of_another_place_is_refused() -> None:
    work = workload()

    def body(rank: int, world: int) -> None:
        system = make(FSDP2, work, rank, {"shard": world}, ADAMW)
        piece = copies(system.local_state("parameters"))[0]
        with pytest.raises(Refused, match="this rank holds no range"):
            system.load_pieces("parameters", [Piece(**{**vars(piece), "slices": ((90, 91),)})])

    succeed(body, 2)


# ------------------------------------------------------------------- scalers, and private parts


@pytest.mark.parametrize("name", [FSDP1, FSDP2, ZRO])
def test_all_ranks_leave_out_the_step_that_overflowed(name: str) -> None:
    work = workload("overflow_on_one_rank")
    spec = OptimizerSpec(lr=1e-2, clip_norm=0.05, scaler=ScalerSpec(initial=1024.0, interval=2))

    def body(rank: int, world: int) -> list[dict[str, float]]:
        system = make(name, work, rank, {"shard": world}, spec)
        batches = [work.batch(step, world)[rank] for step in range(4)]
        return [dict(system.step(batch, lambda point: None).metrics) for batch in batches]

    told = succeed(body, 3)
    assert told[0] == told[1] == told[2]
    assert [step["skipped"] for step in told[0]] == [0.0, 1.0, 0.0, 0.0]
    assert [step["scale"] for step in told[0]] == [1024.0, 1024.0, 512.0, 512.0]


def test_torch_still_tells_of_overflows_by_its_private_way() -> None:
    parameter = torch.nn.Parameter(torch.ones(2))
    parameter.grad = torch.tensor([1.0, float("inf")])
    scaler, optimizer = GradScaler("cpu"), torch.optim.SGD([parameter], lr=0.1)
    scaler.scale(torch.ones(()))
    scaler.unscale_(optimizer)
    assert [float(found) for found in scaler._found_inf_per_device(optimizer).values()] == [1.0]


def test_what_an_older_torch_lacks_is_a_skip(monkeypatch: pytest.MonkeyPatch) -> None:
    if hasattr(FSDPModule, fsdp2.UNUSED):
        monkeypatch.delattr(FSDPModule, fsdp2.UNUSED)
    for options in ({}, {"reduce_scatter_unused_params": True}):
        declared = Declaration.of(registry.load(FSDP2), options)
        missing = declared.missing_here("gloo", 2)
        assert bool(missing) == bool(options), options
    assert re.fullmatch(r"torch .* has no FSDPModule\..*", missing)


def test_fsdp1_clips_in_fp64_where_a_rank_holds_nothing(tmp_path: Path) -> None:
    """12 elements are 3 each on four of five ranks: the last one has no gradient, and no dtype."""
    own = own_models.ONE_LAYER
    done = prove(FSDP1, workload=own, worlds=(5,), clip=(0.05,), results=tmp_path / "run")
    assert list(done["verdict"]) == ["pass"], list(done["reason"])
