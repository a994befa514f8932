"""torch.distributed.nn: the gradient through all_reduce with MAX goes to every rank."""

import multiprocessing
import sys
import tempfile
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.nn import functional

WORLD = 2


def work(rank: int, store: str):
    """This rank's gradient of the sum over ranks of the maximum."""
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(store, WORLD),
        rank=rank,
        world_size=WORLD,
        timeout=timedelta(seconds=60),
    )
    value = torch.tensor([float(1 + rank)], requires_grad=True)  # rank 1 has the largest
    functional.all_reduce(value.clone(), op=dist.ReduceOp.MAX).sum().backward()
    return float(value.grad)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        arguments = [(rank, f"{folder}/store") for rank in range(WORLD)]
        with multiprocessing.get_context("fork").Pool(WORLD) as pool:
            results = pool.starmap_async(work, arguments, 1).get(100)
    present = results == [1.0, 1.0]
    print(f"expected gradients [0.0, {WORLD}.0], of the largest alone; came {results}")
    print("DEFECT PRESENT" if present else "defect absent: fixed?")
    sys.exit(0 if present else 1)
