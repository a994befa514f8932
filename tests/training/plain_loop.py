"""A model, data and a loop without any of the suite, for tests of ``Training`` and ``wrap``."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

BATCH = 8
LOSS = nn.functional.cross_entropy
#: Sums of another order round otherwise; AdamW makes of it what the learning rate allows.
CLOSE = {"rtol": 1e-9, "atol": 1e-9}


torch.manual_seed(0)
_MODEL = nn.Sequential(
    *(nn.Linear(6, 8), nn.GELU(), nn.Linear(8, 9), nn.LayerNorm(9), nn.GELU(), nn.Linear(9, 3))
).double()


def model() -> nn.Sequential:
    """The same values on all ranks: those that are threads share torch's generator."""
    return copy.deepcopy(_MODEL)


def samples(count: int = 40) -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(count, 6, generator=generator, dtype=torch.float64)
    return TensorDataset(inputs, inputs[:, :3].argmax(1))


def loader() -> DataLoader[tuple[Tensor, ...]]:
    return DataLoader(samples(), batch_size=BATCH)


def batches(steps: int) -> list[tuple[Tensor, Tensor]]:
    epoch = [(inputs, targets) for inputs, targets in loader()]
    return [epoch[step % len(epoch)] for step in range(steps)]


def trained(
    steps: int,
    kind: type[torch.optim.Optimizer] = torch.optim.AdamW,
    clip: float | None = None,
    **arguments: object,
) -> tuple[dict[str, Tensor], list[float]]:
    """Parameters after ``steps`` steps, and the losses."""
    own = model()
    optimizer = kind(own.parameters(), **arguments)  # type: ignore[call-arg]
    losses = []
    for inputs, targets in batches(steps):
        optimizer.zero_grad()
        loss = LOSS(own(inputs), targets)
        loss.backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(own.parameters(), clip)
        optimizer.step()
        losses.append(float(loss.detach()))
    return dict(own.state_dict()), losses


def assert_equal(state: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert state.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(
            state[name], value, msg=lambda text, n=name: f"{n}: {text}", **CLOSE
        )
