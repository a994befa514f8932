"""The training of a simulated rank: the model of a published shape, or that of a case.

Both give fake tensors only.  A case's model and batches are first made with values, since these are
drawn, and then replaced by fake tensors of the same shapes.  Values of its batches stay known.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import unset_fake_temporarily

from shardproof import axes, registry, workloads
from shardproof.axes import joint_groups
from shardproof.case import Case, data_shares
from shardproof.contract import Batch, Build, MicroBatch, OptimizerSpec, Options, Refused
from shardproof.costs import cannot_fit, shapes
from shardproof.costs.shapes import BatchSize, Shape
from shardproof.errors import Problem, SelectionError
from shardproof.evidence.records import RankRecord
from shardproof.simulate.fakes.known import kept
from shardproof.simulate.model import ShapeModel, micro_batch

Watch = Callable[[nn.Module, Sequence[str]], None]
#: Systems of which a test compares a short first step with a whole one.
_PLANS_NOTHING = "reference/"


class Source(Protocol):
    """A system, its mesh, and what it trains."""

    @property
    def implementation(self) -> str: ...
    @property
    def axes(self) -> Mapping[str, int]: ...
    @property
    def joint(self) -> Sequence[tuple[str, ...]]: ...
    @property
    def options(self) -> Options: ...
    @property
    def optimizer(self) -> OptimizerSpec: ...
    @property
    def steps(self) -> int: ...

    def build(self, rank: int, watch: Watch) -> Build:
        """The build for ``rank``; ``watch`` is called with each module that it makes."""

    def state(self) -> dict[str, Tensor]:
        """Initial parameters and buffers, without values."""

    def batch(self, rank: int, step: int) -> Batch:
        """The share of ``rank`` in ``step``, without values."""

    def is_finite(self, rank: int, step: int) -> bool:
        """Whether gradients of ``rank`` in ``step`` are finite, which only values could show."""

    def evaluates(self, rank: int, step: int) -> bool:
        """Whether ``rank`` evaluates its batch of ``step`` before it trains with it."""


def state_of(module: nn.Module) -> dict[str, Tensor]:
    """The parameters and buffers of ``module``."""
    both = (*module.named_parameters(), *module.named_buffers())
    return {name: tensor.detach() for name, tensor in both}


def accepted(source: Undisturbed, stages: int, least: int) -> int:
    """The fewest micro-batches, ``least`` or more, that the schedule takes on so many ``stages``.

    :raises Refused: it takes none of them.
    """
    if stages == 1:
        return least
    system: Any = registry.load(source.implementation)
    for count in range(least, least + 2 * stages):
        try:
            system.schedule(source.options, stages, count)
        except Refused:
            continue
        return count
    # As many as this, of which the schedule says itself what is wrong.
    system.schedule(source.options, stages, least)
    return least


class Undisturbed:
    """A training along ``axes`` without overflows and evaluations.

    All steps but the last only make the optimizer's state.  A reference strategy, which plans
    nothing there for later steps, gets as few micro-batches in them as its schedule takes.
    """

    implementation: str
    axes: Mapping[str, int]
    options: Options
    work: BatchSize
    steps: int

    def micro_batches(self, step: int) -> int:
        """Micro-batches of a rank in ``step``."""
        count = self.work.micro_batches
        if step == self.steps - 1 or not self.implementation.startswith(_PLANS_NOTHING):
            return count
        try:
            return min(count, accepted(self, axes.parts(self.axes, "layers"), 1))
        except Refused:
            return count  # the schedule says itself what is wrong

    @property
    def joint(self) -> Sequence[tuple[str, ...]]:
        """Axes that need one group together."""
        return joint_groups(self.axes)

    def is_finite(self, rank: int, step: int) -> bool:
        """Whether gradients are finite: always."""
        return True

    def evaluates(self, rank: int, step: int) -> bool:
        """Whether an evaluation comes before the step: never."""
        return False


@dataclass(frozen=True)
class ShapeSource(Undisturbed):
    """A published ``shape``, its parameters built in ``dtype``.

    It trains two steps, because the first one creates the optimizer state.
    """

    shape: Shape
    implementation: str
    axes: Mapping[str, int]
    optimizer: OptimizerSpec
    options: Options = field(default_factory=dict)
    work: BatchSize = field(default_factory=BatchSize)
    dtype: torch.dtype = torch.float32
    steps: int = 2

    @property
    def name(self) -> str:
        """The name of the model, with the number of layers if that was set."""
        return self.shape.name

    def about(self) -> list[str]:
        """The model and a micro-batch, in words."""
        shape, count = self.shape, sum(t.numel for t in shapes.tensors(self.shape, ""))
        positions = self.work.samples * (self.work.positions or shape.seq)
        notes = [
            f"{count:,} parameters in {shape.layers} layers, {positions:,} positions a micro-batch"
        ]
        if shape.mixture:
            notes.append("routing is fixed: every expert gets the same number of tokens")
        if shape.dropout:
            notes.append("dropout is left out: its masks are not counted")
        return notes

    def require_shared(self, accounting: str) -> None:
        """Require that the ranks of each axis can share the model.

        :raises SelectionError: positions, heads, widths or layers are too few, or do not divide.
        """
        shape, seq = self.shape, self.work.positions
        if shape.image and seq:
            what = f"{shape.name} takes images of {shape.image.side} x {shape.image.side}"
            raise SelectionError(Problem(what, "leave --seq out", str(seq)))
        if shape.positions and seq > shape.positions:
            what = f"{shape.name} has {shape.positions:,} learned positions, fewer than --seq"
            raise SelectionError(Problem(what, f"give up to {shape.positions}", str(seq)))
        facts = shapes.facts_of(shape, self.axes, self.options, accounting, self.work)
        if reason := cannot_fit(facts, registry.load(self.implementation).strategy):
            shown = ", ".join(f"{name}={size}" for name, size in self.axes.items())
            raise SelectionError(Problem(reason, "choose another size of that axis", shown))
        along, stages = axes.cutting("layers"), facts.parts("layers")
        if stages > shape.layers:
            what = f"the model has {shape.layers} layers, too few for {stages} stages"
            raise SelectionError(Problem(what, "write fewer stages", f"{along}={stages}"))

    def build(self, rank: int, watch: Watch) -> Build:
        """The shape's module."""
        return ShapeModel(self.shape, self.dtype, watch)

    def state(self) -> dict[str, Tensor]:
        """Its parameters and buffers."""
        return state_of(ShapeModel(self.shape, self.dtype)())

    def batch(self, rank: int, step: int) -> Batch:
        """Micro-batches of full samples, every target with the same weight."""
        micro = micro_batch(self.shape, self.dtype, self.work)
        return Batch(step, ((micro,) * self.micro_batches(step),))


