"""Dynamic loss scaling: fp16 gradients that would round to 0 are scaled up with the loss.

Problem.  The smallest fp16 number is 6e-8, and many gradients are smaller.  Multiplying the loss by
a scale multiplies all gradients; they are divided by it again where they are wide.  If the scale is
too large, gradients overflow: then the step is skipped and the scale is halved (Micikevicius et
al., arXiv 1710.03740, section 3.2).

    backward    loss times scale
    finish      reductions are over: an overflow of any rank, or of a sum, shows in the result
    check       1 if a gradient that this rank updates is not finite; MAX over the whole mesh
                (a sharded rank sees its shard only, and all must skip together)
    unscale     gradients times 1 / scale
    update      or none: then parameters, optimizer state and step counters stay as they were
    adapt       the same integer went to all ranks, hence the scale stays equal on all

Cost: one int32 all-reduce a mesh axis and step, control traffic.
Where ranks train alone (:class:`OwnScaler`) nothing is sent: each decides for itself, and has a
scale of its own.
Numbers: scales are powers of two, so nothing is rounded that does not overflow or underflow.
"""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor

from shardproof.comm import Mesh
from shardproof.contract import ScalerSpec


class LossScaler:
    """The scale, and the agreement on whether a step counts."""

    def __init__(self, spec: ScalerSpec, mesh: Mesh) -> None:
        self.spec, self.mesh = spec, mesh
        self.scale = spec.initial
        self.good = 0  # updates since the scale last changed

    def overflowed(self, gradients: Iterable[Tensor | None]) -> bool:
        """Whether any rank's ``gradients`` hold an infinity or NaN; the same answer on all ranks.

        Over all ranks they must cover every gradient; a collective call.
        """
        return self.agreed(any(not bool(g.isfinite().all()) for g in gradients if g is not None))

    def agreed(self, own: bool) -> bool:
        """Whether any rank reports an overflow."""
        # An integer travels, not the gradients: every rank learns of an overflow that one shard
        # has.
        for axis in self.mesh.axes:  # a maximum may be taken axis by axis
            [own] = map(bool, self.mesh.comm(axis).agree([own], "max"))
        return own

    def adapt(self, skipped: bool) -> None:
        """Back off after an overflow, grow after ``interval`` updates in a row."""
        if skipped:
            self.scale *= self.spec.backoff
            self.good = 0
            return
        self.good += 1
        if self.good == self.spec.interval:
            self.scale *= self.spec.growth
            self.good = 0


class OwnScaler(LossScaler):
    """The loss scale of one rank, whose gradients are its own."""

    def agreed(self, own: bool) -> bool:
        """Whether this rank reports an overflow."""
        return own
