"""FSDP: ZeRO-3 with a choice of the sharded state, the ranks, and the lifetime of whole parameters.

Problem.  ZeRO-3 pays for its memory with gathers: two of every unit for each micro-batch.  Where
there is memory to spare, some can be saved: keep what was gathered until backward (SHARD_GRAD_OP),
shard within a few neighbours and replicate over the rest (HYBRID_SHARD), or let parameters stay
sharded over k neighbours between forward and backward.  (FSDP, arXiv 2304.11277, section 3; names
as in torch.)

    sharding_strategy   mesh                  parameters rest as     between forward and backward
    NO_SHARD            replicate             whole                  whole
    SHARD_GRAD_OP       shard                 1/F                    whole
    FULL_SHARD          shard                 1/F                    1/F, or 1/k
    HYBRID_SHARD        replicate x shard     1/F on each replica    1/F, 1/k, or whole

    what                        where
    parameters, gradients,      one shard of each unit on every rank of the shard axis (F of them),
      optimizer state           the same on every replica (R of them)
    whole parameters            root unit, running unit, units prefetched (forward, backward)
    whole gradients             unit whose backward runs, unit whose reduction is under way
    buffers                     every rank its own

    step     before_step         how many rounds? the most micro-batches of any rank
             forward             gather root | gather 1 | compute root's first part; gather 2 |
                                 compute 1, free 1; gather 3 | compute 2, free 2 ...  root stays
             backward            gather 3 | gather 2 | compute 3, free 3, reduce 3; gather 1 |
                                 compute 2, free 2, wait 3, add to its shard, reduce 2 ...
             last round          a reduced shard goes on to the replicas, one all-reduce per unit
             finish              rounds that other ranks still have, with zeros; who used what
             clip, update        own shards only; the norm is a sum over the shard axis

Gathers go ``prefetch_forward`` units ahead of forward, in the order of the forward before, and
``prefetch_backward`` units ahead of backward, in the reverse order of its own forward.  A unit is
gathered again before its backward unless it is whole, and freed when its inputs' gradients are
complete (units/events.py).  With ``accumulate_without_communication`` gradients stay whole
and are reduced in the last round only; SHARD_GRAD_OP then keeps parameters whole over the step.
Evaluation frees every unit right after its forward, whatever the strategy.

The second page is ``schedule.py``: what happens before and after each unit's forward and backward.
Then ``units/wrapped.py``, which makes the calls, and ``units/parameters.py`` and
``units/gradients.py``, the states that a unit goes through.

Cost: floating-point bytes sent a step, over all ranks, with m micro-batches on the busiest rank.
A layout is a unit's parameters of one dtype, all trained or all frozen, padded to a multiple of F
elements: p bytes in ``precision.parameters``, g in ``precision.reduce`` (0 if frozen).  Per layout:

    gathers, forward      m R (F-1) p           once a step for SHARD_GRAD_OP without communication
    gathers, backward     m R (F-1) p           of the root: 0 (it stays); of all, if kept whole: 0;
                                                with an integer k: m (RF/k) (k-1) p
    reductions            m R (F-1) g           once per step without communication
    replicas              2 (R-1) g             F shards of g/F bytes; once a step, for NO_SHARD too

so FULL_SHARD moves 3 (F-1)/F and HYBRID_SHARD besides 2 (R-1)/R of a shard a rank (FSDP, section
3.2.2, with the exact ring factor): m (2U-1) all-gathers and m U reduce-scatters a rank for U units
of one layout, U all-reduces if R > 1.  With clipping one float64 is all-reduced over the shard
axis.  A module called c times in a forward is gathered c times in it.
Memory: (P + G + O)/F with padding, and what the table names; with an integer k P/k between forward
and backward; whole gradients of all units without communication.
Numbers: summed over shards first, then over micro-batches, then over replicas; sums are kept as
built, whatever they were reduced in.  Parameters with strides of their own become contiguous: their
products may be rounded otherwise.
Models that do not fit on one rank are built on ``meta`` (units/meta.py).
Left out: units that only some ranks call, optimizers that are not element-wise.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from shardproof.comm import Comm, Mesh
from shardproof.contract import Capabilities, Kind, Refused
from shardproof.impls.reference.engine.choices import FORMATS, declared, lossy
from shardproof.impls.reference.engine.engine import Engine
from shardproof.impls.reference.engine.handle import PLAIN, Comms, Context, Handle
from shardproof.impls.reference.engine.options import parse_options
from shardproof.impls.reference.engine.state import gather_pieces
from shardproof.impls.reference.fsdp.schedule import FSDP, Options
from shardproof.impls.reference.units.plan import plan_units
from shardproof.impls.reference.units.wrapped import DECLINES

#: The axes of the mesh that a strategy needs.
AXES = {
    "NO_SHARD": ("replicate",),
    "SHARD_GRAD_OP": ("shard",),
    "FULL_SHARD": ("shard",),
    "HYBRID_SHARD": ("replicate", "shard"),
}


def apply(module: nn.Module, comms: Comms, options: Options, context: Context = PLAIN) -> FSDP:
    """Shard ``module`` over ``comms["shard"]``, replicate it over ``comms["replicate"]``.

    ``comms["chunks"]`` are the k neighbours of an integer ``reshard_after_forward``.
    """
    axes = {axis: comms[axis] for axis in AXES[options.sharding_strategy]}
    plan = plan_units(module, options.wrap, context.blocks)
    return FSDP(module, axes, plan, options, context, comms.get("chunks"))


class ReferenceFSDP(Engine):
    """The strategy as a system under test."""

    strategy = "fsdp"
    depth = "layout"
    options_type = Options
    materializes = True
    handle_type: type[FSDP] = FSDP

    @classmethod
    def capabilities(cls, options: Mapping[str, Any]) -> Capabilities:
        """The capabilities that the ``fsdp`` profile requires."""
        chosen = parse_options(Options, options)
        silent = ("accumulation_without_communication",) * chosen.accumulate_without_communication
        axes, declines = AXES[chosen.sharding_strategy], chosen.wrap.declines | DECLINES
        exact = declared(
            "wrapped_units", "overlap", *silent, axes=axes, declines=declines, checkpoints=FORMATS
        )
        return lossy(exact, chosen)

    def transform(self, module: nn.Module, mesh: Mesh, options: Mapping[str, Any]) -> Handle:
        """Apply the handle along the strategy's axes."""
        chosen = parse_options(Options, options)
        wanted = AXES[chosen.sharding_strategy]
        missing = [axis for axis in wanted if axis not in mesh.axes]
        if missing:
            raise Refused(
                f"option 'sharding_strategy' = {chosen.sharding_strategy!r} needs a mesh with "
                f"axes {' and '.join(wanted)}, e.g. "
                f"{{{', '.join(f'{axis}: 2' for axis in wanted)}}}; this mesh has "
                f"{' and '.join(mesh.axes)}"
            )
        comms = {axis: mesh.comm(axis) for axis in wanted}
        count = chosen.chunk_ranks
        chunks = None if count is None or count == mesh.size("shard") else neighbours(mesh, count)
        plan = plan_units(module, chosen.wrap, self.build.units)
        return self.handle_type(module, comms, plan, chosen, self.context(chosen), chunks)

    def full_state(self, kind: Kind) -> dict[str, Tensor]:
        """Whole tensors, gathered from the ranks that hold shards."""
        comm = self.mesh.comm("shard" if "shard" in self.mesh.axes else "replicate")
        return gather_pieces(self.local_state(kind), comm)


def neighbours(mesh: Mesh, count: int) -> Comm:
    """The group of ``count`` neighbours along the shard axis to which this rank belongs."""
    size = mesh.size("shard")
    if size % count:
        divisors = [str(n) for n in range(2, size + 1) if size % n == 0]
        raise Refused(
            f"option 'reshard_after_forward' = {count} does not divide the {size} ranks of the "
            f"shard axis; valid: {', '.join(['true', 'false', *divisors])}"
        )
    axes: dict[str, int] = {}
    for axis, ranks in mesh.axes.items():
        split = {"shard_group": size // count, "shard": count}
        axes |= split if axis == "shard" else {axis: ranks}
    return Mesh(axes, device=mesh.device, ranks=mesh.ranks).comm("shard")


IMPLEMENTATION = ReferenceFSDP
