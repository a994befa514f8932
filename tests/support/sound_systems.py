"""Systems and models as adopters have them, sound but for the last of each kind; see
test_sound_systems.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

from shardproof import OwnWorkload
from shardproof.contract import (
    Batch,
    Capabilities,
    Observe,
    Options,
    SamplerSpec,
    Sampling,
    StepResult,
)
from shardproof.impls.adapter import Adapter
from shardproof.impls.reference.fsdp import ReferenceFSDP

# ------------------------------------------------------------------------------------- models


def points(size: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    inputs = torch.randn(size, 6, generator=generator)
    return inputs, (inputs.sum(1) > 0).long()


def each(outputs: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(outputs, targets, reduction="none")


class Tabled(nn.Module):
    """A table and a mask that no state dict holds, as rotary embeddings have them."""

    table: Tensor
    mask: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 8), nn.Linear(8, 2)
        self.register_buffer("table", torch.linspace(0.5, 2.0, 8), persistent=False)
        self.register_buffer("mask", torch.arange(8) % 3 != 0, persistent=False)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.down(torch.relu(self.up(inputs) * self.table).masked_fill(~self.mask, 0.0))


class Rootless(nn.Module):
    """Every parameter is in a block."""

    def __init__(self, frozen: bool = False) -> None:
        super().__init__()
        self.blocks = nn.Sequential(
            *(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 2))
        )
        self.blocks[0].requires_grad_(not frozen)

    def forward(self, inputs: Tensor) -> Tensor:
        outputs: Tensor = self.blocks(inputs)
        return outputs


class _NotInDouble(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, inputs: Tensor) -> Tensor:
        if inputs.dtype == torch.float64:
            raise RuntimeError("no kernel for Double")
        return inputs.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0]


class Narrow(Rootless):
    """A kernel that has no form for float64."""

    def forward(self, inputs: Tensor) -> Tensor:
        return super().forward(_NotInDouble.apply(inputs))


tabled = OwnWorkload(Tabled, each, points, units=("up",))
rootless = OwnWorkload(Rootless, each, points)
narrow = OwnWorkload(Narrow, each, points)

# ------------------------------------------------------------------------------------ systems


class DDP(Adapter):
    """torch's DDP by the base class; what is tied or constant stands in no state dict."""

    strategy = "ddp"

    @classmethod
    def capabilities(cls, options: Options) -> Capabilities:
        dtypes = ("float64", "float32", "bfloat16")
        declines = {"loss_scale": "not written"}
        return Capabilities(buffers="rank0", dtypes=dtypes, declines=declines)

    def wrap(self, model: nn.Module) -> nn.Module:
        comm = self.mesh.comm("replicate")
        self.divided_by = float(comm.size)
        return DistributedDataParallel(model, process_group=comm.group, find_unused_parameters=True)


class OtherTable(DDP):
    """One rank's table is another one, and DDP does not send it."""

    def wrap(self, model: nn.Module) -> nn.Module:
        if self.mesh.rank == 1:
            model.get_buffer("table").mul_(1.5)
        comm = self.mesh.comm("replicate")
        self.divided_by = float(comm.size)
        return DistributedDataParallel(model, process_group=comm.group, broadcast_buffers=False)

    @classmethod
    def capabilities(cls, options: Options) -> Capabilities:
        return Capabilities(buffers="per_rank", declines={"loss_scale": "not written"})


class FSDP2(Adapter):
    """torch's ``fully_shard`` by the base class: its pieces are DTensors."""

    strategy = "fsdp"

    @classmethod
    def capabilities(cls, options: Options) -> Capabilities:
        return Capabilities(axes=("shard",), buffers="none", initial_state="everywhere")

    def wrap(self, model: nn.Module) -> nn.Module:
        for part in (*(model.get_submodule(name) for name in self.build.units), model):
            fully_shard(part, mesh=self.mesh.device_mesh["shard"])
        self.divided_by = float(self.mesh.world)
        return model


class ClipsInside(DDP):
    """Clips and updates in one call: nothing is shown between."""

    def step(self, batch: Batch, observe: Observe) -> StepResult:
        def shown(point: Any) -> None:
            if point != "after_clip":
                observe(point)

        return super().step(batch, shown)


