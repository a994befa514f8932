"""Wrap policies: the modules that are sharded together, and the parameters of each unit.

A *unit* is a module whose parameters are gathered together just before they are used and freed
together right after.  Large units make few, long calls; small units hold less memory at a time.

    wrap: {units: [blocks.0, blocks.1]}     these modules, by name
    wrap: {module_class: [Block]}           every module of one of these classes
    wrap: {minimum_parameters: 10000}       modules that hold at least so many elements which no
                                            unit inside them holds, the innermost first
    nothing                                 the model's repeated blocks

The whole module is the *root* unit.  A parameter belongs to the innermost unit that holds every
module it is registered in; what no other unit holds, and what is tied over units, is the root's.
The policies are those of torch's FSDP (``torch.distributed.fsdp.wrap``).
"""

from __future__ import annotations

import difflib
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from torch import nn

from shardproof.contract import Refused
from shardproof.impls.reference.engine.options import at_least

#: They only hold others and are never called, so nothing could be gathered before their forward.
_CONTAINERS = (nn.ModuleList, nn.ModuleDict)
#: Traits whose branch some ranks take in a micro-batch and others do not.
_BRANCHES = (
    "conditional_by_rank",
    "conditional_by_micro_batch",
    "conditional_last_micro_batch",
)
#: Names that a refusal lists at most.
_SHOWN = 12


@dataclass(frozen=True)
class Wrap:
    """A wrap policy: at most one of its fields."""

    units: tuple[str, ...] | None = None
    module_class: tuple[str, ...] | None = None
    minimum_parameters: int | None = None

    def __post_init__(self) -> None:
        given = [name for name, value in vars(self).items() if value is not None]
        if len(given) > 1:
            raise Refused(f"option 'wrap' accepts one policy, not {' and '.join(given)}")
        if self.minimum_parameters is not None:
            at_least("wrap.minimum_parameters", self.minimum_parameters, 1)

    @property
    def declines(self) -> dict[str, str]:
        """Traits for which a unit of this policy may be gathered by only some ranks."""
        if self.minimum_parameters is None:
            return {}
        reason = "wrap.minimum_parameters can make a unit of a branch that other ranks do not run"
        return dict.fromkeys(_BRANCHES, reason)


@dataclass(frozen=True)
class UnitPlan:
    """A unit: its module's dotted name (``""``: the root) and its parameters' names."""

    name: str
    parameters: tuple[str, ...]


def plan_units(module: nn.Module, wrap: Wrap, blocks: Sequence[str]) -> list[UnitPlan]:
    """The units of ``module``, the root first, then in the order of registration.

    ``blocks`` are the units where ``wrap`` says nothing.  Units without parameters are left out
    (but for the root), each parameter belongs to one unit.
    Raises :class:`Refused` for a policy that matches nothing, with what it could name.
    """
    chosen = _chosen(module, wrap, blocks)
    members: dict[str, list[str]] = {name: [] for name in ("", *chosen)}
    for name, owners in _owners(module).items():
        # Tied over units: one gather must serve both, so it belongs to the unit around them all.
        homes = {_innermost(owner, chosen) for owner in owners}
        members[homes.pop() if len(homes) == 1 else ""].append(name)
    return [UnitPlan(name, tuple(held)) for name, held in members.items() if held or not name]


def _chosen(module: nn.Module, wrap: Wrap, blocks: Sequence[str]) -> list[str]:
    callable_ = {n: m for n, m in module.named_modules() if n and not isinstance(m, _CONTAINERS)}
    classes = {type(m).__name__ for m in callable_.values()}
    for option, given, valid in (
        ("units", wrap.units, callable_),
        ("module_class", wrap.module_class, classes),
    ):
        if given == ():
            raise Refused(f"option 'wrap.{option}' = [] matches no module; {_valid(valid)}")
    if wrap.module_class is not None:
        for name in wrap.module_class:
            _check("module_class", name, classes, "a class of this model")
        return [n for n, m in callable_.items() if type(m).__name__ in wrap.module_class]
    if wrap.minimum_parameters is not None:
        return _of_size(module, list(callable_), wrap.minimum_parameters)
    wanted = blocks if wrap.units is None else wrap.units
    for name in wanted:
        _check("units", name, callable_, "a module of this model that is called")
    return [name for name in callable_ if name in set(wanted)]


def _of_size(module: nn.Module, names: Sequence[str], least: int) -> list[str]:
    sizes = {name: p.numel() for name, p in module.named_parameters()}
    free, chosen = _owners(module), set()
    # The innermost first: what a unit inside has taken does not count for those around it.
    for name in sorted(names, key=lambda n: -n.count(".")):
        inside = [p for p, owners in free.items() if all(_within(o, name) for o in owners)]
        if sum(sizes[p] for p in inside) >= least:
            chosen.add(name)
            for parameter in inside:
                del free[parameter]
    if not chosen:
        largest = max(
            (
                sum(sizes[p] for p, o in free.items() if all(_within(x, n) for x in o))
                for n in names
            ),
            default=0,
        )
        raise Refused(
            f"option 'wrap.minimum_parameters' = {least} matches no module: the largest "
            f"possible unit has {largest} parameters; set a value of at most {largest}"
        )
    return [name for name in names if name in chosen]


def _check(option: str, name: str, valid: Collection[str], what: str) -> None:
    if name not in valid:
        near = difflib.get_close_matches(name, valid, n=1, cutoff=0.5)
        hint = f"did you mean {near[0]!r}? " if near else ""
        raise Refused(f"option 'wrap.{option}': {name!r} is not {what}; {hint}{_valid(valid)}")


def _valid(valid: Collection[str]) -> str:
    names = sorted(valid)
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return f"valid: {', '.join(names[:_SHOWN])}{more}"


def _owners(module: nn.Module) -> dict[str, list[str]]:
    """Parameter (tied ones once, by their first name) -> the modules that register it."""
    names: dict[int, str] = {}
    owners: dict[str, list[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        first = names.setdefault(id(parameter), name)
        owners.setdefault(first, []).append(name.rpartition(".")[0])
    return owners


def _innermost(owner: str, names: Sequence[str]) -> str:
    return max((name for name in names if _within(owner, name)), key=len, default="")


def _within(owner: str, name: str) -> bool:
    return owner == name or owner.startswith(f"{name}.")
