"""Train a model of your own with its state sharded over 4 processes, and resume it.

Run: python examples/train_model.py
torchrun --nproc-per-node 2 examples/train_model.py
"""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from shardproof import Training

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 4))
inputs = torch.randn(512, 16)
data = DataLoader(TensorDataset(inputs, inputs[:, :4].argmax(1)), batch_size=64, shuffle=True)


def training(strategy):
    """The same model, data and optimizer under another strategy."""
    return (
        Training(model, nn.functional.cross_entropy, data)
        .optimizer("adamw", lr=3e-3, clip=1.0)
        .strategy(strategy)
        .checkpoint("runs/example", every=20)
    )


if __name__ == "__main__":
    first = training("zero3").run(steps=40, ranks=4)
    second = training("zero1").run(steps=60, ranks=2)  # resumes at step 40, on other ranks
    if second.rank == 0:
        print(f"zero3 on {first.world} ranks: loss {first.losses[0]:.2f} -> {first.losses[-1]:.2f}")
        print(f"zero1 on {second.world} ranks: steps {second.first} to 60")
        for rank, stats in enumerate(first.memory_stats()):
            held = ", ".join(f"{kind} {size:,}" for kind, size in stats["current"].items())
            print(f"rank {rank} of zero3 holds, in bytes: {held}")
