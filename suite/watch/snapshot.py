"""The bits of one optimizer at one step, as checksums: what is compared with other ranks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from shardproof.watch.checksum import checksums, folded, of_text
from shardproof.watch.found import Tracked, local

#: What a missing tensor counts as.
ABSENT = of_text("absent")
_PLAIN = (int, float, bool, str, type(None))


@dataclass
class Sums:
    """A checksum for each tracked parameter."""

    sums: list[int] = field(default_factory=list)
    #: Bytes that were read.
    read: int = 0


def of_parameters(tracked: Sequence[Tracked]) -> Sums:
    """Checksums of the parameters of this rank."""
    return _sums([local(one.parameter) for one in tracked])


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
        (number, tensor)
        for number, tensor in enumerate(tensors)
        if tensor is not None
        and tensor.numel()
        and (tensor.is_floating_point() or tensor.is_complex())
    ]
    if not there:
        return None
    # A sum reads a tensor once and is not finite if an element is not; it may overflow by itself.
    sums: dict[torch.device, list[Tensor]] = {}
    for _, tensor in there:
        sums.setdefault(tensor.device, []).append(tensor.sum().abs().float())
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
