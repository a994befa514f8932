"""torch.distributed.pipelining: the first call of a schedule drops FSDP gradients."""

import multiprocessing
import sys
import tempfile
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

WORLD = 2


def work(rank: int, store: str):
    """Norms of the gradient after one window of 4 equal samples and after another of 2."""
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(store, WORLD),
        rank=rank,
        world_size=WORLD,
        timeout=timedelta(seconds=60),
    )
    mesh = init_device_mesh("cpu", (1, WORLD), mesh_dim_names=("shard", "pipe"))
    torch.manual_seed(0)
    layer = fully_shard(nn.Linear(4, 4), mesh=mesh["shard"], reshard_after_forward=False)
    norms = []
    for micro_batches in (4, 2):  # two windows of one step, of unlike sizes: two schedules
        stage = PipelineStage(
            layer, rank, WORLD, torch.device("cpu"), group=mesh["pipe"].get_group()
        )
        loss = nn.MSELoss(reduction="sum")
        schedule = ScheduleGPipe(stage, micro_batches, loss_fn=loss, scale_grads=False)
        batch, target = torch.ones(micro_batches, 4), torch.zeros(micro_batches, 4)
        schedule.step(*([batch] if rank == 0 else []), **({"target": target} if rank else {}))
        norms.append(float(layer.bias.grad.full_tensor().norm()))
    return norms


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        arguments = [(rank, f"{folder}/store") for rank in range(WORLD)]
        with multiprocessing.get_context("fork").Pool(WORLD) as pool:
            results = pool.starmap_async(work, arguments, 1).get(100)
    first, both = results[0]
    present = abs(both / first - 0.5) < 1e-4
    print(f"expected 1.5 times the first window's gradient after both; came {both / first:.4f}")
    print("DEFECT PRESENT" if present else "defect absent: fixed?")
    sys.exit(0 if present else 1)
