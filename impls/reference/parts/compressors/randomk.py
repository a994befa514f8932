"""Random-k: elements that all ranks draw equally.

Problem.  Top-k needs indices, and an all-gather whose bytes grow with the number of ranks.  If all
ranks send the same elements, no index is needed, and values can be summed on their way.  Which
elements these are is drawn anew in every step, from a seed; in the long run all are sent.

    what                        where
    residuals                   every rank its own, with ``feedback`` only

    all_reduce   [1] draw the mask of each parameter, from (seed, step, its name)
                 [2] the masked values, times n / k without feedback; all-reduce
         wait    [3] zero but for the mask, which gets the sum

Cost: k = density n elements, rounded up for each parameter, of b bytes; bytes sent, over all N
ranks: 2 (N-1) b k (Stich et al., arXiv 1809.07599, section 2; the volume is a ring's: ZeRO, arXiv
1910.02054, section VII-A).  Memory: with feedback n elements per rank.
Numbers: without feedback the expectation over masks is the plain sum: each element is sent with
probability k/n, times n/k.  With feedback values are sent as they are, for the rest comes later.
Density 1 is no compression.  In a narrower ``dtype`` as exchange.py says.
Left out: masks of blocks, which are cheaper to draw and to pick.
"""

from __future__ import annotations

import torch
from torch import Tensor

from shardproof.comm import Comm
from shardproof.impls.reference.parts.compressors.compressor import Compressor, Finish, filled
from shardproof.impls.reference.parts.compressors.draws import mask
from shardproof.impls.reference.parts.compressors.exchange import sum_over
from shardproof.impls.reference.parts.flat import Part
from shardproof.impls.reference.parts.reducers import Bucket, Work


class RandomK(Compressor):
    """Send the share ``chosen.density`` of every parameter, drawn by ``chosen.seed`` and step."""

    def start(self, bucket: Bucket, comm: Comm) -> Work:
        """Draw and sum."""
        flat, parts = bucket.flat, filled(bucket.parts)
        if not parts:
            return Finish((), lambda: None)
        drawn = [self.draw(part, bucket.step).to(flat.device) for part in parts]
        picked = [
            part.of_shard(flat)[where] * self.factor(part.numel, len(where))
            for part, where in zip(parts, drawn, strict=True)
        ]
        values = torch.cat(picked).to(self.chosen.dtype or flat.dtype)
        places = torch.cat([where + part.offset for part, where in zip(parts, drawn, strict=True)])
        if self.chosen.feeds_back:
            left = flat.clone()
            left[places] -= values.to(flat.dtype)
            self.keep(bucket, left)

        def put_back(total: Tensor) -> None:  # [3]
            flat.zero_()
            flat[places] = total.to(flat.dtype)

        return sum_over(values, flat.dtype, comm, put_back)  # [2]

    def draw(self, part: Part, step: int) -> Tensor:  # [1]
        """Indices of the elements of a parameter that are sent in ``step``."""
        assert self.chosen.density is not None
        return mask(self.chosen.seed, step, part.name, part.numel, self.chosen.density)

    def factor(self, numel: int, number: int) -> float:
        """The factor that corrects for unsent elements."""
        return 1.0 if self.chosen.feeds_back else numel / number
