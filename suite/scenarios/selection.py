"""The cases that a command line selects: scenarios, filters, systems outside of all scenarios."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

from shardproof.backends import BACKENDS
from shardproof.case import Case
from shardproof.errors import Problem, SelectionError, nearest
from shardproof.files import DAMAGE, read_input
from shardproof.scenarios.load import find
from shardproof.scenarios.matrix import expand, on_backend, reseed, substitute
from shardproof.scenarios.select import compile_expression
from shardproof.scenarios.vocabulary import Vocabulary
from shardproof.table import some

_SEED = re.compile(r"\[seed([0-9]{1,10})\]$")
_ID_PARTS = 8
#: The names of a case that a filter matches.
Names = Callable[[Case], tuple[str | int, ...]]
_NOT_PLANNED = "to choose other cases, drop --resume and --rerun-failed"


@dataclass(frozen=True)
class Selection:
    """The filters of ``run`` and ``list cases``; every given filter must hold.

    ``scenarios`` are files, folders, names, or whole case ids.  ``implementations`` are globs; a
    ``package.module:Class``, a mutant or any other name without a scenario gets the cells of all;
    with ``like``, a glob, those of these systems only, with their options.  ``mpi`` and those on
    GPUs are values of few matrices: named, they take over the cells of the others.
    """

    scenarios: Sequence[str] = ()
    implementations: Sequence[str] = ()
    backends: Sequence[str] = ()
    worlds: Sequence[int] = ()
    expression: str = ""
    tier: str = "quick"
    seed: int | None = None
    like: str = ""

    def cases(self, vocabulary: Vocabulary) -> list[Case]:
        """The selected cases in the order of their scenarios.

        :raises ScenarioError: a faulty scenario file.
        :raises SelectionError: an unknown name, a bad expression, or no match.
        """
        ids = [name for name in self.scenarios if _is_id(name)]
        names = [name for name in self.scenarios if not _is_id(name)]
        files = find([*dict.fromkeys([*names, *(re.split(r"::|\[", name)[0] for name in ids)])])
        everything = [case for file in files for case in expand(file, vocabulary)]
        selected = [resolve(name, everything) for name in ids]
        if names or not ids:
            wanted = {file.name for file in find(names)} if ids else None
            pool = [c for c in everything if wanted is None or c.scenario in wanted]
            selected += [case for case in self._filtered(pool, vocabulary) if case not in selected]
        return selected

    def within(self, planned: list[Case]) -> list[Case]:
        """The cases of ``planned``, those of an earlier run, that every filter keeps.

        Each value of a filter must match some of them: filters only narrow a run.
        An empty ``tier`` keeps both.

        :raises SelectionError: a value outside of the plan; the error names planned values.
        """
        expression = self.expression.strip()
        cases = self._of_scenarios(planned)
        seeds = () if self.seed is None else (self.seed,)
        cases = _narrow(cases, "--impl", self.implementations, _systems)
        cases = _narrow(cases, "--backend", self.backends, lambda case: (case.backend,))
        cases = _narrow(cases, "--world", self.worlds, lambda case: (case.world,))
        cases = _narrow(cases, "--seed", seeds, lambda case: (case.workload.seed,))
        if self.tier:
            of_tier = _narrow(cases, "--tier", (self.tier,), lambda case: (case.tier,))
            cases = cases if self.tier == "full" else of_tier
        if _is_id(expression):
            return _narrow(cases, "-k", (expression,), lambda case: (case.id,))
        matches = compile_expression(expression)
        cases = [case for case in cases if matches(case.id)]
        return _some(cases, "-k", expression, hint=_NOT_PLANNED)

    def _of_scenarios(self, planned: list[Case]) -> list[Case]:
        kept: set[str] = set()
        for given in self.scenarios:
            named = {case.id for case in planned if given in (case.id, case.scenario)}
            if not named and not _is_id(given):
                files = {file.name for file in find([given])}
                named = {case.id for case in planned if case.scenario in files}
            if not named:
                there = {case.scenario for case in planned}
                raise _unplanned("SCENARIO", given, nearest(given, there, "planned"))
            kept |= named
        return [case for case in planned if case.id in kept or not self.scenarios]

    def _filtered(self, pool: list[Case], vocabulary: Vocabulary) -> list[Case]:
        expression = self.expression.strip()
        matches = compile_expression(expression)
        if _is_id(expression):
            return [resolve(expression, pool)]
        known = sorted({name for case in pool for name in _systems(case)})
        cases = pool
        if self.implementations:
            cases = self._of_implementations(cases, known)
        elif self.like:
            raise SelectionError(Problem("--like needs --impl", "add --impl CLASS", self.like))
        if self.tier != "full":  # after names, which may be misspelt
            of_tier = [case for case in cases if case.tier == self.tier]
            cases = _some(of_tier, "--tier", self.tier, hint="add --tier full")
        for backend in self.backends:
            if backend not in vocabulary.backends:
                remedy = nearest(backend, vocabulary.backends, "backends")
                raise SelectionError(Problem("--backend: unknown backend", remedy, backend))
        over = [name for name in dict.fromkeys(self.backends) if BACKENDS[name].takes_over]
        moved = [case for backend in over for case in on_backend(cases, backend)]
        cases = [*(case for case in cases if case.backend not in over), *moved]
        filters: tuple[tuple[str, Sequence[str | int]], ...]
        filters = ("backend", self.backends), ("world", self.worlds)
        for name, values in filters:
            there = sorted({getattr(case, name) for case in cases})
            cases = [case for case in cases if not values or getattr(case, name) in values]
            _some(cases, f"--{name}", " ".join(map(str, values)), map(str, there))
        if self.seed is not None:
            cases = reseed(cases, self.seed)
        cases = [case for case in cases if matches(case.id)]
        shows = "`shardproof list cases`"
        if self.implementations:  # a system outside of all scenarios has its cells only here
            shows = "`shardproof run --dry-run` with the same --impl and without -k"
        return _some(cases, "-k", expression, hint=f"{shows} shows the ids")

    def _of_implementations(self, cases: list[Case], known: list[str]) -> list[Case]:
        from shardproof import registry

        chosen: list[Case] = []
        for pattern in self.implementations:
            named = [c for c in cases if any(fnmatchcase(n, pattern) for n in _systems(c))]
            if not named and not re.search(r"[*?\[]", pattern):
                try:
                    registry.check(pattern)
                except SelectionError:
                    if ":" in pattern:
                        raise  # which module is missing helps more than names of others
                    remedy = _own_class(pattern) or nearest(
                        pattern, {*known, *registry.names()}, "implementations"
                    )
                    problem = Problem("--impl: unknown implementation", remedy, pattern)
                    raise SelectionError(problem) from None
                named = substitute(self._alike(cases, known), pattern, bool(self.like))
            if not named:
                remedy = nearest(pattern, known, "implementations in these scenarios")
                raise SelectionError(Problem("--impl matches no implementation", remedy, pattern))
            if self.like and named[0] in cases:
                remedy = "leave --like out: the scenarios list this implementation"
                raise SelectionError(Problem("--like needs a class of your own", remedy, pattern))
            chosen += [case for case in named if case not in chosen]
        return chosen

    def _alike(self, cases: list[Case], known: list[str]) -> list[Case]:
        """The cells of the systems that ``like`` matches (empty: of all)."""
        if not self.like:
            return cases
        found = [c for c in cases if any(fnmatchcase(n, self.like) for n in _systems(c))]
        return _some(found, "--like", self.like, hint=nearest(self.like, known, "implementations"))


def resolve(name: str, cases: Sequence[Case]) -> Case:
    """The case called ``name``: one of ``cases``, or one of them with another system or seed, or
    on a backend that takes over theirs.

    :raises SelectionError: no such cell.
    """
    from shardproof import registry

    for case in cases:
        if case.id == name:
            return case
    scenario, rest = name.split("::", 1)
    pool = list(cases)
    if seeded := _SEED.search(scenario):
        pool = reseed(pool, int(seeded[1]))
    implementation, backend, *_ = rest.split("::")
    if backend in BACKENDS and BACKENDS[backend].takes_over:
        pool = on_backend(pool, backend)
    system, _, label = implementation.partition("+")
    takes = not label or registry.is_foreign(system)
    others = substitute(pool, system, bool(label)) if takes else []
    for case in (*pool, *others):
        if case.id == name:
            registry.check(case.implementation)
            return case
    remedy = nearest(name, [case.id for case in cases], "cases")
    raise SelectionError(Problem("no such case", remedy, name))


def _own_class(name: str) -> str:
    """A remedy that names the classes of a module of the user's; empty: there is no such file."""
    file = Path(f"{name.removesuffix('.py').replace('.', '/')}.py")
    if not file.is_file():
        return ""
    with suppress(*DAMAGE, SyntaxError):
        body = ast.parse(read_input(file)).body
        classes = [one.name for one in body if isinstance(one, ast.ClassDef)]
        module = ".".join(file.with_suffix("").parts)
        if named := [f"{module}:{one}" for one in classes]:
            return f"did you mean {some(named, 3)}?"
    return f"name a class of {file} as module:Class"


