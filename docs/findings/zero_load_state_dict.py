"""ZeroRedundancyOptimizer: load_state_dict empties the dictionary that it is given."""

import multiprocessing
import sys
import tempfile
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer

WORLD = 2


def work(rank: int, store: str):
    """Parameters with state in the dictionary, before and after it is loaded."""
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(store, WORLD),
        rank=rank,
        world_size=WORLD,
        timeout=timedelta(seconds=60),
    )
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam)
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    optimizer.consolidate_state_dict(0)
    if rank:
        return 0, 0
    state = optimizer.state_dict()
    before = sum(value is not None for value in state["state"].values())
    optimizer.load_state_dict(state)  # back to the best checkpoint, say
    return before, sum(value is not None for value in state["state"].values())


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        arguments = [(rank, f"{folder}/store") for rank in range(WORLD)]
        with multiprocessing.get_context("fork").Pool(WORLD) as pool:
            results = pool.starmap_async(work, arguments, 1).get(100)
    before, after = results[0]
    present = before == 4 and after < 4
    print(
        f"expected the loaded dictionary to keep the state of {before} parameters; it has {after}"
    )
    print("DEFECT PRESENT" if present else "defect absent: fixed?")
    sys.exit(0 if present else 1)
