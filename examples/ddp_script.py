"""A training script as it is: `shardproof watch` compares its ranks step by step.

Run: shardproof watch examples/ddp_script.py --nproc 2
     shardproof watch examples/ddp_script.py --nproc 2 -- --broken
"""

import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

options = argparse.ArgumentParser()
options.add_argument("--steps", type=int, default=5)
options.add_argument("--broken", action="store_true", help="step with another rate on rank 1")
given = options.parse_args()

dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
model = DistributedDataParallel(nn.Linear(4, 2))
rate = 0.1 * (1 + rank) if given.broken else 0.1
optimizer = torch.optim.SGD(model.parameters(), lr=rate)
torch.manual_seed(rank)
for _ in range(given.steps):
    inputs = torch.randn(8, 4)
    optimizer.zero_grad()
    nn.functional.mse_loss(model(inputs), inputs[:, :2]).backward()
    optimizer.step()
dist.destroy_process_group()
