"""FSDP1 on CPUs: a full state dict with offload reads memory that was freed."""

import multiprocessing
import signal
import sys
import tempfile
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import FullyShardedDataParallel

WORLD = 2


def work(rank: int, store: str):
    """Ask for the state; exit code 7: it came, whole."""
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(store, WORLD),
        rank=rank,
        world_size=WORLD,
        timeout=timedelta(seconds=60),
    )
    model = FullyShardedDataParallel(
        nn.Linear(512, 512), use_orig_params=True, device_id=torch.device("cpu")
    )
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    state = get_model_state_dict(model, options=options)
    sys.exit(7 if rank or bool(state["weight"].isfinite().all()) else 8)


if __name__ == "__main__":
    fork = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory() as folder:
        ranks = [fork.Process(target=work, args=(r, f"{folder}/store")) for r in range(WORLD)]
        for rank in ranks:
            rank.start()
        for rank in ranks:
            rank.join(100)
    code = ranks[0].exitcode
    present = code in (-signal.SIGSEGV, -signal.SIGBUS, 8)
    print(f"expected a state dict on rank 0, exit code 7; came exit code {code}")
    print("DEFECT PRESENT" if present else "defect absent: fixed?")
    sys.exit(0 if present else 1)
