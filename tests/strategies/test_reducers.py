"""Reducers: what a bucket says of itself, and state of a reducer's own."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from local_ranks import succeed
from pieces import assembled
from torch import nn

from shardproof import registry, workloads
from shardproof.case import WorkloadSpec
from shardproof.comm import Mesh
from shardproof.contract import Batch, OptimizerSpec, Piece
from shardproof.impls.reference import ddp
from shardproof.impls.reference.engine.engine import Engine
from shardproof.impls.reference.parts.buckets import GradientBucket
from shardproof.impls.reference.parts.flat import FlatLayout
from shardproof.impls.reference.parts.reducers import Bucket, Reducer
from shardproof.workloads import Workload

ONE_BIT = {"method": "onebit"}  # which keeps something on both ways
BUCKETS = {"bucket_bytes": 2_000, "compress": ONE_BIT}
#: Every way in which gradients are reduced: implementation, mesh, options.
SYSTEMS: list[tuple[str, dict[str, int], dict[str, Any]]] = [
    ("reference/ddp", {"replicate": 2}, BUCKETS),
    ("reference/zero1", {"shard": 2}, BUCKETS),
    ("reference/zero2", {"shard": 2}, BUCKETS),
    ("reference/zero3", {"shard": 2}, {"compress": ONE_BIT}),
    ("reference/fsdp", {"replicate": 2}, {"sharding_strategy": "NO_SHARD", "compress": ONE_BIT}),
    ("reference/hybrid", {"pipe": 2, "replicate": 2}, {"data_options": {"compress": ONE_BIT}}),
    ("reference/hybrid", {"pipe": 2, "shard": 2}, {"data": "zero1", "data_options": BUCKETS}),
]


def test_a_bucket_knows_what_lies_where() -> None:
    parameters = [torch.zeros(2, 3), torch.zeros(()), torch.zeros(0), torch.zeros(4)]
    made = GradientBucket([3, 0, 2, 1], ["a", "b", "c", "d"], parameters)
    bucket = made.outgoing(step=7)
    assert bucket.step == 7 and bucket.flat is made.flat
    assert [(p.name, p.shape, p.offset, p.start, p.stop) for p in bucket.parts] == [
        ("d", (4,), 0, 0, 4),
        ("a", (2, 3), 4, 0, 6),
        ("c", (0,), 10, 0, 0),
        ("b", (), 10, 0, 1),
    ]
    made.views[0].fill_(5.0)
    assert bucket.names == ["d", "a", "c", "b"]
    assert bucket.views()["a"].tolist() == [5.0] * 6 and not bucket.views()["d"].any()


def test_a_bucket_may_be_a_shard_of_its_parameters() -> None:
    layout = FlatLayout({"a": torch.zeros(5), "b": torch.zeros(2)}, 2)
    shard = torch.arange(4.0)
    bucket = Bucket(shard, tuple(layout.parts(1)), step=0)
    assert {name: view.tolist() for name, view in bucket.views().items()} == {
        "a": [0.0],
        "b": [1.0, 2.0],
    }
    assert [part.start for part in bucket.parts] == [4, 0]


def test_the_default_reducer_sums_and_has_no_state() -> None:
    def body(rank: int, size: int) -> None:
        comm = Mesh({"shard": size}).comm("shard")
        layout = FlatLayout({"a": torch.zeros(3), "b": torch.zeros(2)}, size)
        flat = layout.empty()
        layout.pack(flat, {"a": torch.full((3,), rank + 1.0), "b": torch.ones(2)})
        bucket, reducer = Bucket(flat, layout.whole, 0), Reducer()
        reducer.all_reduce(bucket, comm).wait()
        assert bucket.views()["a"].tolist() == [6.0] * 3 and flat[layout.numel :].sum() == 0
        own = torch.empty(layout.shard_numel)
        before = flat.clone()
        reducer.reduce_scatter(bucket, comm, own).wait()
        assert torch.equal(own, size * layout.shard(before, rank))
        piece = Piece.whole("a.error", torch.zeros(3))
        assert not reducer.pieces() and reducer.load_pieces([piece]) == [piece]

    succeed(body, 3)


def is_kept(piece: Piece) -> bool:
    """Whether this is state of a reducer, not of the optimizer."""
    return "@" in piece.name


def make(
    name: str, mesh: dict[str, int], options: dict[str, Any], work: Workload, rank: int
) -> Engine:
    """The implementation, set up on this rank."""
    system: Engine = registry.load(name)()
    spec = OptimizerSpec("adamw", 0.01)
    state = work.state() if rank == 0 else None
    system.setup(work.build_for(rank), state, spec, Mesh(mesh), options)
    return system


def copies(pieces: list[Piece]) -> list[dict[str, Any]]:
    return [vars(piece) | {"tensor": piece.tensor.clone()} for piece in pieces]


def run(system: Engine, batches: Sequence[Batch]) -> None:
    for batch in batches:
        system.step(batch, lambda point: None)


@pytest.mark.parametrize(("name", "mesh", "options"), SYSTEMS)
def test_state_of_a_reducer_survives_saving_and_loading(
    name: str, mesh: dict[str, int], options: dict[str, Any]
) -> None:
    """A system that is given all pieces of another goes on as that one does, bit for bit."""
    sizes = {"width": 8, "heads": 2, "seq": 8, "layers": 2}
    work = workloads.make(
        WorkloadSpec("charnames_gpt", params=sizes, global_batch=12, micro_batches=2)
    )

    def body(rank: int, size: int) -> list[dict[str, Any]]:
        replicas, shards = mesh.get("replicate", 1), mesh.get("shard", 1)
        place = Mesh(mesh).coordinate
        share = place.get("replicate", 0) * shards + place.get("shard", 0)
        batches = [work.batch(step, replicas * shards)[share] for step in range(4)]
        old, new, forgetful = (make(name, mesh, options, work, rank) for _ in range(3))
        run(old, batches[:2])
        saved = {
            kind: [Piece(**piece) for piece in copies(old.local_state(kind))]
            for kind in ("parameters", "buffers", "optimizer")
        }
        assert any(is_kept(piece) and piece.tensor.any() for piece in saved["optimizer"])
        for kind, pieces in saved.items():
            new.load_pieces(kind, pieces)
            kept = [piece for piece in pieces if not is_kept(piece)]
            forgetful.load_pieces(kind, kept)
        for system in (old, new, forgetful):
            run(system, batches[2:])
        for kind in ("parameters", "optimizer"):
            want, have = old.local_state(kind), new.local_state(kind)
            assert [p.name for p in want] == [p.name for p in have]
            assert all(torch.equal(a.tensor, b.tensor) for a, b in zip(want, have, strict=True))
        lost = zip(old.local_state("parameters"), forgetful.local_state("parameters"), strict=True)
        assert not all(torch.equal(a.tensor, b.tensor) for a, b in lost), "the state must matter"
        return copies(old.local_state("optimizer"))

    # What a rank alone keeps has a name of its own: the judge takes it for a whole tensor.
    state = assembled(dict(enumerate(succeed(body, math.prod(mesh.values())))))
    assert not state.problems, state.problems
    ranks = mesh.get("replicate", 1) * mesh.get("shard", 1)
    ends = {name.rpartition("@")[2] for name in state.first() if "@" in name}
    assert ends == {"all", *map(str, range(ranks))}


def test_a_handle_alone_reduces_by_the_backends_own_collectives() -> None:
    def body(rank: int, size: int) -> None:
        comms = {"replicate": Mesh({"replicate": size}).comm("replicate")}
        handle = ddp.apply(nn.Linear(2, 2), comms, ddp.Options())
        assert type(handle.reducer) is Reducer and handle.step == 0
        handle.begin_step(3)
        assert handle.step == 3

    succeed(body, 2)
