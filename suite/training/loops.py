"""``wrap``: a model under a strategy, for a training loop of the user's own."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from shardproof import registry
from shardproof.comm import Mesh
from shardproof.contract import Implementation, OptimizerSpec, Refused
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

    def __init__(self, system: Implementation, loop: Any, model: nn.Module) -> None:
        self._system, self._loop, self.module = system, loop, model
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

    def step(self) -> None:
        """Update the parameters and clear the gradients."""
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
        """Whole parameters and buffers on every rank; all ranks call it."""
        return whole(self._system, join().comm)

    def save(self, folder: str | Path, **extra: Any) -> None:
        """Save a checkpoint into ``folder``; ``extra`` is what JSON holds.  All ranks call it."""
        self._loop.save(Path(folder), extra)

    def load(self, folder: str | Path) -> Mapping[str, Any]:
        """Load the newest checkpoint in ``folder``; the ``extra`` that was saved."""
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
            raise ValueError("measured(): make a forward, a backward and a step() within")
        self._peak = memory.stats["peak"]

    def memory_stats(self) -> dict[str, Bytes]:
        """Bytes that this rank holds now, by class; ``peak``: those of the steps ``measured()``.

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
    lr: float | None = None,
    clip: float | None = None,
    arguments: Mapping[str, Any] | None = None,
    **more: Any,
) -> Wrapped:
    """Put ``model`` under ``strategy``, in place, for a loop of your own; all ranks call it.

    ``mesh``: axes and ranks, or a mesh of :meth:`World.new_mesh` (default: all ranks along the
    strategy's axis).  ``arguments`` are those of the optimizer.  ``more``: ``accumulate`` (backward
    passes of a step), ``precision``, ``recompute``, ``offload``, ``units``, ``roles`` and the
    strategy's own options, as for ``Training.strategy``.

    :raises ValueError: something does not fit; the message says what to change.
    """
    name, world = named(strategy), join()
    if isinstance(model, nn.Module) and model in _WRAPPED:
        raise ValueError(
            f"the model ({type(model).__name__}) is wrapped already: keep what wrap returned, or "
            "call its close() first"
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
            f"{name} runs whole steps and allows no loop of your own: choose one of "
            "ddp, zero1, zero2, zero3 and fsdp, or use shardproof.Training"
        )
    capabilities = capabilities_of(name, options)
    if not isinstance(mesh, Mesh):
        mesh = world.new_mesh(mesh_for(name, capabilities, mesh, world.size))
    fits(name, capabilities, spec, options, mesh.axes)
    built = UserModel(model, None, in_place=True, **described)
    require_values(name, built)
    made = system()
    try:
        made.setup(built, built.state, spec, mesh, options)
        loop = made.own_loop_type(made, accumulate, mean)
    except Refused as error:
        raise ValueError(f"{name}: {error}") from error
    _WRAPPED.add(model)
    return Wrapped(made, loop, model)
