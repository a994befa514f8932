"""loss_parallel: a log_softmax that the cross-entropy does not consume has an identity gradient."""

import multiprocessing
import sys
import tempfile
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.distributed.tensor.parallel import loss_parallel

WORLD = 2


def work(rank: int, store: str):
    """Relative error of the gradient of an entropy, a second consumer of split logits."""
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(store, WORLD),
        rank=rank,
        world_size=WORLD,
        timeout=timedelta(seconds=60),
    )
    mesh = init_device_mesh("cpu", (WORLD,))
    torch.manual_seed(0)
    logits = torch.randn(3, 4, dtype=torch.float64)
    whole = logits.clone().requires_grad_(True)
    (whole.log_softmax(-1) * torch.arange(4.0)).sum().backward()
    split = distribute_tensor(logits, mesh, [Shard(1)]).requires_grad_(True)
    weights = distribute_tensor(
        torch.arange(4.0).double().expand(3, 4).contiguous(), mesh, [Shard(1)]
    )
    with loss_parallel():
        (split.log_softmax(-1) * weights).sum().backward()
    gradient = split.grad.full_tensor()
    identity = torch.equal(gradient, torch.arange(4.0).double().expand(3, 4))
    return ((gradient - whole.grad).norm() / whole.grad.norm()).item(), identity


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        arguments = [(rank, f"{folder}/store") for rank in range(WORLD)]
        with multiprocessing.get_context("fork").Pool(WORLD) as pool:
            error, identity = pool.starmap_async(work, arguments, 1).get(100)[0]
    print(f"expected the gradient of log_softmax; came a relative error of {error:.2g}")
    print(f"the gradient is what was given to it, unchanged: {identity}")
    print("DEFECT PRESENT" if identity and error > 0.1 else "defect absent: fixed?")
    sys.exit(0 if identity and error > 0.1 else 1)
