"""Linear layers that are split over ranks, for a model of one's own.

    x -> ColumnParallelLinear -> GELU -> RowParallelLinear -> y       no message in between

The names are Megatron-LM's (arXiv 1909.08053, section 3).  ``group`` is the communicator of the
ranks that share the layer (``world.comm``, ``mesh.comm("tensor")``).  Every rank of it gets the
same inputs and computes the same loss; the other ranks of a job train other samples.  Initial
values are rank 0's of that group.

Here the ranks hold parameters of different values under one name, so a global norm of gradients
needs a sum over ``group``; the strategy ``tensor`` does that, and saves checkpoints, for models
whose layers have roles.
"""

from __future__ import annotations

from typing import Any, Self, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from shardproof.comm import Comm
from shardproof.impls.reference.engine.state import broadcast_tensors
from shardproof.impls.reference.tensor.layers import even
from shardproof.impls.reference.tensor.operators import f, f_bar, gather_classes


class _Split(nn.Module):
    """Holds this rank's part of a linear layer's weight along ``dim``."""

    dim: int

    def __init__(self, whole: nn.Linear, group: Comm) -> None:
        super().__init__()
        self.group = group
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
        bias, make = whole.bias is not None, cast("Any", cls)
        kind = {"dtype": whole.weight.dtype, **kind}
        layer: Self = make(whole.in_features, whole.out_features, bias, **kind)
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

    ``gather_output``: every rank has the whole result instead, for one more message.
    """

    dim = 0

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        group: Comm,
        gather_output: bool = False,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(nn.Linear(in_features, out_features, bias, group.device, dtype), group)
        self.gather_output = gather_output

    def forward(self, inputs: Tensor) -> Tensor:
        """Whole inputs -> this rank's features, or all of them."""
        own = F.linear(f(inputs, self.group), self.weight, self.bias)
        return gather_classes(own, self.group, self.out_features) if self.gather_output else own


class RowParallelLinear(_Split):
    """Computes ``x W^T + b`` with the input features split; every rank has the whole result.

    ``input_is_split``: each rank gives its part of the inputs, as a column-parallel layer leaves
    it; else all of them.
    """

    dim = 1

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        group: Comm,
        input_is_split: bool = True,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(nn.Linear(in_features, out_features, bias, group.device, dtype), group)
        self.input_is_split = input_is_split

    def forward(self, inputs: Tensor) -> Tensor:
        """This rank's features, or all -> the sum over ranks."""
        if not self.input_is_split:
            # Each rank has the gradient of its part only: f puts them together.
            inputs = f(inputs, self.group).narrow(-1, self.start, self.own)
        if inputs.shape[-1] != self.own:
            raise ValueError(
                f"RowParallelLinear({self.in_features}, {self.out_features}) over "
                f"{self.group.size} ranks takes {self.own} features a rank, not "
                f"{inputs.shape[-1]}: put it behind a ColumnParallelLinear without "
                "gather_output, or set input_is_split=False"
            )
        whole = f_bar(F.linear(inputs, self.weight), self.group)
        return whole if self.bias is None else whole + self.bias
