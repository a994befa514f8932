"""Systems that save and load in ways of their own, sound and not (driven by test_checkpoint_check).

Most faults are planted in ``impls/mutants/checkpoint/``; here are those that break the contract's
words, or show only where a rank dies.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from shardproof.contract import Capabilities
from shardproof.impls.mutants.checkpoint.saves import CopiesWhenAsked, WritesLate
from shardproof.impls.reference.checkpoint.agreement import State
from shardproof.impls.reference.checkpoint.checkpointing import Checkpointing
from shardproof.impls.reference.checkpoint.sharded import Sharded
from shardproof.impls.reference.ddp import ReferenceDDP
from shardproof.impls.reference.diloco import DiLoCo, ReferenceDiLoCo
from shardproof.impls.reference.local_sgd import LocalSGD, ReferenceLocalSGD
from shardproof.impls.reference.parts.alone import Alone
from shardproof.impls.reference.zero1 import ReferenceZero1


class SavesNothing(ReferenceDDP):
    """Declares no checkpoints."""

    @classmethod
    def capabilities(cls, options: Mapping[str, Any]) -> Capabilities:
        return replace(super().capabilities(options), checkpoints=())


class KeepsItsStart(ReferenceDiLoCo):
    """After a load of parameters the outer optimizer goes on from those it was set up with."""

    class handle_type(DiLoCo):
        def loaded(self) -> None:
            Alone.loaded(self)


class Late(WritesLate, CopiesWhenAsked):
    """Copies what an update changes when the next one asks, and writes nothing before somebody
    waits for it: all that follows the save comes first.
    """


class SavesLate(ReferenceZero1):
    """Sound: what is written late is of the moment of the save."""

    class checkpointing_type(Checkpointing):
        asynchronous_type = Late


class ReturnsNothing(ReferenceDDP):
    """What ``load`` returns is no mapping."""

    def load(self, path: Path) -> Mapping[str, Any]:
        super().load(path)
        return None  # type: ignore[return-value]


class ReturnsAPath(ReferenceDDP):
    """What ``save`` returns cannot be waited for."""

    def save(self, path: Path, extra: Mapping[str, Any]) -> Any:
        super().save(path, extra)
        return path


class RoundsExtra(ReferenceDDP):
    """Numbers of the caller's come back as others."""

    def load(self, path: Path) -> Mapping[str, Any]:
        extra = dict(super().load(path))
        return {**extra, "odd": [1.0 if value == 0.1 else value for value in extra["odd"]]}


class RankOneIsBehind(ReferenceDDP):
    """Rank 1 tells the progress of the checkpoint before the newest."""

    def load(self, path: Path) -> Mapping[str, Any]:
        extra = dict(super().load(path))
        return {**extra, "data": {**extra["data"], "step": extra["data"]["step"] - self.mesh.rank}}


class LosesDecay(ReferenceDDP):
    """Groups lose their weight decay in a load: no piece shows it."""

    def load(self, path: Path) -> Mapping[str, Any]:
        extra = super().load(path)
        for group in self.optimizer.param_groups:
            group["weight_decay"] = 0.0
        return extra


class RemovesFirst(Sharded):
    """Makes room for a checkpoint by removing the last one."""

    def save(self, state: State) -> Path:
        for folder in [*self.root.path.glob("step-*")] if self.rank == 0 else ():
            self.layer.remove_all(folder)
        return super().save(state)


class KeepsNoLastOne(ReferenceZero1):
    """The last good checkpoint goes before the new one is there."""

    class checkpointing_type(Checkpointing):
        sharded_type = RemovesFirst


class MeetsAnew(ReferenceLocalSGD):
    """After a load ranks count the steps to their next meeting from 0."""

    class handle_type(LocalSGD):
        since = 0

        def loaded(self) -> None:
            super().loaded()
            self.since = -1

        def begin_step(self, step: int) -> None:
            super().begin_step(step)
            self.since = step if self.since < 0 else self.since

        def after_update(self) -> None:
            self.step, true = self.step - self.since, self.step
            super().after_update()
            self.step = true
