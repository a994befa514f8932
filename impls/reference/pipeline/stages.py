"""The stages of a pipeline: the cuts of the model, and this rank's stages as one handle.

    what                            where
    a stage's parameters, buffers,  the rank of the stage
      gradients, optimizer state
    a tensor tied over stages       every rank that uses it, a copy each

A stage goes to the strategy of the data axes as a module of its own (``wrap``), and so does each
tied tensor.  Stages compute with a stand-in for the tied tensor: the same memory, but a gradient of
its own, the sum over this rank's uses.  After the last window the ranks exchange these sums, and
all add them in the order of stages.  Only then does the tensor itself get its gradient, by a
backward of one node: so its hooks run, and the data axes reduce it like any other.

Numbers: copies of a tied tensor get the same bits; its gradient is the sum of one sum for each
rank, where one process adds micro-batch by micro-batch.
Left out: ends that are tied by calling one module's weights from another stage's module.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from shardproof.comm import Comm, Recv, Send
from shardproof.contract import Build, Kind, OptimizerSpec, Piece, Refused
from shardproof.impls.reference.engine.handle import Handle, T
from shardproof.impls.reference.engine.norm import NormPart
from shardproof.impls.reference.parts.reducers import parameter_of
from shardproof.impls.reference.pipeline.schedule_option import ScheduleOption
from shardproof.impls.reference.pipeline.split_backward import SplitBackward

Wrap = Callable[[nn.Module], Handle]


def cut(units: int, stages: int, split: Sequence[int] = ()) -> list[tuple[int, int]]:
    """First unit and end of each stage: ``split`` units each, or as even as possible.

    Raises :class:`Refused` where that leaves a stage without a unit, or units without a stage.
    """
    if stages > units:
        raise Refused(
            f"the pipeline has {stages} stages, but the model has only {units} units; each stage "
            "needs at least 1 unit: use fewer ranks on the axis 'pipe' or fewer chunks per rank"
        )
    small, larger = divmod(units, stages)
    sizes = list(split) or [small + 1] * larger + [small] * (stages - larger)
    if len(sizes) != stages or sum(sizes) != units or min(sizes) < 1:
        raise Refused(
            f"option 'split' = {sizes}: there are {stages} stages and {units} units; give "
            f"{stages} numbers of at least 1 that add up to {units}"
        )
    ends = [sum(sizes[: stage + 1]) for stage in range(stages)]
    return [(end - size, end) for end, size in zip(ends, sizes, strict=True)]


@dataclass
class Stage:
    """A stage on this rank; ``split`` exists if its backward may come in two parts."""

    module: nn.Module
    handle: Handle
    split: SplitBackward | None


@dataclass
class Copies:
    """For a tensor on several ranks of the pipe axis: the number of this rank's copy."""

    number: int = 0
    count: int = 1

    def renumbered(self, piece: Piece) -> Piece:
        """``piece`` with the number of this copy, which its handle does not know."""
        return replace(piece, replica=piece.replica * self.count + self.number)


@dataclass
class Tied:
    """A tensor that several stages use; ``ranks`` hold it, in the order of their first stage."""

    name: str
    ranks: list[int]
    tensor: nn.Parameter
    stand_in: nn.Parameter
    handle: Handle
    copies: Copies


