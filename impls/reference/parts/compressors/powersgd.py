"""PowerSGD: low-rank matrices, by one power iteration per training step.

Problem.  The gradient of a matrix is nearly of low rank: r directions hold most of it.  A
decomposition that finds them costs more than it saves.  So the directions of the last step are
improved by one multiplication, and both factors are sums over ranks, which an all-reduce makes.

    what                        where
    residuals                   every rank its own, of the matrices
    factor Q, n2 x r            every rank, the same; from one step to the next (warm start)

    all_reduce   [1] M = gradient (n1 x n2) + residual; P = M Q        of every rank
         wait    [2] P summed over ranks (with it all that is no matrix), columns made orthonormal
                 [3] Q = M^T P of every rank; all-reduce
                 [4] residual = M - P Q^T, with the rank's own Q
                 [5] gradient = P Q^T, with the summed Q, which the next step starts from

A tensor of more dimensions is a matrix of its first and all others.  What would not become smaller
than its n1 n2 elements, and what is no matrix, is summed as it is.

Cost: elements sent, over all N ranks: 2 (N-1) (r (n1 + n2) of each matrix + the rest), in two
all-reduces (Vogels et al., arXiv 1905.13727, algorithm 1; a ring's volume: ZeRO, arXiv 1910.02054,
section VII-A).  Memory: n1 n2 + r n2 elements per rank for each matrix.
Numbers: linear in the gradients of the ranks; exact to rounding if r is at least the rank of the
summed matrix.  sent + residual = gradient + old residual to rounding.
Left out: low rank of batched tensors; a dense start (torch's start_powerSGD_iter); sums in a
narrower dtype.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from shardproof.comm import Comm
from shardproof.contract import Piece
from shardproof.impls.reference.parts.compressors.compressor import Compressor, Finish, filled
from shardproof.impls.reference.parts.compressors.draws import first_factor
from shardproof.impls.reference.parts.flat import Part
from shardproof.impls.reference.parts.reducers import Bucket, Work, rank_piece

SLOT = ".factor"


class PowerSGD(Compressor):
    """Sends factors of ``chosen.rank`` columns."""

    def __init__(self, *args: object) -> None:
        super().__init__(*args)  # type: ignore[arg-type]
        self.slots = (*self.slots, "factor")
        self.factors: dict[str, Tensor] = {}  # Q of the last step, by parameter

    def start(self, bucket: Bucket, comm: Comm) -> Work:
        """Multiply and sum P; the rest happens in the wait."""
        flat, parts, rank = bucket.flat, filled(bucket.parts), self.chosen.rank
        assert rank is not None
        shapes = {part.name: matrix(part.shape, rank) for part in parts}
        low = [part for part in parts if shapes[part.name]]
        dense = [part for part in parts if not shapes[part.name]]
        matrices = [part.of_shard(flat).view(*shapes[part.name][:2]) for part in low]
        columns = [shapes[part.name][2] for part in low]
        message = flat.new_empty(
            sum(part.numel for part in dense)
            + sum(len(m) * r for m, r in zip(matrices, columns, strict=True))
        )
        *rests, ps = slices(message, [part.numel for part in dense])
        for part, rest in zip(dense, rests, strict=True):
            rest.copy_(part.of_shard(flat))
        lefts = rows(ps, [len(m) for m in matrices], columns)
        for part, m, p in zip(low, matrices, lefts, strict=True):
            torch.mm(m, self.factor(part, m.shape[1], p), out=p)  # [1]
        summing: list[Work] = [comm.all_reduce(message, async_op=True)] if len(message) else []

        def improve() -> None:
            for part, rest in zip(dense, rests, strict=True):
                part.of_shard(flat).copy_(rest)
            if not low:
                return
            orthonormal = [self.orthonormal(p) for p in lefts]  # [2]
            message = flat.new_empty(
                sum(m.shape[1] * r for m, r in zip(matrices, columns, strict=True))
            )
            rights = rows(message, [m.shape[1] for m in matrices], columns)
            left = flat.clone()
            for part, m, p, q in zip(low, matrices, orthonormal, rights, strict=True):
                torch.mm(m.T, p, out=q)
                torch.addmm(m, p, q.T, alpha=-1, out=part.of_shard(left).view_as(m))
            summing: Work = comm.all_reduce(message, async_op=True)  # [3]
            self.keep_low(low, left)  # [4]
            summing.wait()
            for part, m, p, q in zip(low, matrices, orthonormal, rights, strict=True):
                torch.mm(p, q.T, out=m)  # [5]
                self.remember(part, q)

        return Finish(summing, improve)

    def factor(self, part: Part, size: int, like: Tensor) -> Tensor:
        """Q of the last step; the first Q is drawn, equal on all ranks."""
        if part.name in self.factors:
            return self.factors[part.name]
        drawn = first_factor(self.chosen.seed, part.name, size, like.shape[1], like.dtype)
        return drawn.to(like.device)

    def orthonormal(self, p: Tensor) -> Tensor:
        """Gram-Schmidt orthonormalization of the columns of ``p``."""
        q, r = torch.linalg.qr(p)
        # Householder's signs hang on the first row, which may be zero: a column could turn round.
        return q * torch.where(r.diagonal() < 0, -1.0, 1.0).to(q.dtype)

    def remember(self, part: Part, q: Tensor) -> None:
        """Keep Q for the next step, unless no rank had a gradient: zeros would stay zeros."""
        if not q.any():
            return
        if part.name in self.factors:
            self.factors[part.name].copy_(q)
        else:
            self.factors[part.name] = q.clone()

    def keep_low(self, low: Sequence[Part], left: Tensor) -> None:
        """Keep residuals of matrices only; other tensors have none."""
        if self.chosen.feeds_back:
            for part in low:
                self.feedback.keep(part, part.of_shard(left))

    def pieces(self) -> list[Piece]:
        """Residuals, and each rank's own copy of the factors."""
        held = self.factors.items()
        own = [rank_piece(f"{name}{SLOT}", tensor, self.place) for name, tensor in held]
        return super().pieces() + own

    def load_pieces(self, pieces: Sequence[Piece]) -> list[Piece]:
        """Load both; any rank's factors are valid."""
        rest = []
        self.factors = {}
        for piece in super().load_pieces(pieces):
            name, slot, _ = piece.name.rpartition(f"{SLOT}@")
            if slot:
                self.factors[name] = piece.tensor.clone()
            else:
                rest.append(piece)
        return rest


def matrix(shape: Sequence[int], rank: int) -> tuple[int, ...]:
    """Rows, columns and rank of a parameter's matrix; ``()`` if it is not compressed."""
    if len(shape) < 2:
        return ()
    n1, n2 = shape[0], math.prod(shape[1:])
    r = min(rank, n1, n2)
    return (n1, n2, r) if r * (n1 + n2) < n1 * n2 else ()


def slices(flat: Tensor, sizes: Sequence[int]) -> list[Tensor]:
    """Consecutive views of ``flat`` with these sizes, and the remainder."""
    return list(flat.split([*sizes, flat.numel() - sum(sizes)]))


def rows(flat: Tensor, lengths: Sequence[int], columns: Sequence[int]) -> list[Tensor]:
    """Consecutive views of ``flat`` as matrices with these rows and columns."""
    sizes = [n * r for n, r in zip(lengths, columns, strict=True)]
    *views, _ = slices(flat, sizes)
    return [view.view(n, r) for view, n, r in zip(views, lengths, columns, strict=True)]
