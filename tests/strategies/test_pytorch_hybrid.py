"""torch's three kinds of parallelism at once: what is refused, what pieces cover, what goes on."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from local_ranks import succeed
from pieces import complete, held_in_a_step

from shardproof import registry, workloads
from shardproof.case import Case, WorkloadSpec
from shardproof.comm import Mesh
from shardproof.contract import KINDS, OptimizerSpec, Piece, Refused, ScalerSpec
from shardproof.costs.expression import facts_of
from shardproof.impls.pytorch.costs.hybrid import TorchHybrid
from shardproof.workloads import Workload

pytestmark = pytest.mark.usefixtures("one_thread")

NAME = "pytorch/hybrid"
ADAMW = OptimizerSpec("adamw", lr=1e-2, clip_norm=0.05)
SIZES = {"width": 8, "heads": 4, "seq": 4, "layers": 2, "vocab": 97}
BOTH: dict[str, Any] = {"sequence_parallel": True, "loss_parallel": True}


def workload(*traits: str, **params: Any) -> Workload:
    """A GPT of two blocks."""
    spec = WorkloadSpec(
        "charnames_gpt", traits=traits, params=SIZES | params, global_batch=4, micro_batches=2
    )
    return workloads.make(spec)


def make(
    work: Workload, rank: int, axes: dict[str, int], spec: OptimizerSpec = ADAMW, **options: Any
) -> Any:
    """The system on this rank, set up; rank 0 alone has the state."""
    system = registry.load(NAME)()
    state = work.state() if rank == 0 else None
    system.setup(work.build_for(rank), state, spec, Mesh(axes), options)
    return system


def share(work: Workload, step: int, system: Any) -> Any:
    """The batch of this rank's data coordinate."""
    shards = system.mesh.size("shard")
    return work.batch(step, shards)[system.mesh.coordinate.get("shard", 0)]


def rows(pieces: list[Piece]) -> list[dict[str, Any]]:
    """As the judge wants them."""
    return [vars(piece) | {"tensor": piece.tensor.clone()} for piece in pieces]


@pytest.mark.parametrize(
    ("axes", "options", "spec", "told"),
    [
        ({"pipe": 1, "replicate": 2}, {}, ADAMW, "no axis 'shard', which fully_shard always needs"),
        ({"shard": 2}, {}, ADAMW, r"needs the axis 'pipe' .* has \['shard'\]"),
        ({"pipe": 2}, {}, OptimizerSpec(scaler=ScalerSpec()), "optimizer.scaler: "),
        (
            {"pipe": 1, "tensor": 2},
            {"shapes": "inferred"},
            ADAMW,
            "'shapes' = 'inferred' is not valid; valid: given",
        ),
    ],
)
def test_what_torch_cannot_do_is_refused_on_every_rank(
    axes: dict[str, int], options: dict[str, Any], spec: OptimizerSpec, told: str
) -> None:
    work = workload()

    def body(rank: int, world: int) -> None:
        with pytest.raises(Refused, match=told):
            make(work, rank, axes, spec, **options)

    succeed(body, math.prod(axes.values()))


@pytest.mark.parametrize(
    ("axes", "options", "traits"),
    [
        ({"pipe": 2, "shard": 2, "tensor": 2}, BOTH, ("frozen", "prime_sized")),
        ({"pipe": 2, "tensor": 2}, {"schedule": "gpipe"}, ("rebound_buffer", "scalar")),
        ({"pipe": 1, "shard": 3}, {}, ("smaller_than_world",)),
        # 97 rows over 2 and then 3 ranks: 17, 17, 15 and 16, 16, 16.
        ({"pipe": 1, "shard": 3, "tensor": 2}, {}, ()),
    ],
)
def test_pieces_cover_all_that_there_is(
    axes: dict[str, int], options: dict[str, Any], traits: tuple[str, ...]
) -> None:
    work = workload(*traits)

    def body(rank: int, world: int) -> dict[str, Any]:
        system = make(work, rank, axes, **options)
        before = system.full_state("parameters")
        seen: dict[str, Any] = held_in_a_step(system, share(work, 0, system))
        return seen | {"before": before, "full": system.full_state("parameters")}

    found = succeed(body, math.prod(axes.values()))
    whole = complete(work, found)["parameters"]
    for name in whole.tensors:
        assert torch.equal(whole.tensors[name][0], found[0]["full"][name]), name
        assert torch.equal(work.state()[name], found[-1]["before"][name]), name


@pytest.mark.parametrize("axes", [{"pipe": 2, "tensor": 2}, {"pipe": 1, "shard": 2, "tensor": 2}])
def test_a_fresh_instance_goes_on_from_local_pieces(axes: dict[str, int]) -> None:
    work = workload("rebound_buffer", "frozen")

    def body(rank: int, world: int) -> None:
        first = make(work, rank, axes, **BOTH)
        for step in range(2):
            first.step(share(work, step, first), lambda point: None)
        second = make(work, rank, axes, **BOTH)
        for kind in KINDS:
            if kind != "gradients":
                held = first.local_state(kind)
                second.load_pieces(
                    kind, [Piece(**{**vars(p), "tensor": p.tensor.clone()}) for p in held]
                )
        for system in (first, second):
            system.step(share(work, 2, system), lambda point: None)
        for kind in KINDS:
            for one, two in zip(first.local_state(kind), second.local_state(kind), strict=True):
                assert (one.name, one.slices) == (two.name, two.slices)
                assert torch.equal(one.tensor, two.tensor), one.name

    succeed(body, 4)


