"""Systems that ``Training`` and ``wrap`` build, as implementations that every check can judge.

    tests/training/trained_systems.py:built_zero2     set up by Training, steps of the strategy
    tests/training/trained_systems.py:looped_zero2    under wrap, in a loop of the user's own
    tests/training/trained_systems.py:late_zero2      built, with rates one step late: a fault

The part behind the first word is the name of a strategy of the suite.  Each is that strategy's own
class with another set-up or step, so what it is held to is the same.  A warm-up of the case is
given as a user gives a schedule: ``Training`` gets a function, and the loop sets each rate.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from shardproof import registry
from shardproof.comm import Mesh
from shardproof.contract import (
    Batch,
    Build,
    Capabilities,
    MicroBatch,
    Observe,
    OptimizerSpec,
    Options,
    StepResult,
)
from shardproof.training.builder import Training, capabilities_of, named
from shardproof.training.model import UserModel

#: Terms of the loss over several micro-batches are for systems that own the whole step.
_NO_TERMS: dict[str, Any] = {"scopes": ()}
_UNSCALED = {"loss_scale": "a loop of one's own multiplies its losses itself"}


def __getattr__(name: str) -> Any:
    kind, _, strategy = name.partition("_")
    if kind not in ("built", "looped", "late") or not strategy:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return _looped(name, strategy) if kind == "looped" else _built(name, strategy, kind == "late")


def _hyperparameters(spec: OptimizerSpec, late: bool) -> dict[str, Any]:
    """Arguments of ``Training.optimizer``."""
    assert not spec.groups and spec.scaler is None, "Training has neither"

    def rate(step: int) -> float:
        return spec.lr_at(max(0, step - late))

    own = {name: value for name, value in spec.arguments.items() if name != "lr"}
    lr = rate if spec.warmup_steps else spec.lr
    return {"lr": lr, "clip": spec.clip_norm, "weight_decay": spec.weight_decay, **own}


def _filled(build: Build, state: Mapping[str, Tensor] | None, device: str) -> nn.Module:
    """A model as a user has it: built, with its values on the rank that has them."""
    module = build(device)
    held = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    with torch.no_grad():
        for name, value in (state or {}).items():
            held[name].copy_(value)
    return module


def _class(name: str, parent: Any, **body: Any) -> Any:
    """A subclass that stands in this module under ``name``."""
    return type(name, (parent,), {"__module__": __name__, "__doc__": parent.__doc__, **body})


@cache
def _built(name: str, strategy: str, late: bool) -> Any:
    parent: Any = registry.load(named(strategy))

    def capabilities(cls: Any, options: Options) -> Capabilities:
        return replace(parent.capabilities(options), **_NO_TERMS)

    def setup(
        self: Any,
        build: Build,
        state: Mapping[str, Tensor] | None,
        optimizer: OptimizerSpec,
        mesh: Mesh,
        options: Options,
    ) -> None:
        # Its targets are whole micro-batches, of which the workload's loss takes its weights.
        training = Training(
            _filled(build, state, mesh.device),
            build.loss,  # type: ignore[arg-type]
            data=(),
            units=build.units,
            stages=build.stage,
            roles=build.roles,
        ).strategy(strategy, mesh.axes, **options)
        training.optimizer(optimizer.kind, **_hyperparameters(optimizer, late))
        plan = training.plan(mesh.world, capabilities_of(named(strategy), options))
        given = None if state is None else plan.model.state
        parent.setup(self, plan.model, given, plan.optimizer, mesh, plan.options)
        plan.model.release()

    def step(self: Any, batch: Batch, observe: Observe) -> StepResult:
        result: StepResult = parent.step(self, _for_users(batch), observe)
        return result

    def evaluate(self: Any, batch: Batch) -> Tensor | None:
        loss: Tensor | None = parent.evaluate(self, _for_users(batch))
        return loss

    methods = {"setup": setup, "step": step, "evaluate": evaluate}
    return _class(name, parent, capabilities=classmethod(capabilities), **methods)


def _for_users(batch: Batch) -> Batch:
    """``batch`` with whole micro-batches as targets, of weight 1."""

    def one(micro: MicroBatch) -> MicroBatch:
        whole: Any = micro
        return replace(micro, targets=whole, weights=torch.ones((), dtype=micro.weights.dtype))

    windows = tuple(tuple(one(micro) for micro in window) for window in batch.windows)
    return replace(batch, windows=windows)


@cache
def _looped(name: str, strategy: str) -> Any:
    parent: Any = registry.load(named(strategy))

    def capabilities(cls: Any, options: Options) -> Capabilities:
        own: Capabilities = parent.capabilities(options)
        return replace(own, declines={**own.declines, **_UNSCALED}, **_NO_TERMS)

    def setup(
        self: Any,
        build: Build,
        state: Mapping[str, Tensor] | None,
        optimizer: OptimizerSpec,
        mesh: Mesh,
        options: Options,
    ) -> None:
        model = _filled(build, state, mesh.device)
        user = UserModel(model, None, units=build.units, roles=build.roles, in_place=True)
        user.loss = build.loss  # type: ignore[method-assign]  # of evaluations
        constant = replace(optimizer, warmup_steps=0)
        given = user.state if state is not None else None
        parent.setup(self, user, given, constant, mesh, options)
        self.rate_at = optimizer.lr_at if optimizer.warmup_steps else None
        # The workload's losses are shares of the global batch's: gradients are sums.
        self.loop = self.own_loop_type(self, mean=False)
        self.loss_of_user = build.loss

    def step(self: Any, batch: Batch, observe: Observe) -> StepResult:
        loop, micro_batches = self.loop, batch.micro_batches
        loop.backwards, loop.steps = len(micro_batches), batch.step
        total = torch.zeros((), dtype=next(self.module.parameters()).dtype)
        for micro in micro_batches:
            loss = self.loss_of_user(loop(micro.inputs), micro)
            loss.backward()
            total = total + loss.detach()
        loop.sync_gradients()
        observe("gradients_final")
        norm = None
        if self.spec.clip_norm is not None:
            norm = loop.clip(self.spec.clip_norm)
            observe("after_clip")
        if self.rate_at is not None:
            loop.optimizer.set_lr(self.rate_at(batch.step))
        loop.update()
        observe("after_update")
        loop.end_step()
        return StepResult(loss=total, norm=norm)

    return _class(name, parent, capabilities=classmethod(capabilities), setup=setup, step=step)
