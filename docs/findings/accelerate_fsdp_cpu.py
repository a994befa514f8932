"""accelerate: on CPUs FullyShardedDataParallelPlugin is dropped and the model prepared as DDP."""

import multiprocessing
import os
import sys
import tempfile
import warnings
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

try:
    from accelerate import Accelerator, FullyShardedDataParallelPlugin
except ImportError:
    print("accelerate is not installed")
    sys.exit(3)

WORLD = 2


def work(rank: int, version: int, store: str):
    """Class of the prepared model, elements held, warnings that name FSDP; or a refusal."""
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
    os.environ |= {"WORLD_SIZE": str(WORLD), "LOCAL_WORLD_SIZE": str(WORLD)}
    file, time = dist.FileStore(store, WORLD), timedelta(seconds=60)
    dist.init_process_group("gloo", store=file, rank=rank, world_size=WORLD, timeout=time)
    model = nn.Linear(8, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        plugin = FullyShardedDataParallelPlugin(fsdp_version=version)
        try:
            prepared, _ = Accelerator(cpu=True, fsdp_plugin=plugin).prepare(model, optimizer)
        except (NotImplementedError, RuntimeError, ValueError) as error:
            return repr(error)
    held = [p.to_local() if isinstance(p, DTensor) else p for p in prepared.parameters()]
    told = [str(w.message) for w in said if "FSDP" in str(w.message)]
    return type(prepared).__name__, sum(p.numel() for p in held), told


if __name__ == "__main__":
    results = {}
    for version in (1, 2):
        with tempfile.TemporaryDirectory() as folder:
            arguments = [(rank, version, f"{folder}/store") for rank in range(WORLD)]
            with multiprocessing.get_context("fork").Pool(WORLD) as pool:
                results[version] = pool.starmap_async(work, arguments, 1).get(60)
    whole = 8 * 8 + 8
    present = all(
        came == [("DistributedDataParallel", whole, [])] * WORLD for came in results.values()
    )
    print(f"expected fewer than {whole} elements on a rank, a warning or a refusal; ", end="")
    print(f"came by version of the plugin {results}")
    print("DEFECT PRESENT" if present else "defect absent: fixed?")
    sys.exit(0 if present else 1)
