"""Tensor and sequence parallelism: conjugate operators, a loss of split logits, parts of layers."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from local_ranks import succeed
from made_case import made_case
from pieces import assembled, rows, whole_tensors
from torch import Tensor
from torch.nn import functional as F

from shardproof import registry, workloads
from shardproof.case import WorkloadSpec
from shardproof.comm import Comm, Mesh
from shardproof.contract import CrossEntropy, OptimizerSpec, Piece, Point, Refused
from shardproof.costs import CostModel, cost_model_class
from shardproof.costs.expression import facts_of
from shardproof.impls.reference import tensor
from shardproof.impls.reference.engine.handle import Context
from shardproof.impls.reference.tensor import layers, operators
from shardproof.impls.reference.tensor.cuts import Block, Cut, Split, Uncut
from shardproof.impls.reference.tensor.loss import cross_entropy
from shardproof.oracle import training
from shardproof.workloads import Workload

pytestmark = pytest.mark.usefixtures("one_thread")

CLIPPED = OptimizerSpec("adamw", 0.01, weight_decay=0.1, clip_norm=0.05)
WIDE = {"float64": 1e-13, "float32": 1e-5, "bfloat16": 0.02}


def workload(*traits: str, name: str = "charnames_gpt", **params: Any) -> Workload:
    """A GPT of 12 heads of 2 features and 2 layers, unless ``params`` say otherwise."""
    gpt = {"width": 24, "heads": 12, "layers": 2, "seq": 8} if name == "charnames_gpt" else {}
    spec = WorkloadSpec(name, traits=traits, params=gpt | params, global_batch=8)
    return workloads.make(spec)


def comm_of(size: int) -> Comm:
    return Mesh({"tensor": size}).comm("tensor")


# ------------------------------------------------------------------------------- the operators


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize("length", [6, 7])
def test_operators_are_adjoint_over_all_ranks(world: int, length: int) -> None:
    """Summed over the ranks ``<A x, y> = <x, A* y>``, for what each rank gives and gets.

    ``f`` and ``f_bar`` stand between a copy on each rank, counted once, and terms.
    """

    def inner(apply: Callable[[Tensor], Tensor], given: Tensor, copies: int) -> Tensor:
        x = given.clone().requires_grad_()
        out = apply(x)
        y = draw(*out.shape, seed=100 + copies)
        (gradient,) = torch.autograd.grad(out, x, y)
        return torch.stack([(out.detach() * y).sum(), (x.detach() * gradient).sum()])

    def body(rank: int, size: int) -> list[Tensor]:
        comm, share = comm_of(size), operators.share(length, size)
        own, same = draw(2, length, 3, seed=rank), draw(2, length, 3)
        part = draw(2, share, 3, seed=rank)
        return [
            inner(lambda x: operators.f(x, comm), same, 1),
            inner(lambda x: operators.f_bar(x, comm), own, 1),
            inner(lambda x: operators.g(x, comm), part, 2 + rank),
            inner(lambda x: operators.g_bar(x, comm), own, 2 + rank),
        ]

    f, f_bar, g, g_bar = (torch.stack(found) for found in zip(*succeed(body, world), strict=True))
    for told in (g, g_bar):
        left, right = told.sum(0)
        torch.testing.assert_close(left, right)
    # One copy of what is replicated counts: f's input, f_bar's output.
    torch.testing.assert_close(f[:, 0].sum(), f[0, 1])
    torch.testing.assert_close(f_bar[0, 0], f_bar[:, 1].sum())


def test_conjugates_are_each_others_backward() -> None:
    def body(rank: int, size: int) -> None:
        comm = comm_of(size)
        for one, other, shapes in (
            (operators.f, operators.f_bar, ((2, 6, 3), (2, 6, 3))),
            (operators.g, operators.g_bar, ((2, 2, 3), (2, 6, 3))),
        ):
            for forward, backward, (before, after) in (
                (one, other, shapes),
                (other, one, shapes[::-1]),
            ):
                x = draw(*before, seed=rank).requires_grad_()
                y = draw(*after, seed=10 + rank)
                (gradient,) = torch.autograd.grad(forward(x, comm), x, y)
                assert torch.equal(gradient, backward(y, comm))

    succeed(body, 3)


@pytest.mark.parametrize("world", [1, 2, 3, 5])
@pytest.mark.parametrize("dtype", list(WIDE))
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_split_cross_entropy_is_that_of_torch(world: int, dtype: str, smoothing: float) -> None:
    total = 13  # over 5 ranks: 3, 3, 3, 3, 1
    logits = (10 * draw(40, total)).to(getattr(torch, dtype))
    targets = torch.arange(40) % total
    targets[::7] = -100
    weights = draw(40, seed=1).abs().to(logits.dtype)

    def truth() -> tuple[Tensor, Tensor]:
        whole = logits.double().requires_grad_()
        losses = F.cross_entropy(whole, targets, reduction="none", label_smoothing=smoothing)
        (gradient,) = torch.autograd.grad((weights.double() * losses).sum(), whole)
        return losses.detach(), gradient

    def body(rank: int, size: int) -> tuple[Tensor, Tensor]:
        comm, share = comm_of(size), operators.share(total, size)
        own = range(rank * share, min(total, (rank + 1) * share))
        mine = logits[:, own.start : own.stop].clone().requires_grad_()
        losses = cross_entropy(mine, targets, CrossEntropy(smoothing), own, total, comm)
        (gradient,) = torch.autograd.grad((weights * losses).sum(), mine)
        return losses.detach(), gradient

    losses, gradient = truth()
    told = succeed(body, world)
    for found, _ in told:
        assert torch.equal(found, told[0][0])
        assert bool((found[::7] == 0).all())
    bound = WIDE[dtype] * float(losses.abs().max())
    assert float((told[0][0].double() - losses).abs().max()) <= bound
    whole = torch.cat([part for _, part in told], -1).double()
    assert float((whole - gradient).abs().max()) <= WIDE[dtype] * float(gradient.abs().max())


def test_split_cross_entropy_of_huge_logits_is_finite() -> None:
    def body(rank: int, size: int) -> Tensor:
        logits = torch.tensor([[1e4, -1e4]] if rank else [[-1e4, 0.0]], dtype=torch.float64)
        own = range(2 * rank, 2 * rank + 2)
        return cross_entropy(logits, torch.tensor([1]), CrossEntropy(), own, 4, comm_of(size))

    assert [float(loss) for loss in succeed(body, 2)] == [1e4, 1e4]


# -------------------------------------------------------------------------------------- the cuts


def merged(per_rank: list[list[Piece]]) -> dict[int, Tensor]:
    """Copies of the one name in ``per_rank``, every element once."""
    state = assembled({rank: [vars(p) for p in found] for rank, found in enumerate(per_rank)})
    assert not state.problems, state.problems
    (copies,) = state.tensors.values()
    return copies


@settings(max_examples=60)
@given(st.data())
def test_flat_parts_of_a_local_tensor_make_the_whole(data: st.DataObject) -> None:
    """A data-parallel strategy cuts what tensor parallelism left into flat ranges.

    Of 12 rows 8 are split evenly, 4 over as many ranks as are left when ``copies`` share.
    """
    ranks, copies = data.draw(st.sampled_from([(1, 1), (2, 1), (2, 2), (4, 1), (4, 2), (4, 4)]))
    shape = data.draw(
        st.sampled_from([(12,), (12, 5), (5, 12), (1, 12), (12, 2, 3), (2, 12, 3), (3, 2, 12)])
    )
    dim, own, kv = shape.index(12), 8 // ranks, 4 * copies // ranks
    whole = torch.arange(torch.Size(shape).numel(), dtype=torch.float64).view(shape)
    found = []
    for rank in range(ranks):
        first = 8 + rank // copies * kv
        blocks = (
            Block(rank * own, (rank + 1) * own),
            Block(first, first + kv, rank % copies, copies),
        )
        cut: Cut = Split(shape, dim, blocks, (8, 12))
        local = cut.local(whole)
        inner = data.draw(st.lists(st.integers(0, local.numel()), max_size=3))
        pieces = []
        for start, stop in itertools.pairwise([0, *sorted(inner), local.numel()]):
            flat = local.reshape(-1)[start:stop]
            part = Piece("w", tuple(local.shape), flat, flat_range=(start, stop))
            pieces += cut.place(part)
        found.append(pieces)
    for copy in merged(found).values():
        assert torch.equal(copy, whole)


def test_copies_are_numbered_over_both_axes() -> None:
    piece = Piece.whole("w", torch.ones(2, 3), replica=2)
    assert [p.replica for p in Uncut((2, 3), 1, 4).place(piece)] == [9]
    cut = Split((4, 3), 0, (Block(0, 1), Block(2, 3, 1, 2)), (2, 4))
    assert [(p.slices, p.replica, p.incomplete) for p in cut.place(piece)] == [
        (((0, 1), (0, 3)), 2, False),
        (((2, 3), (0, 3)), 5, True),
    ]


def test_terms_of_shared_rows_add_up() -> None:
    cuts = [
        Split((6,), 0, (Block(r, r + 1), Block(4 + r // 2, 5 + r // 2, r % 2, 2)), (4, 6))
        for r in range(4)
    ]
    local = [torch.tensor([float(r), 10.0 + r]) for r in range(4)]
    total = sum(cut.term(own) for cut, own in zip(cuts, local, strict=True))  # type: ignore[misc]
    assert isinstance(total, Tensor)
    for cut, own in zip(cuts, local, strict=True):
        cut.take(own, total)
    assert [own.tolist() for own in local] == [[0, 21], [1, 21], [2, 25], [3, 25]]


# ---------------------------------------------------------------------------------- the strategy


def drive(
    work: Workload, spec: OptimizerSpec, rank: int, world: int, steps: int = 2, **options: Any
) -> tuple[list[dict[str, Any]], Any]:
    """What this rank held in every step, and the system."""
    system = registry.load("reference/tensor")()
    state = work.state() if rank == 0 else None
    system.setup(work.build_for(rank), state, spec, Mesh({"tensor": world}), options)
    told = []
    for step in range(steps):
        seen: dict[str, Any] = {}

        def observe(point: Point, seen: dict[str, Any] = seen) -> None:
            kinds = ("parameters", "optimizer") if point == "after_update" else ("gradients",)
            for kind in kinds:
                seen[f"{point} {kind}"] = rows(system.local_state(kind))  # type: ignore[arg-type]

        result = system.step(work.batch(step, 1)[0], observe)
        told.append(seen | {"loss": float(result.loss), "norm": result.norm})
    return told, system


def error(have: Tensor, want: Tensor) -> float:
    scale = float(want.abs().max()) if want.numel() else 0.0
    return float((have - want).abs().max()) / scale if scale else 0.0


def worst(ranks: list[list[dict[str, Any]]], truth: dict[str, Any]) -> float:
    """Largest error of losses, norms, gradients and parameters; copies must be equal."""
    errors = []
    for step, true in enumerate(truth["steps"]):
        for moment, wanted in (
            ("gradients_final gradients", true["gradients"]),
            ("after_update parameters", true["parameters"]),
        ):
            held = {rank: told[step][moment] for rank, told in enumerate(ranks)}
            for name, whole in whole_tensors(held, wanted).items():
                if not name.endswith("qkv.bias"):  # AdamW turns noise of zeros into updates
                    errors.append(error(whole, wanted[name]))
        for told in ranks:
            errors.append(abs(told[step]["loss"] / true["loss"] - 1))
            if told[step]["norm"] is not None:
                errors.append(abs(float(told[step]["norm"]) / float(true["norm"]) - 1))
    return max(errors)


ODD = ("tied_over_units", "frozen", "conditional_late_step", "dropout_counter", "scalar", "empty")


@pytest.mark.parametrize("options", [{}, {"sequence_parallel": True}, {"loss_parallel": False}])
@pytest.mark.parametrize(
    ("world", "params"),
    [
        (1, {}),
        (2, {"kv_heads": 4, "vocab": 97, "label_smoothing": 0.1}),
        (3, {"kv_heads": 1, "vocab": 97}),
        (4, {"kv_heads": 2}),
    ],
)
def test_equals_the_oracle(world: int, params: dict[str, Any], options: dict[str, Any]) -> None:
    work = workload(*ODD, "unequal_tokens", "ignore_index", **params)
    for spec in (OptimizerSpec(), CLIPPED):
        truth = training.train(work, spec, 1, 2).to_dict()
        told = succeed(lambda r, n: drive(work, spec, r, n, **options)[0], world)  # noqa: B023
        assert worst(told, truth) <= 1e-11


@pytest.mark.parametrize("is_sequence", [False, True])
@pytest.mark.parametrize("world", [2, 3])
def test_sums_in_each_backward_are_the_same(world: int, is_sequence: bool) -> None:
    work, spec = workload(*ODD, kv_heads=1), OptimizerSpec()
    truth = training.train(work, spec, 1, 2).to_dict()
    options = {"sequence_parallel": is_sequence, "sum_each_backward": True, "recompute_every": 1}
    told = succeed(lambda r, n: drive(work, spec, r, n, **options)[0], world)
    assert worst(told, truth) <= 1e-12


@pytest.mark.parametrize("is_sequence", [False, True])
def test_dyadic_numbers_agree_bit_for_bit(is_sequence: bool) -> None:
    work = workload("tied_over_units", name="dyadic_mlp", width=30)
    spec = OptimizerSpec(lr=0.125, momentum=0.0)
    truth = training.train(work, spec, 1, 2).to_dict()
    for world in (2, 3, 5):
        told = succeed(
            lambda r, n: drive(work, spec, r, n, sequence_parallel=is_sequence)[0], world
        )
        assert worst(told, truth) == 0.0


def test_a_split_sequence_is_rounded_no_more_than_a_whole_one() -> None:
    """In bfloat16 a strided input of a linear layer would cost it one rounding more."""
    work = workloads.make(WorkloadSpec("charnames_gpt"), "bfloat16")
    ((micro, *_), *_) = work.batch(0, 1)[0].windows

    def body(rank: int, size: int) -> list[Tensor]:
        outputs, context = [], Context(roles=work.roles)
        for is_sequence in (False, True):
            module = work.build_for(rank)()
            work.load(module)
            options = tensor.Options(sequence_parallel=is_sequence, loss_parallel=False)
            handle = tensor.apply(module, {"tensor": comm_of(size)}, options, context)
            outputs.append(module(micro.inputs).detach())
            handle.close()
        return outputs

    for whole, split in succeed(body, 2):
        assert torch.equal(whole, split)


def test_each_rank_holds_its_part_under_the_same_names() -> None:
    work = workload(kv_heads=2, vocab=97)

    def body(rank: int, size: int) -> dict[str, tuple[int, ...]]:
        module = work.build_for(rank)()
        names = [name for name, _ in module.named_parameters()]
        forwards = [part.forward for part in module.modules()]
        options = tensor.Options().resolved(work.build_for(rank))
        handle = tensor.apply(module, {"tensor": comm_of(size)}, options, Context(roles=work.roles))
        shapes = {name: tuple(p.shape) for name, p in module.named_parameters()}
        assert list(shapes) == names
        handle.close()
        assert [part.forward for part in module.modules()] == forwards
        return shapes

    told = succeed(body, 4)
    assert [shapes["head.weight"] for shapes in told] == [(25, 24)] * 3 + [(22, 24)]
    for shapes in told:
        assert shapes["blocks.0.attention.qkv.weight"] == (6 + 2 + 2, 24)
        assert shapes["blocks.0.attention.out.weight"] == (24, 6)
        assert shapes["blocks.0.mlp.up.bias"] == (24,)
        assert shapes["blocks.0.mlp.down.bias"] == (24,)
        assert shapes["norm.weight"] == (24,)


def test_only_layers_that_have_a_role_are_split() -> None:
    work = workload(kv_heads=2)
    roles = {name: role for name, role in work.roles.items() if not name.startswith("blocks.0.mlp")}

    def body(rank: int, size: int) -> dict[str, tuple[int, ...]]:
        module = work.build_for(rank)()
        options = tensor.Options().resolved(work.build_for(rank))
        handle = tensor.apply(module, {"tensor": comm_of(size)}, options, Context(roles=roles))
        shapes = {name: tuple(p.shape) for name, p in module.named_parameters()}
        handle.close()
        return shapes

    for shapes in succeed(body, 2):
        assert shapes["blocks.0.mlp.up.weight"] == (96, 24)
        assert shapes["blocks.1.mlp.up.weight"] == (48, 24)


def test_state_is_gathered_evaluated_and_loaded() -> None:
    work = workload(kv_heads=1, vocab=97)

    def body(rank: int, size: int) -> tuple[dict[str, Tensor], float]:
        _, system = drive(work, CLIPPED, rank, size, steps=1, sequence_parallel=True)
        state, loss = system.full_state("parameters"), float(system.evaluate(work.batch(1, 1)[0]))
        fresh = registry.load("reference/tensor")()
        other = work.build_for(9)() if rank == 0 else None
        given = None if other is None else {n: p.detach() for n, p in other.named_parameters()}
        mesh, options = Mesh({"tensor": size}), {"sequence_parallel": True}
        fresh.setup(work.build_for(rank), given, CLIPPED, mesh, options)
        for kind in ("parameters", "optimizer"):
            fresh.load_pieces(kind, [*map(_copy, system.local_state(kind))])  # type: ignore[arg-type]
        losses = [float(s.step(work.batch(1, 1)[0], lambda _: None).loss) for s in (system, fresh)]
        assert losses[0] == losses[1]
        for one, two in zip(
            system.local_state("optimizer"), fresh.local_state("optimizer"), strict=True
        ):
            assert (one.name, one.slices) == (two.name, two.slices)
            assert torch.equal(one.tensor, two.tensor)
        return state, loss

    truth = training.train(work, CLIPPED, 1, 1).to_dict()["steps"][0]["parameters"]
    for state, loss in succeed(body, 3):
        assert set(state) == set(truth)
        assert max(error(state[name], truth[name]) for name in truth if "qkv" not in name) < 1e-11
        want = training.evaluator(work)(state, work.batch(1, 1)[0].micro_batches)
        assert abs(loss / want - 1) < 1e-12


def _copy(piece: Piece) -> Piece:
    return Piece(**(vars(piece) | {"tensor": piece.tensor.detach().clone()}))


# --------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("world", "params", "message"),
    [
        (3, {"heads": 4}, "'tensor' = 3: 'blocks.0.attention.qkv' has 4 heads and 4 KV.*: 1, 2, 4"),
        (2, {"heads": 6, "kv_heads": 3}, "has 6 heads and 3 KV heads.*valid: 1, 3, 6"),
        (5, {"heads": 12}, "valid: 1, 2, 3, 4, 6, 12"),
    ],
)
def test_heads_that_ranks_cannot_share(world: int, params: dict[str, Any], message: str) -> None:
    def body(rank: int, size: int) -> None:
        with pytest.raises(Refused, match=message):
            drive(workload(**params), OptimizerSpec(), rank, size)

    succeed(body, world)


def test_models_and_losses_that_it_cannot_split() -> None:
    def body(rank: int, size: int) -> None:
        with pytest.raises(Refused, match=r"this model has no 'embed.token', 'blocks.\*.up'"):
            drive(workload(name="digits_cnn"), OptimizerSpec(), rank, size)
        with pytest.raises(
            Refused, match=r"loss is not a cross-entropy.*set loss_parallel to false or null"
        ):
            drive(workload(name="dyadic_mlp"), OptimizerSpec(), rank, size, loss_parallel=True)
        with pytest.raises(Refused, match=r"60 (in|out)put features"):
            drive(workload(name="dyadic_mlp", width=30), OptimizerSpec(), rank, size)

    succeed(body, 8)


def test_a_vocabulary_leaves_no_rank_without_rows() -> None:
    def body(rank: int, size: int) -> None:
        with pytest.raises(Refused, match=r"5 rows .each rank needs at least 1 row.*: 1, 2, 3, 5"):
            layers.classes("head", 5, comm_of(size))

    succeed(body, 4)


# --------------------------------------------------------------------------------------- promises


def promised(ranks: int, params: dict[str, Any], **options: Any) -> CostModel:
    """What is promised for one step of 8 samples in 2 micro-batches of 16 positions, in fp32."""
    spec = WorkloadSpec("charnames_gpt", params=params, global_batch=8)
    case = made_case(
        "reference/tensor", {"tensor": ranks}, workload=spec, dtype="float32", options=options
    )
    return cost_model_class("tensor")(facts_of(case).model_facts)


def test_bytes_of_a_step_are_those_counted_by_hand() -> None:
    """Two layers of width 24 and 12 heads; all-reduces move twice a gather's bytes."""
    sizes = {"width": 24, "heads": 12, "layers": 2, "vocab": 97}
    hidden, targets = 8 * 16 * 24 * 4, 8 * 16 * 4
    ten = 4 * 2 + 2
    assert promised(1, sizes).payload() == 0
    whole = promised(2, sizes)
    assert whole.payload() == 2 * (ten * hidden + 3 * targets)
    assert sum(flow.range[0] for flow in whole.flows()) == 2 * 2 * (ten + 2)
    smoothed = promised(2, sizes | {"label_smoothing": 0.1})
    assert smoothed.payload() == whole.payload() + 2 * targets
    gathered = promised(2, sizes, loss_parallel=False)
    assert gathered.payload() == 2 * ten * hidden + 8 * 16 * 98 * 4
    again = promised(2, sizes, recompute_every=1)
    assert again.payload() == whole.payload() + 2 * (2 * 2) * hidden
    # Norms (5 of 2 x 24), biases behind rows (2 a layer), positions; 16 are padded to 18.
    split, padded = promised(3, sizes, sequence_parallel=True), hidden // 16 * 18
    terms = (5 * 2 * 24 + 2 * 2 * 24 + 16 * 24) * 4
    assert split.payload() == 2 * (2 * ten * padded + 2 * 3 * targets + 2 * terms)
    shared = promised(4, sizes | {"kv_heads": 2})
    kv = 2 * (2 * 2 * 2) * (24 + 1) * 4  # two layers, keys and values of two heads of two rows
    assert shared.payload() == 2 * 3 * (ten * hidden + 3 * targets + kv)


def test_elements_of_a_rank_are_those_counted_by_hand() -> None:
    sizes = {"width": 24, "heads": 12, "kv_heads": 2, "layers": 1, "vocab": 97}
    cost_model = promised(4, sizes)
    first, last = (cost_model.local(rank).parameters for rank in (0, 3))
    assert (first["head.weight"], last["head.weight"]) == (25 * 24, 22 * 24)
    assert first["blocks.0.attention.qkv.weight"] == (6 + 2 + 2) * 24
    assert first["blocks.0.mlp.down.bias"] == 24
    apart = cost_model.by_layout(0)
    assert sum(apart["replicated"].values()) == 16 * 24 + 3 * 2 * 24 + 2 * 24
    assert set(apart["split"]) | set(apart["replicated"]) == set(first)
