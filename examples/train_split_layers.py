"""Split the two layers of an MLP over 2 ranks, and train 2 such pairs with data parallelism.

Run: torchrun --nproc-per-node 4 examples/train_split_layers.py
"""

import torch
from torch import nn

import shardproof


class MLP(nn.Module):
    """Column, GELU, Row: what is in between needs no message."""

    def __init__(self, group):
        super().__init__()
        self.up = shardproof.ColumnParallelLinear(8, 64, group=group)
        self.down = shardproof.RowParallelLinear(64, 3, group=group)

    def forward(self, inputs):
        """Inputs (N, 8) to class scores (N, 3), whole on every rank."""
        return self.down(nn.functional.gelu(self.up(inputs)))


with shardproof.join() as world:
    mesh = world.new_mesh({"replicate": 2, "tensor": 2})
    torch.manual_seed(0)
    model = MLP(mesh.comm("tensor"))
    wrapped = shardproof.wrap(model, "ddp", mesh, lr=0.01)
    # Ranks of one pair get the same samples, the other pair gets others.
    generator = torch.Generator().manual_seed(mesh.coordinate["replicate"])
    for step in range(60):
        inputs = torch.randn(16, 8, generator=generator)
        loss = nn.functional.cross_entropy(wrapped(inputs), inputs[:, :3].argmax(1))
        loss.backward()
        wrapped.step()
        if step % 59 == 0 and world.rank == 0:
            print(f"step {step}: loss {float(loss.detach()):.2f}")
    print(f"rank {world.rank} holds {model.up.weight.shape[0]} of 64 rows of the first layer")
