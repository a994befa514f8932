"""Faults of saving: state of another rank, another step or an unused object is written, or the save
changes the run.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from shardproof.case import CheckpointPlan, WorkloadSpec
from shardproof.contract import Piece
from shardproof.impls.mutants import declare
from shardproof.impls.mutants.triggers import ADAMW, gpt
from shardproof.impls.reference.checkpoint.agreement import Agreed, State
from shardproof.impls.reference.checkpoint.asynchronous import AsynchronousSharded
from shardproof.impls.reference.checkpoint.contents import Contents
from shardproof.impls.reference.checkpoint.data_file import Held
from shardproof.impls.reference.checkpoint.files import FileLayer
from shardproof.impls.reference.checkpoint.full import Full
from shardproof.impls.reference.checkpoint.manifest import MANIFEST, About, Listed
from shardproof.impls.reference.checkpoint.saver import Saver
from shardproof.impls.reference.checkpoint.sharded import Sharded
from shardproof.impls.reference.ddp import ReferenceDDP
from shardproof.impls.reference.zero1 import ReferenceZero1

mutant = declare.family(
    ReferenceDDP,
    ReferenceZero1,
    killed_by=("checkpoint",),
    checkpoint=CheckpointPlan(save_at=2),
    optimizer=ADAMW,
    steps=3,
)
FULL: Mapping[str, Any] = {"checkpoint": {"format": "full"}}
BEHIND: Mapping[str, Any] = {"checkpoint": {"format": "asynchronous"}}
KEEPS_TWO: Mapping[str, Any] = {"checkpoint": {"keep": 2}}
#: Three saves, of which two stay.
OFTEN = CheckpointPlan(save_at=3, saves=3)
SHARDED: Mapping[str, int] = {"shard": 2}


@mutant("saves_fresh_optimizer", says="optimizer state was not loaded: there is none", zoo=("K16",))
class FreshOptimizer(ReferenceDDP):
    """The saved state is that of an optimizer created for the save."""

    def save(self, path: Path, extra: Mapping[str, Any]) -> Saver:
        trained, self.optimizer = self.optimizer, self.make_optimizer()
        try:
            return super().save(path, extra)
        finally:
            self.optimizer = trained


@mutant(
    "saves_rng_of_rank_0",
    says=r"the RNG of rank 1 \(torch\) is that of rank 0",
    zoo=("K04",),
    backend="gloo",
    mesh=SHARDED,
    parent=ReferenceZero1,
)
class RngOfRank0(Sharded):
    """Generators are treated as replicas, so rank 0's is saved for all ranks."""

    def save(self, state: State) -> Path:
        first = self.together.all(lambda: [piece.tensor for piece in state.pieces["rng"]])[0]
        own = zip(state.pieces["rng"], first, strict=True)
        rng = [replace(piece, tensor=tensor) for piece, tensor in own]
        return super().save(replace(state, pieces={**state.pieces, "rng": rng}))


class LateDisk(FileLayer):
    """A slow file layer that creates no file until training waits for it."""

    def __init__(self) -> None:
        self.awaited = threading.Event()
        self.awaited.set()

    def create(self, path: Path) -> int:
        self.awaited.wait()
        return super().create(path)


class WritesLate(AsynchronousSharded):
    """A correct saver on a disk that is always slower than training."""

    layer_type = LateDisk

    def room(self, tensors: Sequence[Held]) -> list[Held]:
        self.layer.awaited.clear()  # type: ignore[attr-defined]
        return super().room(tensors)

    def wait(self) -> None:
        self.layer.awaited.set()  # type: ignore[attr-defined]
        super().wait()


@mutant(
    "saves_live_tensors",
    says="parameters were not loaded: they are of step 4, and the checkpoint is of step 2",
    zoo=("K10",),
    options=BEHIND,
    steps=4,
)
class LiveTensors(WritesLate):
    """The background writer gets the live tensors instead of copies."""

    def room(self, tensors: Sequence[Held]) -> list[Held]:
        super().room(tensors)
        return list(tensors)

    def fill(self, *_: Any, **__: Any) -> None:
        pass  # not onto themselves: autograd would see a change


@mutant("saves_by_drawing", says=r"saving changes .*the RNG \(torch\)", backend="gloo")
class Draws(Sharded):
    """The save draws a name from the generator that training uses."""

    def save(self, state: State) -> Path:
        torch.randint(1 << 30, ())
        return super().save(state)


