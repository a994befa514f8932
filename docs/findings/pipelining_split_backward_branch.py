"""torch.distributed.pipelining: a split backward loses parameters on a branch of their own."""

import multiprocessing
import sys
import tempfile
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, ScheduleInterleavedZeroBubble

WORLD = 2


class Two(nn.Module):
    """Two outputs, one of parameters alone."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.table = nn.Linear(4, 4), nn.Parameter(torch.ones(4))

    def forward(self, hidden):
        return self.linear(hidden), self.table.exp().repeat(len(hidden), 1)


class Join(nn.Module):
    def forward(self, hidden, scale):
        return hidden * scale


def work(rank: int, store: str):
    """The parameters of this rank without a gradient after a step."""
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(store, WORLD),
        rank=rank,
        world_size=WORLD,
        timeout=timedelta(seconds=60),
    )
    torch.manual_seed(0)
    layers = [nn.Linear(4, 4), Two(), Join(), nn.Linear(4, 4)]
    stages = [PipelineStage(layers[s], s, 4, torch.device("cpu")) for s in (rank, rank + WORLD)]
    schedule = ScheduleInterleavedZeroBubble(stages, 2, loss_fn=nn.functional.mse_loss)
    batch, target = torch.randn(4, 4), torch.randn(4, 4)
    schedule.step(*([batch] if rank == 0 else []), **({"target": target} if rank else {}))
    parts = [(s, layers[s]) for s in (rank, rank + WORLD)]
    return [f"{s}.{n}" for s, part in parts for n, p in part.named_parameters() if p.grad is None]


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        arguments = [(rank, f"{folder}/store") for rank in range(WORLD)]
        with multiprocessing.get_context("fork").Pool(WORLD) as pool:
            results = pool.starmap_async(work, arguments, 1).get(100)
    lost = [name for part in results for name in part]
    present = lost == ["1.table"]
    print(f"expected a gradient for every parameter; came none for {lost}")
    print("DEFECT PRESENT" if present else "defect absent: fixed?")
    sys.exit(0 if present else 1)
