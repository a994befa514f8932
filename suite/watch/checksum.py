"""64 bits for each tensor, from its bits alone: equal tensors have equal checksums on any rank.

A tensor is read once, as integer *lanes* of 4, 2 or 1 bytes.  Lane ``x_i`` is multiplied by a
random 64-bit weight ``w_i``, and the products are summed modulo 2**64: a change of one lane always
shows, any other with a probability of about 1 - 2**-32, an exchange of elements included.  Lanes
are narrower than the sum on purpose: with 8-byte lanes two changed signs would cancel out.

It works in pieces that fit into a cache; many small tensors make one piece.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from shardproof.table import grouped
from shardproof.watch.found import Tracked, local

#: Lanes of a piece, by type of device: on a GPU every call costs more than a cache saves.
_PIECE = {"cpu": 1 << 16}
_PIECE_ELSEWHERE = 1 << 22
_MASK = (1 << 64) - 1
_LANES = {1: torch.uint8, 2: torch.int16}


@torch.no_grad()
def checksums(tensors: Sequence[Tensor]) -> list[int]:
    """A signed 64-bit number for each dense tensor, of any dtype, strides and device.

    Shape and dtype are not part of it; tensors are read in row-major order.
    """
    sums = [len(tensors)] * len(tensors)
    lanes = ((number, _lanes(tensor)) for number, tensor in enumerate(tensors))
    work = grouped(((own.device, own.dtype), (number, own)) for number, own in lanes if len(own))
    for (device, _), items in work.items():
        owners, values = _Pieces(device).of(items)
        for owner, value in zip(owners, values, strict=True):
            sums[owner] = mixed(sums[owner], value)
    return sums


def mixed(first: int, second: int) -> int:
    """Two 64-bit numbers in one, signed; the order counts (the finish of splitmix64)."""
    word = (first * 0x9E3779B97F4A7C15 + second + 0x632BE59BD9B4E019) & _MASK
    word = ((word ^ (word >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    word = ((word ^ (word >> 27)) * 0x94D049BB133111EB) & _MASK
    word ^= word >> 31
    return word - (1 << 64) if word >> 63 else word


def folded(numbers: Iterable[int]) -> int:
    """All of them in one."""
    total = 0
    for number in numbers:
        total = mixed(total, number)
    return total


def of_text(text: str) -> int:
    """A signed 64-bit number for a text."""
    data = text.encode("utf-8", "backslashreplace")
    words = (data[i : i + 8] for i in range(0, len(data), 8))
    return folded(int.from_bytes(word, "little") for word in (*words, len(data).to_bytes(8)))


class _Pieces:
    def __init__(self, device: torch.device) -> None:
        self._size = _PIECE.get(device.type, _PIECE_ELSEWHERE)
        self._weights = _weights(str(device), self._size)
        self._products = torch.empty_like(self._weights)
        self._owners: list[int] = []
        self._values: list[Tensor] = []

    def of(self, items: Sequence[tuple[int, Tensor]]) -> tuple[list[int], list[int]]:
        """Owner and sum of every piece, in order."""
        small: list[tuple[int, Tensor]] = []
        held = 0
        for number, lanes in items:
            if 2 * len(lanes) > self._size:
                for piece in lanes.split(self._size):
                    self._owners.append(number)
                    self._values.append(self._multiplied(piece).sum().view(1))
                continue
            if held + len(lanes) > self._size:
                self._several(small)
                small, held = [], 0
            small.append((number, lanes))
            held += len(lanes)
        self._several(small)
        return self._owners, torch.cat(self._values).tolist()

    def _multiplied(self, lanes: Tensor) -> Tensor:
        count = len(lanes)
        return torch.mul(lanes, self._weights[:count], out=self._products[:count])

    def _several(self, items: Sequence[tuple[int, Tensor]]) -> None:
        if not items:
            return
        running = self._multiplied(torch.cat([lanes for _, lanes in items])).cumsum(0)
        lengths = torch.tensor([len(lanes) for _, lanes in items])
        ends = running[(lengths.cumsum(0) - 1).to(running.device)]
        self._owners += [number for number, _ in items]
        self._values.append(torch.diff(ends, prepend=ends.new_zeros(1)))


def _lanes(tensor: Tensor) -> Tensor:
    """The tensor's bits as one row of integers."""
    plain = tensor.detach()
    if plain.is_complex():
        plain = torch.view_as_real(plain.resolve_conj())
    if plain.is_neg():
        plain = plain.resolve_neg()
    # Not `view`: a single element may have any stride.
    flat = plain.contiguous().as_strided((plain.numel(),), (1,))
    return flat.view(_LANES.get(flat.element_size(), torch.int32))