@mutant("saves_and_zeroes", says="saving changes the run that saves", zoo=("K20",), options=FULL)
class ZeroesWhatIsWritten(Full):
    """Written tensors are replaced by placeholders in the system itself."""

    def save(self, state: State) -> Path:
        folder = super().save(state)
        for piece in state.pieces["parameters"]:
            piece.tensor.zero_()
        return folder


@mutant(
    "saves_and_keeps_one_more",
    says="3 checkpoints are left after 3 saves, expected 2",
    checkpoint=OFTEN,
    options=KEEPS_TWO,
    steps=4,
)
class KeepsOneMore(Sharded):
    """The limit on old checkpoints does not count the new one."""

    def commit(self, agreed: Agreed, about: About, listed: Sequence[Listed | None]) -> None:
        self.keep += 1
        super().commit(agreed, about, listed)
        self.keep -= 1


@mutant(
    "saves_and_keeps_two",
    says="2 checkpoints are left after 4 saves, expected 3",
    checkpoint=CheckpointPlan(save_at=4, saves=4),
    options={"checkpoint": {"keep": 3}},
    steps=5,
)
class KeepsTwo(Sharded):
    """Two checkpoints are kept, whatever the option ``keep`` says."""

    def commit(self, agreed: Agreed, about: About, listed: Sequence[Listed | None]) -> None:
        asked, self.keep = self.keep, 2
        super().commit(agreed, about, listed)
        self.keep = asked


@mutant(
    "saves_and_keeps_the_oldest",
    says="progress was not loaded: rank 0 would resume from step 1, the newest .* is of step 3",
    checkpoint=OFTEN,
    steps=4,
)
class KeepsTheOldest(Sharded):
    """The newest checkpoint is removed once an older one exists."""

    def commit(self, agreed: Agreed, about: About, listed: Sequence[Listed | None]) -> None:
        super().commit(agreed, about, listed)
        if len([*self.root.path.glob(f"*/{MANIFEST}")]) > 1:
            self.layer.remove_all(agreed.folder, first=MANIFEST)


@mutant(
    "saves_moments_of_rank_0",
    says="optimizer state was not loaded: .* elements of .* differ",
    zoo=("K07",),
    mesh=SHARDED,
    parent=ReferenceZero1,
)
class OnlyRank0sMoments(Sharded):
    """Ranks other than 0 write zeros for the optimizer state that only they hold."""

    def save(self, state: State) -> Path:
        if self.rank:
            own = state.pieces["optimizer"]
            zeros = [replace(piece, tensor=_zeros(piece)) for piece in own]
            state = replace(state, pieces={**state.pieces, "optimizer": zeros})
        return super().save(state)


def _zeros(piece: Piece) -> torch.Tensor:
    return torch.zeros_like(piece.tensor) if piece.tensor.dim() else piece.tensor


def _changed(state: State, kind: str, pieces: Sequence[Piece]) -> State:
    return replace(state, pieces={**state.pieces, kind: pieces})


@mutant("saves_no_counters", says="step counters were not loaded: they count from 0, not from 2")
class NoCounters(Contents):
    """Adam's counters are saved with their values from before the first step."""

    def state(self, extra: Mapping[str, Any]) -> State:
        state = super().state(extra)
        slots = [
            replace(one, tensor=torch.zeros_like(one.tensor)) if one.name.endswith(".step") else one
            for one in state.pieces["optimizer"]
        ]
        return _changed(state, "optimizer", slots)


@mutant("saves_rounded", says="parameters were not loaded: .* elements of .* differ")
class Rounded(Contents):
    """Parameters are rounded to float32 on saving."""

    def state(self, extra: Mapping[str, Any]) -> State:
        state = super().state(extra)
        rounded = [
            replace(one, tensor=one.tensor.float().to(one.tensor.dtype))
            for one in state.pieces["parameters"]
        ]
        return _changed(state, "parameters", rounded)


@mutant(
    "saves_the_next_step",
    says="progress was not loaded: rank 0 would resume from step 3, the newest .* is of step 2",
    zoo=("K11",),
)
class TheNextStep(ReferenceDDP):
    """The step number is read when the save ends, after training has moved on."""

    def save(self, path: Path, extra: Mapping[str, Any]) -> Saver:
        data = extra["data"]
        return super().save(path, {**extra, "data": {**data, "step": data["step"] + 1}})


