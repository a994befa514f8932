"""PyTorch's ``fully_shard`` (FSDP2), unmodified.

    what                        where
    parameters, gradients       dim-0 chunks (DTensor) over ``shard``, equal over ``replicate``
    optimizer state             as the parameters; Adam's step counter on every rank
    buffers                     every rank, its own
    a unit's whole parameters   every rank, while the unit computes (the root's: until backward)

    forward    unit i    all-gather i; compute; free i          (``reshard_after_forward``)
    backward   unit i    all-gather i - 1 ahead; compute; reduce-scatter i; (all-reduce over
                         ``replicate``); free i
    clip       ``torch.nn.utils.clip_grad_norm_`` on DTensors
    update     torch's optimizer on DTensors: local chunks only

Sum reductions, and a divide factor by which the loss is multiplied, make gradients plain sums.
``reshard_after_forward`` is torch's: null = true for units and false for the root; an int =
parameters stay sharded over so many ranks between forward and backward.

Cost: ``fsdp2.payload_bytes``.  Every parameter is padded on dim 0 to a multiple of the ranks.
Numbers: the sum over ranks, in the backend's order.
Left out: placements other than dim 0, ``ignored_params``, FSDP over tensor parallelism.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.distributed.tensor import DTensor

from shardproof.comm import Mesh
from shardproof.contract import Capabilities, Depth, Kind, Piece, Refused
from shardproof.impls.pytorch.adapter import Adapter, unit_features, whole_units
from shardproof.impls.pytorch.checkpoint.options import NO_DTENSOR, Saved, offered
from shardproof.impls.pytorch.parts.recompute import checkpoint_units, plain, single_unit
from shardproof.impls.reference.engine.choices import Training, declared
from shardproof.impls.reference.engine.optimizer import slot_pieces
from shardproof.impls.reference.engine.options import at_least, parse_options
from shardproof.impls.reference.units.plan import Wrap

#: What not every version of torch has.
UNUSED = "set_reduce_scatter_unused_params"
#: Traits under which a step may go by in which nothing uses some parameter.
BY_STEP = ("conditional_late_step", "conditional_early_step")
#: Traits under which the parameters that take part in a backward vary.
VARYING = (
    "conditional_by_rank",
    "conditional_by_micro_batch",
    "conditional_last_micro_batch",
    *BY_STEP,
)


@dataclass(frozen=True)
class Options(Training, Saved):
    """The reference's options; ``reduce_scatter_unused_params`` and ``gradient_divide_factor`` are
    torch's own. The loss is multiplied by that factor, so that gradients stay plain sums.

    ``prefetch_forward``: units gathered ahead explicitly (torch's default is none, and to let
    streams overlap).  ``compile``: the backend of ``torch.compile`` for every unit but the root.
    """

    wrap: Wrap = field(default_factory=Wrap)
    reshard_after_forward: bool | int | None = None
    prefetch_forward: int = 0
    prefetch_backward: int = 1
    accumulate_without_communication: bool = False
    reduce_scatter_unused_params: bool = False
    gradient_divide_factor: float = 1.0
    compile: Literal["none", "aot_eager"] = "none"

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least("prefetch_forward", self.prefetch_forward, 0)
        at_least("prefetch_backward", self.prefetch_backward, 1)
        single_unit(self.recompute_every)
        if self.offload == "optimizer":
            raise Refused(
                "option 'offload' = 'optimizer': fully_shard can offload only parameters; set "
                "offload to 'none' or 'parameters'"
            )
        if self.precision.buffers is not None:
            raise Refused(
                "option 'precision.buffers': fully_shard does not cast buffers; leave the key out"
            )

    @property
    def lacks(self) -> str:
        """Features that the installed torch does not have."""
        if not self.reduce_scatter_unused_params or hasattr(FSDPModule, UNUSED):
            return ""
        return f"torch {torch.__version__} has no FSDPModule.{UNUSED}"

    def declines(self) -> dict[str, str]:
        """Traits that torch does not support, in its own words if it has any."""
        reasons = {
            "scalar": "ValueError: fully_shard doesn't support scalar parameters",
            "non_contiguous": "NotImplementedError: FSDP does not support non-contiguous "
            "parameters yet",
            "empty": "RuntimeError: _chunk_cat expects non-empty tensor",
            "unequal_micro_batches": "every forward gathers parameters, so all ranks must run "
            "the same number of micro-batches",
        }
        if self.reduce_scatter_unused_params:
            given = "reduce_scatter_unused_params=True gives unused parameters a gradient of zero"
            reasons |= dict.fromkeys(("unused", *BY_STEP), given)
        else:
            wanted = (
                "each rank reduces only the parameters that it used, unless "
                "reduce_scatter_unused_params=True"
            )
            reasons |= dict.fromkeys(VARYING, wanted)
        return reasons | self.wrap.declines


class PyTorchFSDP2(Adapter):
    """The adapter."""

    strategy = "fsdp2"
    depth: ClassVar[Depth] = "layout"

    @classmethod
    def capabilities(cls, options: Mapping[str, Any]) -> Capabilities:
        """The ``fsdp2`` profile; the rest depends on the options."""
        chosen = parse_options(Options, options)
        features = unit_features(chosen.accumulate_without_communication, chosen.precision)
        axes = ("replicate", "shard")
        saves = offered(chosen.checkpoint, denies=NO_DTENSOR)
        told = {"declines": chosen.declines(), "lacks": chosen.lacks}
        return declared(*features, axes=axes, **told, **saves)

    def parse(self, options: Mapping[str, Any], mesh: Mesh) -> None:
        """The options; refused if the ranks do not divide."""
        self.options = parse_options(Options, options)
        if "shard" not in mesh.axes:
            raise Refused(f"fully_shard needs the axis 'shard'; this mesh has {list(mesh.axes)}")
        self.ranks, self.loss_factor = mesh.size("shard"), self.options.gradient_divide_factor
        k = self.options.reshard_after_forward
        if k is not None and not isinstance(k, bool) and (k < 1 or self.ranks % k):
            divisors = [str(n) for n in range(1, self.ranks + 1) if self.ranks % n == 0]
            raise Refused(
                f"option 'reshard_after_forward' = {k} does not divide the shard axis of "
                f"{self.ranks} ranks; valid: true, false, null, {', '.join(divisors)}"
            )

    def shard(self, module: nn.Module) -> nn.Module:
        """Checkpoint, then shard: unit by unit, the rest in the root."""
        self.options.precision.check_norms(
            module, "leave precision.parameters out, because fully_shard does not cast buffers"
        )
        units = whole_units(module, self.options.wrap, self.build.units)
        if self.options.recompute_every:
            checkpoint_units(module, self.build.units)
        axes = tuple(axis for axis in ("replicate", "shard") if axis in self.mesh.axes)
        arguments: dict[str, Any] = {
            "mesh": self.mesh.device_mesh[axes],
            "reshard_after_forward": self.options.reshard_after_forward,
            "offload_policy": self.offload(),
        }
        inner = self.mixed_precision(None)  # what one unit hands to another stays narrow
        for name in sorted(units, key=lambda name: -name.count(".")):  # inner ones first
            fully_shard(module.get_submodule(name), mp_policy=inner, **arguments)
            if self.options.compile != "none":
                module.get_submodule(name).compile(backend=self.options.compile)
        outer = self.mixed_precision(self.options.precision.output)
        fully_shard(module, mp_policy=outer, **arguments)
        parts: list[Any] = [*(module.get_submodule(name) for name in units), module]
        self.sharded: list[FSDPModule] = parts
        blocks = tuple(f"{name}." for name in self.build.units)
        self.prefetch([module.get_submodule(n) for n in units if f"{n}.".startswith(blocks)])
        for part in self.sharded:
            part.set_gradient_divide_factor(self.loss_factor)
            part.set_force_sum_reduction_for_comms(True)
        if self.options.reduce_scatter_unused_params:
            getattr(self.sharded[-1], UNUSED)(True)
        self.named = {plain(name): p for name, p in module.named_parameters()}
        return module

    def mixed_precision(self, output: torch.dtype | None) -> MixedPrecisionPolicy:
        """torch's policy of the same meaning, for a module whose outputs have the dtype
        ``output``.
        """
        precision = self.options.precision
        return MixedPrecisionPolicy(
            param_dtype=precision.parameters, reduce_dtype=precision.reduce, output_dtype=output
        )

    def offload(self) -> OffloadPolicy:
        """torch's offload policy; pinned memory needs an accelerator, and without one nothing
        moves.
        """
        if self.options.offload == "parameters":
            return CPUOffloadPolicy(pin_memory=self.mesh.device != "cpu")
        return OffloadPolicy()

    def prefetch(self, units: Sequence[Any]) -> None:
        """Set which of ``units`` are prefetched during each, beyond torch's own choice.

        They are called in this order; elsewhere a unit may be registered before one that is called
        before it, and what is gathered after its backward is gathered in vain.
        """
        ahead, behind = self.options.prefetch_forward, self.options.prefetch_backward
        for index, unit in enumerate(units):
            if ahead:
                unit.set_modules_to_forward_prefetch(units[index + 1 : index + 1 + ahead])
            if behind > 1:
                before = units[max(0, index - behind) : index]
                unit.set_modules_to_backward_prefetch(before[::-1])

    def updated(self) -> dict[str, Tensor]:
        """The trainable DTensors."""
        return {name: p for name, p in self.named.items() if p.requires_grad}

    def accumulating(self, is_last: bool) -> AbstractContextManager[object]:
        """Reduce in every micro-batch, or in the last one only."""
        silent = self.options.accumulate_without_communication and not is_last
        self.sharded[-1].set_requires_gradient_sync(not silent)
        return nullcontext()

    def clip(self, limit: float) -> Tensor:
        """torch's own clipping, which supports DTensors."""
        norm = nn.utils.clip_grad_norm_(list(self.updated().values()), limit, foreach=False)
        return norm.full_tensor() if isinstance(norm, DTensor) else norm

    def settle(self) -> None:
        """Free every unit, including the root."""
        for part in self.sharded:
            part.reshard()

    def local_state(self, kind: Kind) -> list[Piece]:
        """Local chunks."""
        if kind == "optimizer":
            return slot_pieces(self.optimizer, lambda n, s, t: self.piece(f"{n}.{s}", t))
        if kind == "buffers":
            return self.buffers()
        named: Mapping[str, Tensor] = self.named
        if kind == "gradients":
            named = {n: p.grad for n, p in self.named.items() if p.grad is not None}
        return [self.piece(name, tensor) for name, tensor in named.items()]

    def piece(self, name: str, tensor: Tensor) -> Piece:
        """A DTensor's rows, or a number that every rank keeps."""
        if not isinstance(tensor, DTensor):
            return Piece.whole(name, tensor.detach(), replica=self.mesh.rank)
        shape, local = tuple(tensor.shape), tensor.to_local().detach()
        chunk = -(-shape[0] // self.ranks)
        first = min(self.mesh.coordinate["shard"] * chunk, shape[0])
        slices = ((first, min(first + chunk, shape[0])), *((0, n) for n in shape[1:]))
        replica = self.mesh.coordinate.get("replicate", 0)
        return Piece(name, shape, local, slices=slices, replica=replica)

    def full_state(self, kind: Kind) -> dict[str, Tensor]:
        """Parameters gathered by DTensor; buffers of this rank."""
        if kind == "buffers":
            return {piece.name: piece.tensor.clone() for piece in self.buffers()}
        if kind != "parameters":
            raise Refused(f"full_state({kind!r}): FSDP2 can gather only parameters and buffers")
        full = {n: p.full_tensor() if isinstance(p, DTensor) else p for n, p in self.named.items()}
        return {name: tensor.detach().clone() for name, tensor in full.items()}


IMPLEMENTATION = PyTorchFSDP2
