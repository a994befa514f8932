"""``charnames_rnn``: ``charnames_gpt`` with a recurrent cell in the place of attention.

A cell goes along the positions of a sample and hands its state from one to the next (Elman 1990).
It owns its weights, is called once a position, and has two inputs that need gradients, one of which
is its own last output: backward goes through it as often, from the last position to the first.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from shardproof.workloads import mixture
from shardproof.workloads.base import Region
from shardproof.workloads.gpt import CharnamesGPT
from shardproof.workloads.knobs import Params
from shardproof.workloads.layers import Place, Span


class Cell(nn.Module):
    """``tanh(weight [entered; state] + bias)``, all of ``(samples, width)``."""

    def __init__(self, width: int, place: Place) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width, 2 * width, **place))
        self.bias = nn.Parameter(torch.empty(width, **place))

    def forward(self, entered: Tensor, state: Tensor) -> Tensor:
        """One step: input and state ``(samples, width)`` to the next state."""
        return torch.tanh(F.linear(torch.cat([entered, state], -1), self.weight, self.bias))


class Recurrence(nn.Module):
    """The states of a cell, ``(samples, positions, width)``; it starts from zeros."""

    #: What goes along positions needs all of them, in order.
    whole_sequence: ClassVar[bool] = True

    def __init__(self, width: int, positions: int, place: Place) -> None:
        super().__init__()
        #: Child -> calls per forward, of sequences that are not cut short.
        self.calls: Mapping[str, int] = {"cell": positions}
        self.cell = Cell(width, place)

    def forward(self, hidden: Tensor) -> Tensor:
        """Values ``(samples, length, width)`` to the state after each position."""
        state, states = torch.zeros_like(hidden[:, 0]), []
        for entered in hidden.unbind(1):
            state = self.cell(entered, state)
            states.append(state)
        return torch.stack(states, 1)


class CharnamesRNN(CharnamesGPT):
    """Samples and outputs are those of ``charnames_gpt``."""

    name = "charnames_rnn"
    about = "a recurrent cell in the place of attention: state along the sequence"
    knobs: ClassVar = {
        name: knob
        for name, knob in CharnamesGPT.knobs.items()
        if name not in ("heads", "kv_heads", *mixture.KNOBS)
    }
    sizes: ClassVar = {}

    def check(self, params: Params) -> None:
        """Any width will do."""

    def mixer(
        self, params: Params, traits: Collection[str], span: Span, place: Place
    ) -> tuple[str, nn.Module]:
        """The part of a block that looks at earlier positions, under its name."""
        return "recurrence", Recurrence(params["width"], params["seq"], place)

    def zero_gradient(self, params: Params) -> dict[str, list[Region]]:
        """None is."""
        return {}
