"""Units that are sharded whole: rounds of one unit, gradients that come too late; and what is left
of a strategy when it is closed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from local_ranks import succeed
from made_case import made_case
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from shardproof import registry, workloads
from shardproof.case import WorkloadSpec
from shardproof.cases.runner import run_cases
from shardproof.checks.results import CaseResult
from shardproof.comm import Comm, Mesh
from shardproof.contract import OptimizerSpec
from shardproof.impls.reference import fsdp, zero3
from shardproof.impls.reference.engine.engine import Engine
from shardproof.impls.reference.engine.handle import Context
from shardproof.impls.reference.parts.reducers import Bucket, Reducer, Work
from shardproof.impls.reference.units import step_shards

SHARDED = pytest.mark.parametrize("strategy", [zero3, fsdp])


def stack() -> nn.Sequential:
    """Two units of ones, whose gradients are known."""
    module = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False))
    for parameter in module.parameters():
        nn.init.ones_(parameter)
    return module


def one_round(
    strategy: Any, build: Callable[[], nn.Module], blocks: Sequence[str] = (), rounds: Any = (1, 1)
) -> dict[str, float]:
    """The sum of each gradient over two ranks with so many ``rounds`` of ones."""

    def body(rank: int, size: int) -> dict[str, float]:
        comms = {"shard": Mesh({"shard": size}).comm("shard")}
        handle = strategy.apply(build(), comms, strategy.Options(), Context(blocks=blocks))
        handle.before_step(rounds[rank])
        for number in range(rounds[rank]):
            handle.accumulate(is_last=number == rounds[rank] - 1)
            handle.module(torch.ones(1, 2)).sum().backward()
        handle.finish()
        return {name: float(target.grad.sum()) for name, target in handle.targets()}

    whole: dict[str, float] = {}
    for part in succeed(body, 2):
        for name, total in part.items():
            whole[name] = whole.get(name, 0.0) + total
    return whole


@SHARDED
@pytest.mark.parametrize("busy", [1, 3])
def test_a_rank_without_work_follows_rounds_of_the_root_alone(strategy: Any, busy: int) -> None:
    found = one_round(strategy, stack, rounds=(busy, 0))
    assert found == {"0.weight": 8.0 * busy, "1.weight": 8.0 * busy}


@pytest.mark.parametrize(
    ("name", "more"),
    [
        ("zero3", {}),
        ("zero3", {"recompute_every": 1}),
        ("fsdp", {"prefetch_forward": 2, "prefetch_backward": 2}),
    ],
)
def test_ranks_without_work_follow_rings_that_move_only_while_all_wait(
    name: str, more: dict[str, Any]
) -> None:
    """Ranks that computed waited for a ring where idle ones waited for their next word."""
    spec = WorkloadSpec("charnames_gpt", global_batch=12, micro_batches=3, params={"width": 16})
    work = workloads.make(spec)

    def parameters(**options: Any) -> list[dict[str, Tensor]]:
        def body(rank: int, size: int) -> dict[str, Tensor]:
            system = registry.load(f"reference/{name}")()
            assert isinstance(system, Engine)
            state = work.state() if rank == 0 else None
            chosen = {**more, **options}
            system.setup(
                work.build_for(rank), state, OptimizerSpec(), Mesh({"shard": size}), chosen
            )
            for step in range(2):
                batch = work.batch(step, size)[rank]
                assert len(batch.micro_batches) == (3 if rank < 2 else 2)
                system.step(batch, lambda _: None)
            return {p.name: p.tensor.clone() for p in system.local_state("parameters")}

        return succeed(body, 5)

    rings = parameters(reduce_scatter="ring", all_gather="ring")
    for own, usual in zip(rings, parameters(), strict=True):
        assert own.keys() == usual.keys()
        torch.testing.assert_close(own, usual)


class Noting(Reducer):
    """Sums like its base, and notes which parameters of which step it was given."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, str, int]] = []

    def all_reduce(self, bucket: Bucket, comm: Comm) -> Work:
        self.calls.append(("all_reduce", " ".join(bucket.names), bucket.step))
        return super().all_reduce(bucket, comm)

    def reduce_scatter(self, bucket: Bucket, comm: Comm, shard: Tensor) -> Work:
        assert bucket.flat.numel() == comm.size * shard.numel()
        self.calls.append(("reduce_scatter", " ".join(bucket.names), bucket.step))
        return super().reduce_scatter(bucket, comm, shard)


