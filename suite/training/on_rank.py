"""The training of one rank: set-up, steps, progress, checkpoints, and the results."""

from __future__ import annotations

import copy
import itertools
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from shardproof import registry
from shardproof.case import data_shares
from shardproof.comm import Comm
from shardproof.contract import KINDS, Implementation, OptimizerSpec, Piece, Point, StepResult
from shardproof.ledgers import program_order
from shardproof.ledgers.memory import installed
from shardproof.ledgers.memory.recorder import MemoryLedger
from shardproof.ledgers.memory.summary import summary
from shardproof.training.model import UserModel
from shardproof.training.source import Source
from shardproof.training.world import World, is_process, require_mesh

#: Steps under the memory ledger: from the second one on the optimizer's state is there.
MEASURED_STEPS = 2
#: Class of memory -> bytes.
Bytes = dict[str, int]


@dataclass(frozen=True)
class Checkpointing:
    """``folder`` of the checkpoints of one run; one ``every`` so many steps, and one at the end.

    ``option``: the implementation's option ``checkpoint``.
    """

    folder: Path
    every: int = 0
    resume: bool = True
    option: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Plan:
    """All that a rank must know to train; the same on every rank."""

    model: UserModel
    source: Source
    optimizer: OptimizerSpec
    implementation: str
    axes: Mapping[str, int]
    options: Mapping[str, Any] = field(default_factory=dict)
    accumulate: int = 1
    checkpointing: Checkpointing | None = None
    measure: bool = True
    progress: int = 0


@dataclass
class Share:
    """The results of one rank.  ``of``: the share of the data that it trained on (``None``: its
    role gets no data); ``losses`` are those of this share, ``state`` whole parameters and buffers
    on rank 0.
    """

    of: int | None
    first: int
    losses: list[float | None]
    norms: list[float]
    seconds: float
    timed: int
    memory: dict[str, Bytes]
    checkpoint: Path | None = None
    state: dict[str, Tensor] = field(default_factory=dict)


class RankTraining:
    """The training of ``plan`` on the calling rank of ``world``."""

    def __init__(self, plan: Plan, world: World) -> None:
        require_mesh(plan.axes, world.size)
        self.plan, self.world = plan, world
        self.mesh = world.new_mesh(plan.axes)
        self.system: Implementation = registry.load(plan.implementation)()
        role, ranks = self.system.role, self.mesh.ranks
        workers = [r for r in ranks if role(r, world.size, plan.options) == "worker"]
        shares = data_shares(plan.axes, ranks, workers)
        self.share = shares.get(world.rank), max(shares.values()) + 1
        self.losses: list[Tensor | None] = []
        self.norms: list[Tensor] = []
        self.saved: Path | None = None
        self._saving: Any = None

    def run(self, steps: int) -> Share:
        """Train until ``steps`` steps are done, those of a checkpoint included."""
        plan, began, timed = self.plan, 0.0, 0
        memory = Memory(plan.measure)
        try:
            with memory:
                self.set_up(memory)
                first = self.load()
                if first > steps:
                    raise ValueError(
                        f"steps = {steps}, but the checkpoint in {self.saved} was saved after "
                        f"{first} steps: steps is the total over all runs, so give more than "
                        f"{first}, or name a new folder"
                    )
                dtype = next(iter(plan.model.model.parameters())).dtype
                device = self.world.device
                batches = plan.source.batches(first, self.share, plan.accumulate, device, dtype)
                for step in range(first, steps):
                    if step == first + MEASURED_STEPS:
                        memory.close()
                    if not memory.is_open and not timed:
                        self.finish_device()
                        began = time.perf_counter()
                    batch = next(batches, None)
                    if batch is None:
                        raise ValueError(
                            f"the data ended after {step} of {steps} steps: give a DataLoader or a "
                            "list (both are read again from the start), or reduce steps"
                        )
                    with memory.step(step):
                        result = self.system.step(batch, partial(memory.observe, self.system))
                    timed += not memory.is_open
                    self.keep(result)
                    self.after(step + 1, steps)
                self.finish_device()
                seconds = time.perf_counter() - began
            return self.result(first, seconds if timed else 0.0, timed, memory)
        except BaseException:
            self.system.abort()
            raise

    def set_up(self, memory: Memory) -> None:
        """Build the model and put it under the strategy; rank 0 has the values."""
        plan = self.plan
        rule = self.system.capabilities(plan.options).initial_state
        state = plan.model.state if rule == "everywhere" or self.world.rank == 0 else None
        self.system.setup(
            memory.watched(plan.model), state, plan.optimizer, self.mesh, plan.options
        )
        del state
        if is_process():  # a thread shares the model with the others
            plan.model.release()

    def load(self) -> int:
        """Resume from the newest checkpoint, if there is one; the number of steps that it has."""
        saves = self.plan.checkpointing
        if saves is None:
            return 0
        # All ranks must load or none, and a folder may become visible later on some of them.
        [found] = self.world.comm.agree([int(holds_checkpoint(saves.folder))], "first")
        if not found:
            return 0
        if not saves.resume:
            raise ValueError(
                f"{saves.folder} holds checkpoints of another run, but resume is False: name a new "
                "folder, or set resume=True"
            )
        data = self.system.load(saves.folder).get("data", {})
        if "step" not in data:
            raise ValueError(
                f"{saves.folder} holds a checkpoint that Training did not save, so the data "
                "position is unknown: name a new folder, or load this checkpoint by shardproof.wrap"
            )
        step: int = data["step"]
        self.saved = saves.folder
        return step

    def keep(self, result: StepResult) -> None:
        """Remember the numbers of a step without waiting for the device."""
        self.losses.append(None if result.loss is None else result.loss.detach())
        if result.norm is not None:
            self.norms.append(result.norm.detach())

    def after(self, done: int, steps: int) -> None:
        """Save and say how far training is, where it is time for either."""
        saves = self.plan.checkpointing
        if saves and (done == steps or (saves.every and done % saves.every == 0)):
            self.finish_save()
            self._saving = self.system.save(saves.folder, {"data": {"step": done}})
            self.saved = saves.folder
        every = self.plan.progress
        if every and (done % every == 0 or done == steps):
            last = None if self.losses[-1] is None else float(self.losses[-1])
            told = self.world.comm.all_gather_object((self.share[0], last))
            if self.world.rank == 0:
                loss = merged([(of, [value]) for of, value in told])[0]
                print(f"step {done}/{steps}  loss {loss:.6g}", file=sys.stderr, flush=True)

    def finish_save(self) -> None:
        """Wait until the save under way is committed."""
        if self._saving is not None:
            self._saving.wait()
            self._saving = None

    def finish_device(self) -> None:
        """Wait until the device has done its work."""
        if self.world.device != "cpu":
            torch.get_device_module(self.world.device).synchronize()

    def result(self, first: int, seconds: float, timed: int, memory: Memory) -> Share:
        """Give back numbers, and on rank 0 the trained model."""
        self.finish_save()
        self.system.drain()
        state = whole(self.system, self.world.comm)
        self.system.close()
        losses = [None if loss is None else float(loss) for loss in self.losses]
        norms, root = [float(norm) for norm in self.norms], self.world.rank == 0
        numbers = self.share[0], first, losses, norms, seconds, timed, memory.stats
        return Share(*numbers, self.saved, state if root else {})


