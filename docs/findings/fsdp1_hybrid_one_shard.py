"""FSDP1: HYBRID_SHARD with shard groups of one rank never reduces over replicas."""

import multiprocessing
import sys
import tempfile
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy

WORLD = 2


def work(rank: int, store: str):
    """This replica's gradient."""
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(store, WORLD),
        rank=rank,
        world_size=WORLD,
        timeout=timedelta(seconds=60),
    )
    mesh = init_device_mesh("cpu", (WORLD, 1), mesh_dim_names=("replicate", "shard"))
    torch.manual_seed(0)
    model = FullyShardedDataParallel(
        nn.Linear(1, 1, bias=False),
        device_mesh=mesh,
        sharding_strategy=ShardingStrategy.HYBRID_SHARD,
        use_orig_params=True,
        device_id=torch.device("cpu"),
    )
    model(torch.full((1, 1), 1.0 + 2 * rank)).sum().backward()  # gradients 1 and 3, mean 2
    return float(next(model.parameters()).grad)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        arguments = [(rank, f"{folder}/store") for rank in range(WORLD)]
        with multiprocessing.get_context("fork").Pool(WORLD) as pool:
            results = pool.starmap_async(work, arguments, 1).get(100)
    present = results == [0.5, 1.5]  # divided by two, never added
    print(f"expected a gradient of 2.0 on both replicas; came {results}")
    print("DEFECT PRESENT" if present else "defect absent: fixed?")
    sys.exit(0 if present else 1)