class Stages(Handle):
    """This rank's stages of ``whole``, cut at ``bounds`` and assigned to ranks by ``place``."""

    split_type: type[SplitBackward] = SplitBackward

    def __init__(
        self,
        whole: nn.Module,
        build: Build,
        bounds: Sequence[tuple[int, int]],
        place: Sequence[int],
        comm: Comm,
        wrap: Wrap,
        schedule: ScheduleOption,
    ) -> None:
        self.comm = comm
        self.computed = False  # whether there are micro-batches in this step
        parts = [build.stage(whole, start, stop) for start, stop in bounds]
        mine = [stage for stage, rank in enumerate(place) if rank == comm.rank]
        shared = _tied(whole, parts)
        names = {id(p): name for name, p in whole.named_parameters()}  # before some are hidden
        self.hidden: list[tuple[nn.Module, str, nn.Parameter]] = []
        stand_ins = {
            key: nn.Parameter(p.detach(), requires_grad=p.requires_grad)
            for key, (p, _) in shared.items()
        }
        # Before the stages are wrapped: a tied tensor must not belong to two of them.
        for stage in mine:
            self._hide(parts[stage], stand_ins)
        self.stages = {
            stage: Stage(
                parts[stage],
                wrap(parts[stage]),
                self.split_type(parts[stage]) if schedule.splits else None,
            )
            for stage in mine
        }
        self.ends = schedule.ends(comm.rank, mine)
        self.tied: list[Tied] = []
        for key, (tensor, stages) in shared.items():
            ranks = list(dict.fromkeys(place[stage] for stage in stages))
            if comm.rank in ranks:
                self._hold(names[key], ranks, tensor, stand_ins[key], wrap)
        self.module = nn.ModuleList([handle.module for handle, _ in self.handles()])
        self.owners = {
            name: (handle, copies)
            for handle, copies in self.handles()
            for name, _ in handle.module.named_parameters()
        }

    def _hide(self, part: nn.Module, stand_ins: dict[int, nn.Parameter]) -> None:
        """Let ``part`` compute with stand-ins of tied tensors, which are not its parameters."""
        for owner in part.modules():
            for name, parameter in list(owner._parameters.items()):
                if parameter is not None and id(parameter) in stand_ins:
                    del owner._parameters[name]
                    vars(owner)[name] = stand_ins[id(parameter)]
                    self.hidden.append((owner, name, parameter))

    def _hold(
        self, name: str, ranks: list[int], tensor: nn.Parameter, stand_in: nn.Parameter, wrap: Wrap
    ) -> None:
        """Give ``tensor`` to the data axes as a separate module under its own name."""
        *path, leaf = name.split(".")
        holder = root = nn.Module()
        for step in path:
            holder.add_module(step, nn.Module())
            holder = holder.get_submodule(step)
        holder.register_parameter(leaf, tensor)
        handle = wrap(root)
        # Only now: the strategy may have moved the tensor into a bucket.
        stand_in.data = tensor.data
        copies = Copies(ranks.index(self.comm.rank), len(ranks))
        self.tied.append(Tied(name, ranks, tensor, stand_in, handle, copies))

    def handles(self) -> Iterator[tuple[Handle, Copies]]:
        """The handles of this rank's stages and tied tensors."""
        for stage in self.stages.values():
            yield stage.handle, Copies()
        for tied in self.tied:
            yield tied.handle, tied.copies

    # -------------------------------------------------------------------------------------- a step

    def begin_step(self, step: int) -> None:
        """Call every handle."""
        super().begin_step(step)
        for handle, _ in self.handles():
            handle.begin_step(step)

    def before_step(self, micro_batches: int) -> None:
        """Prepare every handle: stages run all micro-batches, a tied tensor has one backward."""
        self.computed = micro_batches > 0
        for stage in self.stages.values():
            stage.handle.before_step(micro_batches)
        for tied in self.tied:
            # Its one backward is that of the whole sum, after the last window.
            tied.handle.before_step(min(micro_batches, 1))

    def finish(self) -> None:
        """Finish gradients of the stages in the order of their backwards, then of tied tensors."""
        # A rank without micro-batches calls what others called as backward ended there.
        for stage in () if self.computed else self.ends:
            self.stages[stage].handle.sit_out()
        for stage in self.ends:
            self.stages[stage].handle.finish()
        for tied in self.tied:
            self.sum_tied(tied)
            tied.handle.finish()

    def sum_tied(self, tied: Tied) -> None:
        """Sum this rank's uses of a tied tensor with the other ranks' and run the backward of the
        sum.

        No backward if no rank has used it.  Ranks without micro-batches exchange nothing; the
        others know, for they share a data coordinate and have none either.
        """
        own, tied.stand_in.grad = tied.stand_in.grad, None
        if not self.computed or not tied.tensor.requires_grad:
            return
        mine = torch.zeros_like(tied.tensor) if own is None else own.contiguous()
        use = torch.tensor([own is not None], dtype=torch.int32, device=self.comm.device)
        others = [rank for rank in tied.ranks if rank != self.comm.rank]
        parts = {rank: torch.empty_like(mine) for rank in others} | {self.comm.rank: mine}
        uses = {rank: torch.empty_like(use) for rank in others} | {self.comm.rank: use}
        operations: list[Send | Recv] = []
        for rank in others:
            operations += [Send(use, rank), Send(mine, rank)]
            operations += [Recv(uses[rank], rank), Recv(parts[rank], rank)]
        for work in self.comm.batch(operations):
            work.wait()
        # From zero and in the order of ranks, on every rank alike: copies keep the same bits.
        if any(bool(used) for used in uses.values()):
            total = torch.zeros_like(mine)
            for rank in tied.ranks:
                total += parts[rank]
            tied.handle.accumulate(is_last=True)
            torch.autograd.backward(tied.tensor, total)

    def after_update(self) -> None:
        """Call every handle."""
        for handle, _ in self.handles():
            handle.after_update()

    def after_step(self) -> None:
        """Call every handle."""
        for handle, _ in self.handles():
            handle.after_step()

    def evaluate(self, passes: Sequence[Callable[[], T]]) -> list[T]:
        """Run all ``passes`` inside every handle's evaluation."""
        run = partial(super().evaluate, passes)
        # One inside of the other: every handle makes its module whole around all of the passes.
        for handle, _ in self.handles():
            run = partial(_within, handle, run)
        return run()

    def drain(self) -> None:
        """Call every handle."""
        for handle, _ in self.handles():
            handle.drain()

    @torch.no_grad()
    def scale_gradients(self, factor: Tensor) -> None:
        """Call every handle."""
        for handle, _ in self.handles():
            handle.scale_gradients(factor)

    def norm_parts(self, order: float = 2.0) -> list[NormPart]:
        """One sum per set of axes, to be summed over the pipe axis as well.

        Of tied tensors the first copy counts; every rank has a sum, were it of nothing.
        """
        sums: dict[tuple[str, ...], Tensor] = {}
        for handle, copies in self.handles():
            for value, inner in handle.norm_parts(order):
                axes = (self.comm.axis, *inner)
                # Zero, not left out: all ranks must have the same sums to add.
                own = value if copies.number == 0 else torch.zeros_like(value)
                sums[axes] = sums[axes] + own if axes in sums else own
        nothing = torch.zeros((), dtype=torch.float64, device=self.comm.device)
        return [(value, axes) for axes, value in sums.items()] or [(nothing, (self.comm.axis,))]

    # ----------------------------------------------------------------------------------- the state

    def param_groups(self, spec: OptimizerSpec) -> list[dict[str, Any]]:
        """The groups of all handles."""
        return [group for handle, _ in self.handles() for group in handle.param_groups(spec)]

    def pieces(self, kind: Kind) -> list[Piece]:
        """The pieces of all handles."""
        held = ((copies, handle.pieces(kind)) for handle, copies in self.handles())
        return [copies.renumbered(piece) for copies, pieces in held for piece in pieces]

    def place(self, name: str, slot: str, tensor: Tensor) -> list[Piece]:
        """The place given by the parameter's handle."""
        handle, copies = self.owners[name]
        placed = handle.place(name, slot, tensor)
        return [copies.renumbered(p) for p in ([placed] if isinstance(placed, Piece) else placed)]

    def reduced(self) -> list[str]:
        """The names of all handles."""
        return [name for handle, _ in self.handles() for name in handle.reduced()]

    def numbered(self, piece: Piece) -> Piece:
        """The piece with its copy number; several ranks hold the same tied tensor."""
        return self.owners[parameter_of(piece.name)][1].renumbered(piece)

    def loaded(self) -> None:
        """Call every handle."""
        for handle, _ in self.handles():
            handle.loaded()

    def close(self) -> None:
        """Close every handle; modules get their forwards and parameters back."""
        for handle, _ in self.handles():
            handle.close()
        for stage in self.stages.values():
            if stage.split is not None:
                stage.split.close()
        for owner, name, parameter in self.hidden:
            vars(owner).pop(name)
            owner.register_parameter(name, parameter)
        self.hidden.clear()


def _within(handle: Handle, run: Callable[[], T]) -> T:
    [result] = handle.evaluate([run])
    return result


def _tied(
    whole: nn.Module, parts: Sequence[nn.Module]
) -> dict[int, tuple[nn.Parameter, list[int]]]:
    """Parameters that several of ``parts`` use (or one under another name), and which parts."""
    names = {id(p): name for name, p in whole.named_parameters()}
    uses: dict[int, list[int]] = {}
    renamed: set[int] = set()
    for stage, part in enumerate(parts):
        for name, parameter in part.named_parameters():
            uses.setdefault(id(parameter), []).append(stage)
            if names[id(parameter)] != name:
                renamed.add(id(parameter))
    by_id = {id(p): p for p in whole.parameters()}
    return {
        key: (by_id[key], stages)
        for key, stages in uses.items()
        if len(stages) > 1 or key in renamed
    }
