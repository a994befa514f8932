"""DTensor: item() of a partial sum is this rank's share."""

import multiprocessing
import sys
import tempfile
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

WORLD = 2


def work(rank: int, store: str):
    """The sum of a sharded tensor, by item() and by full_tensor()."""
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(store, WORLD),
        rank=rank,
        world_size=WORLD,
        timeout=timedelta(seconds=60),
    )
    mesh = init_device_mesh("cpu", (WORLD,))
    total = distribute_tensor(torch.arange(4.0), mesh, [Shard(0)]).sum()
    return total.item(), float(total.full_tensor())


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        arguments = [(rank, f"{folder}/store") for rank in range(WORLD)]
        with multiprocessing.get_context("fork").Pool(WORLD) as pool:
            results = pool.starmap_async(work, arguments, 1).get(100)
    present = [came for came, _ in results] == [1.0, 5.0]
    print(f"expected {results[0][1]} on every rank; came {[came for came, _ in results]}")
    print("DEFECT PRESENT" if present else "defect absent: fixed?")
    sys.exit(0 if present else 1)
