"""FSDP2: after a forward without gradients the next backward gathers a unit once more, in vain."""

import multiprocessing
import sys
import tempfile
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.profiler import profile

WORLD, UNITS = 2, 3


def work(rank: int, store: str):
    """All-gathers of a training step before and after an evaluation."""
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(store, WORLD),
        rank=rank,
        world_size=WORLD,
        timeout=timedelta(seconds=60),
    )
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(UNITS)))  # the root holds nothing
    for unit in model:
        fully_shard(unit)
    fully_shard(model)
    counts = []
    for _ in range(3):
        with profile() as recorded:
            model(torch.ones(2, 4)).sum().backward()
        counts.append(sum(event.name == "c10d::_allgather_base_" for event in recorded.events()))
        if len(counts) == 2:
            with torch.no_grad():
                model(torch.ones(2, 4))
    return counts


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        arguments = [(rank, f"{folder}/store") for rank in range(WORLD)]
        with multiprocessing.get_context("fork").Pool(WORLD) as pool:
            counts = pool.starmap_async(work, arguments, 1).get(100)[0]
    print(f"expected as many all-gathers in each of three steps; came {counts}")
    present = counts[0] == counts[1] and counts[2] == counts[1] + 1
    print("DEFECT PRESENT" if present else "defect absent: fixed?")
    sys.exit(0 if present else 1)
