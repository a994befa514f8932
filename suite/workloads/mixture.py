"""A mixture of experts in the place of an MLP: a router gives each token ``top_k`` of E experts.

    tokens --> router --> choice --+--> experts, each on the tokens that chose it --+
       |                           +--> weights ------------------------------------+--> sum
       +--> shared experts, on every token -----------------------------------------+

* The choice: the experts with the largest scores.  Weights are the softmax of the chosen scores
  (``router_weights: after``), or of all scores, of which the chosen ones count (``before``).
* Without ``capacity`` every choice is carried out (dropless).  With it an expert takes at most
  ``ceil(capacity * top_k * T / E)`` of the T tokens of a micro-batch or of a sample
  (``capacity_over``).  Tokens claim places in their order, each with all of its choices
  (``claims: position``), or all first choices come before all second ones (``claims: choice``).  A
  choice without a place adds nothing: the token passes through the residual connection.  Capacity
  over the global batch is left out: a rank would wait for the choices of all others in each layer.
* Load-balancing loss ``E sum_i f_i P_i`` (Switch Transformer, arXiv 2101.03961, section 2.2): f_i
  is the share of choices that fall on expert i, P_i the mean of its softmax.  It is a product of
  means, so its scope (micro-batch, rank, global) makes another training.
* z-loss: the square of the scores' log-sum-exp (ST-MoE, arXiv 2202.08906, section 3.3), target by
  target like the cross-entropy.
* Loss-free balancing (DeepSeek-V3, arXiv 2412.19437, section 2.1.2): a bias for each expert, which
  counts for the choice and not for the weights.  A system moves it after each update, by the load
  that the forwards of the step have counted; in the model it is a buffer that stays as it is.

Equal scores cannot make the choice ambiguous: of equal ones the expert with the lower number comes
first, on every device.

Strategies replace one function: the forward of :class:`Experts`, which is given rows and the number
of an expert for each, and returns the experts' outputs in the same order.  Who holds only some of
the experts sends the rows to them; router, weights and sum stay as they are.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from shardproof.contract import LossTerm, MicroBatch, Role
from shardproof.workloads.knobs import Knob, Params, WorkloadError
from shardproof.workloads.layers import Linear, Place, Stack

#: Weights of the two loss terms: large enough that a fault in either shows in every gradient.
BALANCE, Z = 0.1, 0.01

KNOBS: Mapping[str, Knob] = {
    "experts": Knob(0, 0),  # 0: an MLP
    "top_k": Knob(2),
    "shared_experts": Knob(0, 0),
    "router_weights": Knob("after", choices=("after", "before")),
    "capacity": Knob(0.0, choices=(0.0, 0.5, 1.0, 1.5)),  # 0: dropless
    "capacity_over": Knob("micro-batch", choices=("micro-batch", "sample")),
    "claims": Knob("position", choices=("position", "choice")),
    "balance": Knob("none", choices=("none", "micro-batch", "rank", "global")),
    "z_loss": Knob(False, choices=(False, True)),
    "balancing_bias": Knob(False, choices=(False, True)),
}


def check(workload: str, params: Params) -> None:
    """Refuse knobs that do not fit together."""
    experts, top_k = params.get("experts", 0), params.get("top_k", 1)
    if not experts:
        usual = {name: knob.default for name, knob in KNOBS.items()}
        given = [name for name in KNOBS if params.get(name, usual[name]) != usual[name]]
        if given:
            raise WorkloadError(f"{workload}: {given[0]} needs experts; set experts to 2 or more")
        return
    if top_k > experts:
        raise WorkloadError(
            f"{workload}: top_k = {top_k} is more than experts = {experts}; set top_k to at most "
            f"{experts}"
        )
    if top_k == 1 and params.get("router_weights") == "after":
        raise WorkloadError(
            f"{workload}: top_k = 1 with router_weights = 'after' makes every weight 1, so the "
            "router gets no gradient; set router_weights to 'before'"
        )
    if params["balancing_bias"] and params.get("balance", "none") != "none":
        raise WorkloadError(
            f"{workload}: balancing_bias = True forbids a balance loss; set balance to 'none'"
        )


def shows_scores(params: Params) -> bool:
    """Whether the loss has terms of the router's scores, which the outputs then hold."""
    return bool(params.get("experts")) and (params["balance"] != "none" or params["z_loss"])


def depends_on_cut(params: Params) -> bool:
    """Whether the numbers depend on which tokens a micro-batch or a rank has together."""
    by_capacity = params.get("capacity") and params["capacity_over"] == "micro-batch"
    return bool(by_capacity) or params.get("balance", "none") in ("micro-batch", "rank")


# --------------------------------------------------------------------------------- the modules

#: Rows of one expert and its four parameters to the outputs of these rows.
Network = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]


