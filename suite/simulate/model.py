"""The module of a published shape, without values: what a simulated rank trains.

Names and layers are those that ``estimate`` counts (``costs/shapes/``), so figures of both are
of the same tensors.  Attention is one operator that keeps its inputs, its output and a number a row
(``flash``, arXiv 2205.14135, algorithm 1), or keeps the matrix of scores as well (``math``).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from shardproof.contract import CrossEntropy, LossTerm, MicroBatch, Role
from shardproof.costs.shapes import Shape
from shardproof.simulate import work
from shardproof.workloads.layers import Embedding, Linear, Place, Span, Stack, StackPart, tie


class _Flash(torch.autograd.Function):
    """Attention whose backward computes the scores again: only shapes, no numbers."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        out = torch.empty_like(query)
        sums = query.new_empty(query.shape[:-1], dtype=torch.float32)
        ctx.save_for_backward(query, key, value, out, sums)
        work.attention(query, key, value, backward=False, others=(out, sums))
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        query, key, value, out, sums = ctx.saved_tensors
        made = torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)
        work.attention(query, key, value, backward=True, others=(*made, *gradients, out, sums))
        return made


class CoreAttention(nn.Module):
    """Attention of ``(samples, heads, rows, size)`` over keys and values of fewer heads."""

    def __init__(self, span: Span, form: str) -> None:
        super().__init__()
        self.span, self.form = span, form

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """The weighted values of each query, in its shape."""
        if self.form == "flash":
            return _Flash.apply(query, key, value)
        shared = query.shape[1] // key.shape[1]
        if shared > 1:
            key, value = (part.repeat_interleave(shared, 1) for part in (key, value))
        scores = query @ key.transpose(-2, -1) / math.sqrt(query.shape[-1])
        return scores.softmax(-1) @ value


