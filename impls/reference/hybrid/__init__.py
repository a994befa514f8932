"""Hybrid parallelism: split layers and samples, in stages of a pipeline, replicated and sharded.

Problem.  No way of splitting scales for ever: tensor parallelism needs a fast network, pipelines
need many micro-batches, data parallelism a large batch.  Together they train what none of them
could alone.  Each takes one axis of a mesh; tensor ranks are neighbours, so theirs is innermost:

    pipe x replicate x shard x context x tensor

    rank = (((pipe R + replicate) F + shard) C + context) T + tensor

Nothing new is computed here.  Layers are split over the tensor axis (``tensor/``), and positions
over the axis ``context`` (``context/``); what is left of the model on a rank is cut into stages
(``pipeline/``); and each stage is given to a data-parallel strategy (``DATA`` in options.py) as if
it were a model of its own.  To that strategy context ranks are data ranks: shards lie on shard x
context, copies on replicate, or on all of them where nothing is sharded.  Experts may be divided
over ranks of shard x context, too: they are folded over these axes (``experts.py``).

    what                                where
    parameters, gradients, optimizer    of the stage, the tensor axis' part, of which the data axes
      state                             hold copies or shards as their strategy has it
    experts                             divided over neighbours on shard x context, by option
    tied tensors                        as a unit of their own on every rank that uses them
    buffers                             every rank of the stage its own, or rank 0's of the replicas
    micro-batches                       all ranks of a data coordinate have the same, of which each
                                        context rank computes its own positions

    step     windows   one schedule each; in every layer the messages of the tensor axis, and in
                       attention those of the context axis
             finish    data axes: what the last backwards have not reduced; sums of tied tensors are
                       exchanged between stages, then reduced over the data axes
             clip      the norm: every element once, added over all axes
             update    each rank what it holds

With stages in a pipeline ``zero3`` and ``fsdp`` gather a stage when a step begins and free it when
it ends (units/step_shards.py); without one they work unit by unit, as they do alone.

Cost: for each stage that of the data-parallel strategy on what the stage has of a tensor rank;
that of ``tensor`` on every data coordinate; that of ``pipeline`` on every tensor rank, under
sequence parallelism 1/T of it; those of ``tensor`` and ``pipeline`` on each context rank's
positions; that of ``context`` on every tensor rank's heads.  Where B and W come apart, sequence
parallelism gathers the gradient of each row-parallel layer's output for both.  (Narayanan et al.,
arXiv 2104.04473, section 3.)
Numbers: equal to one device's up to the order of summation.  Rings, and gloo, add in an order that
depends on the place in a buffer: over more than two data ranks what tensor ranks hold alike differs
in its last bit, unless their buffers are of one size (a vocabulary that divides).
Left out: experts next to sequence parallelism, unequal numbers of micro-batches, schedules that run
W later than B, mixed precision and offload; gathering shards again for every micro-batch of a
stage.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from shardproof.axes import EXPERT, replicated, sharded, summing
from shardproof.comm import Mesh
from shardproof.contract import (
    Batch,
    Build,
    Capabilities,
    Kind,
    MicroBatch,
    OptimizerSpec,
    Piece,
    Refused,
)
from shardproof.impls.reference import context, tensor, zero2
from shardproof.impls.reference.engine.choices import FORMATS, declared, lossy
from shardproof.impls.reference.engine.engine import Engine
from shardproof.impls.reference.engine.handle import Context, Handle, Local
from shardproof.impls.reference.engine.norm import power_sum, total_norm
from shardproof.impls.reference.engine.options import parse_options
from shardproof.impls.reference.engine.recompute import Group
from shardproof.impls.reference.engine.state import gather_over, put
from shardproof.impls.reference.hybrid.experts import TOGETHER, Fold, Folded
from shardproof.impls.reference.hybrid.options import DATA, IN_TURN, Options, check
from shardproof.impls.reference.pipeline import ReferencePipeline
from shardproof.impls.reference.tensor.cuts import Uncut
from shardproof.schedules import Schedule


class ReferenceHybrid(ReferencePipeline):
    """The strategies as one system under test."""

    strategy = "hybrid"
    depth = "layout"
    options: Options
    options_type = Options
    parallel_type: type[context.ContextParallel] = context.ContextParallel
    fold_type: type[Fold] = Fold
    folded_type: type[Folded] = Folded

    @classmethod
    def capabilities(cls, options: Mapping[str, Any]) -> Capabilities:
        """The capabilities that the ``hybrid`` profile requires on any of the axes."""
        chosen = parse_options(Options, options)
        inner = chosen.strategy_options
        layers = tensor.ReferenceTensor.capabilities(
            {"sequence_parallel": chosen.sequence_parallel}
        )
        from_rank0 = chosen.data == "ddp" and inner.broadcast_buffers
        wrap_declines = getattr(getattr(inner, "wrap", None), "declines", {})
        turns = {"unequal_micro_batches": IN_TURN} if chosen.rounds_take_turns else {}
        if chosen.experts is not None:
            turns = {"unequal_micro_batches": TOGETHER}
        positions = context.DECLINES if chosen.context else {}
        exact = declared(
            "stages",
            "tensor",
            axes=("pipe", "replicate", "shard", "context", "tensor"),
            buffers="rank0" if from_rank0 else "per_rank",
            declines={**layers.declines, **wrap_declines, **turns, **positions},
            checkpoints=FORMATS,
        )
        # A schedule runs backwards before the last forward.
        return replace(lossy(exact, inner), scopes=())

    @classmethod
    def schedule(  # type: ignore[override]  # without stages there is none
        cls, options: Mapping[str, Any], ranks: int, micro_batches: int
    ) -> Schedule | None:
        """The schedule of one window, if there are stages."""
        return super().schedule(options, ranks, micro_batches) if ranks > 1 else None

    def setup(
        self,
        build: Build,
        state: Mapping[str, Tensor] | None,
        optimizer: OptimizerSpec,
        mesh: Mesh,
        options: Mapping[str, Any],
    ) -> None:
        """Set up as a pipeline if there is an axis for stages, else as a plain strategy."""
        self.options = parse_options(Options, options)
        self.is_cut = mesh.size("pipe") > 1
        check(self.options, mesh)
        if self.is_cut:
            super().setup(build, state, optimizer, mesh, options)
        else:
            Engine.setup(self, build, state, optimizer, mesh, options)

    @classmethod
    def summing(cls, options: Mapping[str, Any]) -> Any:
        """The options of the data axes; the other axes sum activations with the backend's
        collectives.
        """
        return parse_options(Options, options).strategy_options

    def recompute(self, module: nn.Module, options: Mapping[str, Any]) -> list[Group]:
        """Groups of units, of one stage each."""
        if self.is_cut:
            return super().recompute(module, options)
        return Engine.recompute(self, module, options)

    def transform(self, module: nn.Module, mesh: Mesh, options: Mapping[str, Any]) -> Handle:
        """Split the layers, cut the result into stages, and apply the data strategy to the
        stages.
        """
        self.layers: tensor.TensorParallel | None = None
        # First: the other axes then see a smaller model, and need not know that it was split.
        if "tensor" in mesh.axes:
            chosen = self.options.on_layers.resolved(self.build)
            given = Context(roles=self.build.roles)
            self.layers = tensor.apply(module, {"tensor": mesh.comm("tensor")}, chosen, given)
        self.positions: context.ContextParallel | None = None
        if mesh.size("context") > 1:
            assert self.options.context is not None
            along = mesh.comm("context")
            self.positions = self.parallel_type(
                module, along, self.options.context, self.build.roles
            )
        self.fold = self.make_fold(mesh)
        if not self.is_cut:
            return self.wrap(module)
        stages = super().transform(module, mesh, options)
        if self.positions is not None:
            self.executor.begin = self.positions.begin  # type: ignore[method-assign]
            self.positions.keep(stages.module)
        # The layers of other stages would keep these in memory.
        if self.layers is not None:
            self.layers.keep(stages.module)
        return stages

    def make_fold(self, mesh: Mesh) -> Fold | None:
        """The groups that divide experts; all ranks make them, whatever their stages hold."""
        if self.options.experts is None:
            return None
        if EXPERT not in self.build.roles.values():
            raise Refused("option 'experts': the model has no experts; leave the option out")
        return self.fold_type(mesh, self.options.experts)

    def wrap(self, module: nn.Module) -> Handle:
        """Apply the data axes to ``module``: a stage, a tied tensor or the whole model."""
        roles = self.build.roles
        held = {n: part for n, part in module.named_modules() if roles.get(n) == EXPERT}
        if self.fold is None or not held:
            return self.wrap_rest(module)
        return self.folded_type(module, held, self.fold, self.wrap_rest, bool(self.groups))

    def wrap_rest(self, module: nn.Module) -> Handle:
        """Apply the strategy of the data axes to all of ``module`` but divided experts."""
        axes = summing(self.mesh.axes)
        if not axes:
            return Local(module)
        chosen = DATA[self.options.data]
        along = {"shard": sharded(axes), "replicate": replicated(axes)}
        if chosen.joined:
            along = {"replicate": axes}
        comms = {axis: self.mesh.comm(*names) for axis, names in along.items() if names}
        apply = chosen.apply_to_stage if self.is_cut else chosen.apply
        return apply(module, comms, self.options.strategy_options, self.context(self.options))

    def backward(self, batch: Batch) -> Tensor | None:
        """Run one schedule per window, or the micro-batches one by one.

        :raises Refused: the data coordinates have different numbers of micro-batches, and may not.
        """
        if self.is_cut and self.options.rounds_take_turns and summing(self.mesh.axes):
            own, handles = len(batch.micro_batches), self.handle.handles()  # type: ignore[attr-defined]
            rest = [getattr(handle, "rest", handle) for handle, _ in handles]
            if own < (most := max(h.rounds for h in rest if isinstance(h, zero2.Zero2))):
                raise Refused(
                    f"option 'schedule' with 'data' = 'zero2': {IN_TURN}, but one data-parallel "
                    f"rank has {own} micro-batches and another has {most}; give all data-parallel "
                    "ranks the same number, or set data to 'zero1'"
                )
        return super().backward(batch) if self.is_cut else Engine.backward(self, batch)

    def evaluate(self, batch: Batch) -> Tensor | None:
        """Evaluate through the stages, or the whole model."""
        return super().evaluate(batch) if self.is_cut else Engine.evaluate(self, batch)

    def loss(self, micro: MicroBatch) -> Tensor:
        """The loss of this rank's positions of one micro-batch."""
        if self.positions is not None:
            self.positions.begin(micro)
        return super().loss(micro)

    def loss_of(self, outputs: Tensor, micro: MicroBatch) -> Tensor:
        """The loss of outputs that may be split over the tensor axis."""
        if self.positions is not None:
            micro = self.positions.cut(micro)
        if self.layers is None:
            return super().loss_of(outputs, micro)
        return self.layers.loss(self.build, self.precision.cast_outputs(outputs), micro)

    def norm(self) -> Tensor:
        """The norm of first copies over all axes, so every element counts once."""
        # From pieces, which know their copies: each strategy's own sum would count what ranks of
        # another axis hold as well.
        held = self.local_state("gradients")
        own = [power_sum(piece.tensor, 2.0) for piece in held if piece.replica == 0]
        nothing = torch.zeros((), dtype=torch.float64, device=self.mesh.device)
        axes = tuple(axis for axis, ranks in self.mesh.axes.items() if ranks > 1)
        return total_norm([(sum(own, start=nothing), axes)], self.mesh.comm)

    def held_pieces(self, kind: Kind) -> list[Piece]:
        """The data axes' pieces of a tensor rank's stage, placed in the whole model."""
        held = super().held_pieces(kind)
        return [piece for local in held for piece in self.placed(local, kind)]

    def placed(self, piece: Piece, kind: Kind) -> list[Piece]:
        """Pieces of whole tensors from a piece of a local one."""
        if self.layers is None:
            return [piece]
        is_slot = kind in ("optimizer", "extra")
        name = piece.name.rpartition(".")[0] if is_slot else piece.name
        cut = self.layers.cuts.get(name)
        # A buffer or a step counter: no rule splits it, all tensor ranks have it.
        if cut is None or piece.tensor.dim() == 0:
            cut = Uncut(piece.global_shape, self.layers.comm.rank, self.layers.comm.size)
        return cut.place(piece)

    def full_state(self, kind: Kind) -> dict[str, Tensor]:
        """Whole tensors, gathered over one axis after another."""
        first = [piece for piece in self.local_state(kind) if piece.replica == 0]
        whole: dict[str, Tensor] = {}
        for piece in gather_over(first, [self.mesh.comm(axis) for axis in self.mesh.axes]):
            put(piece, whole)
        return whole

    def close(self) -> None:
        """Remove all hooks and restore all forwards."""
        super().close()
        if self.positions is not None:
            self.positions.close()
        if self.layers is not None:
            self.layers.close()


IMPLEMENTATION = ReferenceHybrid