@cache
def _weights(device: str, count: int) -> Tensor:
    """Random odd numbers, the same on every rank; the program's own generators are not touched."""
    generator = torch.Generator().manual_seed(0x5EED)
    bits = torch.iinfo(torch.int64)
    drawn = torch.randint(bits.min, bits.max, (count,), dtype=torch.int64, generator=generator)
    return (drawn | 1).to(device)


#: What a missing tensor counts as.
ABSENT = of_text("absent")
_PLAIN = (int, float, bool, str, type(None))


class Sums(NamedTuple):
    """A checksum for each tracked parameter; ``read``: bytes that were read."""

    sums: list[int]
    read: int


def of_parameters(tracked: Sequence[Tracked]) -> Sums:
    """Checksums of the parameters of this rank."""
    return _sums([local(one.parameter) for one in tracked])


def of_tables(tables: Sequence[Tracked]) -> list[int]:
    """Checksums of buffers; 0 for one that is gone or has no plain elements."""
    there = (dense(one.reference()) for one in tables)
    # Each by itself: a checksum depends on how many tensors are asked for at once.
    return [0 if tensor is None else checksums([tensor])[0] for tensor in there]


def of_gradients(tracked: Sequence[Tracked]) -> Sums:
    """Parameters without a gradient have the checksum of nothing; so have sparse ones."""
    return _sums([dense(one.parameter.grad) for one in tracked])


def of_state(optimizer: torch.optim.Optimizer, tracked: Sequence[Tracked]) -> tuple[Sums, int]:
    """Checksums of the state that goes with each parameter, and of its keys and shapes."""
    owners: list[int] = []
    tensors: list[Tensor | None] = []
    plain: list[list[int]] = [[] for _ in tracked]
    form: list[str] = []
    for number, one in enumerate(tracked):
        state = optimizer.state.get(one.parameter) or {}
        for key, value in sorted(state.items(), key=lambda item: str(item[0])):
            if isinstance(value, Tensor):
                tensors.append(dense(value))
                owners.append(number)
                form.append(f"{number} {key} {tuple(value.shape)} {value.dtype}")
            elif isinstance(value, _PLAIN):
                plain[number].append(of_text(f"{key} {value!r}"))
                form.append(f"{number} {key}")
    whole = _sums(tensors)
    for owner, value in zip(owners, whole.sums, strict=True):
        plain[owner].append(value)
    return Sums([folded(values) for values in plain], whole.read), of_text("\n".join(form))


def dense(tensor: Tensor | None) -> Tensor | None:
    """This rank's part of ``tensor``, if it has plain elements."""
    if tensor is None:
        return None
    part = local(tensor)
    return part if part.layout is torch.strided and not part.is_meta else None


def hyperparameters(optimizer: torch.optim.Optimizer) -> list[dict[str, str]]:
    """Learning rates and all other plain values of each group."""
    return [
        {name: _text(value) for name, value in group.items() if name != "params" and _text(value)}
        for group in optimizer.param_groups
    ]


def _text(value: Any) -> str:
    if isinstance(value, Tensor):
        return repr(value.item()) if value.numel() == 1 and not value.is_meta else ""
    if isinstance(value, (tuple, list)):
        return repr([_text(item) for item in value])
    return repr(value) if isinstance(value, _PLAIN) else ""


@torch.no_grad()
def not_finite(tensors: Iterable[Tensor | None]) -> int | None:
    """Which of ``tensors`` is the first to hold an infinity or a NaN."""
    there = [
        (number, t)
        for number, t in enumerate(tensors)
        if t is not None and t.numel() and (t.is_floating_point() or t.is_complex())
    ]
    # A sum reads a tensor once and is not finite if an element is not; it may overflow by itself.
    sums = grouped((tensor.device, tensor.sum().abs().float()) for _, tensor in there)
    if all(bool(torch.stack(of_device).isfinite().all()) for of_device in sums.values()):
        return None
    return next((number for number, t in there if not bool(t.isfinite().all())), None)


def signature(tracked: Sequence[Tracked], classes: Sequence[tuple[int, ...]]) -> int:
    """Names, shapes and dtypes in order, and which of them belong together."""
    lines = (
        f"{one.name} {tuple(local(one.parameter).shape)} {one.parameter.dtype} "
        f"{classes.index(one.replicas)}"
        for one in tracked
    )
    return of_text("\n".join(lines))


def _sums(tensors: Sequence[Tensor | None]) -> Sums:
    there = [tensor for tensor in tensors if tensor is not None]
    found = iter(checksums(there))
    sums = [ABSENT if tensor is None else next(found) for tensor in tensors]
    return Sums(sums, sum(tensor.numel() * tensor.element_size() for tensor in there))
