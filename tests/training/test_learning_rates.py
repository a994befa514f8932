"""Learning rates follow a function of the step, a scheduler of torch, or what the loop sets."""

from __future__ import annotations

import json
import math
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from plain_loop import LOSS, assert_equal, batches, loader, model
from torch import Tensor
from torch.optim import lr_scheduler

import shardproof
from shardproof import Training
from shardproof.backends import BACKENDS
from shardproof.contract import GroupSpec, OptimizerSpec
from shardproof.impls.reference.checkpoint.errors import CheckpointWarning
from shardproof.training import optimizers, places
from shardproof.training.world import World

STEPS = 6
LR = 3e-2
#: Three strategies that differ in what they update: whole tensors, parts, units.
SHARDED = ("ddp", "zero2", "fsdp")


def cosine(step: int) -> float:
    """Two steps of warm-up, then down to zero: no two rates are equal."""
    if step < 2:
        return LR * (step + 1) / 2
    return LR * (1 + math.cos(math.pi * (step - 1) / STEPS)) / 2


def late(step: int) -> float:
    """The same one step too late."""
    return cosine(max(0, step - 1))


def plain(
    rate: Callable[[int], float] | None = None,
    make: Callable[[torch.optim.Optimizer], Any] | None = None,
    kind: type[torch.optim.Optimizer] = torch.optim.AdamW,
) -> dict[str, Tensor]:
    """Trained by torch alone: rates by a function, or by a scheduler."""
    own = model()
    optimizer = kind(own.parameters(), lr=LR)  # type: ignore[call-arg]
    scheduler = make(optimizer) if make else None
    for step, (inputs, targets) in enumerate(batches(STEPS)):
        if rate is not None:
            optimizer.param_groups[0]["lr"] = rate(step)
        optimizer.zero_grad()
        LOSS(own(inputs), targets).backward()
        optimizer.step()
        if scheduler:
            scheduler.step()
    return dict(own.state_dict())


def on(ranks: int, program: Callable[[World], Any], backend: str = "in_memory") -> list[Any]:
    return places.run(BACKENDS[backend], ranks, program, timeout=60.0)


def training(
    rate: Any, strategy: str, backend: str = "in_memory", kind: Any = torch.optim.AdamW
) -> Training:
    built = Training(model(), LOSS, loader()).optimizer(kind, lr=rate).strategy(strategy)
    return built.backend(backend)


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.SGD, torch.optim.Adagrad])
@pytest.mark.parametrize("strategy", [*SHARDED, "zero1", "zero3", "naive_ddp"])
def test_the_rate_is_what_the_function_returns(
    strategy: str, kind: type[torch.optim.Optimizer]
) -> None:
    expected = plain(cosine, kind=kind)
    result = training(cosine, strategy, kind=kind).run(STEPS, ranks=2, memory=False)
    assert_equal(dict(result.state), expected)
    wrong = training(late, strategy, kind=kind).run(STEPS, ranks=2, memory=False)
    with pytest.raises(AssertionError):  # the comparison sees a schedule that is one step late
        assert_equal(dict(wrong.state), expected)


@pytest.mark.parametrize("name", ["pytorch/ddp", "pytorch/fsdp2"])
def test_upstream_systems_follow_the_function(name: str, tmp_path: Path) -> None:
    def built() -> Training:
        return training(cosine, name, "gloo").checkpoint(tmp_path, format="dcp")

    built().run(3, ranks=2)
    assert_equal(dict(built().run(STEPS, ranks=2).state), plain(cosine))


@pytest.mark.parametrize("backend", ["in_memory", "gloo"])
@pytest.mark.parametrize("strategy", SHARDED)
def test_a_resumed_training_continues_the_schedule_bit_for_bit(
    tmp_path: Path, strategy: str, backend: str
) -> None:
    whole = training(cosine, strategy, backend).run(STEPS, ranks=2)
    training(cosine, strategy, backend).checkpoint(tmp_path).run(3, ranks=2)
    with warnings.catch_warnings():
        warnings.simplefilter("error", CheckpointWarning)  # nothing differs, so nothing is told
        resumed = training(cosine, strategy, backend).checkpoint(tmp_path).run(STEPS, ranks=2)
    assert resumed.first == 3 and resumed.losses == whole.losses[3:]
    for name, value in whole.state.items():
        assert torch.equal(resumed.state[name], value), name