def two_layers(
    rows: Tensor, up: Tensor, up_bias: Tensor, down: Tensor, down_bias: Tensor
) -> Tensor:
    """``down(gelu(up(x)))``."""
    return F.linear(F.gelu(F.linear(rows, up, up_bias)), down, down_bias)


class Experts(nn.Module):
    """Networks of one shape, their parameters stacked along the first dimension.

    How many there are follows from the parameters, so that a rank that holds some of them computes
    with these.
    """

    def __init__(
        self, experts: int, width: int, inner: int, network: Network, place: Place
    ) -> None:
        super().__init__()
        self.network = network
        self.up = nn.Parameter(torch.empty(experts, inner, width, **place))
        self.up_bias = nn.Parameter(torch.empty(experts, inner, **place))
        self.down = nn.Parameter(torch.empty(experts, width, inner, **place))
        self.down_bias = nn.Parameter(torch.empty(experts, width, **place))

    def forward(self, rows: Tensor, numbers: Tensor) -> Tensor:
        """Each of ``rows`` ``(n, width)`` through the expert of its number ``(n,)``."""
        order = numbers.argsort(stable=True)
        sizes = torch.bincount(numbers, minlength=len(self.up)).tolist()
        return self.compute(rows[order], sizes)[order.argsort()]

    def compute(self, rows: Tensor, sizes: Sequence[int]) -> Tensor:
        """The outputs of ``rows``, which are sorted by expert; ``sizes``: how many each has.

        The gradient of an expert without rows is 0, not missing: it is cut from one stack.
        """
        own = (self.up, self.up_bias, self.down, self.down_bias)
        parts = [*zip(rows.split(list(sizes)), *(p.unbind(0) for p in own), strict=True)]
        # With as many experts as ranks, most have no rows.  One computes, if only of zero rows.
        used = [part for part in parts if len(part[0])] or parts[:1]
        return torch.cat([self.network(*part) for part in used])


@dataclass(frozen=True)
class Routing:
    """The choices of all tokens, best first: ``experts`` and ``weights`` are ``(tokens, top_k)``,
    and so is ``placed`` (bool), which says what is carried out.
    """

    experts: Tensor
    weights: Tensor
    placed: Tensor


