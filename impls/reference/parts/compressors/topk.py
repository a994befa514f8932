"""Top-k: the values of largest magnitude and their positions.

Problem.  Most elements of a gradient are small.  So each rank sends only the largest ones of every
parameter, with their signs.  Ranks choose different elements, so there is no sum to be reduced:
everybody gets everybody's values and indices, and adds them up.

    what                        where
    residuals                   every rank its own: the gradients, zero where they were sent

    all_reduce   [1] choose k elements of each parameter by magnitude
                 [2] all-gather values; all-gather their places in the bucket (int32)
                 [3] what was sent is set to zero, the rest remembered
         wait    [4] zero, then add what each rank sent, in the order of ranks

Cost: k = density n elements, rounded up for each parameter, of b bytes, and 4 bytes for each index.
Bytes sent, over all N ranks: (N-1) N k (b + 4), where a dense ring sends 2 (N-1) b n; so in fp32 it
pays off only if density < 1/N (Aji and Heafield, arXiv 1704.05021; Lin et al., arXiv 1712.01887,
section 3).  Memory: n elements per rank, with feedback.
Numbers: the sum of what is sent, added in the order of ranks.  Density 1 is no compression.
Left out: momentum correction and warm-up of Deep Gradient Compression; thresholds of sampled
elements; one choice over all parameters together.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from shardproof.comm import Comm
from shardproof.impls.reference.parts.compressors.compressor import Compressor, Finish, filled
from shardproof.impls.reference.parts.compressors.draws import count
from shardproof.impls.reference.parts.flat import Part
from shardproof.impls.reference.parts.reducers import Bucket, Work


class TopK(Compressor):
    """Send the share ``chosen.density`` of every parameter, by magnitude."""

    def start(self, bucket: Bucket, comm: Comm) -> Work:
        """Choose and gather."""
        flat, parts = bucket.flat, filled(bucket.parts)
        if not parts:
            return Finish((), lambda: None)
        assert self.chosen.density is not None
        places = torch.cat(
            [
                self.choose(part.of_shard(flat), count(self.chosen.density, part.numel))
                + self.begin(part)
                for part in parts
            ]
        )
        values = flat[places].to(self.chosen.dtype or flat.dtype)
        left = flat.clone()
        left[places] -= values.to(flat.dtype)  # [3]
        self.keep(bucket, left)
        all_values = values.new_empty(comm.size * len(values))
        all_places = places.new_empty(comm.size * len(places), dtype=torch.int32)
        works = [  # [2]
            comm.all_gather(all_values, values, async_op=True),
            comm.all_gather(all_places, places.to(torch.int32), async_op=True),
        ]

        def add_up() -> None:  # [4]
            flat.zero_()
            where, what = all_places.view(comm.size, -1), all_values.view(comm.size, -1)
            for rank in self.order(comm):
                flat.index_add_(0, where[rank], what[rank].to(flat.dtype))

        return Finish(works, add_up)

    def choose(self, values: Tensor, number: int) -> Tensor:  # [1]
        """Indices of the ``number`` values of largest magnitude; values keep their signs."""
        return values.abs().topk(number, sorted=False).indices

    def order(self, comm: Comm) -> Iterable[int]:
        """The order in which the ranks' values are added: equal on all ranks, so that last bits
        agree.
        """
        return range(comm.size)

    def begin(self, part: Part) -> int:
        """The offset of a parameter's indices: its position in the bucket."""
        return part.offset
