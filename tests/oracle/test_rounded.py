"""Gradients off by a round-off: who multiplies round-off is seen, who does not is not."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from shardproof.oracle.rounded import Rounded, spread

EPS = torch.finfo(torch.float64).eps


class Orthogonal:
    """Keeps the second of two columns without what it has of the first, as PowerSGD does."""

    def __init__(self) -> None:
        self.kept: dict[str, Tensor] = {}
        self.heirs: list[Sequence[int]] = []

    def __call__(self, step: int, parts: Sequence[dict[str, Tensor]]) -> dict[str, Tensor]:
        first, second = parts[0]["w"].unbind(1)
        left = second - first * ((first @ second) / (first @ first))
        self.kept = {"w.factor@0": left / left.norm()}
        return parts[0]

    def regroup(self, heirs: Sequence[Sequence[int]]) -> None:
        self.heirs += heirs


@pytest.mark.parametrize("apart", [1.0, 1e-3, 1e-6])
def test_the_condition_of_what_is_kept_is_measured(apart: float) -> None:
    torch.manual_seed(1)
    first, other = torch.randn(2, 40, dtype=torch.float64)
    gradients = {"w": torch.stack([first, first + apart * other], 1)}
    alone, beside = Orthogonal(), Rounded(Orthogonal())
    alone(0, [gradients])
    total = beside(0, [gradients])
    assert 0 < float((total["w"] - gradients["w"]).abs().max()) <= 2 * EPS * 4
    moved = spread(alone.kept["w.factor@0"], beside.kept["w.factor@0"])  # type: ignore[index]
    assert 0.1 * EPS / apart < moved < 10 * EPS / apart


def test_the_rest_of_an_emulator_is_its_own() -> None:
    inner = Orthogonal()
    Rounded(inner).regroup([[0, 1]])  # type: ignore[operator]
    assert inner.heirs == [[0, 1]]
    assert getattr(Rounded(lambda step, parts: parts[0]), "sent", ()) == ()
    assert spread(torch.zeros(3), torch.zeros(3)) == 0.0
