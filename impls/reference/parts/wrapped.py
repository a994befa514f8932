"""A model in sharded units: the handle that ZeRO-3 and FSDP have in common.

It knows what is held, which calls are made and how ranks without work take part.  *When* units are
gathered, freed and reduced is the strategy's business.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from impls.reference.parts.handle import Handle
from impls.reference.parts.norm import NormPart, power_sum
from impls.reference.parts.offload import HostTier
from impls.reference.parts.optimizer import param_groups
from impls.reference.parts.precision import Precision
from impls.reference.parts.reducers import Work
from impls.reference.parts.rounds import END, Rounds
from impls.reference.parts.shards import FlatShard, Unit
from impls.reference.parts.state import broadcast_tensors, named_state
from impls.reference.parts.unit_events import Listener, UnitEvents
from impls.reference.parts.units import UnitPlan
from suite.comm import Comm
from suite.contract import Kind, OptimizerSpec, Piece

#: What is announced: a kind of call times the number of units, plus the unit's number, plus 1.
GATHER, GATHER_CHUNKS, REDUCE = range(3)


class WrappedHandle(Handle, Listener):
    """Units over ``comms["shard"]`` (absent: not sharded), replicas over ``comms["replicate"]``.

    ``tier`` is where shards rest, if not on the device.
    ``chunks`` is a group of neighbours along the shard axis that parameters may stay sharded over
    between forward and backward; its size divides that of the axis.
    """

    def __init__(
        self,
        module: nn.Module,
        comms: Mapping[str, Comm],
        plan: Sequence[UnitPlan],
        precision: Precision,
        tier: HostTier | None = None,
        chunks: Comm | None = None,
    ) -> None:
        self.module = module
        self.shards, self.replicas = comms.get("shard"), comms.get("replicate")
        self.chunks = chunks
        self.rounds = Rounds(list(comms.values()), next(module.parameters()).device)
        # Along each axis from its first rank: in the end everybody has what the first of all had.
        for axis in ("shard", "replicate"):
            if axis in comms:
                broadcast_tensors(list(named_state(module).values()), comms[axis])
        named = dict(module.named_parameters())
        self.names = list(named)
        self.units: list[Unit] = []
        for number, one in enumerate(plan):
            own = {name: named[name] for name in one.parameters}
            place = module.get_submodule(one.name)
            self.units.append(Unit(number, one.name, place, own, self.shards, precision, tier))
        self.events = UnitEvents(self.units, self)
        for unit in self.units:
            for flat in unit.trained:
                for name in flat.layout.names:
                    self.events.watch(unit, flat, name, named[name])
        self.flats = [flat for unit in self.units for flat in unit.flats]
        self.trained = [flat for unit in self.units for flat in unit.trained]
        self.home = {name: flat for flat in self.flats for name in flat.layout.names}
        self.used: set[str] = set()
        self.computing = False  # whether a round of this rank's own is under way
        #: Reductions under way, and whether their round is the last.
        self.flying: list[tuple[Unit, list[Work], bool]] = []

    @property
    def root(self) -> Unit:
        """The unit that is the whole module."""
        return self.units[0]

    # ------------------------------------------------------------------------------------- calls

    def gather(self, unit: Unit) -> None:
        """Start to make ``unit`` whole, unless it is; all ranks call alike and in one order."""
        if unit.is_whole:
            return
        chunks = self.chunks if unit.is_chunked else None
        self.announce(GATHER if chunks is None else GATHER_CHUNKS, unit)
        unit.gather(chunks)

    def reduce(self, unit: Unit) -> None:
        """Start to reduce the gradients of ``unit``."""
        if unit.trained:
            self.announce(REDUCE, unit)
            self.start_reduction(unit)

    def announce(self, call: int, unit: Unit) -> None:
        """Tell idle ranks."""
        self.rounds.announce(1 + call * len(self.units) + unit.number)

    def start_reduction(self, unit: Unit) -> None:
        """One reduction at a time is under way, and the root's, which is the last of a round."""
        crosses = self.rounds.is_last and self.replicas is not None
        if crosses or unit is not self.root or any(unit is other for other, *_ in self.flying):
            self.land()
        unit.pack()
        for flat in unit.trained:
            self.used |= flat.filled
        works = unit.reduce()
        self.flying.append((unit, works, self.rounds.is_last))
        if crosses and (unit is self.root or not works):
            self.land()  # so that its way over the replicas begins in backward, too

    def land(self) -> None:
        """Wait for reductions under way; in the last round their shards go to the replicas."""
        for unit, works, last in self.flying:
            for work in works:
                work.wait()
            for flat in unit.trained:
                flat.land()
                if last:
                    self.cross(flat)
        self.flying.clear()

    def cross(self, flat: FlatShard) -> None:
        """Start to sum a shard over the replicas, if there are any."""
        if self.replicas is not None and self.replicas.size > 1:
            flat.cross(self.replicas)

    # ------------------------------------------------------------------------------------- a step

    def before_step(self, micro_batches: int) -> None:
        """Agree on the rounds."""
        self.rounds.begin(micro_batches)

    def accumulate(self, is_last: bool) -> None:
        """Every micro-batch is a round."""
        self.end_round()
        self.rounds.next()
        self.computing = True

    def end_round(self) -> None:
        """End the round under way, if there is one."""
        if self.computing:
            self.events.end_round()
            self.leave_round()
            self.rest()
            self.rounds.announce(END)
            self.computing = False

    def leave_round(self) -> None:
        """The last calls of a round of this rank's own."""

    def rest(self) -> None:
        """After a round: free whatever is whole."""
        for unit in self.units:
            unit.free()

    def idle_rounds(self) -> None:
        """Follow the others through the rounds in which this rank has no micro-batch."""
        self.end_round()
        while self.rounds.next():
            while call := self.rounds.hear():
                kind, number = divmod(call - 1, len(self.units))
                unit = self.units[number]
                if kind == REDUCE:
                    self.start_reduction(unit)
                else:
                    unit.gather(self.chunks if kind == GATHER_CHUNKS else None)
                    unit.free(self.chunks)
            self.rest()

    def finish(self) -> None:
        """Take part in what the others still have; agree on who used what."""
        self.idle_rounds()
        self.land()
        names = [name for flat in self.trained for name in flat.layout.names]
        used = self.rounds.largest([int(name in self.used) for name in names]) if names else []
        for flat in self.trained:
            if flat.total is not None and flat.crossing is None:
                self.cross(flat)  # its unit was not called in the last round
            flat.settle()
            flat.hand_over(dict(zip(names, map(bool, used), strict=True)))

    def after_step(self) -> None:
        """Clear gradients."""
        for flat in self.trained:
            flat.clear()
        self.used.clear()

    def evaluate(self, passes: Sequence[Callable[[], Tensor]]) -> list[Tensor]:
        """Forwards only; their number may differ between ranks here as well."""
        self.before_step(len(passes))
        losses = []
        for compute in passes:
            self.accumulate(is_last=False)
            losses.append(compute())
        self.idle_rounds()
        return losses

    def close(self) -> None:
        """Remove the hooks."""
        self.events.close()

    # ---------------------------------------------------------------------------------- the state

    def targets(self) -> Iterator[tuple[str, Tensor]]:
        """What the optimizer updates, in the order of the model's parameters."""
        for name in self.names:
            if name in self.home[name].targets:
                yield name, self.home[name].targets[name]

    def param_groups(self, spec: OptimizerSpec) -> list[dict[str, Any]]:
        """This rank's parts, under their parameters' names."""
        return param_groups(spec, dict(self.targets()))

    def norm_parts(self, order: float = 2.0) -> list[NormPart]:
        """One sum over this rank's shards; replicas hold the same and are not counted again."""
        total = torch.zeros((), dtype=torch.float64, device=self.rounds.device)
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
        """Number of this rank's copy of the shards."""
        return 0 if self.replicas is None else self.replicas.rank

    @property
    def coordinate(self) -> int:
        """Number of this rank among all of them."""
        if self.shards is None:
            return self.replica
        return self.replica * self.shards.size + self.shards.rank

    def pieces(self, kind: Kind) -> list[Piece]:
        """This rank's parts; buffers whole."""
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
        """A part like that of the parameter; a single number (Adam's step) whole."""
        full = f"{name}.{slot}" if slot else name
        if slot and tensor.dim() == 0:
            return Piece.whole(full, tensor, replica=self.coordinate)
        return self.home[name].parts[name].piece(tensor, full, self.replica)

    # ------------------------------------------------------------------------------- the schedule

    @abstractmethod
    def after_backward(self, unit: Unit) -> None:
        """Parameters are no longer needed; gradients are complete."""
