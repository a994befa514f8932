"""ZeroRedundancyOptimizer: with DDP under Join, ranks without inputs use old gradients."""

import multiprocessing
import sys
import tempfile
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.join import Join
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

WORLD = 2


def work(rank: int, store: str):
    """Weights after training on unequal numbers of batches, by SGD and by sharded SGD."""
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(store, WORLD),
        rank=rank,
        world_size=WORLD,
        timeout=timedelta(seconds=60),
    )
    weights = []
    for kind in (torch.optim.SGD, ZeroRedundancyOptimizer):
        model = nn.Sequential(nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False))
        for parameter in model.parameters():
            nn.init.ones_(parameter)
        model = DistributedDataParallel(model, gradient_as_bucket_view=True)
        if kind is torch.optim.SGD:
            optimizer, joined = kind(model.parameters(), lr=0.1), [model]
        else:
            optimizer = kind(model.parameters(), torch.optim.SGD, lr=0.1)
            joined = [model, optimizer]
        with Join(joined):
            for _ in range(1 + rank):  # one batch on rank 0, two on rank 1
                optimizer.zero_grad(set_to_none=False)
                model(torch.ones(1, 1)).sum().backward()
                optimizer.step()
        weights.append([round(float(p), 4) for p in model.parameters()])
    return weights


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        arguments = [(rank, f"{folder}/store") for rank in range(WORLD)]
        with multiprocessing.get_context("fork").Pool(WORLD) as pool:
            results = pool.starmap_async(work, arguments, 1).get(100)
    (_, _), (plain, sharded) = results  # rank 1 takes both steps by itself
    present = plain != sharded
    print(f"expected the weights of SGD under Join, {plain}; came {sharded}")
    print("DEFECT PRESENT" if present else "defect absent: fixed?")
    sys.exit(0 if present else 1)
