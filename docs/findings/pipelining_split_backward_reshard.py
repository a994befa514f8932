"""FSDP2 under a split backward: with reshard_after_forward=True gradients are lost in silence."""

import multiprocessing
import sys
import tempfile
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, ScheduleInterleavedZeroBubble

WORLD = 2


def train(rank: int, store: str) -> list[int]:
    """The stages of this rank that have no gradient after a step."""
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(store, WORLD),
        rank=rank,
        world_size=WORLD,
        timeout=timedelta(seconds=60),
    )
    mesh = init_device_mesh("cpu", (1, WORLD), mesh_dim_names=("shard", "pipe"))
    torch.manual_seed(0)
    stages = []
    for number in range(rank, 4, WORLD):
        layer = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        fully_shard(layer[0], mesh=mesh["shard"], reshard_after_forward=True)
        fully_shard(layer, mesh=mesh["shard"], reshard_after_forward=True)
        group = mesh["pipe"].get_group()
        stages.append(PipelineStage(layer, number, 4, torch.device("cpu"), group=group))
    schedule = ScheduleInterleavedZeroBubble(stages, 2, loss_fn=nn.functional.mse_loss)
    if rank == 0:
        schedule.step(torch.randn(4, 4))
    else:
        schedule.step(target=torch.randn(4, 4))
    return [s.stage_index for s in stages if any(p.grad is None for p in s.submod.parameters())]


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        arguments = [(rank, f"{folder}/store") for rank in range(WORLD)]
        with multiprocessing.get_context("fork").Pool(WORLD) as pool:
            lost = sorted(
                s for part in pool.starmap_async(train, arguments, 1).get(100) for s in part
            )
    print(f"expected gradients in all stages; stages without some: {lost or 'none'}")
    print("DEFECT PRESENT" if lost else "defect absent: fixed?")
    sys.exit(0 if lost else 1)
