"""The reference of a case: tensors and numbers of the same training in one process."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
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
    left the update out.  Of a system that keeps what it does not send ``given`` are the gradients
    of each coordinate, ``sent`` what it gave to the sum, ``kept`` what else is kept
    (:class:`~shardproof.contract.Emulation`).  ``routed``: of each coordinate, by layer, how many
    choices each expert carried out, ``(micro-batches, positions, experts)``; -1 where a micro-batch
    has no such position.

    Where coordinates train alone, ``apart`` has the step of each, and the other fields are those of
    the first, but the loss; ``met``: it ended in a meeting.
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
    given: Sequence[Tensors] = ()
    sent: Sequence[Tensors] = ()
    kept: Tensors = field(default_factory=dict)
    routed: Sequence[Tensors] = ()
    apart: Sequence[TruthStep] = ()
    met: bool = False

    @property
    def parted(self) -> bool:
        """Whether coordinates that train alone have other parameters after the update."""
        first = self.parameters
        return any(
            not torch.equal(first[name], tensor)
            for step in self.apart
            for name, tensor in step.parameters.items()
        )

    def norms(self) -> dict[str, dict[str, float]]:
        """Frobenius norms in fp64 by kind and name; gradients of a skipped step overflowed."""
        kinds = {
            "after_update parameters": self.parameters,
            "after_update optimizer": self.optimizer,
        }
        if not self.skipped:
            kinds |= {"gradients_final": self.gradients, "after_clip": self.clipped or {}}
        return {
            kind: {name: frobenius(tensor) for name, tensor in tensors.items()}
            for kind, tensors in kinds.items()
        }


def frobenius(tensor: Tensor) -> float:
    """The Frobenius norm, in fp64 (0 for an empty tensor).

    One order of sums, whatever the strides: what is kept may lie otherwise than it was made.
    """
    return float(torch.linalg.vector_norm(tensor.detach().to(torch.float64).contiguous()))


@dataclass
class Truth(Stored):
    """A whole training: the parameters at the start, every step, and what exactness takes.

    Of a replay there are no steps, but ``final`` parameters, the number of ``updates``, how many
    versions and how many steps the stalest of them was behind (``stale``, ``behind``), or the
    ``problem`` of a history that cannot have happened.
    """

    initial: Tensors = field(default_factory=dict)
    steps: list[TruthStep] = field(default_factory=list)
    budget: Budget | None = None
    final: Tensors = field(default_factory=dict)
    problem: str | None = None
    updates: int | None = None
    stale: int | None = None
    behind: int | None = None
