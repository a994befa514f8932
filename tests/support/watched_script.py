"""A training script as people write it, and faults planted in it by a changed line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

#: Nothing in it knows of the suite.
CLEAN = """\
import os
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def batch(generator):
    return torch.randn(8, 16, generator=generator), torch.randn(8, 4, generator=generator)


def main(steps=12):
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))
    model = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    generator = torch.Generator().manual_seed(rank)
    for step in range(1, steps + 1):
        x, y = batch(generator)
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
    total = loss.detach().clone()
    dist.all_reduce(total)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
"""

#: Averages gradients by hand, so nothing else makes ranks equal.
BY_HAND = CLEAN.replace(
    "    model = DistributedDataParallel(model)\n",
    "    for p in model.parameters():\n        dist.broadcast(p.data, 0)\n",
).replace(
    "        optimizer.step()\n",
    "        for p in model.parameters():\n"
    "            dist.all_reduce(p.grad)\n"
    "            p.grad /= dist.get_world_size()\n"
    "        optimizer.step()\n",
)


def write(folder: Path, *changes: tuple[str, str], text: str = CLEAN) -> Path:
    """``folder/train.py`` with each old text replaced by the new one; every old one is there."""
    for old, new in changes:
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    path = folder / "train.py"
    path.write_text(text)
    return path


#: What a short script starts with.
HEAD = """\
import torch
import torch.distributed as dist
from torch import nn

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)


def make():
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8))


def steps(model, optimizer, count=3):
    generator = torch.Generator().manual_seed(rank)
    for _ in range(count):
        optimizer.zero_grad()
        model(torch.randn(4, 8, generator=generator)).square().mean().backward()
        optimizer.step()


"""


def watch(
    command: Any, folder: Path, body: str, *options: str
) -> tuple[int, str, list[dict[str, Any]], dict[str, Any]]:
    """Exit code, what was printed, what rank 0 saw of each optimizer, the report."""
    (folder / "train.py").write_text(HEAD + body + "dist.destroy_process_group()\n")
    script, results = str(folder / "train.py"), str(folder / "run")
    code, out, err = command("watch", script, "--results", results, *options)
    report = json.loads((folder / "run/report.json").read_text())
    return code, out + err, report["ranks"]["0"]["optimizers"], report
