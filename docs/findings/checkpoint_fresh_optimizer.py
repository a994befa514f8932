"""torch.distributed.checkpoint: reading a fresh optimizer's state changes the training."""

import multiprocessing
import sys
import tempfile
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

WORLD = 1


def work(rank: int, store: str):
    """Weights after one step, without and with a read of the state before it."""
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(store, WORLD),
        rank=rank,
        world_size=WORLD,
        timeout=timedelta(seconds=60),
    )
    weights = []
    for is_read in (False, True):
        torch.manual_seed(0)
        model = nn.Linear(2, 1, bias=False)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        if is_read:  # a checkpoint of step 0, say
            get_optimizer_state_dict(model, optimizer)
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        weights.append([round(float(w), 4) for w in model.weight.flatten()])
    return weights


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        arguments = [(rank, f"{folder}/store") for rank in range(WORLD)]
        with multiprocessing.get_context("fork").Pool(WORLD) as pool:
            results = pool.starmap_async(work, arguments, 1).get(100)
    plain, read = results[0]
    present = plain != read
    print(f"expected the weights {plain} after one step of AdamW; came {read}")
    print("DEFECT PRESENT" if present else "defect absent: fixed?")
    sys.exit(0 if present else 1)
