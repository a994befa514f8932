"""DTensor: losses of uneven shards average the means of ranks, as if all were equal."""

import multiprocessing
import sys
import tempfile
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.nn import functional as F

WORLD = 2


def work(rank: int, store: str):
    """Each loss on whole tensors and on sharded ones."""
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(store, WORLD),
        rank=rank,
        world_size=WORLD,
        timeout=timedelta(seconds=60),
    )
    mesh = init_device_mesh("cpu", (WORLD,))
    a, b = torch.tensor([0.0, 0.0, 0.9]), torch.zeros(3)  # shards of 2 and 1 elements
    losses = (F.mse_loss, F.smooth_l1_loss, F.huber_loss, F.binary_cross_entropy)
    pairs = []
    for loss in losses:
        split = loss(*(distribute_tensor(t, mesh, [Shard(0)]) for t in (a, b)))
        pairs.append((round(float(loss(a, b)), 4), round(float(split.full_tensor()), 4)))
    return pairs


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        arguments = [(rank, f"{folder}/store") for rank in range(WORLD)]
        with multiprocessing.get_context("fork").Pool(WORLD) as pool:
            results = pool.starmap_async(work, arguments, 1).get(100)
    present = all(abs(came / right - 1.5) < 1e-2 for right, came in results[0])
    print(f"expected (one process, DTensor) to agree for four losses; came {results[0]}")
    print("DEFECT PRESENT" if present else "defect absent: fixed?")
    sys.exit(0 if present else 1)
