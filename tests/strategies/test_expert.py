"""Expert parallelism: one exchange, rounds of ranks without data, refusals."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import pytest
import torch
from local_ranks import succeed
from torch import Tensor, nn

from shardproof import workloads
from shardproof.case import WorkloadSpec
from shardproof.comm import Mesh
from shardproof.contract import Now, OptimizerSpec, Refused
from shardproof.impls.reference.engine.recompute import recompute_units
from shardproof.impls.reference.expert import ExpertParallel, ReferenceExpert
from shardproof.impls.reference.expert.balancing import Balancing, step
from shardproof.impls.reference.expert.exchange import Exchange, reaches
from shardproof.workloads.mixture import Experts, two_layers

pytestmark = pytest.mark.usefixtures("one_thread")
PLACE = {"device": "cpu", "dtype": torch.float64}


def draw(*shape: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def experts(count: int = 6) -> Experts:
    made = Experts(count, 4, 8, two_layers, PLACE)
    for number, parameter in enumerate(made.parameters()):
        parameter.data.copy_(draw(*parameter.shape, seed=number))
    return made


def asked(rank: int) -> tuple[Tensor, Tensor]:
    """Rows of ``rank`` and the numbers of their experts; rank 1 has none."""
    count = (5, 0, 7)[rank]
    rows = draw(count, 4, seed=100 + rank).requires_grad_()
    numbers = torch.randint(6, (count,), generator=torch.Generator().manual_seed(rank))
    return rows, numbers


def test_an_exchange_gives_what_one_rank_computes() -> None:
    def body(rank: int, world: int) -> tuple[Tensor, Tensor, Tensor]:
        made, comm = experts(), Mesh({"expert": world}).comm("expert")
        exchange = Exchange("experts", made, 6, comm, repeats=False)
        for parameter in made.parameters():
            parameter.data = parameter.data[exchange.own].clone()
        rows, numbers = asked(rank)
        outputs = made(rows, numbers)
        (outputs * (1 + rank)).sum().backward()
        assert rows.grad is not None
        assert made.up.grad is not None
        return outputs.detach(), rows.grad, made.up.grad

    whole = experts()
    given = [asked(rank) for rank in range(3)]
    outputs = [whole(*one) for one in given]
    sum(((1 + rank) * out).sum() for rank, out in enumerate(outputs)).backward()  # type: ignore[union-attr]
    found = succeed(body, 3)
    for rank, (own, gradient, up) in enumerate(found):
        assert torch.allclose(own, outputs[rank].detach(), atol=1e-13)
        assert torch.allclose(gradient, given[rank][0].grad, atol=1e-13)  # type: ignore[arg-type]
        assert torch.allclose(up, whole.up.grad[2 * rank : 2 * rank + 2], atol=1e-13)  # type: ignore[index]


def test_a_repetition_that_chooses_otherwise_is_an_error() -> None:
    def body(rank: int, world: int) -> None:
        made, comm = experts(), Mesh({"expert": world}).comm("expert")
        exchange = Exchange("experts", made, 6, comm, repeats=True)
        rows = draw(2, 4, seed=1)
        exchange.plan(torch.tensor([0, 1]), again=False)
        assert exchange.plan(torch.tensor([0, 1]), again=False) is exchange.plans[1]
        assert exchange.plan(torch.tensor([0, 1]), again=True).sent == [2, 0]
        with pytest.raises(
            RuntimeError, match="the recomputation of 'experts' chose other experts"
        ):
            exchange.plan(torch.tensor([0, 2]), again=True)
        assert len(rows) == 2

    succeed(body, 2)


def test_biases_move_towards_the_mean_load() -> None:
    assert step(torch.tensor([4, 1, 3, 4]), 0.5).tolist() == [-0.5, 0.5, 0.0, -0.5]
    was = {"mlp.balancing_bias": torch.zeros(2), "mlp.load": torch.tensor([5, 1])}
    loads = [{"mlp.load": torch.tensor([1, 4])}, {"mlp.load": torch.tensor([5, 1])}]
    now = Now(0, was, {}, {}, {}, loads)
    made = Balancing.given(now, 0.5)
    assert made["mlp.balancing_bias"].tolist() == [-0.5, 0.5]
    assert made["mlp.load"].tolist() == [0, 0]


def system(mesh: Mesh, **options: Any) -> ReferenceExpert:
    params = {"layers": 1, "width": 16, "seq": 8, "experts": 6}
    own = workloads.make(WorkloadSpec("charnames_gpt", params=params, global_batch=4))
    made = ReferenceExpert()
    made.setup(own.build_for(mesh.rank), own.state(), OptimizerSpec(), mesh, options)
    return made


class Layer(nn.Module):
    """A mixture whose routing is fixed."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = experts(4)

    def forward(self, rows: Tensor) -> Tensor:
        """Row n takes expert n modulo 4."""
        outputs: Tensor = self.experts(rows, torch.arange(len(rows)) % 4)
        return rows + outputs


