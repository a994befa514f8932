"""``save`` and ``load`` of an adapter for PyTorch, by the option ``checkpoint``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.amp import GradScaler

from shardproof.comm import Mesh
from shardproof.contract import Implementation, OptimizerSpec, Refused
from shardproof.impls.pytorch.checkpoint import folders
from shardproof.impls.pytorch.checkpoint.dcp import AsyncDcp, Dcp
from shardproof.impls.pytorch.checkpoint.full import Full
from shardproof.impls.pytorch.checkpoint.options import Checkpoints
from shardproof.impls.pytorch.checkpoint.state import Training
from shardproof.impls.reference.engine.optimizer import as_data


class Saves(Implementation):
    """An adapter that can save; one with another optimizer or model overrides its parts."""

    module: nn.Module
    mesh: Mesh
    spec: OptimizerSpec
    optimizer: torch.optim.Optimizer
    scaler: GradScaler
    #: Optimizer steps that were made.
    steps_done = 0
    # What saves, one for each format.
    dcp_type: type[Dcp] = Dcp
    dcp_async_type: type[Dcp] = AsyncDcp
    full_type: type[Dcp] = Full
    _saver: Dcp | None = None

    def modules(self) -> Sequence[nn.Module]:
        """The modules of this rank: the wrapped model, or stages."""
        return [self.module]

    def checkpoints(self) -> Checkpoints:
        """The option; :class:`Refused` if there is none."""
        chosen = getattr(getattr(self, "options", None), "checkpoint", None)
        if chosen is None:
            raise Refused(
                f"{type(self).__name__} cannot save checkpoints: it has no option 'checkpoint'"
            )
        assert isinstance(chosen, Checkpoints)
        return chosen

    def row_orders(self) -> Mapping[str, Sequence[int]]:
        """Parameter -> the order in which its true rows are stored."""
        return {}

    def training(self) -> Training:
        """The state to save."""
        mesh = self.mesh
        about = {
            "strategy": self.strategy,
            "mesh": mesh.axes,
            "optimizer": as_data(self.spec, self.steps_done),
        }
        return Training(
            *(self.modules(), self.optimizer, self.scaler),
            rank=mesh.ranks.index(mesh.rank),
            world=mesh.world,
            step=self.steps_done,
            about=about,
            orders=self.row_orders(),
        )

    def save(self, path: Path, extra: Mapping[str, Any]) -> Any:
        """Save as torch documents it, into a folder named after the step."""
        if self._saver is None:
            chosen = self.checkpoints()
            self._saver = getattr(self, f"{chosen.format}_type")(chosen.keep)
            assert self._saver is not None
        return self._saver.save(self.training(), path, extra)

    def load(self, path: Path) -> Mapping[str, Any]:
        """Load a checkpoint of any adapter with these names, in any format."""
        keep, folder = self.checkpoints().keep, folders.find(path)
        is_full = (folder / folders.FULL).is_file()
        reader = (self.full_type if is_full else self.dcp_type)(keep)
        self.steps_done, extra = reader.load(self.training(), folder)
        return extra

    def close(self) -> None:
        """Wait for pending saves."""
        if self._saver is not None:
            self._saver.close()
