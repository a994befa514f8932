"""Kinds of oracle: how each is trained, why there is none, and its statements besides numbers.

    plain        the same training in one process
    emulated     the same, but the sum over coordinates loses what the system says that it loses
    trajectory   every data coordinate by itself, until they meet
    replay       the updates that the system reports, once more

The system names its kind (``Capabilities.oracle``, ``emulates``).  Where ranks compute on GPUs all
are trained in a process of their own (``apart.py``).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from shardproof.case import Case
from shardproof.contract import Event, Implementation, Meeting
from shardproof.oracle import apart, members, replay, training, trajectories
from shardproof.oracle.asked import Emulator, Meets, follows_of
from shardproof.oracle.rounded import Rounded
from shardproof.oracle.truth import Truth
from shardproof.registry.declaration import Declaration
from shardproof.registry.follows import Follows
from shardproof.workloads import Workload


@dataclass(frozen=True)
class Ran:
    """The requests of an oracle to the run: how many workers had data, and the reports of ranks."""

    workers: int
    events: Sequence[Event]


@dataclass(frozen=True)
class Oracle(ABC):
    """The oracle of one case."""

    case: Case
    system: type[Implementation]
    declaration: Declaration
    workload: Workload

    @property
    def missing_because(self) -> str:
        """Why there is none; empty: there is one."""
        return ""

    @property
    def follows(self) -> Follows:
        """The rules of further state."""
        return follows_of(self.case, self.declaration)

    @property
    def meeting(self) -> Meeting | None:
        """When and how coordinates that train alone meet; ``None``: they do not train alone."""
        return None

    @property
    def rounded(self) -> Callable[[], Truth] | None:
        """Trains once more, from gradients that are off by a round-off; ``None``: no need."""
        return None

    def trained(self, cache: Path, ran: Ran) -> Truth:
        """The numbers to compare with; those that several cases share lie in ``cache``.

        :raises BrokenContract: what the system answers, which takes part, is not as asked.
        """
        return apart.trained(self.case, partial(self._train, cache, ran))

    @abstractmethod
    def _train(self, cache: Path, ran: Ran) -> Truth: ...


class Plain(Oracle):
    """The same training in one process; cached, since it depends on no code of the system."""

    @property
    def missing_because(self) -> str:
        """The part that one device cannot compute under the policy of precision."""
        return training.no_oracle_because(self.workload, self.case.precision)

    def _train(self, cache: Path, ran: Ran) -> Truth:
        case, declared, rules = self.case, self.declaration, self.follows
        if rules.moved(name for name, _ in self.workload.skeleton.named_buffers()):
            # By code of the system's, maybe: shared with nobody.
            changing = members.of(case, declared.batch) if case.changes_members else ()
            way = training.Way(case.precision, changing, follows=rules)
            size = case.data_coordinates, case.steps
            return training.train(self.workload, case.optimizer, *size, declared.buffers, way)
        given = declared.buffers, cache, declared.batch
        return apart.load_or_train(case, *given, rules.fed_back)


class Emulated(Oracle):
    """As :class:`Plain`, but the system's emulator takes the place of the sum over coordinates."""

    @property
    def rounded(self) -> Callable[[], Truth] | None:
        """By the same emulator."""
        train = partial(self._train_by, Rounded(Emulator(self.system, self.case.options)))
        return partial(apart.trained, self.case, train)

    def _train(self, cache: Path, ran: Ran) -> Truth:
        return self._train_by(Emulator(self.system, self.case.options))

    def _train_by(self, fold: training.Fold) -> Truth:
        case, declared = self.case, self.declaration
        changing = members.of(case, declared.batch) if case.changes_members else ()
        by_round = declared.emulates == "round"
        way = training.Way({}, changing, fold, by_round, self.follows)
        size = case.data_coordinates, case.steps
        return training.train(self.workload, case.optimizer, *size, declared.buffers, way)


class Trajectory(Oracle):
    """Coordinates train alone and meet as the system says."""

    @property
    def meeting(self) -> Meeting:
        """As the system answers, a fresh one each time."""
        return Meets(self.system, self.case.options)

    def _train(self, cache: Path, ran: Ran) -> Truth:
        size = self.case.data_coordinates, self.case.steps
        return trajectories.train_apart(self.workload, self.case.optimizer, *size, self.meeting)


class Replay(Oracle):
    """Updates repeated in the order in which the system says that it made them."""

    def _train(self, cache: Path, ran: Ran) -> Truth:
        fed = replay.fed(self.case.options, self.case.steps, ran.workers)
        by_worker = self.declaration.optimizer_state == "by_worker"
        return replay.truth(self.workload, self.case.optimizer, fed, ran.events, by_worker)


_BY_NAME: dict[str, type[Oracle]] = {"plain": Plain, "emulated": Emulated, "replay": Replay}


def oracle_of(
    case: Case, system: type[Implementation], declaration: Declaration, workload: Workload
) -> Oracle:
    """The oracle that ``system`` declares."""
    kind = Trajectory if declaration.trains_alone else _BY_NAME[declaration.oracle]
    return kind(case, system, declaration, workload)
