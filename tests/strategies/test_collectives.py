"""Algorithms over send and recv, carried out: on threads, and on gloo's processes."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from local_ranks import processes, succeed
from torch import Tensor

from shardproof.backends.in_memory.hub import Hub
from shardproof.comm import Comm, Mesh, Op
from shardproof.contract import Refused
from shardproof.costs import collectives as costs
from shardproof.impls.reference.collectives import double_binary_tree, hierarchical
from shardproof.impls.reference.collectives.algorithms import ALGORITHMS
from shardproof.impls.reference.collectives.executor import Running, in_lanes
from shardproof.impls.reference.collectives.reducer import ByAlgorithm
from shardproof.impls.reference.collectives.schedule import LANE, MOST_LANES, Schedule, cut, lanes
from shardproof.impls.reference.engine.choices import Hierarchical, OfBoth
from shardproof.impls.reference.parts.reducers import Bucket
from shardproof.ledgers import traffic

pytestmark = pytest.mark.usefixtures("one_thread")

ALL_REDUCES = sorted(ALGORITHMS["all_reduce"])
OPS: tuple[Op, ...] = ("sum", "avg", "product", "min", "max")
#: Of numpy's names, which hold what torch computes with.
DTYPES = (torch.float32, torch.float64, torch.bfloat16)


def all_reduces(ranks: int) -> Iterator[tuple[str, Schedule]]:
    """All of them, hierarchical with every size of a node and the tree in small pieces."""
    yield from ALGORITHMS["all_reduce"].items()
    yield "double tree by 2", partial(double_binary_tree.rounds, piece=2)
    for size in (each for each in range(1, ranks + 1) if ranks % each == 0):
        yield f"hierarchical {size}", partial(hierarchical.rounds, ranks_per_node=size)


def drawn(rank: int, length: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """A rank's own values, of very different sizes."""
    generator = torch.Generator().manual_seed(1000 * length + rank)
    values = torch.randn(length, generator=generator, dtype=torch.float64)
    scales = torch.randint(-12, 12, (length,), generator=generator).to(torch.float64)
    return (values * 2.0**scales).to(dtype)


def bits(tensor: Tensor) -> bytes:
    return bytes(tensor.contiguous().view(torch.uint8).numpy()) if tensor.numel() else b""


def on_all(schedule: Schedule, data: Tensor, comm: Comm, op: Op = "sum") -> Tensor:
    """``data`` after the collective."""
    Running(schedule(comm.rank, comm.size, data.numel()), data, comm, op).wait()
    return data


def world(size: int) -> Comm:
    return Mesh({"replicate": size}).comm("replicate")


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 5])
def test_sums_are_right_and_equal_bit_for_bit(ranks: int) -> None:
    lengths = (0, 1, ranks - 1, ranks, ranks + 1, 3 * ranks + 2, 257)

    def body(rank: int, size: int) -> dict[str, list[bytes]]:
        comm, ends = world(size), dict[str, list[bytes]]()
        for name, schedule in all_reduces(size):
            for length in lengths:
                exact = sum(drawn(r, length, torch.float64) for r in range(size))
                for dtype in DTYPES:
                    data = on_all(schedule, drawn(rank, length, dtype), comm)
                    bound = size * torch.finfo(dtype).eps
                    largest = sum(drawn(r, length).abs().double() for r in range(size))
                    assert torch.all((data.double() - exact).abs() <= bound * largest), name
                    ends.setdefault(name, []).append(bits(data))
        return ends

    first, *others = succeed(body, ranks)
    assert all(own == first for own in others)


