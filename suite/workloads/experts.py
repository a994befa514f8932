"""``digits_experts``: the convolutions of ``digits_cnn`` with a mixture of experts for a head.

A router gives each image a weight for every expert, a linear layer; the logits are the weighted sum
of theirs, so that nothing hangs on ties.  Beside the logits the model gives those of its router,
of which the loss has two terms more:

* a z-loss, the square of their log-sum-exp (ST-MoE, arXiv 2202.08906, section 3.3), target by
  target like the cross-entropy;
* a load-balancing loss ``E sum_i f_i P_i`` (Switch Transformer, arXiv 2101.03961, section 2.2): f_i
  is the share of images whose largest weight is that of expert i, P_i the mean of its weights.  It
  is a product of means, so its ``scope`` (micro-batch, rank, global) makes another training.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from shardproof.contract import CrossEntropy, LossTerm, MicroBatch, Role
from shardproof.workloads import mixture
from shardproof.workloads.cnn import CLASSES, DigitsCNN
from shardproof.workloads.knobs import Knob, Params
from shardproof.workloads.layers import Linear, Place, Stack


class Mixture(nn.Module):
    """Features to ``(samples, classes + experts)``: logits, and those of the router."""

    def __init__(self, features: int, experts: int, place: Place) -> None:
        super().__init__()
        self.router = Linear(features, experts, **place)
        self.experts = nn.ModuleList(Linear(features, CLASSES, **place) for _ in range(experts))

    def forward(self, features: Tensor) -> Tensor:
        """Of features ``(samples, features)``."""
        scores = self.router(features)
        given = torch.stack([expert(features) for expert in self.experts], -1)
        return torch.cat([(given * scores.softmax(-1).unsqueeze(1)).sum(-1), scores], -1)


class Routed(Stack):
    """No rule splits its head."""

    roles: ClassVar[Mapping[str, Role]] = {}


class DigitsExperts(DigitsCNN):
    """Samples are those of ``digits_cnn``."""

    name = "digits_experts"
    about = "convolutions with a mixture of experts: loss terms in addition to the cross-entropy"
    stack_type: ClassVar[type[Stack]] = Routed
    knobs: ClassVar = {
        **DigitsCNN.knobs,
        "norm": Knob("group", choices=("group",)),
        "experts": Knob(4, minimum=2),
        "scope": Knob("global", choices=("global", "rank", "micro-batch")),
    }

    def model(self, params: Params, traits: Collection[str], place: Place) -> Stack:
        """As ``digits_cnn``, with another head."""
        stack = super().model(params, traits, place)
        stack.head = Mixture(16 * params["channels"], params["experts"], place)
        return stack

    def cross_entropy(self, params: Params) -> CrossEntropy | None:
        """Only a part of the loss is one."""
        return None

    def depends_on_cut(self, params: Params) -> bool:
        """Whether the balance is that of a part of the batch."""
        return bool(params["scope"] != "global")

    def terms(self, params: Params) -> Sequence[LossTerm]:
        """The load-balancing loss."""
        asked = {"experts": params["experts"], "top_k": 1, "balance": params["scope"]}
        return mixture.balance(asked, _scores, 1)

    def loss(self, params: Params, outputs: Tensor, micro: MicroBatch) -> Tensor:
        """``sum(weight * (cross entropy + z-loss))``, computed in the dtype of the weights."""
        outputs = outputs.to(micro.weights.dtype)
        logits, scores = outputs[:, :CLASSES], _scores(outputs)
        ignored = CrossEntropy.ignore_index
        losses = F.cross_entropy(logits, micro.targets, reduction="none", ignore_index=ignored)
        return (micro.weights * (losses + mixture.z_loss(scores))).sum()


def _scores(outputs: Tensor) -> Tensor:
    """Those of the one router, ``(samples, 1, experts)``, behind the logits."""
    return outputs[:, CLASSES:].unsqueeze(1)
