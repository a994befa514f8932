"""Context parallelism: cuts, results of whole attention, and the scores that each rank computes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from local_ranks import succeed
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from shardproof.comm import Mesh
from shardproof.costs.context.exchange import Exchange
from shardproof.costs.model_facts import ModelFacts
from shardproof.impls.pytorch import context as upstream
from shardproof.impls.reference.context import Choices, ContextParallel, block
from shardproof.impls.reference.context.cuts import positions
from shardproof.impls.reference.context.exchanges import Gathered, Heads
from shardproof.impls.reference.context.ring import Ring, Seen
from shardproof.registry.declaration import Declaration
from shardproof.workloads.gpt import CoreAttention
from shardproof.workloads.layers import Span

CUTS = ("contiguous", "zigzag", "striped")
METHODS: dict[str, Any] = {"ring": Ring, "all_gather": Gathered, "all_to_all": Heads}


@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize(("length", "ranks"), [(12, 2), (13, 3), (2, 4), (1, 1)])
def test_each_position_lies_on_one_rank(cut: Any, length: int, ranks: int) -> None:
    own = [positions(length, ranks, rank, cut) for rank in range(ranks)]
    assert sorted(torch.cat(own).tolist()) == list(range(length))
    assert all(part.tolist() == sorted(part.tolist()) for part in own)
    facts = ModelFacts({"context": ranks}, {}, ())
    exchange = Exchange(facts, "ring", cut)
    assert [part.tolist() for part in own] == [exchange.held(r, length) for r in range(ranks)]


def test_a_zigzag_gives_each_rank_an_early_and_a_late_chunk() -> None:
    assert positions(8, 2, 0, "zigzag").tolist() == [0, 1, 6, 7]
    assert positions(8, 2, 1, "zigzag").tolist() == [2, 3, 4, 5]


KERNEL = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default


class Scores(TorchDispatchMode):
    """Counts the scores of each block: elements of a product of queries and keys, or of the kernel
    that stores none.
    """

    def __init__(self, size: int) -> None:
        super().__init__()
        self.size, self.count = size, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is torch.ops.aten.bmm.default and args[0].shape[-1] == self.size:
            # (rows, size) x (size, columns); the second product of a block is over columns.
            self.count += result.numel()
        if func is KERNEL:
            samples, heads, rows, _ = args[0].shape
            self.count += samples * heads * rows * args[1].shape[2]
        return result


def attention(
    method: str, cut: Any, ranks: int, heads: tuple[int, int], starts: list[int] | None = None
) -> tuple[list[Tensor], list[Tensor], list[int]]:
    """Results, gradients of queries, keys and values, and scores, whole; of all ranks together."""
    length, size = 16, 64
    torch.manual_seed(0)
    shapes = [(2, heads[0], length, size), *[(2, heads[1], length, size)] * 2]
    whole = [torch.randn(shape, dtype=torch.float64) for shape in shapes]
    upstream = torch.randn(shapes[0], dtype=torch.float64)

    def span() -> Span:
        made = Span()
        made.starts = None if starts is None else torch.tensor([starts] * 2)
        return made

    def body(rank: int, world: int) -> Any:
        comm = Mesh({"context": world}).comm("context")
        core = CoreAttention(own := span())
        own.parts = [positions(length, world, r, cut) for r in range(world)]
        own.rows = own.parts[rank]
        given = [part[:, :, own.rows].clone().requires_grad_() for part in whole]
        with Scores(size) as counted:
            result = METHODS[method](comm).attend(core, *given)
        result.backward(upstream[:, :, own.rows])
        return own.rows, result.detach(), [part.grad for part in given], counted.count

    found = succeed(body, ranks)
    together = [torch.empty(shape, dtype=torch.float64) for shape in (shapes[0], *shapes)]
    for rows, result, gradients, _ in found:
        for held, part in zip(together, (result, *gradients), strict=True):
            held[:, :, rows] = part
    given = [part.clone().requires_grad_() for part in whole]
    true = CoreAttention(span())(*given)
    true.backward(upstream)
    wanted = [true.detach(), *(part.grad for part in given)]
    return together, wanted, [count for *_, count in found]


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("starts", [None, [0] * 5 + [5] * 7 + [12] * 4])
def test_results_and_gradients_are_those_of_the_whole(
    method: str, cut: str, starts: list[int] | None
) -> None:
    found, wanted, _ = attention(method, cut, 3, (6, 3), starts)
    for held, true in zip(found, wanted, strict=True):
        assert (held - true).norm() < 1e-13 * true.norm()


@pytest.mark.parametrize("has_kernel", [True, False])
@pytest.mark.parametrize("cut", CUTS)
def test_each_rank_computes_as_many_scores_as_the_formula_says(
    cut: str, has_kernel: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Counted in the products that torch carries out, not asked of the implementation."""
    monkeypatch.setattr(block, "has_kernel", lambda query: has_kernel)
    found, wanted, counted = attention("ring", cut, 4, (2, 2))
    assert (found[0] - wanted[0]).norm() < 1e-13 * wanted[0].norm()
    exchange = Exchange(ModelFacts({"context": 4}, {}, ()), "ring", cut)
    samples, heads = 2, 2
    assert counted == [samples * heads * exchange.scores(rank, 16) for rank in range(4)]
    assert (len({*counted}) == 1) == (cut == "zigzag")


