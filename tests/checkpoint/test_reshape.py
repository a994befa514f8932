"""Any layout is read by any other: the right bits, and only the bytes that are needed."""

from __future__ import annotations

import itertools
import math
from pathlib import Path

import numpy
import pytest
import torch
from checkpoints import AXES, held, make, put_together, saved, workload
from hypothesis import given, settings
from hypothesis import strategies as st
from local_ranks import succeed
from pieces import Rows

from shardproof.impls.reference.checkpoint.data_file import Entry
from shardproof.impls.reference.checkpoint.reading.checkpoint import Checkpoint
from shardproof.impls.reference.checkpoint.reading.regions import (
    MOST_RUNS,
    Place,
    TooFine,
    hole_or_overlap,
    runs_of,
)
from shardproof.impls.reference.checkpoint.reading.reshape import plan, ranges
from shardproof.workloads import Workload

pytestmark = pytest.mark.usefixtures("one_thread")

FROM_TO = (
    *(("ddp", 2, "zero1", 3), ("zero1", 3, "ddp", 2), ("ddp", 2, "zero3", 4)),
    *(("zero2", 4, "zero3", 3), ("zero3", 3, "fsdp", 2), ("fsdp", 4, "zero2", 2)),
    *(("tensor", 2, "zero3", 3), ("zero3", 2, "tensor", 4), ("tensor", 4, "tensor", 2)),
    *(("pipeline", 2, "ddp", 3), ("zero2", 3, "pipeline", 4), ("pipeline", 4, "pipeline", 2)),
    *(("tensor", 2, "pipeline", 2), ("naive_ddp", 1, "fsdp", 3), ("zero3", 4, "naive_ddp", 1)),
)


@pytest.mark.parametrize(("strategy", "world", "other", "other_world"), FROM_TO)
def test_all_that_was_saved_is_loaded_elsewhere(
    strategy: str, world: int, other: str, other_world: int, tmp_path: Path
) -> None:
    _all_goes_on(strategy, world, other, other_world, tmp_path)


@pytest.mark.parametrize("form", ["full", "sharded"])
@pytest.mark.parametrize(("world", "other", "other_world"), [(4, "zero3", 3), (3, "tensor", 2)])
def test_kv_heads_that_tensor_ranks_share_are_saved_once(
    form: str, world: int, other: str, other_world: int, tmp_path: Path
) -> None:
    """No copy but the first has all of such a tensor."""
    work = workload(heads=12, width=24, kv_heads=2 if world == 4 else 1)
    _all_goes_on("tensor", world, other, other_world, tmp_path, form, work)


def _all_goes_on(
    strategy: str,
    world: int,
    other: str,
    other_world: int,
    root: Path,
    form: str = "sharded",
    work: Workload | None = None,
) -> None:
    """Save, load elsewhere, compare.

    :raises AssertionError: something differs.
    """
    work = work or workload()
    before = saved(root, strategy, {AXES[strategy]: world}, 2, form, work=work)

    def load(rank: int, world: int) -> dict[str, Rows]:
        system = make(other, work, {AXES[other]: world}, rank)
        system.load(root)
        return held(system)

    after = put_together(succeed(load, other_world))
    for kind, tensors in before.items():
        assert tensors.keys() == after[kind].keys()
        for name, tensor in tensors.items():
            assert torch.equal(tensor, after[kind][name]), f"{kind} {name}"


