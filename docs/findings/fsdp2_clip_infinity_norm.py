"""FSDP2: clip_grad_norm_ with the infinity norm fails on ranks with an empty shard."""

import multiprocessing
import sys
import tempfile
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

WORLD = 2


def work(arguments: tuple[int, str]):
    """What clipping says."""
    rank, store = arguments
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(store, WORLD),
        rank=rank,
        world_size=WORLD,
        timeout=timedelta(seconds=60),
    )
    model = nn.Linear(4, 1)  # one row: rank 1 holds none of it
    fully_shard(model)
    model(torch.ones(2, 4)).sum().backward()
    try:
        return str(nn.utils.clip_grad_norm_(model.parameters(), 1.0, norm_type=float("inf")))
    except RuntimeError as error:
        return str(error)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        arguments = [(rank, f"{folder}/store") for rank in range(WORLD)]
        with multiprocessing.get_context("fork").Pool(WORLD) as pool:
            results = pool.imap_unordered(work, arguments).next(100)  # of the rank that ends first
    present = "infinity norm on an empty tensor" in results
    print(f"expected the norm 2.0; came {results}")
    print("DEFECT PRESENT" if present else "defect absent: fixed?")
    sys.exit(0 if present else 1)
