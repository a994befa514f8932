"""``Training``: a model, a loss and data; how it is split; where it runs; for how many steps."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from shardproof import axes, registry, strategies
from shardproof.backends import BACKENDS, USUAL_PROCESSES, Backend
from shardproof.contract import Capabilities, OptimizerSpec, Refused, Role, Untrained
from shardproof.errors import nearest
from shardproof.registry.declaration import Declaration, missing_package
from shardproof.training import on_rank, on_ray, optimizers, places
from shardproof.training.inputs import require_count, require_positive
from shardproof.training.model import Loss, UserModel
from shardproof.training.on_rank import Bytes, Checkpointing, Plan, RankTraining, Share
from shardproof.training.source import Source
from shardproof.training.world import (
    TIMEOUT_SECONDS,
    World,
    backend_named,
    is_launched,
    join,
    require_axes,
    require_mesh,
)

#: Short words for what is computed in; parameters and gradients travel in it, too.
_PRECISIONS: Mapping[str, str] = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
#: The family of a strategy that is named without one.
_OWN = "reference"


@dataclass(frozen=True)
class Result:
    """The results of a training, the same on every rank but for ``rank``.

    ``losses`` and ``norms`` (before clipping) are those of the global batch, from step ``first``
    on; ``throughput`` counts samples a second over all ranks, without the steps whose memory was
    measured (``None``: there were no others).  ``state`` holds the trained parameters and buffers,
    which ``model`` has as well.
    """

    model: nn.Module
    losses: list[float]
    norms: list[float]
    first: int
    world: int
    rank: int
    throughput: float | None
    memory: list[dict[str, Bytes]]
    checkpoint: Path | None
    state: Mapping[str, Tensor] = field(repr=False, default_factory=dict)

    def memory_stats(self) -> list[dict[str, Bytes]]:
        """Bytes of every rank by class of tensor: ``peak`` of a step and ``current`` after it."""
        return self.memory


class Training:
    """Trains ``model`` on ``data``; every method but :meth:`run` returns the builder itself.

    ``loss(outputs, targets)`` is the mean over a batch.  ``data``: see ``source.py``.  ``batch``:
    samples a step takes over all ranks.  ``units``, ``stages`` and ``roles`` describe the model, as
    for :class:`shardproof.OwnWorkload`.
    """

    def __init__(
        self,
        model: nn.Module,
        loss: Loss,
        data: Any,
        *,
        batch: int | None = None,
        seed: int = 0,
        units: Sequence[str] = (),
        stages: Callable[[nn.Module, int, int], nn.Module] | None = None,
        roles: Mapping[str, Role] | None = None,
    ) -> None:
        if not callable(loss):
            raise ValueError(f"loss = {loss!r:.60}: give a function of (outputs, targets)")
        if isinstance(loss, type):
            raise ValueError(f"loss {loss.__name__} is a class: write {loss.__name__}()")
        self._model = UserModel(model, loss, units=units, stages=stages, roles=roles)
        self._source = Source(data, batch, seed=seed)
        self._optimizer: OptimizerSpec = optimizers.spec(torch.optim.AdamW)
        self._strategy = named(strategies.REPLICATION)
        self._mesh: Mapping[str, int] | None = None
        self._options: dict[str, Any] = {}
        self._accumulate, self._backend, self._timeout = 1, "", TIMEOUT_SECONDS
        self._checkpoint: Checkpointing | None = None

    def optimizer(
        self,
        kind: str | type[torch.optim.Optimizer],
        lr: float | optimizers.Schedule | None = None,
        *,
        clip: float | None = None,
        warmup: int = 0,
        **arguments: Any,
    ) -> Training:
        """Update by ``kind``, a class or a name of ``torch.optim``; ``clip``: largest global norm.

        ``lr``: a number, or a function that returns the rate of an optimizer step, counted from 0
        over all runs; every rank calls it.  ``warmup``: linear steps up to a number ``lr``.
        ``arguments`` are those of the class.

        :raises ValueError: no such optimizer or argument, or no learning rate at step 0.
        """
        self._optimizer = optimizers.spec(kind, lr, clip=clip, warmup=warmup, **arguments)
        return self

    def strategy(
        self,
        name: str,
        mesh: Mapping[str, int] | None = None,
        *,
        precision: str | Mapping[str, str] = "fp32",
        recompute: int = 0,
        offload: str = "none",
        accumulate: int = 1,
        **options: Any,
    ) -> Training:
        """Split by the implementation ``name``: ``ddp`` is ``reference/ddp``, others by full names.

        ``mesh``: ranks along each axis (default: all along the strategy's own).  ``precision``:
        ``bf16``, or the option as a mapping.  ``recompute``: units of a group that is computed
        again in backward.  ``accumulate``: micro-batches a rank cuts its share into.  ``options``
        are the implementation's own.

        :raises ValueError: no such strategy, axis or option.
        """
        require_count("accumulate", accumulate)
        if mesh is not None:
            require_axes(mesh)
        self._strategy, self._mesh, self._accumulate = named(name), mesh, accumulate
        self._options = chosen_options(precision, recompute, offload, options)
        capabilities_of(self._strategy, self._options)
        return self

    def backend(self, name: str, timeout: float = TIMEOUT_SECONDS) -> Training:
        """Talk over ``name``: ``in_memory`` (threads), ``gloo``, ``nccl`` or ``mpi`` (processes).

        :raises ValueError: no such backend.
        """
        if name not in BACKENDS:
            raise ValueError(f"unknown backend {name!r}; {nearest(str(name), BACKENDS, 'valid')}")
        require_positive("timeout", timeout)
        self._backend, self._timeout = name, timeout
        return self

    def checkpoint(
        self,
        folder: str | Path,
        every: int = 0,
        *,
        format: str = "sharded",
        keep: int = 2,
        resume: bool = True,
    ) -> Training:
        """Save into ``folder`` every so many steps and at the end; resume from what is there.

        ``format``: ``full``, ``sharded`` or ``asynchronous``.  ``keep``: how many stay.

        :raises ValueError: no path, or no such number.
        """
        if not isinstance(folder, str | os.PathLike) or not os.fspath(folder):
            raise ValueError(f"checkpoint folder {folder!r} is not a path: give e.g. 'run1'")
        require_count("every", every, least=0)
        require_count("keep", keep)
        option = {"format": format, "keep": keep}
        self._checkpoint = Checkpointing(Path(folder), every, resume, option)
        return self

    def run(
        self,
        steps: int,
        *,
        ranks: int | None = None,
        progress: int | None = None,
        memory: bool = True,
        on: str = "",
    ) -> Result:
        """Train until ``steps`` steps are done.

        A process that a launcher started (torchrun, mpirun, srun, a container's) is one rank of
        the job.  Any other starts ``ranks`` ranks (default: as many as the mesh has), as threads or
        as processes: the backend says which.  ``progress``: prints the loss every so many steps
        (default: 10 times on a terminal).  ``memory``: measures the memory of the first two steps.
        ``on``: ``ray`` or ``ray://HOST`` makes the ranks processes of a Ray cluster; unless given,
        the variable SHARDPROOF_ON says so.

        :raises ValueError: something does not fit; the message says what to change.
        """
        require_count("steps", steps)
        if ranks is not None:
            require_count("ranks", ranks)
        require_count("progress", progress or 0, least=0)
        capabilities = capabilities_of(self._strategy, self._options)
        launched = is_launched(os.environ)
        world = join(self._backend, self._timeout) if launched else None
        size = world.size if world else ranks or axes.size(self._mesh or {}, self._mesh or {})
        if progress is None:
            progress = -(-steps // 10) if sys.stderr.isatty() else 0
        plan = self.plan(size, capabilities, memory=memory, progress=progress)
        if reason := capabilities.lacks or missing_package(capabilities.packages):
            raise ValueError(f"{self._strategy}: {reason}")
        if world is None:
            backend = self._backend or os.environ.get("SHARDPROOF_BACKEND", USUAL_PROCESSES)
            chosen = backend_named(backend, size)
            own = Declaration.of(registry.load(self._strategy), self._options)
            if chosen.threads and (reason := own.denied(backend)):
                raise ValueError(
                    f"{self._strategy} {reason}: choose the backend {USUAL_PROCESSES}, or another "
                    "backend whose ranks are processes"
                )
            if chosen.threads and size > 1 and self._source.is_one_iterator:
                raise ValueError(
                    f"data is an iterator, and {size} ranks in one process cannot share it: give a "
                    "DataLoader, list or function, or choose a backend with one process per rank"
                )
            return self._result(self._started(plan, steps, chosen, size, on), 0)
        return self._result(world.comm.all_gather_object(_train(plan, steps, world)), world.rank)

    def _started(self, plan: Plan, steps: int, backend: Backend, size: int, on: str) -> list[Share]:
        """The results of ranks that this process starts, here or on a cluster."""
        on = on or os.environ.get("SHARDPROOF_ON", "")
        if not on:
            return places.run(backend, size, partial(_train, plan, steps), self._timeout)
        if saves := plan.checkpointing:  # other processes have other working folders
            plan = replace(plan, checkpointing=replace(saves, folder=saves.folder.absolute()))
        return on_ray.run(on, backend, size, partial(_train, plan, steps), self._timeout)

    def plan(self, size: int, capabilities: Capabilities, **how: Any) -> Plan:
        """All that ``size`` ranks must know.

        :raises ValueError: mesh, strategy, optimizer and checkpoint do not fit each other.
        """
        mesh = mesh_for(self._strategy, capabilities, self._mesh, size)
        fits(self._strategy, capabilities, self._optimizer, self._options, mesh)
        require_values(self._strategy, self._model)
        require_buffers(self._strategy, capabilities, self._model)
        options, saves = dict(self._options), self._checkpoint
        if saves is not None:
            require_format(self._strategy, capabilities, saves.option["format"])
            options["checkpoint"] = dict(saves.option)
        measure, progress = how.get("memory", False), how.get("progress", 0)
        where = self._strategy, mesh, options, self._accumulate, saves
        return Plan(self._model, self._source, self._optimizer, *where, measure, progress)

    def _result(self, shares: Sequence[Share], rank: int) -> Result:
        first = shares[0]
        losses = on_rank.merged([(share.of, share.losses) for share in shares])
        self._model.take(first.state)
        seconds, rate = max(share.seconds for share in shares), None
        if seconds and first.timed:
            rate = first.timed * self._source.samples(first.first) / seconds
        memory = [share.memory for share in shares]
        numbers = (
            losses,
            first.norms,
            first.first,
            len(shares),
            rank,
            rate,
            memory,
            first.checkpoint,
        )
        return Result(self._model.model, *numbers, first.state)


def _train(plan: Plan, steps: int, world: World) -> Share:
    return RankTraining(plan, world).run(steps)


def named(strategy: str) -> str:
    """The full name of the implementation ``strategy``: a name without family is the suite's own.

    :raises ValueError: there is none.
    """
    if not isinstance(strategy, str):
        raise ValueError(f"strategy {strategy!r:.60} is not a name: write a name such as 'fsdp'")
    known = [*registry.names()]
    if strategy in known or ":" in strategy:
        return strategy
    if f"{_OWN}/{strategy}" in known:
        return f"{_OWN}/{strategy}"
    short = [name.removeprefix(f"{_OWN}/") for name in known]
    raise ValueError(f"unknown strategy {strategy!r}; {nearest(strategy, short, 'valid')}")


def chosen_options(
    precision: str | Mapping[str, str] = "fp32",
    recompute: int = 0,
    offload: str = "none",
    options: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """The options of an implementation; what is as usual is left to it."""
    made = dict(options or {})
    if not isinstance(precision, Mapping) and precision not in _PRECISIONS:
        remedy = nearest(str(precision), _PRECISIONS, "valid")
        raise ValueError(f"unknown precision {precision!r}; {remedy}")
    if isinstance(precision, Mapping):
        made["precision"] = dict(precision)
    elif precision != "fp32":
        computed, kept = _PRECISIONS[precision], _PRECISIONS["fp32"]
        made["precision"] = {"parameters": computed, "reduce": kept, "output": kept}
    if recompute:
        made["recompute_every"] = recompute
    if offload != "none":
        made["offload"] = offload
    return made


def capabilities_of(name: str, options: Mapping[str, Any]) -> Capabilities:
    """The declaration of the implementation ``name`` with ``options``.

    :raises ValueError: it trains no model, or does not take an option.
    """
    system = registry.load(name)
    if issubclass(system, Untrained):
        raise ValueError(
            f"{name} trains no model; choose a strategy such as {strategies.REPLICATION}"
        )
    try:
        return system.capabilities(options)
    except Refused as error:
        raise ValueError(f"{name}: {error}") from error


def mesh_for(
    name: str, capabilities: Capabilities, mesh: Mapping[str, int] | None, size: int
) -> dict[str, int]:
    """``mesh``, or all ranks along the axis of the implementation that takes any number.

    :raises ValueError: it does not fit ``size`` ranks, or the implementation.
    """
    if mesh is None:
        along = axes.growing(capabilities.axes) or capabilities.axes
        mesh = {along[0]: size}
    require_mesh(mesh, size)
    if foreign := [axis for axis in mesh if axis not in capabilities.axes]:
        raise ValueError(
            f"{name} has no axis {foreign[0]!r} (its axes: {', '.join(capabilities.axes)}): write "
            f"e.g. mesh={{'{capabilities.axes[0]}': {size}}}"
        )
    if capabilities.max_world is not None and size > capabilities.max_world:
        raise ValueError(f"{name} runs on at most {capabilities.max_world} ranks, not {size}")
    # In the one order that all of the suite expects, whatever the order in which it was written.
    return {axis: mesh[axis] for axis in axes.names() if axis in mesh}


def require_format(name: str, capabilities: Capabilities, given: str) -> None:
    """Raise unless the implementation saves checkpoints in the format ``given``.

    :raises ValueError: it does not.
    """
    if not capabilities.checkpoints:
        raise ValueError(f"{name} cannot save checkpoints: leave checkpoint() out")
    if given not in capabilities.checkpoints:
        remedy = nearest(given, capabilities.checkpoints, "valid")
        raise ValueError(f"{name} cannot save checkpoints of format {given!r}; {remedy}")


def require_values(name: str, model: UserModel) -> None:
    """Raise where the model is on ``meta`` and the implementation needs its values.

    :raises ValueError: so it is.
    """
    if model.is_meta and not getattr(registry.load(name), "materializes", False):
        raise ValueError(
            f"the model is on the meta device, but {name} needs parameter values: build the model "
            "on CPU or GPU, or choose a strategy that initializes units one by one (zero3, fsdp)"
        )


def require_buffers(name: str, capabilities: Capabilities, model: UserModel) -> None:
    """Raise where the model has buffers and the implementation returns none.

    :raises ValueError: so it is.
    """
    buffers = dict(model.model.named_buffers())
    if capabilities.buffers == "none" and buffers:
        raise ValueError(
            f"after training, {name} does not return buffers such as {next(iter(buffers))!r}: "
            "choose another strategy, or use layers without running statistics, such as GroupNorm"
        )


def fits(
    name: str,
    capabilities: Capabilities,
    optimizer: OptimizerSpec,
    options: Mapping[str, Any],
    mesh: Mapping[str, int],
) -> None:
    """Raise unless the optimizer can update what ranks hold.

    :raises ValueError: it cannot.
    """
    own = isinstance(optimizer, optimizers.TorchOptimizer)
    if own and not name.startswith(f"{_OWN}/"):
        raise ValueError(
            f"{name} supports only the optimizers sgd and adamw; for another optimizer choose a "
            f"strategy whose name begins with {_OWN}/"
        )
    if own and options.get("offload", "none") != "none":
        raise ValueError("offload works only with the optimizers sgd and adamw")
    if strategies.SHARDED[0] in capabilities.features or axes.parts(mesh, "state") > 1:
        optimizers.require_element_wise(optimizer)
    if optimizer.clip_norm is not None and "clipping" in capabilities.declines:
        raise ValueError(f"{name} does not clip gradients: {capabilities.declines['clipping']}")
