"""PyTorch's ``ZeroRedundancyOptimizer`` with its DDP, unmodified.

    what                        where
    parameters, gradients       every rank, whole and equal (DDP's)
    optimizer state             of each parameter on one rank, whole
    buffers                     every rank; rank 0's are copied at the first forward of a step

    step     forward, backward, clip    as pytorch/ddp: gradients are all-reduced
             update                     each rank its own parameters
             synchronise                every rank broadcasts what it updated, tensor by tensor
                                        (``parameters_as_bucket_view``: all of a rank's in one)

Whole parameters go to ranks, largest first, each to the rank with the fewest elements so far, group
by group: the partition is known from shapes alone.

Cost: ``zero_redundancy_optimizer.payload_bytes`` = DDP's and (N-1) trainable bytes of broadcasts:
3 (N-1)/N Psi a rank, 1.5 times what ZeRO-1 by reduce-scatter and all-gather sends.
Numbers: as DDP.
Left out: ``overlap_with_ddp`` (torch refuses gloo: "Gloo backend using Overlapping DDP with ZeRO
may meet hangs"), partitions by hand.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from torch.distributed.optim import ZeroRedundancyOptimizer

from shardproof.contract import Capabilities, Kind, Piece
from shardproof.impls.pytorch.checkpoint.full import Full
from shardproof.impls.pytorch.checkpoint.options import Checkpoints, offered
from shardproof.impls.pytorch.checkpoint.state import Training
from shardproof.impls.pytorch.ddp import Options as DDPOptions
from shardproof.impls.pytorch.ddp import PyTorchDDP
from shardproof.impls.reference.engine.optimizer import (
    param_groups,
    unnamed_groups,
)
from shardproof.impls.reference.engine.options import parse_options


@dataclass(frozen=True)
class Options(DDPOptions):
    """The options of DDP and of the optimizer."""

    parameters_as_bucket_view: bool = False
    checkpoint: Checkpoints = field(default_factory=lambda: Checkpoints("full"), kw_only=True)


#: Why there is one format.
CONSOLIDATED = (
    "get_state_dict cannot read a ZeroRedundancyOptimizer: 'Optimizer state has not been "
    "consolidated on this rank'"
)


class Consolidated(Full):
    """The optimizer's state by ``consolidate_state_dict``, under numbers, as torch documents it."""

    def gathered(self, training: Training) -> tuple[dict[str, Any], dict[str, Any]]:
        """The whole state on rank 0, the only one that writes."""
        optimizer = training.optimizer
        assert isinstance(optimizer, ZeroRedundancyOptimizer)
        optimizer.consolidate_state_dict(to=0)
        state = optimizer.state_dict() if training.rank == 0 else {}
        return get_model_state_dict(training.model), state

    def put(self, training: Training, model: dict[str, Any], optimizer: dict[str, Any]) -> None:
        """Keep the part of the state that this rank updates."""
        set_model_state_dict(training.model, model)
        training.optimizer.load_state_dict(optimizer)


class PyTorchZeroRedundancyOptimizer(PyTorchDDP):
    """The adapter for DDP with another optimizer."""

    strategy = "zero_redundancy_optimizer"
    depth = "layout"
    options_type: ClassVar[type[Options]] = Options
    axes: ClassVar[tuple[str, ...]] = ("shard",)
    options: Options
    full_type = Consolidated

    @classmethod
    def capabilities(cls, options: Mapping[str, Any]) -> Capabilities:
        """DDP's capabilities and sharded optimizer state, except for one combination of buckets."""
        of_ddp, chosen = super().capabilities(options), parse_options(Options, options)
        declines = dict(of_ddp.declines)
        if chosen.parameters_as_bucket_view and not chosen.gradient_as_bucket_view:
            declines["non_contiguous"] = (
                "parameters_as_bucket_view makes parameters contiguous after DDP has laid out "
                "its buckets by their strides, so gradients come out transposed"
            )
        features = of_ddp.features | {"sharded_optimizer"}
        saves = offered(chosen.checkpoint, ("full",), CONSOLIDATED)
        return replace(of_ddp, features=features, declines=declines, **saves)

    def make_optimizer(self) -> torch.optim.Optimizer:
        """The usual kernels inside ZeroRedundancyOptimizer."""
        spec = self.spec
        return ZeroRedundancyOptimizer(
            unnamed_groups(param_groups(spec, self.trainable)),
            optimizer_class=spec.kind,
            process_group=self.comm.group,
            parameters_as_bucket_view=self.options.parameters_as_bucket_view,
            foreach=False,
            **spec.arguments,
        )

    def local_state(self, kind: Kind) -> list[Piece]:
        """DDP's pieces; optimizer state of the parameters that this rank updates."""
        if kind != "optimizer":
            return super().local_state(kind)
        assert isinstance(self.optimizer, ZeroRedundancyOptimizer)
        local = self.optimizer.optim.state
        return [
            self._place(name, slot, value)
            for name, parameter in self.trainable.items()
            for slot, value in local.get(parameter, {}).items()
            if isinstance(value, Tensor)
        ]

    def _place(self, name: str, slot: str, tensor: Tensor) -> Piece:
        counts = slot == "step" and tensor.dim() == 0
        return Piece.whole(f"{name}.{slot}", tensor, replica=self.comm.rank if counts else 0)


IMPLEMENTATION = PyTorchZeroRedundancyOptimizer
