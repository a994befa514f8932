"""torch.distributed.pipelining: Schedule1F1B tells another order than it runs."""

import multiprocessing
import sys
import tempfile
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

WORLD = 2


def work(rank: int, store: str):
    """The forwards of the last stage, by the exported order."""
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(store, WORLD),
        rank=rank,
        world_size=WORLD,
        timeout=timedelta(seconds=60),
    )
    stage = PipelineStage(nn.Linear(4, 4), rank, WORLD, torch.device("cpu"))
    order = Schedule1F1B(stage, 4)._get_pipeline_order()[WORLD - 1]
    return [str(action) for action in order if action and "F" in str(action)]


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        arguments = [(rank, f"{folder}/store") for rank in range(WORLD)]
        with multiprocessing.get_context("fork").Pool(WORLD) as pool:
            results = pool.starmap_async(work, arguments, 1).get(100)
    told = results[0]
    present = told == ["1F1", "1F2", "1F3", "1F4"]
    print(f"expected forwards of micro-batches 0 to 3 on the last stage; came {' '.join(told)}")
    print("DEFECT PRESENT" if present else "defect absent: fixed?")
    sys.exit(0 if present else 1)
