"""The names that scenarios may use: what is installed, looked up late because it imports torch."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from functools import cache

from suite.contract import GroupSpec


@dataclass(frozen=True)
class TraitUse:
    """Where a trait means something: workloads that can carry it, smallest ``micro_batches``."""

    workloads: tuple[str, ...] = ()
    micro_batches: int = 1


@dataclass(frozen=True)
class Vocabulary:
    """Valid names.  ``groups`` gives the parameter groups that a list of traits suggests."""

    implementations: Collection[str]
    backends: Collection[str]
    workloads: Collection[str]
    traits: Mapping[str, TraitUse]
    checks: Collection[str]
    groups: Callable[[Iterable[str]], tuple[GroupSpec, ...]] = lambda traits: ()


@cache
def installed() -> Vocabulary:
    """What this installation has."""
    from suite import registry
    from suite.backends import BACKENDS
    from suite.checks import CHECKS
    from suite.workloads import TRAITS, WORKLOADS
    from suite.workloads.traits import suggested_groups

    return Vocabulary(
        implementations=tuple(registry.names()),
        backends=tuple(BACKENDS),
        workloads=tuple(WORKLOADS),
        traits={
            name: TraitUse(trait.applies_to, trait.micro_batches) for name, trait in TRAITS.items()
        },
        checks=tuple(CHECKS),
        groups=suggested_groups,
    )
