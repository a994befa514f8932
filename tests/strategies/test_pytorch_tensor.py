"""PyTorch's tensor parallelism: what it refuses, what its pieces cover, what a fresh one takes
over; what torch leaves to its users: the order of fused rows, ties, partial sums, one dispatcher.
"""

from __future__ import annotations

import threading
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from local_ranks import succeed
from pieces import assembled, complete, held_in_a_step, rows
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from shardproof import registry, workloads
from shardproof.case import Case, WorkloadSpec
from shardproof.comm import Mesh
from shardproof.contract import (
    KINDS,
    Implementation,
    OptimizerSpec,
    Piece,
    Refused,
    ScalerSpec,
)
from shardproof.costs.expression import facts_of
from shardproof.costs.model_facts import ModelFacts
from shardproof.impls.pytorch.costs.tensor import TorchTensorParallel
from shardproof.impls.pytorch.tensor_parallel import SharedContext
from shardproof.impls.pytorch.tensor_styles import (
    dtensor_pieces,
    outsiders,
    plan_styles,
    rows_by_rank,
    runs,
    settle_gradient,
)
from shardproof.workloads import Workload

pytestmark = pytest.mark.usefixtures("one_thread")

NAME = "pytorch/tensor_parallel"
ADAMW = OptimizerSpec("adamw", lr=1e-2, clip_norm=0.05)
SIZES = {"width": 12, "heads": 6, "seq": 6, "layers": 2, "vocab": 96}
BOTH = {"sequence_parallel": True, "loss_parallel": True}


def workload(*traits: str, **params: Any) -> Workload:
    """A GPT whose heads, rows and positions divide by 2 and by 3."""
    spec = WorkloadSpec(
        "charnames_gpt", traits=traits, params=SIZES | params, global_batch=4, micro_batches=2
    )
    return workloads.make(spec)


def make(work: Workload, rank: int, world: int, spec: OptimizerSpec, **options: Any) -> Any:
    """The system on this rank, set up; rank 0 alone has the state."""
    system = registry.load(NAME)()
    state = work.state() if rank == 0 else None
    system.setup(work.build_for(rank), state, spec, Mesh({"tensor": world}), options)
    return system


def copies(pieces: list[Piece]) -> list[Piece]:
    """Pieces that stay as they are."""
    return [Piece(**{**vars(piece), "tensor": piece.tensor.clone()}) for piece in pieces]


# ------------------------------------------------------------------------------------ refusals


def test_options_are_refused_with_what_is_valid() -> None:
    with pytest.raises(Refused, match="valid: checkpoint, loss_parallel, own_loss, sequence"):
        registry.load(NAME).capabilities({"async": True})


@pytest.mark.parametrize(
    ("params", "world", "options", "told"),
    [
        (
            {"heads": 4},
            3,
            {},
            "'blocks.0.attention.qkv' has 4 heads of keys .* 3 ranks",
        ),
        ({"kv_heads": 2}, 3, {}, "has 2 heads of keys and values"),
        ({"label_smoothing": 0.1}, 2, {"loss_parallel": True}, "Currently not supported"),
    ],
)
def test_what_torch_would_cut_in_the_wrong_place_is_refused_on_every_rank(
    params: dict[str, Any], world: int, options: dict[str, Any], told: str
) -> None:
    work = workload(**params)

    def body(rank: int, world: int) -> None:
        with pytest.raises(Refused, match=told):
            make(work, rank, world, ADAMW, **options)

    succeed(body, world)


def test_positions_that_ranks_would_share_unequally_are_refused() -> None:
    work = workload(seq=7)

    def body(rank: int, world: int) -> None:
        system = make(work, rank, world, ADAMW, sequence_parallel=True)
        with pytest.raises(
            Refused, match="7 positions cannot be cut into equal parts for the 2 ranks"
        ):
            system.step(work.batch(0, 1)[0], lambda point: None)

    succeed(body, 2)


