"""torch.distributed.checkpoint: asking for a ZeroRedundancyOptimizer's state takes a step."""

import multiprocessing
import sys
import tempfile
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

WORLD = 2


def work(rank: int, store: str):
    """Step count and first moments before and after, and what was said."""
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(store, WORLD),
        rank=rank,
        world_size=WORLD,
        timeout=timedelta(seconds=60),
    )
    model = DistributedDataParallel(nn.Linear(1, 1, bias=False))
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam, lr=0.1)
    model(torch.ones(1, 1)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    seen, said = [], "nothing"
    for is_asked in (False, True):
        try:
            if is_asked:
                get_optimizer_state_dict(model, optimizer)
        except RuntimeError as error:
            said = str(error).split(".")[0]
        states = optimizer.optim.state.values()
        seen.append([{k: round(float(v), 4) for k, v in state.items()} for state in states])
    return (*seen, said)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        arguments = [(rank, f"{folder}/store") for rank in range(WORLD)]
        with multiprocessing.get_context("fork").Pool(WORLD) as pool:
            results = pool.starmap_async(work, arguments, 1).get(100)
    before, after, said = next(result for result in results if result[0])
    present = before != after
    print(f"expected that a question changes nothing: {before}; came {after} and: {said}")
    print("DEFECT PRESENT" if present else "defect absent: fixed?")
    sys.exit(0 if present else 1)
