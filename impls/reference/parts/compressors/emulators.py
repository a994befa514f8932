"""All compression methods in one process: the effect of compressed reductions on exact gradients.

This is what compressed systems are compared with (``Implementation.emulator``).  It is written
apart from the reducers: on whole tensors, one parameter after the other, without buckets, indices,
bits or messages, so that a mistake in those shows.  Only what is drawn is drawn by the same rule.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor

from shardproof.impls.reference.engine.choices import Compress, Reduction
from shardproof.impls.reference.parts.compressors.draws import count, first_factor, mask
from shardproof.impls.reference.parts.compressors.powersgd import matrix

Tensors = dict[str, Tensor]


class Emulator(ABC):
    """``chosen`` in one process: :class:`shardproof.contract.Emulation`."""

    def __init__(self, chosen: Compress, reduction: Reduction) -> None:
        self.chosen, self.reduction = chosen, reduction
        self.residuals: list[Tensors] = []
        self.sent: list[Tensors] = []
        self.kept: Tensors = {}

    def __call__(self, step: int, parts: Sequence[Tensors]) -> Tensors:
        """Reduce every parameter that has, or has had, a gradient. A single rank sends nothing and
        applies its residuals.
        """
        if len(parts) == 1:
            owed = {name: tensor for own in self.residuals for name, tensor in own.items()}
            self.residuals, self.sent = [], []
            return {n: g + owed[n] if n in owed else g for n, g in parts[0].items()}
        if not self.residuals:
            self.residuals = [{} for _ in parts]
        self.sent = [{} for _ in parts]
        # A rank that did not use a parameter sends zeros, and what it kept; where no rank used it,
        # nothing is applied of what they send.
        like = {name: g for held in (*self.residuals, *parts) for name, g in held.items()}
        applied: Tensors = {}
        for name, shape in like.items():
            given = [part.get(name, torch.zeros_like(shape)) for part in parts]
            wanted = [gradient.clone(memory_format=torch.contiguous_format) for gradient in given]
            for own, kept in zip(wanted, self.residuals, strict=True):
                own += kept.get(name, 0.0)
            total, sent = self.reduce(step, name, wanted)
            if self.chosen.feeds_back and sent and shape.numel():  # nothing is kept of nothing
                for rank, (own, told) in enumerate(zip(wanted, sent, strict=True)):
                    self.residuals[rank][name] = own - told
                    self.sent[rank][name] = told
            if any(name in part for part in parts):
                applied[name] = total
        return applied

    def regroup(self, heirs: Sequence[Sequence[int]]) -> None:
        """Number n continues with the sum of the residuals of ``heirs[n]``; factors restart."""
        before, self.kept = self.residuals, {}
        self.residuals = [{} for _ in heirs]
        for own, old in zip(self.residuals, heirs, strict=True):
            for residuals in (before[number] for number in old if before):
                for name, tensor in residuals.items():
                    own[name] = own[name] + tensor if name in own else tensor

    @abstractmethod
    def reduce(
        self, step: int, name: str, wanted: Sequence[Tensor]
    ) -> tuple[Tensor, Sequence[Tensor]]:
        """The applied sum, and the part of ``wanted`` that each rank sends.

        Nothing sent: a parameter of which nothing is ever left.
        """

    def rounded(self, tensor: Tensor) -> Tensor:
        """The value after a transfer in ``chosen.dtype``."""
        return tensor.to(self.chosen.dtype or tensor.dtype).to(tensor.dtype)


def added(tensors: Sequence[Tensor]) -> Tensor:
    """The sum, added one by one."""
    total = tensors[0].clone()
    for tensor in tensors[1:]:
        total = total + tensor
    return total


class CastEmulator(Emulator):
    """Rounded before it is sent, and again when the sum is sent back."""

    def reduce(
        self, step: int, name: str, wanted: Sequence[Tensor]
    ) -> tuple[Tensor, Sequence[Tensor]]:
        sent = [self.rounded(own) for own in wanted]
        total = added(sent)
        return total if self.reduction.scattered else self.rounded(total), sent


class TopKEmulator(Emulator):
    """Zero except for the largest elements."""

    def reduce(
        self, step: int, name: str, wanted: Sequence[Tensor]
    ) -> tuple[Tensor, Sequence[Tensor]]:
        assert self.chosen.density is not None
        sent = []
        for own in wanted:
            size = own.abs().view(-1)
            is_sent = torch.zeros_like(size, dtype=torch.bool)
            largest = size.topk(count(self.chosen.density, own.numel()), sorted=False).indices
            is_sent[largest] = True
            sent.append(torch.where(is_sent.view(own.shape), self.rounded(own), 0.0))
        return added(sent), sent


class RandomKEmulator(Emulator):
    """Zero except for the elements that all ranks draw."""

    def reduce(
        self, step: int, name: str, wanted: Sequence[Tensor]
    ) -> tuple[Tensor, Sequence[Tensor]]:
        assert self.chosen.density is not None
        shape, numel = wanted[0].shape, wanted[0].numel()
        is_sent = torch.zeros(numel, dtype=torch.bool)
        is_sent[mask(self.chosen.seed, step, name, numel, self.chosen.density)] = True
        number = int(is_sent.sum())
        factor = 1.0 if self.chosen.feeds_back or not number else numel / number
        sent = [torch.where(is_sent.view(shape), self.rounded(own * factor), 0.0) for own in wanted]
        return self.rounded(added(sent)), sent


class PowerSGDEmulator(Emulator):
    """Projected on the directions of the sum."""

    def reduce(
        self, step: int, name: str, wanted: Sequence[Tensor]
    ) -> tuple[Tensor, Sequence[Tensor]]:
        assert self.chosen.rank is not None
        shape = wanted[0].shape
        sizes = matrix(shape, self.chosen.rank)
        if not sizes:
            return added(wanted), ()
        rows, columns, rank = sizes
        factor = self.kept.get(f"{name}.factor@0")
        if factor is None:
            factor = first_factor(self.chosen.seed, name, columns, rank, wanted[0].dtype)
        matrices = [own.view(rows, columns) for own in wanted]
        basis = orthonormal(added([m @ factor for m in matrices]))
        coefficients = [m.T @ basis for m in matrices]
        sent = [(basis @ own.T).view(shape) for own in coefficients]
        total = added(coefficients)
        if total.any():
            self.kept |= {f"{name}.factor@{rank}": total for rank in range(len(wanted))}
        return (basis @ total.T).view(shape), sent


def orthonormal(columns: Tensor) -> Tensor:
    """Columns orthonormalized one after another."""
    basis, triangle = torch.linalg.qr(columns)
    return basis * torch.where(triangle.diagonal() < 0, -1.0, 1.0).to(columns.dtype)


class SignEmulator(Emulator):
    """The sign of the majority of ranks."""

    def reduce(
        self, step: int, name: str, wanted: Sequence[Tensor]
    ) -> tuple[Tensor, Sequence[Tensor]]:
        sizes = [own.abs().mean() for own in wanted]
        pairs = zip(wanted, sizes, strict=True)
        votes = added([is_plus(own, size).to(torch.int64) for own, size in pairs])
        size = added(sizes)
        return torch.where(2 * votes >= len(wanted), size, -size), ()


class OneBitEmulator(Emulator):
    """Signs with a magnitude, of workers and of servers."""

    def reduce(
        self, step: int, name: str, wanted: Sequence[Tensor]
    ) -> tuple[Tensor, Sequence[Tensor]]:
        sent = [signed(own) for own in wanted]
        lost = f"{name}.server_residual@all"
        total = added(sent) + self.kept.get(lost, 0.0)
        flat, answer = total.view(-1), torch.empty(total.numel(), dtype=total.dtype)
        # Each rank serves whole bytes of signs, the first ranks one more where they do not divide.
        whole, more = divmod(math.ceil(flat.numel() / 8), len(wanted))
        begin = 0
        for rank in range(len(wanted)):
            end = begin + 8 * (whole + (rank < more))
            answer[begin:end] = signed(flat[begin:end])
            begin = end
        answer = answer.view(total.shape)
        if total.numel():  # nobody serves nothing
            self.kept[lost] = total - answer
        return answer, sent


def signed(tensor: Tensor) -> Tensor:
    """The signs of a tensor, with its norm."""
    size = tensor.norm() / math.sqrt(max(tensor.numel(), 1))
    return torch.where(is_plus(tensor, size), size, -size)


def is_plus(tensor: Tensor, size: Tensor) -> Tensor:
    """Where a value is not negative; noise relative to ``size`` counts as zero."""
    return tensor >= -size * math.sqrt(torch.finfo(tensor.dtype).eps)


EMULATORS: dict[str, type[Emulator]] = {
    "cast": CastEmulator,
    "topk": TopKEmulator,
    "randomk": RandomKEmulator,
    "powersgd": PowerSGDEmulator,
    "sign": SignEmulator,
    "onebit": OneBitEmulator,
}


def emulator(chosen: Compress, reduction: Reduction) -> Emulator:
    """A new emulator of the chosen method."""
    return EMULATORS[str(chosen.method)](chosen, reduction)
