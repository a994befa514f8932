"""Pipeline parallelism: the model is cut into stages, micro-batches flow through them.

Problem.  A model too large for one device is cut across its depth.  One stage at a time would
compute; so a batch is cut as well, and stages work on different micro-batches at the same time.
What remains idle, the *bubble*, and how many micro-batches a stage holds at once depend on the
order of forwards and backwards alone: the schedule.

    what                                where
    parameters, gradients, optimizer    the rank of their stage, whole
      state, buffers
    tensors tied over stages            every rank that uses them, copies
    activations                         between F and backward, on the rank of the stage
    inputs, targets                     all ranks have them; the first and the last stage use them

    step     windows       one schedule each (parts/schedules.py, or the user's own):
                           F B W on every rank in its order, messages between (parts/executor.py)
             finish        sums of tied tensors are exchanged (parts/stages.py)
             clip          the norm is a sum over stages, tied tensors once
             update        every rank its own stages

Cost: floating-point bytes a step: for each micro-batch and boundary between ranks one activation
and one gradient, b s h elements each (GPipe, arXiv 1811.06965, section 2.3; Narayanan et al., arXiv
2104.04473, section 2.2); for a tensor tied over ranks one gradient from each of them to each other.
With clipping one float64 is all-reduced.  Memory of state: that of the rank's stages; of
activations: parts/schedules.py.
Numbers: every stage adds up its micro-batches in ascending order, as one process does: equal bits.
A tied tensor's gradient is a sum of one sum for each rank.
Left out: asynchronous schedules with stale weights; mixed precision and offload; recomputation
where B and W come apart (W would need once more what was thrown away).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, Literal

import torch
from torch import Tensor, nn

from shardproof.comm import Mesh
from shardproof.contract import Batch, Build, Capabilities, Kind, OptimizerSpec, Refused
from shardproof.impls.reference.engine.engine import Engine
from shardproof.impls.reference.engine.handle import Handle, Local
from shardproof.impls.reference.engine.options import at_least, parse_options
from shardproof.impls.reference.engine.recompute import Group, recompute_units
from shardproof.impls.reference.engine.state import broadcast_tensors, named_state
from shardproof.impls.reference.pipeline.executor import Executor
from shardproof.impls.reference.pipeline.schedules import SCHEDULES
from shardproof.impls.reference.pipeline.stages import Stages, cut
from shardproof.schedules import MESSAGES, Action, Schedule, problems, with_messages

Name = Literal["gpipe", "1f1b", "interleaved", "zb_h1", "zb_h2", "zb_v"]
#: Schedules whose B and W are two actions.
SPLIT = ("zb_h1", "zb_h2", "zb_v")
#: Stages a rank of ``interleaved`` where the option does not say.
CHUNKS = 2


@dataclass(frozen=True)
class Chosen:
    """A generator by ``name`` (``interleaved`` takes ``chunks`` stages a rank), or a schedule.

    ``orders`` are each rank's actions as ``F0@1`` (micro-batch 0, stage 1), with all messages or
    none; ``place`` the ranks of the stages (``[]``: where their forwards are).
    """

    name: Name | None = None
    chunks: int | None = None
    orders: tuple[tuple[str, ...], ...] = ()
    place: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        at_least("schedule.chunks", 1 if self.chunks is None else self.chunks, 1)
        fixed = {"interleaved": self.chunks, "zb_v": 2, None: None}.get(self.name, 1)
        if self.chunks not in (None, fixed):
            raise Refused(
                f"option 'schedule.chunks' = {self.chunks}: stages a rank are free with "
                "'interleaved' only; zb_v has 2, the others 1, and 'orders' say their own"
            )
        if (self.name is None) == (not self.orders):
            raise Refused(
                "option 'schedule': give either 'name', one of "
                f"{', '.join(SCHEDULES)}, or 'orders', the actions of every rank"
            )
        if self.orders and (found := problems(self.own)):
            raise Refused(f"option 'schedule.orders': {'; '.join(found)}")

    @cached_property
    def own(self) -> Schedule:
        """The schedule that ``orders`` spell out; :class:`Refused` if they name what is not."""
        try:
            orders = tuple(tuple(map(Action.parse, order)) for order in self.orders)
        except ValueError as error:
            raise Refused(f"option 'schedule.orders': {error}") from None
        actions = [action for order in orders for action in order]
        placed = {a.stage: rank for rank, order in enumerate(orders) for a in order if a.op == "F"}
        place = self.place or tuple(placed[stage] for stage in sorted(placed))
        last = max((action.stage for action in actions), default=0)
        if last >= len(place) or (not self.place and set(placed) != set(range(last + 1))):
            raise Refused(
                f"option 'schedule.orders': stage {last} is the last one that is named, but "
                f"{'schedule.place has' if self.place else 'forwards are given for'} "
                f"{len(place)} stages"
            )
        if any(not 0 <= rank < len(orders) for rank in place):
            raise Refused(
                f"option 'schedule.place' = {list(place)}: there are orders for {len(orders)} ranks"
            )
        micro_batches = 1 + max((action.micro for action in actions), default=0)
        if micro_batches > len(actions):
            raise Refused(
                f"option 'schedule.orders': micro-batch {micro_batches - 1} is the last one that "
                f"is named, but there are {len(actions)} actions"
            )
        own = Schedule("own", micro_batches, place, orders)
        return own if any(a.op in MESSAGES for a in actions) else with_messages(own)

    @property
    def splits(self) -> bool:
        """Whether B and W are two actions."""
        if self.name is not None:
            return self.name in SPLIT
        return any(action.op == "W" for order in self.own.orders for action in order)

    def place_on(self, ranks: int) -> tuple[int, ...]:
        """The rank of every stage."""
        return self.make(ranks, ranks if self.name else self.own.micro_batches).place

    def make(self, ranks: int, micro_batches: int) -> Schedule:
        """The schedule for a window; :class:`Refused` where there is none."""
        if self.name is not None:
            more = {"chunks": self.chunks or CHUNKS} if self.name == "interleaved" else {}
            return SCHEDULES[self.name](ranks, micro_batches, **more)
        own = self.own
        if own.ranks != ranks:
            raise Refused(
                f"option 'schedule.orders' is for {own.ranks} ranks, the axis 'pipe' has {ranks}: "
                "give an order for each rank of the axis"
            )
        if own.micro_batches != micro_batches:
            raise Refused(
                f"option 'schedule.orders' is for {own.micro_batches} micro-batches, "
                f"a window has {micro_batches}: name every micro-batch of a window, from 0 on"
            )
        return own


@dataclass(frozen=True)
class Options:
    """``split``: units of each stage (``[]``: as even as possible, the larger ones first).

    ``recompute_every``: groups of so many units of a stage are computed again in backward.
    """

    schedule: Name | Chosen = "1f1b"
    split: tuple[int, ...] = ()
    recompute_every: int = 0

    def __post_init__(self) -> None:
        at_least("recompute_every", self.recompute_every, 0)
        if self.recompute_every and self.chosen.splits:
            raise Refused(
                f"option 'recompute_every' = {self.recompute_every}: the schedule has B and W "
                "apart, and W would need what was thrown away; choose gpipe, 1f1b or interleaved"
            )

    @property
    def chosen(self) -> Chosen:
        """The schedule in its long form."""
        return Chosen(self.schedule) if isinstance(self.schedule, str) else self.schedule


class ReferencePipeline(Engine):
    """The strategy as a system under test."""

    strategy = "pipeline"
    options_type: type[Options] = Options
    executor_type: type[Executor] = Executor
    stages_type: type[Stages] = Stages

    @classmethod
    def capabilities(cls, options: Mapping[str, Any]) -> Capabilities:
        """Everything that the ``pipeline`` profile asks for."""
        parse_options(cls.options_type, options)
        features = ("clipping", "accumulation", "initial_broadcast", "frozen_parameters", "stages")
        return Capabilities(
            axes=("pipe",),
            dtypes=("float64", "float32", "bfloat16"),
            exactness="bitwise",
            buffers="per_rank",
            features=frozenset(features),
        )

    @classmethod
    def schedule(cls, options: Mapping[str, Any], ranks: int, micro_batches: int) -> Schedule:
        """What one window runs."""
        return parse_options(cls.options_type, options).chosen.make(ranks, micro_batches)

    def setup(
        self,
        build: Build,
        state: Mapping[str, Tensor] | None,
        optimizer: OptimizerSpec,
        mesh: Mesh,
        options: Mapping[str, Any],
    ) -> None:
        """Lay out the stages, then as ever."""
        self.given, self.options = options, parse_options(self.options_type, options)
        self.comm = mesh.comm("pipe")
        self.place = self.options.chosen.place_on(self.comm.size)
        self.bounds = cut(len(build.units), len(self.place), self.options.split)
        super().setup(build, state, optimizer, mesh, options)

    def recompute(self, module: nn.Module, options: Mapping[str, Any]) -> list[Group]:
        """Groups end where a stage ends."""
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
        """Cut ``module``, keep this rank's stages."""
        broadcast_tensors(list(named_state(module).values()), self.comm)
        splits = self.options.chosen.splits
        stages = self.stages_type(
            module, self.build, self.bounds, self.place, self.comm, self.wrap, splits
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

    def wrap(self, module: nn.Module) -> Handle:
        """What a stage, or a tied tensor, is on the axes of the data: here there are none."""
        return Local(module)

    def backward(self, batch: Batch) -> Tensor | None:
        """One schedule a window; the loss is known where the last stage lies."""
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
        """The loss in evaluation mode, where the last stage lies."""
        self.module.eval()
        try:
            windows = [partial(self.executor.evaluate, window) for window in batch.windows]
            found = self.handle.evaluate(windows)
        finally:
            self.module.train()
        return self.total([loss for losses in found for loss in losses])

    def full_state(self, kind: Kind) -> dict[str, Tensor]:
        """Whole tensors of all stages, on every rank."""
        own = {piece.name: piece.tensor.clone() for piece in self.local_state(kind)}
        told = self.comm.all_gather_object(own)
        return {name: tensor for found in told for name, tensor in found.items()}


IMPLEMENTATION = ReferencePipeline
