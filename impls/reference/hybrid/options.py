"""Options of hybrid parallelism, strategies of its data axes, and meshes that do not suit them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal

from shardproof.axes import sharded, summing
from shardproof.comm import Mesh
from shardproof.contract import Refused
from shardproof.impls.reference import context, ddp, fsdp, tensor, zero1, zero2, zero3
from shardproof.impls.reference.engine.choices import Training
from shardproof.impls.reference.engine.handle import Apply
from shardproof.impls.reference.engine.options import parse_options
from shardproof.impls.reference.engine.precision import Precision
from shardproof.impls.reference.hybrid import experts
from shardproof.impls.reference.pipeline import Options as PipelineOptions
from shardproof.impls.reference.units import step_shards

#: Why ``zero2`` asks for equal numbers of micro-batches where a rank has several stages.
IN_TURN = (
    "zero2 reduces micro-batches in the order of the schedule, so all data-parallel ranks need "
    "the same number of micro-batches"
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

    ``context``: how the context axis cuts positions and attends; ``experts``: how many ranks of
    shard x context divide the experts (experts.py); ``sequence_parallel`` and ``loss_parallel`` are
    for the tensor axis, the rest for the pipeline.
    """

    data: Literal["ddp", "zero1", "zero2", "zero3", "fsdp"] = "ddp"
    data_options: Mapping[str, Any] = field(default_factory=dict)
    context: context.Choices | None = None
    experts: experts.Choices | None = None
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
                    raise Refused(
                        f"option {name!r} does not exist for 'data' = {self.data!r}: remove the key"
                    )
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


def check(options: Options, mesh: Mesh) -> None:
    """Refuse a mesh that does not fit the strategy of the data axes."""
    data, inner = options.data, options.strategy_options
    is_cut = mesh.size("pipe") > 1
    has_data = bool(summing(mesh.axes))
    for name, none in () if has_data else (("precision", Precision()), ("offload", "none")):
        if getattr(options, name) != none:
            raise Refused(
                f"option {name!r} belongs to the strategy on the data axes, but this mesh "
                f"has no data axis, only {' and '.join(mesh.axes)}; add 'shard: 1' to the mesh"
            )
    if inner.compress is not None and mesh.size("tensor") > 1:
        raise Refused(
            "option 'data_options.compress': each rank of the axis 'tensor' holds a part of each "
            "split parameter, and compressing the parts is not the same as compressing the whole "
            "parameter; set tensor: 1, or leave 'compress' out"
        )
    if mesh.size("context") > 1:
        check_context(options, mesh)
    elif options.context is not None and "context" not in mesh.axes:
        raise Refused(
            "option 'context' needs the axis 'context', but this mesh has only the axes "
            f"{' and '.join(mesh.axes)}: add context: 1 to the mesh, or leave 'context' out"
        )
    if options.experts is not None:
        check_experts(options, mesh)
    if inner.compress is not None and is_cut and inner.reduction.each_round:
        raise Refused(
            f"option 'data_options.compress' with 'data' = {data!r} in a pipeline: micro-batches "
            "are compressed in the order of the schedule, but the reference run does not know this "
            "order; set data to 'ddp' or 'zero1', or set data to 'fsdp' and "
            "accumulate_without_communication to true"
        )
    if data.startswith("zero") and mesh.size("replicate") > 1:
        raise Refused(
            f"option 'data' = {data!r} splits state over the axis 'shard' and has no replicas, "
            f"but this mesh has replicate = {mesh.size('replicate')}: set replicate to 1, or "
            "data to 'fsdp' with data_options.sharding_strategy 'HYBRID_SHARD'"
        )
    if data == "fsdp" and has_data:
        wanted, strategy = fsdp.AXES[inner.sharding_strategy], inner.sharding_strategy
        # Context ranks share what the others do: shards where there are some, else copies.
        known = (*wanted, "context")
        unused = [a for a in summing(mesh.axes) if a not in known and mesh.size(a) > 1]
        missing = [a for a in wanted if a not in mesh.axes]
        if unused or missing:
            raise Refused(
                f"option 'data_options.sharding_strategy' = {strategy!r} needs exactly the "
                f"data axes {' and '.join(wanted)}, but this mesh has {dict(mesh.axes)}"
            )
        if inner.chunk_ranks not in (None, mesh.size(*sharded(mesh.axes))):
            raise Refused(
                f"option 'data_options.reshard_after_forward' = {inner.chunk_ranks}: a "
                "hybrid cannot reshard to smaller groups of ranks; valid: true, false, null"
            )


def check_context(options: Options, mesh: Mesh) -> None:
    """Refuse options that do not suit an axis that cuts positions."""
    data, ranks = options.data, mesh.size("context")
    if options.context is None:
        raise Refused(
            f"mesh axis 'context' = {ranks}: option 'context' is missing; write e.g. "
            "context: {method: ring, cut: zigzag}"
        )
    if options.strategy_options.compress is not None:
        raise Refused(
            "option 'data_options.compress': each rank of the axis 'context' has gradients of a "
            "part of each sample, and compressing the parts is not the same as compressing "
            "gradients of whole samples; set context: 1, or leave 'compress' out"
        )
    if data.startswith("zero") and "shard" not in mesh.axes:
        raise Refused(
            f"option 'data' = {data!r} splits state over the axes 'shard' and 'context', but this "
            "mesh has no axis 'shard': add shard: 1 to the mesh"
        )


def check_experts(options: Options, mesh: Mesh) -> None:
    """Refuse options that do not suit experts that are folded over the data axes."""
    assert options.experts is not None
    ranks, along = options.experts.ranks, experts.folded(mesh)
    if mesh.size(*along) % ranks or not summing(mesh.axes):
        more = "" if summing(mesh.axes) else "; the mesh has no data axis: add shard: 1 to the mesh"
        raise Refused(
            f"option 'experts.ranks' = {ranks}: use a divisor of the number of ranks on the axes "
            f"'shard' and 'context', which is {mesh.size(*along)} in this mesh{more}"
        )
    across = mesh.size("context")
    if ranks % across and across % ranks:
        raise Refused(
            f"option 'experts.ranks' = {ranks}: groups of {ranks} ranks do not align with the "
            f"{across} ranks of the axis 'context'; use a divisor or a multiple of {across}"
        )
    if options.sequence_parallel and mesh.size("tensor") > 1:
        raise Refused(
            "option 'experts' with 'sequence_parallel': a router needs all positions, but each "
            "rank of the axis 'tensor' would have only some of them; set sequence_parallel to false"
        )
    if options.chosen.splits:
        raise Refused(
            "option 'experts' with a schedule that computes weight gradients (W) later than input "
            "gradients (B): tokens would be sent to their experts twice, in B and in W; choose "
            "'gpipe', '1f1b' or 'interleaved'"
        )
    others = {"precision": Precision(), "offload": "none"}
    for name, none in others.items():
        if getattr(options, name) != none:
            raise Refused(
                f"option 'experts' cannot be combined with {name!r}, which would be ignored for "
                f"expert layers; leave {name!r} out"
            )
    if options.strategy_options.compress is not None:
        raise Refused(
            "option 'experts' with 'data_options.compress': gradients of experts are not "
            "compressed; leave 'compress' out"
        )
