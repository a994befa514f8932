"""torch.distributed.checkpoint: buffers under DDP are saved by any rank, one each by another."""

import multiprocessing
import sys
import tempfile
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.nn.parallel import DistributedDataParallel

WORLD = 2


def work(rank: int, store: str, folder: str):
    """Statistics of this rank after one step, and those that were saved."""
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(store, WORLD),
        rank=rank,
        world_size=WORLD,
        timeout=timedelta(seconds=60),
    )
    model = DistributedDataParallel(nn.BatchNorm1d(1))  # rank 0's buffers count in every forward
    model(torch.arange(2.0).view(2, 1) * (1 + rank)).sum().backward()
    own = {name: float(buffer) for name, buffer in model.module.named_buffers()}
    state = get_model_state_dict(model)
    dcp.save(state, checkpoint_id=folder)
    dcp.load(state, checkpoint_id=folder)
    return own, {name: float(state[name]) for name in own}


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        arguments = [(rank, f"{folder}/store", f"{folder}/saved") for rank in range(WORLD)]
        with multiprocessing.get_context("fork").Pool(WORLD) as pool:
            results = pool.starmap_async(work, arguments, 1).get(100)
    (first, saved), (second, _) = results
    others = [name for name in saved if saved[name] == second[name] != first[name]]
    present = bool(others)
    print(f"expected the statistics of rank 0, {first}; came {saved}, of rank 1: {others}")
    print("DEFECT PRESENT" if present else "defect absent: fixed?")
    sys.exit(0 if present else 1)