@pytest.mark.parametrize(
    ("name", "told"), [("digits_cnn", "has no embed.position, embed.token"), ("plain", "axis")]
)
def test_other_models_and_meshes_are_refused(name: str, told: str) -> None:
    work = workload() if name == "plain" else workloads.make(WorkloadSpec(name))

    def body(rank: int, world: int) -> None:
        axes = {"replicate" if name == "plain" else "tensor": world}
        with pytest.raises(Refused, match=told):
            registry.load(NAME)().setup(work.build_for(rank), None, ADAMW, Mesh(axes), {})

    succeed(body, 2)


def test_a_scaler_is_refused_where_torch_would_meet_two_kinds_of_tensors() -> None:
    work = workload("prime_sized")
    spec = OptimizerSpec(scaler=ScalerSpec(initial=1024.0))

    def body(rank: int, world: int) -> None:
        with pytest.raises(Refused, match=r"blocks\.1\.odd.*mix of plain tensors and DTensors"):
            make(work, rank, world, spec)

    succeed(body, 2)


# -------------------------------------------------------------------------------------- pieces


@pytest.mark.parametrize("options", [{}, BOTH])
@pytest.mark.parametrize("traits", [("frozen", "prime_sized"), ("tied_over_units", "scalar")])
def test_pieces_cover_all_that_there_is(options: dict[str, Any], traits: tuple[str, ...]) -> None:
    work = workload(*traits, vocab=96 if options else 97, kv_heads=3)

    def body(rank: int, world: int) -> dict[str, Any]:
        system = make(work, rank, world, ADAMW, **options)
        return held_in_a_step(system, work.batch(0, 1)[0])

    found = succeed(body, 3)
    complete(work, found)
    blocks = [p for p in found[1]["parameters"] if p["name"] == "blocks.0.attention.qkv.weight"]
    assert [p["slices"][0] for p in blocks] == [(4, 8), (14, 16), (20, 22)]


def test_initial_parameters_are_those_of_rank_0() -> None:
    work = workload("tied_over_units")

    def body(rank: int, world: int) -> Any:
        system = make(work, rank, world, ADAMW, **BOTH)
        return rows(system.local_state("parameters")), system.full_state("parameters")

    found = succeed(body, 3)
    whole = assembled({rank: pieces for rank, (pieces, _) in enumerate(found)})
    for name, tensor in work.state().items():
        assert torch.equal(whole.tensors[name][0], tensor)
        for _, full in found:
            assert torch.equal(full[name], tensor)


@pytest.mark.parametrize("options", [{}, BOTH])
def test_a_fresh_instance_goes_on_from_local_pieces(options: dict[str, Any]) -> None:
    work = workload("rebound_buffer", "frozen")

    def body(rank: int, world: int) -> None:
        first: Implementation = make(work, rank, world, ADAMW, **options)
        for step in range(2):
            first.step(work.batch(step, 1)[0], lambda point: None)
        second: Implementation = make(work, rank, world, ADAMW, **options)
        for kind in KINDS:
            if kind != "gradients":
                second.load_pieces(kind, copies(first.local_state(kind)))
        for system in (first, second):
            system.step(work.batch(2, 1)[0], lambda point: None)
        for kind in KINDS:
            for one, two in zip(first.local_state(kind), second.local_state(kind), strict=True):
                assert (one.name, one.slices) == (two.name, two.slices)
                assert torch.equal(one.tensor, two.tensor), one.name

    succeed(body, 2)


def test_a_rank_may_hold_several_blocks_of_one_name() -> None:
    """The rows of a fused projection, split by heads: a third of the queries, keys and values."""
    full = torch.arange(24.0).reshape(12, 2)

    def blocks(rank: int) -> list[dict[str, object]]:
        rows = [(part * 4 + rank * 2, part * 4 + rank * 2 + 2) for part in range(3)]
        return [
            {
                "name": "qkv",
                "global_shape": [12, 2],
                "slices": [[start, stop], [0, 2]],
                "flat_range": None,
                "replica": 0,
                "tensor": full[start:stop],
            }
            for start, stop in rows
        ]

    found = assembled({0: blocks(0), 1: blocks(1)})
    assert not found.problems
    assert torch.equal(found.tensors["qkv"][0], full)
    assert assembled({0: blocks(0), 1: blocks(0)}).problems


