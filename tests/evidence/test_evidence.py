"""Assembly: every element owned exactly once per replica, or the judge says which is not."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from shardproof import tensor_bytes
from shardproof.contract import Piece
from shardproof.evidence.assembled import assemble
from shardproof.evidence.held import Held, Shared

FULL = torch.arange(12.0).reshape(4, 3)


def piece(tensor: torch.Tensor, **where: Any) -> Piece:
    return Piece(**{"name": "w", "global_shape": (4, 3), **where, "tensor": tensor})


def rows(start: int, stop: int, **more: Any) -> Piece:
    return piece(FULL[start:stop], slices=((start, stop), (0, 3)), **more)


def test_slices_and_flat_ranges_make_the_whole_again() -> None:
    by_rows = assemble({0: [rows(0, 1)], 1: [rows(1, 4)]})
    assert not by_rows.problems and torch.equal(by_rows.tensors["w"][0], FULL)
    flat = FULL.reshape(-1)
    by_range = assemble(
        {0: [piece(flat[:5], flat_range=[0, 5])], 1: [piece(flat[5:], flat_range=[5, 12])]}
    )
    assert not by_range.problems and torch.equal(by_range.tensors["w"][0], FULL)
    assert by_range.owners["w"] == [0, 1]


def test_replicas_are_kept_apart() -> None:
    both = assemble({0: [rows(0, 4)], 1: [piece(FULL + 1, replica=1)]})
    assert torch.equal(both.tensors["w"][1], FULL + 1)
    assert torch.equal(both.first()["w"], FULL)


def test_an_empty_shard_is_fine() -> None:
    found = assemble({0: [rows(0, 4)], 1: [rows(4, 4)]})
    assert not found.problems and torch.equal(found.tensors["w"][0], FULL)


@pytest.mark.parametrize(
    ("per_rank", "says"),
    [
        ({0: [rows(0, 2)], 1: [rows(3, 4)]}, "3 of 12 elements are owned by no rank"),
        (
            {0: [rows(0, 3)], 1: [rows(2, 4)]},
            "3 elements are owned more than once, by ranks [0, 1]",
        ),
        ({0: [rows(0, 4)], 1: [rows(0, 4)]}, "12 elements are owned more than once"),
        ({0: [rows(0, 2)], 1: [piece(FULL[2:], slices=[[2, 5], [0, 3]])]}, "rank 1 reports ["),
        (
            {0: [piece(FULL[:2], slices=[[0, 4], [0, 3]])]},
            "rank 0: piece [0:4, 0:3] must have shape",
        ),
        (
            {0: [rows(0, 4)], 1: [piece(FULL, global_shape=[3, 4])]},
            "report different global shapes",
        ),
        (
            {0: [piece(FULL.reshape(-1), flat_range=[0, 13])]},
            "rank 0 reports flat range 0:13",
        ),
    ],
)
def test_problems_name_rank_and_region(per_rank: Any, says: str) -> None:
    found = assemble(per_rank)
    assert "w" not in found.tensors
    assert len(found.problems) == 1 and says in found.problems[0], found.problems


def test_copies_of_pieces_come_back_as_they_were_and_equal_ones_as_one_tensor(
    tmp_path: Path,
) -> None:
    def pieces(replica: int) -> list[Piece]:
        return [
            Piece.whole("a", torch.arange(6.0).view(2, 3).t(), replica),
            Piece("b", (8,), torch.tensor([1, 2]), flat_range=(2, 4), incomplete=True),
            Piece("c", (4, 4), torch.empty(0, 4), slices=((4, 4), (0, 4))),
            Piece("a.step", (), torch.tensor(math.nan), slices=(), replica=replica),
        ]

    given = [Held.copied(pieces(replica)) for replica in (0, 1)]
    path = tmp_path / "held"
    tensor_bytes.dump(path, [held.to_dict() for held in (*given, given[0])])
    read = [Held.from_dict(fields) for fields in tensor_bytes.load(path)]
    assert path.read_bytes().count(b'\\"a.step\\"') == 2, "a layout is written once"
    known: Shared = {}
    for held in read:
        held.share(known)
    for replica, held in enumerate(read[:2]):
        for piece, wanted in zip(held, pieces(replica), strict=True):
            assert dataclasses.replace(piece, tensor=wanted.tensor) == wanted
            assert tensor_bytes.digest(piece.tensor) == tensor_bytes.digest(wanted.tensor)
            assert piece.tensor.shape == wanted.tensor.shape
    assert all(a.tensor is b.tensor for a, b in zip(*read[:2], strict=True))
    assert read[0].equals(read[2]) and not read[0].equals(read[1]), "another replica"
    minus = Held.copied([Piece("z", (1,), torch.tensor([-0.0]))])
    assert not minus.equals(Held.copied([Piece("z", (1,), torch.tensor([0.0]))]))
    assert minus.likeness(Held.copied([Piece("z", (1,), torch.tensor([0.0]))])) == "changed"
    with pytest.raises(TypeError, match="piece 'm'"):
        Held.copied([Piece("m", (1,), torch.empty(1, device="meta"))])


def test_what_is_held_is_compared_by_elements_where_it_is_cut_otherwise() -> None:
    whole = torch.arange(12.0).view(3, 4)
    changed, flat = whole.clone(), whole.reshape(-1)
    changed[2, 3] = 99.0
    bias = Piece.whole("b", torch.tensor([math.nan]))

    def held(*pieces: Piece) -> Held:
        return Held.copied([*pieces, bias])

    def rows(of: torch.Tensor, start: int, stop: int) -> Piece:
        return Piece("w", (3, 4), of[start:stop], slices=((start, stop), (0, 4)))

    before = held(Piece.whole("w", whole))
    halves = held(
        Piece("w", (3, 4), flat[5:], flat_range=(5, 12), replica=1),
        Piece("w", (3, 4), flat[:5], flat_range=(0, 5)),
    )
    for other, likeness in {
        before: "same",
        halves: "same",
        held(rows(whole, 0, 2), rows(whole, 1, 3)): "same",
        held(rows(whole, 0, 2)): "recut",
        held(rows(changed, 0, 2)): "recut",
        held(rows(changed, 1, 3)): "changed",
        held(Piece.whole("w", changed)): "changed",
        held(Piece.whole("w", whole.float().half())): "changed",
        held(): "changed",
        held(Piece.whole("w", whole), Piece.whole("v", whole)): "recut",
    }.items():
        assert before.likeness(other) == likeness, list(other)
    assert held(rows(whole, 0, 1)).likeness(before) == "recut"
    assert held(rows(whole, 0, 2)).likeness(held(rows(whole, 1, 3))) == "changed"