@mutant(
    "saves_a_part_of_extra",
    says="the extra values of save were not loaded on rank 0: 'odd' is None",
)
class APartOfExtra(ReferenceDDP):
    """Only progress is saved of the extra state that the caller passes."""

    def save(self, path: Path, extra: Mapping[str, Any]) -> Saver:
        return super().save(path, {"data": extra["data"]})


@mutant(
    "saves_first_copies_again",
    says="parameters were not loaded: they are of step 1, and the checkpoint is of step 3",
    options=BEHIND,
    checkpoint=OFTEN,
    steps=4,
)
class FirstCopiesAgain(AsynchronousSharded):
    """The buffer of the previous copy is reused without being filled."""

    first = True

    def fill(self, copies: Sequence[Held], tensors: Sequence[Held], later: bool) -> None:
        if self.first:
            super().fill(copies, tensors, later)
            self.first = not later


class CopiesWhenAsked(AsynchronousSharded):
    """A correct saver that copies when asked to, before an update or when the save is awaited."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.asked = threading.Event()

    def fill(self, copies: Sequence[Held], tensors: Sequence[Held], later: bool) -> None:
        if later:
            self.asked.wait()
        super().fill(copies, tensors, later)

    def before_update(self) -> None:
        self.asked.set()
        super().before_update()

    def wait(self) -> None:
        self.asked.set()
        super().wait()
        self.asked.clear()


@mutant(
    "saves_torn_by_an_update",
    says="parameters were not loaded: they are of step 4, and the checkpoint is of step 2",
    options=BEHIND,
    steps=4,
)
class TornByAnUpdate(CopiesWhenAsked):
    """An update does not wait until its tensors have been copied."""

    def before_update(self) -> None:
        pass


@mutant(
    "saves_once",
    says="progress was not loaded: rank 0 would resume from step 1, the newest .* is of step 3",
    checkpoint=OFTEN,
    steps=4,
)
class Once(Sharded):
    """A save into a folder that already has a checkpoint does nothing."""

    saved: Path | None = None

    def save(self, state: State) -> Path:
        if self.saved is None:
            self.saved = super().save(state)
        return self.saved


@mutant(
    "saves_and_keeps_one",
    says="1 checkpoints are left after 3 saves, expected 2",
    checkpoint=OFTEN,
    options=KEEPS_TWO,
    steps=4,
)
class KeepsOne(Sharded):
    """The new checkpoint is counted twice, so the previous one is removed."""

    def commit(self, agreed: Agreed, about: About, listed: Sequence[Listed | None]) -> None:
        self.keep -= 1
        super().commit(agreed, about, listed)
        self.keep += 1


@mutant(
    "saves_and_clears_moments",
    says="saving changes the run that saves",
)
class ClearsMoments(ReferenceDDP):
    """Moments are moved into the checkpoint and not taken back."""

    def save(self, path: Path, extra: Mapping[str, Any]) -> Saver:
        saver = super().save(path, extra)
        for state in self.optimizer.state.values():
            state["exp_avg"].zero_()
        return saver


@mutant(
    "saves_in_evaluation",
    says="saving changes the run that saves",
    workload=WorkloadSpec("digits_cnn", global_batch=12, params={"layers": 1}),
)
class InEvaluation(ReferenceDDP):
    """The model is set to evaluation mode for the save and stays there."""

    def save(self, path: Path, extra: Mapping[str, Any]) -> Saver:
        self.module.eval()
        self.module.train = lambda mode=True: self.module  # type: ignore[method-assign]
        return super().save(path, extra)


@mutant(
    "saves_buffers_of_rank_0",
    says="buffers were not loaded on replica 1 only: they are those of replica 0",
    parent=ReferenceZero1,
    mesh=SHARDED,
    workload=WorkloadSpec("digits_cnn", global_batch=12, params={"layers": 1}),
)
class BuffersOfRank0(Sharded):
    """Buffers are treated as replicas, so rank 0's are saved for all ranks."""

    def save(self, state: State) -> Path:
        first = self.together.all(lambda: [one.tensor.clone() for one in state.pieces["buffers"]])
        own = zip(state.pieces["buffers"], first[0], strict=True)
        return super().save(_changed(state, "buffers", [replace(p, tensor=t) for p, t in own]))


@mutant(
    "saves_masters_rounded",
    says="masters were not loaded",
    parent=ReferenceZero1,
    mesh=SHARDED,
    lane="working_precision",
    dtype="float32",
    precision={"parameters": "bfloat16"},
)
class MastersRounded(Contents):
    """Masters are saved rounded to the working dtype."""

    def state(self, extra: Mapping[str, Any]) -> State:
        state = super().state(extra)
        slots = [
            replace(one, tensor=one.tensor.bfloat16().to(one.tensor.dtype))
            if one.name.endswith(".master")
            else one
            for one in state.pieces["optimizer"]
        ]
        return _changed(state, "optimizer", slots)


