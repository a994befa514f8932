"""torch.distributed.pipelining: the inference of shapes enters the statistics of a batch norm."""

import multiprocessing
import sys
import tempfile
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

WORLD, MICRO_BATCHES = 2, 4


def train(rank: int, store: str) -> int:
    """Batches that the norm of the last stage has counted after one step."""
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(store, WORLD),
        rank=rank,
        world_size=WORLD,
        timeout=timedelta(seconds=60),
    )
    torch.manual_seed(0)
    layers = [nn.Linear(3, 3), nn.BatchNorm1d(3)]
    stage = PipelineStage(layers[rank], rank, WORLD, torch.device("cpu"))
    schedule = ScheduleGPipe(stage, MICRO_BATCHES, loss_fn=nn.functional.mse_loss)
    batch, target = torch.randn(16, 3), torch.randn(16, 3)
    schedule.step(*([batch] if rank == 0 else []), **({"target": target} if rank else {}))
    return int(layers[1].num_batches_tracked)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        arguments = [(rank, f"{folder}/store") for rank in range(WORLD)]
        with multiprocessing.get_context("fork").Pool(WORLD) as pool:
            counted = pool.starmap_async(train, arguments, 1).get(100)[-1]
    present = counted == MICRO_BATCHES + 1
    print(f"expected {MICRO_BATCHES} batches in the running statistics; came {counted}")
    print("DEFECT PRESENT" if present else "defect absent: fixed?")
    sys.exit(0 if present else 1)
