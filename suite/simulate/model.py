"""The module of a published shape, without values, which a simulated rank trains.

Names and layers are those that ``estimate`` counts (``costs/shapes/``), so both compute figures of
the same tensors.  Attention is one operator that keeps its inputs, its output and one number a row
(``flash``, arXiv 2205.14135, algorithm 1), or operators that keep the matrix of scores (``math``).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from shardproof.contract import CrossEntropy, LossTerm, MicroBatch, Role
from shardproof.costs import shapes
from shardproof.costs.shapes import BatchSize, Shape
from shardproof.simulate import work
from shardproof.workloads.layers import (
    Conv2d,
    Embedding,
    Linear,
    Place,
    Span,
    Stack,
    StackPart,
    tie,
)


class _Flash(torch.autograd.Function):
    """Attention whose backward computes the scores again: shapes only, no values."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        samples, heads, rows, _ = query.shape
        # The next product reads the output row by row; it is as wide as a value.
        out = query.new_empty(samples, rows, heads, value.shape[-1]).transpose(1, 2)
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
    """Attention of ``(samples, heads, rows, size)``; keys and values may have fewer heads."""

    def __init__(self, span: Span, form: str) -> None:
        super().__init__()
        self.span, self.form = span, form

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """The weighted values of each query: ``(samples, heads, rows, size of a value)``."""
        return self.attend((query, key, value), query, key)

    def attend(self, heads: tuple[Tensor, ...], rows: Tensor, columns: Tensor) -> Tensor:
        """The same, for a strategy that replaces ``forward``; no mask reads positions here."""
        query, key, value = heads
        if self.form == "flash":
            return _Flash.apply(query, key, value)
        shared = query.shape[1] // key.shape[1]
        if shared > 1:
            key, value = (part.repeat_interleave(shared, 1) for part in (key, value))
        scores = query @ key.transpose(-2, -1) / math.sqrt(query.shape[-1])
        return scores.softmax(-1) @ value


def norm(shape: Shape, width: int, place: Place) -> nn.Module:
    """The norm of ``shape`` over vectors of ``width``."""
    return (nn.RMSNorm if shape.norm == "rms" else nn.LayerNorm)(width, **place)


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


class LatentAttention(nn.Module):
    """Latent attention: each head's parts are made from narrow vectors (DeepSeek-V2, arXiv
    2405.04434, section 2.1).  As in training, keys and values of all heads are materialized.

        hidden --> query_down, query_norm --> query_up --> content | rotary         of each head
        hidden --> kv_down --+--> kv_norm --> kv_up -----> content | value          of each head
                             +---------------------------> rotary                   of all heads

    Rotation of the rotary parts is left out, as it is in :class:`Attention`.
    """

    roles: ClassVar[Mapping[str, Role]] = {"": "attention", "core": "core"}

    def __init__(self, shape: Shape, of: shapes.LatentShape, span: Span, place: Place) -> None:
        super().__init__()
        self.of, h, heads = of, shape.hidden, shape.heads
        self.core = CoreAttention(span, shape.attention)
        self.query_down = Linear(h, of.query, bias=False, **place)
        self.query_norm = norm(shape, of.query, place)
        self.query_up = Linear(of.query, heads * (of.content + of.rotary), bias=False, **place)
        self.kv_down = Linear(h, of.kv + of.rotary, bias=False, **place)
        self.kv_norm = norm(shape, of.kv, place)
        self.kv_up = Linear(of.kv, heads * (of.content + of.value), bias=False, **place)
        self.out = Linear(heads * of.value, h, bias=False, **place)

    def forward(self, hidden: Tensor) -> Tensor:
        """Attention over ``(samples, length, width)``; the same shape."""
        of, (samples, length, _) = self.of, hidden.shape
        query = self.query_up(self.query_norm(self.query_down(hidden)))
        latent, rotary = self.kv_down(hidden).split([of.kv, of.rotary], -1)
        made = self.kv_up(self.kv_norm(latent)).view(samples, length, -1, of.content + of.value)
        content, value = made.split([of.content, of.value], -1)
        heads = content.shape[2]
        # Operators of attention take whole keys, so every head gets a copy of the shared part.
        key = torch.cat([content, rotary.unsqueeze(2).expand(-1, -1, heads, -1)], -1)
        parts = (query.view(samples, length, heads, -1), key, value)
        attended = self.core(*(part.transpose(1, 2) for part in parts))
        return self.out(attended.transpose(1, 2).reshape(samples, length, -1))


