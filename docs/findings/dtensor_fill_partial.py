"""DTensor: fill_ of a partial sum fills every rank's share."""

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
    """A sum over the sharded dimension after it is filled."""
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(store, WORLD),
        rank=rank,
        world_size=WORLD,
        timeout=timedelta(seconds=60),
    )
    mesh = init_device_mesh("cpu", (WORLD,))
    total = distribute_tensor(torch.ones(4, 3), mesh, [Shard(0)]).sum(0)
    return total.fill_(1.0).full_tensor().tolist()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        arguments = [(rank, f"{folder}/store") for rank in range(WORLD)]
        with multiprocessing.get_context("fork").Pool(WORLD) as pool:
            results = pool.starmap_async(work, arguments, 1).get(100)
    present = results[0] == [float(WORLD)] * 3
    print(f"expected [1.0, 1.0, 1.0] after fill_(1.0); came {results[0]}")
    print("DEFECT PRESENT" if present else "defect absent: fixed?")
    sys.exit(0 if present else 1)
