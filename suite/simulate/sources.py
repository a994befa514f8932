"""The training of a simulated rank: the model of a published shape, or that of a case.

Both give fake tensors only.  A case's model and batches are made for real first, since their values
are drawn, and replaced by tensors of the same shapes; the values of its batches stay known.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import unset_fake_temporarily

from shardproof import workloads
from shardproof.axes import joint_groups
from shardproof.case import Case, data_shares
from shardproof.contract import Batch, Build, MicroBatch, OptimizerSpec, Options
from shardproof.costs.shapes import BatchSize, Shape
from shardproof.simulate.known import kept
from shardproof.simulate.model import ShapeModel

Watch = Callable[[nn.Module, Sequence[str]], None]


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


@dataclass(frozen=True)
class ShapeSource:
    """A published ``shape``, its parameters built in ``dtype``.

    Two steps: the first one makes the optimizer's state.
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
    def joint(self) -> Sequence[tuple[str, ...]]:
        """Axes that need one group together."""
        return joint_groups(self.axes)

    def build(self, rank: int, watch: Watch) -> Build:
        """The shape's module."""
        return ShapeModel(self.shape, self.dtype, watch)

    def state(self) -> dict[str, Tensor]:
        """Its parameters."""
        return {n: p.detach() for n, p in ShapeModel(self.shape, self.dtype)().named_parameters()}

    def batch(self, rank: int, step: int) -> Batch:
        """Micro-batches of full samples, every target with the same weight."""
        samples, positions = self.work.samples, self.work.positions or self.shape.seq
        tokens = torch.empty(samples, positions, dtype=torch.int64)
        weights = torch.empty(samples, positions)
        ids = torch.empty(samples, dtype=torch.int64)
        micro = MicroBatch(tokens, torch.empty_like(tokens), weights, ids)
        return Batch(step, ((micro,) * self.work.micro_batches,))


class CaseSource:
    """The training of the ranks of ``case``."""

    def __init__(self, case: Case) -> None:
        self.case, self.workload = case, workloads.for_case(case)
        self.implementation, self.axes = case.implementation, case.mesh
        self.joint = joint_groups(case.mesh)
        self.options, self.optimizer, self.steps = case.options, case.optimizer, case.steps
        ranks = range(case.world)
        self.shares = data_shares(case.mesh, ranks, ranks)

    def build(self, rank: int, watch: Watch) -> Build:
        """The case's build, whose modules lose their values."""
        with unset_fake_temporarily():
            own = self.workload.build_for(rank, self.shares[rank])
        return _Valueless(own, watch)

    def state(self) -> dict[str, Tensor]:
        """Its initial state."""
        with unset_fake_temporarily():
            state = self.workload.state()
        return {name: valueless(tensor) for name, tensor in state.items()}

    def batch(self, rank: int, step: int) -> Batch:
        """Its share."""
        with unset_fake_temporarily():
            batch = self.workload.batch(step, max(self.shares.values()) + 1)[self.shares[rank]]
        windows = tuple(tuple(map(_micro, window)) for window in batch.windows)
        return Batch(step, windows)


def _micro(micro: MicroBatch) -> MicroBatch:
    # The first tokens of samples hold flags, by which traits choose the layers that are used.
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
