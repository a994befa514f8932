"""The search: formulas rank all candidates, and the best are simulated until enough of them fit."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException

from shardproof.contract import Refused
from shardproof.costs.shapes import BatchSize
from shardproof.simulate import asked
from shardproof.simulate.machines import Machine
from shardproof.simulate.plan import folded
from shardproof.simulate.plan.candidates import Candidate, Job, Rejected, candidates, combined
from shardproof.simulate.plan.formulas import Estimated, Formulas
from shardproof.simulate.sources import ShapeSource

#: Values of tensors steer the program.
_UNABLE = (DataDependentOutputException, DynamicOutputShapeException)
#: Candidates that are simulated for each that is to fit, at most, and at least for all of them.
_TRIES, _LEAST_TRIES = 2, 6
#: Simulations of one system and mesh that do not fit before another one is tried.
_VARIANTS = 2


@dataclass(frozen=True)
class Plan:
    """A candidate with its estimate; ``peaks``: of its simulated ranks, empty without them.

    A peak is what a rank holds, or a bound from above by laws that the simulations follow.
    """

    candidate: Candidate
    estimated: Estimated
    peaks: Sequence[folded.Peak] = ()

    @property
    def bytes(self) -> int:
        """Most bytes of a simulated rank, or a bound from above.

        :raises ValueError: none was simulated.
        """
        if not self.peaks:
            raise ValueError("this plan was not simulated")
        return max(peak.bytes for peak in self.peaks)

    def fits(self, memory: int) -> bool:
        """Whether simulated ranks fit; of a plan that was not simulated nothing is said."""
        return bool(self.peaks) and self.bytes <= memory


@dataclass
class Found:
    """The result: ``plans`` that fit, the fastest first; ``estimated``: those without
    a simulation; ``rejected``: all others; ``looked_at``: how many candidates there were;
    ``tried``: how many simulations were begun, ``simulated``: how many of them ended well.
    """

    job: Job
    memory: int
    plans: list[Plan] = field(default_factory=list)
    estimated: list[Plan] = field(default_factory=list)
    rejected: Rejected = field(default_factory=Rejected)
    looked_at: int = 0
    tried: int = 0
    simulated: int = 0


def search(
    job: Job,
    memory: int,
    machine: Machine,
    show: int,
    began: Callable[[int, str], None] = lambda done, what: None,
    is_whole: bool = False,
) -> Found:
    """The ``show`` fastest plans that fit in ``memory`` bytes, of all systems and meshes.

    ``began`` hears how many were found, and what begins.
    """
    found = Found(job, memory)
    began(0, "combining strategies, meshes and options")
    plans = ranked(job, machine, found.rejected)
    found.looked_at = len(plans) + len(found.rejected)
    large = [plan for plan in plans if plan.estimated.bytes > memory]
    for plan in large:
        size = f"{plan.estimated.bytes / 1e9:,.1f} GB"
        found.rejected.add("by the formulas a rank needs more memory", plan.candidate, size)
    _Simulating(found, machine, show, began, is_whole).run(
        [plan for plan in plans if plan.estimated.bytes <= memory]
    )
    return found


def ranked(job: Job, machine: Machine, rejected: Rejected) -> list[Plan]:
    """All candidates with their estimates, the fastest first; those that cannot be are noted."""
    formulas = Formulas(job, machine)
    plans = [Plan(one, formulas.estimated(one)) for one in candidates(job, rejected)]
    return sorted(plans, key=lambda plan: plan.estimated.seconds)


class _Simulating:
    """The candidates that are simulated, one after the other."""

    def __init__(
        self,
        found: Found,
        machine: Machine,
        show: int,
        began: Callable[[int, str], None],
        is_whole: bool,
    ) -> None:
        self.found, self.show, self.began, self.is_whole = found, show, began, is_whole
        self._tries: dict[tuple[object, ...], int] = {}
        self._done = set[tuple[object, ...]]()
        #: Kind of plan -> why it cannot be simulated.
        self._cannot: dict[tuple[object, ...], str] = {}
        #: Options -> why the implementation refuses them.
        self._refused: dict[tuple[str, ...], str] = {}
        #: Programs whose few layers do not tell of many -> why.
        self._unfolded: dict[tuple[object, ...], str] = {}
        #: Settings of recomputation -> how many times its estimate the last simulation needed.
        self._ratio: dict[object, float] = {}

    def run(self, plans: Sequence[Plan]) -> None:
        """Simulate ``plans`` in this order until enough of them fit."""
        found, most = self.found, max(_LEAST_TRIES, _TRIES * self.show)
        for plan in plans:
            one = plan.candidate
            if reason := _only_estimated(one) or self._cannot.get(_kind(one)):
                found.estimated.append(plan)
                found.rejected.add(reason, one, f"{plan.estimated.bytes / 1e9:,.1f} GB estimated")
            elif reason := self._refused.get(_options(one)) or self._unfolded.get(_program(one)):
                found.rejected.add(reason, one)
            elif one.group in self._done:
                found.rejected.add("a faster plan of the same system and mesh fits", one)
            elif len(found.plans) == self.show or found.tried >= most:
                found.rejected.add("slower than the plans that are shown, and not simulated", one)
            elif self._tries.get(one.group, 0) >= _VARIANTS:
                found.rejected.add("not simulated: faster plans of its mesh do not fit", one)
            elif (size := plan.estimated.bytes * self._ratio.get(_alike(one), 1)) > found.memory:
                reason = "a simulated plan alike needs more than its formula, by which this is over"
                found.rejected.add(reason, one, f"{size / 1e9:,.1f} GB")
            else:
                self._simulate(plan)

    def _simulate(self, plan: Plan) -> None:
        one, found = plan.candidate, self.found
        found.tried += 1

        def began(what: str) -> None:
            self.began(len(found.plans), f"{one.shown()}: {what}")

        try:
            with warnings.catch_warnings():
                # Of torch, at every rank: not about what the reader asked.
                warnings.simplefilter("ignore")
                peaks = simulated(found.job, one, began, self.is_whole, found.memory)
        except Refused as error:
            # Before any layer runs, and of all such candidates.
            self._refused[_options(one)] = reason = f"{one.implementation} refuses: {error}"
            found.rejected.add(reason, one)
            return
        except folded.TooLarge as error:
            found.simulated += 1
            self._too_large(plan, error.bytes)
            return
        except folded.DoesNotFold as error:
            self._unfolded[_program(one)] = reason = f"not simulated: {error}"
            found.rejected.add(reason, one)
            return
        except (*_UNABLE, AttributeError, RuntimeError, OSError) as error:
            # Not a finding about memory: the same kind ends in the same way on every mesh.
            why = (str(error).splitlines() or [type(error).__name__])[0]
            reason = f"cannot be simulated, so it is only estimated ({why:.60})"
            self._cannot[_kind(one)] = reason
            found.estimated.append(plan)
            found.rejected.add(reason, one)
            return
        found.simulated += 1
        plan = replace(plan, peaks=peaks)
        self._ratio[_alike(one)] = plan.bytes / plan.estimated.bytes
        if plan.fits(found.memory):
            found.plans.append(plan)
            self._done.add(one.group)
        else:
            self._too_large(plan, plan.bytes)

    def _too_large(self, plan: Plan, needed: int) -> None:
        """Note that a rank of ``plan`` needs too much: so many bytes, or about so many."""
        one = plan.candidate
        self._ratio[_alike(one)] = needed / plan.estimated.bytes
        self._tries[one.group] = self._tries.get(one.group, 0) + 1
        size = f"{needed / 1e9:,.1f} GB, estimated {plan.estimated.bytes / 1e9:,.1f}"
        self.found.rejected.add(
            "simulated, and a rank needs more memory, or its bound is above", one, size
        )


def _only_estimated(plan: Candidate) -> str:
    """Why no simulation of ``plan`` is tried; empty: it is."""
    reasons: Mapping[str, str] = combined()["estimated"]
    along = (reasons[axis] for axis, size in plan.mesh.items() if size > 1 and axis in reasons)
    return next((f"only estimated: {reason}" for reason in along), "")


def _options(plan: Candidate) -> tuple[str, ...]:
    return plan.implementation, plan.schedule, *plan.options


def _kind(plan: Candidate) -> tuple[object, ...]:
    return plan.options.get("offload"), plan.parts("positions") > 1


def _program(plan: Candidate) -> tuple[object, ...]:
    return plan.implementation, plan.strategy, plan.schedule, plan.recompute, plan.experts


def _alike(plan: Candidate) -> tuple[object, ...]:
    return plan.recompute, plan.strategy, plan.schedule, plan.samples


def source(job: Job, plan: Candidate) -> ShapeSource:
    """The training of a rank of ``plan``."""
    shape = asked.round_off(job.shape)
    made = asked.source(shape, plan.implementation, plan.mesh, job.accounting, plan.options)
    assert isinstance(made, ShapeSource)
    return replace(made, work=BatchSize(plan.samples, job.positions, plan.micro_batches))


def simulated(
    job: Job,
    plan: Candidate,
    began: Callable[[str], None],
    is_whole: bool = False,
    memory: int = sys.maxsize,
) -> list[folded.Peak]:
    """The peaks of the ranks of ``plan`` that hold most, or bounds of them from above."""
    made = source(job, plan)
    return folded.peaks(made, plan.schedule, plan.chunks, began, is_whole, memory)