class Mlp(nn.Module):
    """``down(gelu(up(x)))``, or with a gate ``down(silu(gate(x)) * up(x))``, both in ``up``."""

    roles: ClassVar[Mapping[str, Role]] = {"up": "column", "down": "row"}

    def __init__(self, shape: Shape, inner: int, place: Place) -> None:
        super().__init__()
        self.gated, bias = shape.mlp == "swiglu", shape.bias == "all"
        self.up = Linear(shape.hidden, inner * (2 if self.gated else 1), bias=bias, **place)
        self.down = Linear(inner, shape.hidden, bias=bias, **place)

    def forward(self, hidden: Tensor) -> Tensor:
        """Values ``(..., width)`` to values of the same shape."""
        inner = self.up(hidden)
        if not self.gated:
            return self.down(F.gelu(inner))
        gate, up = inner.chunk(2, -1)
        return self.down(F.silu(gate) * up)


class Experts(nn.Module):
    """Gated MLPs of one shape, stacked along the first dimension.

    Their number follows from the parameters: a rank that holds some of them computes with these.
    """

    def __init__(self, of: shapes.MixtureShape, width: int, place: Place) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.empty(of.experts, 2 * of.ffn, width, **place))
        self.down = nn.Parameter(torch.empty(of.experts, width, of.ffn, **place))

    def forward(self, rows: Tensor, numbers: Tensor) -> Tensor:
        """Each of ``rows`` ``(n, width)`` through the expert of its number ``(n,)``."""
        order = numbers.argsort(stable=True)
        sizes = torch.bincount(numbers, minlength=len(self.up)).tolist()
        return self.compute(rows[order], sizes)[order.argsort()]

    def compute(self, rows: Tensor, sizes: Sequence[int]) -> Tensor:
        """The outputs of ``rows``, sorted by expert; ``sizes``: how many each has.

        Experts of equal sizes compute in one product, as a grouped GEMM kernel does.
        """
        if len({*sizes}) == 1:
            stacked = rows.view(len(sizes), sizes[0], rows.shape[-1])
            return _gated(stacked, self.up, self.down).flatten(0, 1)
        parts = zip(rows.split([*sizes]), self.up.unbind(0), self.down.unbind(0), strict=True)
        return torch.cat([_gated(*part) for part in parts])


def _gated(rows: Tensor, up: Tensor, down: Tensor) -> Tensor:
    gate, inner = (rows @ up.transpose(-2, -1)).chunk(2, -1)
    return (F.silu(gate) * inner) @ down.transpose(-2, -1)


class Mixture(nn.Module):
    """A router and experts; every choice is carried out.

    Scores have no values here, so the choices are fixed: tokens choose the experts in turn, and
    every expert gets the same number of rows.  Real routers are trained towards that.
    If the shape has balancing biases, ``load`` counts the choices of each expert.
    """

    roles: ClassVar[Mapping[str, Role]] = {"router": "router", "experts": "expert"}
    load: Tensor

    def __init__(self, shape: Shape, of: shapes.MixtureShape, place: Place) -> None:
        super().__init__()
        self.of, device = of, place["device"]
        self.router = Linear(shape.hidden, of.experts, bias=False, **place)
        self.experts = Experts(of, shape.hidden, place)
        if of.shared:
            self.shared = Mlp(shape, of.shared * of.ffn, place)
        if of.balanced:
            load = torch.zeros(of.experts, dtype=torch.int64, device=device)
            bias = torch.empty(of.experts, dtype=torch.float32, device=device)
            self.register_buffer("load", load)
            self.register_buffer("balancing_bias", bias)

    def forward(self, hidden: Tensor) -> Tensor:
        """Values ``(samples, positions, width)`` to values of the same shape."""
        tokens, top_k = hidden.flatten(0, -2), self.of.top_k
        #   3 tokens, 2 of 4 experts each:   0 1 | 2 3 | 0 1
        numbers = torch.arange(len(tokens) * top_k, device=tokens.device) % self.of.experts
        weights = self.weigh(self.router(tokens), numbers.view(-1, top_k))
        if self.of.balanced and self.training:
            self.load += torch.bincount(numbers, minlength=self.of.experts)
        outputs = self.experts(tokens.repeat_interleave(top_k, 0), numbers)
        mixed = (outputs.view(-1, top_k, tokens.shape[-1]) * weights.unsqueeze(-1)).sum(1)
        if self.of.shared:
            mixed = mixed + self.shared(tokens)
        return mixed.view(hidden.shape)

    def weigh(self, scores: Tensor, experts: Tensor) -> Tensor:
        """The weights of the chosen ``experts``, ``(tokens, top_k)``, from ``scores`` of all."""
        if not self.of.balanced:
            return scores.gather(-1, experts).softmax(-1)
        # DeepSeek-V3 (arXiv 2412.19437), equations 13 and 15.
        chosen = scores.sigmoid().gather(-1, experts)
        return chosen / chosen.sum(-1, keepdim=True)