@pytest.mark.parametrize("strategy", [zero3, fsdp, step_shards])
def test_every_gradient_goes_through_the_reducer_over_shards_and_replicas(strategy: Any) -> None:
    """Two rounds of two units: a reduce-scatter a round; one sum over the replicas at the end."""
    has_replicas = strategy is not zero3
    axes = {"replicate": 2, "shard": 2} if has_replicas else {"shard": 2}
    hybrid_shard = fsdp.Options(sharding_strategy="HYBRID_SHARD")
    options: Any = hybrid_shard if strategy is fsdp else zero3.Options()

    def body(rank: int, size: int) -> list[tuple[str, str, int]]:
        mesh, reducer = Mesh(axes), Noting()
        comms = {axis: mesh.comm(axis) for axis in axes}
        context = Context(reducer, blocks=["0", "1"])
        handle = strategy.apply(stack(), comms, options, context)
        handle.begin_step(7)
        handle.before_step(2)
        for number in range(2):
            handle.accumulate(is_last=number == 1)
            handle.module(torch.ones(1, 2)).sum().backward()
        handle.finish()
        return reducer.calls

    for calls in succeed(body, 4 if has_replicas else 2):
        assert {step for *_, step in calls} == {7}
        scattered = [names for call, names, _ in calls if call == "reduce_scatter"]
        over_replicas = [names for call, names, _ in calls if call == "all_reduce"]
        if strategy is step_shards:  # one unit, reduced once a step
            assert scattered == ["0.weight 1.weight"] and len(over_replicas) == 1
        else:
            assert scattered == ["1.weight", "0.weight"] * 2
            assert over_replicas == (["1.weight", "0.weight"] if has_replicas else [])


class Reentrant(nn.Sequential):
    def forward(self, hidden: Tensor) -> Tensor:
        first, second = self
        return checkpoint(second, first(hidden), use_reentrant=True)


@SHARDED
def test_gradients_of_a_unit_that_has_no_backward_are_an_error(strategy: Any) -> None:
    def apply(module: nn.Module) -> Any:
        comms = {"shard": Mesh({"shard": 1}).comm("shard")}
        handle = strategy.apply(module, comms, strategy.Options(), Context(blocks=["0", "1"]))
        handle.before_step(1)
        handle.accumulate(is_last=True)
        return handle

    def body(rank: int, size: int) -> None:
        reentrant = apply(Reentrant(*stack()))
        with pytest.raises(RuntimeError, match=r"'1\.weight' .* use_reentrant=False"):
            reentrant.module(torch.ones(1, 2)).sum().backward()
        twice = apply(stack())
        loss = twice.module(torch.ones(1, 2)).sum()
        loss.backward(retain_graph=True)
        with pytest.raises(RuntimeError, match="one forward and one backward"):
            loss.backward()

    succeed(body, 1)


@dataclass
class Pair:
    hidden: Tensor
    total: Tensor


class InDataclasses(nn.Module):
    """A unit that takes and gives tensors in a dataclass, beside a tensor of inference."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(2, 2, bias=False)

    def forward(self, pair: Pair, shift: Tensor) -> Pair:
        hidden = self.inner(pair.hidden) + shift
        return Pair(hidden, pair.total + hidden)


class Stacked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.units = nn.ModuleList(InDataclasses() for _ in range(2))
        for parameter in self.parameters():
            nn.init.ones_(parameter)

    def forward(self, hidden: Tensor) -> Tensor:
        with torch.inference_mode():
            shift = torch.zeros(2)
        pair = Pair(hidden, hidden)
        for unit in self.units:
            pair = unit(pair, shift)
        return pair.total


class Into(nn.Module):
    """Adds what it computes to a tensor, or to a list, that it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(2, 2, bias=False)

    def forward(self, hidden: Tensor, total: Any) -> Any:
        if isinstance(total, list):
            total.append(self.inner(hidden))
            return total
        return total.add_(self.inner(hidden))


