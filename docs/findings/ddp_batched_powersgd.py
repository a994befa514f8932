"""DDP: the batched PowerSGD hook fails in its first step that compresses."""

import sys
import tempfile

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

START = 2


def steps_that_work(hook) -> int:
    """Of five, of which the last three compress."""
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Linear(12, 12))
    model.register_comm_hook(powerSGD_hook.PowerSGDState(None, start_powerSGD_iter=START), hook)
    for step in range(5):
        try:
            model(torch.randn(4, 12)).square().mean().backward()
        except AssertionError:
            return step
    return 5


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        store = dist.FileStore(f"{folder}/store", 1)
        dist.init_process_group("gloo", store=store, rank=0, world_size=1)
        plain, batched = (
            steps_that_work(hook)
            for hook in (powerSGD_hook.powerSGD_hook, powerSGD_hook.batched_powerSGD_hook)
        )
        dist.destroy_process_group()
    if plain != 5:  # it says nothing, then
        sys.exit(f"the other hook should work: {plain} of 5 steps")
    present = batched == START
    print(f"expected 5 steps, as with powerSGD_hook; came {batched} with batched_powerSGD_hook")
    print("DEFECT PRESENT" if present else "defect absent: fixed?")
    sys.exit(0 if present else 1)
