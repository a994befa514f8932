"""1-bit compression: signs with a magnitude, and residuals on both sides.

Problem.  A vote forgets by how much.  Here the rank that serves an element adds up what the others
sent, magnitudes and all, and sends the sign of the sum with a magnitude of its own.  So the sum is
compressed a second time; the server remembers what that lost, as each worker does of its own.

    what                        where
    worker residuals            every rank, of every parameter
    server residuals            of each parameter one part on each rank, always the same

    all_reduce   [1] gradient + residual: signs, and magnitude |w| / sqrt(n)
                 [2] to the ranks that serve them (signs.py); worker residual: the difference
         wait    [3] sum of all ranks + server residual: signs, and magnitude
                 [4] server residual: the difference; signs and magnitude to all

Cost: bytes sent, over all N ranks: 2 (N-1) B for B = n/8 bytes, rounded up for each parameter, and
2 (N-1) N magnitudes for each parameter: 1/32 of fp32 (Tang et al., arXiv 2102.02888, section 3 and
figure 3; DeepSpeed, comm/nccl.py).  Memory: n + n/N elements per rank.
Numbers: sent + residual = gradient + old residual on the worker's side, and on the server's
answer + residual = sum + old residual, both to rounding.
Left out: the rest of 1-bit Adam (a dense start, after which the variance stays as it is, and
*momentum* is compressed); one magnitude for all parameters together, as DeepSpeed has it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from shardproof.contract import Piece
from shardproof.impls.reference.parts.compressors.exchange import fold
from shardproof.impls.reference.parts.compressors.signs import Served, Signs, is_plus, served
from shardproof.impls.reference.parts.flat import Part

SLOT = ".server_residual@all"


class OneBit(Signs):
    """Worker and server error."""

    tells_magnitudes = True

    def __init__(self, *args: object) -> None:
        super().__init__(*args)  # type: ignore[arg-type]
        self.slots = (*self.slots, "server_residual")
        self.served: dict[str, Piece] = {}  # what this rank did not send back, by parameter

    def magnitude(self, values: Tensor) -> Tensor:  # [1]
        """The magnitude of equal elements with the same norm; 0 if there are none."""
        return values.norm() / math.sqrt(max(values.numel(), 1))

    def serve(self, one: Served, signs: Tensor, sizes: Tensor) -> tuple[Tensor, Tensor]:  # [3]
        """Add the earlier residual to the sum; send its signs and magnitude."""
        total = fold(signs * sizes.unsqueeze(1), sizes.dtype)
        self.add_lost(one.part.name, total)
        size = self.magnitude(total)
        plus = is_plus(total, size)
        self.lose(one, total - torch.where(plus, size, -size))  # [4]
        return plus, size

    def add_lost(self, name: str, total: Tensor) -> None:
        """Add the part that was not sent back before."""
        if name in self.served:
            total += self.served[name].tensor

    def lose(self, one: Served, left: Tensor) -> None:
        """Store the part that is not sent back now."""
        span = (one.elements.start, one.elements.stop)
        name, shape = f"{one.part.name}{SLOT}", one.part.shape
        self.served[one.part.name] = Piece(name, shape, left, flat_range=span)

    def pieces(self) -> list[Piece]:
        """Residuals of the worker, and the server's residuals as parts of shared tensors."""
        return super().pieces() + list(self.served.values())

    def load_pieces(self, pieces: Sequence[Piece]) -> list[Piece]:
        """Load both; of a whole server residual, the part that this rank serves."""
        rest = []
        self.served = {}
        for piece in super().load_pieces(pieces):
            if piece.name.endswith(SLOT):
                self.served[piece.name.removesuffix(SLOT)] = self.own_part(piece)
            else:
                rest.append(piece)
        return rest

    def own_part(self, piece: Piece) -> Piece:
        """The part of ``piece`` that this rank serves; ``piece`` is that part or the whole."""
        span = piece.flat_range
        if span is None:
            whole = Part(piece.name, piece.global_shape, 0, piece.tensor.numel(), 0)
            mine = served(whole, self.ranks)[self.place].elements
            span = (mine.start, mine.stop)
            piece = replace(piece, tensor=piece.tensor.reshape(-1)[slice(*span)], slices=None)
        return replace(piece, tensor=piece.tensor.clone(), flat_range=span)