@pytest.mark.parametrize("form", ["sharded", "full"])
def test_four_ranks_to_three_read_only_what_they_need(
    form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    work = workload(width=128)
    whole = saved(tmp_path, "zero3", {"shard": 4}, 1, form, work=work)
    size = sum(t.numel() * t.element_size() for kind in whole.values() for t in kind.values())
    counted: list[tuple[int, int]] = []

    def count(checkpoint: Checkpoint) -> None:
        counted.append((checkpoint.bytes_read, checkpoint.metadata_bytes))
        close(checkpoint)

    close = Checkpoint.close
    monkeypatch.setattr(Checkpoint, "close", count)

    def load(rank: int, world: int) -> int:
        system = make("zero3", work, {"shard": world}, rank)
        system.load(tmp_path)
        pieces = [p for kind in ("parameters", "optimizer") for p in system.local_state(kind)]  # type: ignore[arg-type]
        return sum(p.tensor.numel() * p.tensor.element_size() for p in pieces)

    needed = succeed(load, 3)
    assert len(counted) == 3 and size <= sum(needed) < 1.01 * size
    twice, metadata = (sum(column) for column in zip(*counted, strict=True))
    data = twice // 2  # what was verified is read again, from the system's memory
    print(f"{form}: needed {sum(needed)}, read {data}, metadata {metadata}")
    assert data + metadata <= 1.05 * sum(needed)
    assert max(read // 2 for read, _ in counted) < size / 2  # never a whole model


# -------------------------------------------------------------------------------- any two layouts


@st.composite
def layouts(draw: st.DrawFn, shape: tuple[int, ...]) -> list[Place]:
    """A tensor cut into parts: ranges, or a grid of boxes; some may be empty."""
    numel = math.prod(shape)
    if draw(st.booleans()):
        cuts = sorted(draw(st.lists(st.integers(0, numel), max_size=4)))
        return [Place(shape, None, bounds) for bounds in itertools.pairwise([0, *cuts, numel])]
    grid = []
    for size in shape:
        cuts = sorted(draw(st.lists(st.integers(0, size), max_size=2)))
        grid.append(list(itertools.pairwise([0, *cuts, size])))
    return [Place(shape, box, None) for box in itertools.product(*grid)]


@st.composite
def two_layouts(draw: st.DrawFn) -> tuple[list[Place], list[Place], str]:
    shape = tuple(draw(st.lists(st.integers(0, 6), max_size=4)))
    both = draw(layouts(shape)), draw(layouts(shape))
    return *both, draw(st.sampled_from(["F64", "F32", "BF16", "U8"]))


def part(place: Place, values: numpy.ndarray) -> numpy.ndarray:
    """The elements of ``place``, flattened."""
    if place.flat_range is not None:
        return values.reshape(-1)[slice(*place.flat_range)]
    return values[tuple(slice(*bounds) for bounds in place.slices or ())].reshape(-1)


@given(two_layouts())
@settings(max_examples=400)
def test_any_layout_is_made_of_any_other(case: tuple[list[Place], list[Place], str]) -> None:
    stored, wanted, dtype = case
    size = {"F64": 8, "F32": 4, "BF16": 2, "U8": 1}[dtype]
    shape = stored[0].shape
    values = numpy.arange(math.prod(shape)).reshape(shape)
    entries, file = [], []
    for number, place in enumerate(stored):
        begin = len(file)
        file += [byte for v in part(place, values).tolist() for byte in [v] * size]
        names = ("f", str(number), "parameters", "w", dtype)
        entries.append(Entry(*names, place, 0, number, begin, len(file), 0))
    assert hole_or_overlap(stored) == ""
    for place in wanted:
        reads = plan(place, entries)
        target = numpy.full(place.elements * size, -1)
        for read in reads:
            assert (numpy.diff(read.sources) > 0).all()
            for source, at, length in zip(read.sources, read.targets, read.lengths, strict=True):
                assert (target[at : at + length] == -1).all(), "an element is read twice"
                begin = read.entry.begin + source
                assert read.entry.begin <= begin and begin + length <= read.entry.end
                target[at : at + length] = file[begin : begin + length]
        assert target.tolist() == numpy.repeat(part(place, values), size).tolist()
        assert sum(read.bytes for read in reads) == place.elements * size
        joined = ranges(reads)
        assert sum(one.end - one.begin for one in joined) == place.elements * size


@given(two_layouts(), st.data())
def test_a_hole_or_an_overlap_is_seen(
    case: tuple[list[Place], list[Place], str], data: st.DataObject
) -> None:
    places = [place for place in case[0] if place.elements]
    if not places:
        return
    at = data.draw(st.integers(0, len(places) - 1))
    without, twice = places[:at] + places[at + 1 :], [*places, places[at]]
    assert "no part" in hole_or_overlap(without) if without else True
    assert "two parts" in hole_or_overlap(twice)


def test_what_is_cut_too_finely_is_refused_before_memory_is_taken() -> None:
    shape = (1 << 40, 2)
    with pytest.raises(TooFine, match=rf"of 1 elements each \(limit: {MOST_RUNS}\)"):
        runs_of(Place(shape, ((0, 1 << 40), (0, 1)), None))