def test_a_checkpoint_has_the_rate_of_its_last_step(tmp_path: Path) -> None:
    training(cosine, "zero1").checkpoint(tmp_path).run(3, ranks=2)
    [manifest] = tmp_path.rglob("manifest.json")
    saved = json.loads(manifest.read_text())["optimizer"]
    assert saved["lr"] == cosine(2) and "schedule" not in saved
    with pytest.warns(CheckpointWarning, match=rf"lr was {cosine(2)} at the save and is 0.5 here"):
        training(0.5, "zero1").checkpoint(tmp_path).run(4, ranks=2)


@pytest.mark.parametrize(
    ("rate", "match"),
    [
        (lambda step: None, r"lr\(0\) = None: the function gets .* must return its learning rate"),
        (lambda step: -0.1, r"lr\(0\) = -0.1: .* finite number of at least 0"),
        (lambda step: float("nan"), r"lr\(0\) = nan: "),
        (lambda step: float("inf"), r"lr\(0\) = inf: "),
        (lambda step: True, r"lr\(0\) = True: "),
        (lambda: 0.1, r"lr failed for step 0: TypeError: .*give a number, or a function"),
        (lr_scheduler.StepLR, r"lr failed for step 0: TypeError: .*use wrap\(...\).optimizer"),
    ],
)
def test_functions_that_return_no_rate(rate: Any, match: str) -> None:
    with pytest.raises(ValueError, match=match):
        training(rate, "ddp")
    with pytest.raises(ValueError, match=match):
        on(2, lambda world: shardproof.wrap(model(), "ddp", lr=rate))


@pytest.mark.parametrize("backend", ["in_memory", "gloo"])
def test_a_function_that_returns_no_rate_later(backend: str) -> None:
    with pytest.raises(ValueError, match=r"lr\(2\) = -1.0: the function gets the number"):
        training(lambda step: 1.0 - step, "zero2", backend).run(STEPS, ranks=2)


def test_a_function_decides_alone() -> None:
    built = Training(model(), LOSS, loader())
    with pytest.raises(ValueError, match=r"warmup = 2 cannot be combined.*leave warmup out"):
        built.optimizer("adamw", lr=cosine, warmup=2)

    def program(world: World) -> None:
        for how in ({"lr": cosine}, {"lr": LR, "arguments": {"warmup": 2}}):
            wrapped = shardproof.wrap(model(), "ddp", **how)  # type: ignore[arg-type]
            with pytest.raises(ValueError, match=r"follows a schedule.*give a number as lr"):
                wrapped.set_lr(0.1)
            with pytest.raises(ValueError, match="follows a schedule"):
                lr_scheduler.StepLR(wrapped.optimizer, 1)

    on(1, program)


def test_a_rate_that_follows_the_members_is_a_factor() -> None:
    """``elastic`` multiplies ``lr`` where members join: a function has to follow as well."""
    spec = optimizers.spec("sgd", cosine)
    assert spec.lr_at(3) == cosine(3)
    assert replace(spec, lr=spec.lr * 1.5).lr_at(3) == 1.5 * cosine(3)


# ------------------------------------------------------------------------- in a loop of one's own

#: Makes something whose ``step()`` follows each step of the optimizer.
SCHEDULERS: dict[str, Callable[[torch.optim.Optimizer], Any]] = {
    "lambda": lambda o: lr_scheduler.LambdaLR(o, lambda step: 1 / (1 + step)),
    "cosine": lambda o: lr_scheduler.CosineAnnealingLR(o, STEPS),
    "step": lambda o: lr_scheduler.StepLR(o, 2, gamma=0.3),
    "one_cycle": lambda o: lr_scheduler.OneCycleLR(
        o, LR, total_steps=STEPS + 1, cycle_momentum=False
    ),
}


