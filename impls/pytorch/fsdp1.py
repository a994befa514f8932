"""PyTorch's ``FullyShardedDataParallel`` (FSDP1) with ``use_orig_params``, unmodified.

    what                        FULL_SHARD, SHARD_GRAD_OP     HYBRID_SHARD        NO_SHARD
    parameters, gradients,      a flat range of each unit,    as left, equal      every rank, whole
    optimizer state             over ``shard``                over ``replicate``
    buffers                     every rank, its own

    forward    unit i    all-gather i; compute; free i (SHARD_GRAD_OP and the root: keep)
    backward   unit i    all-gather i - 1 ahead; compute; reduce-scatter i; (all-reduce over
                         ``replicate``); free i
    clip       FSDP's own ``clip_grad_norm_``, but in fp64, where it raises: it asks for the norm in
               fp32 ("the dtype of the input (Double) should be convertible without narrowing").
               There the adapter adds the squares up.
    update     torch's optimizer on flat ranges, under the parameters' names

FSDP divides by the number of data ranks, so losses are multiplied by it.  A shard group of one rank
is NO_SHARD, whatever was asked for: torch warns and switches (``_init_utils.py``,
``_init_core_state``).  Under HYBRID_SHARD it would then reduce within that one rank and never over
replicas, so such meshes are refused.

Cost: ``fsdp1.payload_bytes``.  A unit's parameters lie end to end, each at a multiple of 16 bytes.
Numbers: N times the loss, divided by about sqrt(N) before and after the sum over ranks.
Left out: ``use_orig_params=False`` (parameters would lose their names), communication hooks.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.fsdp import (
    BackwardPrefetch,
    CPUOffload,
    FullStateDictConfig,
    MixedPrecision,
    ShardingStrategy,
    StateDictType,
)
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp._runtime_utils import _reshard
from torch.distributed.fsdp.wrap import CustomPolicy
from torch.nn.modules.batchnorm import _BatchNorm

from shardproof.comm import Mesh
from shardproof.contract import Capabilities, Kind, Piece, Refused
from shardproof.impls.pytorch.adapter import Adapter, unit_features, whole_units
from shardproof.impls.pytorch.checkpoint.options import Saved, offered
from shardproof.impls.pytorch.checkpoint.state import own_name
from shardproof.impls.pytorch.parts.recompute import checkpoint_units, single_unit
from shardproof.impls.reference.engine.choices import Training, declared
from shardproof.impls.reference.engine.norm import clip_factor, power_sum, total_norm
from shardproof.impls.reference.engine.optimizer import build_optimizer, param_groups, slot_pieces
from shardproof.impls.reference.engine.options import at_least, parse_options
from shardproof.impls.reference.units.plan import Wrap

#: Mesh axes of each strategy.
AXES = {
    "NO_SHARD": ("replicate",),
    "SHARD_GRAD_OP": ("shard",),
    "FULL_SHARD": ("shard",),
    "HYBRID_SHARD": ("replicate", "shard"),
}


@dataclass(frozen=True)
class Options(Training, Saved):
    """The reference's options that FSDP1 supports; prefetching is on or off.

    ``compile``: the backend of ``torch.compile`` for every unit but the root.
    """

    wrap: Wrap = field(default_factory=Wrap)
    sharding_strategy: Literal["NO_SHARD", "SHARD_GRAD_OP", "FULL_SHARD", "HYBRID_SHARD"] = (
        "FULL_SHARD"
    )
    prefetch_forward: int = 0
    prefetch_backward: int = 1
    accumulate_without_communication: bool = False
    compile: Literal["none", "aot_eager"] = "none"

    def __post_init__(self) -> None:
        super().__post_init__()
        single_unit(self.recompute_every)
        for name in ("prefetch_forward", "prefetch_backward"):
            at_least(name, getattr(self, name), 0)
            if getattr(self, name) > 1:
                raise Refused(
                    f"option {name!r} = {getattr(self, name)}: FSDP1 supports only 0 and 1"
                )
        if self.offload == "optimizer":
            raise Refused(
                "option 'offload' = 'optimizer': FSDP1 can offload only parameters; set offload "
                "to 'none' or 'parameters'"
            )
        if self.offload == "parameters" and self.sharding_strategy == "NO_SHARD":
            raise Refused(
                "option 'offload' = 'parameters' contradicts sharding_strategy NO_SHARD, which "
                "frees no parameters; set offload to 'none'"
            )
        if self.precision.output is not None:
            raise Refused(
                "option 'precision.output': FSDP1 does not cast outputs; leave the key out"
            )
        narrow, wide = self.precision.parameters, self.precision.reduce
        if self.accumulate_without_communication and narrow and wide and wide != narrow:
            raise Refused(
                "option 'accumulate_without_communication' contradicts 'precision.reduce' = "
                f"{wide}: under no_sync FSDP1 accumulates gradients in {narrow}; set "
                "accumulate_without_communication to false, or set precision.reduce to null or "
                f"{narrow}"
            )

    def declines(self) -> dict[str, str]:
        """Traits that torch does not support."""
        reasons = {
            "scalar": "ValueError: FSDP doesn't support scalar parameters",
            "non_contiguous": "FSDP1 shards a transposed parameter in memory order, so a shard "
            "is not a range of its elements",
            "unequal_micro_batches": "every forward gathers parameters, so all ranks must run "
            "the same number of micro-batches",
            "empty": (
                "an empty parameter at the edge of a shard is in no shard, so it has no gradient "
                "and no optimizer state"
            ),
        }
        zeros = "the flat gradient holds zeros, not None, for unused parameters"
        never = ("unused", "conditional_late_step", "conditional_early_step")
        reasons |= dict.fromkeys(never, zeros)
        return reasons | self.wrap.declines


@dataclass(frozen=True)
class Place:
    """Elements ``start`` to ``stop - 1`` of parameter ``name``, at ``offset`` of this rank's shard
    of ``flat``, whose parameter number ``index`` it is.
    """

    name: str
    shape: tuple[int, ...]
    start: int
    stop: int
    offset: int
    flat: Any
    index: int

    def piece(self, tensor: Tensor, replica: int, slot: str = "") -> Piece:
        """``tensor`` of this layout as a piece."""
        name = f"{self.name}.{slot}" if slot else self.name
        span = (self.start, self.stop)
        flat = tensor.detach().reshape(-1)
        return Piece(name, self.shape, flat, flat_range=span, replica=replica)

    @property
    def parameter(self) -> nn.Parameter:
        """The tensor that the optimizer updates."""
        parameter: nn.Parameter = self.flat._params[self.index]
        return parameter


class PyTorchFSDP1(Adapter):
    """The adapter."""

    strategy = "fsdp1"
    depth = "layout"

    @classmethod
    def capabilities(cls, options: Mapping[str, Any]) -> Capabilities:
        """The ``fsdp1`` profile; axes and features depend on the options."""
        chosen = parse_options(Options, options)
        features = unit_features(chosen.accumulate_without_communication, chosen.precision)
        axes = AXES[chosen.sharding_strategy]
        saves = offered(chosen.checkpoint)
        if "checkpoint" in options:  # FSDP1 keeps a profile of its state dicts in a class
            saves["needs"] += ("processes",)
        return declared(*features, axes=axes, declines=chosen.declines(), **saves)

    def parse(self, options: Mapping[str, Any], mesh: Mesh) -> None:
        """The options; refused if the mesh does not have the axes of the strategy."""
        self.options = parse_options(Options, options)
        self.axes = AXES[self.options.sharding_strategy]
        missing = [axis for axis in self.axes if axis not in mesh.axes]
        if missing:
            raise Refused(
                f"option 'sharding_strategy' = {self.options.sharding_strategy!r} needs the axes "
                f"{', '.join(self.axes)}, e.g. mesh "
                f"{{{', '.join(f'{axis}: 2' for axis in self.axes)}}}; "
                f"this mesh has {', '.join(mesh.axes)}"
            )
        copies = mesh.axes.get("replicate", 1)
        if self.options.sharding_strategy == "HYBRID_SHARD" and mesh.axes["shard"] == 1 < copies:
            raise Refused(
                "option 'sharding_strategy' = 'HYBRID_SHARD' on a mesh with shard = 1: FSDP1 "
                f"then runs each rank as NO_SHARD and never reduces over the {copies} replicas; "
                f"use NO_SHARD on mesh {{replicate: {copies}}}"
            )
        if self.options.offload == "parameters" and mesh.device == "cpu":
            raise Refused(
                "option 'offload' = 'parameters': on CPUs FSDP1 raises 'Cannot access "
                "accelerator device when none is available'; set offload to 'none'"
            )

    def shard(self, module: nn.Module) -> nn.Module:
        """Checkpoint, then wrap: units, and the rest in the root."""
        first = {id(p): name for name, p in module.named_parameters()}
        owners = dict(module.named_modules())
        names = {}
        for path, parameter in module.named_parameters(remove_duplicate=False):
            owner, _, leaf = path.rpartition(".")
            names[owners[owner], leaf] = first[id(parameter)]
        self.refuse_batch_norms(module)
        units = whole_units(module, self.options.wrap, self.build.units)
        if self.options.recompute_every:
            checkpoint_units(module, self.build.units)
        if self.options.compile != "none":
            for name in units:
                module.get_submodule(name).compile(backend=self.options.compile)
        self.loss_factor = float(self.data.size)
        wrapped = self.wrap(module, {module.get_submodule(name) for name in units})
        self.places = list(self.lay_out(wrapped, names))
        self.by_name = {place.name: place for place in self.places}
        return wrapped

    def refuse_batch_norms(self, module: nn.Module) -> None:
        """Refuse batch norms under a policy: FSDP1 makes each a unit without casts."""
        if self.options.precision.as_built:
            return
        for name, part in module.named_modules():
            if isinstance(part, _BatchNorm):
                raise Refused(
                    f"option 'precision': FSDP1 wraps {name!r} ({type(part).__name__}) as a "
                    "separate unit, which ignores mixed precision; leave 'precision' out, or use "
                    "another kind of norm layer"
                )

    def scaled_over(self) -> ProcessGroup | None:
        """The group of the shards, or of the whole copies of NO_SHARD."""
        return self.mesh.comm(self.axes[-1]).group

    def wrap(self, module: nn.Module, units: set[nn.Module]) -> FSDP:
        """FSDP around ``module`` and each of ``units``."""
        groups: Any = tuple(self.mesh.comm(axis).group for axis in reversed(self.axes))
        precision, ahead = self.options.precision, bool(self.options.prefetch_backward)
        mixed = MixedPrecision(precision.parameters, precision.reduce, precision.buffers)
        with warnings.catch_warnings():  # of deprecation, and of NO_SHARD in a world of one
            warnings.simplefilter("ignore")
            return FSDP(
                module,
                process_group=groups[0] if len(groups) == 1 else groups,
                sharding_strategy=ShardingStrategy[self.options.sharding_strategy],
                cpu_offload=CPUOffload(offload_params=self.options.offload == "parameters"),
                auto_wrap_policy=CustomPolicy(lambda child: child in units),
                backward_prefetch=BackwardPrefetch.BACKWARD_PRE if ahead else None,
                mixed_precision=None if precision.as_built else mixed,
                device_id=torch.device(self.mesh.device),
                forward_prefetch=bool(self.options.prefetch_forward),
                use_orig_params=True,
            )

    def lay_out(self, wrapped: FSDP, names: Mapping[Any, str]) -> Iterator[Place]:
        """This rank's parts by FSDP's own metadata, without parameters that have none here."""
        for unit in FSDP.fsdp_modules(wrapped):
            flat = unit._flat_param
            if flat is None:
                continue
            rows: Any = zip(flat._param_infos, flat._shapes, flat._shard_param_infos, strict=True)
            for index, (info, shape, part) in enumerate(rows):
                name = names[info.module, info.param_name]
                if not shape.numel():
                    yield Place(name, tuple(shape), 0, 0, 0, flat, index)
                elif part.in_shard:
                    start, stop = part.intra_param_start_idx, part.intra_param_end_idx + 1
                    offset = part.offset_in_shard
                    yield Place(name, tuple(shape), start, stop, offset, flat, index)

    def updated(self) -> dict[str, Tensor]:
        """The trainable parameters of which this rank holds a part."""
        held = {place.name: place.parameter for place in self.places}
        return {name: p for name, p in held.items() if p.requires_grad}

    def make_optimizer(self) -> torch.optim.Optimizer:
        """The optimizer over all trainable parameters, including those without elements here:
        torch's checkpoints ask all ranks for the same ones.
        """
        named = {own_name(n): p for n, p in self.module.named_parameters() if p.requires_grad}
        return build_optimizer(self.spec, param_groups(self.spec, named))

    def accumulating(self, is_last: bool) -> AbstractContextManager[object]:
        """Reduce in every micro-batch, or in the last one only."""
        if self.options.accumulate_without_communication and not is_last:
            assert isinstance(self.module, FSDP)
            return self.module.no_sync()
        return nullcontext()

    def clip(self, limit: float) -> Tensor:
        """FSDP's own clipping, except in fp64."""
        assert isinstance(self.module, FSDP)
        # Of all ranks alike: one that holds no part of a parameter has no gradient to ask.
        if all(p.dtype != torch.float64 for p in self.module.parameters()):
            return self.module.clip_grad_norm_(limit)
        gradients = [p.grad for p in self.updated().values() if p.grad is not None]
        axes = tuple(axis for axis in self.axes if axis == "shard")
        nothing = torch.zeros((), dtype=torch.float64)
        parts = [(nothing, axes), *((power_sum(gradient), axes) for gradient in gradients)]
        norm = total_norm(parts, self.mesh.comm)
        for gradient in gradients:
            gradient.mul_(clip_factor(norm, limit))
        return norm

    def settle(self) -> None:
        """Free the root, and with SHARD_GRAD_OP all units: FSDP keeps them for a backward."""
        for unit in FSDP.fsdp_modules(self.module):
            handle = unit._handle
            if handle is not None and handle.uses_sharded_strategy:
                _reshard(unit, handle, free_unsharded_flat_param=True)

    def local_state(self, kind: Kind) -> list[Piece]:
        """Flat ranges."""
        if kind == "optimizer":
            return slot_pieces(self.optimizer, self.slot)
        if kind == "buffers":
            named = self.inner.named_buffers()
            rank = self.mesh.rank
            return [Piece.whole(own_name(n), b.detach(), replica=rank) for n, b in named]
        replica = self.replica()
        if kind == "parameters":
            return [place.piece(self.held(place), replica) for place in self.places]
        return [
            place.piece(place.parameter.grad, replica)
            for place in self.places
            if place.parameter.grad is not None and place.parameter.requires_grad
        ]

    def held(self, place: Place) -> Tensor:
        """The part of this rank's shard at ``place``."""
        shard: Tensor = getattr(place.flat, "_local_shard", place.flat).detach()
        return shard[place.offset : place.offset + place.stop - place.start]

    def slot(self, name: str, slot: str, tensor: Tensor) -> Piece:
        """An optimizer slot, or a number that every rank keeps."""
        if tensor.dim() == 0 and slot == "step":
            return Piece.whole(f"{name}.{slot}", tensor, replica=self.mesh.rank)
        return self.by_name[name].piece(tensor, self.replica(), slot)

    def replica(self) -> int:
        """The copy to which this rank's shards belong."""
        return self.mesh.coordinate.get("replicate", 0)

    def full_state(self, kind: Kind) -> dict[str, Tensor]:
        """FSDP's full state dict; buffers of this rank."""
        if kind == "buffers":
            return {piece.name: piece.tensor.clone() for piece in self.local_state(kind)}
        if kind != "parameters":
            raise Refused(f"full_state({kind!r}): FSDP1 can gather only parameters and buffers")
        config = FullStateDictConfig(offload_to_cpu=False, rank0_only=False)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with FSDP.state_dict_type(self.module, StateDictType.FULL_STATE_DICT, config):
                whole = {own_name(n): t for n, t in self.module.state_dict().items()}
        return {name: whole[name].clone() for name in self.all_names()}

    def all_names(self) -> list[str]:
        """Names of all parameters on all ranks."""
        return [own_name(name) for name, _ in self.module.named_parameters()]


IMPLEMENTATION = PyTorchFSDP1