class ClipsTwice(ClipsInside):
    """As that, with a factor too much."""

    def clip(self, limit: float) -> Tensor:
        norm = super().clip(limit)
        for parameter in self.trained().values():
            if parameter.grad is not None:
                parameter.grad.mul_(0.9)
        return norm


class MyFSDP(ReferenceFSDP):
    """Nothing of its own."""


class RingOfPositions(DDP):
    """Splits the positions of each sample along ``tensor``, whatever heads a layer has.

    (Here each rank computes them all: what a ring sends is not the question.)
    """

    strategy = "ring_of_positions"

    @classmethod
    def capabilities(cls, options: Options) -> Capabilities:
        return Capabilities(axes=("tensor",), buffers="none", initial_state="everywhere")

    def wrap(self, model: nn.Module) -> nn.Module:
        return model


# ----------------------------------------------------------------------------------- samplers


class Loader(Sampling):
    """torch's ``DataLoader`` over its ``DistributedSampler``: each epoch draws one number."""

    @classmethod
    def capabilities(cls, options: Options) -> Capabilities:
        return Capabilities(declines={"uneven": "pads or drops", "resume": "no state"})

    def start(self, spec: SamplerSpec, options: Options) -> None:
        self.spec = spec
        kind = {"shuffle": spec.shuffle, "seed": spec.seed, "drop_last": spec.tail == "drop"}
        data: Any = range(spec.samples)
        self.sampler = DistributedSampler(data, spec.world, spec.rank, **kind)
        self.loader = DataLoader(data, batch_size=None, sampler=self.sampler)

    def epoch(self, number: int) -> Iterator[int]:
        self.sampler.set_epoch(number)
        return iter(self.loader)


class DrawsTwice(Loader):
    """A number more, of which nothing depends."""

    def epoch(self, number: int) -> Iterator[int]:
        torch.rand(1)
        return super().epoch(number)