def looped(
    world: World,
    strategy: str,
    make: Callable[[torch.optim.Optimizer], Any] | None = None,
    rate: Callable[[int], float | None] | None = None,
    parts: tuple[int, ...] = (STEPS,),
    folder: Path = Path(),
    **how: Any,
) -> dict[str, Tensor]:
    """Train up to each of ``parts`` in turn, each time from what the one before has saved."""
    first = 0
    for last in parts:
        wrapped = shardproof.wrap(model(), strategy, **{"lr": LR, **how})
        scheduler = make(wrapped.optimizer) if make else None
        if first:
            extra = wrapped.load(folder)
            assert extra.keys() == ({"scheduler"} if scheduler else set())
            if scheduler:
                scheduler.load_state_dict(extra["scheduler"])
        for step in range(first, last):
            if rate is not None and (now := rate(step)) is not None:
                wrapped.set_lr(now)
            inputs, targets = (part.chunk(world.size)[world.rank] for part in batches(STEPS)[step])
            LOSS(wrapped(inputs), targets).backward()
            wrapped.step()
            if scheduler:
                scheduler.step()
        first = last
        if len(parts) > 1:
            wrapped.save(folder, **({"scheduler": scheduler.state_dict()} if scheduler else {}))
    return wrapped.state_dict()


@pytest.mark.parametrize("strategy", [*SHARDED, "zero1", "zero3"])
def test_set_lr_and_a_function_are_followed_by_a_loop(strategy: str) -> None:
    expected = plain(cosine)
    for state in on(2, lambda world: looped(world, strategy, rate=cosine)):
        assert_equal(state, expected)
    for state in on(2, lambda world: looped(world, strategy, lr=cosine)):
        assert_equal(state, expected)
    with pytest.raises(AssertionError):
        assert_equal(on(1, lambda world: looped(world, strategy, rate=late))[0], expected)


@pytest.mark.parametrize("name", SCHEDULERS)
@pytest.mark.parametrize("strategy", SHARDED)
def test_schedulers_of_torch_drive_a_loop(strategy: str, name: str) -> None:
    expected = plain(make=SCHEDULERS[name])
    with warnings.catch_warnings():
        warnings.simplefilter(
            "error", UserWarning
        )  # that the scheduler missed a step of the optimizer
        for state in on(2, lambda world: looped(world, strategy, SCHEDULERS[name])):
            assert_equal(state, expected)


@pytest.mark.parametrize("strategy", SHARDED)
@pytest.mark.parametrize(
    ("name", "backend"),
    [
        *((name, "in_memory") for name in (*SCHEDULERS, "function", "set_lr once")),
        *((name, "gloo") for name in ("step", "function")),
    ],
)
def test_a_loop_resumes_its_rates_bit_for_bit(
    tmp_path: Path, strategy: str, backend: str, name: str
) -> None:
    how: dict[str, Any] = {"lr": cosine} if name == "function" else {"make": SCHEDULERS.get(name)}
    if name == "set_lr once":  # later runs take the rate from the checkpoint
        how = {"rate": lambda step: 0.01 if step == 0 else None}
    whole = on(2, lambda world: looped(world, strategy, **how), backend)

    def interrupted(world: World) -> dict[str, Tensor]:
        return looped(world, strategy, parts=(3, 4, STEPS), folder=tmp_path, **how)

    for state, expected in zip(on(2, interrupted, backend), whole, strict=True):
        for key, value in expected.items():
            assert torch.equal(state[key], value), key


def test_rates_that_were_set_are_part_of_a_checkpoint(tmp_path: Path) -> None:
    def program(world: World) -> list[float]:
        wrapped = shardproof.wrap(model(), "zero1", lr=LR)
        wrapped.set_lr(0.25)
        wrapped.save(tmp_path, step=0)
        again = shardproof.wrap(model(), "zero2", lr=LR)
        assert again.load(tmp_path) == {"step": 0}
        scheduled = shardproof.wrap(model(), "ddp", lr=cosine)
        scheduled.load(tmp_path)
        inputs, targets = batches(1)[0]
        LOSS(scheduled(inputs), targets).backward()
        scheduled.step()
        [group] = scheduled._system.optimizer.param_groups
        return [again.optimizer.param_groups[0]["lr"], group["lr"]]

    assert on(2, program) == [[0.25, cosine(0)]] * 2


