"""A script under your own torchrun: one import, and rank 0 reports where the ranks differ.

Run: torchrun --nproc-per-node 2 examples/torchrun_script.py
"""

import torch
import torch.distributed as dist
from torch import nn

import shardproof.watch  # noqa: F401 - watches this process from here on

dist.init_process_group("gloo")
torch.manual_seed(dist.get_rank())  # every rank draws other initial values: the fault
model = nn.Linear(4, 2)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
for _ in range(3):
    inputs = torch.randn(8, 4)
    optimizer.zero_grad()
    nn.functional.mse_loss(model(inputs), inputs[:, :2]).backward()
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
        parameter.grad /= dist.get_world_size()
    optimizer.step()
dist.destroy_process_group()
