"""What a kind of workload says of its cases: an object without state.

This module imports nothing that runs a case: scenarios and commands ask kinds as well.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from shardproof.case import Case, Lane, WorkloadSpec
from shardproof.cases.kinds.work import Leg, Work
from shardproof.contract import Implementation
from shardproof.contract import Untrained as UntrainedSystem
from shardproof.registry.declaration import Declaration
from shardproof.schedules import Schedule
from shardproof.workloads.knobs import Params

if TYPE_CHECKING:
    from shardproof.evidence.account import Account

#: Pipeline schedules by micro-batches of a window.
Schedules = Mapping[int, Schedule]


class Kind(ABC):
    """A kind of workload."""

    #: Whether its cases train a model.
    trains: ClassVar[bool] = True
    #: Whether its cases test a backend itself, so that they are not moved to a GPU.
    tests_backend: ClassVar[bool] = False

    @abstractmethod
    def check(self, spec: WorkloadSpec, lane: Lane = "fp64") -> None:
        """Raise :class:`~shardproof.workloads.WorkloadError` unless ``spec`` can be made."""

    @abstractmethod
    def excludes(self, declaration: Declaration, case: Case, missing: str) -> str:
        """Why a system cannot run ``case``, ``missing`` on this machine included; empty: it can."""

    def announce(self, account: Account, system: type[Implementation]) -> Schedules | None:
        """The schedules that ``system`` announces; ``None``: ``account`` says why it cannot run."""
        return {}

    @abstractmethod
    def work(
        self, account: Account, system: type[Implementation], schedules: Schedules
    ) -> Work | None:
        """What is done in the case; ``None``: ``account`` says why nothing can be."""

    def parts_ranks(self, case: Case) -> bool:
        """Whether the ranks of ``case`` end in a mismatch on purpose and cannot be used again."""
        return False


class Untrained(Kind):
    """A kind that trains no model: it calls systems of one kind, and has one check.

    ``name``: of the workload; ``system``: the class of systems; ``only_check``: judges its cases
    alone, but for ``also``; ``lacks``: why another system has no such case.
    """

    trains = False
    name: ClassVar[str]
    system: ClassVar[type[UntrainedSystem]]
    only_check: ClassVar[str]
    also: ClassVar[frozenset[str]] = frozenset()
    lacks: ClassVar[str]

    @abstractmethod
    def resolve(self, spec: WorkloadSpec) -> Params:
        """All knobs of ``spec``.

        :raises WorkloadError: an unknown knob, or a value that does not fit.
        """

    @abstractmethod
    def legs(self, case: Case, system: Any) -> Sequence[Leg] | str:
        """What ranks do, leg by leg; or why ``system`` has nothing to do in ``case``."""

    def declines(self, declaration: Declaration, case: Case) -> str:
        """What ``case`` asks that a system of this kind declines; empty: nothing."""
        return ""

    def check(self, spec: WorkloadSpec, lane: Lane = "fp64") -> None:
        """Resolve the knobs."""
        self.resolve(spec)

    def excludes(self, declaration: Declaration, case: Case, missing: str) -> str:
        """Because of the place, the kind of system or what it declines."""
        place = case.backend, case.dtype, case.world, case.mesh
        if reason := declaration.excludes(*place, missing):
            return reason
        if declaration.strategy != self.system.strategy:
            return self.lacks if declaration.not_trained else f"trains models and {self.lacks}"
        return self.declines(declaration, case)

    def work(
        self, account: Account, system: type[Implementation], schedules: Schedules
    ) -> Work | None:
        """The legs of the run."""
        from shardproof.cases.kinds.untrained import Legs

        legs = self.legs(account.case, system)
        if isinstance(legs, str):
            account.cannot_fit = legs
            return None
        return Legs(account.case, legs)
