"""When a unit's forward and backward begin and end, from hooks on its module.

    before_forward    the module is about to be called
    after_forward     it has returned
    before_backward   the gradient of one of its outputs has arrived
    after_backward    all gradients of its parameters are there, and its parameters no longer needed

The last is the hard one.  The unit's inputs pass through an identity whose backward tells that
their gradients are complete: autograd runs what was recorded later first, so by then everything in
the unit has run.  That fails if no input needs a gradient (the root gets tokens; a unit behind
frozen ones): such a unit ends together with the whole backward, which is when all other units have
ended and every gradient of these has arrived, or, where some parameter was not used, when the
backward has returned.  All ranks thus see the same events in the same order, unless only some of
them call a unit.

A module that is called twice in a forward ends once, with its last call.  A forward inside backward
is a recomputation and has no backward of its own.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from shardproof.impls.reference.units.shard import FlatShard, Unit, tensors_in


class Listener(ABC):
    """Told of every event; ``again`` tells a forward that is repeated inside backward."""

    @abstractmethod
    def before_forward(self, unit: Unit, again: bool) -> None:
        """Parameters must be whole on return."""

    @abstractmethod
    def after_forward(self, unit: Unit, again: bool) -> None:
        """Parameters are needed again in backward only."""

    @abstractmethod
    def before_backward(self, unit: Unit) -> None:
        """Parameters must be whole on return; told once a call and output."""

    @abstractmethod
    def after_backward(self, unit: Unit) -> None:
        """Parameters are no longer needed; gradients are complete."""


class UnitEvents:
    """The hooks, and which units take part in the running round."""

    def __init__(self, units: Sequence[Unit], listener: Listener) -> None:
        self.listener = listener
        self.running: list[Unit] = []  # called in this round, backward not over
        self.in_backward = False
        self.hooks: list[Any] = []
        for unit in units:
            enter, leave = partial(self.enter, unit), partial(self.leave, unit)
            self.hooks.append(unit.module.register_forward_pre_hook(enter, with_kwargs=True))
            self.hooks.append(unit.module.register_forward_hook(leave))

    def watch(self, unit: Unit, flat: FlatShard, name: str, parameter: Tensor) -> None:
        """Take the gradients of ``parameter`` as they arrive."""
        hook = partial(self.arrived, unit, flat, name)
        self.hooks.append(parameter.register_post_accumulate_grad_hook(hook))

    def end_round(self) -> None:
        """The backward has returned, if there was one: end what is left."""
        self.end_backward()
        self.in_backward = False

    def close(self) -> None:
        """Remove the hooks."""
        for hook in self.hooks:
            hook.remove()

    # -------------------------------------------------------------------------------------- hooks

    def enter(self, unit: Unit, module: nn.Module, args: Any, kwargs: Any) -> Any:
        """Before the forward; the inputs that need a gradient pass through the identity."""
        self.listener.before_forward(unit, self.in_backward)
        if self.in_backward or not torch.is_grad_enabled():
            return None
        if unit not in self.running:
            self.running.append(unit)
            unit.forget()
        given = [t for t in (*args, *kwargs.values()) if _needs_gradient(t)]
        if not given:
            unit.open_ended = True
            return None
        unit.pending += 1
        passed = iter(_Tell.apply(partial(self.passed, unit), *given))
        args = tuple(next(passed) if _needs_gradient(value) else value for value in args)
        named = {n: next(passed) if _needs_gradient(v) else v for n, v in kwargs.items()}
        return args, named

    def leave(self, unit: Unit, module: nn.Module, args: Any, outputs: Any) -> None:
        """After the forward; the outputs' gradients will tell that backward reaches the unit."""
        self.listener.after_forward(unit, self.in_backward)
        if self.in_backward:
            return
        for tensor in tensors_in(outputs):
            if tensor.requires_grad:
                tensor.register_hook(partial(self.reached, unit))

    def reached(self, unit: Unit, gradient: Tensor) -> None:
        """Backward is about to enter the unit."""
        self.in_backward = True
        self.listener.before_backward(unit)

    def arrived(self, unit: Unit, flat: FlatShard, name: str, parameter: Tensor) -> None:
        """A backward has given ``parameter`` its whole gradient, which moves to the flat one."""
        if unit not in self.running:
            raise RuntimeError(
                f"{name!r} received a gradient while its unit {unit.name!r} had no backward under "
                "way: a micro-batch is one forward and one backward; checkpoint with "
                "use_reentrant=False or option 'recompute_every'"
            )
        assert parameter.grad is not None
        flat.take(name, parameter.grad)
        parameter.grad = None
        unit.missing.discard(name)
        if unit.open_ended:
            self.look_for_end()

    def passed(self, unit: Unit) -> None:
        """Backward has passed the inputs of one call of the unit."""
        unit.pending -= 1
        if not unit.pending and not unit.open_ended:
            self.end(unit)
        self.look_for_end()

    def look_for_end(self) -> None:
        """End the backward if nothing more can arrive."""
        if all(u.open_ended and not u.pending and not u.missing for u in self.running):
            self.end_backward()

    def end_backward(self) -> None:
        """End the units that are left, the last called first."""
        for unit in reversed(list(self.running)):
            self.end(unit)

    def end(self, unit: Unit) -> None:
        """The unit's backward is over."""
        self.running.remove(unit)
        self.listener.after_backward(unit)


class _Tell(torch.autograd.Function):
    """The identity; calls ``told`` when the gradients of its inputs are complete."""

    @staticmethod
    def forward(ctx: Any, told: Callable[[], None], *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.told = told
        return tensors

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        ctx.told()
        return (None, *gradients)


def _needs_gradient(value: object) -> bool:
    return isinstance(value, Tensor) and value.requires_grad
