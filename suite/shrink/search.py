"""The search: try smaller forms of a failing case, and keep each that fails for the same cause.

Reductions are tried in a fixed order, several at once on the pool.  Of those that run together the
first in that order that still fails is kept, so the result does not depend on which ends first.
"""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing
from dataclasses import dataclass, field, replace

from shardproof.case import Case
from shardproof.cases.runner import Session
from shardproof.checks.results import CaseResult
from shardproof.errors import Problem, ScenarioError, SelectionError
from shardproof.scenarios.vocabulary import Vocabulary
from shardproof.shrink import document, reductions
from shardproof.shrink.cause import Cause, cause_of
from shardproof.shrink.reductions import REDUCTIONS, Reduction

#: CPU seconds of a rank in an attempt to reduce; the case itself and its file have their own.
DEADLINE = 10.0
#: Rounds over all reductions: a later one can allow an earlier one.
_MOST_ROUNDS = 3


@dataclass(frozen=True)
class Limits:
    """When a search ends early: after so many ``seconds``, or attempts (``None``: never)."""

    seconds: float | None = None
    runs: int | None = None


@dataclass
class Shrunk:
    """A failing case and its smallest form so far.

    ``kept``: the names of reductions that held, in order.  ``tried``: cases that were run.
    ``stopped``: why the search ended before nothing could be made smaller; empty: it did not.
    """

    case: Case
    cause: Cause
    best: Case
    result: CaseResult
    kept: list[str] = field(default_factory=list)
    tried: int = 0
    stopped: str = ""


#: Called after each reduction that holds.
OnKept = Callable[[Shrunk], None]


class _Enough(Exception):
    """The limit that is reached."""


