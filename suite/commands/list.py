"""``shardproof list``: what there is to run and to judge with.  Names cost little to list."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from shardproof import verdicts
from shardproof.commands import options
from shardproof.commands.console import echo, is_json, make_console, print_line
from shardproof.errors import Problem, SelectionError
from shardproof.table import Table
from shardproof.wings import wings

if TYPE_CHECKING:
    from shardproof.case import Case
    from shardproof.coverage.pairs import Coverage

Entries = Iterable[tuple[str, str]]

#: What has names of its own, and what the filters of `run` apply to.
Named = Literal["impls", "strategies", "backends", "scenarios", "mutants", "checks", "traits"]
What = Literal[Named, "cases", "coverage"]
_OF_CASES = ("cases", "coverage")


def impls() -> Entries:
    """Every implementation but mutants; none of them is imported."""
    from shardproof import registry

    return ((name, "") for name in registry.names())


def strategies() -> Entries:
    """Every strategy that can be used: its family, its axes and where its formulas come from.

    :raises BrokenStrategy: at the end, of those that installed packages register: some cannot be.
    """
    from shardproof import strategies as known
    from shardproof.costs import cost_model_class

    problems: list[Problem] = []
    for name in known.names():
        try:
            record, source = known.of(name), " ".join(cost_model_class(name).source.split())
            kinds = (f"family {record.family}" if record.family else "", ", ".join(record.axes))
            yield name, ": ".join(("; ".join(filter(None, kinds)), source))
            if name in known.registered_names():  # it may be one of the suite's
                known.registered(name)
        except known.BrokenStrategy as error:
            problems += error.problems
    if problems:
        raise known.BrokenStrategy(problems)


def backends() -> Entries:
    """Backends and whether this machine has them."""
    from shardproof.backends import BACKENDS

    for name, backend in BACKENDS.items():
        reason = backend.available()
        yield name, f"not usable here: {reason}" if reason else "usable here"


def scenarios() -> Entries:
    """Scenarios of the default folder and why each exists; others as folder/name."""
    from shardproof.scenarios import source
    from shardproof.scenarios.load import default_folder, files_of_wings, find

    folder = default_folder()
    for file in find([str(folder)]):
        yield file.name, " ".join(file.scenario.about.split())
    for path, kind in files_of_wings(folder).items():
        about = " ".join(str(source.read(path).plain().get("about", "")).split())
        yield f"{path.parent.name}/{path.stem}", f"{kind.done} by `{kind.command}`: {about}"


def mutants() -> Entries:
    """Planted faults."""
    from shardproof import registry

    for name in registry.mutant_names():
        fault = registry.load_mutant(name)
        yield name, f"{fault.summary} [{fault.parent}; killed by {', '.join(fault.killed_by)}]"


def checks() -> Entries:
    """Checks and what they say of themselves."""
    from shardproof import checks as package

    return ((name, " ".join(text.split())) for name, text in package.summaries().items())


def traits() -> Entries:
    """Trigger conditions that a workload can carry."""
    from shardproof.workloads import TRAITS

    return ((name, trait.about) for name, trait in TRAITS.items())


#: By the word that ``shardproof list`` takes.
LISTS: Mapping[str, Callable[[], Entries]] = {
    function.__name__: function
    for function in (impls, strategies, backends, scenarios, mutants, checks, traits)
}


@options.grouped(tier="full")
def list_(
    what: Annotated[What, typer.Argument(help="what to list")],
    *,
    filters: options.Filters,
    campaign: options.Campaign = None,
) -> None:
    """List implementations, cases, checks and more.

    If the output is piped, each line is one full name (except for `coverage`). `cases` and
    `coverage` take the filters of `run`.

    `coverage` counts the cases for each pair of a trigger and a feature. A trigger is a trait of
    the model (`list traits`), or a shape of the batch or the mesh. A feature is a strategy, an
    option or a backend. If the output is piped, each line has five columns, separated by tabs:
    trigger, feature, number of cases in the quick tier, number of cases in the full tier, and, if
    both numbers are 0, the reason why there is no case.

    A pair is open if it has no case, and no reason is given for that. Without filters, the exit
    code is 1 if any pair is open. The last line (on stderr if the output is piped) is about
    combinations of three conditions (triggers or features). It shows how many combinations are
    possible, and which share of the combinations occurs in at least one case.

    \b
    shardproof list impls
    shardproof list cases -k 'tied and gloo'
    shardproof list cases --impl mine:MyZero1 --like 'reference/zero1*'
    shardproof list strategies
    shardproof list traits
    shardproof list coverage
    shardproof list coverage --campaign 2000 --seed 7
    shardproof list coverage --impl reference/zero3 | grep -P 'tied\\t'
    """
    if campaign is not None:
        given = {f"list {what}": what != "coverage", **filters.given()}
        problem = "--campaign belongs to `list coverage` and draws its own cases"
        options.refuse(given, problem, campaign)
        count, seed, impl = campaign, filters.seed or 0, filters.impl or ()
        drawn = options.of_campaign(lambda wing: wing.coverage(count, seed, impl))
        _show_pairs(*drawn, "not drawn")
        if not sys.stdout.isatty():
            echo(drawn[1], err=True)
        return
    is_whole = not (any(filters.given().values()) or filters.impl or filters.seed is not None)
    if what == "coverage":
        _list_coverage(filters.cases(), is_whole and filters.tier == "full")
    elif what == "cases":
        _show((case.id, "") for case in filters.cases())
    elif not is_whole:
        names = " and ".join(f"`list {name}`" for name in _OF_CASES)
        raise SelectionError(Problem(f"filters apply to {names} only", "leave out filters", what))
    else:
        _show(LISTS[what]())


def _show(entries: Entries) -> None:
    """Print each, also where an error ends them early."""
    rows: list[tuple[str, str]] = []
    try:
        for entry in entries:
            rows.append(entry)
    finally:
        if is_json():
            make_console().print(Table("", ("name", "about"), rows))
            rows = []
        width = max((len(name) for name, about in rows if about), default=0)
        for name, about in rows:
            echo(f"{name:{width}}  {about}".rstrip() if sys.stdout.isatty() else name)


def _list_coverage(cases: Sequence[Case], is_whole: bool) -> None:
    """Print the pairs of ``cases``; those of all scenarios may leave no pair open."""
    from shardproof.coverage import pairs

    cases = pairs.taken(cases)
    coverage = pairs.table(cases)
    lacks = "open" if is_whole else "no case among these"
    more = [wing.conditions(cases) for wing in wings() if is_whole]
    _show_pairs(coverage, "\n".join(filter(None, (coverage.sentence(lacks), *more))), lacks)
    if not sys.stdout.isatty() and any(more):
        echo("\n".join(filter(None, more)), err=True)
    if is_whole and coverage.open:
        raise typer.Exit(verdicts.BROKEN)


def _show_pairs(coverage: Coverage, sentence: str, lacks: str) -> None:
    def row(pair: tuple[str, str]) -> tuple[str, ...]:
        counts = coverage.quick.get(pair, 0), coverage.full.get(pair, 0)
        why = "" if any(counts) else coverage.why_empty(pair) or lacks
        return *pair, *map(str, counts), why

    if is_json():
        headings = ("trigger", "feature", "quick", "full", "why none")
        make_console().print(Table("", headings, [*map(row, coverage.pairs)], notes=[sentence]))
        return
    _show_table(coverage.by_feature(lacks), sentence, map(row, coverage.pairs))


def _show_table(table: Table, sentence: str, rows: Iterable[tuple[str, ...]]) -> None:
    """Print table and sentence; piped, the ``rows``, with tabs between."""

    if sys.stdout.isatty():
        console = make_console()
        console.print(table)
        print_line(console, sentence)
        return
    for row in rows:
        echo("\t".join(row))
