"""A model, a loss and data of your own, trained by two strategies on 2 and 3 ranks.

Run: python examples/own_model.py
"""

import torch
from torch import nn

from shardproof import OwnWorkload, prove


def model():
    """Inputs (N, 6) to class scores (N, 2)."""
    return nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.GELU(), nn.Linear(8, 2))


def batch(size, generator):
    """Inputs (size, 6) and targets (size,), drawn with `generator` alone."""
    inputs = torch.randn(size, 6, generator=generator)
    return inputs, inputs.sum(1).gt(0).long()


#: The loss of each target, not reduced.
LOSS = nn.CrossEntropyLoss(reduction="none")
net = OwnWorkload(model, LOSS, batch)

if __name__ == "__main__":
    for system in ("pytorch/ddp", "reference/zero1"):
        for row in prove(system, workload=net, worlds=(2, 3)).itertuples():
            print(f"{system}, {row.world} ranks: {row.verdict} {row.reason}")
