"""The positions of each rank: three ways to cut a sequence.

    12 positions, 2 ranks   0 1 2 3 4 5 6 7 8 9 10 11
    contiguous              a a a a a a b b b b b  b     the last rank attends to the most
    zigzag                  a a a b b b b b b a a  a     2C chunks, rank i takes i and 2C-1-i
    striped                 a b a b a b a b a b a  b     position p lies on rank p mod C

Under a causal mask position p looks at p + 1 positions.  ``zigzag`` (Llama 3, arXiv 2407.21783,
section 3.3.2) gives every rank an early and a late chunk; ``striped`` (arXiv 2311.09431) mixes all.
A length that does not divide is not padded: some ranks have a position more, or none.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

CutName = Literal["contiguous", "zigzag", "striped"]


def positions(length: int, ranks: int, rank: int, cut: CutName) -> Tensor:
    """The positions of ``rank``, ascending."""
    if cut == "striped":
        # A new tensor: a slice would keep all positions in memory.
        return torch.arange(min(rank, length), length, ranks)
    if cut == "contiguous":
        return _chunk(length, ranks, rank)
    pair = [_chunk(length, 2 * ranks, number) for number in (rank, 2 * ranks - 1 - rank)]
    return torch.cat(pair)


def _chunk(length: int, chunks: int, number: int) -> Tensor:
    """Chunk ``number`` of as equal ones as there can be."""
    return torch.arange(number * length // chunks, (number + 1) * length // chunks)