class Attention(nn.Module):
    """Causal self-attention; the rows of ``qkv`` are all queries, all keys, all values."""

    roles: ClassVar[Mapping[str, Role]] = {
        "": "attention",
        "core": "core",
        "qkv": "heads",
        "out": "row",
    }

    def __init__(self, shape: Shape, span: Span, place: Place) -> None:
        super().__init__()
        h, size = shape.hidden, shape.hidden // shape.heads
        self.head_size, self.group = size, shape.heads // shape.kv
        self.core = CoreAttention(span, shape.attention)
        self.qkv = Linear(
            h, (shape.heads + 2 * shape.kv) * size, bias=shape.bias in ("qkv", "all"), **place
        )
        self.out = Linear(h, h, bias=shape.bias == "all", **place)

    def forward(self, hidden: Tensor) -> Tensor:
        """Attention over ``(samples, length, width)``; the same shape."""
        qkv = self.qkv(hidden)
        samples, length, rows = qkv.shape
        kv = max(1, rows // self.head_size // (self.group + 2)) * self.head_size
        parts = qkv.split([rows - 2 * kv, kv, kv], -1)
        heads = [p.view(samples, length, -1, self.head_size).transpose(1, 2) for p in parts]
        return self.out(self.core(*heads).transpose(1, 2).reshape(samples, length, rows - 2 * kv))


class Mlp(nn.Module):
    """``down(gelu(up(x)))``, or with a gate ``down(silu(gate(x)) * up(x))``, both in ``up``."""

    roles: ClassVar[Mapping[str, Role]] = {"up": "column", "down": "row"}

    def __init__(self, shape: Shape, place: Place) -> None:
        super().__init__()
        self.gated = shape.mlp == "swiglu"
        width = shape.inner * (2 if self.gated else 1)
        self.up = Linear(shape.hidden, width, bias=shape.bias == "all", **place)
        self.down = Linear(shape.inner, shape.hidden, bias=shape.bias == "all", **place)

    def forward(self, hidden: Tensor) -> Tensor:
        """Values ``(..., width)`` to values of the same shape."""
        inner = self.up(hidden)
        if not self.gated:
            return self.down(F.gelu(inner))
        gate, up = inner.chunk(2, -1)
        return self.down(F.silu(gate) * up)


class Block(nn.Module):
    """Attention and an MLP, each on the normed hidden state and added to it."""

    def __init__(self, shape: Shape, span: Span, place: Place) -> None:
        super().__init__()
        norm = nn.RMSNorm if shape.norm == "rms" else nn.LayerNorm
        self.norm1, self.attention = norm(shape.hidden, **place), Attention(shape, span, place)
        self.norm2, self.mlp = norm(shape.hidden, **place), Mlp(shape, place)

    def forward(self, hidden: Tensor) -> Tensor:
        """``(samples, length, width)`` to the same shape."""
        hidden = hidden + self.attention(self.norm1(hidden))
        return hidden + self.mlp(self.norm2(hidden))


class Embed(nn.Module):
    """Tokens, and learned positions where the shape has them: ``(samples, positions, width)``."""

    def __init__(self, shape: Shape, span: Span, place: Place) -> None:
        super().__init__()
        self.span = span
        self.roles: Mapping[str, Role] = {"token": "embedding"}
        self.token = Embedding(shape.vocab, shape.hidden, **place)
        if shape.positions:
            self.position = Embedding(shape.positions, shape.hidden, **place)
            self.roles = {**self.roles, "position": "positions"}

    def forward(self, tokens: Tensor) -> Tensor:
        """Tokens ``(samples, length)`` to ``(samples, length, width)``."""
        own, rows = self.span.cut(self.span.read(tokens))
        hidden = self.token(own)
        return (
            hidden + self.position(self.span.places(rows)) if "position" in self.roles else hidden
        )


class ShapeModel:
    """The contract's ``Build`` of ``shape``: fresh modules of the shape in ``dtype``."""

    cross_entropy: CrossEntropy | None = CrossEntropy()
    terms: Sequence[LossTerm] = ()

    def __init__(self, shape: Shape, dtype: torch.dtype, watch: Any = None) -> None:
        self.shape, self.dtype, self._watch = shape, dtype, watch
        self.units: Sequence[str] = tuple(f"blocks.{index}" for index in range(shape.layers))
        model = self._made({"device": "meta"})
        self.roles: Mapping[str, Role] = {
            f"{name}.{child}".strip("."): role
            for name, module in model.named_modules()
            for child, role in getattr(module, "roles", {}).items()
        }

    def _made(self, place: Place) -> Stack:
        shape, span, place = self.shape, Span(), {**place, "dtype": self.dtype}
        norm = nn.RMSNorm if shape.norm == "rms" else nn.LayerNorm
        model = Stack(
            embed=Embed(shape, span, place),
            blocks=[Block(shape, span, place) for _ in self.units],
            norm=norm(shape.hidden, **place),
            head=Linear(shape.hidden, shape.vocab, bias=False, **place),
            flags=_no_flags,
            odd={},
        )
        if shape.tied:
            tie(model, "embed.token", "head")
        return model

    def __call__(self, device: str = "cpu") -> nn.Module:
        model = self._made({"device": device})
        if self._watch is not None:
            self._watch(model, self.units)
        return model

    def stage(self, module: nn.Module, start: int, stop: int) -> nn.Module:
        """The part of ``module`` with units ``start`` to ``stop - 1``."""
        assert isinstance(module, Stack)
        return StackPart(module, start, stop)

    def loss(self, outputs: Tensor, micro: MicroBatch) -> Tensor:
        """``sum(weight * cross entropy)``, computed in the dtype of the weights."""
        logits = outputs.reshape(-1, outputs.shape[-1]).to(micro.weights.dtype)
        losses = F.cross_entropy(logits, micro.targets.reshape(-1), reduction="none")
        return (micro.weights.reshape(-1) * losses).sum()


def _no_flags(tokens: Tensor) -> Tensor:
    raise NotImplementedError
