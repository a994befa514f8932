"""FSDP2: after a forward without gradients the root computes with old parameters."""

import multiprocessing
import sys
import tempfile
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

WORLD = 2


def work(rank: int, store: str):
    """How far the step moves the outputs: as they come, and after reshard()."""
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(store, WORLD),
        rank=rank,
        world_size=WORLD,
        timeout=timedelta(seconds=60),
    )
    torch.manual_seed(0)
    model = nn.Linear(4, 4)
    fully_shard(model)  # all defaults
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    batch = torch.ones(2, 4)
    model(batch).sum().backward()
    with torch.no_grad():
        before = model(batch)  # a validation between backward and step
        optimizer.step()
        after = model(batch)
        model.reshard()
        return [float((t - before).abs().max()) for t in (after, model(batch))]


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        arguments = [(rank, f"{folder}/store") for rank in range(WORLD)]
        with multiprocessing.get_context("fork").Pool(WORLD) as pool:
            results = pool.starmap_async(work, arguments, 1).get(100)
    came, right = results[0]
    present = came == 0.0 and right > 1.0
    print(f"expected outputs to move by {right:.1f} with the step; came {came:.1f}")
    print("DEFECT PRESENT" if present else "defect absent: fixed?")
    sys.exit(0 if present else 1)
