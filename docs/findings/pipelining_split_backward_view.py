"""torch.distributed.pipelining: a split backward fails for a stage whose output is a view."""

import multiprocessing
import sys
import tempfile
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, ScheduleInterleavedZeroBubble

WORLD = 2


def train(arguments: tuple[int, str]) -> str:
    """What the step says; stage 1 ends in a view."""
    rank, store = arguments
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(store, WORLD),
        rank=rank,
        world_size=WORLD,
        timeout=timedelta(seconds=20),
    )
    layers = [nn.Linear(4, 4) for _ in range(4)]
    layers[1] = nn.Sequential(nn.Linear(4, 4), nn.Unflatten(1, (2, 2)))
    layers[2] = nn.Sequential(nn.Flatten(1), nn.Linear(4, 4))
    stages = [
        PipelineStage(layers[s], s, 4, torch.device("cpu")) for s in range(4) if s % WORLD == rank
    ]
    schedule = ScheduleInterleavedZeroBubble(stages, 2, loss_fn=nn.functional.mse_loss)
    batch = torch.randn(4, 4)
    try:
        schedule.step(*([batch] if rank == 0 else []), **({"target": batch} if rank else {}))
    except RuntimeError as error:
        return str(error.__cause__)
    return "no error"


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        arguments = [(rank, f"{folder}/store") for rank in range(WORLD)]
        with multiprocessing.get_context("fork").Pool(WORLD) as pool:
            said = pool.imap_unordered(train, arguments).next(100)  # the first to end
    present = "Can't detach views in-place" in said
    print(f"expected no error; came {said[:40]}")
    print("DEFECT PRESENT" if present else "defect absent: fixed?")
    sys.exit(0 if present else 1)