def test_a_partial_sum_is_no_piece() -> None:
    def body(rank: int, world: int) -> None:
        mesh = Mesh({"tensor": world}).device_mesh
        tensor = DTensor.from_local(torch.ones(2), mesh, [Partial()])
        with pytest.raises(ValueError, match=r"'norm\.weight' is a partial sum"):
            dtensor_pieces("norm.weight", tensor, None, 0)

    succeed(body, 2)


# ------------------------------------------------------------------------------------- promises


def model_facts_of(traits: tuple[str, ...] = (), **fields: Any) -> ModelFacts:
    """2 ranks: 4 samples of 4 positions in 2 parts; one block of width 8."""
    sizes = {"width": 8, "heads": 2, "seq": 4, "layers": 1, "vocab": 97}
    values: dict[str, Any] = {"optimizer": OptimizerSpec(clip_norm=1.0), **fields}
    case = Case(
        id="hand/counted",
        scenario="hand",
        implementation=NAME,
        backend="in_memory",
        mesh={"tensor": 2},
        workload=WorkloadSpec(
            "charnames_gpt", traits=traits, params=sizes, global_batch=4, micro_batches=2
        ),
        lane="fp64",
        checks=("traffic",),
        steps=1,
        **values,
    )
    return facts_of(case).model_facts


def promised(traits: tuple[str, ...] = (), **options: Any) -> dict[str, tuple[int, int]]:
    """Bytes and calls of a step by operation."""
    found: dict[str, tuple[int, int]] = {}
    for flow in TorchTensorParallel(model_facts_of(traits, options=options)).flows():
        total, calls = found.get(flow.operation, (0, 0))
        assert isinstance(flow.calls, int)
        found[flow.operation] = (total + int(flow.bytes), calls + flow.calls)
    return found


#: Of the hidden state of all samples: 4 x 4 positions x 8 features x 8 bytes.
HIDDEN = 1024
#: 98 padded columns of logits, gathered from 2 ranks in each of 2 parts.
LOGITS = (16 * 98 * 8, 4)


def test_bytes_by_hand() -> None:
    # 3 layers split by columns and 3 by rows, each reduced once by 2 ranks in each of 2 parts;
    # 18 norms in one call.
    assert promised() == {
        "all_reduce": (2 * 6 * HIDDEN + 2 * 18 * 8, 24 + 2),
        "all_gather": LOGITS,
    }
    # A maximum, a sum and a logit of 16 targets.
    assert promised(loss_parallel=True) == {
        "all_reduce": (2 * (6 * HIDDEN + 18 * 8 + 3 * 16 * 8), 24 + 2 + 12)
    }
    # Partial sums: 4 x 8 positions' features; weight and bias of 3 norms.
    assert promised(sequence_parallel=True) == {
        "reduce_scatter": (6 * HIDDEN, 24),
        "all_gather": (6 * HIDDEN + LOGITS[0], 24 + LOGITS[1]),
        "all_reduce": (2 * ((32 + 6 * 8) * 8 + 18 * 8), 2 * 7 + 2),
    }


@pytest.mark.parametrize(
    ("dtype", "spec", "wanted"),
    [
        # 2 losses, a norm, 2 numbers of ranks.
        ("float64", OptimizerSpec(clip_norm=1.0), 2 * 8 + 8 + 2 * 4),
        ("float64", OptimizerSpec(), 2 * 8 + 2 * 4),
        ("float32", OptimizerSpec(clip_norm=1.0), 2 * 4 + 4 + 2 * 4),
        ("bfloat16", OptimizerSpec(), 2 * 4 + 2 * 4),
        ("float32", OptimizerSpec(scaler=ScalerSpec()), 2 * 4 + (2 + 4) * 4),
    ],
)
def test_numbers_left_behind_are_counted_one_by_one(
    dtype: str, spec: OptimizerSpec, wanted: int
) -> None:
    cost_model = TorchTensorParallel(model_facts_of(dtype=dtype, optimizer=spec))
    assert cost_model.unclassified_limit(0, 0) == wanted