@torch.no_grad()
def whole(system: Implementation, comm: Comm) -> dict[str, Tensor]:
    """Whole parameters and buffers on the CPU, from the first copy of each piece; a collective."""
    pieces = [*system.local_state("parameters"), *system.local_state("buffers")]
    own = [
        replace(p, tensor=p.tensor.detach().cpu().clone(), source=None)
        for p in pieces
        if not p.replica
    ]
    state: dict[str, Tensor] = {}
    for piece in itertools.chain.from_iterable(comm.all_gather_object(own)):
        empty = torch.zeros(piece.global_shape, dtype=piece.tensor.dtype)
        target = state.setdefault(piece.name, empty)
        if piece.flat_range is not None:
            target.view(-1)[slice(*piece.flat_range)] = piece.tensor.view(-1)
        else:
            target[tuple(slice(*bounds) for bounds in piece.slices or ())] = piece.tensor
    return state


def holds_checkpoint(folder: Path) -> bool:
    """Whether there is anything to load."""
    from shardproof.errors import SelectionError
    from shardproof.registry import checkpoints

    if not folder.is_dir() or not any(folder.iterdir()):
        return False
    try:
        with checkpoints.opened(folder):
            return True
    except SelectionError as error:
        if "no checkpoint" in str(error):
            return False
        raise


def merged(shares: Sequence[tuple[int | None, Sequence[float | None]]]) -> list[float]:
    """The losses of the global batch: of each share, what the first rank that knows it says."""
    of_share: dict[int, Sequence[float | None]] = {}
    for of, losses in shares:
        if of is not None and (of not in of_share or None in of_share[of]):
            of_share[of] = losses
    return [
        sum(loss or 0.0 for loss in of_step) for of_step in zip(*of_share.values(), strict=True)
    ]


class Memory:
    """The memory ledger of the first steps: what each class of tensors takes on this rank."""

    def __init__(self, wanted: bool) -> None:
        self._wanted, self.is_open = wanted, False
        self._log = program_order.RankLog()
        self._ledger = MemoryLedger(lambda: self._log.phase)
        self._built: list[torch.nn.Module] = []
        self.stats: dict[str, Bytes] = {}

    def __enter__(self) -> Memory:
        if self._wanted:
            self._is_process = is_process()
            program_order.install(self._log, process=self._is_process)
            self._ledger.__enter__()
            self.is_open = True
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the ledger and keep its figures."""
        if not self.is_open:
            return
        self.is_open = False
        self._built.clear()  # a rank may keep only a part of what it built
        self._ledger.__exit__(None, None, None)
        program_order.install(None, process=self._is_process)
        self.stats = {"peak": {}, "current": {}}
        words = {"peak": "peak", "mark": "current"}
        for row in summary(self._ledger.log):
            if row.step == self._ledger.step and row.moment in words:
                bytes_of = self.stats[words[row.moment]]
                bytes_of[row.kind] = max(bytes_of.get(row.kind, 0), row.bytes)

    def watched(self, model: UserModel) -> UserModel:
        """``model`` as a build whose modules the ledger watches."""
        if self.is_open:
            model = copy.copy(model)
            model.on_build = partial(self.watch, model.units)
        return model

    def watch(self, units: Sequence[str], module: torch.nn.Module) -> None:
        """Follow the forwards and backwards of ``module`` and of its ``units``."""
        program_order.watch(module, units)
        installed.watch(module)
        self._built.append(module)

    def step(self, number: int) -> AbstractContextManager[object]:
        """Around an optimizer step."""
        self._ledger.step = number
        return self._log.step(number) if self.is_open else nullcontext()

    def observe(self, system: Implementation, point: Point) -> None:
        """Look at the tensors of ``system`` at a point of a step."""
        if not self.is_open:
            return
        with self._log.observe(point), self._ledger.unseen():
            pieces: dict[str, list[Piece]] = {k: system.local_state(k) for k in KINDS}
            self._ledger.classify(pieces, self._built)
            if point == "after_update":
                self._ledger.mark(point)
