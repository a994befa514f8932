"""DeepSpeed: ZeRO-1 and ZeRO-2 train a float64 model through a float32 copy without a word."""

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

WORLD = 1


def work(rank: int, store: str) -> float:
    """How far the float64 weight is from 1/3 + 1e-12, after a step of exactly 1e-12."""
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
    model = nn.Linear(1, 1, bias=False).double()
    nn.init.constant_(model.weight, 1 / 3)
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {"stage": 1, "reduce_bucket_size": 10},
        "zero_allow_untested_optimizer": True,
    }
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-12)
    engine, *_ = deepspeed.initialize(
        model=model, optimizer=optimizer, config=config, dist_init_required=False
    )
    engine.backward(-engine(torch.ones(1, 1, dtype=torch.float64)).sum())
    engine.step()
    assert model.weight.dtype == torch.float64
    return float(model.weight) - (1 / 3 + 1e-12)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        arguments = [(rank, f"{folder}/store") for rank in range(WORLD)]
        with multiprocessing.get_context("fork").Pool(WORLD) as pool:
            error = pool.starmap_async(work, arguments, 1).get(100)[0]
    present = abs(error) > 1e-9
    print(f"expected a float64 weight within 1e-15 of 1/3 + 1e-12; came {error:.1e} from it")
    print("DEFECT PRESENT" if present else "defect absent: fixed?")
    sys.exit(0 if present else 1)