class CaseSource:
    """The training of the ranks of ``case``, with what their ``records`` know of values."""

    def __init__(self, case: Case, records: Sequence[RankRecord]) -> None:
        self.case, self.workload = case, workloads.for_case(case)
        self.records = {record.rank: record for record in records}
        self.implementation, self.axes = case.implementation, case.mesh
        self.joint = joint_groups(case.mesh)
        self.options, self.optimizer, self.steps = case.options, case.optimizer, case.steps
        ranks = range(case.world)
        self.shares = data_shares(case.mesh, ranks, ranks)

    def build(self, rank: int, watch: Watch) -> Build:
        """The case's build; its modules get tensors without values."""
        with unset_fake_temporarily():
            own = self.workload.build_for(rank, self.shares[rank])
        return _Valueless(own, watch)

    def state(self) -> dict[str, Tensor]:
        """The initial state of the case."""
        with unset_fake_temporarily():
            state = self.workload.state()
        return {name: valueless(tensor) for name, tensor in state.items()}

    def batch(self, rank: int, step: int) -> Batch:
        """The share of ``rank`` in the batch of ``step``."""
        with unset_fake_temporarily():
            batch = self.workload.batch(step, max(self.shares.values()) + 1)[self.shares[rank]]
        windows = tuple(tuple(map(_micro, window)) for window in batch.windows)
        return Batch(step, windows)

    def is_finite(self, rank: int, step: int) -> bool:
        """As the record of ``rank`` says."""
        return step < 0 or not self.records[rank].steps[step].skipped

    def evaluates(self, rank: int, step: int) -> bool:
        """As the record of ``rank`` says."""
        return any(evaluation.step == step for evaluation in self.records[rank].evaluations)


def _micro(micro: MicroBatch) -> MicroBatch:
    # Values stay known: the first tokens of samples hold flags, which choose layers in some models.
    names = ("inputs", "targets", "weights", "sample_ids")
    return MicroBatch(*(kept(getattr(micro, name)) for name in names))


def valueless(tensor: Tensor) -> Tensor:
    """A fake tensor like ``tensor``."""
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype)


class _Valueless:
    """A build whose modules have fake parameters and buffers."""

    def __init__(self, build: Any, watch: Watch) -> None:
        self._build, self._watch = build, watch

    def __getattr__(self, name: str) -> Any:
        return getattr(self._build, name)

    def __call__(self, device: str = "cpu") -> nn.Module:
        with unset_fake_temporarily():
            module: nn.Module = self._build(device)
        known: dict[int, Tensor] = {}
        for part in module.modules():
            both: tuple[dict[str, Any], ...] = part._parameters, part._buffers
            for held in both:
                for name, tensor in held.items():
                    if tensor is not None:
                        held[name] = known.setdefault(id(tensor), _like(tensor))
        self._watch(module, self._build.units)
        return module


def _like(tensor: Tensor) -> Tensor:
    twin = valueless(tensor) if not tensor.is_meta else tensor
    if isinstance(tensor, nn.Parameter) and not tensor.is_meta:
        return nn.Parameter(twin, requires_grad=tensor.requires_grad)
    return twin
