"""``dyadic_mlp``: a net in which nothing is ever rounded, so that every order of adding agrees.

All numbers are integers over a power of two, and sums stay so short that they fit the mantissa
(``oracle.exactness`` computes the budget and refuses what exceeds it).  So gradients and parameters
are equal bit for bit in every strategy, world size, backend and dtype with room enough: any
difference at all is a fault.

* Weights are used as -1, 0 or 1 (truncated), activations as small integers (clamped, rounded down).
  Both pass gradients straight through (Bengio et al., arXiv 1308.3432; ternary weights: Li et al.,
  arXiv 1605.04711), so that backward multiplies by integers as well.  It is linear in the loss's
  scale: a system that multiplies the loss by N and divides gradients by N stays exact.
* The loss of a target is a hinge against the next letter, ``max(0, 1 + other - target)``.
* Target weights are 1 or 2 over a power of two and sum to exactly 1.

A sample is the end of a Unicode character name over 32 symbols, or more for worlds of more tensor
ranks; each position guesses the next letter from its own.  Use SGD with a learning rate and a
momentum that are powers of two (a decay, too, but it costs many bits a step).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from shardproof.contract import CrossEntropy, MicroBatch, Role
from shardproof.workloads import data, mixture
from shardproof.workloads.base import Picks, Samples, WorkloadFamily
from shardproof.workloads.knobs import Knob, Params
from shardproof.workloads.layers import Embedding, Linear, Place, Span, Stack, seed_number, tie

#: Fewer would take two letters for one; from 128 on every character has its symbol.
SYMBOLS = 32
#: Knobs of mixtures whose values stay exact.
_ROUTED = {
    name: mixture.KNOBS[name]
    for name in ("experts", "top_k", "capacity", "capacity_over", "claims", "balancing_bias")
}
#: Initial values are multiples of 1/16 in [-1, 1]: 2 of 33 weights are not truncated to 0.
GRAIN = 16


class Ternary(Linear):
    """A linear layer whose weight counts as -1, 0 or 1; its gradient goes to the weight itself."""

    def forward(self, values: Tensor) -> Tensor:
        """The linear layer with weights rounded to -1, 0 or 1."""
        return F.linear(values, _ternary(self.weight), self.bias)


class Head(Ternary):
    """The last layer, whose logits are whole numbers."""

    def forward(self, values: Tensor) -> Tensor:
        """Values ``(..., width)`` to whole logits ``(..., classes)``."""
        return _floor(super().forward(values))


class Levels(nn.Module):
    """Clamped to ``[low, high]`` and rounded down; no gradient outside."""

    def __init__(self, low: int, high: int) -> None:
        super().__init__()
        self.low, self.high = low, high

    def forward(self, values: Tensor) -> Tensor:
        """Values cut to their limits and rounded down to whole numbers."""
        return _floor(F.hardtanh(values, self.low, self.high))


def _ternary(weight: Tensor) -> Tensor:
    return weight + (weight.clamp(-1, 1).trunc() - weight).detach()


def _floor(values: Tensor) -> Tensor:
    return values + (values.floor() - values).detach()


class Embed(nn.Module):
    """Symbol plus position: ``(samples, positions)`` of int64 -> ``(..., width)``."""

    roles: ClassVar[Mapping[str, Role]] = {"token": "embedding", "position": "positions"}

    def __init__(self, params: Params, place: Place) -> None:
        super().__init__()
        self.token = Embedding(params["vocab"], params["width"], **place)
        self.position = Embedding(params["seq"], params["width"], **place)
        self.span = Span()

    def forward(self, tokens: Tensor) -> Tensor:
        """Tokens ``(samples, length)`` to whole values ``(samples, length, width)``."""
        own, rows = self.span.cut(tokens)
        return 2 * self.token(own) + self.position(rows)


def _two_layers(
    rows: Tensor, up: Tensor, up_bias: Tensor, down: Tensor, down_bias: Tensor
) -> Tensor:
    inner = Levels(-1, 3)(F.linear(rows, _ternary(up), up_bias))
    # Whole: their product with the weights, and the router's gradient, need no more bits.
    return Levels(-2, 2)(F.linear(inner, _ternary(down), down_bias))


class Mixture(mixture.Mixture):
    """A mixture that is exact."""

    def __init__(self, params: Params, place: Place) -> None:
        width, count = params["width"], params["experts"]
        experts = mixture.Experts(count, width, 2 * width, _two_layers, place)
        super().__init__(params, width, (), experts, place)
        self.router = Ternary(width, count, **place)

    def weigh(self, scores: Tensor, experts: Tensor) -> Tensor:
        """The chosen scores as whole numbers within limits."""
        return Levels(-1, 2)(scores.gather(-1, experts))


class MixedBlock(nn.Module):
    """``hidden + mixture(levels(hidden))``."""

    def __init__(self, params: Params, place: Place) -> None:
        super().__init__()
        self.enter, self.mlp = Levels(-2, 2), Mixture(params, place)

    def forward(self, hidden: Tensor) -> Tensor:
        """Values ``(..., width)`` to values of the same shape."""
        return hidden + self.mlp(self.enter(hidden))


class Block(nn.Module):
    """``hidden + down(levels(up(levels(hidden))))`` over twice the width."""

    roles: ClassVar[Mapping[str, Role]] = {"up": "column", "down": "row"}

    def __init__(self, width: int, place: Place) -> None:
        super().__init__()
        self.enter, self.inner = Levels(-2, 2), Levels(-1, 3)
        self.up = Ternary(width, 2 * width, **place)
        self.down = Ternary(2 * width, width, **place)

    def forward(self, hidden: Tensor) -> Tensor:
        """Values ``(..., width)`` to values of the same shape."""
        return hidden + self.down(self.inner(self.up(self.enter(hidden))))


class DyadicMLP(WorkloadFamily):
    """Samples are ``(positions,)`` symbols; outputs are whole ``(samples, positions, vocab)``."""

    name = "dyadic_mlp"
    about = "integers over powers of two: equal bits in every order (lane dyadic)"
    digest = data.CHARACTER_NAMES_DIGEST
    dyadic = True
    knobs: ClassVar = {
        "width": Knob(32),
        "layers": Knob(2),
        "seq": Knob(8, 2),
        "vocab": Knob(SYMBOLS, SYMBOLS),
        **_ROUTED,
    }

    def check(self, params: Params) -> None:
        """Refuse knobs that do not fit together."""
        mixture.check(self.name, params)

    def size(self) -> int:
        """Number of names."""
        return len(data.character_names())

    def model(self, params: Params, traits: Collection[str], place: Place) -> Stack:
        """The net; ``traits``: tied_over_units ties the head to the embedding."""
        width = params["width"]
        stack = Stack(
            embed=Embed(params, place),
            blocks=[
                MixedBlock(params, place) if params.get("experts") else Block(width, place)
                for _ in range(params["layers"])
            ],
            norm=Levels(-4, 4),
            head=Head(width, params["vocab"], **place),
            flags=_flags,
            odd={},
        )
        if "tied_over_units" in traits:
            tie(stack, "embed.token", "head")
        if "frozen" in traits:
            down = "mlp.experts.down" if params.get("experts") else "down.weight"
            stack.get_parameter(f"blocks.0.{down}").requires_grad_(False)
        return stack

    def initial(self, seed: str, name: str, tensor: Tensor, owner: nn.Module) -> Tensor:
        """Multiples of 1/16 in [-1, 1], none of them 0; counts begin at 0."""
        if not tensor.is_floating_point():
            return torch.zeros(tensor.shape, dtype=tensor.dtype)
        generator = torch.Generator().manual_seed(seed_number(f"{seed}/{name}"))
        size = torch.randint(1, GRAIN + 1, tensor.shape, generator=generator)
        sign = 2 * torch.randint(2, tensor.shape, generator=generator) - 1
        return (size * sign).to(torch.float64) / GRAIN

    def weights(self, valid: Tensor) -> Tensor:
        """1 or 2 over the next power of two, the 2s first; the sum is exactly 1."""
        count = int(valid.sum())
        whole = 1 << (count - 1).bit_length()
        parts = torch.zeros(valid.shape, dtype=torch.float64)
        parts[valid] = torch.tensor([2.0] * (whole - count) + [1.0] * (2 * count - whole)).double()
        return parts / whole

    def depends_on_cut(self, params: Params) -> bool:
        """Whether places with experts are those of a part of the batch."""
        return mixture.depends_on_cut(params)

    def cross_entropy(self, params: Params) -> CrossEntropy | None:
        """None: its loss has exact sums, which a cross-entropy has not."""
        return None

    def loss(self, params: Params, outputs: Tensor, micro: MicroBatch) -> Tensor:
        """``sum(weight * max(0, 1 + score of the next letter - score of the target))``."""
        target = micro.targets.unsqueeze(-1)
        scores = outputs.to(micro.weights.dtype)
        other = scores.gather(-1, (target + 1) % params["vocab"])
        margins = 1 + other - scores.gather(-1, target)
        return (micro.weights * F.relu(margins.squeeze(-1))).sum()

    def samples(self, params: Params, picks: Picks) -> Samples:
        """The last symbols of names, so that none is like the next; 0 after the end."""
        names, seq, symbols = data.character_names(), params["seq"], params["vocab"]
        inputs, targets, valid = [], [], []
        for index in picks.index:
            text = [ord(letter) % symbols for letter in names[index][-(seq + 1) :]]
            row = text + [0] * (seq + 1 - len(text))
            inputs.append(row[:seq])
            targets.append(row[1:])
            valid.append([position < len(text) for position in range(seq)])
        return Samples(torch.tensor(inputs), torch.tensor(targets), torch.tensor(valid))


def _flags(tokens: Tensor) -> Tensor:
    return torch.zeros(len(tokens), dtype=torch.int64, device=tokens.device)
