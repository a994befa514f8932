"""Hooks of DDP that keep something of every bucket and step; the first is sound."""

from typing import Any

import torch
import torch.distributed as dist

KEPT: list[Any] = []


def mean(group: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    work: Any = dist.all_reduce(bucket.buffer(), group=group, async_op=True)
    size = dist.get_world_size(group)
    reduced: Any = work.get_future().then(lambda done: done.value()[0] / size)
    return reduced


def keeps_numbers(group: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    KEPT.append(bucket.buffer().norm().reshape(1).expand(512).clone())
    return mean(group, bucket)


def keeps_objects(group: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    KEPT.append([tuple(range(i, i + 4)) for i in range(20_000)])
    return mean(group, bucket)
