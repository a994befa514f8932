"""torch.distributed.checkpoint: a module with two names under DDP cannot be loaded."""

import multiprocessing
import sys
import tempfile
from datetime import timedelta

import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from torch.nn.parallel import DistributedDataParallel

WORLD = 1


def work(rank: int, store: str):
    """What comes of setting the state that was just given."""
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(store, WORLD),
        rank=rank,
        world_size=WORLD,
        timeout=timedelta(seconds=60),
    )
    layer = nn.Linear(1, 1, bias=False)
    model = DistributedDataParallel(nn.ModuleDict({"encode": layer, "decode": layer}))
    state = get_model_state_dict(model)
    try:
        set_model_state_dict(model, state)
    except RuntimeError as error:
        return " ".join(str(error).split())
    return "a load"


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        arguments = [(rank, f"{folder}/store") for rank in range(WORLD)]
        with multiprocessing.get_context("fork").Pool(WORLD) as pool:
            results = pool.starmap_async(work, arguments, 1).get(100)
    present = "Missing key(s)" in results[0]
    print(f"expected that the model takes its own state; came {results[0]}")
    print("DEFECT PRESENT" if present else "defect absent: fixed?")
    sys.exit(0 if present else 1)