def test_modules_without_a_style_gather_twice_and_are_no_dtensors() -> None:
    gathered, calls = promised(sequence_parallel=True)["all_gather"]
    more, again = promised(("prime_sized",), sequence_parallel=True)["all_gather"]
    assert (more - gathered, again - calls) == (2 * HIDDEN, 8)
    assert promised(("prime_sized",))["all_reduce"] == promised()["all_reduce"]


# ---------------------------------------------------------------------- what torch leaves to users


@pytest.mark.parametrize(
    ("layout", "found"), [(Partial(), "reduced"), (Replicate(), "cut"), (Shard(0), "as it is")]
)
def test_gradients_are_laid_out_as_their_parameters(layout: Any, found: str) -> None:
    def body(rank: int, world: int) -> None:
        mesh = Mesh({"tensor": world}).device_mesh
        target: Any = Replicate() if found == "reduced" else Shard(0)
        whole = torch.arange(4.0)
        local = whole.chunk(2)[rank] if found == "as it is" else whole
        own = whole.chunk(2)[rank] if target == Shard(0) else whole
        parameter = torch.nn.Parameter(DTensor.from_local(own, mesh, [target]))
        parameter.grad = DTensor.from_local(local, mesh, [layout])
        settle_gradient(parameter)
        assert isinstance(parameter.grad, DTensor)
        assert parameter.grad.placements == (target,)
        wanted = 2 * whole if found == "reduced" else own
        assert torch.equal(parameter.grad.to_local(), wanted)

    succeed(body, 2)


def test_equal_chunks_of_the_reordered_rows_are_by_heads() -> None:
    (attention,) = [
        part
        for name, part in workload(kv_heads=3).build_for(0)("meta").named_modules()
        if name == "blocks.0.attention"
    ]
    order = rows_by_rank(attention, 3)
    # 12 rows of queries, 6 of keys, 6 of values; heads of 2 rows.
    assert order[:8] == [0, 1, 2, 3, 12, 13, 18, 19]
    assert sorted(order) == list(range(24))
    assert runs(order[:8]) == [(0, 0, 4), (4, 12, 2), (6, 18, 2)]
    assert runs([]) == []
    assert runs(rows_by_rank(attention, 1)) == [(0, 0, 24)]


def test_modules_without_a_style_are_found_once_and_outermost() -> None:
    model = workload("frozen", "prime_sized", "scalar").build_for(0)("meta")
    units = ["blocks.0", "blocks.1"]
    plain = plan_styles(model, units, sequence=False, split_outputs=False)
    shared = plan_styles(model, units, sequence=True, split_outputs=True)
    assert set(shared) - set(plain) == {"front", "blocks.1.odd", "final"}
    assert set(outsiders(model, plain)) == {"front", "blocks.1.odd", "final"}
    assert set(plain) == {
        *("embed.token", "embed.position", "norm", "head"),
        *(f"{u}.{n}" for u in units for n in ("norm1", "norm2", "mlp.up", "mlp.down")),
        *(f"{u}.attention.{n}" for u in units for n in ("qkv", "out")),
    }


def test_a_shared_context_is_entered_by_the_first_and_left_by_the_last() -> None:
    log: list[str] = []

    @contextmanager
    def context() -> Any:
        log.append("in")
        yield
        log.append("out")

    shared, both = SharedContext(context), threading.Barrier(4)

    def body() -> None:
        for _ in range(2):
            with shared():
                both.wait()
                assert log[-1] == "in"
                with shared():
                    both.wait()
                both.wait()
            both.wait()

    threads = [threading.Thread(target=body) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert log == ["in", "out", "in", "out"]
