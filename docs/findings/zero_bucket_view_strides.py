"""ZeroRedundancyOptimizer: parameters_as_bucket_view after DDP transposes gradients."""

import multiprocessing
import sys
import tempfile
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

WORLD = 2


def work(rank: int, store: str):
    """How far the gradient is from one process's, as it is and transposed."""
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(store, WORLD),
        rank=rank,
        world_size=WORLD,
        timeout=timedelta(seconds=60),
    )
    torch.manual_seed(0)
    linear = nn.Linear(3, 3, bias=False)
    linear.weight = nn.Parameter(torch.randn(3, 3).t())  # not contiguous
    start, batch = linear.weight.detach().clone(), torch.arange(6.0).view(2, 3)
    model = DistributedDataParallel(linear)
    view = {"parameters_as_bucket_view": True}
    ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=1.0, **view)
    model(batch).square().sum().backward()
    oracle = start.clone().requires_grad_(True)
    nn.functional.linear(batch, oracle).square().sum().backward()
    same, transposed = linear.weight.grad - oracle.grad, linear.weight.grad - oracle.grad.t()
    return float(same.abs().max()), float(transposed.abs().max())


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        arguments = [(rank, f"{folder}/store") for rank in range(WORLD)]
        with multiprocessing.get_context("fork").Pool(WORLD) as pool:
            results = pool.starmap_async(work, arguments, 1).get(100)
    error, transposed = results[0]
    present = error > 1e-2 and transposed < 1e-5
    print(
        f"expected the gradient of one process; off by {error:.2f}, transposed by {transposed:.0e}"
    )
    print("DEFECT PRESENT" if present else "defect absent: fixed?")
    sys.exit(0 if present else 1)
