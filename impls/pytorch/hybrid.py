"""PyTorch's three kinds of parallelism combined: pipelining x ``fully_shard`` x tensor parallelism.

    axis        what it cuts                        by
    pipe        the blocks, into stages             ``torch.distributed.pipelining``
    replicate   the batch                           ``fully_shard`` over a mesh of two dimensions
    shard       the batch; rows of what a tensor    ``fully_shard``
                rank has of a parameter
    tensor      heads, hidden features, vocabulary  ``torch.distributed.tensor.parallel``

    set-up   build whole; rank 0's state to all, along one axis after the other; cut into stages;
             of a stage split every layer over ``tensor``, then shard what that leaves, unit by unit
    step     each window: torch's schedule; activations go to the neighbour with the same data and
             tensor coordinates; units stay gathered from their first forward to the window's end
             (``reshard_after_forward: false``), when gradients are reduced: partial sums over
             ``tensor``, then scattered over ``shard``, then summed over ``replicate``
    clip     ``get_total_norm`` by mesh of the DTensors, its square summed over ``pipe``
    update   torch's optimizer on what the rank holds

A parameter's local part is a strided block where both axes cut rows; of a fused projection it is
several blocks.  Axes that the mesh lacks are not used; ``pipe`` must exist, even with one rank.

The first call of a schedule drops all gradients of ``fully_shard``, also those of the step's
earlier windows (``_post_metadata_inference_cleanup``), so the adapter keeps them aside.  Shapes are
always given: to infer them, torch would run stages forward and backward.

Cost: ``torch_hybrid.payload_bytes``.
Numbers: sums over ranks in the backend's order.
Left out: parameters tied over stages (torch exchanges no gradients), loss scaling.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel

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
from shardproof.impls.pytorch import pipelining
from shardproof.impls.pytorch.adapter import whole_units
from shardproof.impls.pytorch.checkpoint.options import NO_DTENSOR, SHARDED, offered
from shardproof.impls.pytorch.fsdp2 import VARYING
from shardproof.impls.pytorch.pipelining import TORN, TORN_STATE, Pipelining, evaluating, meta
from shardproof.impls.pytorch.tensor_parallel import (
    LOSS_PARALLEL,
    check_length,
    check_loss,
    parallel_loss,
)
from shardproof.impls.pytorch.tensor_styles import (
    SEQUENCE,
    apply_styles,
    dtensor_pieces,
    plan_styles,
    require_split_layers,
    settle_gradient,
)
from shardproof.impls.reference.engine.choices import USUAL
from shardproof.impls.reference.engine.options import parse_options
from shardproof.impls.reference.engine.state import broadcast_tensors, load_state, named_state
from shardproof.impls.reference.pipeline.stages import cut
from shardproof.impls.reference.units.plan import Wrap

#: Schedules whose I and W are two actions.
SPLIT = ("interleaved_zb", "zb_v", "dualpipe_v")


@dataclass(frozen=True)
class Options(pipelining.Options):
    """The options of all three.

    ``reshard_after_forward``: units are freed and gathered again, by every micro-batch.
    """

    shapes: Literal["given"] = "given"
    sequence_parallel: bool = False
    loss_parallel: bool = False
    reshard_after_forward: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.reshard_after_forward and self.name in SPLIT:
            raise Refused(
                f"option 'reshard_after_forward' = true with schedule {self.name}: the schedule "
                "splits the backward pass, and torch would then lose the gradients of resharded "
                "parameters (pipelining/_backward.py, stage_backward_input); set "
                "reshard_after_forward to false"
            )


class Hybrid(Pipelining):
    """The adapter."""

    strategy = "torch_hybrid"
    depth = "layout"
    options_type: ClassVar[type[pipelining.Options]] = Options
    options: Options

    @classmethod
    def capabilities(cls, options: Mapping[str, Any]) -> Capabilities:
        """The ``torch_hybrid`` profile."""
        chosen = parse_options(Options, options)
        own = ("stages", "tensor", "sharded_parameters", "sharded_gradients", "sharded_optimizer")
        return Capabilities(
            axes=("pipe", "replicate", "shard", "tensor"),
            buffers="per_rank",
            features=USUAL | set(own),
            declines={
                **chosen.declines(),
                **dict.fromkeys(
                    VARYING,
                    "each rank reduces only the parameters that it used, so all ranks must use "
                    "the same parameters",
                ),
                "tied_over_units": TORN,
                "scalar": "ValueError: fully_shard doesn't support scalar parameters",
                "non_contiguous": "NotImplementedError: FSDP does not support non-contiguous "
                "parameters yet",
                "empty": "RuntimeError: _chunk_cat expects non-empty tensor",
                "unequal_micro_batches": "every window ends in collectives, so all ranks must "
                "run the same number of windows",
            },
            **offered(chosen.checkpoint, SHARDED, TORN_STATE, NO_DTENSOR),
        )

    # --------------------------------------------------------------------------------- set-up

    def setup(
        self,
        build: Build,
        state: Mapping[str, Tensor] | None,
        optimizer: OptimizerSpec,
        mesh: Mesh,
        options: Mapping[str, Any],
    ) -> None:
        """Set up as a pipeline, even with one rank."""
        if "pipe" not in mesh.axes:
            raise Refused(
                "this system needs the axis 'pipe' (its size may be 1); this mesh has "
                f"{list(mesh.axes)}"
            )
        super().setup(build, state, optimizer, mesh, options)

    def begin(self, whole: nn.Module, state: Mapping[str, Tensor] | None, mesh: Mesh) -> None:
        """Broadcast rank 0's values to all ranks."""
        self.data = summing(mesh.axes)
        if self.data == ("replicate",):
            raise Refused(
                "this mesh has the axis 'replicate' but no axis 'shard', which fully_shard always "
                "needs: add the axis 'shard' (its size may be 1)"
            )
        if self.spec.scaler is not None:
            raise Refused(
                "optimizer.scaler: torch's scaler detects overflows only on the ranks of one mesh, "
                "but each stage has its own mesh; leave the scaler out"
            )
        self.splits = "tensor" in mesh.axes
        if self.splits:
            require_split_layers(whole, plan_styles(whole, self.build.units, False, False))
            self.positions = whole.get_parameter("embed.position.weight").shape[0]
            self.classes = whole.get_parameter("head.weight").shape[0]
        if self.options.loss_parallel:
            check_loss(self.build)
        if state is not None:
            load_state(whole, state)
        for axis in mesh.axes:
            broadcast_tensors(list(named_state(whole).values()), mesh.comm(axis))
        self.orders: dict[str, list[int]] = {}

    def prepare(self, part: nn.Module) -> nn.Module:
        """Split the layers of a stage, then shard it."""
        modules = dict(part.named_modules())
        units = [name for name in self.build.units if name in modules]
        if self.splits:
            self.orders |= self.split(part, units)
        if self.data:
            mesh = self.mesh.device_mesh[self.data]
            again = self.options.reshard_after_forward
            for name in whole_units(part, Wrap(), units):
                fully_shard(modules[name], mesh=mesh, reshard_after_forward=again)
            fully_shard(part, mesh=mesh, reshard_after_forward=again)
            for unit in sharded(part):
                unit.set_gradient_divide_factor(1.0)
                unit.set_force_sum_reduction_for_comms(True)
        return part

    def split(self, part: nn.Module, units: Sequence[str]) -> dict[str, list[int]]:
        """Apply torch's styles; a head with split logits still returns plain tensors."""
        sequence = self.options.sequence_parallel
        styles = plan_styles(part, units, sequence, self.options.loss_parallel)
        if self.options.loss_parallel and "head" in styles:
            styles["head"] = ColwiseParallel(input_layouts=SEQUENCE if sequence else Replicate())
        return apply_styles(part, styles, self.mesh.device_mesh["tensor"])

    def row_orders(self) -> Mapping[str, Sequence[int]]:
        """The order of rows of fused projections."""
        return self.orders

    # ------------------------------------------------------------------------------- the step

    def shapes(self, inputs: Tensor) -> dict[int, tuple[Tensor, Tensor]]:
        """The shapes of each stage here, from a temporary model."""
        if self.splits and self.options.sequence_parallel:
            check_length(inputs, self.positions, self.mesh.size("tensor"))
        whole, shapes, hidden = self.build(self.mesh.device), {}, inputs
        spans = cut(len(self.build.units), len(self.place), self.options.split)
        for number, span in enumerate(spans):
            part = self.build.stage(whole, *span)
            with evaluating([part]), torch.no_grad():
                output = part(hidden)
            if number in self.parts:
                entering = self.own(hidden, self.options.sequence_parallel, 1) if number else hidden
                last = number == len(spans) - 1
                leaving = (
                    self.own(output, self.options.loss_parallel, -1)
                    if last
                    else self.own(output, self.options.sequence_parallel, 1)
                )
                shapes[number] = meta(entering, grad=number > 0), meta(leaving)
            hidden = output
        return shapes

    def own(self, tensor: Tensor, is_cut: bool, dim: int) -> Tensor:
        """The part of ``tensor`` on a rank of the tensor axis if it is cut along ``dim``."""
        if not is_cut or not self.splits:
            return tensor
        return tensor.chunk(self.mesh.size("tensor"), dim)[self.mesh.coordinate["tensor"]]

    def loss(self, outputs: Tensor, number: Tensor) -> Tensor:
        """The loss of whole logits, or of the tensor ranks' shares of them."""
        if not self.splits or not self.options.loss_parallel:
            return super().loss(outputs, number)
        shape = torch.Size((*outputs.shape[:-1], self.classes))
        whole = DTensor.from_local(
            outputs,
            self.mesh.device_mesh["tensor"],
            [Shard(outputs.dim() - 1)],
            run_check=False,
            shape=shape,
            stride=torch.empty(shape, device="meta").stride(),
        )
        return parallel_loss(whole, self.window[int(number)], self.build)

    def make_schedule(self, window: Sequence[MicroBatch]) -> Any:
        """A new schedule, whose first call is still to come."""
        self.is_fresh = True
        return super().make_schedule(window)

    def run(self, window: tuple[MicroBatch, ...], call: Callable[..., Any]) -> list[Tensor]:
        """Run inside ``loss_parallel``; save and restore gradients around a first call."""
        kept = {name: p.grad for name, p in self.trainable.items() if self.is_fresh}
        for name in kept:
            self.trainable[name].grad = None
        with LOSS_PARALLEL() if self.options.loss_parallel else nullcontext():
            losses = super().run(window, call)
        for name, gradient in kept.items():
            parameter = self.trainable[name]
            if gradient is not None:
                new = parameter.grad
                parameter.grad = gradient if new is None else new.add_(gradient)
        self.is_fresh = False
        return losses

    def finish(self) -> None:
        """Lay out gradients; without data axes no ``fully_shard`` has done so."""
        for parameter in self.trainable.values() if not self.data else ():
            settle_gradient(parameter)

    @torch.no_grad()
    def norm(self, gradients: Sequence[Tensor]) -> Tensor:
        """The norm: torch takes DTensors of one mesh at a time, and the stages are summed."""
        meshes: dict[Any, list[Tensor]] = {}
        for gradient in gradients:
            meshes.setdefault(getattr(gradient, "device_mesh", None), []).append(gradient)
        total = torch.zeros((), dtype=torch.float64, device=self.device)
        for same in meshes.values():
            norm = nn.utils.get_total_norm(same, foreach=False)
            whole = norm.full_tensor() if isinstance(norm, DTensor) else norm
            total += whole.double() ** 2
        self.comm.all_reduce(total)
        return total.sqrt()

    def evaluate(self, batch: Batch) -> Tensor | None:
        """Evaluate as a pipeline, then free the gathered units."""
        loss = super().evaluate(batch)
        for part in self.parts.values():
            for unit in sharded(part):
                unit.reshard()
        return loss

    # --------------------------------------------------------------------------------- the state

    def pieces(self, name: str, tensor: Tensor) -> list[Piece]:
        """Blocks of DTensors; a whole tensor is a copy along every axis except ``pipe``."""
        if not isinstance(tensor, DTensor):
            is_number = not tensor.dim() and name not in self.trainable
            replica = self.mesh.rank if is_number else self.copy({})
            return [Piece.whole(name, tensor.detach(), replica=replica)]
        names = tensor.device_mesh.mesh_dim_names or ()
        placed = dict(zip(names, tensor.placements, strict=True))
        order = self.orders.get(name) or self.orders.get(name.rpartition(".")[0])
        return dtensor_pieces(name, tensor, order, self.copy(placed))

    def copy(self, placed: Mapping[str, Any]) -> int:
        """The number of a rank's copy of a tensor that is ``placed`` so, over the axes with
        copies.
        """
        number = 0
        for axis, size in self.mesh.axes.items():
            if axis != "pipe" and isinstance(placed.get(axis, Replicate()), Replicate):
                number = number * size + self.mesh.coordinate[axis]
        return number

    @torch.no_grad()
    def full_state(self, kind: Kind) -> dict[str, Tensor]:
        """The tensors of all stages on every rank; blocks are sent as objects along each axis in
        turn.
        """
        parts = [(p.name, p.global_shape, p.slices, p.tensor) for p in self.local_state(kind)]
        for axis in self.mesh.axes:
            gathered = self.mesh.comm(axis).all_gather_object(parts)
            parts = [part for rank in gathered for part in rank]
        state: dict[str, Tensor] = {}
        for name, shape, slices, tensor in parts:
            whole = state.setdefault(name, torch.zeros(shape, dtype=tensor.dtype))
            whole[tuple(slice(*bounds) for bounds in slices or ())] = tensor
        return state


def sharded(part: nn.Module) -> Iterator[FSDPModule]:
    """The units of ``fully_shard``."""
    return (module for module in part.modules() if isinstance(module, FSDPModule))


IMPLEMENTATION = Hybrid