class SeedsByTheLoader(Loader):
    """Its order depends on that number."""

    def epoch(self, number: int) -> Iterator[int]:
        seed = int(torch.empty((), dtype=torch.int64).random_().item())
        order = torch.Generator().manual_seed(seed % 1000)
        every = torch.randperm(self.spec.samples, generator=order).tolist()
        longest = -(-self.spec.samples // self.spec.world) * self.spec.world
        every += every[: longest - self.spec.samples]
        return iter(every[self.spec.rank :: self.spec.world])


def saved(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in state.items()}


class Saves(DDP):
    """A file of rank 0's state dicts."""

    lost: tuple[str, ...] = ()

    @classmethod
    def capabilities(cls, options: Options) -> Capabilities:
        declines = {"loss_scale": "not written"}
        return Capabilities(buffers="rank0", checkpoints=("full",), declines=declines)

    def save(self, path: Any, extra: Mapping[str, Any]) -> None:
        if self.mesh.rank == 0:
            number = len([*path.iterdir()]) if path.is_dir() else 0
            folder = path / f"{number:04}"
            folder.mkdir(parents=True)
            model = {n: t for n, t in saved(self.model.state_dict()).items() if n not in self.lost}
            held = {"model": model, "optimizer": self.optimizer.state_dict(), "extra": dict(extra)}
            torch.save(held, folder / "all.pt")
        self.mesh.comm("replicate").barrier()

    def load(self, path: Any) -> Mapping[str, Any]:
        folder = path if (path / "all.pt").is_file() else max(path.iterdir())
        held = torch.load(folder / "all.pt", weights_only=True)
        self.model.load_state_dict(held["model"], strict=False)
        self.optimizer.load_state_dict(held["optimizer"])
        extra: Mapping[str, Any] = held["extra"]
        return extra


class Forgets(Saves):
    """One tensor is left out."""

    lost = ("down.bias",)


class ByRank(Loader):
    """Each rank keeps its own place in an order that goes on from a generator; it saves both."""

    saves_generator = True

    @classmethod
    def capabilities(cls, options: Options) -> Capabilities:
        why = "its order goes on from a generator"
        declines = dict.fromkeys(("again", "other_world", "read_ahead"), why)
        return Capabilities(declines=declines, features=frozenset({"state_by_rank"}))

    def start(self, spec: SamplerSpec, options: Options) -> None:
        self.spec, self.taken, self.skip = spec, 0, 0
        self.generator = torch.Generator().manual_seed(spec.seed)

    def epoch(self, number: int) -> Iterator[int]:
        self.before = self.generator.get_state()
        every = torch.randperm(self.spec.samples, generator=self.generator).tolist()
        if not self.spec.shuffle:
            every = list(range(self.spec.samples))
        over = len(every) % self.spec.world
        if over and self.spec.tail == "drop":
            every = every[: len(every) - over]
        elif over and self.spec.tail == "pad":
            every = (every * (1 + self.spec.world))[: len(every) + self.spec.world - over]
        begin, self.skip = self.skip, 0
        self.begin = begin
        return iter(every[self.spec.rank :: self.spec.world][begin:])

    def state(self, taken: int) -> Mapping[str, Any]:
        held = self.before.tolist() if self.saves_generator else None
        return {"rank": self.spec.rank, "taken": self.begin + taken, "generator": held}

    def load_state(self, state: Mapping[str, Any]) -> None:
        assert state["rank"] == self.spec.rank, "another rank's state"
        self.skip = state["taken"]
        if state["generator"] is not None:
            self.generator.set_state(torch.tensor(state["generator"], dtype=torch.uint8))


class ForgetsItsGenerator(ByRank):
    """The state has the place only."""

    saves_generator = False


# ---------------------------------------------------------------------- batches and optimizers


class _Inject(torch.autograd.Function):
    """A loss that joins the gradient inside of forward."""

    @staticmethod
    def forward(ctx: Any, scores: Tensor, term: Tensor) -> Tensor:
        ctx.save_for_backward(term)
        return scores

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        (term,) = ctx.saved_tensors
        return gradients[0], torch.ones_like(term)


class Routed(nn.Module):
    """Experts by a gate, whose balance is a term of every micro-batch at full size."""

    def __init__(self, coefficient: float = 0.1) -> None:
        super().__init__()
        self.coefficient = coefficient
        self.gate, self.head = nn.Linear(6, 4), nn.Linear(8, 2)
        self.experts = nn.ModuleList(nn.Linear(6, 8) for _ in range(4))

    def forward(self, inputs: Tensor) -> Tensor:
        shares = self.gate(inputs).softmax(-1)
        if self.coefficient:
            balance = (shares.mean(0) ** 2).sum()
            shares = _Inject.apply(shares, self.coefficient * balance)
        mixed = [shares[:, k : k + 1] * expert(inputs) for k, expert in enumerate(self.experts)]
        outputs: Tensor = self.head(torch.relu(torch.stack(mixed).sum(0)))
        return outputs


def beside_others(outputs: Tensor, targets: Tensor) -> Tensor:
    """A loss of each sample beside the others of its micro-batch, as contrastive ones are."""
    return F.cross_entropy(outputs - outputs.mean(0), targets, reduction="none")


routed = OwnWorkload(Routed, each, points, units=("head",))
in_batch = OwnWorkload(Rootless, beside_others, points)


class DealtOut(torch.optim.Optimizer):
    """Parameter n is updated by rank n modulo their number, which sends it to all."""

    leaves = False

    def __init__(self, groups: Any, settings: Any) -> None:
        super().__init__(groups, dict(settings.arguments))
        rank, world = torch.distributed.get_rank(), torch.distributed.get_world_size()
        every = [p for group in self.param_groups for p in group["params"]]
        self.owner = {p: n % world for n, p in enumerate(every)}
        own = [
            {**g, "params": [p for p in g["params"] if self.owner[p] == rank]}
            for g in self.param_groups
        ]
        own = [group for group in own if group["params"]]
        self.mine = settings.kind(own, **settings.arguments) if own else None
        if self.mine is not None:
            self.state = self.mine.state

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        mine = [p for group in self.mine.param_groups for p in group["params"]] if self.mine else []
        if self.leaves and all(p.grad is None for p in mine):
            return
        if self.mine is not None:
            for group in self.mine.param_groups:
                group["lr"] = self.param_groups[0]["lr"]
            self.mine.step()
        for parameter, owner in self.owner.items():
            torch.distributed.broadcast(parameter.data, owner)


class LeavesEarly(DealtOut):
    leaves = True


def dealt_out(groups: Any, settings: Any) -> DealtOut:
    return DealtOut(groups, settings)


def leaves_early(groups: Any, settings: Any) -> LeavesEarly:
    return LeavesEarly(groups, settings)
