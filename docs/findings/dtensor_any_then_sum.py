"""DTensor: counting what any() found along the sharded dimension is wrong."""

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
    """Columns in which something is true, of two matrices."""
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(store, WORLD),
        rank=rank,
        world_size=WORLD,
        timeout=timedelta(seconds=60),
    )
    mesh = init_device_mesh("cpu", (WORLD,))
    whole = torch.tensor([[True, False], [True, False]])
    split = distribute_tensor(whole, mesh, [Shard(0)])
    one = distribute_tensor(torch.tensor([[True, False], [False, True]]), mesh, [Shard(0)])
    return [int(t.any(0).sum().full_tensor()) for t in (split, one)]


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        arguments = [(rank, f"{folder}/store") for rank in range(WORLD)]
        with multiprocessing.get_context("fork").Pool(WORLD) as pool:
            results = pool.starmap_async(work, arguments, 1).get(100)
    present = results[0] != [1, 2]
    print(f"expected [1, 2] columns with any true element; came {results[0]}")
    print("DEFECT PRESENT" if present else "defect absent: fixed?")
    sys.exit(0 if present else 1)
