"""torch.distributed.pipelining: a split backward loses gradients behind a frozen stage."""

import multiprocessing
import sys
import tempfile
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, ScheduleInterleavedZeroBubble

WORLD = 2


def work(rank: int, store: str):
    """The stages of this rank without gradients after a step."""
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(store, WORLD),
        rank=rank,
        world_size=WORLD,
        timeout=timedelta(seconds=60),
    )
    torch.manual_seed(0)
    layers = [nn.Linear(4, 4) for _ in range(4)]
    layers[0].requires_grad_(False)  # a frozen embedding, say
    stages = [PipelineStage(layers[s], s, 4, torch.device("cpu")) for s in (rank, rank + WORLD)]
    schedule = ScheduleInterleavedZeroBubble(stages, 2, loss_fn=nn.functional.mse_loss)
    batch, target = torch.randn(4, 4), torch.randn(4, 4)
    schedule.step(*([batch] if rank == 0 else []), **({"target": target} if rank else {}))
    return [s for s in (rank, rank + WORLD) if layers[s].weight.grad is None]


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        arguments = [(rank, f"{folder}/store") for rank in range(WORLD)]
        with multiprocessing.get_context("fork").Pool(WORLD) as pool:
            results = pool.starmap_async(work, arguments, 1).get(100)
    lost = sorted(number for part in results for number in part)
    present = 1 in lost
    print(f"expected no gradients in stage [0], which is frozen; came none in {lost}")
    print("DEFECT PRESENT" if present else "defect absent: fixed?")
    sys.exit(0 if present else 1)
