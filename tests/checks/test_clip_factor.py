"""The factor of clipping in low precision: what correct runs make of it, and what they do not."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from shardproof.checks.working_precision import wrong_factors
from shardproof.contract import OptimizerSpec, Piece

LIMIT = 0.05


def evidence(before: Tensor, after: Tensor, norm: float, limit: float) -> Any:
    """One rank that shows ``before`` and, clipped, ``after``, and reports ``norm``."""
    held = {
        point: {"gradients": [Piece.whole("w", tensor)]}
        for point, tensor in (("gradients_final", before), ("after_clip", after))
    }
    record = SimpleNamespace(steps=[SimpleNamespace(norm=norm, observed=held)])
    shown = SimpleNamespace(first=lambda: {"w": before})
    return SimpleNamespace(
        case=SimpleNamespace(optimizer=OptimizerSpec(clip_norm=limit)),
        ranks={0: record},
        observed=lambda step, point, kind: shown,
    )


def problems(before: Tensor, after: Tensor, norm: float, limit: float = LIMIT) -> list[str]:
    return [text for _, text in wrong_factors(evidence(before, after, norm, limit), 0)]


def gradients(seed: int, dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(3000, generator=generator, dtype=torch.float64) / 30).to(dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_what_torch_makes_of_it_is_right(dtype: torch.dtype) -> None:
    for seed in range(50):
        before = gradients(seed, dtype)
        clipped = torch.nn.Parameter(before.clone())
        clipped.grad = before.clone()
        norm = torch.nn.utils.clip_grad_norm_([clipped], LIMIT)
        assert not problems(before, clipped.grad, float(norm))
        wide = float(before.double().norm())
        for factor in (LIMIT / (wide + 1e-6), LIMIT / wide):
            assert not problems(before, before * torch.tensor(factor, dtype=dtype), wide)
            assert not problems(before, (before.double() * factor).to(dtype), wide)
            assert not problems(before.float(), before.float() * factor, wide)
            # FSDP1 clips by a wide norm and reports it rounded.
            rounded = float(torch.tensor(wide, dtype=dtype))
            assert not problems(before, (before.double() * factor).to(dtype), rounded)


@pytest.mark.parametrize("off", [0.98, 0.99, 1.01, 1.02])
def test_one_per_cent_is_seen(off: float) -> None:
    for seed in range(50):
        before = gradients(seed, torch.bfloat16)
        norm = float(before.double().norm())
        after = (before.double() * (off * LIMIT / norm)).to(torch.bfloat16)
        (text,) = problems(before, after, norm)
        assert "more than rounding in bfloat16 explains" in text


def test_a_factor_that_was_rounded_before_it_met_wide_gradients_is_seen() -> None:
    before = gradients(0, torch.bfloat16).float()
    norm = float(before.double().norm())
    after = before * float(torch.tensor(LIMIT / norm, dtype=torch.bfloat16))
    (text,) = problems(before, after, norm)
    assert "more than rounding in float32 explains" in text


def test_what_is_not_clipped_and_what_underflows_is_right() -> None:
    small = gradients(0, torch.bfloat16) / 1000
    norm = float(small.double().norm())
    assert norm < LIMIT
    assert not problems(small, small.clone(), norm)
    tiny = (gradients(1, torch.float64) * 1e-4).half()
    norm = float(tiny.double().norm())
    clipped = (tiny.double() * 0.01).half()
    assert not problems(tiny, clipped, norm, 0.01 * norm + 1e-8)
    assert problems(tiny, clipped, norm, 0.5 * norm)
