"""DeepSpeed: a model with a parameter without a dimension cannot be initialized."""

import multiprocessing
import os
import sys
import tempfile
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn

try:
    import deepspeed
except ImportError:
    print("deepspeed is not installed")
    sys.exit(3)

WORLD = 2


class Scaled(nn.Linear):
    """A linear layer with a learned temperature."""

    def __init__(self) -> None:
        super().__init__(2, 2)
        self.temperature = nn.Parameter(torch.tensor(1.0))


def work(rank: int, store: str) -> str:
    """What ``initialize`` says, without ZeRO."""
    os.environ |= {"LOCAL_RANK": str(rank), "RANK": str(rank), "WORLD_SIZE": str(WORLD)}
    sys.modules["deepspeed.comm.torch"].build_shm_op = lambda: None  # else it compiles C++
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(store, WORLD),
        rank=rank,
        world_size=WORLD,
        timeout=timedelta(seconds=60),
    )
    deepspeed.init_distributed(dist_backend="gloo", dist_init_required=False, verbose=False)
    model, config = Scaled(), {"train_micro_batch_size_per_gpu": 1}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    try:
        deepspeed.initialize(None, model, optimizer, config=config, dist_init_required=False)
    except RuntimeError as error:
        return str(error)
    return "no error"


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        arguments = [(rank, f"{folder}/store") for rank in range(WORLD)]
        with multiprocessing.get_context("fork").Pool(WORLD) as pool:
            said = pool.starmap_async(work, arguments, 1).get(100)[0]
    present = "0" in said and said != "no error"
    print(f"expected an engine; came {said[:80]}")
    print("DEFECT PRESENT" if present else "defect absent: fixed?")
    sys.exit(0 if present else 1)
