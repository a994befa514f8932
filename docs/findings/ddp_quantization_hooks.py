"""DDP: both quantization hooks fail on CPU."""

import multiprocessing
import sys
import tempfile
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import quantization_hooks
from torch.nn.parallel import DistributedDataParallel

WORLD = 2


def work(rank: int, store: str):
    """What a backward with each hook says."""
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(store, WORLD),
        rank=rank,
        world_size=WORLD,
        timeout=timedelta(seconds=60),
    )
    said = []
    for name in ("quantization_pertensor_hook", "quantization_perchannel_hook"):
        model = DistributedDataParallel(nn.Linear(64, 16))
        model.register_comm_hook(dist.group.WORLD, getattr(quantization_hooks, name))
        try:
            model(torch.ones(2, 64)).sum().backward()
            said.append("no error")
        except RuntimeError as error:
            said.append("IndexError" if "IndexError" in str(error) else str(error))
    return said


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        arguments = [(rank, f"{folder}/store") for rank in range(WORLD)]
        with multiprocessing.get_context("fork").Pool(WORLD) as pool:
            results = pool.starmap_async(work, arguments, 1).get(100)
    present = results[0] == ["IndexError", "IndexError"]
    print(f"expected quantized gradients from both hooks; came {results[0]}")
    print("DEFECT PRESENT" if present else "defect absent: fixed?")
    sys.exit(0 if present else 1)
