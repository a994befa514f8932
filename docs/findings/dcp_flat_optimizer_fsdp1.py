"""torch.distributed.checkpoint: a trained FSDP1 model cannot take its flattened optimizer state."""

import multiprocessing
import sys
import tempfile
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint.state_dict as states
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel

WORLD = 2


def work(rank: int, store: str, trained: bool, went: Any):
    """Take a step, or none, and set the optimizer state that was got; counts if that went."""
    place, limit = dist.FileStore(store, WORLD), timedelta(seconds=20)
    dist.init_process_group("gloo", store=place, rank=rank, world_size=WORLD, timeout=limit)
    # Its flat parameter is cut inside of the first weight: rank 0 has no element of the second.
    layers = nn.Sequential(nn.Linear(8, 8, bias=False), nn.Linear(8, 2, bias=False))
    model = FullyShardedDataParallel(layers, use_orig_params=True, device_id=torch.device("cpu"))
    optimizer = torch.optim.AdamW(model.parameters())
    if trained:
        model(torch.ones(4, 8)).sum().backward()
        optimizer.step()
    optimizer.zero_grad()
    options = states.StateDictOptions(flatten_optimizer_state_dict=True)
    state = states.get_optimizer_state_dict(model, optimizer, options=options)
    states.set_optimizer_state_dict(model, optimizer, state, options=options)
    with went.get_lock():
        went.value += 1
    dist.barrier()


def all_went(trained: bool) -> bool:
    """Whether it went on all ranks, within a minute."""
    new = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        given = (f"{folder}/store", trained, went := new.Value("i", 0))
        ranks = [new.Process(target=work, args=(n, *given)) for n in range(WORLD)]
        for process in ranks:
            process.start()
        for process in ranks:
            process.join(60)
            process.kill()
            process.join()
    return went.value == WORLD


if __name__ == "__main__":
    fresh, trained = all_went(False), all_went(True)
    print(f"expected a fresh and a trained model to take it: True, True; came {fresh}, {trained}")
    present = fresh and not trained
    print("DEFECT PRESENT" if present else "defect absent: fixed?")
    sys.exit(0 if present else 1)