def _systems(case: Case) -> tuple[str, str]:
    return case.implementation, case.system


def _is_id(text: str) -> bool:
    return len(text.split("::")) == _ID_PARTS and " " not in text


def _narrow(
    cases: list[Case], option: str, values: Sequence[str | int], names: Names
) -> list[Case]:
    """The cases that ``values`` match (no values: all); each value must match some."""
    if not values:
        return cases
    matches = fnmatchcase if option == "--impl" else str.__eq__
    kept: set[str] = set()
    for value in map(str, values):
        matching = {c.id for c in cases if any(matches(str(name), value) for name in names(c))}
        if not matching:
            there = {str(names(case)[-1]) for case in cases}
            raise _unplanned(option, value, nearest(value, there, "planned"))
        kept |= matching
    return [case for case in cases if case.id in kept]


def _unplanned(option: str, value: str, remedy: str) -> SelectionError:
    what = f"{option}: not planned in this run"
    return SelectionError(Problem(what, f"{remedy}; {_NOT_PLANNED}", value))


def _some(
    kept: list[Case], option: str, value: str, valid: Iterable[str] = (), hint: str = ""
) -> list[Case]:
    """``kept``, what ``option`` left, unless that is nothing."""
    if not kept:
        remedy = hint or f"valid: {', '.join(valid)}"
        raise SelectionError(Problem(f"{option} matches nothing", remedy, value))
    return kept
