"""Systems as adopters write them: sound members of a family with a layout of their own, and some
that are not what they claim (driven by test_families).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from fractions import Fraction
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from shardproof.comm import Mesh
from shardproof.contract import (
    Batch,
    Build,
    Capabilities,
    Implementation,
    Kind,
    Observe,
    OptimizerSpec,
    Piece,
    StepResult,
)
from shardproof.costs.model import CostModel, Flow, Local
from shardproof.impls.pytorch.tensor_parallel import PyTorchTensorParallel
from shardproof.impls.reference.hybrid import ReferenceHybrid


class OwnDDP(Implementation):
    """Whole everything; gradients in two buckets of its own, averaged, for which it multiplies."""

    strategy = "ddp"
    axis: ClassVar[str] = "replicate"

    @classmethod
    def capabilities(cls, options: Mapping[str, Any]) -> Capabilities:
        return Capabilities(axes=(cls.axis,), buffers="none")

    def setup(
        self,
        build: Build,
        state: Mapping[str, Tensor] | None,
        optimizer: OptimizerSpec,
        mesh: Mesh,
        options: Mapping[str, Any],
    ) -> None:
        self.comm, self.build, self.spec = mesh.comm(self.axis), build, optimizer
        self.module: nn.Module = build(mesh.device)
        if state is not None:
            self.module.load_state_dict(dict(state), strict=False)
        for tensor in (*self.module.parameters(), *self.module.buffers()):
            self.comm.broadcast(tensor.detach(), 0)
        self.named = {n: p for n, p in self.module.named_parameters() if p.requires_grad}
        self.own = self.owned()
        self.optimizer = torch.optim.AdamW(
            self.own.values(),
            betas=optimizer.betas,
            eps=optimizer.eps,
            weight_decay=optimizer.weight_decay,
        )

    def owned(self) -> dict[str, Tensor]:
        """What this rank's optimizer updates."""
        return dict(self.named)

    def reduce(self) -> None:
        gradients = [p.grad for p in self.named.values() if p.grad is not None]
        middle = len(gradients) // 2
        for bucket in (gradients[:middle], gradients[middle:]):
            flat = torch.cat([g.reshape(-1) for g in bucket])
            self.comm.all_reduce(flat)
            for gradient, part in zip(bucket, flat.split([g.numel() for g in bucket]), strict=True):
                gradient.copy_(part.view_as(gradient))

    def micro_batch_over(self) -> None:
        """Leave what it added where backward put it."""

    def publish(self) -> None:
        """Give the updated parameters to all."""

    def step(self, batch: Batch, observe: Observe) -> StepResult:
        losses = []
        for micro in batch.micro_batches:
            loss = self.build.loss(self.module(micro.inputs), micro)
            loss.backward()
            losses.append(loss.detach())
            self.micro_batch_over()
        self.reduce()
        observe("gradients_final")
        for group in self.optimizer.param_groups:
            group["lr"] = self.spec.lr_at(batch.step)
        self.optimizer.step()
        self.publish()
        observe("after_update")
        for parameter in self.named.values():
            parameter.grad = None
        return StepResult(loss=torch.stack(losses).sum())

    def local_state(self, kind: Kind) -> list[Piece]:
        rank = self.comm.rank
        if kind == "buffers":
            named = dict(self.module.named_buffers())
            return [Piece.whole(n, t, replica=rank) for n, t in named.items()]
        if kind == "parameters":
            every = self.module.named_parameters()
            return [Piece.whole(n, p.detach(), replica=rank) for n, p in every]
        if kind == "gradients":
            found = ((n, p.grad) for n, p in self.named.items())
            return [Piece.whole(n, g, replica=rank) for n, g in found if g is not None]
        return self.slots()

    def slots(self) -> list[Piece]:
        replica = self.comm.rank if len(self.own) == len(self.named) else 0
        return [
            Piece.whole(f"{name}.{slot}", value, replica=replica)
            for name, parameter in self.own.items()
            for slot, value in self.optimizer.state[parameter].items()
        ]


class EveryMicroBatchDDP(OwnDDP):
    """Reduces after every micro-batch, as PyTorch's DDP does without ``no_sync``."""

    def micro_batch_over(self) -> None:
        super().reduce()
        self.totals = getattr(self, "totals", {})
        for name, p in self.named.items():
            if p.grad is not None:
                self.totals[name] = self.totals[name] + p.grad if name in self.totals else p.grad
            p.grad = None

    def reduce(self) -> None:
        for name, total in self.totals.items():
            self.named[name].grad = total
        self.totals = {}


class MeanDDP(OwnDDP):
    """Averages, as most systems do, and says so; its own loss is the multiplied one."""

    @classmethod
    def capabilities(cls, options: Mapping[str, Any]) -> Capabilities:
        return Capabilities(axes=(cls.axis,), buffers="none", loss_factor="2 * world")

    def step(self, batch: Batch, observe: Observe) -> StepResult:
        result = super().step(batch, observe)
        assert result.loss is not None
        return StepResult(loss=2 * self.comm.size * result.loss)


