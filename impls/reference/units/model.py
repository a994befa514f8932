"""A model in sharded units: a rank's part of it, and the tensors for the optimizer.

*When* units are gathered and reduced is for the classes above this one to say.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from shardproof.comm import Comm
from shardproof.contract import Kind, OptimizerSpec, Piece
from shardproof.impls.reference.engine.handle import PLAIN, Context, Handle
from shardproof.impls.reference.engine.norm import NormPart, power_sum
from shardproof.impls.reference.engine.optimizer import param_groups
from shardproof.impls.reference.engine.precision import Precision
from shardproof.impls.reference.engine.state import broadcast_tensors, named_state
from shardproof.impls.reference.units.gradients import GradientState
from shardproof.impls.reference.units.meta import check, materialize, on_meta
from shardproof.impls.reference.units.plan import UnitPlan
from shardproof.impls.reference.units.rounds import Rounds
from shardproof.impls.reference.units.shard import FlatShard, ShardedUnit


class ShardedModel(Handle):
    """Units over ``comms["shard"]`` (absent: not sharded), replicas over ``comms["replicate"]``."""

    takes_turns = True

    def __init__(
        self,
        module: nn.Module,
        comms: Mapping[str, Comm],
        plan: Sequence[UnitPlan],
        precision: Precision,
        context: Context = PLAIN,
    ) -> None:
        self.module, self.reducer = module, context.reducer
        self.shards, self.replicas = comms.get("shard"), comms.get("replicate")
        if self.replicas is not None:
            self.reducer.check(self.replicas.size)
        self.rounds = Rounds(list(comms.values()))
        along = [comms[axis] for axis in ("shard", "replicate") if axis in comms]
        check(module)
        meta = on_meta(module)
        self.device = torch.device(along[0].device) if meta else next(module.parameters()).device
        # Along each axis from its first rank, one axis after the other: in the end all ranks have
        # the values of the very first.  Before the shards are cut, for they are cut from these.
        for comm in along:
            held = [tensor for tensor in named_state(module).values() if not tensor.is_meta]
            broadcast_tensors(held, comm)
        self.names = [name for name, _ in module.named_parameters()]
        self.units: list[ShardedUnit] = []
        for number, one in enumerate(plan):
            if meta:
                materialize(module, one.parameters, along[0].device, along)
            own = {name: module.get_parameter(name) for name in one.parameters}
            place = module.get_submodule(one.name)
            rest = context.host, context.reducer
            self.units.append(
                ShardedUnit(number, one.name, place, own, self.shards, precision, *rest)
            )
        self.flats = [flat for unit in self.units for flat in unit.flats]
        self.trained = [flat for unit in self.units for flat in unit.trained]
        self.home = {name: flat for flat in self.flats for name in flat.layout.names}
        self.used: set[str] = set()

    def reduce_over_replicas(self, flat: FlatShard) -> None:
        """Start to sum a shard over the replicas, if there are any."""
        if self.replicas is not None and self.replicas.size > 1:
            flat.gradients.reduce_over_replicas(self.replicas, self.reducer, self.step)

    def publish_gradients(self) -> None:
        """Give the optimizer's targets their reduced gradients; agree on which ranks used what."""
        names = [name for flat in self.trained for name in flat.layout.names]
        # A rank cannot know whether others used a parameter, and all must update it, or none.
        used = self.rounds.largest([int(name in self.used) for name in names]) if names else []
        for flat in self.trained:
            if flat.gradients.state is GradientState.ACCUMULATED:
                self.reduce_over_replicas(flat)  # its unit was not called in the last round
            flat.gradients.finalize()
            flat.publish_gradients(dict(zip(names, map(bool, used), strict=True)))

    def after_step(self) -> None:
        """Clear gradients."""
        for flat in self.trained:
            flat.clear_gradients()
        self.used.clear()

    # ---------------------------------------------------------------------------------- the state

    def targets(self) -> Iterator[tuple[str, Tensor]]:
        """The tensors that the optimizer updates, in the order of the model's parameters."""
        for name in self.names:
            if name in self.home[name].targets:
                yield name, self.home[name].targets[name]

    def param_groups(self, spec: OptimizerSpec) -> list[dict[str, Any]]:
        """This rank's parts, under their parameters' names."""
        return param_groups(spec, dict(self.targets()))

    def norm_parts(self, order: float = 2.0) -> list[NormPart]:
        """One sum over this rank's shards."""
        # Along the shard axis only: replicas hold the same, and would count it again.
        total = torch.zeros((), dtype=torch.float64, device=self.device)
        for _, target in self.targets():
            if target.grad is not None:
                total += power_sum(target.grad, order)
        return [(total, () if self.shards is None else (self.shards.axis,))]

    @torch.no_grad()
    def scale_gradients(self, factor: Tensor) -> None:
        """Multiply this rank's parts."""
        for _, target in self.targets():
            if target.grad is not None:
                target.grad.mul_(factor.to(target.grad.dtype))

    @property
    def replica(self) -> int:
        """The number of this rank's copy of the shards."""
        return 0 if self.replicas is None else self.replicas.rank

    @property
    def coordinate(self) -> int:
        """The number of this rank among all ranks."""
        if self.shards is None:
            return self.replica
        return self.replica * self.shards.size + self.shards.rank

    def pieces(self, kind: Kind) -> list[Piece]:
        """This rank's parts; buffers are whole."""
        if kind == "buffers":
            named = self.module.named_buffers()
            return [Piece.whole(n, t, replica=self.coordinate) for n, t in named]
        return [self.place(name, "", tensor) for name, tensor in self.held(kind)]

    def held(self, kind: Kind) -> Iterator[tuple[str, Tensor]]:
        """This rank's parts of parameters or gradients."""
        for name in self.names:
            flat = self.home[name]
            if name not in flat.parts:
                continue
            if kind == "parameters":
                yield name, flat.parts[name].of_shard(flat.shard)
            elif flat.trained:
                gradient = flat.targets[name].grad
                if gradient is not None:
                    yield name, gradient

    def place(self, name: str, slot: str, tensor: Tensor) -> Piece:
        """A part like that of the parameter; a scalar (Adam's step) as a whole."""
        full = f"{name}.{slot}" if slot else name
        if slot and tensor.dim() == 0:
            return Piece.whole(full, tensor, replica=self.coordinate)
        return self.home[name].parts[name].piece(tensor, full, self.replica)