# ------------------------------------------------------------------------------------- promises


def cost_model(clip: float | None = 1.0, **options: Any) -> TorchHybrid:
    """Of two stages, two shards and two tensor ranks: 4 samples of 4 positions, each in a
    micro-batch of its own, so two for each data coordinate; two blocks of width 8, fp64.
    """
    case = Case(
        id="hand/counted",
        scenario="hand",
        implementation=NAME,
        backend="in_memory",
        mesh={"pipe": 2, "shard": 2, "tensor": 2},
        workload=WorkloadSpec(
            "charnames_gpt", params=SIZES | {"heads": 2}, global_batch=4, micro_batches=2
        ),
        optimizer=OptimizerSpec(clip_norm=clip),
        lane="fp64",
        checks=("traffic",),
        steps=1,
        options=options,
    )
    return TorchHybrid(facts_of(case).model_facts)


def by_axis(told: TorchHybrid) -> dict[tuple[str, str], tuple[int, int]]:
    """Bytes and calls of a step."""
    found: dict[tuple[str, str], tuple[int, int]] = {}
    for flow in told.flows():
        assert isinstance(flow.calls, int)
        total, calls = found.get((flow.axis, flow.operation), (0, 0))
        found[flow.axis, flow.operation] = (total + int(flow.bytes), calls + flow.calls)
    return found


#: Elements of a block on one tensor rank: 4 norms' tensors, and halves of qkv, out, up and down.
BLOCK = 4 * 8 + 12 * (8 + 1) + (8 * 4 + 8) + 16 * (8 + 1) + (8 * 16 + 8)
#: What a stage has besides, of the first tensor rank and of the second, with the row that makes
#: 49 of 97 rows even: embeddings; the last norm, the head and its bias.
FIRST = (50 * 8 + 4 * 8, 48 * 8 + 4 * 8)
LAST = (2 * 8 + 50 * (8 + 1), 2 * 8 + 48 * (8 + 1))
#: Of a micro-batch: 1 sample of 4 positions.
HIDDEN = 4 * 8 * 8


def test_bytes_by_hand() -> None:
    # All shards of 4 units on 2 tensor ranks, gathered once and reduced once by 2 ranks each.
    sharded = 8 * (4 * BLOCK + sum(FIRST) + sum(LAST))
    # 14 tensors in the first stage and 16 in the second: a norm of each, stacked.
    norms = 8 * (14 + 16)
    always = {
        ("shard", "all_gather"): (sharded, 4 * 2 * 2),
        ("shard", "reduce_scatter"): (sharded, 4 * 2 * 2),
        # In the group of every pipe and tensor rank, in which 2 (N-1) n bytes are sent.
        ("shard", "all_reduce"): (2 * 2 * norms, 8),
        # One fp64 number in each of 4 groups.
        ("pipe", "all_reduce"): (4 * 2 * 8, 8),
        ("pipe", "recv"): (0, 16),
    }
    # Forward and backward, 4 micro-batches, 2 tensor ranks: 16 messages.  Every hidden state is
    # summed 5 times forward and 5 times backward, by both ranks; logits have 98 columns.
    assert by_axis(cost_model()) == always | {
        ("pipe", "send"): (16 * HIDDEN, 16),
        ("tensor", "all_reduce"): (4 * 10 * 2 * HIDDEN + 2 * 2 * norms, 4 * 10 * 2 + 8),
        ("tensor", "all_gather"): (4 * 4 * 98 * 8, 4 * 2),
    }
    # Messages of half the positions; for each target a maximum, a sum and a logit; in both data
    # coordinates' groups the terms of positions and of 5 norms' weights and biases.
    terms = 8 * (4 * 8 + 10 * 8)
    assert by_axis(cost_model(**BOTH)) == always | {
        ("pipe", "send"): (16 * HIDDEN // 2, 16),
        ("tensor", "all_gather"): (4 * 10 * HIDDEN, 4 * 10 * 2),
        ("tensor", "reduce_scatter"): (4 * 10 * HIDDEN, 4 * 10 * 2),
        ("tensor", "all_reduce"): (
            2 * (4 * 3 * 4 * 8 + 2 * terms + 2 * norms),
            4 * 3 * 2 + 11 * 2 * 2 + 8,
        ),
    }
    assert {axis for axis, name in by_axis(cost_model(None)) if name == "all_reduce"} == {"tensor"}


def test_held_bytes_by_hand() -> None:
    told = cost_model()
    for rank in range(8):
        pipe, shard, tensor = rank // 4, rank // 2 % 2, rank % 2
        padded = (BLOCK + (FIRST, LAST)[pipe][tensor]) // 2
        # The second shard of 49 rows has 24: no bias of the head, and no row of 8.
        own = padded - (8 + pipe if (shard, tensor) == (1, 0) else 0)
        assert told.resident(rank, 0, 0) == {
            "parameters": 8 * padded,
            "masters": 0,
            "gradients": 8 * padded,
            "optimizer_state": 8 * own,
        }
        assert sum(told.local(rank).parameters.values()) == own
