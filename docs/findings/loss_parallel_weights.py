"""loss_parallel: with class weights the backward fails on ignored targets."""

import multiprocessing
import sys
import tempfile
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.distributed.tensor.parallel import loss_parallel
from torch.nn import functional as F

WORLD = 2


def work(rank: int, store: str):
    """What a backward says without and with class weights."""
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(store, WORLD),
        rank=rank,
        world_size=WORLD,
        timeout=timedelta(seconds=60),
    )
    mesh = init_device_mesh("cpu", (WORLD,))
    logits, weights = torch.randn(3, 4), torch.ones(4)
    target = torch.tensor([0, -100, 3])  # -100 is cross_entropy's default for ignored ones
    said = []
    for options in ({}, {"weight": weights}):
        split = distribute_tensor(logits, mesh, [Shard(1)]).requires_grad_(True)
        try:
            with loss_parallel():
                F.cross_entropy(split, target, **options).backward()
            said.append("no error")
        except RuntimeError as error:
            said.append(str(error))
    return said


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        arguments = [(rank, f"{folder}/store") for rank in range(WORLD)]
        with multiprocessing.get_context("fork").Pool(WORLD) as pool:
            results = pool.starmap_async(work, arguments, 1).get(100)
    plain, weighted = results[0]
    present = plain == "no error" and "index -100 is out of bounds" in weighted
    print(f"expected no error, as without weights ({plain}); came {weighted}")
    print("DEFECT PRESENT" if present else "defect absent: fixed?")
    sys.exit(0 if present else 1)