class Shrinker:
    """Shrinks cases in one ``session``."""

    def __init__(
        self,
        session: Session,
        vocabulary: Vocabulary,
        limits: Limits = Limits(),
        on_kept: OnKept = lambda shrunk: None,
    ) -> None:
        self._session, self._vocabulary = session, vocabulary
        self._limits, self._on_kept = limits, on_kept
        self._numbers = itertools.count(1)
        self._known: dict[str, bool] = {}

    def shrink(self, case: Case) -> Shrunk:
        """The smallest form of ``case`` that is found.  Ctrl-C ends the search, as a limit does.

        :raises SelectionError: it does not fail, or no scenario file can have it.
        """
        self._began, self._known = time.monotonic(), {}
        shrunk = self._first(case)
        try:
            self._search(shrunk)
        except _Enough as enough:
            shrunk.stopped = str(enough)
        except KeyboardInterrupt:
            shrunk.stopped = "Ctrl-C"
        return shrunk

    def confirm(self, case: Case) -> tuple[CaseResult, Cause | None]:
        """Run ``case`` as it is."""
        ((_, result, cause),) = self._run([case], lambda *_: False, case.deadline)
        return result, cause

    def _first(self, case: Case) -> Shrunk:
        plain = replace(case, xfail=None, xfail_says=(), skip=None, seal="", is_borrowed=False)
        try:
            own = document.required(plain, self._vocabulary)
        except ScenarioError as error:
            what = f"no scenario file can have this case: {error.problems[0].what}"
            remedy = "shrink a case of a scenario that names this system"
            raise SelectionError(Problem(what, remedy, case.id)) from None
        result, cause = self.confirm(own)
        if cause is None:
            raise passes(case, result)
        return Shrunk(case, cause, own, result, tried=1)

    def _search(self, shrunk: Shrunk) -> None:
        narrow = reductions.only_check(shrunk.best, shrunk.cause)
        self._keep(shrunk, "checks", iter([narrow]))
        jumps = reductions.at_once(shrunk.best, self._vocabulary)
        self._keep(shrunk, "many at once", jumps)
        settled: dict[str, Case] = {}
        for _ in range(_MOST_ROUNDS):
            before = shrunk.best
            for one in REDUCTIONS:
                if settled.get(one.name) != shrunk.best:
                    self._reduce(shrunk, one)
                    settled[one.name] = shrunk.best
            if shrunk.best == before:
                return

    def _reduce(self, shrunk: Shrunk, one: Reduction) -> None:
        """Apply ``one`` until none of its smaller forms fails for the same cause."""
        while self._keep(shrunk, one.name, one.smaller(shrunk.best)):
            pass

    def _keep(self, shrunk: Shrunk, name: str, forms: Iterator[Case]) -> bool:
        """Whether one of ``forms`` fails for the same cause; the first that does is kept."""
        self._shrunk = shrunk
        tries = self._new(shrunk, forms)
        found = self._first_failing(shrunk, tries)
        if found is None:
            return False
        shrunk.best, shrunk.result = found
        shrunk.kept.append(name)
        self._on_kept(shrunk)
        return True

    def _new(self, shrunk: Shrunk, forms: Iterable[Case]) -> Iterator[Case]:
        """Those of ``forms`` that can be, and that were not tried before."""
        for form in forms:
            again = reductions.possible(form, self._vocabulary)
            if again is None or (key := _key(again)) in self._known:
                continue
            if again == replace(shrunk.best, id=again.id):
                continue
            self._known[key] = True
            yield again

    def _first_failing(
        self, shrunk: Shrunk, tries: Iterable[Case]
    ) -> tuple[Case, CaseResult] | None:
        held: dict[int, tuple[Case, CaseResult]] = {}
        open_: set[int] = set()
        reached: list[str] = []

        def is_over(number: int, case: Case, result: CaseResult, cause: Cause | None) -> bool:
            open_.discard(number)
            if cause is not None and shrunk.cause.same(cause):
                held[number] = case, result
            # Later attempts cannot be the first any more; earlier ones still can.
            return bool(held) and not any(one < min(held) for one in open_)

        def counted() -> Iterator[Case]:
            for number, case in enumerate(tries):
                if held:
                    return
                if stop := self._limit(shrunk):
                    reached.append(stop)  # attempts that run already still count
                    return
                shrunk.tried += 1
                open_.add(number)
                yield case

        for _ in self._run(counted(), is_over, DEADLINE):
            pass
        if reached and not held:
            raise _Enough(reached[0])
        return held[min(held)] if held else None

    def _run(
        self,
        cases: Iterable[Case],
        is_over: Callable[[int, Case, CaseResult, Cause | None], bool],
        deadline: float,
    ) -> Iterator[tuple[Case, CaseResult, Cause | None]]:
        """Run ``cases``, each for ``deadline`` CPU seconds of a rank, until ``is_over`` says so."""
        own: dict[str, tuple[int, Case]] = {}

        def items() -> Iterator[Case]:
            for number, case in enumerate(cases):
                name = f"{case.id}#{next(self._numbers)}"
                own[name] = number, case
                yield replace(case, id=name, deadline=min(case.deadline, deadline))

        with closing(self._session.judge(items())) as ends:
            for judged in ends:
                number, case = own[judged.case.id]
                cause = cause_of(judged.result, judged.account)
                yield case, judged.result, cause
                if is_over(number, case, judged.result, cause):
                    return

    def _limit(self, shrunk: Shrunk) -> str:
        """The limit that is reached; empty: none is."""
        most, spent = self._limits, time.monotonic() - self._began
        if most.runs is not None and shrunk.tried >= most.runs:
            return f"{most.runs} attempts"
        if most.seconds is not None and spent > most.seconds:
            return f"{most.seconds:g} s"
        return ""


def passes(case: Case, result: CaseResult) -> SelectionError:
    """The error of a case that does not fail."""
    what = f"the case does not fail, so there is nothing to shrink: {result.verdict}"
    if result.reason and not result.verdict.startswith("pass"):
        what += f": {result.reason.splitlines()[0]}"
    remedy = "name a case that `shardproof run` reports as fail, crash or hang"
    return SelectionError(Problem(what, remedy, case.id))


def _key(case: Case) -> str:
    fields = {k: v for k, v in case.to_dict().items() if k not in ("id", "source", "label")}
    return json.dumps(fields, sort_keys=True, default=str)
