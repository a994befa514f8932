"""DDP: a hook is given another gradient than its parameter's where that lies in channels_last."""

import sys
import tempfile

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def given_and_own(memory_format) -> tuple[torch.Tensor, torch.Tensor]:
    """A convolution's gradient: in ``bucket.gradients()``, and in ``.grad``."""
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Conv2d(4, 6, 3, bias=False).to(memory_format=memory_format))
    given = []

    def hook(state, bucket):
        given[:] = [gradient.clone() for gradient in bucket.gradients()]
        future = torch.futures.Future()
        future.set_result(bucket.buffer())
        return future

    model.register_comm_hook(None, hook)
    model(torch.randn(2, 4, 8, 8)).square().mean().backward()
    return given[0], model.module.weight.grad


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        store = dist.FileStore(f"{folder}/store", 1)
        dist.init_process_group("gloo", store=store, rank=0, world_size=1)
        plain, plain_own = given_and_own(torch.contiguous_format)
        given, own = given_and_own(torch.channels_last)
        dist.destroy_process_group()
    if not torch.equal(plain, plain_own):  # it says nothing, then
        sys.exit("a contiguous weight's gradient should be given as it is")
    in_order_of_memory = torch.equal(given.flatten(), own.permute(0, 2, 3, 1).flatten())
    present = not torch.equal(given, own) and in_order_of_memory
    print(f"expected the gradient of the weight, {own[0, 0, 0].tolist()} ...")
    print(f"came its elements in the order of memory, {given[0, 0, 0].tolist()} ...")
    print("DEFECT PRESENT" if present else "defect absent: fixed?")
    sys.exit(0 if present else 1)
