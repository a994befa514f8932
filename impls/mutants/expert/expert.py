"""Faults of expert parallelism, planted in ``reference/expert``.

Most need two ranks whose experts and tokens differ; those of data axes a second replica; those of
capacity and balance a workload that has them; those of empty exchanges fewer tokens than experts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from shardproof.comm import Comm
from shardproof.contract import LossTerm
from shardproof.impls.mutants import declare
from shardproof.impls.mutants.triggers import CLIP, gpts
from shardproof.impls.reference.engine.norm import NormPart
from shardproof.impls.reference.engine.state import broadcast_tensors
from shardproof.impls.reference.engine.terms import Terms
from shardproof.impls.reference.expert import AXIS, ExpertParallel, ReferenceExpert
from shardproof.impls.reference.expert.balancing import Balancing
from shardproof.impls.reference.expert.exchange import Exchange, Plan

#: One block with four experts, of which a token takes two.
mixture = gpts(layers=1, width=16, seq=8, experts=4, global_batch=6)
BALANCED: Mapping[str, Any] = {
    "workload": mixture(balancing_bias=True),
    "options": {"balance_rate": 0.25},
    "steps": 3,
}
GRID = {"replicate": 2, AXIS: 2}

mutant = declare.family(
    ReferenceExpert, mesh={AXIS: 2}, workload=mixture(), killed_by=("equivalence",)
)


class _Layers(ExpertParallel):
    """Call :meth:`change` on every mixture of experts."""

    def __init__(self, module: nn.Module, *given: Any) -> None:
        super().__init__(module, *given)
        for part in module.modules():
            if "router" in part._modules:
                self.change(part)

    def change(self, layer: Any) -> None:
        """Change ``layer`` in place."""
        raise NotImplementedError


class _Knobs(_Layers):
    """Mixtures of experts with other values of some knobs."""

    knobs: ClassVar[Mapping[str, Any]] = {}

    def change(self, layer: Any) -> None:
        layer.params = {**layer.params, **self.knobs}


# ------------------------------------------------------------------------------- the exchange


@mutant("expert_combine_in_order_sent", says="every expert was chosen as often .* their order")
class CombineInOrderSent(Exchange):
    """Outputs come back sorted by expert and are not put back in the order of the tokens."""

    def return_order(self, order: Tensor) -> Tensor:
        return torch.arange(len(order))


@mutant(
    "expert_rows_not_sorted_by_expert",
    says="every expert was chosen as often as in the oracle .* the outputs",
)
class RowsNotSortedByExpert(Exchange):
    """Rows of several ranks are taken as sorted by expert, which those of each rank are."""

    def compute(self, arrived: Tensor, plan: Plan) -> Tensor:
        experts: Any = self.experts
        outputs: Tensor = experts.compute(arrived, plan.sizes.sum(0).tolist())
        return outputs


@mutant(
    "expert_without_rows_has_no_gradient",
    says="4096 of 8192 elements are owned by no rank",
    workload=mixture(experts=8, seq=2, top_k=1, router_weights="before", global_batch=2),
    mesh={AXIS: 4},
)
class WithoutRowsHasNoGradient(Exchange):
    """A rank whose experts get no rows does not call them, so their gradients are missing."""

    def compute(self, arrived: Tensor, plan: Plan) -> Tensor:
        return super().compute(arrived, plan) if len(arrived) else arrived


@mutant(
    "expert_gradient_of_tokens_lost",
    says=r"every tensor up to 'blocks\.0\.norm2\.bias' in forward order",
)
class GradientOfTokensLost(Exchange):
    """Dispatch is no part of the graph, so tokens get no gradient from their experts."""

    def dispatch(self, rows: Tensor, plan: Plan) -> Tensor:
        return super().dispatch(rows, plan).detach().requires_grad_() + 0 * rows.sum()


@mutant(
    "expert_sends_padded_rows", says="axis expert, all_to_all: 33,280 bytes", killed_by=("traffic",)
)
class SendsPaddedRows(Exchange):
    """Every rank gets as many rows as the one that gets most; those in addition are thrown away."""

    def dispatch(self, rows: Tensor, plan: Plan) -> Tensor:
        most = self.comm.agree([max(plan.sent)], "max")[0]
        padding = torch.zeros(most * self.comm.size, *rows.shape[1:], dtype=rows.dtype)
        even = [most] * self.comm.size
        self.move(padding, self.comm, even, even)
        return super().dispatch(rows, plan)


@mutant(
    "expert_idle_rank_stays_away",
    says="all_to_all",
    killed_by=("crash",),
    crash_says="rank 1 calls all_to_all",
    workload=mixture("unequal_micro_batches"),
)
class IdleRankStaysAway(ExpertParallel):
    """A rank without a micro-batch does not take part in the exchanges of the others."""

    def sit_out(self) -> None:
        return


# ----------------------------------------------------------------------------------- gradients


@mutant(
    "expert_gradients_divided_by_axis", says="every gradient is 2 times too small", zoo=("H07",)
)
class GradientsDividedByAxis(ExpertParallel):
    """Gradients of experts are divided by the number of expert ranks, like a mean over data."""

    def finish(self) -> None:
        super().finish()
        for name, parameter in zip(self.names, self.parameters, strict=True):
            if name in self.cuts and parameter.grad is not None and self.across is not None:
                parameter.grad.div_(self.across.size)


@mutant(
    "expert_gradients_summed_over_axis",
    says="axis expert, all_reduce: 157,760 bytes",
    killed_by=("equivalence", "traffic"),
)
class GradientsSummedOverAxis(ExpertParallel):
    """Gradients of different experts are added up over their axis, as those of all the rest."""

    def finish(self) -> None:
        self.expert_comm = self.comm
        super().finish()
        self.expert_comm = None


@mutant(
    "expert_gradients_not_summed_over_replicas",
    says="the share of data coordinate 2 is missing",
    killed_by=("equivalence", "traffic"),
    mesh=GRID,
)
class GradientsNotSummedOverReplicas(ExpertParallel):
    """Experts keep the gradients of their own replica."""

    def sum_over(self, comm: Comm, parameters: Sequence[nn.Parameter]) -> None:
        if comm is not self.expert_comm:
            super().sum_over(comm, parameters)


@mutant(
    "expert_rest_not_summed_over_axis",
    says="the share of data coordinate 1 is missing",
    killed_by=("equivalence", "replicas", "traffic"),
    mesh=GRID,
)
class RestNotSummedOverAxis(ExpertParallel):
    """Expert ranks are taken for copies with the same samples: the rest is summed over replicas."""

    def finish(self) -> None:
        whole, self.comm = self.comm, self.expert_comm
        super().finish()
        self.comm = whole


@mutant(
    "expert_norm_of_own_experts",
    says="the norm of the part that rank 0 holds itself",
    killed_by=("norm", "equivalence", "traffic"),
    optimizer=CLIP,
)
class NormOfOwnExperts(ExpertParallel):
    """The norm counts this rank's experts and leaves the others' out."""

    def norm_parts(self, order: float = 2.0) -> list[NormPart]:
        return [(total, ()) for total, _ in super().norm_parts(order)]


@mutant(
    "expert_norm_counts_rest_per_rank",
    says="summed over 'expert', with every copy that its ranks hold",
    killed_by=("norm", "equivalence"),
    optimizer=CLIP,
)
class NormCountsRestPerRank(ExpertParallel):
    """The norm adds up all gradients over the axis, so the rest counts once for every rank."""

    def norm_parts(self, order: float = 2.0) -> list[NormPart]:
        return [(total, (AXIS,)) for total, _ in super().norm_parts(order)]


# -------------------------------------------------------------------------------------- router


@mutant("expert_router_without_gradient", says=r"no rank holds 'blocks\.0\.mlp\.router\.weight'")
class RouterWithoutGradient(_Layers):
    """The weights of the chosen experts are constants, so the router never learns."""

    def change(self, layer: Any) -> None:
        weigh: Callable[..., Tensor] = layer.weigh
        layer.weigh = lambda scores, experts: weigh(scores.detach(), experts)


@mutant(
    "expert_weights_normalized_before_choice",
    says="every expert was chosen as often .* their weights",
)
class WeightsNormalizedBeforeChoice(_Knobs):
    """Weights are a softmax over all experts, of which the chosen ones do not add up to 1."""

    knobs: ClassVar = {"router_weights": "before"}


@mutant(
    "expert_router_in_bfloat16",
    says="tokens chose other experts than in the oracle",
    workload=mixture(experts=16, seq=12, global_batch=32),
)
class RouterInBfloat16(_Layers):
    """The choice is made by scores in bfloat16, so tokens near a border go elsewhere."""

    def change(self, layer: Any) -> None:
        choose: Callable[..., Tensor] = layer.choose
        layer.choose = lambda scores, top_k: choose(scores.bfloat16(), top_k)


@mutant(
    "expert_shared_counts_as_routed",
    says="every expert was chosen as often .* their weights",
    workload=mixture(shared_experts=1),
)
class SharedCountsAsRouted(_Layers):
    """The shared expert is weighted as one of the routed ones, by their mean weight."""

    def change(self, layer: Any) -> None:
        layer.shared[0].register_forward_hook(lambda module, given, output: output / 2)


@mutant(
    "expert_capacity_of_samples",
    says="other tokens were dropped than in the oracle",
    workload=mixture(capacity=1.0),
)
class CapacityOfSamples(_Knobs):
    """Places are shared out in each sample instead of in the micro-batch."""

    knobs: ClassVar = {"capacity_over": "sample"}


@mutant(
    "expert_first_choices_claim_first",
    says="other tokens were dropped than in the oracle",
    workload=mixture(capacity=0.5),
)
class FirstChoicesClaimFirst(_Knobs):
    """All first choices claim places before any second one, whatever the order of tokens."""

    knobs: ClassVar = {"claims": "choice"}


@mutant(
    "expert_carries_out_dropped_choices",
    says="other tokens were dropped than in the oracle",
    workload=mixture(capacity=0.5),
)
class CarriesOutDroppedChoices(_Layers):
    """Choices without a place are carried out all the same."""

    def change(self, layer: Any) -> None:
        layer.places = lambda experts, samples: torch.ones_like(experts, dtype=torch.bool)


# -------------------------------------------------------------------------------------- balance


@mutant(
    "expert_balance_of_replicas_only",
    says="axis expert, all_reduce: 0 bytes in 0 calls",
    killed_by=("equivalence", "traffic"),
    workload=mixture(balance="global"),
    mesh=GRID,
)
class BalanceOfReplicasOnly(Terms):
    """The statistics of a global balance are added up over replicas, and not over expert ranks."""

    def axes(self, term: LossTerm) -> tuple[str, ...]:
        return tuple(axis for axis in super().axes(term) if axis != AXIS)


@mutant("expert_bias_by_own_load", says=r"blocks\.0\.mlp\.balancing_bias", **BALANCED)
class BiasByOwnLoad(Balancing):
    """Each rank moves its balancing bias by the load of its tokens alone."""

    def total(self, loads: Tensor) -> Tensor:
        return loads


@mutant(
    "expert_load_counts_recomputed", says=r"blocks\.0\.mlp\.load", options={"recompute_every": 1}
)
class LoadCountsRecomputed(_Layers):
    """A recomputation does not restore the counts, so tokens count twice."""

    def change(self, layer: Any) -> None:
        load = layer.load

        def count(routing: Any) -> None:
            if layer.training:
                load.add_(torch.bincount(routing.experts.flatten(), minlength=len(load)))

        layer.count = count


@mutant(
    "expert_counts_places_as_dropped",
    says=r"buffer differs from the rule's: 'blocks\.0\.mlp\.dropped'",
    workload=mixture(capacity=0.5),
)
class CountsPlacesAsDropped(_Layers):
    """The statistics of dropped tokens name those that got a place, of as many."""

    def change(self, layer: Any) -> None:
        count: Callable[..., None] = layer.count

        def counts(routing: Any) -> None:
            before = layer.dropped[1].clone()
            count(routing)
            if layer.training:
                layer.dropped[1] = before + routing.placed.nonzero()[:, 0].sum()

        layer.count = counts


# ---------------------------------------------------------------------------------------- state


@mutant("expert_broadcast_over_axis", says="from rank 0's part")
class BroadcastOverAxis(ExpertParallel):
    """The experts of rank 0 are sent to all ranks of the axis, as copies would be."""

    def __init__(self, module: nn.Module, *given: Any) -> None:
        super().__init__(module, *given)
        own = [p.data for name, p in module.named_parameters() if name in self.cuts]
        assert self.across is not None
        broadcast_tensors(own, self.across)


@mutant("expert_keeps_all_experts", says="112,928 bytes held", killed_by=("memory",))
class KeepsAllExperts(ExpertParallel):
    """A rank computes with its own experts, which are views of all, so all stay in memory."""

    def cut(self, *given: Any) -> list[Exchange]:
        whole = {name: p.data.clone() for name, p in self.module.named_parameters()}
        exchanges = super().cut(*given)
        for name, (own, _) in self.cuts.items():
            self.module.get_parameter(name).data = whole[name][own]
        return exchanges
