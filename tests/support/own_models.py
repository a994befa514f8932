"""Models of a user's own: sound ones of several kinds, and such as cannot be judged."""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from shardproof import OwnWorkload

Pair = tuple[Tensor, Tensor]


def each(outputs: Tensor, targets: Tensor) -> Tensor:
    """Cross-entropy of each target; the classes are the last dimension of ``outputs``."""
    flat = F.cross_entropy(outputs.flatten(0, -2), targets.flatten(), reduction="none")
    return flat.view(targets.shape)


def points(size: int, generator: torch.Generator) -> Pair:
    inputs = torch.randn(size, 6, generator=generator)
    return inputs, (inputs[:, :3].sum(1) > inputs[:, 3:].sum(1)).long()


def one_layer() -> nn.Module:
    """12 elements."""
    return nn.Linear(6, 2, bias=False)


def chain(width: int = 12) -> nn.Module:
    return nn.Sequential(
        *(nn.Linear(6, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh(), nn.Linear(width, 2))
    )


class Backwards(nn.Module):
    """Layers that are registered in the reverse of the order in which forward uses them."""

    def __init__(self, width: int = 16, layers: int = 8) -> None:
        super().__init__()
        self.head = nn.Linear(width, 2)
        self.names = [f"layer{number}" for number in range(layers)]
        names = reversed(self.names)
        self.inner = nn.ModuleDict({name: nn.Linear(width, width) for name in names})
        self.first = nn.Linear(6, width)

    def forward(self, inputs: Tensor) -> Tensor:
        hidden: Tensor = self.first(inputs)
        for name in self.names:
            hidden = torch.tanh(self.inner[name](hidden))
        out: Tensor = self.head(hidden)
        return out


class Attending(nn.Module):
    """Torch's own layers, a buffer, tied ends and a bias (of the keys) whose gradient is zero."""

    table: Tensor

    def __init__(self, tied: bool = True, unused: bool = False) -> None:
        super().__init__()
        self.symbols = nn.Embedding(11, 8)
        layer = {"dropout": 0.0, "batch_first": True}
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(8, 2, 16, **layer)
            for _ in range(2)  # type: ignore[arg-type]
        )
        self.head = nn.Linear(8, 11, bias=False)
        if tied:
            self.head.weight = self.symbols.weight
        if unused:
            self.spare = nn.Linear(3, 3)
        self.register_buffer("table", torch.sin(torch.arange(40.0)).view(5, 8))

    def forward(self, symbols: Tensor) -> Tensor:
        hidden = self.symbols(symbols) + self.table
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(hidden)


class Normed(nn.Module):
    """Batch norm behind a bias that it cancels; a layer that is frozen; regression."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)
        self.first.weight.requires_grad_(False)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.last(torch.relu(self.norm(self.first(inputs))))


class Telling(nn.Module):
    """A block that gives what it computed, and beside it what later ones read."""

    def __init__(self, gives: type) -> None:
        super().__init__()
        self.inner, self.gives = nn.Linear(8, 8), gives

    def forward(self, hidden: Tensor, told: Sequence[Tensor], scale: float) -> tuple[Tensor, Any]:
        hidden = torch.tanh(self.inner(hidden) + scale * sum(told, torch.zeros(())))
        told = [*told, hidden[:, :1]]
        return hidden, {"told": told} if self.gives is dict else self.gives(told)


class Nested(nn.Module):
    """Blocks that take and give tensors inside of a tuple, a list and a dictionary."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 8), nn.Linear(8, 2)
        self.blocks = nn.ModuleList(Telling(kind) for kind in (tuple, list, dict, tuple))

    def forward(self, inputs: Tensor) -> Tensor:
        hidden, told = self.first(inputs), ()
        for block in self.blocks:
            hidden, told = block(hidden, told["told"] if isinstance(told, dict) else told, 0.5)
        return self.last(hidden)


class Wrapping(nn.Module):
    """Gives its hidden state inside of a dictionary, and takes it so or bare."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.inner = nn.Linear(width, 8)

    def forward(self, given: Any) -> dict[str, Tensor]:
        hidden = given if isinstance(given, Tensor) else given["hidden"]
        return {"hidden": torch.tanh(self.inner(hidden))}


class Unwrapping(nn.Linear):
    def forward(self, given: dict[str, Tensor]) -> Tensor:  # type: ignore[override]
        return super().forward(given["hidden"])


def wrapping() -> nn.Module:
    return nn.Sequential(Wrapping(6), Wrapping(8), Unwrapping(8, 2))


def words(size: int, generator: torch.Generator) -> Pair:
    symbols = torch.randint(11, (size, 6), generator=generator)
    return symbols[:, :-1], symbols[:, 1:]


def vectors(size: int, generator: torch.Generator) -> Pair:
    inputs = torch.randn(size, 6, generator=generator)
    return inputs, inputs[:, :3] ** 2


def squares(outputs: Tensor, targets: Tensor) -> Tensor:
    return (outputs - targets) ** 2


def distances(outputs: Tensor, targets: Tensor) -> Tensor:
    return squares(outputs, targets).sum(1)


def slot_like() -> nn.Module:
    """Layers whose names look like those of optimizer slots."""
    layers = {"outer_one": nn.Linear(6, 8), "master_two": nn.Linear(8, 2)}
    return nn.Sequential(OrderedDict(layers))


ONE_LAYER = OwnWorkload(one_layer, each, points)
SLOT_LIKE = OwnWorkload(slot_like, each, points)
CHAIN = OwnWorkload(chain, each, points)
BACKWARDS = OwnWorkload(Backwards, each, points)
WRAPPING = OwnWorkload(wrapping, each, points)
NESTED = OwnWorkload(Nested, each, points)
ATTENDING = OwnWorkload(Attending, each, words)
NORMED = OwnWorkload(Normed, squares, vectors)
BY_SAMPLE = OwnWorkload(Normed, distances, vectors)

# ------------------------------------------------------------------- what cannot be judged, and why


class TwoInputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 2)

    def forward(self, inputs: Tensor, mask: Tensor) -> Tensor:
        return self.layer(inputs * mask)


class GivesMapping(TwoInputs):
    def forward(self, inputs: Tensor) -> dict[str, Tensor]:  # type: ignore[override]
        return {"logits": self.layer(inputs)}


class StaysFloat32(TwoInputs):
    def forward(self, inputs: Tensor) -> Tensor:  # type: ignore[override]
        return self.layer(inputs.float())


def dropping() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.1), nn.Linear(8, 2))


def infinite() -> nn.Module:
    module = nn.Sequential(nn.Linear(6, 2))
    nn.init.constant_(module[0].weight, torch.inf)
    return module


_COUNT = itertools.count()


def short(size: int, generator: torch.Generator) -> Pair:
    inputs, targets = points(size, generator)
    return inputs, targets[:-1]


def moving(size: int, generator: torch.Generator) -> Pair:
    inputs, targets = points(size, generator)
    return inputs + next(_COUNT), targets


TWO_INPUTS = OwnWorkload(TwoInputs, each, points)
MAPPING = OwnWorkload(GivesMapping, each, points)
FLOAT32 = OwnWorkload(StaysFloat32, each, points)
DROPPING = OwnWorkload(dropping, each, points)
INFINITE = OwnWorkload(infinite, each, points)
SHORT = OwnWorkload(chain, each, short)
MOVING = OwnWorkload(chain, each, moving)
MEAN = OwnWorkload(chain, F.cross_entropy, points)
UNNAMED = OwnWorkload(chain, each, points, units=["5"])
