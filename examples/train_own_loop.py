"""Keep your own training loop, and put the model under a sharded strategy.

Run: torchrun --nproc-per-node 2 examples/train_own_loop.py
python examples/train_own_loop.py
"""

import torch
from torch import nn

import shardproof

with shardproof.join() as world:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 3))
    wrapped = shardproof.wrap(model, "zero2", optimizer=torch.optim.RMSprop, lr=0.01, clip=1.0)
    generator = torch.Generator().manual_seed(world.rank)  # each rank reads its own samples
    for step in range(60):
        inputs = torch.randn(16, 8, generator=generator)
        loss = nn.functional.cross_entropy(wrapped(inputs), inputs[:, :3].argmax(1))
        loss.backward()
        wrapped.step()
        wrapped.zero_grad()
        if step % 59 == 0 and world.rank == 0:
            print(f"step {step}: loss {float(loss.detach()):.2f}")
    held = wrapped.memory_stats()["current"]["optimizer_state"]
    print(f"rank {world.rank} of {world.size} holds {held:,} bytes of optimizer state")
