"""Layers that are split over ranks, for a model of the user's own.

    x -> ColumnParallelLinear -> GELU -> RowParallelLinear -> y       no message in between
    x -> ParallelSelfAttention -> y                                   whole heads on each rank
    tokens -> VocabularyParallelEmbedding -> y                        rows of the table on each rank

The names are Megatron-LM's (arXiv 1909.08053, section 3).  ``group`` is the communicator of the
ranks that share the layer (``world.comm``, ``mesh.comm("tensor")``).  Every rank of it gets the
same inputs and computes the same loss; the other ranks of a job train other samples.  Initial
values are rank 0's of that group.

Here the ranks hold parameters of different values under one name, so a global norm of gradients
needs a sum over ``group``; the strategy ``tensor`` does that, and saves checkpoints, for models
whose layers have roles.
"""

from __future__ import annotations

from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from shardproof.comm import Comm
from shardproof.impls.reference.engine.state import broadcast_tensors
from shardproof.impls.reference.tensor.layers import classes, even, refused
from shardproof.impls.reference.tensor.operators import f, f_bar, gather_classes


def _require(layer: object, group: Any, **sizes: Any) -> None:
    """Raise unless ``group`` is a communicator and ``sizes`` are whole numbers above 0.

    :raises ValueError: they are not.
    """
    name = type(layer).__name__
    if not isinstance(group, Comm):
        raise ValueError(
            f"{name}: group = {group!r:.60} is not a communicator: give world.comm, or "
            "mesh.comm('tensor') of a mesh that world.new_mesh made"
        )
    for what, value in sizes.items():
        if type(value) is not int or value < 1:
            raise ValueError(f"{name}: {what} = {value!r:.60}: give a whole number of at least 1")


def _require_kind(layer: type, whole: Any, kind: type[nn.Module]) -> None:
    """Raise unless ``whole`` is a ``kind``.

    :raises ValueError: it is not.
    """
    if not isinstance(whole, kind):
        given = type(whole).__name__
        raise ValueError(f"{layer.__name__}.of takes an nn.{kind.__name__}, not a {given}")


class _Split(nn.Module):
    """Holds this rank's part of a linear layer's weight along ``dim``."""

    dim: int

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        group: Comm,
        dtype: torch.dtype | None = None,
    ) -> None:
        _require(self, group, in_features=in_features, out_features=out_features)
        super().__init__()
        self.group = group
        whole = nn.Linear(in_features, out_features, bias, group.device, dtype)
        self.in_features, self.out_features = whole.in_features, whole.out_features
        features = "input features" if self.dim else "output features"
        [block] = even(type(self).__name__, whole.weight.shape[self.dim], features, group)
        self.start, self.own = block.start, block.stop - block.start
        self.weight = nn.Parameter(self.part(whole.weight))
        self.bias = None if whole.bias is None else nn.Parameter(self.part(whole.bias))
        self.take(whole)

    def part(self, whole: Tensor) -> Tensor:
        """This rank's part of a weight or bias; a copy."""
        split = whole.dim() > self.dim
        own = whole.detach().narrow(self.dim, self.start, self.own) if split else whole.detach()
        return own.clone(memory_format=torch.contiguous_format)

    @classmethod
    def of(cls, whole: nn.Linear, **kind: Any) -> Self:
        """The layer with the values of ``whole`` on the first rank; ``kind`` as for the class."""
        _require_kind(cls, whole, nn.Linear)
        sizes = whole.in_features, whole.out_features, whole.bias is not None
        layer = cls(*sizes, **{"dtype": whole.weight.dtype, **kind})
        layer.take(whole)
        return layer

    @torch.no_grad()
    def take(self, whole: nn.Linear) -> None:
        """Copy the parts of the first rank's ``whole``."""
        held = [parameter.detach().clone() for parameter in whole.parameters()]
        broadcast_tensors(held, self.group)
        for parameter, value in zip(self.parameters(), held, strict=True):
            parameter.copy_(self.part(value))

    def extra_repr(self) -> str:
        """As ``nn.Linear`` shows itself."""
        features = f"in_features={self.in_features}, out_features={self.out_features}"
        return f"{features}, ranks={self.group.size}"


class ColumnParallelLinear(_Split):
    """Computes ``x W^T + b`` with the output features split: each rank has its part of the result.

    Arguments are those of ``nn.Linear`` and ``group``.  ``gather_output``: every rank gets the
    whole result, which costs one more message.
    """

    dim = 0

    def __init__(self, *sizes: Any, gather_output: bool = False, **how: Any) -> None:
        super().__init__(*sizes, **how)
        self.gather_output = gather_output

    def forward(self, inputs: Tensor) -> Tensor:
        """Whole inputs -> this rank's features, or all of them."""
        own = F.linear(f(inputs, self.group), self.weight, self.bias)
        return gather_classes(own, self.group, self.out_features) if self.gather_output else own