class CopiesExperts(OwnDDP):
    """Every rank has all experts, and no token travels."""

    strategy = "expert"
    axis = "expert"


class SparsePieces(OwnDDP):
    """Shows what nobody can compare element by element."""

    def local_state(self, kind: Kind) -> list[Piece]:
        held = super().local_state(kind)
        return [replace(piece, tensor=piece.tensor.to_sparse()) for piece in held]


class LosesTheLoss(MeanDDP):
    """Declares that its loss is always none."""

    @classmethod
    def capabilities(cls, options: Mapping[str, Any]) -> Capabilities:
        return Capabilities(axes=(cls.axis,), buffers="none", loss_factor="world - world")


class DividesByNothing(MeanDDP):
    """Declares a factor that has no value."""

    @classmethod
    def capabilities(cls, options: Mapping[str, Any]) -> Capabilities:
        return Capabilities(axes=(cls.axis,), buffers="none", loss_factor="1 / (world - world)")


class SilentMeanDDP(MeanDDP):
    """The same without saying so."""

    capabilities = OwnDDP.capabilities


class TriplesWhatItTells(OwnDDP):
    """Only the loss that it tells is wrong."""

    def step(self, batch: Batch, observe: Observe) -> StepResult:
        result = super().step(batch, observe)
        assert result.loss is not None
        return StepResult(loss=3 * result.loss)


class TriplesAndAverages(TriplesWhatItTells):
    """Beside that, gradients are a mean."""

    def reduce(self) -> None:
        super().reduce()
        for parameter in self.named.values():
            if parameter.grad is not None:
                parameter.grad /= self.comm.size


class TriplesAll(TriplesWhatItTells):
    """Trains with the loss that it tells."""

    def reduce(self) -> None:
        super().reduce()
        for parameter in self.named.values():
            if parameter.grad is not None:
                parameter.grad *= 3


class NumbersNoCopies(OwnDDP):
    """Every rank says of its parameters that they are copy 0."""

    def local_state(self, kind: Kind) -> list[Piece]:
        return [replace(piece, replica=0) for piece in super().local_state(kind)]


class GreedyZero1(OwnDDP):
    """Whole parameters go to the rank that has least; owners broadcast what they updated."""

    strategy = "zero1"
    axis = "shard"

    def owned(self) -> dict[str, Tensor]:
        self.owners: dict[str, int] = {}
        loads = [0] * self.comm.size
        for name, parameter in sorted(self.named.items(), key=lambda item: -item[1].numel()):
            owner = loads.index(min(loads))
            loads[owner] += parameter.numel()
            self.owners[name] = owner
        return {n: p for n, p in self.named.items() if self.owners[n] == self.comm.rank}

    def publish(self) -> None:
        for name, owner in self.owners.items():
            self.comm.broadcast(self.named[name].detach(), owner)


class LeavesEarly(GreedyZero1):
    """A rank none of whose own parameters has a gradient comes to no broadcast."""

    def publish(self) -> None:
        if any(parameter.grad is not None for parameter in self.own.values()):
            super().publish()


class AlongCopies(GreedyZero1):
    """Shares of the optimizer lie along the axis of copies, which the family cuts as well."""

    axis = "replicate"


class LeavesEarlyAlongCopies(LeavesEarly):
    """As its parent, along the axis of copies."""

    axis = "replicate"