class Mixture(nn.Module):
    """The layer.  ``load`` counts the choices of each expert, ``dropped`` what got no place:
    their number, and the sum of their tokens' numbers; both of all forwards in training.
    """

    roles: ClassVar[Mapping[str, Role]] = {"router": "router", "experts": "expert"}
    load: Tensor
    dropped: Tensor

    def __init__(
        self,
        params: Params,
        width: int,
        shared: Sequence[nn.Module],
        experts: Experts,
        place: Place,
    ) -> None:
        super().__init__()
        self.params = params
        count, device = params["experts"], place.get("device")
        self.router = Linear(width, count, **place)
        self.experts = experts
        self.shared = nn.ModuleList(shared)
        self.register_buffer("load", torch.zeros(count, dtype=torch.int64, device=device))
        self.register_buffer("dropped", torch.zeros(2, dtype=torch.int64, device=device))
        if params["balancing_bias"]:
            self.register_buffer("balancing_bias", torch.empty(count, **place))
        #: Where the scores of a forward go (``None``: nowhere); a model sets it for that forward.
        self.scores: list[Tensor] | None = None
        #: How many choices of each token each expert carried out, by forward (``None``: not kept).
        self.carried_out: list[Tensor] | None = None

    def forward(self, hidden: Tensor) -> Tensor:
        """Values ``(samples, positions, width)`` to values of the same shape."""
        tokens = hidden.flatten(0, -2)
        scores = self.router(tokens)
        if self.scores is not None:
            self.scores.append(scores.view(*hidden.shape[:-1], scores.shape[-1]))
        routing = self.route(scores, len(hidden))
        self.count(routing)
        mixed = self.mix(tokens, routing)
        for expert in self.shared:
            mixed = mixed + expert(tokens)
        return mixed.view(hidden.shape)

    def mix(self, tokens: Tensor, routing: Routing) -> Tensor:
        """The weighted sum of the outputs of each token's experts."""
        count, top_k = routing.experts.shape
        placed = routing.placed.flatten()
        pairs = placed.nonzero().flatten()
        outputs = self.experts(tokens[pairs // top_k], routing.experts.flatten()[pairs])
        # One row more, of zeros, for all choices without a place.
        outputs = torch.cat([outputs, torch.zeros_like(tokens[:1])])
        rows = torch.where(placed, placed.cumsum(0) - 1, len(pairs))
        chosen = outputs[rows].view(count, top_k, tokens.shape[-1])
        return (chosen * routing.weights.unsqueeze(-1)).sum(1)

    def route(self, scores: Tensor, samples: int) -> Routing:
        """The choice by ``scores`` ``(tokens, experts)`` of so many ``samples``."""
        bias = self._buffers.get("balancing_bias")
        ranked = scores.detach() if bias is None else scores.detach() + bias
        experts = self.choose(ranked, self.params["top_k"])
        return Routing(experts, self.weigh(scores, experts), self.places(experts, samples))

    def choose(self, scores: Tensor, top_k: int) -> Tensor:
        """The numbers of the ``top_k`` best; of equal ones the lower number comes first."""
        return scores.argsort(dim=-1, descending=True, stable=True)[:, :top_k]

    def weigh(self, scores: Tensor, experts: Tensor) -> Tensor:
        """The weights of the chosen ``experts``."""
        if self.params["router_weights"] == "before":
            return scores.softmax(-1).gather(-1, experts)
        return scores.gather(-1, experts).softmax(-1)

    def places(self, experts: Tensor, samples: int) -> Tensor:
        """Which choices get a place with their expert."""
        factor, count = self.params["capacity"], self.params["experts"]
        if not factor:
            return torch.ones_like(experts, dtype=torch.bool)
        lots = samples if self.params["capacity_over"] == "sample" else 1
        #   claims of one lot, in their order    (tokens, top_k): position by position
        #                                        (top_k, tokens): first choices first
        claims = experts.view(lots, -1, experts.shape[1])
        if self.params["claims"] == "choice":
            claims = claims.transpose(1, 2)
        shape, claims = claims.shape, claims.flatten(1)
        most = math.ceil(factor * claims.shape[1] / count)
        before = F.one_hot(claims, count).cumsum(1).gather(-1, claims.unsqueeze(-1)).squeeze(-1)
        placed = (before <= most).view(shape)
        if self.params["claims"] == "choice":
            placed = placed.transpose(1, 2)
        return placed.reshape(experts.shape)

    @torch.no_grad()
    def count(self, routing: Routing) -> None:
        """Note what was carried out; in training add to the statistics."""
        chosen = F.one_hot(routing.experts, self.params["experts"])
        if self.carried_out is not None:
            self.carried_out.append((chosen * routing.placed.unsqueeze(-1)).sum(1))
        if self.training:
            self.load += chosen.sum((0, 1))
            left = (~routing.placed).nonzero()[:, 0]
            self.dropped += torch.stack([left.new_tensor(len(left)), left.sum()])


def mixtures(module: nn.Module) -> dict[str, Mixture]:
    """Name -> layer of each mixture in ``module``, in forward order."""
    return {name: part for name, part in module.named_modules() if isinstance(part, Mixture)}


class ScoringStack(Stack):
    """A stack whose outputs are logits and, behind them, the scores of every router.

    No rule splits its head.
    """

    roles: ClassVar[Mapping[str, Role]] = {}

    def forward(self, tensor: Tensor) -> Tensor:
        """Inputs to ``(..., classes + layers * experts)``."""
        parts = mixtures(self).values()
        # A list of this forward only: one that is repeated in backward shows nothing.
        scores: list[Tensor] = []
        for part in parts:
            part.scores = scores
        try:
            logits = super().forward(tensor)
        finally:
            for part in parts:
                part.scores = None
        return torch.cat([logits, *scores], -1)


# ----------------------------------------------------------------------------------- the loss


def z_loss(scores: Tensor) -> Tensor:
    """The z-loss of every target, from scores ``(..., layers, experts)``."""
    return Z * scores.logsumexp(-1).square().sum(-1)


def balance(params: Params, scores_of: Callable[[Tensor], Tensor], layers: int) -> list[LossTerm]:
    """The load-balancing loss; ``scores_of`` outputs gives ``(targets, layers, experts)``."""
    if not params.get("experts") or params["balance"] == "none":
        return []
    size = layers * 2 * params["experts"] + 1
    statistics = partial(choices_and_weights, params["top_k"], scores_of)
    return [
        LossTerm("balance", params["balance"], size, statistics, partial(balance_value, layers))
    ]


def choices_and_weights(
    top_k: int, scores_of: Callable[[Tensor], Tensor], outputs: Tensor, micro: MicroBatch
) -> Tensor:
    """Weighted sums over targets: of the choices, of the router's softmax, and of 1."""
    weights = micro.weights.reshape(-1, 1, 1)
    scores = scores_of(outputs).to(weights.dtype)
    best = scores.detach().argsort(dim=-1, descending=True, stable=True)[..., :top_k]
    chosen = torch.zeros_like(scores).scatter(-1, best, 1.0 / top_k)
    sums = torch.stack([weights * chosen, weights * scores.softmax(-1)]).sum(1)
    return torch.cat([sums.flatten(), weights.sum().reshape(1)])


def balance_value(layers: int, statistics: Tensor) -> Tensor:
    """``E sum_i f_i P_i`` of all layers, as much as the part of the batch weighs; 0 of a part
    without targets.
    """
    chosen, given = statistics[:-1].view(2, layers, -1)
    product: Tensor = (chosen * given).sum() / statistics[-1].clamp(min=1e-30)
    return BALANCE * chosen.shape[-1] * product