@pytest.mark.parametrize("ranks", [2, 3, 5])
def test_every_operation_is_that_of_the_backend(ranks: int) -> None:
    """Small integers: any order of combining gives the same bits."""

    def body(rank: int, size: int) -> None:
        comm = world(size)
        for name, schedule in all_reduces(size):
            for op in OPS:
                own = torch.tensor([1.0, 2.0, -1.0, 4.0, 0.5, -2.0, 1.0]) * (1 + rank % 2)
                wanted = own.clone()
                if op == "avg":  # gloo has none
                    comm.all_reduce(wanted)
                    wanted /= size
                else:
                    comm.all_reduce(wanted, op)
                assert torch.equal(on_all(schedule, own, comm, op), wanted), (name, op)
            whole = torch.tensor([2**40 + rank, -rank, 7])
            sums = torch.tensor([size * 2**40 + size * (size - 1) // 2, 0, 7 * size])
            sums[1] = -size * (size - 1) // 2
            assert torch.equal(on_all(schedule, whole, comm), sums), name

    succeed(body, ranks)


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_what_has_no_order_is_equal_on_all_ranks_too(ranks: int) -> None:
    """NaNs with a payload, zeros with a sign, infinities: bits, not values, are compared."""
    odd = torch.tensor([0.0, -0.0, float("inf"), -float("inf"), 1.0, -1.0])
    nan = torch.tensor([0x7FC00001], dtype=torch.int32).view(torch.float32)

    def body(rank: int, size: int) -> list[bytes]:
        comm, ends = world(size), []
        for _, schedule in all_reduces(size):
            for op in ("sum", "min", "max", "product"):
                own = torch.cat([odd.roll(rank), nan + 0 if rank % 2 else odd[:1]])
                ends.append(bits(on_all(schedule, own, comm, op)))
        return ends

    first, *others = succeed(body, ranks)
    assert all(own == first for own in others)


@settings(max_examples=25)
@given(
    st.sampled_from(ALL_REDUCES),
    st.integers(1, 5),
    st.integers(0, 17),
    st.sampled_from(DTYPES),
    st.sampled_from(OPS),
)
def test_any_vector_on_any_world(
    name: str, ranks: int, length: int, dtype: torch.dtype, op: Op
) -> None:
    def body(rank: int, size: int) -> bytes:
        return bits(
            on_all(ALGORITHMS["all_reduce"][name], drawn(rank, length, dtype), world(size), op)
        )

    assert len({*succeed(body, ranks)}) == 1


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 5])
def test_the_ledger_has_what_the_formulas_say(ranks: int) -> None:
    """Calls and bytes of each rank, tolerance 0."""

    def body(rank: int, size: int) -> None:
        ledger = traffic.current()
        assert ledger is not None
        comm = world(size)
        for kind, by_name in ALGORITHMS.items():
            for name, schedule in by_name.items():
                for length in (0, 1, size, 3 * size + 1):
                    before = len(ledger.calls)
                    on_all(schedule, torch.ones(length, dtype=torch.float64), comm)
                    sends = [call for call in ledger.calls[before:] if call.operation == "send"]
                    promised = costs.sent(kind, name, size, length)[rank]
                    assert len(sends) == promised.messages, (name, length)
                    assert sum(call.logical_bytes for call in sends) == 8 * promised.elements
                    others = {c.operation for c in ledger.calls[before:]} - {"send", "recv"}
                    assert not others

    succeed(body, ranks, ledgers=True)


def test_long_vectors_go_in_lanes() -> None:
    """Equal bits, right sums, and calls as the formula says, on either side of each threshold."""
    assert (LANE, MOST_LANES) == (costs.LANE, costs.MOST_LANES)
    found = [lanes(n) for n in (0, LANE, 2 * LANE - 1, 2 * LANE, 3 * LANE, 9 * LANE)]
    assert found == [1, 1, 1, 2, 3, 4]

    def body(rank: int, size: int) -> list[bytes]:
        ledger = traffic.current()
        assert ledger is not None
        comm, ends = world(size), []
        for name, schedule in ALGORITHMS["all_reduce"].items():
            for length in (2 * LANE - 1, 2 * LANE + 1):
                data, before = torch.arange(length) % 1000 + rank, len(ledger.calls)
                in_lanes(schedule, data, comm).wait()
                wanted = size * (torch.arange(length) % 1000) + size * (size - 1) // 2
                assert torch.equal(data, wanted), name
                sends = [call for call in ledger.calls[before:] if call.operation == "send"]
                promised = costs.sent("all_reduce", name, size, length)[rank]
                assert len(sends) == promised.messages, (name, length)
                assert sum(call.logical_bytes for call in sends) == 8 * promised.elements
                data = drawn(rank, length)
                in_lanes(schedule, data, comm).wait()
                ends.append(bits(data))
        return ends

    first, *others = succeed(body, 3, ledgers=True)
    assert all(own == first for own in others)


def test_scatter_gather_and_broadcast_over_any_lengths() -> None:
    def body(rank: int, size: int) -> None:
        comm = world(size)
        for length in (0, 1, size - 1, size, 2 * size + 1):
            own = cut(range(length), size)[rank]
            place = slice(own.start, own.stop)
            exact = sum(drawn(r, length, torch.float64) for r in range(size))
            data = drawn(rank, length, torch.float64)
            on_all(ALGORITHMS["reduce_scatter"]["ring"], data, comm)
            torch.testing.assert_close(data[place], exact[place])
            part = torch.full((length,), float("nan"))
            part[place] = drawn(0, length)[place]
            on_all(ALGORITHMS["all_gather"]["ring"], part, comm)
            assert torch.equal(part, drawn(0, length))
            given = drawn(rank, length)
            on_all(ALGORITHMS["broadcast"]["binomial"], given, comm)
            assert torch.equal(given, drawn(0, length))

    for ranks in (1, 2, 3, 4, 5):
        succeed(body, ranks)


