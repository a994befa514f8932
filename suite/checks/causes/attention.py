"""Attention that ranks put together wrongly from each other's keys and values, or heads.

    rank r    own queries x block r, r-1, ...  -> a partial result and its log-sum-exp each
              weights of the partial results     softmax of the log-sum-exps; a fault: another
              gradient of block s                the terms of every rank; a fault: of some ranks

The whole model attends as the ranks would, so that its loss or its gradients equal those of the
fault.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from shardproof.oracle.training import Change

#: A score without weight; of infinite ones a row that sees nothing of a block has no gradient.
_HIDDEN = -1e30


def _right(lses: Tensor) -> Tensor:
    return lses.softmax(0)


@dataclass
class Attention:
    """Attention of all ranks; ``held``: the positions of each, for a length.

    ``weigh``: log-sum-exps ``(blocks, ...)``, the own block first, to weights of partial results.
    ``share``: how much of the gradient of rank ``source``'s keys and values comes from ``rank``.
    ``repeats`` and ``returns``: of KV heads that several ranks share, and of the results' heads.
    """

    held: Callable[[int], Sequence[Tensor]]
    weigh: Callable[[Tensor], Tensor] = _right
    share: Callable[[int, int, int], float] = lambda rank, source, ranks: 1.0
    repeats: Callable[[Tensor, int], Tensor] = lambda part, times: part.repeat_interleave(times, 1)
    returns: Callable[[Tensor], Tensor] = lambda mixed: mixed

    def __call__(self, module: nn.Module) -> None:
        """Put it in the place of the attention of ``module``."""
        for core in module.modules():
            if hasattr(core, "attend"):
                vars(core)["attend"] = partial(self.attend, core)

    def attend(self, core: Any, heads: tuple[Tensor, Tensor, Tensor], rows: Tensor, _: Any) -> Any:
        """The results of all ranks, in the order of positions."""
        query, (key, value) = heads[0], heads[1:]
        times, parts = query.shape[1] // key.shape[1], self.held(len(rows))
        pair = torch.stack([self.repeats(part, times) for part in (key, value)])
        results = []
        for rank, own in enumerate(parts):
            lses, partials = [], []
            for block in ((rank - number) % len(parts) for number in range(len(parts))):
                columns = parts[block]
                if not len(columns):
                    continue
                share, part = self.share(rank, block, len(parts)), pair[..., columns, :]
                key, value = part * share + part.detach() * (1 - share)
                scores = query[:, :, own] @ key.mT / math.sqrt(query.shape[-1])
                scores = scores.masked_fill(core.span.hides(own, columns), _HIDDEN)
                lses.append(scores.logsumexp(-1))
                partials.append(scores.softmax(-1) @ value)
            weights = self.weigh(torch.stack(lses))[..., None]
            results.append((weights * torch.stack(partials)).sum(0))
        return self.returns(torch.cat(results, 2)[:, :, torch.cat([*parts]).argsort()])


def of_losses(held: Callable[[int], Sequence[Tensor]], axis: str) -> Iterator[tuple[str, Change]]:
    """Changes that make another loss, and what they mean."""
    of = f"of the axis {axis!r}"
    twice = f"each rank {of} counts its own block of keys twice in the softmax"
    yield twice, Attention(held, weigh=_own_twice)
    low = f"partial results of ranks {of} are merged by log-sum-exps in bfloat16"
    yield low, Attention(held, weigh=lambda lses: _right(lses.bfloat16().to(lses.dtype)))
    most = f"partial results of ranks {of} are merged by the largest log-sum-exp, not by their sum"
    yield most, Attention(held, weigh=_by_largest)
    turn = f"KV heads that ranks {of} share are repeated in turn, not each by itself"
    yield turn, Attention(held, repeats=lambda part, times: part.repeat(1, times, 1, 1))
    back = f"heads come back from the ranks {of} in another order"
    yield back, Attention(held, returns=lambda mixed: mixed.flip(1))


def of_gradients(
    held: Callable[[int], Sequence[Tensor]], axis: str
) -> Iterator[tuple[str, Change]]:
    """Changes that make other gradients, and what they mean."""
    of = f"keys and values of a rank of the axis {axis!r}"
    own = f"gradients of {of} have only the terms of that rank's queries"
    yield own, Attention(held, share=lambda rank, source, ranks: float(rank == source))
    mean = f"gradients of {of} are averaged over ranks, not summed"
    yield mean, Attention(held, share=lambda rank, source, ranks: 1 / ranks)
    #     the block of rank s goes through s, s+1, ..., s-1
    lost = f"gradients of {of} lack the terms of the last rank that it travels to"
    yield lost, Attention(held, share=lambda rank, source, n: float((rank + 1 - source) % n != 0))
    last = f"gradients of {of} have the terms of the last rank that it travels to only"
    yield last, Attention(held, share=lambda rank, source, n: float((rank + 1 - source) % n == 0))


def _own_twice(lses: Tensor) -> Tensor:
    return _right(torch.cat([lses[:1] + math.log(2), lses[1:]]))


def _by_largest(lses: Tensor) -> Tensor:
    total, weights = lses[0], [torch.ones_like(lses[0])]
    for lse in lses[1:]:
        merged = torch.logaddexp(total, lse)
        weights = [*(w * (total - merged).exp() for w in weights), (lse - merged).exp()]
        total = torch.maximum(total, lse)
    return torch.stack(weights)
