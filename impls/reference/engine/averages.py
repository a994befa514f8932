"""An average of the parameters that a rank updates, independent of how the strategy splits the
update.

Problem.  Averaged weights evaluate better than the last ones (Polyak and Juditsky 1992; exponential
averages: Tarvainen and Valpola, arXiv 1703.01780).  Where parameters lie in shards, no rank has all
of them, and the tensors with which a model computes come and go.

    what       where
    averages   beside what the optimizer updates: shards, whole parameters, or their masters

    update     optimizer step -> average = decay * average + (1 - decay) * parameter, in place

Cost: as many bytes as the rank updates, in their dtype; nothing is sent.
Numbers: element by element, hence the same whatever the split.
Left out: an average of parameters that are not trained, which never move.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from shardproof.contract import Piece
from shardproof.impls.reference.engine.optimizer import Place, placed

#: As a checkpoint calls the average of a parameter: ``<parameter>.average``.
SLOT = "average"


class Averages:
    """Averages of all tensors in ``groups``, torch parameter groups of (name, tensor) pairs."""

    def __init__(self, groups: Sequence[Mapping[str, Any]], decay: float) -> None:
        self.decay = decay
        self.tensors: dict[str, Tensor] = {
            name: tensor for group in groups for name, tensor in group["params"]
        }
        self.averages = {name: self.begin(tensor) for name, tensor in self.tensors.items()}

    def begin(self, tensor: Tensor) -> Tensor:
        """Start an average as a copy of its parameter."""
        return tensor.detach().clone()

    @torch.no_grad()
    def update(self) -> None:
        """Update the averages after the optimizer's step."""
        for name, tensor in self.tensors.items():
            self.averages[name].mul_(self.decay).add_(tensor, alpha=1 - self.decay)

    def pieces(self, place: Place) -> list[Piece]:
        """The averages as pieces, placed like the slots of their parameters."""
        held = self.averages.items()
        return [piece for name, own in held for piece in placed(place, name, SLOT, own)]
