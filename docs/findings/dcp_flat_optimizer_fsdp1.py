"""torch.distributed.checkpoint: a trained FSDP1 model cannot take its flattened optimizer state."""

import multiprocessing
import sys
import tempfile
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.distributed.checkpoint.state_dict as states
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel

WORLD = 2


def work(rank: int, store: str, trained: bool):
    """Take a step, or none, and set the optimizer state that was got; ends with 0 if that went."""
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(store, WORLD),
        rank=rank,
        world_size=WORLD,
        timeout=timedelta(seconds=20),
    )
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
    dist.barrier()


def all_went(trained: bool) -> bool:
    """Whether all ranks ended well, within a minute."""
    new = multiprocessing.get_context("spawn").Process
    with tempfile.TemporaryDirectory() as folder:
        ranks = [new(target=work, args=(n, f"{folder}/store", trained)) for n in range(WORLD)]
        for process in ranks:
            process.start()
        for process in ranks:
            process.join(60)
            process.kill()
            process.join()
    return all(process.exitcode == 0 for process in ranks)


if __name__ == "__main__":
    fresh, trained = all_went(False), all_went(True)
    print(f"expected a fresh and a trained model to take it: True, True; came {fresh}, {trained}")
    present = fresh and not trained
    print("DEFECT PRESENT" if present else "defect absent: fixed?")
    sys.exit(0 if present else 1)
