"""torch.distributed.checkpoint: a trained FSDP1 model cannot take its flattened optimizer state."""

import multiprocessing
import sys
import tempfile
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
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
    options = StateDictOptions(flatten_optimizer_state_dict=True)
    state = get_optimizer_state_dict(model, optimizer, options=options)
    set_optimizer_state_dict(model, optimizer, state, options=options)


def all_went(trained: bool) -> bool:
    """Whether all ranks ended well, within a minute."""
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        ranks = [
            context.Process(target=work, args=(rank, f"{folder}/store", trained))
            for rank in range(WORLD)
        ]
        for process in ranks:
            process.start()
        for process in ranks:
            process.join(60)
            process.kill()
            process.join()
    return all(process.exitcode == 0 for process in ranks)


if __name__ == "__main__":
    fresh, trained = all_went(False), all_went(True)
    went = {True: "taken", False: "refused or waited for"}
    came = f"{went[fresh]}, {went[trained]}"
    print(f"expected the states of a fresh and of a trained model: taken; came {came}")
    present = fresh and not trained
    print("DEFECT PRESENT" if present else "defect absent: fixed?")
    sys.exit(0 if present else 1)
