"""DDP: with static_graph, a first backward under no_sync ends in an internal assertion."""

import multiprocessing
import sys
import tempfile
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

WORLD = 2


def work(rank: int, store: str):
    """What the step says."""
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(store, WORLD),
        rank=rank,
        world_size=WORLD,
        timeout=timedelta(seconds=60),
    )
    model = DistributedDataParallel(nn.Linear(4, 4), static_graph=True)
    try:
        with model.no_sync():
            model(torch.ones(2, 4)).sum().backward()
        model(torch.ones(2, 4)).sum().backward()
    except RuntimeError as error:
        return str(error)
    return "no error"


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        arguments = [(rank, f"{folder}/store") for rank in range(WORLD)]
        with multiprocessing.get_context("fork").Pool(WORLD) as pool:
            results = pool.starmap_async(work, arguments, 1).get(100)
    present = "INTERNAL ASSERT FAILED" in results[0]
    print(f"expected accumulated gradients; came {results[0][:70]}")
    print("DEFECT PRESENT" if present else "defect absent: fixed?")
    sys.exit(0 if present else 1)