#: Who loaded saves, too.
AGAIN = CheckpointPlan(save_at=1, again_at=2)


@mutant(
    "saves_progress_of_the_load",
    says="of what was saved after a load, progress was not loaded: rank 0 would resume "
    "from step 1, the newest checkpoint is of step 2",
    checkpoint=AGAIN,
)
class ProgressOfTheLoad(ReferenceDDP):
    """Every later save writes the progress returned by the load instead of the caller's."""

    returned: Mapping[str, Any] = {}

    def load(self, path: Path) -> Mapping[str, Any]:
        self.returned = super().load(path)
        return self.returned

    def save(self, path: Path, extra: Mapping[str, Any]) -> Saver:
        return super().save(path, {**extra, **self.returned})


@mutant(
    "saves_counters_since_the_load",
    says="of what was saved after a load, step counters were not loaded: 1 of 1 elements of",
    checkpoint=AGAIN,
)
class CountersSinceTheLoad(Contents):
    """The saved step count starts at the load."""

    def state(self, extra: Mapping[str, Any]) -> State:
        state, loaded = super().state(extra), self.system.loaded
        before = loaded.about.step if loaded is not None else 0
        slots = [
            replace(one, tensor=one.tensor - before) if one.name.endswith(".step") else one
            for one in state.pieces["optimizer"]
        ]
        return _changed(state, "optimizer", slots)


@mutant(
    "saves_first_state_right_after_a_load",
    says="of what was saved after a load, optimizer state was not loaded",
    checkpoint=CheckpointPlan(save_at=2, again_at=2),
)
class FirstStateRightAfterALoad(Contents):
    """A run that has made no step since its load saves the initial state."""

    def state(self, extra: Mapping[str, Any]) -> State:
        state, loaded = super().state(extra), self.system.loaded
        if loaded is None or self.system.steps_done > loaded.about.step:
            return state
        slots = [
            one if one.name.endswith((".step", ".master")) else replace(one, tensor=one.tensor * 0)
            for one in state.pieces["optimizer"]
        ]
        return _changed(state, "optimizer", slots)


@mutant(
    "saves_state_of_the_next_parameter",
    says=r"optimizer state was not loaded",
    zoo=("K23",),
    workload=gpt("frozen"),
)
class StateOfTheNextParameter(Contents):
    """Optimizer state is numbered over all parameters, although frozen ones have none."""

    def state(self, extra: Mapping[str, Any]) -> State:
        state = super().state(extra)
        by_shape: dict[tuple[str, tuple[int, ...]], list[int]] = {}
        slots = list(state.pieces["optimizer"])
        for number, one in enumerate(slots):
            key = (one.name.rpartition(".")[2], tuple(one.tensor.shape))
            by_shape.setdefault(key, []).append(number)
        for numbers in by_shape.values():
            tensors = [slots[number].tensor for number in numbers]
            for number, tensor in zip(numbers, [*tensors[1:], tensors[0]], strict=True):
                slots[number] = replace(slots[number], tensor=tensor)
        return _changed(state, "optimizer", slots)


class _DueAtUpdate(AsynchronousSharded):
    """Set ``is_due`` right before the update after a save, or when the save is awaited."""

    def save(self, state: State) -> Path:
        self.is_due = threading.Event()
        return super().save(state)

    def before_update(self) -> None:
        if self.under_way is not None:
            self.is_due.set()
        super().before_update()

    def wait(self) -> None:
        if self.under_way is not None:
            self.is_due.set()
        super().wait()


@mutant(
    "saves_live_buffers",
    says="buffer",
    zoo=("K10",),
    options=BEHIND,
    workload=WorkloadSpec("digits_cnn", global_batch=12),
    steps=4,
)
class LiveBuffers(_DueAtUpdate):
    """Buffers are copied right before the update, after the forward has already changed them."""

    @torch.no_grad()
    def fill(self, copies: Sequence[Held], tensors: Sequence[Held], later: bool) -> None:
        super().fill(copies, tensors, later)
        if later:
            self.is_due.wait()
            for mine, one in zip(copies, tensors, strict=True):
                if one.kind == "buffers":
                    mine.tensor.copy_(one.tensor)
