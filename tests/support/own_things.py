"""What a user brings who has no class of the contract: sound ones, and the same with one fault."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future

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
