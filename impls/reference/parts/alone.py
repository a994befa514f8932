"""Ranks that train alone and meet at intervals: the common part of local SGD and DiLoCo.

Between meetings nothing is sent: a rank clips, updates and scales its loss by itself.  Its loss is
a share of the whole batch's, so its gradient times the number of ranks is an estimate of the whole
batch's gradient.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from shardproof.comm import Comm, Mesh
from shardproof.contract import Capabilities, Kind, Refused
from shardproof.impls.reference.engine.choices import FORMATS, Saved, declared
from shardproof.impls.reference.engine.engine import Engine
from shardproof.impls.reference.engine.handle import Replicated
from shardproof.impls.reference.engine.options import at_least, parse_options
from shardproof.impls.reference.engine.scaler import LossScaler, OwnScaler
from shardproof.impls.reference.engine.state import broadcast_tensors, named_state

if TYPE_CHECKING:
    from shardproof.impls.reference.checkpoint.saver import Saver

#: What ``save`` can write: every rank's own.
KEPT_APART = tuple(name for name in FORMATS if name != "full")


@dataclass(frozen=True)
class Meets(Saved):
    """``every``: the number of steps between meetings."""

    every: int = 8

    def __post_init__(self) -> None:
        at_least("every", self.every, 1)
        if self.checkpoint.format not in KEPT_APART:
            raise Refused(
                f"option 'checkpoint.format' = {self.checkpoint.format!r}: this format holds "
                "one copy of the state, but ranks have different states between synchronizations; "
                f"valid: {', '.join(KEPT_APART)}"
            )

    def after(self, step: int) -> bool:
        """Whether ranks meet after step number ``step``, counted from 0."""
        return (step + 1) % self.every == 0


class Alone(Replicated):
    """The handle: a whole model that is independent until the next meeting."""

    def __init__(self, module: nn.Module, comm: Comm, meets: Meets) -> None:
        super().__init__(module, comm)
        self.meets = meets
        self.parted, self.own_copy = False, self.replica
        broadcast_tensors(list(named_state(module).values()), comm)

    @property
    def apart(self) -> frozenset[Kind]:  # type: ignore[override]
        """Optimizer state is never averaged; parameters have diverged since the last meeting."""
        return frozenset({"optimizer", "parameters"} if self.parted else {"optimizer"})

    def finish(self) -> None:
        """Scale the gradients of a share to estimate those of the whole batch."""
        self.scale_gradients(torch.tensor(float(self.comm.size), dtype=torch.float64))

    def after_update(self) -> None:
        """Meet if it is time; a skipped update counts as a step."""
        self.parted = not self.meets.after(self.step)
        if not self.parted:
            self.meet()

    @abstractmethod
    def meet(self) -> None:
        """Make the parameters equal on all ranks."""

    def loaded(self) -> None:
        """Account for loaded state of ranks that had diverged."""
        self.parted = True


@torch.no_grad()
def mean(tensors: Sequence[Tensor], comm: Comm) -> list[Tensor]:
    """The mean over ranks of each of ``tensors``, which stay unchanged: one message per dtype."""
    means: dict[int, Tensor] = {}
    for dtype in dict.fromkeys(tensor.dtype for tensor in tensors):
        same = [i for i, tensor in enumerate(tensors) if tensor.dtype == dtype]
        flat = torch.cat([tensors[i].reshape(-1) for i in same])
        comm.all_reduce(flat)
        flat.div_(comm.size)
        parts = flat.split([tensors[i].numel() for i in same])
        means |= {i: part.view(tensors[i].shape) for i, part in zip(same, parts, strict=True)}
    return [means[i] for i in range(len(tensors))]


class TrainsAlone(Engine):
    """The engine of ranks that decide nothing together."""

    depth = "layout"
    scaler_type: type[LossScaler] = OwnScaler
    options_type: type[Meets]
    handle_type: Callable[..., Alone]

    @classmethod
    def capabilities(cls, options: Mapping[str, Any]) -> Capabilities:
        """Compared with as many trajectories in one process, whose bits it has in their order."""
        parse_options(cls.options_type, options)
        return declared(
            exactness="bitwise",
            oracle="emulated",
            emulates="trajectory",
            checkpoints=KEPT_APART,
        )

    def transform(self, module: nn.Module, mesh: Mesh, options: Mapping[str, Any]) -> Alone:
        """Apply the handle along the replicate axis."""
        chosen = parse_options(self.options_type, options)
        return self.handle_type(module, mesh.comm("replicate"), chosen)

    def save(self, path: Path, extra: Mapping[str, Any]) -> Saver:
        """Save the state of every rank.

        :raises Refused: a checkpoint has one loss scale, and each rank has its own.
        """
        if self.scaler is not None:
            raise Refused(
                "this system cannot be saved with a loss scaler: each rank has its own loss scale, "
                "but a checkpoint holds only one loss scale; leave the scaler out"
            )
        return super().save(path, extra)

    def full_state(self, kind: Kind) -> dict[str, Tensor]:
        """Copies of this rank's replica, right after a meeting.

        :raises Refused: ranks have parted, and there is no such thing as the state of all.
        """
        if kind in self.handle.apart:
            raise Refused(
                f"full_state({kind!r}) after step {self.handle.step}: each rank trains alone "
                "between synchronizations, so the ranks hold different values; right after a "
                "synchronization, call full_state('parameters')"
            )
        return {piece.name: piece.tensor.clone() for piece in self.local_state(kind)}


Tensors = Mapping[str, Tensor]


@dataclass(frozen=True)
class Meeting:
    """The meeting for the oracle: the mean, computed in one process."""

    meets_at: Meets

    def begin(self, parameters: Tensors) -> dict[str, Tensor]:
        """Nothing to store."""
        return {}

    def meets(self, step: int) -> bool:
        """Whether step ``step`` is a multiple of ``every``."""
        return self.meets_at.after(step)

    def meet(
        self, ends: Sequence[Tensors], kept: Tensors
    ) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """The mean of ``ends``, summed in the order of ranks."""
        return {name: mean_of([end[name] for end in ends]) for name in ends[0]}, {}


def mean_of(tensors: Sequence[Tensor]) -> Tensor:
    """The mean, summed from the first to the last."""
    total = tensors[0].clone()
    for tensor in tensors[1:]:
        total += tensor
    return total / len(tensors)
