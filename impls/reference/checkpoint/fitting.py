"""Whether this system may load a checkpoint at all; checked before any tensor is read."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardproof.impls.reference.checkpoint.errors import CheckpointError
from shardproof.impls.reference.checkpoint.reading.checkpoint import Checkpoint

if TYPE_CHECKING:
    from shardproof.impls.reference.engine.engine import Engine


def require_fitting(system: Engine, checkpoint: Checkpoint) -> None:
    """:raises CheckpointError: another optimizer, an excluded mesh, or ranks that diverged."""
    _require_same_optimizer(system, checkpoint)
    if not system.checkpoints.reshape:
        _require_same_mesh(system, checkpoint)
    _require_same_ranks(system, checkpoint)


def _require_same_optimizer(system: Engine, checkpoint: Checkpoint) -> None:
    # Moments of another optimizer would be taken for this one's.
    saved, own = checkpoint.manifest.about.optimizer, system.spec.name
    if saved is not None and saved.get("name") != own:
        what = (
            f"the checkpoint was saved with optimizer {saved.get('name')!r:.40}, but this "
            f"system trains with {own!r}"
        )
        raise CheckpointError(checkpoint.folder, what, "use the same optimizer as the saved run")


def _require_same_mesh(system: Engine, checkpoint: Checkpoint) -> None:
    about = checkpoint.manifest.about
    saved, own = (about.strategy, dict(about.mesh)), (system.strategy, dict(system.mesh.axes))
    if saved != own:
        what = (
            f"the checkpoint was saved by {saved[0]} on {saved[1]}, but this system is {own[0]} "
            f"on {own[1]}"
        )
        remedy = (
            "use the strategy and mesh of the checkpoint, or set option checkpoint: {reshape: true}"
        )
        raise CheckpointError(checkpoint.folder, what, remedy)


def _require_same_ranks(system: Engine, checkpoint: Checkpoint) -> None:
    # Between two meetings there are as many parameters as ranks: none of them are all ranks'.
    about = checkpoint.manifest.about
    is_same = about.strategy == system.strategy and about.has_ranks_of(system.mesh.axes)
    if system.handle.apart and is_same:
        return
    names = [(kind, name) for kind, name in checkpoint.copies if kind == "parameters"]
    copies = max((len(checkpoint.copies[name]) for name in names), default=1)
    if copies > 1:
        what = (
            f"the checkpoint was saved between synchronizations, so its {copies} ranks have "
            f"{copies} different models"
        )
        remedy = f"load with the same strategy on {copies} ranks, or save after a synchronization"
        raise CheckpointError(checkpoint.folder, what, remedy)
