"""The interface of a kind of workload: an object without state.

This module imports nothing that runs a case: scenarios and commands ask kinds as well.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from shardproof.case import Case, Lane, WorkloadSpec
from shardproof.contract import Implementation
from shardproof.registry.declaration import Declaration
from shardproof.schedules import Schedule
from shardproof.workloads.knobs import Params

if TYPE_CHECKING:
    from shardproof.cases.launcher import Work
    from shardproof.evidence.account import Account
    from shardproof.evidence.records import RankRecord
    from shardproof.launch.rank_process import Program

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
        """The program of the case; ``None``: ``account`` gives the reason why there is none."""

    def parts_ranks(self, case: Case) -> bool:
        """Whether the ranks of ``case`` end in a mismatch on purpose and cannot be used again."""
        return False


#: The world of a leg, and its program, made from the records of the leg before (the first: none).
Leg = tuple[int, "Callable[[Sequence[RankRecord]], Program]"]


@dataclass(frozen=True)
class UntrainedKind(Kind):
    """A kind that trains no model: it calls systems of one kind, and has one check.

    ``name``: of the workload; ``system``: a subclass of :class:`~shardproof.contract.Untrained`;
    ``only_check``: judges its cases alone, but for ``also``; ``lacks``: why another system has no
    such case; ``resolve``: all knobs of a workload; ``legs``: what ranks do, leg by leg, or why the
    system has nothing to do; ``declines``: what a case asks and the system says it does not do.
    """

    name: str
    system: type[Any]
    only_check: str
    lacks: str
    resolve: Callable[[WorkloadSpec], Params]
    legs: Callable[[Case, Any], Sequence[Leg] | str]
    declines: Callable[[Declaration, Case], str] = lambda declaration, case: ""
    also: frozenset[str] = frozenset()
    trains = False

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
        assert account.declaration is not None
        return Legs(account.case, account.declaration, legs)
