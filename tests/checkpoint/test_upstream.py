"""PyTorch's own checkpoints under the contract: what holds of them, strategy by strategy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import checkpoints
import pytest
import torch
from local_ranks import processes, succeed
from torch.distributed.checkpoint.planner import WriteItemType
from upstream_checkpoints import (
    EXTRA,
    Chosen,
    assert_equal,
    loaded,
    make,
    saved,
    trained,
    with_format,
    workload,
    world,
)

from shardproof import registry
from shardproof.contract import GroupSpec, OptimizerSpec, Piece, Refused, ScalerSpec
from shardproof.impls.pytorch.checkpoint import folders
from shardproof.impls.pytorch.checkpoint.blocks import Blocks
from shardproof.registry.declaration import Declaration

pytestmark = pytest.mark.usefixtures("one_thread")

DDP: Chosen = ("ddp", {"replicate": 2}, {})
DDP3: Chosen = ("ddp", {"replicate": 3}, {})
FSDP2: Chosen = ("fsdp2", {"shard": 2}, {})
FSDP3: Chosen = ("fsdp2", {"shard": 3}, {})
HSDP: Chosen = ("fsdp2", {"replicate": 2, "shard": 2}, {})
TENSOR: Chosen = ("tensor_parallel", {"tensor": 2}, {})
TENSOR4: Chosen = ("tensor_parallel", {"tensor": 4}, {})
PIPE: Chosen = ("pipelining", {"pipe": 2}, {})
PIPE4: Chosen = ("pipelining", {"pipe": 4}, {})
PIPE_V: Chosen = ("pipelining", {"pipe": 2}, {"schedule": "zb_v"})
HYBRID: Chosen = ("hybrid", {"pipe": 2, "shard": 2, "tensor": 2}, {})
ZERO: Chosen = ("zero_redundancy_optimizer", {"shard": 2}, {})
ZERO3: Chosen = ("zero_redundancy_optimizer", {"shard": 3}, {})
FSDP1: Chosen = ("fsdp1", {"shard": 2}, {"checkpoint": {}})
FSDP1_3: Chosen = ("fsdp1", {"shard": 3}, {"checkpoint": {"format": "full"}})

SGD = OptimizerSpec("sgd", lr=1e-2, momentum=0.9, weight_decay=0.1)
GROUPS = OptimizerSpec("adamw", groups=(GroupSpec("bias", 0.5, 0.0), GroupSpec("embed", 2.0)))
SCALED = OptimizerSpec("adamw", lr=1e-2, scaler=ScalerSpec(initial=64.0, interval=1))


def named(value: Any) -> str:
    """An id."""
    if isinstance(value, tuple):
        return value[0] + "".join(f"-{axis}{size}" for axis, size in value[1].items())
    return value.name if isinstance(value, OptimizerSpec) else str(value)


SAME = [(one, "dcp") for one in (DDP, FSDP2, TENSOR, PIPE_V, HYBRID)]
SAME += [(one, "full") for one in (DDP, FSDP2, TENSOR, ZERO)]


@pytest.mark.parametrize(("chosen", "form"), SAME, ids=named)
def test_training_goes_on_as_if_it_had_never_stopped(
    chosen: Chosen, form: str, tmp_path: Path
) -> None:
    work = workload()
    saved(tmp_path, with_format(chosen, form), work)
    assert_equal(trained(chosen, work, 4), loaded(tmp_path, chosen, work, until=4))


OTHERS = [
    (DDP, FSDP3),
    (FSDP3, DDP),
    (FSDP2, HSDP),
    (TENSOR, TENSOR4),
    (TENSOR4, DDP3),
    (FSDP2, TENSOR),
    (PIPE, PIPE4),
    (PIPE4, FSDP2),
    (DDP, PIPE_V),
    (HYBRID, TENSOR),
    (DDP, HYBRID),
]


@pytest.mark.parametrize(("one", "other"), OTHERS, ids=named)
def test_another_world_mesh_or_strategy_holds_what_was_saved(
    one: Chosen, other: Chosen, tmp_path: Path
) -> None:
    """Fused projections, too, whose rows tensor ranks keep in an order of their own."""
    work = workload()
    held = saved(tmp_path, one, work)
    assert_equal(held, loaded(tmp_path, other, work))


@pytest.mark.parametrize(
    ("one", "other"), [(FSDP2, DDP3), (TENSOR4, FSDP2), (DDP, TENSOR), (ZERO3, ZERO)], ids=named
)
def test_full_state_dicts_hold_what_was_saved_in_another_world_or_strategy(
    one: Chosen, other: Chosen, tmp_path: Path
) -> None:
    work = workload()
    held = saved(tmp_path, with_format(one, "full"), work)
    assert_equal(held, loaded(tmp_path, other, work))


@pytest.mark.parametrize("spec", [SGD, GROUPS, SCALED], ids=["sgd", "groups", "scaled"])
@pytest.mark.parametrize(("one", "other"), [(DDP, FSDP3), (PIPE, DDP)], ids=named)
def test_optimizers_and_loss_scales_come_back(
    one: Chosen, other: Chosen, spec: OptimizerSpec, tmp_path: Path
) -> None:
    work = workload("tied", "frozen")
    held = saved(tmp_path, one, work, spec)
    assert_equal(held, loaded(tmp_path, other, work, spec))

    def scale(rank: int, _: int) -> list[float]:
        system = make(other, work, rank, spec)
        fresh = system.scaler.get_scale()
        system.load(tmp_path)
        return [fresh, system.scaler.get_scale()]

    fresh, now = succeed(scale, world(other))[0]
    assert now == fresh * (4 if spec is SCALED else 1)


@pytest.mark.parametrize("form", ["dcp", "full"])
def test_generators_of_modules_come_back(form: str, tmp_path: Path) -> None:
    work = workload("dropout_stateful")
    saved(tmp_path, with_format(DDP, form), work)
    assert_equal(trained(DDP, work, 4), loaded(tmp_path, DDP, work, until=4))


def test_the_newest_stay_and_what_was_cut_short_is_no_checkpoint(tmp_path: Path) -> None:
    work = workload(layers=1)

    def body(rank: int, _: int) -> None:
        system = make(with_format(FSDP2, "dcp", keep=2), work, rank)
        for step in range(4):
            checkpoints.train(system, work, step, step + 1)
            system.save(tmp_path, EXTRA)

    succeed(body, 2)
    assert [path.name for path in folders.committed(tmp_path)] == ["step-00000004", "step-00000003"]
    assert len(list(tmp_path.iterdir())) == 2
    (tmp_path / "step-00000004" / folders.DCP).unlink()
    assert folders.find(tmp_path).name == "step-00000003"
    with pytest.raises(
        FileNotFoundError, match=r"no checkpoint at this path, because neither \.metadata nor"
    ):
        folders.find(tmp_path / "step-00000004")


def test_an_older_checkpoint_of_the_root_is_loaded_by_its_name(tmp_path: Path) -> None:
    work = workload(layers=1)
    first = saved(tmp_path, DDP, work, steps=1)
    saved(tmp_path, DDP, work, steps=2)
    assert_equal(first, loaded(tmp_path / "step-00000001", DDP, work))


def test_a_disk_that_fills_on_rank_0_fails_a_full_save_on_all_ranks(tmp_path: Path) -> None:
    work = workload(layers=1)
    (tmp_path / "step-00000000").write_bytes(b"")  # in the folder's place

    def body(rank: int, _: int) -> str:
        system = make(with_format(DDP, "full"), work, rank)
        with pytest.raises(RuntimeError, match="rank 0 cannot write into") as error:
            system.save(tmp_path, {})
        return str(error.value)

    one, other = succeed(body, 2)
    assert one == other


def in_processes(rank: int, _: int, root: str, steps: list[Any]) -> list[Any]:
    """On ranks that are processes: train and save as the steps say, or load what is there."""
    torch.set_num_threads(1)
    work, seen = workload(), []
    for chosen, until, loads in steps:
        system = make(tuple(chosen), work, rank)
        if loads:
            assert system.load(Path(root)) == EXTRA
            assert system.steps_done == 2
        else:
            checkpoints.train(system, work, 0, 2)
        at_save = {k: digests(system, k) for k in checkpoints.COMPARED}
        pending = None if loads else system.save(Path(root), EXTRA)
        checkpoints.train(system, work, 2, until)  # while a thread writes
        if pending is not None:
            pending.wait()
        system.close()
        seen.append([at_save, {k: digests(system, k) for k in checkpoints.COMPARED}])
    return seen


def digests(system: Any, kind: str) -> list[Any]:
    """Name, place and elements of what this rank holds."""
    pieces = system.local_state(kind)
    return sorted([p.name, str(p.slices or p.flat_range), p.tensor.tolist()] for p in pieces)


@pytest.mark.slow
@pytest.mark.parametrize("ledgers", [True, False], ids=["ledgers", "plain"])
@pytest.mark.parametrize(
    ("chosen", "form"),
    [(one, "dcp_async") for one in (DDP, FSDP2, TENSOR, PIPE)]
    + [(FSDP1, form) for form in ("dcp", "full")],
    ids=named,
)
def test_on_processes_the_moment_of_the_save_comes_back(
    chosen: Chosen, form: str, ledgers: bool, tmp_path: Path
) -> None:
    """Also while parameters change under the writer, and in the run that goes on."""
    root = tmp_path / "root"
    steps = [(with_format(chosen, form), 4, False), (chosen, 4, True)]
    for one, other in processes(in_processes, 2, tmp_path, ledgers, str(root), steps):
        assert one == other


def test_formats_that_a_system_cannot_have_are_refused_with_what_it_can() -> None:
    for name, form, valid in (
        ("pipelining", "full", "dcp, dcp_async"),
        ("hybrid", "full", "dcp, dcp_async"),
        ("zero_redundancy_optimizer", "dcp", "full"),
    ):
        kind = registry.load(f"pytorch/{name}")
        with pytest.raises(Refused, match=f"option 'checkpoint.format' = '{form}'.*valid: {valid}"):
            kind.capabilities({"checkpoint": {"format": form}})
    ddp = registry.load("pytorch/ddp")
    assert ddp.capabilities({}).checkpoints == ("dcp", "dcp_async", "full")
    declared = Declaration.of(ddp, {"checkpoint": {"format": "dcp_async"}})
    assert declared.usable() == ("gloo", "gloo_cuda", "nccl")
    fsdp1 = Declaration.of(registry.load("pytorch/fsdp1"), {"checkpoint": {"format": "dcp"}})
    assert not fsdp1.runs_on_threads and fsdp1.usable() == ("gloo", "gloo_cuda", "nccl", "mpi")


def test_blocks_are_written_and_read_one_by_one() -> None:
    whole = torch.arange(12.0).view(6, 2)
    pieces = [
        Piece("w", (6, 2), whole[at : at + 1], slices=((at, at + 1), (0, 2))) for at in (1, 4)
    ]
    blocks = Blocks((6, 2), whole, pieces)
    items = blocks.__create_write_items__("w", blocks)
    assert [tuple(item.index.offset or ()) for item in items] == [(1, 0), (4, 0)]
    assert {item.type for item in items} == {WriteItemType.SHARD}
    for item in items:
        assert blocks.__get_tensor_shard__(item.index).data_ptr() in [
            piece.tensor.data_ptr() for piece in pieces
        ]
    with pytest.raises(NotImplementedError, match="can only be saved and loaded"):
        blocks + 1