def test_an_idle_rank_repeats_the_mixtures_of_units_and_no_others() -> None:
    def trained(mesh: Mesh | None, rounds: int) -> dict[str, Tensor | None]:
        model = nn.Sequential(OrderedDict(front=Layer(), block=Layer(), last=Layer()))
        groups = recompute_units(model, ["block"], 1)
        roles = dict.fromkeys(("front.experts", "block.experts", "last.experts"), "expert")
        handle = ExpertParallel(model, mesh, roles, groups) if mesh else None  # type: ignore[arg-type]
        if handle:
            handle.before_step(rounds)
        for _ in range(rounds):
            loss = model(draw(6, 4, seed=3)).square().sum()
            if handle:
                handle.backward_begins(loss)
            loss.backward()
        if handle:
            handle.sit_out()
            assert all(not one.plans for one in handle.exchanges)
        return {name: p.grad for name, p in model.named_parameters()}

    whole = trained(None, 1)
    found = succeed(lambda rank, world: trained(Mesh({"expert": world}), 1 - rank), 2)
    for name, gradient in whole.items():
        parts = [own[name] for own in found]
        assert torch.allclose(torch.cat(parts), gradient, atol=1e-12), name  # type: ignore[arg-type]


@pytest.mark.parametrize("seen", [True, False])
def test_an_idle_rank_goes_backward_only_if_the_losses_of_others_come_to_experts(
    seen: bool,
) -> None:
    def body(rank: int, world: int) -> tuple[list[bool], list[str], int]:
        made = system(Mesh({"expert": world}), recompute_every=1)
        handle, given = made.handle, torch.full((2, 8), 65)
        given[:, 0] = 1
        # Rank 0 has 2 micro-batches, rank 1 has 1: in the second round rank 1 is idle.
        rounds = 2 - rank
        handle.before_step(rounds)
        for _ in range(rounds):
            outputs = made.module(given)
            loss = outputs.sum() if seen else (made.module.head.weight * outputs.sum().item()).sum()
            handle.backward_begins(loss)
            loss.backward()
        kept = len(handle.exchanges[0].plans)
        handle.sit_out()
        handle.finish()
        used = [name for name, p in made.module.named_parameters() if p.grad is not None]
        parts = [axes for _, axes in handle.norm_parts()]
        assert (kept == 0) is seen
        return [("expert",) in parts, reaches(loss)], used, len(handle.exchanges[0].plans)

    for sums, used, kept in succeed(body, 2):
        # The norm is summed over the axis whether or not there are gradients of experts.
        assert sums == [True, seen]
        assert ("blocks.0.mlp.experts.up" in used) is seen
        assert ("blocks.0.mlp.router.weight" in used) is seen
        assert kept == 0


def test_whole_tensors_are_gathered_from_all_ranks() -> None:
    def body(rank: int, world: int) -> dict[str, Tensor]:
        made = system(Mesh({"expert": world}))
        assert len(made.module.get_parameter("blocks.0.mlp.experts.up")) == 6 // world
        return made.full_state("parameters")

    params = {"layers": 1, "width": 16, "seq": 8, "experts": 6}
    own = workloads.make(WorkloadSpec("charnames_gpt", params=params, global_batch=4))
    state = own.state()
    for found in succeed(body, 2):
        assert all(torch.equal(tensor, state[name]) for name, tensor in found.items())


def test_what_cannot_be_is_refused_in_words() -> None:
    def body(rank: int, world: int) -> None:
        mesh = Mesh({"expert": world})
        with pytest.raises(Refused, match="no buffer 'balancing_bias'; set balance_rate to 0"):
            system(mesh, balance_rate=0.1)
        with pytest.raises(Refused, match="must be at least 0"):
            system(mesh, balance_rate=-1.0)
        with pytest.raises(Refused, match="save a checkpoint and load it on the new mesh"):
            system(mesh).reconfigure(mesh, (2,), ())

    succeed(body, 2)
