"""Gradients of which each element holds some shares whole and lacks others."""

from __future__ import annotations

from itertools import starmap
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from shardproof.checks.causes.gradients import _Sums


def sums(held: list[Tensor], shares: list[list[Tensor]]) -> Any:
    truth = torch.stack(list(starmap(lambda a, b: a + b, shares))).sum(0)
    state = SimpleNamespace(
        first=lambda: {"w": torch.cat(held)}, tensors={"w": {0: torch.cat(held)}}
    )
    made = _Sums.__new__(_Sums)
    vars(made).update(
        state=state,
        truth={"w": truth},
        held={"w": torch.cat(held)},
        lowest="float64",
        parts=[[{"w": micro} for micro in share] for share in shares],
    )
    return made


@pytest.fixture
def shares() -> list[list[Tensor]]:
    draw = torch.Generator().manual_seed(3)
    return [[torch.randn(40, generator=draw, dtype=torch.float64) for _ in "ab"] for _ in range(3)]


def test_it_tells_which_shares_are_in_which_elements(shares: list[list[Tensor]]) -> None:
    whole = [a + b for a, b in shares]
    held = [sum(whole)[:10], (whole[0] + whole[2])[10:30], whole[1][30:]]
    assert sums(held, shares).by_element() == (
        "in 20 of 30 wrong elements, of 'w', data coordinate 1 is missing; "
        "in 10 of 30 wrong elements, of 'w', they contain only data coordinate 1"
    )


def test_it_tells_micro_batches_and_zeros(shares: list[list[Tensor]]) -> None:
    whole = [a + b for a, b in shares]
    held = [(sum(whole) - shares[2][1])[:30], torch.zeros(10, dtype=torch.float64)]
    assert sums(held, shares).by_element() == (
        "in 30 of 40 wrong elements, of 'w', micro-batch 1 of data coordinate 2 is missing; "
        "in 10 of 40 wrong elements, of 'w', all values are zero"
    )


def test_it_says_nothing_of_what_no_shares_explain(shares: list[list[Tensor]]) -> None:
    whole = sum(a + b for a, b in shares)
    assert sums([whole[:39], whole[39:] * 1.01], shares).by_element() == ""
    assert sums([whole.roll(1)], shares).by_element() == ""
