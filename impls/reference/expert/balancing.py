"""Loss-free balancing: biases of routers that move once a step, by the load of all ranks.

    forward    each router counts the choices of its rank's tokens in the buffer ``load``
    update     load: sum over all ranks; integers, one call for all layers
               bias += rate * sign(mean load - load); then the counts start again from 0

(DeepSeek-V3, arXiv 2412.19437, section 2.1.2.)  A step whose update is left out moves nothing, and
its counts stay.  Counts of one rank alone would let biases drift apart: replicas would route the
same token to different experts.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import torch
from torch import Tensor, nn

from shardproof.comm import Comm
from shardproof.contract import Now, Refused

BIAS, LOAD = "balancing_bias", "load"


class Balancing:
    """All biases of ``module``; ``comm``: the ranks whose tokens count (``None``: this one's)."""

    #: The rules of both buffers (``Capabilities.follows``), whatever module has them.
    rules: ClassVar[Mapping[str, str]] = {f"*.{BIAS}": "given", f"*.{LOAD}": "given"}

    def __init__(self, module: nn.Module, comm: Comm | None, rate: float) -> None:
        self.module, self.comm, self.rate = module, comm, rate
        if not self.owners():
            raise Refused(
                f"option 'balance_rate' = {rate:g}: the model has no buffer {BIAS!r}; set "
                "balance_rate to 0"
            )

    def owners(self) -> list[nn.Module]:
        """The modules that have a bias."""
        return [part for part in self.module.modules() if BIAS in part._buffers]

    @torch.no_grad()
    def update(self) -> None:
        """Move every bias, and start to count again."""
        owners = self.owners()
        loads = self.total(torch.cat([owner.get_buffer(LOAD) for owner in owners]))
        sizes = [owner.get_buffer(LOAD).numel() for owner in owners]
        for owner, load in zip(owners, loads.split(sizes), strict=True):
            bias = owner.get_buffer(BIAS)
            bias.add_(step(load, self.rate).to(bias.dtype))
            owner.get_buffer(LOAD).zero_()

    def total(self, loads: Tensor) -> Tensor:
        """The sum of ``loads`` over all ranks."""
        if self.comm is not None:
            self.comm.all_reduce(loads)
        return loads

    @classmethod
    def given(cls, now: Now, rate: float) -> dict[str, Tensor]:
        """The buffers after an update of ``now.was``, by the counts of all coordinates."""
        found = {}
        for name, was in now.was.items():
            owner, _, leaf = name.rpartition(".")
            if leaf == BIAS:
                counts = [own[f"{owner}.{LOAD}"] for own in now.buffers]
                found[name] = was + step(torch.stack(counts).sum(0), rate).to(was.dtype)
            elif leaf == LOAD:
                found[name] = torch.zeros_like(was)
        return found


def step(load: Tensor, rate: float) -> Tensor:
    """By how much each bias moves; exact, for both sides are integers."""
    # Times the number of experts, for a mean would be rounded, and a balanced expert might move.
    return torch.sign(load.sum() - load * load.numel()).to(torch.float64) * rate