class Summing(nn.Module):
    def __init__(self, listed: bool, known: bool) -> None:
        super().__init__()
        self.first, self.into = nn.Linear(2, 2, bias=False), Into()
        self.listed, self.known = listed, known
        for parameter in self.parameters():
            nn.init.ones_(parameter)

    def forward(self, hidden: Tensor) -> Tensor:
        hidden = self.first(hidden)
        if self.listed:
            # A list with a tensor that needs a gradient is handed on as a copy, others are not.
            notes = [hidden] if self.known else []
            self.into(hidden, notes)
            return notes[-1]
        return self.into(hidden, torch.zeros_like(hidden))


@SHARDED
@pytest.mark.parametrize("known", [False, True])
def test_a_unit_that_adds_to_what_it_is_given(strategy: Any, known: bool) -> None:
    """Seen, or refused where it was handed a copy: the sum would be lost."""
    for listed in (False, True):
        if listed and known:
            with pytest.raises(RuntimeError, match="'into' changed a list, dictionary or data"):
                one_round(strategy, lambda: Summing(True, True), ["first", "into"])
        else:
            found = one_round(strategy, lambda: Summing(listed, False), ["first", "into"])  # noqa: B023
            assert found == {"first.weight": 16.0, "into.inner.weight": 16.0}


@SHARDED
def test_units_that_pass_dataclasses(strategy: Any) -> None:
    # Of both ranks: of what the second unit computes 2 an element, and of the first also by it.
    found = one_round(strategy, Stacked, ["units.0", "units.1"])
    assert found == {"units.0.inner.weight": 24.0, "units.1.inner.weight": 16.0}


HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")


def hung_up(module: nn.Module) -> list[str]:
    """Hooks and forwards that the module was not built with."""
    found = [
        f"{name or 'root'}.{what}"
        for name, part in module.named_modules()
        for what in (*HOOKS, "forward")
        if vars(part).get(what)
    ]
    for name, parameter in module.named_parameters():
        found += [name] * bool(parameter._post_accumulate_grad_hooks or parameter._backward_hooks)
    return found


@pytest.mark.parametrize("name", ["ddp", "zero1", "zero2", "zero3", "fsdp"])
def test_a_closed_strategy_leaves_the_module_without_hooks(name: str) -> None:
    work = workloads.make(WorkloadSpec("charnames_gpt", global_batch=4, micro_batches=2))
    axis = "replicate" if name == "ddp" else "shard"

    def body(rank: int, size: int) -> None:
        system = registry.load(f"reference/{name}")()
        assert isinstance(system, Engine)
        options = {"recompute_every": 2}
        mesh = Mesh({axis: size})
        system.setup(work.build_for(rank), work.state(), OptimizerSpec(), mesh, options)
        system.step(work.batch(0, size)[rank], lambda _: None)
        assert hung_up(system.module)
        system.close()
        assert hung_up(system.module) == []
        system.close()

    succeed(body, 1)


def test_a_unit_that_no_rank_has_used_yet_keeps_no_residuals() -> None:
    found: list[CaseResult] = []
    case = made_case(
        "reference/zero3",
        {"shard": 2},
        options={
            "compress": {"method": "topk", "density": 0.1},
            "wrap": {"minimum_parameters": 500},
        },
        workload=WorkloadSpec(
            "charnames_gpt",
            traits=("conditional_late_step",),
            params={"layers": 1, "width": 32, "heads": 2, "seq": 8},
        ),
        steps=3,
        checks=("equivalence", "memory"),
    )
    run_cases([case], 1, found.append)
    assert [(result.verdict, result.reason) for result in found] == [("pass", "")]


@pytest.mark.parametrize("name", ["reference/zero3", "reference/fsdp"])
def test_what_a_unit_owes_that_no_rank_calls_any_more_is_not_emulated(name: str) -> None:
    system, by_size = registry.load(name), {"wrap": {"minimum_parameters": 500}}

    def declined(**compress: Any) -> bool:
        declared = system.capabilities(by_size | ({"compress": compress} if compress else {}))
        return "conditional_early_step" in declared.declines

    assert declined(method="topk", density=0.1) and declined(method="onebit")
    assert not declined() and not declined(method="randomk", density=0.1)
    whole = system.capabilities({"compress": {"method": "powersgd", "rank": 1}})
    assert whole.declines.keys() == {"second_derivative"}
