"""torch.distributed.nn: gradients through AVG are those of a sum."""

import multiprocessing
import sys
import tempfile
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.nn import functional

WORLD = 2


def work(rank: int, store: str):
    """Gradients through reduce_scatter and reduce with AVG."""
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(store, WORLD),
        rank=rank,
        world_size=WORLD,
        timeout=timedelta(seconds=60),
    )
    options = {"op": dist.ReduceOp.AVG}
    one = torch.ones(WORLD, requires_grad=True)
    shards = list(one.split(1))
    functional.reduce_scatter(torch.empty(1), shards, **options).sum().backward()
    two = torch.ones(1, requires_grad=True)
    loss = functional.reduce(two.clone(), 0, **options).sum()
    (loss if rank == 0 else 0 * loss).backward()
    return [float(one.grad[0]), float(two.grad[0])]


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        arguments = [(rank, f"{folder}/store") for rank in range(WORLD)]
        with multiprocessing.get_context("fork").Pool(WORLD) as pool:
            results = pool.starmap_async(work, arguments, 1).get(100)
    present = results[0] == [1.0, 1.0]
    print(f"expected gradients of 1/{WORLD} through AVG; came {results[0]}")
    print("DEFECT PRESENT" if present else "defect absent: fixed?")
    sys.exit(0 if present else 1)
