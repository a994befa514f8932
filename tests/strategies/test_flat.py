"""Flat layouts: every element in exactly one shard, whatever the shapes and the world."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from shardproof.impls.reference.engine.precision import Precision
from shardproof.impls.reference.parts.flat import FlatLayout
from shardproof.impls.reference.parts.flat_parameters import FlatParameters

#: Scalars, empty, one-element, prime-sized and several-dimensional tensors.
SHAPES = st.lists(
    st.sampled_from([(), (0,), (1,), (2,), (7,), (13,), (3, 5), (2, 0), (4, 2, 3), (1, 1)]),
    min_size=1,
    max_size=8,
)
SHARDS = st.integers(1, 9)


def tensors(shapes: list[tuple[int, ...]]) -> dict[str, Tensor]:
    """Distinct values everywhere."""
    made, start = {}, 1
    for number, shape in enumerate(shapes):
        numel = math.prod(shape)
        made[f"p{number}"] = torch.arange(start, start + numel, dtype=torch.float64).view(shape)
        start += numel
    return made


@given(SHAPES, SHARDS)
def test_shards_are_equal_and_padding_is_smaller_than_their_number(
    shapes: list[tuple[int, ...]], shards: int
) -> None:
    layout = FlatLayout(tensors(shapes), shards)
    assert layout.numel == sum(math.prod(shape) for shape in shapes)
    assert layout.padded_numel == layout.shard_numel * shards
    assert 0 <= layout.padding < shards
    ranges = [layout.shard_range(rank) for rank in range(shards)]
    assert [start for start, _ in ranges] == [0, *(stop for _, stop in ranges)][:-1]
    assert ranges[-1][1] == layout.padded_numel


@given(SHAPES, SHARDS)
def test_each_element_is_in_exactly_one_part(shapes: list[tuple[int, ...]], shards: int) -> None:
    named = tensors(shapes)
    layout = FlatLayout(named, shards)
    seen: dict[str, list[tuple[int, int]]] = {name: [] for name in named}
    for rank in range(shards):
        for part in layout.parts(rank):
            assert part.shape == tuple(named[part.name].shape)
            assert part.numel or not named[part.name].numel(), "empty parts are left out"
            seen[part.name].append((part.start, part.stop))
    for name, spans in seen.items():
        assert spans[0][0] == 0 and spans[-1][1] == named[name].numel()
        assert all(a[1] == b[0] for a, b in itertools.pairwise(spans))
        assert named[name].numel() or len(spans) == 1, "an empty tensor has one home"


@given(SHAPES, SHARDS)
def test_pack_views_and_parts_agree(shapes: list[tuple[int, ...]], shards: int) -> None:
    named = tensors(shapes)
    layout = FlatLayout(named, shards)
    flat = layout.empty()
    layout.pack(flat, named)
    assert all(torch.equal(view, named[name]) for name, view in layout.views(flat).items())
    assert not flat[layout.numel :].any()
    for rank in range(shards):
        shard = layout.shard(flat, rank)
        assert shard.numel() == layout.shard_numel
        for part in layout.parts(rank):
            assert torch.equal(part.of_shard(shard), part.of_tensor(named[part.name]))
            piece = part.piece(part.of_shard(shard), replica=rank)
            assert piece.flat_range == (part.start, part.stop) and piece.name == part.name
            assert piece.global_shape == part.shape and piece.replica == rank


@given(SHAPES)
def test_a_single_shard_is_everything_without_padding(shapes: list[tuple[int, ...]]) -> None:
    layout = FlatLayout(tensors(shapes), 1)
    assert layout.padding == 0 and layout.shard_range(0) == (0, layout.numel)
    assert [part.name for part in layout.parts(0)] == layout.names


def test_the_picture_of_the_docstring() -> None:
    named = {"a": torch.zeros(5), "b": torch.zeros(2), "c": torch.zeros(4)}
    layout = FlatLayout(named, 3)
    parts = [[(p.name, p.start, p.stop, p.offset) for p in layout.parts(r)] for r in range(3)]
    assert parts == [
        [("a", 0, 4, 0)],
        [("a", 4, 5, 0), ("b", 0, 2, 1), ("c", 0, 1, 3)],
        [("c", 1, 4, 0)],
    ]


def test_fewer_elements_than_ranks() -> None:
    layout = FlatLayout({"a": torch.zeros(2)}, 5)
    assert layout.shard_numel == 1 and layout.padding == 3
    assert [len(layout.parts(rank)) for rank in range(5)] == [1, 1, 0, 0, 0]


def test_views_write_through_and_missing_tensors_become_zero() -> None:
    named = {"a": torch.ones(2, 2), "b": torch.ones(3)}
    layout = FlatLayout(named, 4)
    flat = layout.empty()
    layout.pack(flat, {"a": None})
    assert not flat.any()
    layout.views(flat)["b"].fill_(2.0)
    assert flat.tolist() == [0, 0, 0, 0, 2, 2, 2, 0]


def test_strides_do_not_matter() -> None:
    transposed = torch.arange(6.0).view(2, 3).t()
    layout = FlatLayout({"t": transposed}, 2)
    flat = layout.empty()
    layout.pack(flat, {"t": transposed})
    assert flat.tolist() == transposed.reshape(-1).tolist()
    assert layout.parts(1)[0].of_tensor(transposed).tolist() == flat[3:].tolist()


def test_only_shapes_are_read() -> None:
    layout = FlatLayout({"a": torch.empty(3, 2, device="meta", dtype=torch.bfloat16)}, 4)
    assert layout.dtype is torch.bfloat16 and layout.padded_numel == 8
    assert layout.empty(dtype=torch.float32).dtype is torch.float32


def test_what_is_refused() -> None:
    mixed = {"a": torch.zeros(1), "b": torch.zeros(1, dtype=torch.float64)}
    with pytest.raises(ValueError, match=r"one dtype, not torch.float32, torch.float64"):
        FlatLayout(mixed, 2)
    with pytest.raises(ValueError, match="not none"):
        FlatLayout({}, 2)
    with pytest.raises(ValueError, match="at least 1 shard, not 0"):
        FlatLayout({"a": torch.zeros(1)}, 0)
    with pytest.raises(ValueError, match="no shard 2, only the shards 0 to 1"):
        FlatLayout({"a": torch.zeros(1)}, 2).shard_range(2)


def flat_parameters(precision: Precision) -> tuple[dict[str, nn.Parameter], FlatParameters]:
    """A contiguous parameter of 6 elements and a transposed one of 4; this is rank 1 of 2."""
    named = {
        "plain": nn.Parameter(torch.arange(6.0).view(2, 3)),
        "turned": nn.Parameter(torch.arange(10.0, 14.0).view(2, 2).t()),
    }
    return named, FlatParameters(named, FlatLayout(named, 2), 1, precision)


def test_an_update_of_the_flat_tensor_reaches_every_parameter() -> None:
    named, parameters = flat_parameters(Precision())
    for target in parameters.targets.values():
        target.add_(100.0)
    assert named["plain"].tolist() == [[0, 1, 2], [3, 4, 105]]
    assert named["turned"].tolist() == [[10, 12], [11, 13]], (
        "it lies beside, not in the flat tensor"
    )
    with torch.no_grad():
        parameters.copy_out()
    assert named["turned"].tolist() == [[110, 112], [111, 113]]
    assert not named["turned"].is_contiguous(), "or its products would be rounded otherwise"


def test_what_is_loaded_beside_the_flat_tensor_reaches_its_shard() -> None:
    named, parameters = flat_parameters(Precision())
    named["turned"].data.fill_(7.0)
    assert parameters.targets["turned"].tolist() == [10, 12, 11, 13]
    with torch.no_grad():
        parameters.copy_in()
    assert parameters.targets["turned"].tolist() == [7.0] * 4


def test_narrow_parameters_may_have_wide_gradients() -> None:
    policy = Precision(parameters=torch.bfloat16, reduce=torch.float32)
    named, parameters = flat_parameters(policy)
    assert {p.dtype for p in named.values()} == {parameters.flat.dtype} == {torch.bfloat16}
    assert parameters.gradient_dtype is torch.float32
    for target in parameters.targets.values():
        target.grad = torch.ones_like(target, dtype=torch.float32)
