"""DTensor: a sum of norms along the sharded dimension is wrong."""

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
    """The sum of the columns' norms, on one process and sharded."""
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(store, WORLD),
        rank=rank,
        world_size=WORLD,
        timeout=timedelta(seconds=60),
    )
    mesh = init_device_mesh("cpu", (WORLD,))
    whole = torch.tensor([[3.0, 0.0], [0.0, 4.0]])
    split = distribute_tensor(whole, mesh, [Shard(0)])
    return float(whole.norm(dim=0).sum()), float(split.norm(dim=0).sum().full_tensor())


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        arguments = [(rank, f"{folder}/store") for rank in range(WORLD)]
        with multiprocessing.get_context("fork").Pool(WORLD) as pool:
            results = pool.starmap_async(work, arguments, 1).get(100)
    right, came = results[0]
    present = right == 7.0 and abs(came - 5.0) < 1e-5
    print(f"expected {right} as the sum of the two columns' norms; came {came}")
    print("DEFECT PRESENT" if present else "defect absent: fixed?")
    sys.exit(0 if present else 1)
