"""One broadcast of more than 2 GiB: counts and offsets of 31 bits are too short for it.

Neither the values nor the answer are held as a whole beside the tensor: they repeat a block whose
length is prime, so that what is shifted by any power of two shows.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from shardproof.comm import Call

#: Elements of one byte, and of the block that repeats.
COUNT, BLOCK = (1 << 31) + 12_345, 16_777_213
GUARD, GUARDED, POISON = 64, 7, 254


def broadcast(system: Any, group: Any, rank: int, root: int, count: int = COUNT) -> tuple[int, str]:
    """Make the call on member ``rank``: how many elements are wrong, and the sentence that says so.

    It takes ``count`` bytes.
    """
    base = torch.empty(GUARD + count + GUARD, dtype=torch.uint8)
    view = base[GUARD : GUARD + count]
    base[:GUARD] = base[-GUARD:] = GUARDED
    block = _block()
    if rank == root:
        for _, part in _parts(view):
            part.copy_(block[: len(part)])
    else:
        view.fill_(POISON)
    for work in system.perform(Call("broadcast", "tensor", group, outputs=[view], root=root)):
        if work is not None:
            work.wait()
    if any(bool((guard != GUARDED).any()) for guard in (base[:GUARD], base[-GUARD:])):
        return 1, f"memory beyond the result of {count} bytes was written"
    for start, part in _parts(view):
        right = block[: len(part)]
        if not torch.equal(part, right):
            wrong = part != right
            at = start + int(wrong.nonzero()[0])
            what = f"the result[{at}] of {count} bytes is {int(view[at])}"
            return int(wrong.sum()), f"{what}, expected {int(right[at - start])}"
    return 0, ""


def _block() -> Tensor:
    draw = torch.Generator(torch.get_default_device()).manual_seed(9)
    return torch.randint(0, 251, (BLOCK,), dtype=torch.uint8, generator=draw)


def _parts(view: Tensor) -> Iterator[tuple[int, Tensor]]:
    return ((start, view[start : start + BLOCK]) for start in range(0, len(view), BLOCK))