class RowParallelLinear(_Split):
    """Computes ``x W^T + b`` with the input features split; every rank has the whole result.

    Arguments are those of ``nn.Linear`` and ``group``.  ``input_is_split``: each rank gives its
    part of the inputs, as a column-parallel layer leaves it; else all of them.
    """

    dim = 1

    def __init__(self, *sizes: Any, input_is_split: bool = True, **how: Any) -> None:
        super().__init__(*sizes, **how)
        self.input_is_split = input_is_split

    def forward(self, inputs: Tensor) -> Tensor:
        """This rank's features, or all -> the sum over ranks."""
        if not self.input_is_split:
            # Each rank has the gradient of its part only: f puts them together.
            inputs = f(inputs, self.group).narrow(-1, self.start, self.own)
        if inputs.shape[-1] != self.own:
            raise ValueError(
                f"RowParallelLinear({self.in_features}, {self.out_features}) over "
                f"{self.group.size} ranks expects {self.own} features per rank, not "
                f"{inputs.shape[-1]}: put the layer after a ColumnParallelLinear without "
                "gather_output, or set input_is_split=False"
            )
        whole = f_bar(F.linear(inputs, self.weight), self.group)
        return whole if self.bias is None else whole + self.bias


class VocabularyParallelEmbedding(nn.Module):
    """Looks tokens up in a table whose rows are split; every rank has the whole result."""

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        *,
        group: Comm,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        _require(self, group, num_embeddings=num_embeddings, embedding_dim=embedding_dim)
        self.group, self.num_embeddings, self.embedding_dim = group, num_embeddings, embedding_dim
        [block] = classes(type(self).__name__, num_embeddings, group)
        self.start, self.own = block.start, block.stop - block.start
        shape = self.own, embedding_dim
        self.weight = nn.Parameter(torch.empty(shape, dtype=dtype, device=group.device))
        self.take(nn.Embedding(num_embeddings, embedding_dim, device=group.device, dtype=dtype))

    @classmethod
    def of(cls, whole: nn.Embedding, group: Comm) -> Self:
        """The layer with the values of ``whole`` on the first rank."""
        _require_kind(cls, whole, nn.Embedding)
        dtype = whole.weight.dtype
        layer = cls(whole.num_embeddings, whole.embedding_dim, group=group, dtype=dtype)
        layer.take(whole)
        return layer

    @torch.no_grad()
    def take(self, whole: nn.Embedding) -> None:
        """Copy the rows of the first rank's ``whole``."""
        table = whole.weight.detach().clone()
        broadcast_tensors([table], self.group)
        self.weight.copy_(table.narrow(0, self.start, self.own))

    def forward(self, tokens: Tensor) -> Tensor:
        """Tokens, the same on all ranks -> their rows."""
        if tokens.is_cpu and tokens.numel():  # on a GPU it would wait for the device
            first, last = (int(end) for end in tokens.aminmax())
            if first < 0 or last >= self.num_embeddings:
                wrong, size = first if first < 0 else last, self.num_embeddings
                raise ValueError(
                    f"{type(self).__name__}({size}, {self.embedding_dim}) got token {wrong}; "
                    f"valid: 0 to {size - 1}"
                )
        place = tokens - self.start
        elsewhere = (place < 0) | (place >= self.own)
        rows = F.embedding(place.masked_fill(elsewhere, 0), self.weight)
        return f_bar(rows.masked_fill(elsewhere[..., None], 0), self.group)


class ParallelSelfAttention(nn.Module):
    """Attends with whole heads on each rank: queries, keys and values by columns, the output by
    rows.  Inputs and results are ``(samples, positions, width)``, whole on every rank.
    """

    def __init__(
        self,
        width: int,
        heads: int,
        *,
        group: Comm,
        causal: bool = False,
        bias: bool = True,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        _require(self, group, width=width, heads=heads)
        if width % heads:
            raise ValueError(
                f"{type(self).__name__}({width}, {heads}): the width {width} is not divisible by "
                f"{heads} heads: use a width that is a multiple of {heads}"
            )
        if heads % group.size:
            valid = [n for n in range(1, heads + 1) if heads % n == 0]
            raise refused(type(self).__name__, f"{heads} heads", group, valid)
        self.head, self.causal = width // heads, causal
        given: dict[str, Any] = {"group": group, "dtype": dtype}
        self.query = ColumnParallelLinear(width, width, bias, **given)
        self.key = ColumnParallelLinear(width, width, bias, **given)
        self.value = ColumnParallelLinear(width, width, bias, **given)
        self.out = RowParallelLinear(width, width, bias, **given)

    def forward(self, inputs: Tensor) -> Tensor:
        """The attention of this rank's heads, then the sum over ranks."""
        parts = (self.query(inputs), self.key(inputs), self.value(inputs))
        q, k, v = (part.unflatten(-1, (-1, self.head)).transpose(-2, -3) for part in parts)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        whole: Tensor = self.out(attended.transpose(-2, -3).flatten(-2))
        return whole
