"""Names and values that a scenario may give a workload, checked before anything is built."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from shardproof.workloads.traits import TRAITS

if TYPE_CHECKING:
    from shardproof.case import WorkloadSpec

T = TypeVar("T")

#: Knob -> value: an int, float, bool or word that its :class:`Knob` has checked.
Params = Mapping[str, Any]


#: Knobs that ask of a system what a trait asks: (knob, value) -> the trait that it may decline.
LIKE_TRAITS: Mapping[tuple[str, Any], str] = {("first_step", "head"): "conditional_late_step"}


class WorkloadError(ValueError):
    """A workload, knob or trait that does not exist or does not fit; says what would."""


@dataclass(frozen=True)
class Knob:
    """A model parameter that a scenario may set: its default and smallest value, or its choices."""

    default: Any
    minimum: int = 1
    choices: tuple[Any, ...] = ()

    def check(self, name: str, value: Any) -> None:
        """Raise :class:`WorkloadError` unless ``value`` fits."""
        if self.choices:
            if value not in self.choices or type(value) is not type(self.default):
                allowed = ", ".join(repr(choice) for choice in self.choices)
                raise WorkloadError(f"{name} = {value!r}: must be one of {allowed}")
        elif type(value) is not int or value < self.minimum:
            raise WorkloadError(f"{name} = {value!r}: must be an integer >= {self.minimum}")


def lookup(name: str, known: Mapping[str, T], what: str) -> T:
    """``known[name]``, or a :class:`WorkloadError` that lists or suggests what there is."""
    if name in known:
        return known[name]
    near = difflib.get_close_matches(name, known, n=1)
    hint = f"did you mean {near[0]!r}? " if near else ""
    raise WorkloadError(f"unknown {what} {name!r}: {hint}known: {', '.join(known)}")


def values_of(workload: str, known: Mapping[str, Knob], given: Params) -> dict[str, Any]:
    """The value of every knob of ``workload``, as ``given`` or by default.

    :raises WorkloadError: an unknown knob, or a value that does not fit.
    """
    values = {name: knob.default for name, knob in known.items()}
    for name, value in given.items():
        knob = lookup(name, known, f"parameter of {workload}")
        knob.check(f"{workload}: {name}", value)
        values[name] = value
    return values


def untrained_values(spec: WorkloadSpec, known: Mapping[str, Knob]) -> dict[str, Any]:
    """As :func:`values_of`, of a workload that trains no model."""
    if spec.traits:
        raise WorkloadError(f"{spec.name} takes no traits: it trains no model; remove the traits")
    return values_of(spec.name, known, spec.params)


def check_traits(
    workload: str,
    carriers: Callable[[str], Collection[str]],
    traits: Iterable[str],
    micro_batches: int,
) -> None:
    """Raise :class:`WorkloadError` for a trait that is unknown or does not fit.

    ``carriers`` tells the workloads that can carry a trait.
    """
    for name in traits:
        trait, able = lookup(name, TRAITS, "trait"), carriers(name)
        if workload not in able:
            what = f"does not apply to {workload}, only to {', '.join(able)}"
            raise WorkloadError(f"trait {name!r} {what}")
        if micro_batches < trait.micro_batches:
            what = f"needs micro_batches >= {trait.micro_batches}, not {micro_batches}"
            raise WorkloadError(f"trait {name!r} {what}")
