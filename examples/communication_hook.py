"""A communication hook of DistributedDataParallel, tested inside DDP.

Run: python examples/communication_hook.py
"""

import torch.distributed as dist

from shardproof import prove


def mean(group, bucket):
    """Sum a bucket over the ranks, then divide by their number."""
    work = dist.all_reduce(bucket.buffer(), group=group, async_op=True)
    return work.get_future().then(lambda done: done.value()[0] / dist.get_world_size(group))


def total(group, bucket):
    """The same without the division, which is wrong."""
    work = dist.all_reduce(bucket.buffer(), group=group, async_op=True)
    return work.get_future().then(lambda done: done.value()[0])


if __name__ == "__main__":
    for hook in (mean, total):
        for row in prove(hook=hook, worlds=(3,)).itertuples():
            print(f"{hook.__name__}, {row.world} ranks: {row.verdict} {row.reason}")
