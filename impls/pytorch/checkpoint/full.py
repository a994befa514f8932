"""Full state dicts: rank 0 writes whole tensors into one file, and every rank reads it.

    save      all ranks     ``get_state_dict(full_state_dict=True)``: gathered tensor by tensor
              rank 0        ``torch.save`` beside the name, rename; the others wait for its word
    load      all ranks     ``torch.load(weights_only=True)``, ``set_state_dict``: each its part

Tensors have the names and the true order of rows of the model as it is built.  The optimizer's
state is not flattened here: torch 2.13 saves that and cannot load it (docs/findings.md).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_state_dict,
)

from shardproof.impls.pytorch.checkpoint import folders
from shardproof.impls.pytorch.checkpoint.dcp import Dcp
from shardproof.impls.pytorch.checkpoint.state import NAMES, Training, about, draws, put_progress


class Full(Dcp):
    """Save the checkpoints of one run; return when one is committed."""

    def save(self, training: Training, root: Path, extra: Mapping[str, Any]) -> Any:
        """Save into ``root``; a collective call."""
        model, optimizer = self.gathered(training)
        rng: list[Any] = [None] * training.world
        dist.all_gather_object(rng, draws(training))
        progress = {
            "step": training.step,
            "extra": json.dumps(extra),
            "about": json.dumps(about(training)),
            "scaler": training.scaler.state_dict(),
        }
        tree = {"model": model, "optimizer": optimizer, "progress": progress, "rng": rng}
        write(training, tree, folders.folder(root, training.step))
        self.retire(training, root)
        return None

    def gathered(self, training: Training) -> tuple[dict[str, Any], dict[str, Any]]:
        """Whole model and optimizer on every rank; on a CPU there is nothing to offload."""
        options = StateDictOptions(full_state_dict=True)
        model, optimizer = get_state_dict(training.model, training.optimizer, options=options)
        groups: Any = optimizer["param_groups"]
        for group in groups:
            group.pop(NAMES, None)
        turn_rows(model, optimizer, training.orders, true_rows)
        return model, optimizer

    def load(self, training: Training, folder: Path) -> tuple[int, Mapping[str, Any]]:
        """Load ``folder``; return the number of steps and the saved extra state."""
        tree = torch.load(folder / folders.FULL, weights_only=True)
        self.put(training, tree["model"], tree["optimizer"])
        progress, rng = tree["progress"], tree["rng"]
        states = rng[training.rank] if len(rng) == training.world else {}
        if states.keys() - {"torch"} != training.generators.keys():
            states = {}
        put_progress(training, progress["scaler"], states)
        return int(progress["step"]), json.loads(progress["extra"])

    def put(self, training: Training, model: dict[str, Any], optimizer: dict[str, Any]) -> None:
        """Copy each rank's part of the whole tensors."""
        turn_rows(model, optimizer, training.orders, kept_rows)
        set_state_dict(
            training.model,
            training.optimizer,
            model_state_dict=model,
            optim_state_dict=optimizer,
            options=StateDictOptions(full_state_dict=True),
        )


def write(training: Training, tree: Mapping[str, Any], folder: Path) -> None:
    """Write one file on rank 0; all ranks return when it exists, or raise its error."""
    failure: list[str | None] = [None]
    if training.rank == 0:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            torch.save(tree, folder / f"{folders.FULL}.part")
            (folder / f"{folders.FULL}.part").rename(folder / folders.FULL)
        except (OSError, RuntimeError) as error:
            failure = [f"rank 0 cannot write into {folder}: {error}"]
    dist.broadcast_object_list(failure, src=0)
    if failure[0] is not None:
        raise RuntimeError(failure[0])


def true_rows(tensor: Tensor, order: Sequence[int]) -> Tensor:
    """``tensor`` with its rows, stored in ``order``, in their true places."""
    turned = torch.empty_like(tensor)
    turned[list(order)] = tensor
    return turned


def kept_rows(tensor: Tensor, order: Sequence[int]) -> Tensor:
    """The inverse of :func:`true_rows`."""
    return tensor[list(order)]


def turn_rows(
    model: dict[str, Any],
    optimizer: Mapping[str, Any],
    orders: Mapping[str, Sequence[int]],
    turn: Callable[[Tensor, Sequence[int]], Tensor],
) -> None:
    """Apply ``turn`` to the rows of the parameters in ``orders`` and of their slots."""
    for name, order in orders.items():
        model[name] = turn(model[name], order)
        slots = optimizer["state"].get(name, {})
        slots |= {slot: turn(value, order) for slot, value in slots.items() if value.dim()}