def test_a_rank_that_sees_nothing_computes_nothing() -> None:
    span = SimpleNamespace(hides=Span().hides)
    seen = Seen.of(span.hides(torch.arange(4), torch.arange(4, 8)))
    assert not seen and seen.length == 4


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("samples", [1, 2])
def test_the_kernel_computes_what_the_formulas_say(
    dtype: torch.dtype, samples: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With rows that see nothing in this block, and sums over the keys of other blocks."""
    torch.manual_seed(0)
    query, gradient, result = (torch.randn(2, 3, 5, 8, dtype=dtype) for _ in range(3))
    key, value = (torch.randn(2, 3, 7, 8, dtype=dtype) for _ in range(2))
    hides = torch.rand(samples, 1, 5, 7) < 0.4
    hides[-1, :, 2] = True
    back = gradient, result, torch.randn(2, 3, 5, dtype=dtype) + 3
    assert block.has_kernel(query)

    def computed() -> list[Tensor]:
        parts = block.attend(query, key, value, hides)
        return [*parts, *block.gradients(query, key, value, hides, back)]

    by_kernel = computed()
    monkeypatch.setattr(block, "has_kernel", lambda query: False)
    for held, true in zip(by_kernel, computed(), strict=True):
        hidden = true.isinf()
        assert (held.isinf() == hidden).all()
        lost = (held - true).masked_fill(hidden, 0).norm()
        assert lost < 16 * torch.finfo(dtype).eps * true.masked_fill(hidden, 0).norm()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_kernel_gets_rows_whose_elements_are_neighbours(dtype: torch.dtype) -> None:
    """It reads no stride of the last dimension: a transposed tensor would be another one."""
    torch.manual_seed(0)
    shapes = {"query": 5, "key": 7, "value": 7, "gradient": 5, "result": 5}
    plain = {n: torch.randn(2, 3, rows, 8, dtype=dtype) for n, rows in shapes.items()}
    turned = {n: part.mT.contiguous().mT for n, part in plain.items()}
    hides, lse = torch.rand(5, 7) < 0.2, torch.randn(2, 3, 5, dtype=dtype) + 3

    def computed(query: Tensor, key: Tensor, value: Tensor, *back: Tensor) -> list[Tensor]:
        parts = block.attend(query, key, value, hides.expand(2, 1, 5, 7))
        given = (*back, lse)
        return [*parts, *block.gradients(query, key, value, hides.expand(2, 1, 5, 7), given)]

    wanted = computed(*plain.values())
    for name, part in turned.items():
        assert part.stride(-1) != 1
        found = computed(*(plain | {name: part}).values())
        assert all(torch.equal(*pair) for pair in zip(found, wanted, strict=True)), name


def test_the_kernel_gets_no_mask_where_nothing_is_hidden() -> None:
    query = torch.randn(2, 3, 5, 8)
    hides = torch.zeros(1, 1, 5, 7, dtype=torch.bool)
    assert block.added(hides, query) is None
    hides[..., 0, 1] = True
    bias = block.added(hides, query)
    assert bias is not None and bias.shape == hides.shape and bias.isinf().sum() == 1


class TokenByToken(nn.Module):
    """A mixture that drops nothing and counts nothing: one token needs no other."""

    def __init__(self, own: Span) -> None:
        super().__init__()
        self.span, self.router = own, nn.Linear(4, 2)


def test_a_mixture_without_places_and_counts_needs_no_stand_in() -> None:
    def body(rank: int, world: int) -> Any:
        module = nn.Sequential(TokenByToken(Span()))
        comm = Mesh({"context": world}).comm("context")
        parallel = ContextParallel(module, comm, Choices(), {"0.router": "router"})
        kept = len(parallel.choices)
        parallel.close()
        return kept

    assert succeed(body, 2) == [0, 0]


def test_the_ring_of_torch_runs_on_cpus_and_names_a_torch_without_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    declared = Declaration.of(upstream.PyTorchContext, {})
    assert declared.denied("gloo") == declared.denied("in_memory") == declared.lacks == ""
    assert all(declared.denied(name).startswith("needs cpu") for name in ("nccl", "gloo_cuda"))
    monkeypatch.setattr(upstream, "_LACKS", f"torch {torch.__version__} has no ring")
    assert torch.__version__ in Declaration.of(upstream.PyTorchContext, {}).missing_here("gloo", 1)
