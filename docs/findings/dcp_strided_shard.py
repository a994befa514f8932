"""torch.distributed.checkpoint: FSDP2 over tensor parallelism, where sizes do not divide."""

import multiprocessing
import sys
import tempfile
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

SHARDS, TENSORS, ROWS = 3, 2, 7
WORLD = SHARDS * TENSORS


def work(rank: int, store: str, folder: str):
    """The rows that come back on the same mesh."""
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(store, WORLD),
        rank=rank,
        world_size=WORLD,
        timeout=timedelta(seconds=60),
    )
    mesh = init_device_mesh("cpu", (SHARDS, TENSORS), mesh_dim_names=("shard", "tensor"))
    model = nn.Sequential(nn.Linear(1, ROWS, bias=False))
    with torch.no_grad():
        model[0].weight.copy_(torch.arange(float(ROWS)).view(ROWS, 1))
    parallelize_module(model, mesh["tensor"], {"0": ColwiseParallel()})
    fully_shard(model, mesh=mesh["shard"])
    dcp.save(get_model_state_dict(model), checkpoint_id=folder)
    state = get_model_state_dict(model)
    state["0.weight"].to_local().fill_(-1)
    dcp.load(state, checkpoint_id=folder)
    return state["0.weight"].full_tensor().flatten().tolist()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        arguments = [(rank, f"{folder}/store", f"{folder}/saved") for rank in range(WORLD)]
        with multiprocessing.get_context("fork").Pool(WORLD) as pool:
            results = pool.starmap_async(work, arguments, 1).get(100)
    saved = [float(row) for row in range(ROWS)]
    present = results[0] != saved
    print(f"expected the rows {saved} on the mesh that saved them; came {results[0]}")
    print("DEFECT PRESENT" if present else "defect absent: fixed?")
    sys.exit(0 if present else 1)
