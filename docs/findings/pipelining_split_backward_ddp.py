"""torch.distributed.pipelining: under a split backward DDP never reduces (known upstream)."""

import multiprocessing
import sys
import tempfile
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage, ScheduleInterleavedZeroBubble
from torch.nn.parallel import DistributedDataParallel

WORLD = 4


def work(rank: int, store: str):
    """Norms of the gradients of this rank's stages."""
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(store, WORLD),
        rank=rank,
        world_size=WORLD,
        timeout=timedelta(seconds=60),
    )
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "pipe"))
    data, pipe = mesh.get_coordinate()
    stages = []
    for number in (pipe, pipe + 2):
        torch.manual_seed(number)
        layer = DistributedDataParallel(nn.Linear(4, 4), process_group=mesh["data"].get_group())
        group = mesh["pipe"].get_group()
        stages.append(PipelineStage(layer, number, 4, torch.device("cpu"), group=group))
    schedule = ScheduleInterleavedZeroBubble(stages, 2, loss_fn=nn.functional.mse_loss)
    torch.manual_seed(10 + data)  # every replica its own samples
    batch, target = torch.randn(4, 4), torch.randn(4, 4)
    schedule.step(*([batch] if pipe == 0 else []), **({"target": target} if pipe else {}))
    return {s.stage_index: float(s.submod.module.weight.grad.norm()) for s in stages}


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        arguments = [(rank, f"{folder}/store") for rank in range(WORLD)]
        with multiprocessing.get_context("fork").Pool(WORLD) as pool:
            results = pool.starmap_async(work, arguments, 1).get(100)
    replicas = [results[0] | results[1], results[2] | results[3]]
    unequal = [s for s in range(4) if abs(replicas[0][s] - replicas[1][s]) > 1e-4]
    present = unequal == [1, 2, 3]
    print(f"expected equal gradients on both replicas; came unequal ones in stages {unequal}")
    print("DEFECT PRESENT" if present else "defect absent: fixed?")
    sys.exit(0 if present else 1)
