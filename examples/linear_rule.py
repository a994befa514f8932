"""The batch grows with the world: where the linear rule of learning rates holds, and where it ends.

``ranks`` ranks with 16 samples each take the steps of one process with ``16 * ranks`` samples, so
one process shows it. Each row sees the same samples. *kept*: the learning rate of one rank;
*linear*: multiplied by the ranks. A loss above that of one rank is what the larger batch costs.

Run: python examples/linear_rule.py
"""

from __future__ import annotations

import torch

SAMPLES, EACH, RATE = 65_536, 16, 0.02


def final_loss(ranks: int, rate: float) -> float:
    """Loss over all data after one pass of ``SAMPLES`` samples in batches of ``ranks * EACH``."""
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(SAMPLES, 20, generator=generator)
    teacher = torch.nn.Sequential(torch.nn.Linear(20, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
    model = torch.nn.Sequential(torch.nn.Linear(20, 32), torch.nn.Tanh(), torch.nn.Linear(32, 1))
    with torch.no_grad():
        for parameter in (*teacher.parameters(), *model.parameters()):
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.5)
        targets = teacher(inputs)
    optimizer = torch.optim.SGD(model.parameters(), lr=rate)
    loss = torch.nn.functional.mse_loss
    for step in range(SAMPLES // (EACH * ranks)):
        rows = slice(step * EACH * ranks, (step + 1) * EACH * ranks)
        optimizer.zero_grad()
        loss(model(inputs[rows]), targets[rows]).backward()
        optimizer.step()
    with torch.no_grad():
        return loss(model(inputs), targets).item()


if __name__ == "__main__":
    print("ranks  batch  steps    kept  linear")
    for ranks in (1, 2, 4, 8, 16, 32, 64):
        kept, linear = final_loss(ranks, RATE), final_loss(ranks, RATE * ranks)
        batch = EACH * ranks
        print(f"{ranks:5}  {batch:5}  {SAMPLES // batch:5}  {kept:6.3f}  {linear:6.3f}")
