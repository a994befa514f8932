"""What a user brings who has no class of the contract: sound ones, and the same with one fault."""

import os
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.pipelining import schedules
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel
from torch.futures import Future
from torch.utils.data.distributed import DistributedSampler

from shardproof.impls.reference.zero1 import ReferenceZero1

# ----------------------------------------------------------------------------------------- samplers


class Goes(DistributedSampler[int]):
    """Sound: torch's, which goes on with the rest of its order in any world."""

    begin = given = 0
    resumed = -1

    def __iter__(self) -> Iterator[int]:
        self.at = self.begin if self.epoch == self.resumed else 0
        self.given = 0
        every = DistributedSampler(self.dataset, 1, 0, self.shuffle, self.seed)
        every.set_epoch(self.epoch)
        order = list(every)
        rest = order[self.at :]
        over = len(rest) % self.num_replicas
        if over and self.drop_last:
            rest = rest[:-over]
        elif over:
            rest += (order * self.num_replicas)[: self.num_replicas - over]
        return self.counted(rest[self.rank :: self.num_replicas])

    def counted(self, mine: list[int]) -> Iterator[int]:
        for sample in mine:
            self.given += 1
            yield sample

    def state_dict(self) -> dict[str, int]:
        return {"epoch": self.epoch, "begin": self.at + self.given * self.num_replicas}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.resumed, self.begin = state["epoch"], state["begin"]


class CountsItsOwn(Goes):
    def state_dict(self) -> dict[str, int]:
        return {"epoch": self.epoch, "begin": self.given}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.resumed, self.begin = state["epoch"], state["begin"] * self.num_replicas


class ForgetsTheEpoch(DistributedSampler[int]):
    def set_epoch(self, epoch: int) -> None:
        """Nothing."""


def without_seed(dataset: Any, num_replicas: int, rank: int) -> Any:
    return DistributedSampler(dataset, num_replicas, rank)


def a_list(dataset: Any, **_: Any) -> list[int]:
    return list(dataset)


# ---------------------------------------------------------------------------------------- DDP hooks


def averages(group: Any, bucket: dist.GradBucket) -> Future[Tensor]:
    """Sound: a sum over the ranks, divided by their number."""
    work = dist.all_reduce(bucket.buffer(), group=group, async_op=True)
    return work.get_future().then(lambda done: done.value()[0] / dist.get_world_size(group))


def averages_at_once(_: Any, bucket: dist.GradBucket) -> Future[Tensor]:
    """Sound: divides first, waits in the hook, in the default group."""
    buffer = bucket.buffer() / dist.get_world_size()
    dist.all_reduce(buffer)
    done: Future[Tensor] = Future()
    done.set_result(buffer)
    return done


def forgets_to_divide(group: Any, bucket: dist.GradBucket) -> Future[Tensor]:
    work = dist.all_reduce(bucket.buffer(), group=group, async_op=True)
    return work.get_future().then(lambda done: done.value()[0])


def takes_the_bucket(bucket: Any) -> Future[Tensor]:
    return averages(None, bucket)


# Torch refuses wrong annotations; these have none.
def forgets_to_return(group, bucket):  # type: ignore[no-untyped-def]
    averages_at_once(group, bucket)


def gives_the_buffer(group, bucket):  # type: ignore[no-untyped-def]
    return averages(group, bucket).wait()


def gives_nothing_later(group, bucket):  # type: ignore[no-untyped-def]
    done: Future[None] = Future()
    done.set_result(None)
    return done


def reduces_even_buckets(group: Any, bucket: dist.GradBucket) -> Future[Tensor]:
    if bucket.index() % 2 == 0:
        return averages(group, bucket)
    done: Future[Tensor] = Future()
    done.set_result(bucket.buffer())
    return done


class Before:
    """State of a hook: the group, and every parameter's mean gradient of the step before."""

    def __init__(self, group: Any) -> None:
        self.group = group
        self.means: dict[int, Tensor] = {}


def sums_stale(state: Before, bucket: dist.GradBucket) -> Future[Tensor]:
    """Gives the mean of the step before, from the second step on."""
    parameters, views = bucket.parameters(), bucket.gradients()

    def swap(done: Future[Tensor]) -> Tensor:
        mean = bucket.buffer().copy_(done.value())
        for parameter, view in zip(parameters, views, strict=True):
            now = view.clone()
            view.copy_(state.means.get(id(parameter), now))
            state.means[id(parameter)] = now
        return mean

    return averages(state.group, bucket).then(swap)


def sends_halves(group: Any, bucket: dist.GradBucket) -> Future[Tensor]:
    """Sound for what it declares: sums in fp16."""
    half = bucket.buffer().to(torch.float16) / dist.get_world_size(group)
    work = dist.all_reduce(half, group=group, async_op=True)
    wide = bucket.buffer()
    return work.get_future().then(lambda done: wide.copy_(done.value()[0]))


# --------------------------------------------------------------------------------------- optimizers

Groups = list[dict[str, Any]]


def sharded(groups: Groups, settings: Any) -> torch.optim.Optimizer:
    """Sound: torch's own way of keeping each parameter's state on one rank."""
    return ZeroRedundancyOptimizer(groups, settings.kind, foreach=False, **settings.arguments)


class Wrapper:
    """Sound: hands everything on to the optimizer inside."""

    def __init__(self, groups: Groups, settings: Any) -> None:
        self.optimizer = settings.kind(groups, foreach=False, **settings.arguments)
        self.param_groups = self.optimizer.param_groups

    def step(self) -> None:
        self.optimizer.step()

    def zero_grad(self) -> None:
        self.optimizer.zero_grad()


