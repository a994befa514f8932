"""The begin and end of a unit's forward and backward, from hooks on its module.

    before_forward     the module is about to be called
    after_forward      it has returned
    before_backward    the gradient of one of its outputs has arrived
    gradient_arrived   one of its parameters has its gradient
    after_backward     all gradients of its parameters have arrived; backward needs them no more

The last is the hard one.  The unit's inputs pass through an identity.  Its backward runs when their
gradients are complete; autograd runs what was recorded later first, so by then everything in the
unit has run.  That fails if no input needs a gradient (the root gets tokens; a unit behind frozen
ones).  Such a unit ends together with the whole backward: when all other units have ended and every
gradient of these units has arrived or, where some parameter was not used, when the backward has
returned.  So all ranks see the same events in the same order, unless only some of them call a unit.

A module that is called twice in a forward ends once, with its last call.  A forward inside backward
is a recomputation and has no backward of its own.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from shardproof.impls.reference.parts.nested import Copies, mapped, tensors_in
from shardproof.impls.reference.units.shard import FlatShard, ShardedUnit


class Listener(ABC):
    """The receiver of every event; ``again``: the forward is a recomputation in backward."""

    @abstractmethod
    def before_forward(self, unit: ShardedUnit, again: bool) -> None:
        """Make parameters whole before return."""

    @abstractmethod
    def after_forward(self, unit: ShardedUnit, again: bool) -> None:
        """Parameters are next needed in backward."""

    @abstractmethod
    def before_backward(self, unit: ShardedUnit) -> None:
        """Make parameters whole before return; called once per call and output."""

    @abstractmethod
    def gradient_arrived(self, flat: FlatShard, name: str, gradient: Tensor) -> None:
        """Keep the whole gradient of parameter ``name`` from this backward."""

    @abstractmethod
    def after_backward(self, unit: ShardedUnit) -> None:
        """Parameters are no longer needed, and gradients are complete."""


class UnitEvents:
    """The hooks, and the units in the current round."""

    def __init__(self, units: Sequence[ShardedUnit], listener: Listener) -> None:
        self.listener = listener
        self.running: list[ShardedUnit] = []  # called in this round, backward not over
        self.in_backward = False
        #: Of a call under way, by the unit's number: its inputs, and containers that were copied.
        self.given: dict[int, tuple[Inputs, Copies]] = {}
        self.hooks: list[Any] = []
        for unit in units:
            enter, leave = partial(self.enter, unit), partial(self.leave, unit)
            self.hooks.append(unit.module.register_forward_pre_hook(enter, with_kwargs=True))
            self.hooks.append(unit.module.register_forward_hook(leave, with_kwargs=True))

    def watch(self, unit: ShardedUnit, flat: FlatShard, name: str, parameter: Tensor) -> None:
        """Forward the gradients of ``parameter`` as they arrive."""
        hook = partial(self.arrived, unit, flat, name)
        self.hooks.append(parameter.register_post_accumulate_grad_hook(hook))

    def end_round(self) -> None:
        """End the remaining units after the backward, if there was one."""
        self.end_backward()
        self.in_backward = False
        self.given.clear()  # of a forward that did not return

    def close(self) -> None:
        """Remove the hooks."""
        for hook in self.hooks:
            hook.remove()

    # -------------------------------------------------------------------------------------- hooks

    def enter(self, unit: ShardedUnit, module: nn.Module, args: Any, kwargs: Any) -> Any:
        """Begin the forward; inputs that need a gradient pass through the identity."""
        self.listener.before_forward(unit, self.in_backward)
        if self.in_backward or not torch.is_grad_enabled():
            return None
        if unit not in self.running:
            self.running.append(unit)
            unit.start_round()
        given = made = (args, kwargs)
        inputs = [t for t in tensors_in(given) if t.requires_grad]
        if inputs:
            unit.pending += 1
            passed = iter(_Notify.apply(partial(self.passed, unit), *inputs))
            made = mapped(given, lambda t: next(passed) if t.requires_grad else t)
        else:
            # No gradient will pass these inputs, so no backward of them can mark the end.
            unit.open_ended = True
        self.given[unit.number] = Inputs(tensors_in(made)), Copies(given, made)
        return made

    def leave(self, unit: ShardedUnit, module: nn.Module, args: Any, kwargs: Any, out: Any) -> None:
        """End the forward; backward reaches the unit with a gradient of its output."""
        self.listener.after_forward(unit, self.in_backward)
        if self.in_backward or not torch.is_grad_enabled():
            return
        given, copies = self.given.pop(unit.number, (Inputs(()), None))
        if copies is not None and copies.changed():
            raise RuntimeError(
                f"unit {unit.name!r} changed a list, dictionary or dataclass among its arguments: "
                "a unit receives copies, so its caller does not see the change; return the new "
                "value"
            )
        for tensor in tensors_in(out):
            if tensor.requires_grad and not given.hand_on(tensor):
                tensor.register_hook(partial(self.reached, unit))

    def reached(self, unit: ShardedUnit, gradient: Tensor) -> None:
        """Backward is about to enter the unit."""
        self.in_backward = True
        self.listener.before_backward(unit)

    def arrived(self, unit: ShardedUnit, flat: FlatShard, name: str, parameter: Tensor) -> None:
        """A backward has completed the gradient of ``parameter``."""
        if unit not in self.running:
            raise RuntimeError(
                f"parameter {name!r} received a gradient outside the backward of its unit "
                f"{unit.name!r}: run one forward and one backward per micro-batch; with activation "
                "checkpointing, set use_reentrant=False or use option 'recompute_every'"
            )
        assert parameter.grad is not None
        self.listener.gradient_arrived(flat, name, parameter.grad)
        # Or the next backward would add to it, and its memory would stay until the end of the step.
        parameter.grad = None
        unit.missing.discard(name)
        if unit.open_ended:
            self.look_for_end()

    def passed(self, unit: ShardedUnit) -> None:
        """Backward has passed the inputs of one call of the unit."""
        unit.pending -= 1
        if not unit.pending and not unit.open_ended:
            self.end(unit)
        self.look_for_end()

    def look_for_end(self) -> None:
        """End the backward if no gradient is missing."""
        if all(u.open_ended and not u.pending and not u.missing for u in self.running):
            self.end_backward()

    def end_backward(self) -> None:
        """End the remaining units, the last called first, which is the order of all other units."""
        # A copy: each unit that ends leaves the list.
        for unit in reversed(list(self.running)):
            self.end(unit)

    def end(self, unit: ShardedUnit) -> None:
        """The unit's backward is over."""
        self.running.remove(unit)
        self.listener.after_backward(unit)


class Inputs:
    """The inputs of a unit's forward, to distinguish computed outputs from inputs passed through.

    That has its gradient also while the unit has nothing to do.
    """

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        # With the tensors: of one that is gone another may have the identity.
        self.versions = {id(t): (t, None if t.is_inference() else t._version) for t in tensors}

    def hand_on(self, output: Tensor) -> bool:
        """Whether ``output`` is an unchanged input; one changed in place counts as computed."""
        return self.versions.get(id(output)) == (output, output._version)


class _Notify(torch.autograd.Function):
    """The identity; calls ``complete`` when the gradients of its inputs are complete."""

    @staticmethod
    def forward(ctx: Any, complete: Callable[[], None], *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.complete = complete
        ctx.set_materialize_grads(False)  # an input that nobody used has no gradient
        return tensors

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        ctx.complete()
        return (None, *gradients)
