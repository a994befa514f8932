"""Faults of loading: saved state goes to the wrong place, to some ranks only, or nowhere."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shardproof.case import CheckpointPlan, WorkloadSpec
from shardproof.contract import Batch, OptimizerSpec, Piece, Point, ScalerSpec, StepResult
from shardproof.impls.mutants import declare
from shardproof.impls.mutants.triggers import ADAMW, gpt
from shardproof.impls.reference.checkpoint.convert import tensor_of
from shardproof.impls.reference.checkpoint.data_file import Entry
from shardproof.impls.reference.checkpoint.loading import Loading
from shardproof.impls.reference.checkpoint.reading.checkpoint import Checkpoint, Name
from shardproof.impls.reference.checkpoint.reading.regions import Place
from shardproof.impls.reference.checkpoint.reading.reshape import Read
from shardproof.impls.reference.checkpoint.root import folders
from shardproof.impls.reference.ddp import ReferenceDDP
from shardproof.impls.reference.tensor import ReferenceTensor
from shardproof.impls.reference.zero1 import ReferenceZero1
from shardproof.impls.reference.zero3 import ReferenceZero3

mutant = declare.family(
    ReferenceDDP,
    ReferenceZero1,
    ReferenceTensor,
    ReferenceZero3,
    killed_by=("checkpoint",),
    checkpoint=CheckpointPlan(save_at=2),
    optimizer=ADAMW,
    steps=3,
)
SHARDED: Mapping[str, int] = {"shard": 2}
#: Who loads has a rank more.
LARGER = CheckpointPlan(save_at=2, into={"mesh": {"shard": 3}})


@mutant("loads_no_counters", says="step counters were not loaded: they count from 0, not from 2")
class NoCounters(ReferenceDDP):
    """Moments are loaded, but Adam's step counter starts again."""

    def load(self, path: Path) -> Mapping[str, Any]:
        extra = super().load(path)
        for state in self.optimizer.state.values():
            state["step"].zero_()
        return extra


@mutant(
    "loads_exchanged_moments",
    says=r"optimizer state was not loaded: '.*exp_avg' has the elements of '.*exp_avg_sq'",
    zoo=("K02",),
)
class ExchangedMoments(Checkpoint):
    """The two moments of Adam are exchanged on loading."""

    def entries(self, name: Name, replica: int = 0) -> list[Entry]:
        kind, own = name
        parameter, _, slot = own.rpartition(".")
        other = {"exp_avg": "exp_avg_sq", "exp_avg_sq": "exp_avg"}.get(slot)
        return super().entries((kind, f"{parameter}.{other}") if other else name, replica)


@mutant(
    "loads_on_rank_0_only",
    says="parameters were not loaded on replica 1 only: they are as the fresh system was set up",
)
class OnRank0Only(Loading):
    """Ranks other than 0 read the checkpoint but keep their own state."""

    def fill(self) -> None:
        if self.rank == 0:
            super().fill()


@mutant(
    "loads_a_tie_twice",
    says="the load untied .* on rank 0: they were one parameter",
    zoo=("K24",),
    workload=gpt("tied"),
)
class TieTwice(ReferenceDDP):
    """Every name gets a parameter of its own, so a tied parameter is split."""

    def load(self, path: Path) -> Mapping[str, Any]:
        extra = super().load(path)
        seen: set[int] = set()
        for owner in self.module.modules():
            for name, parameter in [*owner.named_parameters(recurse=False)]:
                if id(parameter) in seen:
                    setattr(owner, name, nn.Parameter(parameter.detach().clone()))
                seen.add(id(parameter))
        return extra


@mutant(
    "loads_and_draws",
    says=r"the RNG of rank 0 \(torch\) differs from its state at the save",
    zoo=("K17",),
    backend="gloo",
)
class DrawsAfterLoad(ReferenceDDP):
    """A random number is drawn between the load and the first step."""

    def load(self, path: Path) -> Mapping[str, Any]:
        extra = super().load(path)
        torch.rand(())
        return extra


@mutant(
    "loads_no_loss_scale",
    says="the loss scale was not loaded: it is 8 at step 2, 32 without a load",
    optimizer=OptimizerSpec("adamw", lr=0.003, scaler=ScalerSpec(initial=8.0, interval=1)),
)
class NoLossScale(ReferenceDDP):
    """The loss scale starts again from its first value."""

    def load(self, path: Path) -> Mapping[str, Any]:
        extra = super().load(path)
        assert self.scaler is not None and self.spec.scaler is not None
        self.scaler.scale = self.spec.scaler.initial
        return extra


@mutant(
    "loads_no_residuals",
    says="the restored state is correct, .*: the gradients of the first step",
    zoo=("G02",),
    options={"compress": {"method": "topk", "density": 0.25}},
)
class NoResiduals(ReferenceDDP):
    """The residuals of compression are not loaded."""

    def load(self, path: Path) -> Mapping[str, Any]:
        extra = super().load(path)
        self.reducer.load_pieces([])
        return extra


