"""``wrap`` gives a loop of one's own what a plain loop in one process has."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from plain_loop import LOSS, assert_equal, batches, model, trained
from torch import nn

import shardproof
from shardproof.backends import BACKENDS
from shardproof.comm import OutsideSubgroup
from shardproof.training import places
from shardproof.training.world import World

STEPS = 5
LR = {"lr": 1e-2}


def on(ranks: int, program: Callable[[World], Any], backend: str = "in_memory") -> list[Any]:
    return places.run(BACKENDS[backend], ranks, program, timeout=60.0)


def share(step: int, world: World, cuts: int = 1, cut: int = 0) -> tuple[torch.Tensor, ...]:
    return tuple(
        part.chunk(world.size)[world.rank].chunk(cuts)[cut] for part in batches(STEPS + 1)[step]
    )


def own_loop(
    world: World, strategy: str, accumulate: int = 1, **how: Any
) -> dict[str, torch.Tensor]:
    wrapped = shardproof.wrap(model(), strategy, accumulate=accumulate, **LR, **how)
    for step in range(STEPS):
        for cut in range(accumulate):
            inputs, targets = share(step, world, accumulate, cut)
            loss = LOSS(wrapped(inputs), targets) / accumulate
            loss.backward()
        wrapped.step()
        wrapped.zero_grad()
    return wrapped.state_dict()


@pytest.mark.parametrize("strategy", ["ddp", "naive_ddp", "zero1", "zero2", "zero3", "fsdp"])
@pytest.mark.parametrize(("ranks", "accumulate", "clip"), [(1, 1, None), (2, 2, 0.5), (4, 1, 0.5)])
def test_it_equals_a_plain_loop(
    strategy: str, ranks: int, accumulate: int, clip: float | None
) -> None:
    expected, _ = trained(STEPS, clip=clip, **LR)
    for state in on(ranks, lambda world: own_loop(world, strategy, accumulate, clip=clip)):
        assert_equal(state, expected)


@pytest.mark.parametrize("strategy", ["ddp", "zero2", "fsdp"])
def test_it_equals_a_plain_loop_on_processes(strategy: str) -> None:
    expected, _ = trained(STEPS, torch.optim.Adagrad, lr=0.1)

    def program(world: World) -> dict[str, torch.Tensor]:
        wrapped = shardproof.wrap(model(), strategy, optimizer="adagrad", lr=0.1)
        for step in range(STEPS):
            inputs, targets = share(step, world)
            LOSS(wrapped(inputs), targets).backward()
            wrapped.step()
        return wrapped.state_dict()

    for state in on(2, program, "gloo"):
        assert_equal(state, expected)


def test_hybrid_sharding_takes_a_mesh_of_two_axes() -> None:
    expected, _ = trained(STEPS, **LR)
    how = {"mesh": {"replicate": 2, "shard": 2}, "sharding_strategy": "HYBRID_SHARD"}
    for state in on(4, lambda world: own_loop(world, "fsdp", **how)):
        assert_equal(state, expected)


@pytest.mark.parametrize("strategy", ["zero3", "fsdp"])
def test_a_model_on_meta_gets_its_values_unit_by_unit(strategy: str) -> None:
    def program(world: World) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
        wrapped = shardproof.wrap(copy.deepcopy(model()).to("meta"), strategy, **LR)
        first = wrapped.state_dict()
        for step in range(STEPS):
            inputs, targets = share(step, world)
            LOSS(wrapped(inputs), targets).backward()
            wrapped.step()
        return first, wrapped.state_dict()

    results = on(4, program)
    plain = model()
    assert plain.state_dict().keys() == results[0][0].keys()
    plain.load_state_dict(results[0][0])
    optimizer = torch.optim.AdamW(plain.parameters(), **LR)
    for inputs, targets in batches(STEPS):
        optimizer.zero_grad()
        LOSS(plain(inputs), targets).backward()
        optimizer.step()
    for _, state in results:
        assert_equal(state, dict(plain.state_dict()))


def test_what_a_model_on_meta_needs() -> None:
    class Table(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rows = nn.Parameter(torch.empty(3, device="meta"))

    for strategy, match in (
        ("zero3", r"'rows' is on the meta device.*reset_parameters"),
        ("ddp", "needs parameter values"),
    ):
        with pytest.raises(ValueError, match=match):
            on(2, lambda world, s=strategy: shardproof.wrap(Table(), s))


def test_layers_and_state_are_split_together() -> None:
    expected, _ = trained(STEPS, clip=0.5, **LR)
    how: dict[str, Any] = {"roles": {"0": "column", "2": "row"}, "data": "zero1", "clip": 0.5}

    def program(world: World) -> dict[str, torch.Tensor]:
        mesh = world.new_mesh({"replicate": 1, "shard": 2, "tensor": 2})
        wrapped = shardproof.wrap(model(), "hybrid", mesh, **LR, **how)
        for step in range(STEPS):
            own = mesh.coordinate["shard"]
            inputs, targets = (part.chunk(2)[own] for part in batches(STEPS)[step])
            LOSS(wrapped(inputs), targets).backward()
            wrapped.step()
        return wrapped.state_dict()

    for state in on(4, program):
        assert_equal(state, expected)


@pytest.mark.parametrize("strategy", ["ddp", "zero1", "zero2", "zero3"])
def test_an_evaluation_and_gradients_that_are_dropped_change_nothing(strategy: str) -> None:
    expected, _ = trained(STEPS, **LR)

    def program(world: World) -> dict[str, torch.Tensor]:
        wrapped = shardproof.wrap(model(), strategy, **LR)
        for step in range(STEPS):
            inputs, targets = share(step, world)
            with torch.no_grad():
                wrapped.eval()(inputs)
            wrapped.train()
            LOSS(wrapped(-inputs), targets).backward()
            wrapped.zero_grad()
            LOSS(wrapped(inputs), targets).backward()
            wrapped.step()
        return wrapped.state_dict()

    for state in on(2, program):
        assert_equal(state, expected)


def test_gradients_are_means_once_they_are_synced() -> None:
    def program(world: World) -> tuple[torch.Tensor, torch.Tensor]:
        own = model()
        wrapped = shardproof.wrap(own, "ddp")
        inputs, targets = share(0, world)
        LOSS(wrapped(inputs), targets).backward()
        wrapped.sync_gradients()
        gradient = own[0].weight.grad
        assert gradient is not None
        return gradient.clone(), wrapped.clip(1e-3)

    plain = model()
    inputs, targets = batches(1)[0]
    LOSS(plain(inputs), targets).backward()
    norm = nn.utils.clip_grad_norm_(list(plain.parameters()), 1e9)
    assert plain[0].weight.grad is not None
    for gradient, got in on(2, program):
        torch.testing.assert_close(gradient, plain[0].weight.grad)
        torch.testing.assert_close(got, norm, check_dtype=False)


@pytest.mark.parametrize("strategy", ["ddp", "zero1", "zero2"])
def test_parameters_are_synced_from_the_first_rank(strategy: str) -> None:
    def program(world: World) -> torch.Tensor:
        own = model()
        wrapped = shardproof.wrap(own, strategy)
        with torch.no_grad():
            own[0].weight += world.rank
        wrapped.sync_parameters()
        inputs, targets = share(0, world)
        LOSS(wrapped(inputs), targets).backward()
        wrapped.step()
        return own[0].weight.detach().clone()

    first, *others = on(3, program)
    for other in others:
        assert torch.equal(first, other)
    assert (first - model()[0].weight).abs().max() < 0.1


def test_a_checkpoint_of_one_strategy_is_loaded_by_another(tmp_path: Path) -> None:
    expected, _ = trained(STEPS, **LR)

    def program(strategy: str, first: int, last: int) -> Callable[[World], Any]:
        def run(world: World) -> dict[str, torch.Tensor]:
            wrapped = shardproof.wrap(model(), strategy, **LR)
            if first:
                assert wrapped.load(tmp_path)["step"] == first
            for step in range(first, last):
                inputs, targets = share(step, world)
                LOSS(wrapped(inputs), targets).backward()
                wrapped.step()
            wrapped.save(tmp_path, step=last)
            return wrapped.state_dict()

        return run

    on(2, program("zero3", 0, 3))
    for state in on(4, program("ddp", 3, STEPS)):
        assert_equal(state, expected)


def test_the_memory_of_this_rank_is_told() -> None:
    def program(world: World) -> dict[str, int]:
        wrapped = shardproof.wrap(model(), "zero1", **LR)
        inputs, targets = share(0, world)
        LOSS(wrapped(inputs), targets).backward()
        wrapped.step()
        return wrapped.memory_stats()["current"]

    parameters = sum(p.numel() * p.element_size() for p in model().parameters())
    for current in on(2, program):
        assert parameters <= current["parameters"] <= parameters + 64
        assert parameters <= current["optimizer_state"] <= parameters * 1.2


def test_a_world_has_groups() -> None:
    def program(world: World) -> list[float]:
        assert shardproof.join() is world and world.device == "cpu"
        assert world.contains(2) and not world.contains(3)
        pair = world.new_group([2, 0])
        value = torch.tensor([float(world.rank + 1)])
        if pair.contains(world.rank):
            pair.all_reduce(value)
        else:
            with pytest.raises(OutsideSubgroup, match=r"check subgroup\.contains"):
                pair.all_reduce(value)
        world.barrier()
        return value.tolist()

    for backend in ("in_memory", "gloo"):
        assert on(3, program, backend) == [[4.0], [2.0], [4.0]]


def test_the_mlp_of_the_tutorials_is_split_by_its_layers() -> None:
    """Column, GELU, Row: values and gradients are those of two whole layers."""

    layers = nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.Linear(8, 5)).double()

    def program(world: World) -> list[torch.Tensor]:
        column = shardproof.ColumnParallelLinear.of(layers[0], group=world.comm)
        row = shardproof.RowParallelLinear.of(layers[2], group=world.comm)
        reference = copy.deepcopy(layers)
        own = slice(column.start, column.start + column.own)
        inputs = batches(1)[0][0].clone().requires_grad_()
        outputs = row(nn.functional.gelu(column(inputs)))
        outputs.square().sum().backward()
        twice = inputs.detach().clone().requires_grad_()
        expected = reference(twice)
        expected.square().sum().backward()
        for got, wanted in (
            (outputs, expected),
            (inputs.grad, twice.grad),
            (column.weight.grad, reference[0].weight.grad[own]),
            (row.weight.grad, reference[2].weight.grad[:, own]),
            (row.bias.grad, reference[2].bias.grad),
        ):
            torch.testing.assert_close(got, wanted)
        column.gather_output, row.input_is_split = True, False
        torch.testing.assert_close(row(nn.functional.gelu(column(inputs))), expected)
        return [column.weight.detach()]

    for ranks in (1, 2, 4):
        on(ranks, program)
    with pytest.raises(
        ValueError, match=r"ColumnParallelLinear.*8 output features.*valid: 1, 2, 4, 8"
    ):
        on(3, program)


def test_a_table_and_heads_are_split() -> None:
    table = nn.Embedding(7, 8).double()
    linear = {name: nn.Linear(8, 8).double() for name in ("query", "key", "value", "out")}
    tokens = torch.tensor([[0, 3, 6, 2], [5, 1, 4, 6]])

    def whole(inputs: torch.Tensor) -> torch.Tensor:
        parts = [linear[name](inputs).unflatten(-1, (4, 2)) for name in ("query", "key", "value")]
        heads = [part.transpose(1, 2) for part in parts]
        attended = nn.functional.scaled_dot_product_attention(*heads, is_causal=True)
        result: torch.Tensor = linear["out"](attended.transpose(1, 2).flatten(2))
        return result

    expected = whole(table(tokens))
    expected.square().sum().backward()
    assert table.weight.grad is not None and linear["key"].weight.grad is not None
    rows, keys = table.weight.grad, linear["key"].weight.grad

    def program(world: World) -> None:
        embedding = shardproof.VocabularyParallelEmbedding.of(table, world.comm)
        kind = {"group": world.comm, "causal": True, "dtype": torch.float64}
        attention = shardproof.ParallelSelfAttention(8, 4, **kind)
        for name, layer in linear.items():
            getattr(attention, name).take(layer)
        result = attention(embedding(tokens))
        torch.testing.assert_close(result, expected)
        result.square().sum().backward()
        own = slice(embedding.start, embedding.start + embedding.own)
        torch.testing.assert_close(embedding.weight.grad, rows[own])
        own = slice(attention.key.start, attention.key.start + attention.key.own)
        torch.testing.assert_close(attention.key.weight.grad, keys[own])

    for ranks in (1, 2, 4):
        on(ranks, program)
    with pytest.raises(ValueError, match=r"ParallelSelfAttention.*4 heads.*valid: 1, 2, 4"):
        on(3, lambda world: shardproof.ParallelSelfAttention(12, 4, group=world.comm))


def test_split_layers_train_under_data_parallelism() -> None:
    layers = nn.Linear(6, 8).double(), nn.Linear(8, 3).double()

    class Split(nn.Module):
        def __init__(self, group: Any) -> None:
            super().__init__()
            self.up = shardproof.ColumnParallelLinear.of(layers[0], group=group)
            self.down = shardproof.RowParallelLinear.of(layers[1], group=group)

        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            outputs: torch.Tensor = self.down(nn.functional.gelu(self.up(inputs)))
            return outputs

    def program(world: World) -> list[float]:
        tensor = min(2, world.size)
        mesh = world.new_mesh({"replicate": world.size // tensor, "tensor": tensor})
        wrapped = shardproof.wrap(Split(mesh.comm("tensor")), "ddp", mesh, **LR)
        losses = []
        for step in range(STEPS):
            inputs, targets = (
                part.chunk(mesh.size("replicate"))[mesh.coordinate["replicate"]]
                for part in batches(STEPS)[step]
            )
            loss = LOSS(wrapped(inputs), targets)
            loss.backward()
            wrapped.step()
            total = loss.detach().clone()
            mesh.comm("replicate").all_reduce(total)
            losses.append(float(total) / mesh.size("replicate"))
        return losses

    [alone] = on(1, program)
    for losses in (*on(2, program), *on(4, program)):
        assert losses == pytest.approx(alone, rel=1e-9)


def test_errors_teach() -> None:
    def raised(
        match: str, program: Callable[[World], Any], kind: type[Exception] = ValueError
    ) -> None:
        with pytest.raises(kind, match=match):
            on(2, program)

    def wrapped(*given: Any, **named: Any) -> Callable[[World], Any]:
        return lambda world: shardproof.wrap(model(), *given, **named)

    raised("a pipeline's schedule decides.*Training", wrapped("pipeline"))
    raised("unknown strategy 'fsd'; did you mean fsdp", wrapped("fsd"))
    raised("runs whole steps.*shardproof.Training", wrapped("pytorch/ddp"))
    raised("mesh shard=3 has 3 ranks, but this job has 2", wrapped("zero1", {"shard": 3}))
    raised("unknown option 'buckets'", wrapped("zero1", buckets=1))

    def two_forwards(world: World) -> None:
        one = shardproof.wrap(model(), "zero1")
        one(share(0, world)[0])
        one(share(0, world)[0])

    raised("call step.* or pass accumulate=2 to wrap", two_forwards, RuntimeError)

    def too_few(world: World) -> None:
        one = shardproof.wrap(model(), "zero2", accumulate=2)
        one(share(0, world)[0]).sum().backward()
        one.step()

    raised("after 1 forward and backward passes, but wrap expects 2", too_few, RuntimeError)
