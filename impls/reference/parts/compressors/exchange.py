"""Sums of values that are sent in a narrower dtype than they are summed in.

An all-reduce in fp16 adds in fp16: it rounds after every addition, in an order that the backend
chooses.  So values travel narrow and are added wide, each part by one rank:

    over 3 ranks   [1] all-to-all    rank r gets part r of everybody's values
                   [2]               adds them in the order of ranks, rounds the sum once
                   [3] all-to-all    gives its part of the sum to everybody

Cost: 2 (N-1) n narrow elements over all N ranks, as a ring (ZeRO, arXiv 1910.02054, section VII-A).
Numbers: a sum in the wide dtype, rounded once; the same bits on all ranks and on every backend.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from shardproof.comm import Comm
from shardproof.impls.reference.collectives.schedule import cut
from shardproof.impls.reference.parts.compressors.compressor import Finish
from shardproof.impls.reference.parts.reducers import Work


def sum_over(
    values: Tensor, wide: torch.dtype, comm: Comm, then: Callable[[Tensor], object]
) -> Work:
    """Start to sum ``values`` over the ranks in ``wide``; ``then`` receives the sum.

    ``values`` are overwritten; the sum is theirs in dtype and size.
    """
    if not values.numel():
        return Finish((), lambda: None)
    if values.dtype == wide:
        work: Work = comm.all_reduce(values, async_op=True)
        return Finish([work], lambda: then(values))
    sizes = [len(part) for part in cut(range(values.numel()), comm.size)]
    own = sizes[comm.rank]
    arrived = values.new_empty(own * comm.size)
    giving: Work = comm.all_to_all(arrived, values, [own] * comm.size, sizes, async_op=True)  # [1]

    def answer() -> None:
        total = fold(arrived.view(comm.size, own), wide).to(values.dtype)  # [2]
        comm.all_to_all(values, total.repeat(comm.size), sizes, [own] * comm.size)  # [3]
        then(values)

    return Finish([giving], answer)


def fold(rows: Tensor, wide: torch.dtype) -> Tensor:
    """The sum of ``rows`` in the dtype ``wide``, one by one."""
    total = rows[0].to(wide, copy=True)
    for row in rows[1:]:
        total += row
    return total
