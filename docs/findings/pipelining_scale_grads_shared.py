"""torch.distributed.pipelining: scale_grads divides a parameter of two stages of a rank twice."""

import multiprocessing
import sys
import tempfile
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, ScheduleInterleaved1F1B

WORLD = 2


def build() -> list[nn.Linear]:
    """Four layers; 0 and 2, both on rank 0, share their weight."""
    torch.manual_seed(0)
    layers = [nn.Linear(4, 4) for _ in range(4)]
    layers[2].weight = layers[0].weight
    return layers


def work(rank: int, store: str):
    """How far gradients are from those of one process."""
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(store, WORLD),
        rank=rank,
        world_size=WORLD,
        timeout=timedelta(seconds=60),
    )
    layers, oracle = build(), build()
    stages = [PipelineStage(layers[s], s, 4, torch.device("cpu")) for s in (rank, rank + WORLD)]
    schedule = ScheduleInterleaved1F1B(stages, 4, loss_fn=nn.functional.mse_loss)
    batch, target = torch.randn(8, 4), torch.randn(8, 4)
    schedule.step(*([batch] if rank == 0 else []), **({"target": target} if rank else {}))
    nn.functional.mse_loss(nn.Sequential(*oracle)(batch), target).backward()
    shared, own = layers[0].weight.grad, layers[rank].bias.grad
    errors = [float((own - oracle[rank].bias.grad).abs().max())]
    return errors + ([float((shared - oracle[0].weight.grad).norm())] if rank == 0 else [])


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        arguments = [(rank, f"{folder}/store") for rank in range(WORLD)]
        with multiprocessing.get_context("fork").Pool(WORLD) as pool:
            results = pool.starmap_async(work, arguments, 1).get(100)
    other, shared = results[0]
    present = other < 1e-6 and shared > 1e-2
    print(
        f"expected the gradient of one process; came {shared:.3f} from it (unshared: {other:.0e})"
    )
    print("DEFECT PRESENT" if present else "defect absent: fixed?")
    sys.exit(0 if present else 1)
