"""The parameters that an optimizer updates, with their names, and which ranks hold the same.

An optimizer often knows tensors, not names, so the modules of the process are looked through for
them, again when it holds other tensors than before; what has no name there is named by its place in
the optimizer.  Tensors are known weakly: nothing of the script lives longer for being watched.
Ranks that must hold the same are the *replica set* of a parameter::

    below DistributedDataParallel     the ranks of its group (buffers as well)
    DTensor                           the ranks that its mesh replicates it over
    a plain parameter of a module     all ranks, or those that the user names
    below FullyShardedDataParallel, of DeepSpeed's stage 3, a flat parameter     sharded: none
    of no module                      not known: none, unless the user names replicas

Nothing is guessed beyond that: what has no replica set is listed with the reason.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

#: Wrappers put these before names.
_PREFIXES = ("module.", "_orig_mod.", "_fsdp_wrapped_module.")
SHARDED = "sharded: each rank has a part of it"


@dataclass(frozen=True)
class Tracked:
    """A parameter that is compared over ``replicas``, global ranks in ascending order."""

    name: str
    reference: weakref.ref[Tensor]
    shape: tuple[int, ...]
    replicas: tuple[int, ...]
    group: int
    #: Whether the replica set is only what such scripts usually mean: nothing says so.
    assumed: bool = False

    @property
    def described(self) -> tuple[str, tuple[int, ...], tuple[int, ...], int]:
        """Equal for a tensor that is put in the place of this one."""
        return self.name, self.shape, self.replicas, self.group

    @property
    def parameter(self) -> Tensor:
        """The tensor; to be asked for while its optimizer is at hand."""
        found = self.reference()
        assert found is not None, self.name
        return found


@dataclass
class Found:
    """All parameters of one optimizer."""

    tracked: list[Tracked] = field(default_factory=list)
    #: Name -> why it is not compared.
    not_compared: dict[str, str] = field(default_factory=dict)
    #: Parameters of the same models that this optimizer does not hold.
    outside: dict[str, weakref.ref[Tensor]] = field(default_factory=dict)
    #: Buffers below wrappers that say which ranks hold the same.
    tables: list[Tracked] = field(default_factory=list)
    #: Buffers of these models.
    buffers: list[weakref.ref[Tensor]] = field(default_factory=list)


class Held:
    """Which tensors an optimizer held when it was looked at, in order."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._references = [weakref.ref(p) for p in _parameters(optimizer)]

    def are_of(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether ``optimizer`` holds the same ones."""
        held = [reference() for reference in self._references]
        return [*map(id, held)] == [*map(id, _parameters(optimizer))]


def _parameters(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    return [p for group in optimizer.param_groups for p in group["params"]]


def find(
    optimizer: torch.optim.Optimizer, rank: int, world: int, named: Sequence[Sequence[int]] | None
) -> Found:
    """Look for the parameters of ``optimizer``; ``named``: replica sets that the user gives."""
    wanted = {id(p): p for p in _parameters(optimizer)}
    modules = _modules()
    places = {key: place for place, key in enumerate(wanted)}

    def place(root: nn.Module) -> int:
        """Of its first parameter in the optimizer, whose order is the same on every rank."""
        return min((places.get(id(p), len(places)) for p in root.parameters()), default=len(places))

    inner = {id(child) for module in modules for child in module._modules.values()}
    outer = [module for module in modules if id(module) not in inner]
    roots = sorted((r for r in outer if place(r) < len(places)), key=place)
    names = _names(roots)
    reasons, replicas = _of_wrappers(modules)
    found = Found()
    users = next((tuple(sorted(ranks)) for ranks in named or () if rank in ranks), None)
    for number, group in enumerate(optimizer.param_groups):
        for index, parameter in enumerate(group["params"]):
            key = id(parameter)
            given = group.get("param_names") or ()  # as optimizers keep of named_parameters()
            placed = given[index] if index < len(given) else f"parameter {index} of group {number}"
            name = names.get(key, placed)
            why, ranks = reasons.get(key, ""), replicas.get(key)
            assumed = False
            if not why and ranks is None:
                why, ranks = _alone(parameter, key in names, world, named, users)
                assumed = named is None and not hasattr(parameter, "placements")
            if why or ranks is None or len(ranks) < 2:
                found.not_compared[name] = why or "no other rank holds it"
            else:
                reference, shape = weakref.ref(parameter), tuple(parameter.shape)
                found.tracked.append(Tracked(name, reference, shape, ranks, number, assumed))
    seen = {*wanted}
    for root in roots:
        for name, parameter in root.named_parameters():
            if id(parameter) not in seen:
                seen.add(id(parameter))
                found.outside[_short(name)] = weakref.ref(parameter)
        found.buffers += [weakref.ref(buffer) for buffer in root.buffers()]
        found.tables += _tables(root, replicas)
    return found


def _tables(root: nn.Module, replicas: Mapping[int, tuple[int, ...]]) -> list[Tracked]:
    """Buffers of numbers; integers are often each rank's own: counters, states of generators."""
    return [
        Tracked(_short(name), weakref.ref(buffer), tuple(buffer.shape), replicas[id(buffer)], 0)
        for name, buffer in root.named_buffers()
        if len(replicas.get(id(buffer), ())) > 1
        and (buffer.is_floating_point() or buffer.is_complex() or buffer.dtype is torch.bool)
    ]


def _alone(
    parameter: Tensor,
    has_name: bool,
    world: int,
    named: Sequence[Sequence[int]] | None,
    users: tuple[int, ...] | None,
) -> tuple[str, tuple[int, ...] | None]:
    """Why a parameter that no wrapper holds is not compared, or its replica set."""
    if parameter.is_meta:
        return "on the meta device", None
    if parameter.layout is not torch.strided:
        return f"its layout is {parameter.layout}", None
    if hasattr(parameter, "placements"):
        return _of_dtensor(parameter)
    if getattr(parameter, "_is_flat_param", False) or hasattr(parameter, "ds_id"):
        return SHARDED, None
    if named is not None:
        return ("", users) if users else ("this rank is in no set of --replicas", None)
    if not has_name:
        return "in no module: name the ranks that hold it by --replicas", None
    return "", tuple(range(world))


def _of_dtensor(parameter: Any) -> tuple[str, tuple[int, ...] | None]:
    coordinate = parameter.device_mesh.get_coordinate()
    if coordinate is None:
        return "this rank is not on its mesh", None
    if any(place.is_partial() for place in parameter.placements):
        return "partial: each rank has a summand of it", None
    same: tuple[Any, ...] = tuple(
        slice(None) if place.is_replicate() else at
        for place, at in zip(parameter.placements, coordinate, strict=True)
    )
    ranks = tuple(sorted(parameter.device_mesh.mesh[same].flatten().tolist()))
    return (SHARDED, None) if len(ranks) < 2 else ("", ranks)


def local(tensor: Tensor) -> Tensor:
    """The part of ``tensor`` that this rank holds."""
    kept = getattr(tensor, "_local_tensor", tensor)  # no graph, no communication
    assert isinstance(kept, Tensor)
    return kept


def is_sparse(one: Tracked) -> bool:
    """Whether its gradient has no plain elements."""
    gradient = one.parameter.grad
    return gradient is not None and local(gradient).layout is not torch.strided


def _modules() -> list[nn.Module]:
    # `type`, because asking some objects for their class runs code of theirs.
    return [thing for thing in gc.get_objects() if issubclass(type(thing), nn.Module)]


def _names(roots: Sequence[nn.Module]) -> dict[int, str]:
    """Identity -> the shortest name; of several models with the model's number before it."""
    names: dict[int, str] = {}
    for number, root in enumerate(roots):
        for name, parameter in root.named_parameters(remove_duplicate=False):
            full = f"model {number}: {_short(name)}" if len(roots) > 1 else _short(name)
            other = names.get(id(parameter))
            if other is None or (len(full), full) < (len(other), other):
                names[id(parameter)] = full
    return names


def _short(name: str) -> str:
    while name.startswith(_PREFIXES):
        name = name.partition(".")[2]
    return name.replace("._orig_mod.", ".").replace("._fsdp_wrapped_module.", ".")


def _of_wrappers(
    modules: Sequence[nn.Module],
) -> tuple[dict[int, str], dict[int, tuple[int, ...]]]:
    """Identity -> why it is not compared, and identity -> replica set, below known wrappers."""
    reasons: dict[int, str] = {}
    replicas: dict[int, tuple[int, ...]] = {}
    for module in modules:
        kinds = {kind.__name__ for kind in type(module).__mro__}
        if "FullyShardedDataParallel" in kinds:
            strategy = str(getattr(module, "sharding_strategy", ""))
            if "NO_SHARD" not in strategy:
                reasons |= {id(p): SHARDED for p in module.parameters()}
        elif "DistributedDataParallel" in kinds:
            ranks = _ranks(module.process_group)
            if ranks is None:
                continue
            ignored = {*getattr(module, "parameters_to_ignore", ())}
            for name, tensor in chain(module.named_parameters(), module.named_buffers()):
                if name.removeprefix("module.") in ignored:
                    reasons[id(tensor)] = "DDP ignores it on request"
                else:
                    replicas[id(tensor)] = ranks
    return reasons, replicas


def _ranks(group: Any) -> tuple[int, ...] | None:
    """None: the group was destroyed; a wrapper that still has it reduces nothing any more."""
    try:
        return tuple(sorted(dist.get_process_group_ranks(group)))
    except KeyError:
        return None
