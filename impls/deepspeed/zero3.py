"""DeepSpeed ZeRO-3: parameters are sharded too, each one separately.

    what                        where
    parameters                  this rank's N-th of every parameter, flattened and padded; whole
                                ones while a module computes, and always up to
                                ``stage3_param_persistence_threshold`` elements
    gradients                   this rank's N-th of every parameter
    fp32 master                 a second copy of the shards that are trained, although they are
                                fp32: ``_create_fp32_partitions`` does without one on GPUs only
    optimizer                   this rank's N-th of every parameter

    step     forward       a module's parameters are gathered before it runs, freed after it
             backward      the same; a bucket of gradients is reduce-scattered when full
             engine.step() norm over the shards, clip, update, persistent parameters gathered

The default threshold is 100,000 elements *a parameter*: with a small model nothing is ever freed,
and stage 3 holds whole parameters besides its shards.  Set it to 0 to have them sharded.

Cost: ``deepspeed_zero3.payload_bytes``.  Numbers: the mean over ranks of losses times N.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor, nn

from shardproof.contract import Kind, Piece, Refused
from shardproof.impls.deepspeed import engine
from shardproof.impls.deepspeed.engine import EVERY_MICRO_BATCH
from shardproof.impls.deepspeed.partitions import Partitioned
from shardproof.impls.reference.engine.choices import USUAL


class DeepSpeedZero3(Partitioned):
    """The adapter of stage 3."""

    strategy = "deepspeed_zero3"
    depth = "layout"
    stage = 3
    declines = EVERY_MICRO_BATCH
    features = USUAL | {"sharded_optimizer", "sharded_gradients", "sharded_parameters"}

    def flats(self) -> list[Tensor]:
        """The flat shards of each sub-group."""
        return list(self.zero_optimizer.fp32_partitioned_groups_flat)

    def shards(self) -> Iterator[tuple[str, nn.Parameter, int, int]]:
        """(name, parameter, start, elements) of every non-empty shard."""
        for name, parameter in self.module.named_parameters():
            each = parameter.partition_numel()  # type: ignore[attr-defined]
            start = min(each * self.comm.rank, parameter.ds_numel)  # type: ignore[attr-defined]
            count = min(each, parameter.ds_numel - start)  # type: ignore[attr-defined]
            if count > 0:
                yield name, parameter, start, count

    def parameters(self) -> Iterator[Piece]:
        """The shards without padding."""
        for name, parameter, start, count in self.shards():
            shard = parameter.ds_tensor  # type: ignore[attr-defined]
            yield self.piece(name, name, shard.view(-1).narrow(0, 0, count), start)

    def fragments(self) -> Iterator[tuple[str, int, int, int, int]]:
        """The fragments of DeepSpeed's table of gradient positions."""
        for name, parameter, start, count in self.shards():
            if parameter.requires_grad:
                key = self.zero_optimizer.get_param_id(parameter)
                number, at, _ = self.zero_optimizer.grad_position[key]
                yield name, number, at, start, count

    def full_state(self, kind: Kind) -> dict[str, Tensor]:
        """Whole parameters by ``GatheredParameters``."""
        if kind != "parameters":
            raise Refused(f"full_state({kind!r}): DeepSpeed can gather only parameters")
        named: Mapping[str, Any] = dict(self.module.named_parameters())
        gathered = engine.deepspeed.zero.GatheredParameters(list(named.values()))
        with self.launched(), gathered:
            return {name: p.detach().clone() for name, p in named.items()}


IMPLEMENTATION = DeepSpeedZero3
