"""One bit per element in both directions: the common part of sign and onebit.

    over 3 ranks   [1] all-gather    the magnitude of each parameter, of every rank
                   [2] all-to-all    signs, 8 in a byte: rank r gets those that it serves
                   [3]               what it makes of them: a value an element, of which signs are
                                     sent (and a magnitude, where it is the server's own)
                   [4] all-to-all    to everybody; magnitudes by all-gather

Signs begin a byte for each parameter.  A parameter's bytes are cut into as many parts as there are
ranks, whatever the bucket that it lies in: so a rank always serves the same elements.

    bytes of w   | 0 | 1 | 2 | 3 | 4 |      rank 0 serves 0 and 1, rank 1 2 and 3, rank 2 4

The sign of zero is plus, and that of noise: of what is less than sqrt(eps) of the parameter's
magnitude.  Which sign rounding leaves to a sum of zero should not decide about a whole magnitude.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from shardproof.comm import Comm
from shardproof.impls.reference.collectives.schedule import cut
from shardproof.impls.reference.parts.compressors.compressor import Compressor, Finish, filled
from shardproof.impls.reference.parts.flat import Part
from shardproof.impls.reference.parts.reducers import Bucket, Work

#: Signs in a byte.
BITS = 8


@dataclass(frozen=True)
class Served:
    """``elements`` of a parameter that one rank serves, and the position of their ``bytes`` among
    the parameter's.
    """

    part: Part
    elements: range
    bytes: range


def served(part: Part, ranks: int) -> list[Served]:
    """The part of a parameter that each of ``ranks`` serves."""
    n, parts = part.numel, cut(range(-(-part.numel // BITS)), ranks)
    ends = [(min(BITS * b.start, n), min(BITS * b.stop, n)) for b in parts]
    return [Served(part, range(*span), b) for span, b in zip(ends, parts, strict=True)]


class Signs(Compressor):
    """Send signs and magnitudes to the ranks that serve them, and receive theirs."""

    #: Whether a server's magnitudes are its own, so that it must send them.
    tells_magnitudes: ClassVar[bool]

    def start(self, bucket: Bucket, comm: Comm) -> Work:
        """Send to the servers; they answer in the wait."""
        flat, parts = bucket.flat, filled(bucket.parts)
        if not parts:
            return Finish((), lambda: None)
        sizes = torch.stack([self.magnitude(part.of_shard(flat)) for part in parts])
        signed = [is_plus(part.of_shard(flat), s) for part, s in zip(parts, sizes, strict=True)]
        packed = [pack(each) for each in signed]
        if self.chosen.feeds_back:
            left = flat.clone()
            for part, size, plus in zip(parts, sizes, signed, strict=True):
                part.of_shard(left).sub_(torch.where(plus, size, -size))
            self.keep(bucket, left)
        by_rank = [*zip(*(served(part, comm.size) for part in parts), strict=True)]
        message = torch.cat(
            [
                signs[slice(one.bytes.start, one.bytes.stop)]
                for each in by_rank
                for one, signs in zip(each, packed, strict=True)
            ]
        )
        lengths = [sum(len(one.bytes) for one in each) for each in by_rank]
        own = [lengths[comm.rank]] * comm.size
        all_sizes = sizes.new_empty(comm.size * len(parts))
        arrived = message.new_empty(sum(own))
        works: list[Work] = [
            comm.all_gather(all_sizes, sizes, async_op=True),  # [1]
            comm.all_to_all(arrived, message, own, lengths, async_op=True),  # [2]
        ]

        def answer() -> None:
            given = all_sizes.view(comm.size, len(parts))
            mine = by_rank[comm.rank]
            bits = arrived.view(comm.size, -1).split([len(one.bytes) for one in mine], dim=1)
            answers = [  # [3]
                self.serve(one, unpack(some, len(one.elements), flat.dtype), given[:, number])
                for number, (one, some) in enumerate(zip(mine, bits, strict=True))
            ]
            told = self.tell([size for _, size in answers], given, comm)
            signs = torch.cat([pack(plus) for plus, _ in answers])
            comm.all_to_all(message, signs.repeat(comm.size), lengths, own)  # [4]
            at = 0
            for each, magnitudes in zip(by_rank, told, strict=True):
                for one, size in zip(each, magnitudes, strict=True):
                    decided = unpack(
                        message[at : at + len(one.bytes)], len(one.elements), flat.dtype
                    )
                    where = slice(one.elements.start, one.elements.stop)
                    one.part.of_shard(flat)[where] = decided * size
                    at += len(one.bytes)

        return Finish(works, answer)

    @abstractmethod
    def magnitude(self, values: Tensor) -> Tensor:
        """The one number by which the signs of a parameter's ``values`` are multiplied."""

    @abstractmethod
    def serve(self, one: Served, signs: Tensor, sizes: Tensor) -> tuple[Tensor, Tensor]:
        """The signs sent back as plus, and their magnitude.

        ``signs`` are +1 or -1, a row for each rank, ``sizes`` the magnitudes of the ranks.
        """

    def tell(self, sizes: Sequence[Tensor], given: Tensor, comm: Comm) -> Tensor:
        """Magnitudes of the answers: one row per server, one column per parameter."""
        own = torch.stack(list(sizes))
        if not self.tells_magnitudes:
            return own.expand(comm.size, len(own))
        told = own.new_empty(comm.size * len(own))
        comm.all_gather(told, own)
        return told.view(comm.size, len(own))


def is_plus(values: Tensor, size: Tensor) -> Tensor:
    """Whether each of ``values`` of magnitude ``size`` counts as plus."""
    return values >= -size * math.sqrt(torch.finfo(values.dtype).eps)


def pack(plus: Tensor) -> Tensor:
    """Signs, one-dimensional and true for plus, 8 per byte, the first in the lowest bit."""
    length = -(-plus.numel() // BITS)
    bits = torch.zeros(length * BITS, dtype=torch.uint8, device=plus.device)
    bits[: plus.numel()] = plus
    packed = torch.zeros(length, dtype=torch.uint8, device=plus.device)
    for place, column in enumerate(bits.view(length, BITS).unbind(1)):
        packed |= column << place
    return packed


def unpack(packed: Tensor, numel: int, dtype: torch.dtype) -> Tensor:
    """+1 and -1 for the first ``numel`` signs of each row of ``packed``."""
    places = torch.arange(BITS, dtype=torch.uint8, device=packed.device)
    bits = (packed.unsqueeze(-1) >> places) & 1
    return bits.flatten(-2)[..., :numel].to(dtype) * 2 - 1
