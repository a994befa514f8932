"""The state that offloading moves to host memory, and the bytes per step between host and device.

``offload: optimizer``: masters and optimizer state rest on the host; gradients go down and
parameters come up once a step.  ``offload: parameters`` (strategies that shard them): shards and
their gradients rest there too; a shard comes up whenever its unit is gathered.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from shardproof.costs.model import Bound, Bytes, CostModel
from shardproof.costs.model_facts import ITEMSIZE, ModelFacts, TensorFacts, used, used_by
from shardproof.costs.zero import Zero1, Zero3, votes

OPTION = "offload"


def asked(kind: type[CostModel], facts: ModelFacts) -> CostModel:
    """The cost model ``kind`` of ``facts``, with the offload that they ask for."""
    inner = kind(facts)
    is_offloaded = facts.option(OPTION, "none") != "none"
    return Offloaded(inner) if is_offloaded and isinstance(inner, Zero1 | Zero3) else inner


def _of_inner(name: str) -> Callable[..., Any]:
    return lambda self, *given: getattr(self.inner, name)(*given)


class Offloaded(CostModel):
    """A strategy of which a part rests in host memory; the network sees no difference."""

    source = (
        "ZeRO-Offload (arXiv 2101.06840) section 4.1: 2 Psi of gradients down and 2 Psi of "
        "parameters up in 16 bits, each rank its share; no optimizer state on the device"
    )

    def __init__(self, inner: Zero1 | Zero3) -> None:
        super().__init__(inner.facts)
        #: The cost model of the strategy as it would be without offload.
        self.inner = inner
        told = {"strategy": inner.strategy, "source": f"{inner.source}; {self.source}"}
        vars(self).update(told, divided=inner.divided, rests_as_built=inner.rests_as_built)

    @property
    def shards_rest_there(self) -> bool:
        """Whether parameter shards lie in host memory between their uses."""
        return self.facts.option(OPTION, "none") == "parameters"

    # The same as without offload.
    flows, local = _of_inner("flows"), _of_inner("local")
    prefetch, unclassified_limit = _of_inner("prefetch"), _of_inner("unclassified_limit")
    why_overlap_is_not_judged = _of_inner("why_overlap_is_not_judged")

    def resident(self, rank: int, step: int, updated: int) -> Bytes:
        """The state that remains on the device: residuals, and perhaps parameters and gradients."""
        held, kept = self.inner.resident(rank, step, updated), self.inner.kept(rank, step)
        stays = dict.fromkeys(held, 0) if self.shards_rest_there else held
        return stays | {"masters": 0, "optimizer_state": kept}

    def host(self, rank: int, step: int, updated: int) -> Bytes:
        """Optimizer state, and masters of what this rank updates unless its shards are masters."""
        held = self.inner.resident(rank, step, updated)
        held["optimizer_state"] -= self.inner.kept(rank, step)
        if self.shards_rest_there:  # gradients come down to where those of every step lie
            assert isinstance(self.inner, Zero3)
            ever = used_by(self.facts.parameters, self.facts.steps - 1)
            return held | {"gradients": self.inner.gradient_bytes(rank, ever)}
        masters = sum(n * ITEMSIZE[t.dtype] for t, n in self.trained(rank))
        return {"masters": masters, "optimizer_state": held["optimizer_state"]}

    def host_traffic(self, rank: int, step: int, updated: int) -> dict[str, int]:
        """Gradients down, parameters up; after a skipped update only shards for computing move."""
        if self.shards_rest_there:
            assert isinstance(self.inner, Zero3)
            # There is no formula for a unit that only some micro-batches call, as for its traffic.
            if self.inner.uncalled:
                return {}
            #   host -> device    a shard, as often as its unit is gathered
            #   device -> host    the reduced shard of its gradient, once
            lifted = sum(
                self.inner.gathers_per_step(unit) * flat.shard_bytes(self.facts.compute(flat.dtype))
                for unit in self.inner.units
                for flat in unit.flats
            )
            return {"down": sum(flat.shard_bytes() for flat in self.inner.reduced), "up": lifted}
        if updated != step:
            return {"down": 0, "up": 0}
        ready = {t.name for t in used(self.facts.parameters, step)}
        moved = [(t.dtype, count) for t, count in self.trained(rank) if t.name in ready]
        # Whole parameters have gradients as summed, shards have them as built.
        is_shard = isinstance(self.inner, Zero3)
        down = (lambda dtype: dtype) if is_shard else self.facts.reduction
        up = (lambda dtype: dtype) if is_shard else self.facts.compute
        return {
            "down": sum(count * ITEMSIZE[down(dtype)] for dtype, count in moved),
            "up": sum(count * ITEMSIZE[up(dtype)] for dtype, count in moved),
        }

    def communication_at_rest(self, rank: int, step: int) -> int:
        """The same as without offload; if shards rest on the host, only votes are on the device."""
        if self.shards_rest_there:
            return votes(self.facts)
        return self.inner.communication_at_rest(rank, step)

    def peaks(self, rank: int, phase: str, step: int) -> dict[str, Bound]:
        """The same as without offload, less the shards that are on the host."""
        bounds = self.inner.peaks(rank, phase, step)
        if not self.shards_rest_there or "parameters" not in bounds:
            return bounds
        bound, away = bounds["parameters"], self.inner.resident(rank, step, step)["parameters"]
        return bounds | {"parameters": Bound(bound.low - away, bound.high - away)}

    def trained(self, rank: int) -> list[tuple[TensorFacts, int]]:
        """``(tensor, elements)`` that ``rank`` updates."""
        return [(t, n) for t, n in self.inner.parts(rank) if t.trainable]
