"""FSDP1: clip_grad_norm_ fails for a float64 model."""

import multiprocessing
import sys
import tempfile
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel

WORLD = 2


def work(rank: int, store: str):
    """What clipping says."""
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(store, WORLD),
        rank=rank,
        world_size=WORLD,
        timeout=timedelta(seconds=60),
    )
    model = FullyShardedDataParallel(nn.Linear(4, 4).double(), device_id=torch.device("cpu"))
    model(torch.randn(2, 4, dtype=torch.float64)).sum().backward()
    try:
        return str(model.clip_grad_norm_(1.0))
    except RuntimeError as error:
        return str(error)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        arguments = [(rank, f"{folder}/store") for rank in range(WORLD)]
        with multiprocessing.get_context("fork").Pool(WORLD) as pool:
            results = pool.starmap_async(work, arguments, 1).get(100)
    present = "convertible without narrowing" in results[0]
    print(f"expected a norm; came {results[0]}")
    print("DEFECT PRESENT" if present else "defect absent: fixed?")
    sys.exit(0 if present else 1)