@mutant(
    "loads_masters_from_parameters",
    says="masters were not loaded",
    parent=ReferenceZero1,
    mesh=SHARDED,
    lane="working_precision",
    dtype="float32",
    precision={"parameters": "bfloat16"},
)
class MastersFromParameters(ReferenceZero1):
    """Masters start again from the rounded parameters of the checkpoint."""

    def load(self, path: Path) -> Mapping[str, Any]:
        extra = super().load(path)
        assert self.masters is not None
        for working, master in self.masters.pairs.values():
            master.copy_(working)
        return extra


@mutant(
    "loads_buffers_of_rank_0",
    says="buffers were not loaded on replica 1 only: they are those of replica 0",
    parent=ReferenceZero1,
    mesh=SHARDED,
    workload=WorkloadSpec("digits_cnn", global_batch=12, params={"layers": 1}),
)
class BuffersOfRank0(Checkpoint):
    """Buffers of rank 0 are loaded on every rank, although they differ by rank."""

    def entries(self, name: Name, replica: int = 0) -> list[Entry]:
        return super().entries(name, 0)


@mutant(
    "loads_shifted_parts",
    says="optimizer state was not loaded: .* elements of .* differ",
    zoo=("K01", "K08"),
    parent=ReferenceZero1,
    mesh=SHARDED,
    checkpoint=LARGER,
)
class ShiftedParts(Checkpoint):
    """A tensor that spans two files is read at offsets that count padding."""

    def fill(self, target: Tensor, reads: Sequence[Read]) -> None:
        super().fill(target, reads)
        if len(reads) > 1:
            target.copy_(target.roll(1))


@mutant(
    "loads_fused_rows_in_order",
    says=r"parameters were not loaded: .* elements of '.*qkv.*' differ",
    zoo=("K19",),
    mesh={"tensor": 2},
)
class FusedRowsInOrder(ReferenceTensor):
    """Each rank reads consecutive rows of a fused projection, not its rows of each part."""

    def load(self, path: Path) -> Mapping[str, Any]:
        extra = super().load(path)
        pieces: dict[str, list[Piece]] = {}
        for piece in self.held_pieces("parameters"):
            pieces.setdefault(piece.name, []).append(piece)
        with Checkpoint.open(path) as checkpoint, torch.no_grad():
            for name, parts in pieces.items():
                if len(parts) > 1:
                    sizes = [len(part.tensor) for part in parts]
                    rows = tensor_of(checkpoint, ("parameters", name))
                    own = rows[sum(sizes) * self.mesh.rank :][: sum(sizes)].split(sizes)
                    for part, values in zip(parts, own, strict=True):
                        part.tensor.copy_(values)
        return extra


@mutant("loads_parameters_only", says="optimizer state was not loaded: there is none", zoo=("K16",))
class ParametersOnly(ReferenceDDP):
    """The optimizer is rebuilt after the load."""

    def load(self, path: Path) -> Mapping[str, Any]:
        extra = super().load(path)
        self.optimizer.state.clear()
        return extra


@mutant("loads_and_begins_again", says="progress was not loaded: rank 0 would resume from step 0")
class BeginsAgain(ReferenceDDP):
    """All state is loaded, but steps are counted from the first one again."""

    def load(self, path: Path) -> Mapping[str, Any]:
        extra = super().load(path)
        return {**extra, "data": {**extra["data"], "step": 0}}


@mutant(
    "loads_the_oldest",
    says="progress was not loaded: rank 0 would resume from step 2, the newest .* is of step 3",
    checkpoint=CheckpointPlan(save_at=3, saves=3),
    steps=4,
)
class TheOldest(Loading):
    """The oldest checkpoint is loaded, because the list is sorted in ascending order."""

    def find(self) -> str:
        return min(one.path.name for one in folders(self.path) if one.is_committed)


@mutant(
    "loads_no_generators",
    says=r"the RNG of rank 0 \(torch\) was not loaded: it is as after set-up",
    backend="gloo",
)
class NoGenerators(Loading):
    """Random generators are not restored."""

    def fill(self) -> None:
        self.wants["rng"] = []
        super().fill()


@mutant(
    "loads_no_buffers",
    says="buffers were not loaded: they are as the fresh system was set up",
    workload=WorkloadSpec("digits_cnn", global_batch=12, params={"layers": 1}),
)
class NoBuffers(Loading):
    """Buffers are not restored."""

    def fill(self) -> None:
        self.wants["buffers"] = []
        super().fill()


@mutant(
    "loads_masters_only",
    says="parameters were not loaded: they are as the fresh system was set up",
    parent=ReferenceZero1,
    mesh=SHARDED,
    lane="working_precision",
    dtype="float32",
    precision={"parameters": "bfloat16"},
)
class MastersOnly(Loading):
    """Only masters are loaded; working parameters follow at the next update."""

    def fill(self) -> None:
        held = [(one.target, one.target.clone()) for one in self.wants["parameters"]]
        super().fill()
        for target, before in held:
            target.copy_(before)


@mutant(
    "loads_rounded",
    says="optimizer state was not loaded: .* elements of .* differ",
)
class RoundedMoments(Loading):
    """Moments are rounded to float32 on loading."""

    def fill(self) -> None:
        super().fill()
        for want in self.wants["optimizer"]:
            want.target.copy_(want.target.float())


