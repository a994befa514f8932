"""Hybrid parallelism: tensor parallel layers, in stages of a pipeline, replicated and sharded.

Problem.  No way of splitting scales for ever: tensor parallelism needs a fast network, pipelines
need many micro-batches, data parallelism a large batch.  Together they train what none of them
could alone.  Each takes one axis of a mesh; tensor ranks are neighbours, so theirs is innermost:

    pipe x replicate x shard x tensor          rank = ((pipe R + replicate) F + shard) T + tensor

Nothing new is computed here.  Layers are split over the tensor axis (``tensor/``); what is left of
the model on a rank is cut into stages (``pipeline/``); and each stage is given to a data-parallel
strategy (:data:`DATA`) as if it were a model of its own.

    what                                where
    parameters, gradients, optimizer    of the stage, the tensor axis' part, of which the data axes
      state                             hold copies or shards as their strategy has it
    tied tensors                        as a unit of their own on every rank that uses them
    buffers                             every rank of the stage its own, or rank 0's of the replicas
    micro-batches                       all ranks of a data coordinate have the same

    step     windows   one schedule each; in every layer the messages of the tensor axis
             finish    data axes: what the last backwards have not reduced; sums of tied tensors are
                       exchanged between stages, then reduced over the data axes
             clip      the norm: every element once, added over all axes
             update    each rank what it holds

With stages in a pipeline ``zero3`` and ``fsdp`` gather a stage when a step begins and free it when
it ends (units/step_shards.py); without one they work unit by unit, as they do alone.

Cost: for each stage that of the data-parallel strategy on what the stage has of a tensor rank;
that of ``tensor`` on every data coordinate; that of ``pipeline`` on every tensor rank, under
sequence parallelism 1/T of it.  Where B and W come apart, sequence parallelism gathers the gradient
of each row-parallel layer's output for both.  (Narayanan et al., arXiv 2104.04473, section 3.)
Numbers: equal to one device's up to the order of summation.  Rings, and gloo, add in an order that
depends on the place in a buffer: over more than two data ranks what tensor ranks hold alike differs
in its last bit, unless their buffers are of one size (a vocabulary that divides).
Left out: context parallelism and experts; gathering shards again for every micro-batch of a stage.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn

from shardproof.axes import summing
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
from shardproof.impls.reference import ddp, fsdp, tensor, zero1, zero2, zero3
from shardproof.impls.reference.engine.choices import FORMATS, Training, declared, lossy
from shardproof.impls.reference.engine.engine import Engine
from shardproof.impls.reference.engine.handle import Apply, Context, Handle, Local
from shardproof.impls.reference.engine.norm import power_sum, total_norm
from shardproof.impls.reference.engine.options import parse_options
from shardproof.impls.reference.engine.precision import Precision
from shardproof.impls.reference.engine.recompute import Group
from shardproof.impls.reference.engine.state import gather_over, put
from shardproof.impls.reference.pipeline import Options as PipelineOptions
from shardproof.impls.reference.pipeline import ReferencePipeline
from shardproof.impls.reference.tensor.cuts import Uncut
from shardproof.impls.reference.units import step_shards
from shardproof.schedules import Schedule

#: Why ``zero2`` asks for equal numbers of micro-batches where a rank has several stages.
IN_TURN = (
    "zero2 reduces the micro-batches of a rank's stages in the order of the schedule, which "
    "depends on the number of micro-batches"
)


@dataclass(frozen=True)
class DataStrategy:
    """A strategy of the data axes: its options, and how a module is put under it.

    ``apply`` takes a model that no pipeline cuts, ``apply_to_stage`` a stage of one.  ``joined``:
    both data axes are one group to it.
    """

    options: type[Any]
    apply: Apply
    apply_to_stage: Apply
    joined: bool = False


#: What ``data`` may be.
DATA = {
    "ddp": DataStrategy(ddp.Options, ddp.apply, ddp.apply, joined=True),
    "zero1": DataStrategy(zero1.Options, zero1.apply, zero1.apply),
    "zero2": DataStrategy(zero2.Options, zero2.apply, zero2.apply),
    # Unit by unit, a stage would gather its parameters for every forward and every backward.
    "zero3": DataStrategy(zero3.Options, zero3.apply, step_shards.apply),
    "fsdp": DataStrategy(fsdp.Options, fsdp.apply, step_shards.apply),
}


@dataclass(frozen=True)
class Options(PipelineOptions, Training):
    """``data``: the strategy of the data axes; ``data_options``: its options, in addition to those
    here.

    ``sequence_parallel`` and ``loss_parallel`` are for the tensor axis, the rest for the pipeline.
    """

    data: Literal["ddp", "zero1", "zero2", "zero3", "fsdp"] = "ddp"
    data_options: Mapping[str, Any] = field(default_factory=dict)
    sequence_parallel: bool = False
    loss_parallel: bool | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        _ = self.strategy_options

    @staticmethod
    def elsewhere(name: str) -> str:
        """Where to write an option of a strategy on the data axes; empty if none has it."""
        takers = [k for k, one in DATA.items() if name in (f.name for f in fields(one.options))]
        if not takers:
            return ""
        return (
            f"unknown option {name!r} next to 'data': it belongs to the strategy on the data "
            f"axes ({', '.join(takers)}); write data_options: {{{name}: ...}}"
        )

    @property
    def strategy_options(self) -> Any:
        """The options of the strategy on the data axes."""
        kind = DATA[self.data].options
        if "checkpoint" in self.data_options:
            raise Refused(
                "option 'data_options.checkpoint': one checkpoint covers all axes; move "
                "'checkpoint' out of 'data_options', one level up"
            )
        options = parse_options(kind, self.data_options, "data_options.")
        if not issubclass(kind, Training):
            for name, none in (("precision", Precision()), ("offload", "none")):
                if getattr(self, name) != none:
                    raise Refused(f"option {name!r}: 'data' = {self.data!r} has no such option")
            return options
        return replace(options, precision=self.precision, offload=self.offload)

    @property
    def rounds_take_turns(self) -> bool:
        """Whether stages of one rank reduce every micro-batch in the schedule's order."""
        return self.data == "zero2" and self.chosen.has_several

    @property
    def on_layers(self) -> tensor.Options:
        """The options of the tensor axis."""
        # Data axes take gradients in backward, and would reduce terms of sums not yet made.
        return tensor.Options(self.sequence_parallel, self.loss_parallel, sum_each_backward=True)