class Block(nn.Module):
    """Attention and an MLP or a mixture, each on the normed hidden state and added to it."""

    def __init__(self, shape: Shape, index: int, span: Span, place: Place) -> None:
        super().__init__()
        self.norm1 = norm(shape, shape.hidden, place)
        self.attention = (
            LatentAttention(shape, shape.latent, span, place)
            if shape.latent
            else Attention(shape, span, place)
        )
        self.norm2, mixture = norm(shape, shape.hidden, place), shape.mixture_of(index)
        self.mlp = Mixture(shape, mixture, place) if mixture else Mlp(shape, shape.inner, place)

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


class Patches(nn.Module):
    """A vector that stands for the whole image, then the patches of ``(samples, channels, side,
    side)``, plus learned positions: ``(samples, 1 + patches, width)``.
    """

    roles: ClassVar[Mapping[str, Role]] = {"position": "positions"}

    def __init__(self, shape: Shape, of: shapes.ImageShape, span: Span, place: Place) -> None:
        super().__init__()
        self.span, h = span, shape.hidden
        self.first = nn.Parameter(torch.empty(h, **place))
        self.patch = Conv2d(of.channels, h, of.patch, of.patch, **place)
        self.position = Embedding(shape.positions, h, **place)

    def forward(self, images: Tensor) -> Tensor:
        """Images to hidden states."""
        patches = self.patch(images).flatten(2).transpose(1, 2)
        hidden = torch.cat([self.first.expand(len(patches), 1, -1), patches], 1)
        rows = torch.arange(hidden.shape[1], device=hidden.device)
        return hidden + self.position(rows)


class First(nn.Module):
    """The first position of ``(samples, positions, width)``."""

    def forward(self, hidden: Tensor) -> Tensor:
        """``(samples, width)``."""
        return hidden[:, 0]


class OfImages(Stack):
    """A stack with one class for each sample; no rule splits its head."""

    roles: ClassVar[Mapping[str, Role]] = {}


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
        image = shape.image
        model = (OfImages if image else Stack)(
            embed=Patches(shape, image, span, place) if image else Embed(shape, span, place),
            blocks=[Block(shape, index, span, place) for index in range(shape.layers)],
            norm=norm(shape, shape.hidden, place),
            head=Linear(shape.hidden, shape.vocab, bias=image is not None, **place),
            flags=_no_flags,
            odd={"final": First()} if image else {},
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


def micro_batch(shape: Shape, dtype: torch.dtype, work: BatchSize) -> MicroBatch:
    """A micro-batch of full samples for ``shape``, every target with the same weight."""
    samples, image = work.samples, shape.image
    if image:
        inputs = torch.empty(samples, image.channels, image.side, image.side, dtype=dtype)
        targets = torch.empty(samples, dtype=torch.int64)
    else:
        inputs = torch.empty(samples, work.positions or shape.seq, dtype=torch.int64)
        targets = torch.empty_like(inputs)
    weights, ids = torch.empty(targets.shape), torch.empty(samples, dtype=torch.int64)
    return MicroBatch(inputs, targets, weights, ids)
