"""``wrap``: a model under a strategy, for a training loop of the user's own."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from shardproof import registry
from shardproof.comm import Mesh
from shardproof.contract import OptimizerSpec, Refused
from shardproof.training import optimizers
from shardproof.training.builder import (
    capabilities_of,
    chosen_options,
    fits,
    mesh_for,
    named,
    require_values,
)
from shardproof.training.inputs import require_count, require_positive
from shardproof.training.model import UserModel
from shardproof.training.on_rank import Bytes, Memory, whole
from shardproof.training.world import join

#: Kind of state -> the class of memory that it is, where that has another name.
_CLASSES = {"optimizer": "optimizer_state"}
#: Modules under a strategy: a second one would take apart what the first one put together.
_WRAPPED: weakref.WeakSet[nn.Module] = weakref.WeakSet()


class Wrapped:
    """A model under a strategy; :func:`wrap` makes it.

    One step is a forward, a loss, its backward, ``step()`` and ``zero_grad()``, as with a module
    and an optimizer of torch.  Gradients are means over the ranks, so a loss is a mean over the
    batch of its rank.
    """

    def __init__(self, system: Any, loop: Any, model: nn.Module, names: Sequence[str]) -> None:
        self._system, self._loop, self.module, self._names = system, loop, model, names
        loop.whole_step = self._step
        self._memory: Memory | None = None
        self._in_step, self._peak = ExitStack(), Bytes()

    def __call__(self, *inputs: Any, **named: Any) -> Any:
        if self._memory is not None and torch.is_grad_enabled() and not self._loop.forwards:
            self._in_step.enter_context(self._memory.step(self._loop.steps))
        return self._loop(*inputs, **named)

    def sync_gradients(self) -> None:
        """Wait until gradients are the means over all ranks; ``step`` does it as well."""
        self._loop.sync_gradients()

    def clip(self, limit: float) -> Tensor:
        """Scale gradients to a global norm of at most ``limit``; returns the norm before it."""
        require_positive("clip", limit)
        return self._loop.clip(limit)

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """The optimizer, for ``torch.optim.lr_scheduler``: ``param_groups`` has the learning rates.

        Its ``step`` and ``zero_grad`` are those of this object.

        :raises ValueError: the rates follow ``lr``, a function, or ``warmup``.
        """
        optimizer: torch.optim.Optimizer = self._loop.optimizer
        return optimizer

    def set_lr(self, rate: float, group: str | None = None) -> None:
        """Set the learning rate from the next step on; every rank calls it.

        A group of parameters takes ``rate`` times its ``lr_scale``.  ``group``, the pattern of one
        or ``default``, sets ``rate`` as it is, and for that group only.

        :raises ValueError: no rate, no such group, or the rates follow a schedule.
        """
        self._loop.optimizer.set_lr(rate, group)

    def step(self) -> None:
        """Update the parameters and clear the gradients."""
        # Through the optimizer if there is one: schedulers count its steps.
        (self._loop.optimizer.step if self._loop.sets_rates else self._step)()

    def _step(self) -> None:
        if self._memory is None:
            self._loop.step()
            return
        self.sync_gradients()
        self._memory.observe(self._system, "gradients_final")
        self._loop.update()
        self._memory.observe(self._system, "after_update")
        self._loop.end_step()
        self._in_step.close()

    def zero_grad(self) -> None:
        """Drop gradients that no step has used."""
        self._loop.zero_grad()

    def sync_parameters(self) -> None:
        """Give all copies of parameters and buffers the values of the first one."""
        self._loop.sync_parameters()

    def train(self, mode: bool = True) -> Wrapped:
        """Set the mode of the module, as ``nn.Module.train``."""
        self.module.train(mode)
        return self

    def eval(self) -> Wrapped:
        """Set evaluation mode; call forwards within ``torch.no_grad()``, on all ranks."""
        return self.train(False)

    def state_dict(self) -> dict[str, Tensor]:
        """Return the ``state_dict`` of the plain module, on every rank; all ranks call it."""
        state, first = whole(self._system, join().comm), self._system.aliases
        held = {name: first.get(name, name) for name in self._names}
        return {name: state[kept] for name, kept in held.items() if kept in state}

    def save(self, folder: str | Path, **extra: Any) -> None:
        """Save a checkpoint into ``folder``; ``extra`` is what JSON holds.  All ranks call it.

        Learning rates that the loop set are saved, too.
        """
        self._loop.save(Path(folder), extra)

    def load(self, folder: str | Path) -> Mapping[str, Any]:
        """Load the newest checkpoint in ``folder``; returns the ``extra`` that was saved.

        Learning rates that the loop had set are set again; a schedule given to ``wrap`` overrides
        them.
        """
        extra: Mapping[str, Any] = self._loop.load(Path(folder))
        return extra

    @contextmanager
    def measured(self) -> Iterator[None]:
        """Measure the memory of the steps within; ``memory_stats`` then has the last one's peak.

        Steps within take longer.  The first step of all has no optimizer state before its update,
        so measure two.

        :raises ValueError: no step was made within.
        """
        memory = Memory(True)
        try:
            with memory:
                memory.watch((), self.module)
                self._memory = memory
                yield
        finally:
            self._in_step.close()
            self._memory = None
        if not memory.stats["peak"]:
            raise ValueError("no step ran in `with measured()`: run forward, backward and step()")
        self._peak = memory.stats["peak"]

    def memory_stats(self) -> dict[str, Bytes]:
        """Bytes that this rank holds at this call (``current``) and held within ``measured()``
        (``peak``), by class.

        On a GPU ``peak`` has the most that torch's allocator held, too.
        """
        current: Bytes = {}
        kinds: tuple[Any, ...] = ("parameters", "gradients", "optimizer", "buffers")
        for kind in kinds:
            pieces = self._system.local_state(kind)
            held = {
                t.untyped_storage().data_ptr(): t.untyped_storage().nbytes()
                for p in pieces
                for t in [p.tensor if p.source is None else p.source]
            }
            current[_CLASSES.get(kind, kind)] = sum(held.values())
        current["all"] = sum(current.values())
        stats, peak = {"current": current}, dict(self._peak)
        if torch.cuda.is_available() and torch.cuda.is_initialized():
            peak["allocator"] = torch.cuda.max_memory_allocated()
        return {**stats, "peak": peak} if peak else stats

    def close(self) -> None:
        """Give the module its own forward back."""
        self._system.drain()
        self._system.close()
        _WRAPPED.discard(self.module)


def wrap(
    model: nn.Module,
    strategy: str,
    mesh: Mapping[str, int] | Mesh | None = None,
    *,
    optimizer: str | type[torch.optim.Optimizer] | OptimizerSpec = "adamw",
    lr: float | optimizers.Schedule | None = None,
    clip: float | None = None,
    arguments: Mapping[str, Any] | None = None,
    **more: Any,
) -> Wrapped:
    """Put ``model`` under ``strategy``, in place, for a loop of your own; all ranks call it.

    ``mesh``: axes and ranks, or a mesh of :meth:`World.new_mesh` (default: all ranks along the
    strategy's axis).  ``lr``: a number, or a function of the step.  ``arguments`` are those of the
    optimizer.  ``more``: ``accumulate`` (backward passes of a step), ``precision``, ``recompute``,
    ``offload``, ``units``, ``roles`` and the strategy's own options, as for ``Training.strategy``.

    :raises ValueError: something does not fit; the message says what to change.
    """
    name, world = named(strategy), join()
    if isinstance(model, nn.Module) and model in _WRAPPED:
        raise ValueError(
            f"the model ({type(model).__name__}) is wrapped already: use the object that the "
            "first wrap() returned, or call close() on that object before you wrap again"
        )
    accumulate, mean = more.pop("accumulate", 1), more.pop("mean", True)
    require_count("accumulate", accumulate, least=0)
    spec = optimizer
    if not isinstance(spec, OptimizerSpec):
        spec = optimizers.spec(spec, lr, clip=clip, **(arguments or {}))
    if given := [word for word in more if word in optimizers.arguments_of(spec)]:
        raise ValueError(
            f"{given[0]} is an argument of the optimizer: write "
            f"arguments={{{given[0]!r}: {more[given[0]]!r}}}"
        )
    described = {word: more.pop(word) for word in ("units", "roles") if word in more}
    how = {word: more.pop(word) for word in ("precision", "recompute", "offload") if word in more}
    options = chosen_options(options=more, **how)
    system: Any = registry.load(name)
    if not hasattr(system, "own_loop_type"):
        raise ValueError(
            f"{name} runs whole steps, so it cannot be used in your own loop: choose ddp, zero1, "
            "zero2, zero3 or fsdp, or use shardproof.Training"
        )
    capabilities = capabilities_of(name, options)
    if not isinstance(mesh, Mesh):
        mesh = world.new_mesh(mesh_for(name, capabilities, mesh, world.size))
    fits(name, capabilities, spec, options, mesh.axes)
    built = UserModel(model, None, in_place=True, **described)
    require_values(name, built)
    made, names = system(), list(model.state_dict())
    try:
        made.setup(built, built.state, spec, mesh, options)
        loop = made.own_loop_type(made, accumulate, mean)
    except Refused as error:
        raise ValueError(f"{name}: {error}") from error
    _WRAPPED.add(model)
    return Wrapped(made, loop, model, names)
