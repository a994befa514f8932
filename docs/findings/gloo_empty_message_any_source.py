"""gloo: recv from whichever rank sends raises where the message is empty."""

import multiprocessing
import sys
import tempfile
from datetime import timedelta

import torch
import torch.distributed as dist

WORLD = 2


def work(rank: int, path: str):
    """What rank 1 gets: an empty message of rank 0, then one element and an empty one of any."""
    store = dist.FileStore(path, WORLD)
    dist.init_process_group(
        "gloo", store=store, rank=rank, world_size=WORLD, timeout=timedelta(seconds=60)
    )
    messages = ((0, 0), (None, 1), (None, 0))  # source, elements
    if rank == 0:
        under_way = [dist.isend(torch.ones(size), 1) for _, size in messages]
        store.wait(["heard"])
        return len(under_way)
    heard = []
    for source, size in messages:
        try:
            heard.append(dist.recv(torch.zeros(size), source))
        except RuntimeError as error:
            heard.append(str(error).splitlines()[0])
    store.set("heard", "")
    return heard


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        arguments = [(rank, f"{folder}/store") for rank in range(WORLD)]
        with multiprocessing.get_context("fork").Pool(WORLD) as pool:
            *others, last = pool.starmap_async(work, arguments, 1).get(100)[1]
    if others != [0, 0]:  # it says nothing, then
        sys.exit(f"an empty message of rank 0 and one element of any rank should come: {others}")
    print(f"expected an empty message of any rank from rank 0; came {last}")
    print("DEFECT PRESENT" if last != 0 else "defect absent: fixed?")
    sys.exit(0 if last != 0 else 1)
