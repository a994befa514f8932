"""What a case is compared with: tensors and numbers of the same training in one process."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from shardproof.files import Stored
from shardproof.oracle.exactness import Budget

Tensors = Mapping[str, Tensor]


@dataclass(frozen=True)
class TruthStep:
    """One step of the oracle.

    ``loss`` is the sum of ``losses``, one for each data coordinate.  ``norm`` is the global L2 norm
    of ``gradients`` as ``torch.nn.utils.clip_grad_norm_(foreach=False)`` computes it: the norm of
    the tensors' norms, in their dtype.  ``clipped``: the gradients times
    ``min(1, clip / (norm + 1e-6))``; ``None`` with clipping off.  ``parameters`` and ``optimizer``
    (``"<parameter>.<slot>"``) are those after the update; ``buffers`` those of each coordinate
    after its last micro-batch.  ``scale``: what losses are multiplied by; ``skipped``: an overflow
    left the update out.
    """

    loss: float
    losses: Sequence[float]
    norm: Tensor
    gradients: Tensors
    clipped: Tensors | None
    parameters: Tensors
    optimizer: Tensors
    buffers: Sequence[Tensors]
    scale: float
    skipped: bool


@dataclass
class Truth(Stored):
    """A whole training: the parameters at the start, every step, and what exactness takes.

    Of a replay there are no steps, but ``final`` parameters, the number of ``updates``, how many
    versions the stalest of them was behind (``stale``), or the ``problem`` of a history that cannot
    have happened.
    """

    initial: Tensors = field(default_factory=dict)
    steps: list[TruthStep] = field(default_factory=list)
    budget: Budget | None = None
    final: Tensors = field(default_factory=dict)
    problem: str | None = None
    updates: int | None = None
    stale: int | None = None

    def not_finite(self) -> str | None:
        """The first of its numbers that is infinite or NaN, as a sentence; ``None``: none is.

        No comparison with such a number can fail: NaN beside NaN is equal bits.  Gradients of a
        skipped step overflowed by design; a buffer may be a mask of infinities.
        """
        for number, step in enumerate(self.steps):
            kinds = {"parameters": step.parameters, "optimizer": step.optimizer}
            if not step.skipped:
                kinds = {"gradients": step.gradients, "clipped": step.clipped or {}} | kinds
            for kind, tensors in kinds.items():
                for name, tensor in tensors.items():
                    if not bool(tensor.isfinite().all()):
                        what = f"{kind} of {name!r} at step {number}"
                        return f"the oracle itself diverges: {what} are not finite"
            if not math.isfinite(step.loss) and not step.skipped:
                return f"the oracle itself diverges: its loss at step {number} is {step.loss}"
        return None
