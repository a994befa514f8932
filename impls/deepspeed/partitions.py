"""Stages whose optimizer runs on flat partitions, and the partitions of stages 1 and 2."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Mapping
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from shardproof.comm import Mesh
from shardproof.contract import Batch, Build, Observe, OptimizerSpec, Piece, StepResult
from shardproof.impls.deepspeed.engine import Engine


class Partitioned(Engine):
    """Stages whose optimizer runs on one flat partition per parameter group or sub-group."""

    def setup(
        self,
        build: Build,
        state: Mapping[str, Tensor] | None,
        optimizer: OptimizerSpec,
        mesh: Mesh,
        options: Mapping[str, Any],
    ) -> None:
        """Set up like every stage, and observe the update of each group."""
        super().setup(build, state, optimizer, mesh, options)
        self.clipped: dict[int, Tensor] = {}
        self.torch_optimizer.register_step_pre_hook(self._before_update)

    @abstractmethod
    def flats(self) -> list[Tensor]:
        """The flat fp32 partitions that the optimizer updates."""

    @abstractmethod
    def fragments(self) -> Iterator[tuple[str, int, int, int, int]]:
        """The parts that this rank updates: (name, number of the flat, start in it, start in the
        parameter, elements).
        """

    def final_gradient(self, number: int, at: int, count: int) -> Tensor:
        """The gradient that DeepSpeed will flatten for the ``count`` elements from ``at`` of
        partition ``number``; with an offloaded optimizer it already lies in the partition's
        gradient.
        """
        if self.zero.offloads_optimizer:
            gradient = self.flats()[number].grad
            assert gradient is not None
            return gradient.narrow(0, at, count)
        parts = self.zero_optimizer.averaged_gradients[number]
        starts = accumulate((part.numel() for part in parts), initial=0)
        pairs = zip(parts, starts, strict=False)
        (gradient,) = (part for part, start in pairs if start == at and part.numel())
        return gradient.reshape(-1).narrow(0, 0, count)

    def step(self, batch: Batch, observe: Observe) -> StepResult:
        """Step like every stage, but keep clipped gradients until the end."""
        result = super().step(batch, observe)
        self.clipped = {}
        return result

    def norm(self) -> Tensor:
        """The norm that DeepSpeed keeps for ``get_global_grad_norm``."""
        norm = torch.as_tensor(self.zero_optimizer._global_grad_norm, dtype=torch.float32)
        return norm.detach().clone().reshape(())

    def _before_update(self, *_: Any) -> None:
        """Called once per group, after its flat gradient has been clipped."""
        if self.observe is None:
            return
        flats = self.flats()
        updated = {id(p) for group in self.torch_optimizer.param_groups for p in group["params"]}
        for number, flat in enumerate(flats):
            if id(flat) in updated and flat.grad is not None:
                self.clipped[number] = flat.grad.detach()
        if len(self.clipped) == len(flats):
            observe, self.observe = self.observe, None
            observe("after_clip")

    def gradients(self) -> Iterator[Piece]:
        """Fragments of the flat gradients: as reduced, or as clipped once known."""
        for name, number, at, start, count in self.fragments():
            if self.clipped:
                gradient = self.clipped[number].narrow(0, at, count)
            else:
                gradient = self.final_gradient(number, at, count)
            yield self.piece(name, name, gradient, start)

    def slots(self) -> Iterator[Piece]:
        """Fragments of the optimizer's state; one number per partition is whole."""
        flats = self.flats()
        for name, number, at, start, count in self.fragments():
            for slot, value in self.torch_optimizer.state.get(flats[number], {}).items():
                if not isinstance(value, Tensor):
                    continue
                if value.dim() == 0:
                    yield Piece.whole(f"{name}.{slot}", value, replica=self.comm.rank)
                else:
                    yield self.piece(f"{name}.{slot}", name, value.narrow(0, at, count), start)


class FlatPartitions(Partitioned):
    """Stages 1 and 2: one flat partition of each parameter group per rank.

    ``DeepSpeedZeroOptimizer`` (``deepspeed/runtime/zero/stage_1_and_2.py``) lays the parameters of
    a group end to end, pads them to a multiple of 2 N elements and gives each rank an N-th: an fp32
    master, on which torch's optimizer runs.  ``_hp_mapping`` of a parameter says which part of it
    lies there.
    """

    def flats(self) -> list[Tensor]:
        """This rank's master partition of each parameter group."""
        return list(self.zero_optimizer.single_partition_of_fp32_groups)

    def fragments(self) -> Iterator[tuple[str, int, int, int, int]]:
        """The fragments of DeepSpeed's own mapping."""
        for name, parameter in self.trainable.items():
            mapping = parameter._hp_mapping  # type: ignore[attr-defined]
            if mapping is not None:
                here, there = mapping.hp_fragment_address, mapping.lp_fragment_address
                yield name, mapping.param_group_index, here.start, there.start, here.numel
