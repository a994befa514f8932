"""The saved state of a system, read and written by torch's own functions.

    model.<name>                      ``get_state_dict``: parameters and buffers
    optimizer.state.<name>.<slot>     the same: moments and counters, and the settings of the group
    optimizer.param_groups.<name>...  that a parameter is in (``flatten_optimizer_state_dict``, the
                                      one form that pipelines can load)
    progress.step, .extra, .scaler    steps done, the caller's extra, ``GradScaler.state_dict``
    progress.about                    who saved: strategy, mesh, optimizer, buffers, ties
    rng.<rank>.torch, .<path>         the process's generator and those in modules

A load begins with the same dictionary of the system that loads: torch fills its tensors in place
and replaces the rest; ``set_state_dict`` then hands all of it to model and optimizer.  Stages of a
pipeline that lie on one rank are given to torch as one list of modules, whose numbers are taken off
the names.  Generators are loaded by as many ranks as saved them, with the same modules each.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Generator, Tensor, nn
from torch.amp import GradScaler
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from shardproof.impls.pytorch.checkpoint.blocks import Blocks, reordered
from shardproof.impls.pytorch.parts.recompute import plain
from shardproof.impls.pytorch.tensor_styles import dtensor_pieces

_FLAT = StateDictOptions(flatten_optimizer_state_dict=True)
#: Names that a group has of its parameters: of one rank, like the parameters themselves.
NAMES = "param_names"
_WRAPPED = "_fsdp_wrapped_module."


@dataclass(frozen=True)
class Training:
    """The state that one rank gives and takes back.

    ``modules``: the model, as wrapped, or the stages of this rank.  ``rank`` and ``world`` are the
    mesh's.  ``orders``: by parameter, the rows of the true tensor in the order in which they are
    kept.  ``about``: who saves, as JSON has it.
    """

    modules: Sequence[nn.Module]
    optimizer: torch.optim.Optimizer
    scaler: GradScaler
    rank: int
    world: int
    step: int
    about: Mapping[str, Any]
    orders: Mapping[str, Sequence[int]] = field(default_factory=dict)

    @property
    def model(self) -> nn.Module:
        """The model for torch's functions."""
        one, *others = self.modules
        return nn.ModuleList(self.modules) if others else one

    @property
    def inner(self) -> Iterator[nn.Module]:
        """The modules without DDP."""
        for module in self.modules:
            yield module.module if isinstance(module, DistributedDataParallel) else module

    @property
    def generators(self) -> dict[str, Generator]:
        """Generators in attributes of modules, by their paths."""
        return {
            own_name(f"{name}.{attribute}".lstrip(".")): value
            for module in self.inner
            for name, part in module.named_modules()
            for attribute, value in vars(part).items()
            if isinstance(value, Generator)
        }

    def name_of(self, key: str, at: int = 0) -> str:
        """``key`` without the number of the stage, its part number ``at``."""
        if len(self.modules) == 1:
            return key
        parts = key.split(".")
        return ".".join(parts[:at] + parts[at + 1 :])


class State:
    """The dictionary that is saved, or that a load fills."""

    def __init__(self, training: Training, extra: Mapping[str, Any]) -> None:
        self.training = training
        self.model, self.optimizer = get_state_dict(
            training.model, training.optimizer, options=_FLAT
        )
        progress = {
            "step": training.step,
            "extra": json.dumps(extra),
            "about": json.dumps(about(training)),
            "scaler": training.scaler.state_dict(),
        }
        self.tree: dict[str, Any] = {
            "model": dict(self._named(self.model, 0)),
            "optimizer": dict(self._named(self.optimizer, 1)),
            "progress": progress,
            "rng": {str(training.rank): draws(training)},
        }

    def _named(self, given: Mapping[str, Any], at: int) -> Iterator[tuple[str, Any]]:
        """The keys and values of a checkpoint from torch's result."""
        for key, value in given.items():
            if not key.endswith(f".{NAMES}"):
                name = self.training.name_of(key, at)
                yield name, self._as_saved(name.removeprefix("state."), value)

    def _as_saved(self, name: str, value: Any) -> Any:
        order = reordered(name, self.training.orders)
        if order is None or not isinstance(value, DTensor):
            return value
        return Blocks(value.shape, value, dtensor_pieces(name, value, order, 0))

    def keep_generators(self, saved: Iterable[str]) -> None:
        """Request the generators of this rank only if ``saved`` has them."""
        names = {name.removeprefix("rng.") for name in saved if name.startswith("rng.")}
        own = self.tree["rng"].pop(key := str(self.training.rank))
        held = {name.partition(".")[2] for name in names if name.startswith(f"{key}.")}
        if len({name.partition(".")[0] for name in names}) == self.training.world:
            self.tree["rng"] = {key: own} if held == own.keys() else {}

    def put(self) -> Mapping[str, Any]:
        """Give a loaded tree to the system; return the extra state saved with it."""
        training, progress = self.training, self.tree["progress"]
        for given, key, at in ((self.model, "model", 0), (self.optimizer, "optimizer", 1)):
            loaded: Mapping[str, Any] = self.tree[key]
            for name in given:
                value = loaded.get(training.name_of(name, at))
                # Of blocks the tensors that torch gave are filled already.
                if value is not None and not isinstance(value, Blocks):
                    given[name] = value
        set_state_dict(
            training.model,
            training.optimizer,
            model_state_dict=self.model,
            optim_state_dict=self.optimizer,
            options=_FLAT,
        )
        put_progress(training, progress["scaler"], self.tree["rng"].get(str(training.rank), {}))
        extra: Mapping[str, Any] = json.loads(progress["extra"])
        return extra


def own_name(name: str) -> str:
    """``name`` from before units were wrapped."""
    return plain(name.replace(_WRAPPED, ""))


def about(training: Training) -> dict[str, Any]:
    """Metadata: the saving system, names of buffers and further names of tied parameters."""
    buffers = [own_name(n) for module in training.inner for n, _ in module.named_buffers()]
    first: dict[int, str] = {}
    aliases = {}
    for module in training.inner:
        for name, parameter in module.named_parameters(remove_duplicate=False):
            kept = first.setdefault(id(parameter), own_name(name))
            if kept != own_name(name):
                aliases[own_name(name)] = kept
    return {**training.about, "buffers": buffers, "aliases": aliases}


def draws(training: Training) -> dict[str, Tensor]:
    """States of generators by their names."""
    states = {name: generator.get_state() for name, generator in training.generators.items()}
    return {"torch": torch.get_rng_state(), **states}


def put_progress(
    training: Training, scaler: Mapping[str, Any], states: Mapping[str, Tensor]
) -> None:
    """Restore loss scale and generators; ``states`` are this rank's, empty if other ranks saved."""
    if scaler and training.scaler.is_enabled():
        training.scaler.load_state_dict(dict(scaler))
    if states:
        torch.set_rng_state(states["torch"])
    for name, generator in training.generators.items() if states else ():
        generator.set_state(states[name])
