"""Experts folded over the data axes: ranks that have different tokens hold different experts.

Problem.  An axis of its own for experts multiplies the number of ranks, and every one of them then
needs samples of its own.  But ranks that cut samples (shard) or positions (context) have different
tokens already.  So the expert group of a rank is made of X such ranks, and no rank is added
(arXiv 2504.14960, section 3).  The rest of the model does not know of it.

    8 ranks of a replica     0 1 2 3 | 4 5 6 7      experts over X = 4
    shard                    0 0 1 1 | 2 2 3 3
    context                  0 1 0 1 | 0 1 0 1
    experts that it holds    a b c d | a b c d

    gradients of             are summed over        and held
    experts                  0 4, 1 5, 2 6, 3 7     by these ranks and replicas: copies, or shards
    all the rest             all 8                  as the data axes' strategy has it

    forward, backward   rows travel within an expert group: exchange.py of reference/expert
    before_step         all data ranks must have as many micro-batches: a rank computes for others
    finish              the rest along its axes; experts along the ranks that hold the same

An expert has seen the tokens of its group when backward ends; its gradient lacks those of other
groups only.  The seam is again the module with the role ``expert``.  Its parameters are hidden from
the strategy of the rest, and given to their own as a model that consists of nothing else.  That one
makes them whole at most once a step, so its calls lie outside of forward and backward.

Cost: as reference/expert, T being tokens-times-choices that leave their rank: 4 T d bytes a layer,
6 T d with recomputation, on each tensor rank; the strategy of experts on E/X of them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn

from shardproof.axes import cutting, joined, summing
from shardproof.comm import Comm, Mesh
from shardproof.contract import Kind, OptimizerSpec, Piece, Refused
from shardproof.impls.reference import ddp, fsdp
from shardproof.impls.reference.engine.handle import Comms, Handle, T
from shardproof.impls.reference.engine.norm import NormPart
from shardproof.impls.reference.engine.options import at_least
from shardproof.impls.reference.engine.state import broadcast_tensors
from shardproof.impls.reference.expert.exchange import Exchange
from shardproof.impls.reference.units import step_shards

AXIS = cutting("experts")
#: Why all data ranks need equal numbers of micro-batches.
TOGETHER = (
    "the ranks of an expert group process each other's tokens, so all need the same number of "
    "micro-batches"
)


@dataclass(frozen=True)
class Choices:
    """``ranks``: how many neighbours along the axes shard and context share out the experts.

    ``data``: what ranks with the same experts hold of them, copies (``ddp``) or shards (``fsdp``).
    """

    ranks: int = 1
    data: Literal["ddp", "fsdp"] = "ddp"

    def __post_init__(self) -> None:
        at_least("experts.ranks", self.ranks, 1)


class Fold:
    """The groups of this rank: ``across`` the experts, and ``alike``, who hold the same ones."""

    def __init__(self, mesh: Mesh, choices: Choices) -> None:
        self.choices = choices
        along = summing(mesh.axes)
        #: All ranks with tokens of their own.
        self.everyone = mesh.comm(*along)
        ranks, of_replica = choices.ranks, mesh.size(*folded(mesh))
        across = [
            line[start : start + ranks]
            for line in self.lines(mesh, along, of_replica)
            for start in range(0, of_replica, ranks)
        ]
        # Copies form one group over replicas; shards lie within one replica each.
        reach = mesh.size(*along) if choices.data == "ddp" else of_replica
        alike = [
            line[place::ranks] for line in self.lines(mesh, along, reach) for place in range(ranks)
        ]
        self.across = self.mine(mesh, across, AXIS)
        #: The axes that experts have of their own, on which ledgers count.
        own = {"replicate": mesh.size("replicate"), "shard": of_replica // ranks}
        if choices.data == "ddp":
            self.comms: Comms = {"replicate": self.mine(mesh, alike, joined(own, own))}
        else:
            # Between replicas shards are summed, as those of the rest are.
            more = {"replicate": mesh.comm("replicate")} if "replicate" in mesh.axes else {}
            self.comms = {"shard": self.mine(mesh, alike, "shard"), **more}

    @staticmethod
    def lines(mesh: Mesh, along: Sequence[str], length: int) -> list[list[int]]:
        """Global ranks along the axes ``along``, the last one innermost, ``length`` at a time."""
        names = list(mesh.axes)
        order = [names.index(name) for name in (*(n for n in names if n not in along), *along)]
        found: list[list[int]] = mesh.grid.transpose(order).reshape(-1, length).tolist()
        return found

    @staticmethod
    def mine(mesh: Mesh, groups: Sequence[Sequence[int]], axis: str) -> Comm:
        """The group of this rank; every rank of the mesh makes all of them, in one order."""
        made = [mesh.subgroup(group, axis) for group in groups]
        return next(group for group in made if group.contains(mesh.rank))


def folded(mesh: Mesh) -> tuple[str, ...]:
    """The axes that expert groups are made of: those of the data but for replicas."""
    return tuple(axis for axis in summing(mesh.axes) if axis != "replicate")


class Folded(Handle):
    """A module whose ``experts`` (name -> module) are divided by ``fold``; ``wrap`` puts the rest
    under its strategy.
    """

    exchange_type: type[Exchange] = Exchange

    def __init__(
        self,
        module: nn.Module,
        experts: Mapping[str, nn.Module],
        fold: Fold,
        wrap: Callable[[nn.Module], Handle],
        repeats: bool,
    ) -> None:
        self.module, self.fold = module, fold
        named = {
            f"{name}.{leaf}": parameter
            for name, part in experts.items()
            for leaf, parameter in part.named_parameters()
        }
        # Before anything is cut: from here on ranks differ.
        broadcast_tensors([parameter.data for parameter in named.values()], fold.everyone)
        #: Name of a parameter -> the experts of this rank, and how many there are.
        self.cuts: dict[str, tuple[slice, int]] = {}
        self.exchanges = [self.cut(name, part, repeats) for name, part in experts.items()]
        self.rest = self.without(experts.values(), partial(wrap, module))
        self.own = self.divided(held_by_name(named))

    def cut(self, name: str, experts: nn.Module, repeats: bool) -> Exchange:
        """Keep this rank's experts, and let rows travel to the others'."""
        total, across = len(next(experts.parameters())), self.fold.across
        if total % across.size:
            fits = ", ".join(str(n) for n in range(1, total + 1) if total % n == 0)
            raise Refused(
                f"option 'experts.ranks' = {across.size}: {name!r} has {total} experts, which "
                f"cannot be divided among {across.size} ranks; valid: {fits}"
            )
        exchange = self.exchange_type(name, experts, total, across, repeats)
        for leaf, parameter in experts.named_parameters():
            self.cuts[f"{name}.{leaf}"] = exchange.own, total
            parameter.data = parameter.data[exchange.own].clone()
        return exchange

    @staticmethod
    def without(experts: Any, make: Callable[[], Handle]) -> Handle:
        """The handle that ``make`` returns while no module has the parameters of ``experts``."""
        taken = [(part, dict(part._parameters)) for part in experts]
        for part, _ in taken:
            part._parameters.clear()
        handle = make()
        for part, parameters in taken:
            part._parameters.update(parameters)
        return handle

    def divided(self, module: nn.Module) -> Handle:
        """This rank's experts under their own strategy."""
        if self.fold.choices.data == "fsdp":
            return step_shards.apply(module, self.fold.comms, fsdp.Options())
        return ddp.apply(module, self.fold.comms, ddp.Options(broadcast_buffers=False))

    def both(self) -> tuple[Handle, Handle]:
        """The handles of the rest and of the experts."""
        return self.rest, self.own

    # -------------------------------------------------------------------------------------- a step

    def begin_step(self, step: int) -> None:
        """Call both handles."""
        super().begin_step(step)
        for handle in self.both():
            handle.begin_step(step)

    def before_step(self, micro_batches: int) -> None:
        """Prepare both handles.

        :raises Refused: ranks have different numbers of micro-batches.
        """
        most, least = self.fold.everyone.agree([micro_batches, -micro_batches], "max")
        if most != -least:
            raise Refused(
                f"option 'experts': {TOGETHER}, but some ranks have {-least} and others {most}; "
                "give all data-parallel ranks the same number, or set experts.ranks to 1"
            )
        for handle in self.both():
            handle.before_step(micro_batches)

    def accumulate(self, is_last: bool) -> None:
        """Call both handles."""
        for handle in self.both():
            handle.accumulate(is_last)

    def backward_ended(self) -> None:
        """Call both handles."""
        for handle in self.both():
            handle.backward_ended()

    def sit_out(self) -> None:
        """Call both handles."""
        for handle in self.both():
            handle.sit_out()

    def finish(self) -> None:
        """Complete the gradients of the rest, then those of experts."""
        # Of forwards that no backward reached, such as those of a step in which the head learns.
        for exchange in self.exchanges:
            exchange.plans.clear()
        for handle in self.both():
            handle.finish()

    @torch.no_grad()
    def scale_gradients(self, factor: Tensor) -> None:
        """Call both handles."""
        for handle in self.both():
            handle.scale_gradients(factor)

    def after_update(self) -> None:
        """Call both handles."""
        for handle in self.both():
            handle.after_update()

    def after_step(self) -> None:
        """Call both handles."""
        for handle in self.both():
            handle.after_step()

    def evaluate(self, passes: Sequence[Callable[[], T]]) -> list[T]:
        """Run ``passes`` while both handles have what these need."""
        [results] = self.own.evaluate([partial(self.rest.evaluate, passes)])
        return results

    def norm_parts(self, order: float = 2.0) -> list[NormPart]:
        """The sums of both handles; those of experts once for each place in the group."""
        own = [(value, (AXIS, *axes)) for value, axes in self.own.norm_parts(order)]
        return [*self.rest.norm_parts(order), *own]

    # ----------------------------------------------------------------------------------- the state

    def param_groups(self, spec: OptimizerSpec) -> list[dict[str, Any]]:
        """The groups of both handles."""
        return [group for handle in self.both() for group in handle.param_groups(spec)]

    def pieces(self, kind: Kind) -> list[Piece]:
        """The pieces of the rest, and parts of whole stacks of experts."""
        rest = [piece for piece in self.rest.pieces(kind) if piece.name not in self.cuts]
        return [*rest, *(self.placed(piece.name, piece) for piece in self.own.pieces(kind))]

    def place(self, name: str, slot: str, tensor: Tensor) -> Piece | list[Piece]:
        """As the parameter."""
        if name not in self.cuts:
            return self.rest.place(name, slot, tensor)
        piece = self.own.place(name, slot, tensor)
        assert isinstance(piece, Piece)
        return self.placed(name, piece)

    def placed(self, name: str, piece: Piece) -> Piece:
        """``piece``, a part of this rank's experts of parameter ``name``, in the whole stack."""
        across, (own, total) = self.fold.across, self.cuts[name]
        # Adam's step: a number of each rank's own, which has no place among experts.
        if not piece.global_shape:
            return replace(piece, replica=piece.replica * across.size + across.rank)
        inner = piece.global_shape[1:]
        slices, flat = piece.slices, piece.flat_range
        if slices is not None:
            start, stop = slices[0]
            slices = ((start + own.start, stop + own.start), *slices[1:])
        if flat is not None:
            before = own.start * math.prod(inner)
            flat = flat[0] + before, flat[1] + before
        return replace(piece, global_shape=(total, *inner), slices=slices, flat_range=flat)

    def reduced(self) -> list[str]:
        """The names of both handles."""
        rest = [name for name in self.rest.reduced() if name not in self.cuts]
        return [*rest, *self.own.reduced()]

    def loaded(self) -> None:
        """Call both handles."""
        for handle in self.both():
            handle.loaded()

    def drain(self) -> None:
        """Call both handles."""
        for handle in self.both():
            handle.drain()

    def close(self) -> None:
        """Close both handles, and restore the forwards of the experts."""
        for handle in self.both():
            handle.close()
        for exchange in self.exchanges:
            exchange.close()


def held_by_name(named: Mapping[str, nn.Parameter]) -> nn.Module:
    """A module that has the parameters ``named``, under these names, and nothing else."""
    root = nn.Module()
    for name, parameter in named.items():
        *path, leaf = name.split(".")
        owner = root
        for step in path:
            if step not in owner._modules:
                owner.add_module(step, nn.Module())
            owner = owner.get_submodule(step)
        owner.register_parameter(leaf, parameter)
    return root
