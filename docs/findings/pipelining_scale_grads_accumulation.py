"""torch.distributed.pipelining: scale_grads divides the gradients of earlier calls once more."""

import multiprocessing
import sys
import tempfile
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

WORLD = 2


def work(rank: int, store: str):
    """Norms of the gradient after one and after two calls."""
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(store, WORLD),
        rank=rank,
        world_size=WORLD,
        timeout=timedelta(seconds=60),
    )
    torch.manual_seed(0)
    layers = [nn.Linear(4, 4) for _ in range(WORLD)]
    stage = PipelineStage(layers[rank], rank, WORLD, torch.device("cpu"))
    schedule = ScheduleGPipe(
        stage, 4, loss_fn=nn.functional.mse_loss
    )  # scale_grads=True, the default
    batch, target = torch.randn(8, 4), torch.randn(8, 4)
    norms = []
    for _ in range(2):  # the same batch twice, gradients added up
        schedule.step(*([batch] if rank == 0 else []), **({"target": target} if rank else {}))
        norms.append(float(layers[rank].weight.grad.norm()))
    return norms


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        arguments = [(rank, f"{folder}/store") for rank in range(WORLD)]
        with multiprocessing.get_context("fork").Pool(WORLD) as pool:
            results = pool.starmap_async(work, arguments, 1).get(100)
    once, twice = results[0]
    present = abs(twice / once - 1.25) < 1e-4
    print(f"expected 2 times the gradient after the same batch twice; came {twice / once:.4f}")
    print("DEFECT PRESENT" if present else "defect absent: fixed?")
    sys.exit(0 if present else 1)