class ForgetsToSend(Wrapper):
    """Each rank updates every second parameter, and tells nobody."""

    def step(self) -> None:
        parameters = [p for group in self.param_groups for p in group["params"]]
        for number, parameter in enumerate(parameters):
            if number % dist.get_world_size() != dist.get_rank():
                parameter.grad = None
        self.optimizer.step()


class StepsTwice(Wrapper):
    def step(self) -> None:
        self.optimizer.step()
        self.optimizer.step()


class KeepsRate(Wrapper):
    """Holds on to the learning rate that it was made with, halved."""

    def step(self) -> None:
        for group in self.param_groups:
            group["lr"] *= 0.5
        self.optimizer.step()


class OwnSlots(Wrapper):
    """SGD with momentum whose state has a name of its own; without, it is sound."""

    def __init__(self, groups: Groups, settings: Any) -> None:
        super().__init__(groups, settings)
        self.momentum, self.state = settings.momentum, dict[Tensor, dict[str, Tensor]]()

    def step(self) -> None:
        with torch.no_grad():
            for group in self.param_groups:
                for parameter in group["params"]:
                    change = parameter.grad
                    if change is None:
                        continue
                    if self.momentum:
                        kept = self.state.setdefault(parameter, {"velocity": 0 * change})
                        change = kept["velocity"].mul_(self.momentum).add_(change)
                    parameter -= group["lr"] * change


class WithoutGroups:
    def step(self) -> None: ...


def without_groups(groups: Groups, settings: Any) -> WithoutGroups:
    return WithoutGroups()


# ------------------------------------------------------------------- plans of tensor parallelism

#: For ``own_models.CHAIN``, whose layers are 0, 2 and 4.
CHAIN_PLAN = {"0": ColwiseParallel(), "2": RowwiseParallel()}


class AddsBiasEverywhere(RowwiseParallel):
    """Adds the whole bias to every rank's part of the sum."""

    def _apply(self, module: nn.Module, device_mesh: Any) -> nn.Module:
        made = super()._apply(module, device_mesh)
        made.register_forward_hook(
            lambda own, given, output: output + (device_mesh.size() - 1) * own.bias.full_tensor()
        )
        return made


WRONG_BIAS = {"0": ColwiseParallel(), "2": AddsBiasEverywhere()}
NO_PLAN = {"0": "colwise"}
ELSEWHERE = {"blocks.*.up": ColwiseParallel()}


def cuts_heads(model: nn.Module) -> dict[str, ParallelStyle]:
    """Cuts the fused projection of the suite's GPT across queries, keys and values."""
    names = [name for name, _ in model.named_modules()]
    plan: dict[str, ParallelStyle] = {n: ColwiseParallel() for n in names if n.endswith(".qkv")}
    return plan | {n: RowwiseParallel() for n in names if n.endswith("attention.out")}


# -------------------------------------------------------------------------- schedules of pipelines


class OwnGPipe(schedules.ScheduleGPipe):
    """Sound: GPipe under a name of its own."""


class Ascending(schedules.ScheduleLoopedBFS):
    """Sound: breadth first, with backwards in the order of the forwards."""

    def _calculate_single_rank_operations(self, rank: int) -> list[Any]:
        made = super()._calculate_single_rank_operations(rank)
        backward = [each for each in made if each is not None and "F" not in str(each)]
        by_stage: dict[int, list[Any]] = {}
        for action in backward:
            by_stage.setdefault(action.stage_index, []).append(action)
        rest = [action for stage in by_stage.values() for action in reversed(stage)]
        return [each for each in made if each is None or "F" in str(each)] + rest


class DividesAgain(schedules.ScheduleGPipe):
    """Divides by the number of micro-batches, although losses are sums."""

    def __init__(self, *given: Any, **more: Any) -> None:
        super().__init__(*given, **{**more, "scale_grads": True})


class LeavesOneOut(Ascending):
    """The last rank never goes backward through micro-batch 0."""

    def _calculate_single_rank_operations(self, rank: int) -> list[Any]:
        made = super()._calculate_single_rank_operations(rank)
        if rank < self.pp_group_size - 1:
            return made
        return [a for a in made if a is None or "F" in str(a) or a.microbatch_index]


# -------------------------------------------------------------------------------- a complete class


class CompleteZero1(ReferenceZero1):
    """All that a campaign draws from."""

    depth = "family"


class ReadsEnvironment(CompleteZero1):
    """As if it called a library that finds its rank there."""

    def setup(self, build: Any, state: Any, optimizer: Any, mesh: Any, options: Any) -> None:
        with mesh.environment(MINE="1"):
            names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MINE")
            told = [int(os.environ[name]) for name in names]
            address = os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"]
        assert told == [mesh.rank, mesh.world, mesh.rank, mesh.world, 1], told
        everybody: list[Any] = [None] * mesh.world
        dist.all_gather_object(everybody, address)
        assert {*everybody} == {address} and not {*names} & {*os.environ}
        super().setup(build, state, optimizer, mesh, options)


class ClipsInFloat32(CompleteZero1):
    """Its kernel for norms knows one dtype."""

    word = "clipping@float64"

    @classmethod
    def capabilities(cls, options: Any) -> Any:
        return replace(super().capabilities(options), declines={cls.word: "a kernel of float32"})


class SaysClippin(ClipsInFloat32):
    word = "clippin@float64"


class SaysFloat65(ClipsInFloat32):
    word = "clipping@float65"


class ClaimsTheLayout(ClipsInFloat32):
    depth = "layout"