@mutant(
    "loads_transposed",
    says="parameters were not loaded: .* elements of .* differ",
)
class Transposed(Loading):
    """Square matrices are loaded transposed."""

    def fill(self) -> None:
        super().fill()
        for want in self.wants["parameters"]:
            shape = want.target.shape
            if len(shape) == 2 and shape[0] == shape[1]:
                want.target.copy_(want.target.t().clone())


@mutant(
    "loads_no_growth",
    says="the loss scale was not loaded",
    optimizer=OptimizerSpec("adamw", lr=0.003, scaler=ScalerSpec(initial=8.0, interval=2)),
    checkpoint=CheckpointPlan(save_at=1),
    steps=4,
)
class NoGrowth(ReferenceDDP):
    """The loss scale is loaded, but not the number of steps since it last grew."""

    def load(self, path: Path) -> Mapping[str, Any]:
        extra = super().load(path)
        assert self.scaler is not None
        self.scaler.good = 0
        return extra


@mutant(
    "loads_the_part_of_another_rank",
    says="parameters were not loaded: .* elements of .* differ",
    zoo=("K13",),
    parent=ReferenceZero3,
    mesh=SHARDED,
)
class ThePartOfAnotherRank(Checkpoint):
    """A rank reads the part of the rank at the opposite end."""

    def plan(self, wanted: Place, name: Name, replica: int = 0) -> list[Read]:
        if wanted.flat_range is not None:
            begin, end = wanted.flat_range
            size = math.prod(wanted.shape)
            wanted = wanted._replace(flat_range=(size - end, size - begin))
        return super().plan(wanted, name, replica)


@mutant(
    "loads_into_a_count_of_its_own",
    says="the loss scale was not loaded: it is 32 at step 4, 16 without a load",
    checkpoint=CheckpointPlan(save_at=3, trained=2),
    optimizer=OptimizerSpec("adamw", lr=0.003, scaler=ScalerSpec(initial=8.0, interval=3)),
    steps=5,
)
class CountOfItsOwn(ReferenceDDP):
    """A run that returns to a checkpoint keeps its own count of steps since the loss scale grew."""

    def load(self, path: Path) -> Mapping[str, Any]:
        assert self.scaler is not None
        own, extra = self.scaler.good, super().load(path)
        self.scaler.good = max(own, self.scaler.good)
        return extra


@mutant(
    "loads_residuals_beside_its_own",
    says="the restored state is correct, .*: the gradients of the first step",
    checkpoint=CheckpointPlan(save_at=2, trained=2),
    options={"compress": {"method": "topk", "density": 0.25}},
)
class ResidualsBesideItsOwn(ReferenceDDP):
    """Loaded residuals are added to those that the restoring run already has."""

    def load(self, path: Path) -> Mapping[str, Any]:
        own = {piece.name: piece.tensor.clone() for piece in self.reducer.pieces()}
        extra = super().load(path)
        for piece in self.reducer.pieces():
            if piece.name in own:
                piece.tensor.add_(own[piece.name])
        return extra


@mutant(
    "loads_slots_onto_the_device",
    says="after the load, memory: .* optimizer_state: 61,344 bytes held, 0 promised",
    parent=ReferenceZero1,
    mesh=SHARDED,
    options={"offload": "optimizer"},
    weighed=True,
)
class SlotsOnTheDevice(Loading):
    """Optimizer slots created by a load lie in another memory than those created by a first
    step.
    """

    def plan(self) -> None:
        host, self.system.host = self.system.host, None
        super().plan()
        self.system.host = host


@mutant(
    "loads_and_keeps_a_copy",
    says="after the load, memory: rank 0, step 2, .* held",
    parent=ReferenceZero3,
    mesh=SHARDED,
    weighed=True,
)
class KeepsACopy(ReferenceZero3):
    """The loaded tensors stay in memory after they were copied into the system."""

    def load(self, path: Path) -> Mapping[str, Any]:
        extra = super().load(path)
        self.read = [piece.tensor.clone() for piece in self.held_pieces("optimizer")]
        return extra


@mutant(
    "loads_and_broadcasts_ever_after",
    says="after the load, traffic: step 2, axis replicate, broadcast: ",
)
class BroadcastsEverAfter(ReferenceDDP):
    """The flag for broadcasting after a load is never cleared."""

    def step(self, batch: Batch, observe: Callable[[Point], None]) -> StepResult:
        if self.loaded is not None:
            for parameter in self.module.parameters():
                dist.broadcast(parameter.data, 0)
        return super().step(batch, observe)


@mutant(
    "loads_and_warms_up_again",
    says="or with another rate",
    optimizer=OptimizerSpec("adamw", lr=0.003, warmup_steps=4),
    steps=4,
)
class WarmsUpAgain(ReferenceDDP):
    """After a load, the warm-up of the learning rate starts from step 0."""

    since = 0

    def load(self, path: Path) -> Mapping[str, Any]:
        extra = super().load(path)
        self.since = self.steps_done
        return extra

    def update(self) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] = self.spec.lr_at(self.handle.step - self.since) * group["lr_scale"]
        super().update()
