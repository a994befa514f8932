"""DTensor: gradients of sharded losses are N times too large, and values of uneven ones wrong."""

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
LOSSES = (F.mse_loss, F.smooth_l1_loss, F.huber_loss, F.binary_cross_entropy)


def work(rank: int, store: str):
    """Each loss on 3 elements and its gradient's norm on 4, over those of one process."""
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(store, WORLD),
        rank=rank,
        world_size=WORLD,
        timeout=timedelta(seconds=60),
    )
    mesh = init_device_mesh("cpu", (WORLD,))
    uneven = torch.tensor([0.0, 0.0, 0.9])  # shards of 2 and 1 elements
    even = torch.tensor([0.2, 0.4, 0.6, 0.8])
    ratios = []
    for loss in LOSSES:
        parts = (distribute_tensor(t, mesh, [Shard(0)]) for t in (uneven, torch.zeros(3)))
        value = float(loss(*parts).full_tensor() / loss(uneven, torch.zeros(3)))
        whole = even.clone().requires_grad_()
        loss(whole, torch.zeros(4)).backward()
        split = distribute_tensor(even, mesh, [Shard(0)]).requires_grad_()
        loss(split, distribute_tensor(torch.zeros(4), mesh, [Shard(0)])).backward()
        ratios.append(
            (round(value, 4), round(float(split.grad.full_tensor().norm() / whole.grad.norm()), 4))
        )
    return ratios


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        arguments = [(rank, f"{folder}/store") for rank in range(WORLD)]
        with multiprocessing.get_context("fork").Pool(WORLD) as pool:
            results = pool.starmap_async(work, arguments, 1).get(100)
    present = all(abs(v - 1.5) < 1e-2 and abs(g - WORLD) < 1e-2 for v, g in results[0])
    print(f"expected 1 (uneven value, even gradient) of four losses; came {results[0]}")
    print("DEFECT PRESENT" if present else "defect absent: fixed?")
    sys.exit(0 if present else 1)
