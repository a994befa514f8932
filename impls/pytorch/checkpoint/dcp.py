"""``torch.distributed.checkpoint``: every rank writes its own state.

    save      all ranks     gather plans -> rank 0: leave out copies -> scatter -> write, fsync
              rank 0        gather results -> ``.metadata``, written, synced, renamed
    load      all ranks     ``.metadata`` -> the parts that overlap what this rank holds, in place
    async     training      copy of the state in memory
              a thread      the save above, over a group of its own: on the training's own group its
                            collectives and the training's would meet each other's

torch writes to a folder that is empty or new, so each step has one; older ones are removed here, as
torch leaves to its users.  Of tensors that several ranks have whole one rank's is written.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import DefaultLoadPlanner, FileSystemReader, LoadPlan

from shardproof.comm import BACKGROUND
from shardproof.impls.pytorch.checkpoint import folders
from shardproof.impls.pytorch.checkpoint.state import State, Training


class InTurn(DefaultLoadPlanner):
    """torch's planner; ranks that are threads run it one after another.

    To look for keys of torch 2.3 it sets a global of the process that says how keys are made.
    """

    lock = threading.Lock()

    def set_up_planner(self, *given: Any, **named: Any) -> None:
        """Create keys."""
        with self.lock:
            super().set_up_planner(*given, **named)

    def create_local_plan(self) -> LoadPlan:
        """Look up keys."""
        with self.lock:
            return super().create_local_plan()


class Dcp:
    """Save the checkpoints of one run; return when one is committed."""

    state_type: type[State] = State

    def __init__(self, keep: int) -> None:
        self.keep = keep

    def save(self, training: Training, root: Path, extra: Mapping[str, Any]) -> Any:
        """Save into ``root``; a collective call."""
        state = self.state_type(training, extra)
        dcp.save(state.tree, checkpoint_id=folders.folder(root, training.step))
        self.retire(training, root)
        return None

    def load(self, training: Training, folder: Path) -> tuple[int, Mapping[str, Any]]:
        """Load ``folder``; return the number of steps and the saved extra state. Collective."""
        state = self.state_type(training, {})
        state.keep_generators(FileSystemReader(folder).read_metadata().state_dict_metadata)
        dcp.load(state.tree, checkpoint_id=folder, planner=InTurn())
        extra = state.put()
        return int(state.tree["progress"]["step"]), extra

    def retire(self, training: Training, root: Path) -> None:
        """Remove old checkpoints on rank 0."""
        if training.rank == 0:
            folders.retire(root, self.keep)

    def close(self) -> None:
        """Nothing is pending."""


class AsyncDcp(Dcp):
    """The same in the background, one save at a time."""

    group: Any = None
    under_way: Pending | None = None

    def save(self, training: Training, root: Path, extra: Mapping[str, Any]) -> Any:
        """Wait for the previous save, copy the state and start to save. Collective."""
        self.close()
        if self.group is None:
            self.group = dist.new_group(backend="gloo", group_desc=BACKGROUND)
        path = folders.folder(root, training.step)
        state = self.state_type(training, extra)
        future = dcp.async_save(state.tree, checkpoint_id=path, process_group=self.group)
        self.under_way = Pending(self, training, root, future)
        return self.under_way

    def close(self) -> None:
        """Wait for the pending save."""
        pending, self.under_way = self.under_way, None
        if pending is not None:
            pending.wait()


class Pending:
    """A pending save."""

    def __init__(self, saver: AsyncDcp, training: Training, root: Path, future: Any) -> None:
        self.saver, self.training, self.root = saver, training, root
        self.future: Future[Any] = getattr(future, "upload_completion", future)

    def wait(self) -> None:
        """Return when it is committed on all ranks; a collective call."""
        self.future.result()
        self.saver.retire(self.training, self.root)