@pytest.mark.parametrize("disturbed", [False, True])
def test_several_are_under_way_at_once(disturbed: bool) -> None:
    """In any mixture, of sub-groups too; results become visible late and buffers hold NaN."""

    def body(rank: int, size: int) -> None:
        mesh = Mesh({"replicate": 2, "shard": 3})
        names = ALL_REDUCES * 2
        running = []
        for place, name in enumerate(names):
            comm = mesh.comm(("replicate", "shard")[place % 2])
            data = torch.arange(7.0) + place + comm.rank
            rounds = ALGORITHMS["all_reduce"][name](comm.rank, comm.size, 7)
            running.append((data, comm.size, place, Running(rounds, data, comm)))
        for data, ranks, place, work in running:
            work.wait()
            wanted = ranks * (torch.arange(7.0) + place) + ranks * (ranks - 1) / 2
            assert torch.equal(data, wanted)
            work.wait()  # a second time changes nothing
            assert torch.equal(data, wanted)

    hub = Hub(6, 20.0, delay=disturbed, poison=disturbed)
    succeed(body, 6, hub=hub)


def test_a_handle_that_was_waited_for_keeps_no_memory() -> None:
    def body(rank: int, size: int) -> None:
        data = torch.ones(1000)
        work = Running(ALGORITHMS["all_reduce"]["ring"](rank, size, 1000), data, world(size))
        assert work.scratch.numel() == 500
        work.wait()
        assert work.scratch.numel() == 0

    succeed(body, 2)


def test_strided_tensors_are_refused() -> None:
    def body(rank: int, size: int) -> None:
        with pytest.raises(ValueError, match="contiguous"):
            Running([], torch.ones(4, 4).t(), world(size))

    succeed(body, 1)


def reducer(**chosen: Any) -> ByAlgorithm:
    return ByAlgorithm(OfBoth(**chosen))


@pytest.mark.parametrize("inside", [True, False])
def test_a_reducer_scatters_and_gathers_in_place_or_not(inside: bool) -> None:
    def body(rank: int, size: int) -> None:
        comm, own = world(size), reducer(reduce_scatter="ring", all_gather="ring")
        flat = drawn(rank, 4 * size, torch.float64)
        exact = sum(drawn(r, 4 * size, torch.float64) for r in range(size))
        shard = flat.view(size, 4)[rank] if inside else torch.empty(4, dtype=torch.float64)
        own.reduce_scatter(Bucket(flat, (), 0), comm, shard).wait()
        torch.testing.assert_close(shard, exact.view(size, 4)[rank])
        output = torch.full((4 * size,), float("nan"))
        part = output.view(size, 4)[rank] if inside else torch.empty(4)
        part.fill_(float(rank))
        own.all_gather(output, part, comm).wait()
        assert output.view(size, 4).tolist() == [[float(r)] * 4 for r in range(size)]

    for ranks in (1, 2, 3):
        succeed(body, ranks)


def test_a_reducer_leaves_to_the_backend_what_it_has_no_algorithm_for() -> None:
    def body(rank: int, size: int) -> list[str]:
        ledger = traffic.current()
        assert ledger is not None
        comm, own = world(size), reducer(all_gather="ring")
        flat = torch.ones(4)
        own.all_reduce(Bucket(flat, (), 0), comm).wait()
        own.reduce_scatter(Bucket(flat, (), 0), comm, torch.empty(2)).wait()
        own.all_gather(torch.empty(4), torch.ones(2), comm).wait()
        return sorted({call.operation for call in ledger.calls})

    for operations in succeed(body, 2, ledgers=True):
        assert operations == ["all_reduce", "recv", "reduce_scatter", "send"]


def test_a_reducer_refuses_a_world_of_no_whole_nodes() -> None:
    own = reducer(all_reduce=Hierarchical(ranks_per_node=2))
    own.check(4)
    with pytest.raises(Refused, match=r"ranks_per_node = 2: the 3 ranks .* nodes of that size"):
        own.check(3)
    reducer(all_reduce="rabenseifner").check(3)


def everything(rank: int, size: int) -> list[str]:
    """On gloo: all algorithms over a short and a longer vector; the bits of both.

    Pieces of 2 make a round each of the longer one, so it is shorter for these.
    """
    torch.set_num_threads(1)
    comm, ends = world(size), []
    for name, schedule in all_reduces(size):
        for length in (size + 1, 257 if name == "double tree by 2" else 10_007):
            exact = sum(drawn(r, length, torch.float64) for r in range(size))
            data = on_all(schedule, drawn(rank, length, torch.float64), comm)
            assert torch.allclose(data, exact, rtol=1e-12, atol=1e-12), name
            ends.append(hashlib.sha256(bits(data)).hexdigest())
    return ends


@pytest.mark.launches
@pytest.mark.parametrize("ranks", [2, 3])
def test_over_gloo(tmp_path: Path, ranks: int) -> None:
    first, *others = processes(everything, ranks, tmp_path, True)
    assert all(own == first for own in others)
