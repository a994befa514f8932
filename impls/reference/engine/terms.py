"""Loss terms over several micro-batches, such as a load-balancing loss over a rank's or the whole
batch.

Problem.  Such a term is no sum over samples: it is a function f of sums s over all of them.  No
micro-batch knows these sums when its backward begins.

    forward    of all micro-batches; each gives its part s_m of the sums
    sum        s = all s_m of this rank; of a global term over all ranks: one all-reduce of s
    backward   of each micro-batch: its loss + (df/ds at s) . s_m

The gradient is that of f(s), for df = (df/ds) . ds and s is the sum of all s_m.  Every rank finds
the same slope df/ds, so gradients are summed over ranks as ever.

Cost: all graphs of a step are alive at once; 2 (N-1) times the bytes of s for each global term.
Numbers: as one device, up to the order in which s is summed.
Left out: several micro-batches where a unit is gathered for one forward and one backward (ZeRO-3,
FSDP): a second forward of each would send its parameters again.  And the approximation by counts of
earlier micro-batches, which saves the memory (Megatron-LM's global auxiliary loss).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from shardproof.axes import sharing
from shardproof.contract import Batch, LossTerm, Refused

if TYPE_CHECKING:
    from shardproof.impls.reference.engine.engine import Engine


class Terms:
    """Forward and backward of one step of ``engine``."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine

    def backward(self, batch: Batch) -> Tensor:
        """Run ``Engine.backward`` with loss terms; return this rank's share of the loss."""
        engine, micro_batches = self.engine, batch.micro_batches
        several = len(micro_batches) > 1
        if several and engine.handle.takes_turns:
            which = engine.build.terms[0].name
            raise Refused(
                f"loss term {which!r} with {len(micro_batches)} micro-batches needs all forwards "
                "before the first backward, but this strategy runs each backward before the next "
                "forward; use 1 micro-batch per step"
            )
        outputs = []
        for micro in micro_batches:
            if not several:
                engine.handle.accumulate(is_last=True)
            outputs.append(engine.module(engine.precision.cast_inputs(micro.inputs)))
        engine.handle.forwards_ended()
        pairs = list(zip(outputs, micro_batches, strict=True))
        losses = [engine.loss_of(*pair) for pair in pairs]
        total = sum((loss.detach() for loss in losses), self.nothing())
        for term in engine.build.terms:
            parts = [term.statistics(*pair) for pair in pairs]
            whole = self.whole(term, [part.detach() for part in parts]).requires_grad_()
            value = term.value(whole)
            [slope] = torch.autograd.grad(value, [whole])
            pulls = [(slope * part).sum() for part in parts]
            losses = [loss + pull for loss, pull in zip(losses, pulls, strict=True)]
            total = total + value.detach() * self.share(term)
        for number, loss in enumerate(losses):
            if several:
                engine.handle.accumulate(is_last=number == len(losses) - 1)
            engine.handle.backward_begins(loss)
            (loss * engine.scaler.scale if engine.scaler else loss).backward()
        return total

    def nothing(self, size: int = 0) -> Tensor:
        """Zeros in the dtype of the weights."""
        own = next(self.engine.module.parameters()).dtype
        dtype = own if own.itemsize >= 4 else torch.float32
        return torch.zeros(size or (), dtype=dtype, device=self.engine.mesh.device)

    def whole(self, term: LossTerm, parts: list[Tensor]) -> Tensor:
        """The sum over the scope of ``term``; a rank without data takes part."""
        whole = sum(parts, self.nothing(term.size))
        for axis in self.axes(term):
            self.engine.mesh.comm(axis).all_reduce(whole)
        return whole

    def share(self, term: LossTerm) -> float:
        """The share of a value known to all ranks, so that the shares sum to it."""
        ranks = 1
        for axis in self.axes(term):
            ranks *= self.engine.mesh.axes[axis]
        return 1 / ranks

    def axes(self, term: LossTerm) -> tuple[str, ...]:
        """The axes of the mesh that ``term`` spans."""
        return sharing(self.engine.mesh.axes) if term.scope == "global" else ()
