"""``digits_cnn``: a small convolutional net with BatchNorm on the 8x8 digits images.

``embed`` is a convolution to ``channels``, each block is convolution (without bias: a batch norm
would cancel it), norm, ReLU; ``norm`` pools to 4x4 and normalises, ``head`` is a linear layer.
With ``norm: batch`` the statistics are those of one micro-batch, so gradients depend on how the
batch is cut, by definition; with ``norm: group`` they do not.

Pixels are 0 to 1 in steps of 1/16, exact in every dtype.  The corner pixel, 0 in every image, holds
``flags / 16`` (see ``shardproof.workloads.traits``); a dropout key takes four bytes of a ninth row.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from shardproof.workloads import data
from shardproof.workloads.base import Picks, Samples, WorkloadFamily
from shardproof.workloads.knobs import Knob, Params
from shardproof.workloads.layers import Conv2d, Linear, Place, Stack, tie
from shardproof.workloads.traits import KEY_SHIFT, Oddities, oddities

CLASSES = 10
ROWS = 8
#: Dimension of the channels in ``(samples, channels, rows, columns)``.
CHANNELS = 1


class Pixels(Conv2d):
    """Convolution over the image proper, without the row that carries the key."""

    def forward(self, images: Tensor) -> Tensor:
        """``(samples, 1, 8 or 9, 8)`` -> ``(samples, channels, 8, 8)``."""
        return super().forward(images[:, :, :ROWS])


class Block(nn.Module):
    """Convolution, norm, ReLU, then the odd modules if there are any; keeps the shape."""

    def __init__(self, channels: int, norm: str, odd: Oddities | None, place: Place) -> None:
        super().__init__()
        self.conv = Conv2d(channels, channels, 3, padding=1, bias=False, **place)
        self.norm: nn.Module = nn.GroupNorm(1, channels, **place)
        if norm == "batch":
            self.norm = nn.BatchNorm2d(channels, **place)
        self.odd = odd

    def forward(self, hidden: Tensor) -> Tensor:
        """Channels ``(samples, channels, 8, 8)`` to the same shape."""
        hidden = F.relu(self.norm(self.conv(hidden)))
        return hidden if self.odd is None else self.odd(hidden)


class Pool(nn.Module):
    """Mean over 2x2 pixels, flattened and layer-normed: ``(n, c, 8, 8)`` -> ``(n, 16 c)``."""

    def __init__(self, channels: int, place: Place) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(16 * channels, **place)

    def forward(self, hidden: Tensor) -> Tensor:
        """Channels ``(samples, channels, 8, 8)`` to ``(samples, channels * 16)``."""
        return self.norm(F.avg_pool2d(hidden, 2).flatten(1))


class DigitsCNN(WorkloadFamily):
    """Samples are ``(1, 8, 8)`` images; outputs ``(samples, 10)`` logits."""

    name = "digits_cnn"
    about = "convolutions with BatchNorm on the digits images"
    digest = data.DIGITS_DIGEST
    stack_type: ClassVar[type[Stack]] = Stack
    knobs: ClassVar = {
        "channels": Knob(8),
        "layers": Knob(3),
        "norm": Knob("batch", choices=("batch", "group")),
    }

    def size(self) -> int:
        """Number of images."""
        return len(data.digits()[1])

    def model(self, params: Params, traits: Collection[str], place: Place) -> Stack:
        """Blocks of convolutions with the layers that traits ask for."""
        channels, layers, ends = params["channels"], params["layers"], ("tied_over_units",)
        middle = oddities("inner", traits, channels, CHANNELS, place)
        inner = [middle if index == layers // 2 else None for index in range(layers)]
        stack = self.stack_type(
            embed=Pixels(1, channels, 3, padding=1, **place),
            blocks=[Block(channels, params["norm"], own, place) for own in inner],
            norm=Pool(channels, place),
            head=Linear(16 * channels, CLASSES, **place),
            flags=_flags,
            odd={
                "front": oddities("front", traits, channels, CHANNELS, place, also=ends),
                "final": oddities("final", traits, 16 * channels, -1, place),
                "tail": oddities("tail", traits, channels, CHANNELS, place, also=ends),
            },
        )
        if "tied_over_units" in traits:
            tie(stack, "front.tied_over_units.layer", "tail.tied_over_units.layer")
        if "frozen" in traits:
            stack.get_parameter("blocks.0.conv.weight").requires_grad_(False)
        return stack

    def depends_on_cut(self, params: Params) -> bool:
        """Whether a batch norm normalizes each micro-batch alone."""
        return bool(params["norm"] == "batch")

    def samples(self, params: Params, picks: Picks) -> Samples:
        """Images ``(samples, 1, 8, 8)`` and labels ``(samples,)`` of the picked samples."""
        images, labels = data.digits()
        index = torch.tensor(picks.index)
        pixels = images[index].to(torch.float32)
        pixels[:, 0, 0] = torch.tensor(picks.flags, dtype=torch.float32)
        if picks.keys is not None:
            row = torch.zeros(len(index), 1, ROWS)
            row[:, 0, :4] = torch.tensor([list(key.to_bytes(4, "big")) for key in picks.keys])
            pixels = torch.cat([pixels, row], dim=1)
        inputs = (pixels / 16).to(picks.dtype).unsqueeze(1)
        return Samples(inputs, labels[index], torch.ones(len(index), dtype=torch.bool))


def _flags(images: Tensor) -> Tensor:
    """Flag bits from the corner pixel, the dropout key (0 if there is none) above them."""
    flags = (images[:, 0, 0, 0] * 16).round().to(torch.int64)
    if images.shape[2] > ROWS:
        values = (images[:, 0, ROWS, :4] * 16).round().to(torch.int64)
        for position, byte in enumerate(values.unbind(1)):
            flags = flags + (byte << (KEY_SHIFT + 8 * (3 - position)))
    return flags
