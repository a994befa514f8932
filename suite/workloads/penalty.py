"""``digits_penalty``: the convolutions of ``digits_cnn`` with a gradient in their loss.

The model differentiates in its forward: beside the logits it gives, for each image, the square of
the gradient of their log-sum-exp with respect to its pixels, made with ``create_graph=True``.  The
loss has it as a penalty, so backward goes through that gradient as well (double backpropagation:
Drucker and LeCun 1992; gradient penalties: arXiv 1704.00028).  Then hooks on what a module returns
run twice a micro-batch, once of them in forward, and what that first pass saved of parameters is
needed in the second.  Norms are group norms: an image's gradient is its own.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from shardproof.contract import CrossEntropy, MicroBatch
from shardproof.workloads.cnn import CLASSES, DigitsCNN
from shardproof.workloads.knobs import Knob, Params
from shardproof.workloads.layers import Stack

#: Weight of the penalty: about as large as the cross-entropy at the start.
STRENGTH = 0.5


class Penalised(Stack):
    """``(samples, classes + 1)``: logits, and the square of a gradient; 0 in evaluation."""

    #: A strategy must leave parameters as they are between this forward and its backward.
    differentiates: ClassVar[bool] = True

    def forward(self, tensor: Tensor) -> Tensor:
        """Of images ``(samples, 1, rows, columns)``."""
        if not self.training or not torch.is_grad_enabled():
            logits = super().forward(tensor)
            return torch.cat([logits, torch.zeros_like(logits[:, :1])], 1)
        images = tensor.detach().requires_grad_()
        logits = super().forward(images)
        largest = logits.logsumexp(-1).sum()
        [slopes] = torch.autograd.grad(largest, [images], create_graph=True)
        return torch.cat([logits, slopes.flatten(1).square().sum(1, keepdim=True)], 1)


class DigitsPenalty(DigitsCNN):
    """Samples are those of ``digits_cnn``."""

    name = "digits_penalty"
    about = "convolutions with a gradient penalty: differentiates twice"
    stack_type: ClassVar[type[Stack]] = Penalised
    knobs: ClassVar = {**DigitsCNN.knobs, "norm": Knob("group", choices=("group",))}

    def stage(self, model: nn.Module, start: int, stop: int) -> nn.Module:
        """None: see :meth:`unstaged`."""
        raise ValueError(self.unstaged({}))

    def unstaged(self, params: Params) -> str:
        """The gradient in the loss goes through all of the model."""
        why = "takes a gradient through the whole model in its forward, which no stage can"
        return f"{self.name} {why}: take digits_cnn"

    def cross_entropy(self, params: Params) -> CrossEntropy | None:
        """Only a part of the loss is one."""
        return None

    def loss(self, params: Params, outputs: Tensor, micro: MicroBatch) -> Tensor:
        """``sum(weight * (cross entropy + penalty))``, computed in the dtype of the weights."""
        outputs = outputs.to(micro.weights.dtype)
        losses = F.cross_entropy(
            outputs[:, :CLASSES],
            micro.targets,
            reduction="none",
            ignore_index=CrossEntropy.ignore_index,
        )
        return (micro.weights * (losses + STRENGTH * outputs[:, CLASSES])).sum()