class ReferenceHybrid(ReferencePipeline):
    """The strategies as one system under test."""

    strategy = "hybrid"
    depth = "layout"
    options: Options
    options_type = Options

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
        exact = declared(
            "stages",
            "tensor",
            axes=("pipe", "replicate", "shard", "tensor"),
            buffers="rank0" if from_rank0 else "per_rank",
            declines={**layers.declines, **wrap_declines, **turns},
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
        self.check(mesh)
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

    def check(self, mesh: Mesh) -> None:
        """Refuse a mesh that does not fit the strategy of the data axes."""
        data, inner = self.options.data, self.options.strategy_options
        has_data = bool(summing(mesh.axes))
        for name, none in () if has_data else (("precision", Precision()), ("offload", "none")):
            if getattr(self.options, name) != none:
                raise Refused(
                    f"option {name!r} belongs to the strategy on the data axes, but this mesh "
                    f"has no data axis, only {' and '.join(mesh.axes)}: add shard: 1 to the mesh"
                )
        if inner.compress is not None and mesh.size("tensor") > 1:
            raise Refused(
                "option 'data_options.compress': a rank of the axis 'tensor' holds parts of "
                "parameters, and compressing parts gives another result than compressing the "
                "whole; set tensor: 1, or leave 'compress' out"
            )
        if inner.compress is not None and self.is_cut and inner.reduction.each_round:
            raise Refused(
                f"option 'data_options.compress' with 'data' = {data!r} in a pipeline: each "
                "micro-batch is compressed by itself, in the order of the schedule, and the "
                "reference run does not know this order; set data to ddp or zero1, or to fsdp "
                "with accumulate_without_communication"
            )
        if data.startswith("zero") and mesh.size("replicate") > 1:
            raise Refused(
                f"option 'data' = {data!r} shards over the axis 'shard' and has no replicas, "
                f"but this mesh has replicate = {mesh.size('replicate')}: set replicate: 1, or "
                "use data: fsdp with data_options.sharding_strategy HYBRID_SHARD"
            )
        if data == "fsdp" and has_data:
            wanted, strategy = fsdp.AXES[inner.sharding_strategy], inner.sharding_strategy
            unused = [a for a in summing(mesh.axes) if a not in wanted and mesh.size(a) > 1]
            missing = [a for a in wanted if a not in mesh.axes]
            if unused or missing:
                raise Refused(
                    f"option 'data_options.sharding_strategy' = {strategy!r} needs exactly the "
                    f"data axes {' and '.join(wanted)}, but this mesh has {dict(mesh.axes)}"
                )
            if inner.chunk_ranks not in (None, mesh.size("shard")):
                raise Refused(
                    f"option 'data_options.reshard_after_forward' = {inner.chunk_ranks}: a "
                    "hybrid cannot reshard to smaller groups of ranks; valid: true, false, null"
                )

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
            context = Context(roles=self.build.roles)
            self.layers = tensor.apply(module, {"tensor": mesh.comm("tensor")}, chosen, context)
        if not self.is_cut:
            return self.wrap(module)
        stages = super().transform(module, mesh, options)
        # The layers of other stages would keep these in memory.
        if self.layers is not None:
            self.layers.keep(stages.module)
        return stages

    def wrap(self, module: nn.Module) -> Handle:
        """Apply the data axes to ``module``: a stage, a tied tensor or the whole model."""
        axes = summing(self.mesh.axes)
        if not axes:
            return Local(module)
        chosen = DATA[self.options.data]
        comms = {axis: self.mesh.comm(axis) for axis in axes}
        if chosen.joined:
            comms = {"replicate": self.mesh.comm(*axes)}
        apply = chosen.apply_to_stage if self.is_cut else chosen.apply
        context = self.context(self.options)
        return apply(module, comms, self.options.strategy_options, context)

    def backward(self, batch: Batch) -> Tensor | None:
        """Run one schedule per window, or the micro-batches one by one.

        :raises Refused: the data coordinates have different numbers of micro-batches, and may not.
        """
        if self.is_cut and self.options.rounds_take_turns and summing(self.mesh.axes):
            own, handles = len(batch.micro_batches), self.handle.handles()  # type: ignore[attr-defined]
            if own < (most := max(h.rounds for h, _ in handles if isinstance(h, zero2.Zero2))):
                raise Refused(
                    f"option 'schedule' with 'data' = 'zero2': {IN_TURN}; this data coordinate "
                    f"has {own} micro-batches, but another has {most}: give all data "
                    "coordinates the same number, or set data: zero1"
                )
        return super().backward(batch) if self.is_cut else Engine.backward(self, batch)

    def evaluate(self, batch: Batch) -> Tensor | None:
        """Evaluate through the stages, or the whole model."""
        return super().evaluate(batch) if self.is_cut else Engine.evaluate(self, batch)

    def loss_of(self, outputs: Tensor, micro: MicroBatch) -> Tensor:
        """The loss of outputs that may be split over the tensor axis."""
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
        if self.layers is not None:
            self.layers.close()


IMPLEMENTATION = ReferenceHybrid
