"""gloo: collectives on a strided slice write outside of it."""

import multiprocessing
import sys
import tempfile
from datetime import timedelta

import torch
import torch.distributed as dist

WORLD = 2


def work(rank: int, store: str):
    """A matrix after an all-reduce of its columns 0 and 2."""
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(store, WORLD),
        rank=rank,
        world_size=WORLD,
        timeout=timedelta(seconds=60),
    )
    whole = torch.full((2, 4), float(1 + rank))
    dist.all_reduce(whole[:, ::2])
    return whole.tolist()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        arguments = [(rank, f"{folder}/store") for rank in range(WORLD)]
        with multiprocessing.get_context("fork").Pool(WORLD) as pool:
            results = pool.starmap_async(work, arguments, 1).get(100)
    right = [[[3.0, own, 3.0, own]] * 2 for own in (1.0, 2.0)]
    present = results != right
    print(f"expected on rank 0 columns 0 and 2 summed, {right[0][0]} twice; came {results[0]}")
    print("DEFECT PRESENT" if present else "defect absent: fixed?")
    sys.exit(0 if present else 1)