def test_a_scheduler_whose_state_a_checkpoint_would_change_is_refused(tmp_path: Path) -> None:
    """Restored milestones would be strings, and no step would ever be one."""

    def program(world: World) -> None:
        wrapped = shardproof.wrap(model(), "ddp", lr=LR)
        scheduler = lr_scheduler.MultiStepLR(wrapped.optimizer, [2, 4])
        state = scheduler.state_dict()
        with pytest.raises(ValueError, match=r"key 2 .* string '2' .*remove 'milestones' from"):
            wrapped.save(tmp_path, schedulers=[state])
        del state["milestones"]
        wrapped.save(tmp_path, scheduler=state)
        scheduler.load_state_dict(dict(wrapped.load(tmp_path)["scheduler"]))
        assert scheduler.milestones == {2: 1, 4: 1}

    on(1, program)


def test_groups_have_rates_of_their_own() -> None:
    spec = OptimizerSpec("adamw", lr=LR, groups=(GroupSpec("bias$", lr_scale=2.0),))

    def program(world: World, strategy: str) -> dict[str, Tensor]:
        wrapped = shardproof.wrap(model(), strategy, optimizer=spec)
        groups = wrapped.optimizer.param_groups
        assert {one["name"]: one["lr"] for one in groups} == {"bias$": 2 * LR, "default": LR}
        for step in range(STEPS):
            if step == 1:
                wrapped.set_lr(0.01)
                assert [one["lr"] for one in groups] == [0.02, 0.01]
            if step == 2:
                wrapped.set_lr(0.05, "bias$")
                assert [one["lr"] for one in groups] == [0.05, 0.01]
            inputs, targets = (part.chunk(world.size)[world.rank] for part in batches(STEPS)[step])
            LOSS(wrapped(inputs), targets).backward()
            wrapped.optimizer.step()
            wrapped.optimizer.zero_grad()
        with pytest.raises(ValueError, match=r"unknown parameter group 'head'; valid: bias\$, def"):
            wrapped.set_lr(0.1, "head")
        return wrapped.state_dict()

    own = model()
    named = dict(own.named_parameters())
    parts = [
        [p for n, p in named.items() if n.endswith("bias") is is_bias] for is_bias in (True, False)
    ]
    optimizer = torch.optim.AdamW(
        [{"params": part} for part in parts], betas=spec.betas, weight_decay=0.0
    )
    for step, (inputs, targets) in enumerate(batches(STEPS)):
        rates = [(2 * LR, LR), (0.02, 0.01)][step] if step < 2 else (0.05, 0.01)
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = rate
        optimizer.zero_grad()
        LOSS(own(inputs), targets).backward()
        optimizer.step()
    for strategy in SHARDED:
        for ranks in (2, 8):  # of 8 ranks some hold no bias
            for state in on(ranks, lambda world, s=strategy: program(world, s)):
                assert_equal(state, dict(own.state_dict()))


def test_rates_that_a_loop_must_not_set() -> None:
    def program(world: World) -> None:
        wrapped = shardproof.wrap(model(), "zero1", lr=LR)
        for rate in (-1.0, float("nan"), "0.1", True, None):
            with pytest.raises(ValueError, match=r"lr = .*: give a finite number of at least 0"):
                wrapped.set_lr(rate)  # type: ignore[arg-type]
        assert wrapped.optimizer.param_groups[0]["lr"] == LR
        with pytest.raises(ValueError, match="takes no closure: run forward and backward"):
            wrapped.optimizer.step(lambda: 0.0)
        wrapped.optimizer.param_groups[0]["lr"] = float("nan")  # as a scheduler may
        inputs, targets = batches(1)[0]
        LOSS(wrapped(inputs), targets).backward()
        with pytest.raises(ValueError, match="lr of the parameter group 'default' = nan"):
            wrapped.step()

    on(1, program)
