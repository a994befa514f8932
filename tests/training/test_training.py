"""``Training`` computes what a plain loop in one process does, and says what does not fit."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from plain_loop import BATCH, LOSS, assert_equal, batches, loader, model, samples, trained

import shardproof
from shardproof import Training
from shardproof.training.source import Source
from shardproof.training.world import is_launched

STEPS = 6
STRATEGIES = ("ddp", "zero1", "zero2", "zero3", "fsdp", "naive_ddp")


def training() -> Training:
    return Training(model(), LOSS, loader()).backend("in_memory")


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_it_equals_a_plain_loop(strategy: str, ranks: int) -> None:
    expected, losses = trained(STEPS, lr=1e-2, clip=0.5)
    built = training().optimizer("adamw", lr=1e-2, clip=0.5).strategy(strategy)
    result = built.run(STEPS, ranks=ranks)
    assert_equal(dict(result.state), expected)
    assert_equal(dict(result.model.state_dict()), expected)
    assert result.losses == pytest.approx(losses, rel=1e-9)
    assert len(result.norms) == STEPS and result.world == ranks


@pytest.mark.parametrize("strategy", STRATEGIES[:5])
def test_processes_equal_a_plain_loop(strategy: str) -> None:
    expected, losses = trained(STEPS, torch.optim.SGD, lr=0.1, momentum=0.9)
    built = training().optimizer("sgd", lr=0.1, momentum=0.9).strategy(strategy).backend("gloo")
    result = built.run(STEPS, ranks=2)
    assert_equal(dict(result.state), expected)
    assert result.losses == pytest.approx(losses, rel=1e-9)


@pytest.mark.parametrize("accumulate", [2, 3])
def test_micro_batches_change_nothing(accumulate: int) -> None:
    expected, _ = trained(STEPS, lr=1e-2)
    built = training().optimizer("adamw", lr=1e-2).strategy("zero2", accumulate=accumulate)
    assert_equal(dict(built.run(STEPS, ranks=2).state), expected)


@pytest.mark.parametrize(
    ("kind", "arguments"),
    [
        (torch.optim.Adagrad, {"lr": 0.1}),
        (torch.optim.RMSprop, {"lr": 1e-2, "momentum": 0.9}),
        (torch.optim.Adamax, {"lr": 1e-2, "weight_decay": 0.1}),
        (torch.optim.NAdam, {"lr": 1e-2}),
        (torch.optim.AdamW, {"lr": 1e-2, "amsgrad": True}),
        (torch.optim.Rprop, {"lr": 1e-2}),
        (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True}),
    ],
)
@pytest.mark.parametrize("strategy", ["zero1", "zero2", "zero3"])
def test_any_element_wise_optimizer_runs_on_shards(
    strategy: str, kind: type[torch.optim.Optimizer], arguments: dict[str, float]
) -> None:
    expected, _ = trained(STEPS, kind, **arguments)
    built = training().optimizer(kind, **arguments).strategy(strategy)
    assert_equal(dict(built.run(STEPS, ranks=3, memory=False).state), expected)


class Centred(torch.optim.SGD):
    """Takes the mean out of every gradient: it looks at more than one element."""

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.grad -= parameter.grad.mean()
        super().step()


def test_an_optimizer_that_is_not_element_wise_is_refused_on_shards_only() -> None:
    built = training().optimizer(Centred, lr=0.1)
    with pytest.raises(ValueError, match=r"Centred cannot be used.*does not shard optimizer state"):
        built.strategy("zero1").run(STEPS, ranks=2)
    expected, _ = trained(STEPS, Centred, lr=0.1)
    assert_equal(dict(built.strategy("ddp").run(STEPS, ranks=2).state), expected)


@pytest.mark.parametrize("form", ["full", "sharded", "asynchronous"])
def test_it_resumes(tmp_path: Path, form: str) -> None:
    expected, losses = trained(STEPS, lr=1e-2)

    def built(strategy: str) -> Training:
        one = training().optimizer("adamw", lr=1e-2).strategy(strategy)
        return one.checkpoint(tmp_path / "runs", every=2, format=form)

    first = built("zero3").run(4, ranks=2)
    assert first.first == 0 and first.checkpoint == tmp_path / "runs"
    again = built("zero1").run(STEPS, ranks=3)
    assert again.first == 4 and again.losses == pytest.approx(losses[4:], rel=1e-9)
    assert_equal(dict(again.state), expected)
    done = built("zero1").run(STEPS, ranks=2)
    assert done.losses == [] and done.first == STEPS
    assert_equal(dict(done.state), expected)


def test_the_memory_of_every_rank_is_told_by_class() -> None:
    result = training().optimizer("adamw", lr=1e-2).strategy("zero1").run(STEPS, ranks=2)
    parameters = sum(p.numel() * p.element_size() for p in model().parameters())
    for stats in result.memory_stats():
        assert stats["current"]["parameters"] >= parameters
        assert parameters <= stats["current"]["optimizer_state"] <= parameters * 1.2
        assert stats["peak"]["activations"] > 0
        assert stats["peak"]["all"] >= stats["current"]["parameters"]
    assert result.throughput is not None and result.throughput > 0


def test_progress_is_told(capfd: pytest.CaptureFixture[str]) -> None:
    result = training().strategy("ddp").backend("gloo").run(4, ranks=2, progress=2)
    told = capfd.readouterr().err
    assert f"step 2/4  loss {result.losses[1]:.6g}" in told and "step 4/4" in told


def test_all_forms_of_data_are_the_same_batches() -> None:
    whole = batches(7)

    def gathered(data: object, first: int = 0, **how: int) -> list[torch.Tensor]:
        rows: list[list[torch.Tensor]] = [[] for _ in whole[first:]]
        for index in range(3):
            source = Source(data, **how)
            steps = source.batches(first, (index, 3), 2, "cpu", torch.float64)
            for of_step, batch in zip(rows, steps, strict=False):
                of_step += [micro.inputs for micro in batch.micro_batches]
        return [torch.cat(of_step) for of_step in rows]

    epoch = whole[:5]
    forms: list[tuple[object, dict[str, int]]] = [
        (loader(), {}),
        (samples(), {"batch": BATCH}),
        (epoch, {}),
        (whole.__getitem__, {}),
        (torch.utils.data.DataLoader(samples(), batch_size=BATCH, num_workers=1), {}),
    ]
    for data, how in forms:
        for first in (0, 6):
            for got, (inputs, _) in zip(gathered(data, first, **how), whole[first:], strict=True):
                assert torch.equal(got, inputs), data


def test_a_shuffled_loader_has_an_order_of_its_own_in_every_epoch() -> None:
    data = torch.utils.data.DataLoader(samples(), batch_size=40, shuffle=True)
    steps = Source(data, seed=3).batches(0, (0, 1), 1, "cpu", torch.float64)
    first, second = (next(steps).micro_batches[0].inputs for _ in range(2))
    assert not torch.equal(first, second)
    assert torch.equal(first.sort(0).values, second.sort(0).values)


def wrong(match: str, **how: object) -> None:
    """What ``strategy(...)`` or ``run`` raises."""
    name, ranks = str(how.pop("name", "ddp")), how.pop("ranks", 4)
    with pytest.raises(ValueError, match=match):
        training().strategy(name, **how).run(1, ranks=ranks)  # type: ignore[arg-type]


def test_errors_teach() -> None:
    wrong("unknown strategy 'zero4'; did you mean zero", name="zero4")
    wrong("mesh replicate=3 has 3 ranks, but this job has 4.*start 3 ranks", mesh={"replicate": 3})
    wrong("multiply one axis by 2", mesh={"replicate": 2})
    wrong("has no axis 'tensor' .*: write e.g. mesh=", mesh={"tensor": 4})
    wrong("unknown axis 'shards'; did you mean shard", mesh={"shards": 4})
    wrong("unknown option 'bucket_byte'; did you mean 'bucket_bytes'", bucket_byte=1)
    wrong("unknown precision 'bf61'; did you mean bf16", precision="bf61", name="zero1")
    wrong("runs on at most 1 ranks", name="plain", ranks=2)
    wrong("trains no model", name="sampler")
    with pytest.raises(ValueError, match=r"no parameter that requires a gradient"):
        Training(torch.nn.Identity(), LOSS, loader())
    with pytest.raises(ValueError, match=r"is not an instance of nn\.Module"):
        Training(torch.nn.Linear, LOSS, loader())  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="a Dataset needs batch="):
        Training(model(), LOSS, samples())
    with pytest.raises(ValueError, match=r"unknown optimizer 'adamv': give .*did you mean adam"):
        training().optimizer("adamv")
    with pytest.raises(ValueError, match="takes no argument 'beta'; did you mean betas"):
        training().optimizer("adamw", beta=1)
    with pytest.raises(ValueError, match="is an object, expected a name or a class"):
        training().optimizer(torch.optim.AdamW(model().parameters()))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="unknown backend 'glo'; did you mean gloo"):
        training().backend("glo")
    with pytest.raises(ValueError, match="cannot save checkpoints: leave"):
        training().strategy("ecosystem/accelerate_ddp").checkpoint("x").run(1, ranks=1)
    with pytest.raises(ValueError, match="format 'shard'; did you mean sharded"):
        training().checkpoint("x", format="shard").run(1, ranks=1)


def test_what_a_rank_raises_is_raised_here() -> None:
    def dictionaries(step: int) -> object:
        return {"inputs": 1}

    for backend in ("in_memory", "gloo"):
        with pytest.raises(ValueError, match="a batch is dict, but Training needs"):
            Training(model(), LOSS, dictionaries).backend(backend).run(1, ranks=2)

    def broken(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("no loss today")

    for backend in ("in_memory", "gloo"):
        with pytest.raises(RuntimeError, match="no loss today"):
            Training(model(), broken, loader()).backend(backend).run(1, ranks=2)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zb_h1"])
def test_a_chain_is_cut_into_stages(schedule: str) -> None:
    expected, losses = trained(STEPS, lr=1e-2, clip=0.5)
    built = training().optimizer("adamw", lr=1e-2, clip=0.5)
    built.strategy("pipeline", {"pipe": 2}, accumulate=4, schedule=schedule)
    result = built.run(STEPS)
    assert_equal(dict(result.state), expected)
    assert result.losses == pytest.approx(losses, rel=1e-9)


def test_layers_with_roles_are_split() -> None:
    expected, losses = trained(STEPS, lr=1e-2, clip=0.5)
    roles: dict[str, Any] = {"0": "column", "2": "row"}
    built = Training(model(), LOSS, loader(), roles=roles).backend("in_memory")
    built.optimizer("adamw", lr=1e-2, clip=0.5).strategy("tensor", {"tensor": 2})
    result = built.run(STEPS)
    assert_equal(dict(result.state), expected)
    assert result.losses == pytest.approx(losses, rel=1e-9)
    with pytest.raises(ValueError, match="no later layer has the role 'row'"):
        Training(model(), LOSS, loader(), roles={"0": "column"}).backend("in_memory").strategy(
            "tensor", {"tensor": 2}
        ).run(1)


def test_a_mesh_of_three_axes() -> None:
    expected, _ = trained(STEPS, lr=1e-2)
    roles: dict[str, Any] = {"0": "column", "2": "row"}
    built = Training(model(), LOSS, loader(), roles=roles).backend("in_memory")
    built.optimizer("adamw", lr=1e-2)
    built.strategy("hybrid", {"replicate": 1, "shard": 2, "tensor": 2}, data="zero1")
    assert_equal(dict(built.run(STEPS).state), expected)


@pytest.mark.parametrize("name", ["pytorch/ddp", "pytorch/fsdp2", "pytorch/fsdp1"])
def test_upstream_systems_train_through_the_same_door(name: str) -> None:
    expected, losses = trained(STEPS, lr=1e-2, clip=0.5)
    built = training().optimizer("adamw", lr=1e-2, clip=0.5).strategy(name).backend("gloo")
    result = built.run(STEPS, ranks=2)
    assert_equal(dict(result.state), expected)
    assert result.losses == pytest.approx(losses, rel=1e-9)


@pytest.mark.parametrize(("ranks", "servers"), [(2, 1), (3, 1), (5, 2)])
def test_the_data_is_cut_over_workers_only(ranks: int, servers: int) -> None:
    expected, losses = trained(STEPS, torch.optim.SGD, lr=0.1, momentum=0.9)
    built = training().optimizer("sgd", lr=0.1, momentum=0.9)
    built.strategy("async_sgd", {"replicate": ranks}, max_staleness=0, servers=servers)
    result = built.run(STEPS)
    assert_equal(dict(result.state), expected)
    assert result.losses == pytest.approx(losses, rel=1e-9)
    stale = training().optimizer("sgd", lr=0.1).strategy("async_sgd").run(STEPS, ranks=ranks)
    # The last worker reads what the others have updated; one worker alone is not stale yet.
    assert stale.losses[0] == pytest.approx(losses[0], rel=1e-9 if ranks == 2 else 0.1)


@pytest.mark.parametrize("mesh", [{"pipe": 2}, {"pipe": 1, "shard": 2}])
def test_a_plain_chain_trains_under_the_stages_of_torch(mesh: dict[str, int]) -> None:
    expected, losses = trained(STEPS, lr=1e-2, clip=0.5)
    built = training().optimizer("adamw", lr=1e-2, clip=0.5).backend("gloo")
    result = built.strategy("pytorch/hybrid", mesh, accumulate=2).run(STEPS)
    assert_equal(dict(result.state), expected)
    assert result.losses == pytest.approx(losses, rel=1e-9)


def test_lower_precision_recomputation_and_offload_are_words() -> None:
    _, losses = trained(STEPS, lr=1e-2)
    built = training().optimizer("adamw", lr=1e-2)
    built.strategy("fsdp", recompute=1, offload="parameters")
    assert built.run(STEPS, ranks=2).losses == pytest.approx(losses, rel=1e-9)
    built = training().optimizer("adamw", lr=1e-2).strategy("zero1", precision="bf16")
    assert built.run(STEPS, ranks=2).losses == pytest.approx(losses, rel=0.1)


@pytest.mark.parametrize("backend", ["in_memory", "gloo"])
def test_a_model_on_meta_is_trained_and_has_values_afterwards(backend: str) -> None:
    built = Training(model().to("meta"), LOSS, loader()).optimizer("adamw", lr=1e-2)
    with pytest.raises(ValueError, match="needs parameter values"):
        built.strategy("ddp").backend(backend).run(1, ranks=2)
    result = built.strategy("zero3").run(20, ranks=2)
    assert not any(p.is_meta for p in result.model.parameters())
    assert result.losses[-1] < result.losses[0]
    inputs, targets = batches(1)[0]
    assert LOSS(result.model(inputs), targets) < result.losses[0]


def test_a_rank_that_is_killed_ends_the_others() -> None:
    def deadly(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        if torch.distributed.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return LOSS(outputs, targets)

    began = time.monotonic()
    with pytest.raises(RuntimeError, match=r"rank 1 was killed: SIGKILL"):
        Training(model(), deadly, loader()).backend("gloo").run(3, ranks=3)
    assert time.monotonic() - began < 60


def test_the_launchers_variables_are_known() -> None:
    assert is_launched({"RANK": "0", "WORLD_SIZE": "1"})
    assert is_launched({"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "2"})
    assert is_launched({"SLURM_STEP_ID": "0", "SLURM_PROCID": "0", "SLURM_NTASKS": "2"})
    assert not is_launched({"SLURM_STEP_ID": "0", "SLURM_PROCID": "0", "SLURM_NTASKS": "1"})
    assert not is_launched({"SLURM_PROCID": "0", "SLURM_NTASKS": "2"})
    assert not is_launched({})


def test_what_the_package_exports_is_there() -> None:
    for name in shardproof.__all__:
        assert getattr(shardproof, name)
