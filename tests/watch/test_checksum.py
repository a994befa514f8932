"""Checksums: equal for equal bits, whatever the layout; different for what goes wrong in steps."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from shardproof.watch.checksum import checksums, folded, mixed, of_text

DTYPES = [
    *(torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.complex64),
    *(torch.int64, torch.uint8, torch.bool),
]


def of(tensor: Tensor) -> int:
    (value,) = checksums([tensor])
    return value


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(), (1,), (7,), (5, 3), (300, 300)], ids=str)
def test_only_the_elements_count(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    torch.manual_seed(1)
    tensor = (100 * torch.randn(shape)).to(dtype)
    value = of(tensor)
    assert -(1 << 63) <= value < 1 << 63
    assert of(tensor.clone()) == value
    wide = torch.stack([tensor, tensor], -1)
    assert of(wide[..., 1]) == value, "strides"
    if tensor.dim() == 2:
        assert of(tensor.t().contiguous().t()) == value, "order in memory"


CHANGES: dict[str, Callable[[Tensor], Tensor]] = {
    "one bit": lambda t: t.view(torch.uint8).bitwise_xor_(_one_bit(t)).view(t.dtype),
    "negated": lambda t: -t,
    "two signs": lambda t: t * torch.where(torch.arange(t.numel()) < 2, -1, 1).view_as(t).to(t),
    "every other sign": lambda t: t * (1 - 2 * (torch.arange(t.numel()) % 2)).view_as(t).to(t),
    "rolled": lambda t: t.roll(1),
    "transposed": lambda t: t.t().contiguous(),
    "two rows exchanged": lambda t: t[[1, 0, *range(2, len(t))]],
    "halved": lambda t: t / 2,
    "last element": lambda t: t.index_put((torch.tensor(-1), torch.tensor(-1)), t[0, 0]),
}


def _one_bit(tensor: Tensor) -> Tensor:
    mask = torch.zeros_like(tensor.view(torch.uint8))
    mask[-1, -1] = 128
    return mask


@pytest.mark.parametrize("dtype", DTYPES[:4], ids=str)
@pytest.mark.parametrize("size", [4, 64, 520])
@pytest.mark.parametrize("change", CHANGES)
def test_every_change_shows(dtype: torch.dtype, size: int, change: str) -> None:
    """520 x 520 elements are several pieces; signs are the highest bits of lanes."""
    torch.manual_seed(2)
    tensor = torch.randn(size, size).to(dtype)
    changed = CHANGES[change](tensor.clone())
    assert not torch.equal(tensor, changed), "the change changes nothing"
    assert of(changed) != of(tensor)


def test_pieces_are_sums_modulo_two_to_the_64th() -> None:
    """Many small tensors and large ones, in any company, against the same alone."""
    torch.manual_seed(3)
    sizes = [3, 70_000, 1, 0, 1000, 200_000, 5, 32_768, 32_769, 65_536]
    tensors = [torch.randn(size) for size in sizes for _ in range(3)]
    alone, together = [], checksums(tensors)
    for tensor in tensors:
        changed = [t + (t is tensor) for t in tensors]
        sums = checksums(changed)
        alone.append([a == b for a, b in zip(sums, together, strict=True)])
    for place, (row, tensor) in enumerate(zip(alone, tensors, strict=True)):
        expected = [number != place or not tensor.numel() for number in range(len(tensors))]
        assert row == expected, place


def test_the_programs_random_numbers_stay_its_own() -> None:
    torch.manual_seed(4)
    before = torch.get_rng_state()
    checksums([torch.ones(10, requires_grad=True)])
    assert torch.equal(torch.get_rng_state(), before)


def test_numbers_and_texts_are_folded_in_order() -> None:
    assert mixed(1, 2) != mixed(2, 1)
    assert folded([1, 2, 3]) != folded([1, 3, 2]) and folded([]) == 0
    assert of_text("ab") != of_text("ba") and of_text("a") != of_text("a\0")
    assert of_text("lr=0.1") == of_text("lr=0.1")
