"""Bytes that backward needs of a transformer: Korthikanti et al. (arXiv 2205.05198) sections 4, 5.

For one micro-batch of b samples and s positions; h hidden size, a heads, f width of the MLP, e
bytes of an element, t tensor ranks.  With e = 2, f = 4h, dropout and materialised scores the parts
below add up to the paper's ``sbh (34 + 5 a s / h)``, of which ``sbh (24 + 5 a s / h)`` is divided
by t:

    whole on each rank            divided by t
    inputs of both norms     2e   Q, K, V                               e (h + 2 kv)
    inputs of qkv and up     2e   softmax, its mask, what is left of it  (2e + 1) a s^2 b
    two masks of dropout     2    input of the output projection         e h
                                  GeLU's input, down's input             2 e f
                                  two masks' worth of a gated MLP        2 e f more

Scores computed again (``flash``, or selective recomputation) take nothing.  Sequence parallelism
divides the left column by t, too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from shardproof.costs.shapes import BatchSize, Shape

#: What is computed again in backward: nothing, the scores, or every so many layers whole.
NONE, SELECTIVE = "none", "selective"


@dataclass(frozen=True)
class LayerSetting:
    """The choices, besides the shape, that the bytes of a layer depend on.

    ``tensor`` ranks divide layers, ``cut`` ranks the positions of a sample.
    """

    item: int = 2
    tensor: int = 1
    sequence_parallel: bool = False
    recompute: str | int = NONE
    cut: int = 1

    def tokens(self, shape: Shape, batch: BatchSize) -> int:
        """Positions of a micro-batch on the fullest of the ranks that ``cut`` them."""
        return batch.samples * -(-(batch.positions or shape.seq) // self.cut)


def of_layer(shape: Shape, batch: BatchSize, how: LayerSetting) -> float:
    """Bytes of one layer that keeps all that it does not compute again as scores."""
    e, positions = how.item, batch.positions or shape.seq
    tokens, h = how.tokens(shape, batch), shape.hidden
    gates = 4 if shape.mlp == "swiglu" else 2
    whole = tokens * h * (4 * e + 2 * shape.dropout)
    kv = h // shape.heads * shape.kv
    split = float(tokens * e * (2 * h + 2 * kv + gates * shape.inner))
    if shape.attention == "math" and how.recompute != SELECTIVE:
        split += shape.heads * positions * tokens * (e + shape.dropout * (e + 1))
    return split / how.tensor + whole / (how.tensor if how.sequence_parallel else 1)


@dataclass(frozen=True)
class UnitBytes:
    """Bytes that backward needs of a repeated block, and those of its input, which are among
    them.
    """

    kept: float
    input: float


@dataclass(frozen=True)
class KeptBytes:
    """Bytes of activations when forward ends, and at the fullest moment of backward."""

    by_forward: float
    peak: float


def of_units(
    first: float, units: Sequence[UnitBytes], last: float, recompute: str | int = NONE
) -> KeptBytes:
    """Bytes of blocks and of what lies before and behind them.

    Of blocks that are computed again in groups forward keeps the input of each group.  Backward
    computes a group when it has freed what lies behind the blocks.
    """
    if recompute in (NONE, SELECTIVE) or not units:
        whole = first + sum(unit.kept for unit in units) + last
        return KeptBytes(whole, whole)
    every = int(recompute)
    #     first | group | group | last      kept:  first  input  input  last
    #                   <-------------      peak:  first  input  input  the larger of group and last
    groups = [units[start : start + every] for start in range(0, len(units), every)]
    inputs = first + sum(group[0].input for group in groups)
    again = max(sum(unit.kept for unit in group) - group[0].input for group in groups)
    return KeptBytes(inputs + last, inputs + max(again, last))


def of_ends(shape: Shape, batch: BatchSize, how: LayerSetting) -> tuple[float, float]:
    """Bytes of the embedding (the mask of its dropout), and of last norm, head and loss."""
    tokens = how.tokens(shape, batch)
    parts = how.tensor if how.sequence_parallel else 1
    rows = batch.samples if shape.image else tokens
    logits = max(4, how.item) * rows * shape.vocab / how.tensor  # the loss works in fp32
    hidden = 2 * how.item * tokens * shape.hidden
    return tokens * shape.hidden * shape.dropout / parts, hidden / parts + logits
