r"""Attention over positions of other ranks by collectives: keys and values gathered, or heads cut.

``all_gather``: every rank gets the keys and values of all positions and attends with its own
queries; backward sums their gradients and scatters them (Llama 3, arXiv 2407.21783, section 3.3.2).

    rank 0   q0  kv0 \                  q0 x kv0 kv1          dkv0 dkv1 \  reduce-   dkv0
    rank 1   q1  kv1 /  all-gather      q1 x kv0 kv1          dkv0 dkv1 /  scatter   dkv1

``all_to_all``: the cut by positions becomes a cut by heads and, behind the attention, one by
positions again (DeepSpeed-Ulysses, arXiv 2309.14509, section 3).

    rank 0   heads 0 1 of half the positions  \  all-to-all   head 0 of all positions
    rank 1   heads 0 1 of the other half      /   and back    head 1 of all positions

Keys and values of fewer heads than ranks are repeated before they leave, as often as is needed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from shardproof.comm import Comm
from shardproof.contract import Refused


class Gathered:
    """Attention of this rank's queries over gathered keys and values."""

    def __init__(self, comm: Comm) -> None:
        self.comm = comm

    def attend(self, core: nn.Module, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """The attention of ``core``, whose ``span`` tells which positions each rank has."""
        span: Any = core.span
        lengths = [len(part) for part in span.parts]
        both: Tensor = _Gather.apply(torch.stack([key, value]), self, lengths)
        # In the order of ranks: which position stands where only matters to the mask.
        columns = torch.cat([*span.parts])
        mixed: Tensor = core.attend((query, both[0], both[1]), span.rows, columns)  # type: ignore[operator]
        return mixed

    def gather(self, block: Tensor, lengths: Sequence[int]) -> Tensor:
        """``(2, samples, heads, own positions, size)`` of all ranks, positions of rank 0 first."""
        if self.comm.size == 1:
            return block.clone()
        share = max(lengths)
        # Ranks send equal parts: where one has a position fewer, padding travels, and is cut off.
        part = F.pad(block, (0, 0, 0, share - block.shape[3])).contiguous()
        whole = part.new_empty(self.comm.size, *part.shape)
        # Flat: gloo wants ranks on the first dimension, and takes no further one for them.
        self.comm.all_gather(whole.view(-1), part.view(-1))
        parts = zip(whole, lengths, strict=True)
        return torch.cat([part[..., :length, :] for part, length in parts], 3)

    def scatter(self, whole: Tensor, lengths: Sequence[int]) -> Tensor:
        """This rank's part of the sum over ranks of ``whole``, a gradient of all positions."""
        if self.comm.size == 1:
            return whole
        share = max(lengths)
        parts = whole.split([*lengths], 3)
        padded = torch.stack([F.pad(p, (0, 0, 0, share - p.shape[3])) for p in parts])
        part = padded.new_empty(padded.shape[1:])
        self.comm.reduce_scatter(part.view(-1), padded.view(-1))
        return part[..., : lengths[self.comm.rank], :]


class _Gather(torch.autograd.Function):
    """A gather, and its adjoint: the sum of what each rank used, scattered."""

    @staticmethod
    def forward(ctx: Any, block: Tensor, method: Gathered, lengths: Sequence[int]) -> Tensor:
        ctx.method, ctx.lengths = method, lengths
        return method.gather(block, lengths)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        return ctx.method.scatter(gradients[0], ctx.lengths), None, None


class Heads:
    """Attention with some of the heads over all positions."""

    def __init__(self, comm: Comm) -> None:
        self.comm = comm

    def attend(self, core: nn.Module, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """The attention of ``core``, whose ``span`` tells which positions each rank has."""
        span: Any = core.span
        key, value = (self.repeated(part, query.shape[1]) for part in (key, value))
        lengths = [len(part) for part in span.parts]
        heads = [part.shape[1] // self.comm.size for part in (query, key, value)]
        whole: Tensor = _Turn.apply(self.joined(query, key, value), self, lengths, True)
        columns = torch.cat([*span.parts])
        mixed = core.attend(tuple(whole.split(heads, 1)), columns, columns)  # type: ignore[operator]
        result: Tensor = _Turn.apply(mixed, self, lengths, False)
        return result

    def repeated(self, part: Tensor, heads: int) -> Tensor:
        """Keys or values with a head for every rank; :class:`Refused` if ranks cannot share."""
        ranks, own = self.comm.size, part.shape[1]
        if heads % ranks or (own % ranks and ranks % own):
            fits = [n for n in range(1, heads + 1) if heads % n == 0 and not (own % n and n % own)]
            raise Refused(
                f"option 'method' = 'all_to_all': {heads} heads and {own} KV heads cannot be "
                f"divided among the {ranks} ranks of the axis 'context'; set context to one of "
                f"{', '.join(map(str, fits))}, or set method to 'ring' or 'all_gather'"
            )
        return part.repeat_interleave(max(1, ranks // own), 1)

    def joined(self, *parts: Tensor) -> Tensor:
        """Heads of queries, keys and values in one tensor, in which those of a rank follow each
        other.
        """
        split = [part.unflatten(1, (self.comm.size, -1)) for part in parts]
        return torch.cat(split, 2).flatten(1, 2)

    def turn(self, tensor: Tensor, lengths: Sequence[int], to_heads: bool) -> Tensor:
        """``(samples, heads, own positions, size)`` to all positions of some heads, or back."""
        ranks, own = self.comm.size, lengths[self.comm.rank]
        if ranks == 1:
            return tensor.clone()
        samples, heads, _, size = tensor.shape
        if to_heads:
            # One part a rank: the heads that it will have.
            parts = [part.flatten() for part in tensor.chunk(ranks, 1)]
            shapes = [(samples, heads // ranks, length, size) for length in lengths]
        else:
            parts = [part.flatten() for part in tensor.split([*lengths], 2)]
            shapes = [(samples, heads, own, size)] * ranks
        sizes = [samples * shape[1] * shape[2] * size for shape in shapes]
        came = tensor.new_empty(sum(sizes))
        self.comm.all_to_all(came, torch.cat(parts), sizes, [part.numel() for part in parts])
        blocks = zip(came.split(sizes), shapes, strict=True)
        return torch.cat([block.view(shape) for block, shape in blocks], 2 if to_heads else 1)


class _Turn(torch.autograd.Function):
    """A change of cuts; its gradient changes them back."""

    @staticmethod
    def forward(
        ctx: Any, tensor: Tensor, method: Heads, lengths: Sequence[int], to_heads: bool
    ) -> Tensor:
        ctx.method, ctx.lengths, ctx.to_heads = method, lengths, to_heads
        return method.turn(tensor, lengths, to_heads)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        gradient = ctx.method.turn(gradients[0], ctx.lengths, not ctx.to_heads)
        return gradient, None, None, None
