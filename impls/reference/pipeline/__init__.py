"""Pipeline parallelism: the model is cut into stages, and micro-batches flow through them.

Problem.  A model too large for one device is cut across its depth.  With one batch only one stage
at a time would compute, so the batch is cut as well, and the stages work on different micro-batches
at the same time.  The order of forwards and backwards, the schedule, decides everything else: how
long ranks are idle (the *bubble*), and how many micro-batches a stage holds at once.

    what                                where
    parameters, gradients, optimizer    the rank of their stage, whole
      state, buffers
    tensors tied over stages            every rank that uses them, copies
    activations                         between F and backward, on the rank of the stage
    inputs, targets                     all ranks have them; the first and the last stage use them

    step     windows       one schedule each (schedules.py, or the user's own): each rank goes
                           through its list of F, B and W, messages between (executor.py)
             finish        sums of tied tensors are exchanged (stages.py)
             clip          the norm is a sum over stages, tied tensors once
             update        every rank its own stages

The second page is ``executor.py``, the loop that runs any schedule; then ``stages.py`` (where the
model is cut, what stages share), ``schedules.py`` (the orders themselves), and, for zero bubble,
``split_backward.py``.  ``messages.py`` and ``schedule_option.py`` can wait.

Cost: floating-point bytes per step: for each micro-batch and boundary between ranks one activation
and one gradient, b s h elements each (GPipe, arXiv 1811.06965, section 2.3; Narayanan et al., arXiv
2104.04473, section 2.2); for a tensor tied over ranks one gradient from each of them to each other.
With clipping one float64 is all-reduced.  Memory of state: that of the rank's stages; of
activations: schedules.py.
Numbers: every stage adds up its micro-batches in ascending order, as one process does: equal bits.
A tied tensor's gradient is a sum of one sum for each rank.
Left out: asynchronous schedules with stale weights; mixed precision and offload; recomputation
where B and W come apart (W would need once more what was thrown away).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from shardproof.comm import Mesh
from shardproof.contract import Batch, Build, Capabilities, Kind, OptimizerSpec, Refused
from shardproof.impls.reference.engine.choices import FORMATS, Saved, declared
from shardproof.impls.reference.engine.engine import Engine
from shardproof.impls.reference.engine.handle import Handle, Local
from shardproof.impls.reference.engine.options import at_least, parse_options
from shardproof.impls.reference.engine.recompute import Group, recompute_units
from shardproof.impls.reference.engine.state import broadcast_tensors, named_state
from shardproof.impls.reference.pipeline.executor import Executor
from shardproof.impls.reference.pipeline.schedule_option import Name, ScheduleOption
from shardproof.impls.reference.pipeline.stages import Stages, cut
from shardproof.schedules import Schedule


@dataclass(frozen=True)
class Options(Saved):
    """``split``: number of units in each stage (``[]``: as even as possible, the larger ones
    first).

    ``recompute_every``: groups of so many units of a stage are computed again in backward.
    """

    schedule: Name | ScheduleOption = "1f1b"
    split: tuple[int, ...] = ()
    recompute_every: int = 0

    def __post_init__(self) -> None:
        at_least("recompute_every", self.recompute_every, 0)
        if self.recompute_every and self.chosen.splits:
            raise Refused(
                f"option 'recompute_every' = {self.recompute_every}: this schedule computes "
                "weight gradients (W) later than input gradients (B), when the recomputed "
                "activations are gone; choose 'gpipe', '1f1b' or 'interleaved'"
            )

    @property
    def chosen(self) -> ScheduleOption:
        """The schedule option in its long form."""
        return ScheduleOption(self.schedule) if isinstance(self.schedule, str) else self.schedule


class ReferencePipeline(Engine):
    """The strategy as a system under test."""

    strategy = "pipeline"
    depth = "layout"
    options_type: type[Options] = Options
    executor_type: type[Executor] = Executor
    stages_type: type[Stages] = Stages

    @classmethod
    def capabilities(cls, options: Mapping[str, Any]) -> Capabilities:
        """The capabilities that the ``pipeline`` profile requires."""
        parse_options(cls.options_type, options)
        return declared("stages", axes=("pipe",), exactness="bitwise", checkpoints=FORMATS)

    @classmethod
    def schedule(cls, options: Mapping[str, Any], ranks: int, micro_batches: int) -> Schedule:
        """The schedule of one window."""
        return parse_options(cls.options_type, options).chosen.make(ranks, micro_batches)

    def setup(
        self,
        build: Build,
        state: Mapping[str, Tensor] | None,
        optimizer: OptimizerSpec,
        mesh: Mesh,
        options: Mapping[str, Any],
    ) -> None:
        """Lay out the stages, then set up like every strategy."""
        # What the caller gave goes to `schedule` again in every window, as the judge does it too.
        self.given, self.options = options, parse_options(self.options_type, options)
        self.comm = mesh.comm("pipe")
        self.place = self.options.chosen.place_on(self.comm.size)
        self.bounds = cut(len(build.units), len(self.place), self.options.split)
        super().setup(build, state, optimizer, mesh, options)

    def recompute(self, module: nn.Module, options: Mapping[str, Any]) -> list[Group]:
        """Groups of units within one stage, whose input arrives as a message."""
        every = self.options.recompute_every
        if every > len(self.build.units):
            return recompute_units(module, self.build.units, every, self.call_type)  # refuses
        groups = []
        for rank, (start, stop) in zip(self.place, self.bounds, strict=True):
            if rank == self.comm.rank:
                units = self.build.units[start:stop]
                most = min(every, len(units))
                groups += recompute_units(module, units, most, self.call_type)
        return groups

    def transform(self, module: nn.Module, mesh: Mesh, options: Mapping[str, Any]) -> Handle:
        """Cut ``module`` and keep this rank's stages."""
        # Before the cut: afterwards no rank has all tensors that rank 0 would have to send.
        broadcast_tensors(list(named_state(module).values()), self.comm)
        stages = self.stages_type(
            module, self.build, self.bounds, self.place, self.comm, self.wrap, self.options.chosen
        )
        self.executor = self.executor_type(
            self.comm,
            stages.stages,
            self.place,
            lambda inputs: self.precision.cast_inputs(inputs),
            self.loss_of,
            self.trace,
        )
        return stages

    def needs_own_step(self) -> str:
        """The schedule interleaves forwards and backwards of micro-batches."""
        if not hasattr(self, "executor"):
            return ""  # a hybrid without stages
        return (
            "axis 'pipe': a pipeline's schedule decides when each micro-batch goes forward and "
            "backward, so there is no forward to call from a loop; train with "
            "shardproof.Training(model, loss, data).strategy(...), which runs whole steps"
        )

    def wrap(self, module: nn.Module) -> Handle:
        """The handle of a stage or a tied tensor on the data axes; there are none here."""
        return Local(module)

    def backward(self, batch: Batch) -> Tensor | None:
        """Run one schedule per window; the rank of the last stage knows the loss."""
        losses: list[Tensor] = []
        scale = self.scaler.scale if self.scaler else 1.0
        for number, window in enumerate(batch.windows, start=1):
            schedule = self.schedule(self.given, self.comm.size, len(window))
            is_last = number == len(batch.windows)
            losses += self.executor.run(schedule, window, is_last, scale)
        return self.total(losses)

    def total(self, losses: Sequence[Tensor]) -> Tensor | None:
        """The sum of ``losses``, if this rank has the last stage."""
        if self.place[-1] != self.comm.rank:
            return None
        return sum(losses[1:], start=losses[0]) if losses else torch.zeros(())

    @torch.no_grad()
    def evaluate(self, batch: Batch) -> Tensor | None:
        """The loss in evaluation mode, on the rank of the last stage."""
        self.module.eval()
        try:
            windows = [partial(self.executor.evaluate, window) for window in batch.windows]
            losses = self.handle.evaluate(windows)
        finally:
            self.module.train()
        return self.total([loss for window in losses for loss in window])

    def full_state(self, kind: Kind) -> dict[str, Tensor]:
        """Whole tensors of all stages, on every rank."""
        own = {piece.name: piece.tensor.clone() for piece in self.local_state(kind)}
        stages = self.comm.all_gather_object(own)
        return {name: tensor for held in stages for name, tensor in held.items()}


IMPLEMENTATION = ReferencePipeline