class FlatCosts(CostModel):
    """One flat tensor, and a copy of its own shard that the optimizer updates."""

    source = "written beside the class"

    @property
    def padded(self) -> int:
        ranks = self.facts.size("shard")
        return -(-sum(t.numel for t in self.facts.trainable) // ranks) * ranks

    def shares(self, rank: int) -> dict[str, int]:
        shard = self.padded // self.facts.size("shard")
        start, at, shares = rank * shard, 0, {}
        for tensor in self.facts.trainable:
            low, high = max(at, start), min(at + tensor.numel, start + shard)
            if low < high:
                shares[tensor.name] = high - low
            at += tensor.numel
        return shares

    def flows(self) -> list[Flow]:
        ranks = self.facts.size("shard")
        sent = Fraction((ranks - 1) * self.padded * 8)
        calls = ranks if ranks > 1 else 0
        return [
            Flow("shard", operation, sent, calls)
            for operation in ("reduce_scatter", "all_gather")
            if calls
        ]

    def resident(self, rank: int, step: int, updated: int) -> dict[str, int]:
        shard = 8 * self.padded // self.facts.size("shard")
        return {
            "parameters": 8 * self.padded,
            "masters": shard,
            "gradients": shard,
            "optimizer_state": 2 * shard + 4 if updated >= 0 else 0,
        }

    def local(self, rank: int) -> Local:
        own = self.shares(rank)
        return Local({t.name: t.numel for t in self.facts.parameters}, own, own)


class FlatZero1(OwnDDP):
    """All parameters in one flat tensor; a rank updates a copy of its shard."""

    strategy = "zero1"
    axis = "shard"
    cost_model: ClassVar[type[Any] | None] = FlatCosts

    def owned(self) -> dict[str, Tensor]:
        total, ranks = sum(p.numel() for p in self.named.values()), self.comm.size
        self.shard_size = -(-total // ranks)
        self.flat = next(iter(self.named.values())).new_zeros(self.shard_size * ranks)
        at, self.starts = 0, {}
        for name, parameter in self.named.items():
            view = self.flat[at : at + parameter.numel()].view_as(parameter)
            view.copy_(parameter.detach())
            parameter.data, self.starts[name] = view, at
            at += parameter.numel()
        self.mine = slice(self.comm.rank * self.shard_size, (self.comm.rank + 1) * self.shard_size)
        self.shard = self.flat[self.mine].clone()
        return {"": self.shard}

    def reduce(self) -> None:
        whole = torch.zeros_like(self.flat)
        for name, parameter in self.named.items():
            assert parameter.grad is not None
            start = self.starts[name]
            whole[start : start + parameter.numel()] = parameter.grad.reshape(-1)
            parameter.grad = None
        self.shard.grad = torch.zeros_like(self.shard)
        self.comm.reduce_scatter(self.shard.grad, whole)

    def publish(self) -> None:
        self.comm.all_gather(self.flat, self.shard)

    def parts(self, slot: str, tensor: Tensor) -> list[Piece]:
        found = []
        for name, start in self.starts.items():
            shape = tuple(self.named[name].shape)
            low = max(start, self.mine.start)
            high = min(start + self.named[name].numel(), self.mine.stop)
            if low < high:
                own = tensor[low - self.mine.start : high - self.mine.start]
                within = (low - start, high - start)
                found.append(Piece(f"{name}{slot}", shape, own, flat_range=within))
        return found

    def local_state(self, kind: Kind) -> list[Piece]:
        if kind == "gradients":
            assert self.shard.grad is not None
            return self.parts("", self.shard.grad)
        return super().local_state(kind)

    def slots(self) -> list[Piece]:
        state, found = self.optimizer.state[self.shard], list[Piece]()
        for slot in ("exp_avg", "exp_avg_sq") if state else ():
            found += self.parts(f".{slot}", state[slot])
        names = [p.name for p in self.parts("", self.shard)] if state else []
        found += [
            Piece.whole(f"{name}.step", state["step"], replica=self.comm.rank) for name in names
        ]
        return [*found, *self.parts(".master", self.shard)]


class FlatZero1OfItsOwn(FlatZero1):
    """Held to its own cost model."""

    depth = "own"


class BringsNoModel(FlatZero1OfItsOwn):
    cost_model = None


class ForgetsTheMaster(FlatCosts):
    def resident(self, rank: int, step: int, updated: int) -> dict[str, int]:
        return super().resident(rank, step, updated) | {"masters": 0}


class PromisesLess(FlatZero1OfItsOwn):
    cost_model = ForgetsTheMaster


class Lopsided(GreedyZero1):
    """Every rank but the first gets one parameter, the first all the others."""

    @classmethod
    def capabilities(cls, options: Mapping[str, Any]) -> Capabilities:
        return Capabilities(axes=(cls.axis,), buffers="none", balance=1.5)

    def owned(self) -> dict[str, Tensor]:
        self.owners = {n: i if i < self.comm.size else 0 for i, n in enumerate(self.named)}
        return {n: p for n, p in self.named.items() if self.owners[n] == self.comm.rank}


class BecameDDP(OwnDDP):
    """Claims ZeRO-1, shards nothing."""

    strategy = "zero1"
    axis = "shard"


class BecameDDPOfThree(BecameDDP):
    strategy = "zero3"


class Unheard(OwnDDP):
    """A strategy that no family is named after."""

    strategy = "gossip"


class WholeEmbedding(PyTorchTensorParallel):
    """Splits the layers between; embedding and head stand whole on every rank."""

    strategy = "tensor"
    depth = "family"

    def styles(self, module: nn.Module) -> Any:
        inner = super().styles(module)
        return {n: s for n, s in inner.items() if n.partition(".")[0] not in ("embed", "head")}


class SplitsNothing(WholeEmbedding):
    """No layer at all."""

    def styles(self, module: nn.Module) -> Any:
        return {}


class OwnHybrid(ReferenceHybrid):
    """Pipeline, tensor and data axes under a foreign name: sound."""

    depth = "family"


class ShardsNothing(OwnHybrid):
    """Its ranks along the axis ``shard`` are replicas, though it says otherwise."""

    @classmethod
    def capabilities(cls, options: Mapping[str, Any]) -> Capabilities:
        usual = super().capabilities(options)
        return replace(usual, features=usual.features | {"sharded_optimizer"})


class RepeatsItself(OwnDDP):
    """Claims stages and split layers; every rank of these axes trains the whole model."""

    strategy = "hybrid"

    @classmethod
    def capabilities(cls, options: Mapping[str, Any]) -> Capabilities:
        return Capabilities(axes=("pipe", "replicate", "shard", "tensor"), buffers="none")

    def setup(
        self,
        build: Build,
        state: Mapping[str, Tensor] | None,
        optimizer: OptimizerSpec,
        mesh: Mesh,
        options: Mapping[str, Any],
    ) -> None:
        self.axis, self.rank = "replicate", mesh.rank
        model: nn.Module = build(mesh.device)
        if state is not None:
            model.load_state_dict(dict(state), strict=False)
        for tensor in (*model.parameters(), *model.buffers()):
            for axis in mesh.axes:
                mesh.comm(axis).broadcast(tensor.detach(), 0)
        whole = {n: t.detach() for n, t in model.state_dict().items()}
        super().setup(build, whole, optimizer, mesh, options)

    def local_state(self, kind: Kind) -> list[Piece]:
        return [replace(piece, replica=self.rank) for piece in super().local_state(kind)]


class TensorCutsAll(OwnDDP):
    """Every parameter is cut in equal parts along one axis; ranks of the other are replicas."""

    strategy = "hybrid"
    cutting: ClassVar[str] = "tensor"

    @classmethod
    def capabilities(cls, options: Mapping[str, Any]) -> Capabilities:
        return Capabilities(axes=("replicate", "shard", "tensor"), buffers="none")

    def setup(
        self,
        build: Build,
        state: Mapping[str, Tensor] | None,
        optimizer: OptimizerSpec,
        mesh: Mesh,
        options: Mapping[str, Any],
    ) -> None:
        self.axis = "shard" if "shard" in mesh.axes else "replicate"
        self.cutter = mesh.comm(self.cutting)
        self.number = mesh.rank
        other = self.axis if self.cutting == "tensor" else "tensor"
        self.replica = mesh.comm(other).rank
        model: nn.Module = build(mesh.device)
        if state is not None:
            model.load_state_dict(dict(state), strict=False)
        for tensor in (*model.parameters(), *model.buffers()):
            mesh.comm("tensor").broadcast(tensor.detach(), 0)
        whole = {n: t.detach() for n, t in model.state_dict().items()}
        super().setup(build, whole, optimizer, mesh, options)

    def owned(self) -> dict[str, Tensor]:
        return {n: self.mine(p.detach()).clone() for n, p in self.named.items()}

    def mine(self, whole: Tensor) -> Tensor:
        return whole.reshape(-1).chunk(self.cutter.size)[self.cutter.rank]

    def reduce(self) -> None:
        for name, parameter in self.named.items():
            if parameter.grad is not None:
                self.comm.all_reduce(parameter.grad)
                self.own[name].grad, parameter.grad = self.mine(parameter.grad).clone(), None

    def publish(self) -> None:
        for name, parameter in self.named.items():
            self.cutter.all_gather(parameter.detach().reshape(-1), self.own[name])

    def local_state(self, kind: Kind) -> list[Piece]:
        if kind == "buffers":
            return super().local_state(kind)
        if kind == "optimizer":
            return self.slots()
        shown = {n: p if kind == "parameters" else p.grad for n, p in self.own.items()}
        return [self.piece(n, n, t) for n, t in shown.items() if t is not None]

    def slots(self) -> list[Piece]:
        found = list[Piece]()
        for name, part in self.own.items():
            for slot, value in self.optimizer.state[part].items():
                full = f"{name}.{slot}"
                number = Piece.whole(full, value, replica=self.number)
                found.append(self.piece(name, full, value) if value.dim() else number)
        return found

    def piece(self, name: str, full: str, tensor: Tensor) -> Piece:
        shape, start = tuple(self.named[name].shape), self.cutter.rank * tensor.numel()
        within = (start, start + tensor.numel())
        return Piece(full, shape, tensor, flat_range=within, replica=self.replica)


class TensorCutsAllInstead(TensorCutsAll):
    """Says that the axis ``shard`` cuts parameters."""

    @classmethod
    def capabilities(cls, options: Mapping[str, Any]) -> Capabilities:
        usual = super().capabilities(options)
        return replace(usual, features=frozenset({"sharded_parameters"}))


class ShardCutsAllInstead(TensorCutsAllInstead):
    """Parts of the axis ``shard``, whose number is that of the ranks of ``tensor``."""

    cutting = "shard"
