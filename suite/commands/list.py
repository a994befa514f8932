"""``shardproof list``: what there is to run and to judge with.  Names cost little to list."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from shardproof import verdicts, wings
from shardproof.commands import options
from shardproof.commands.console import echo
from shardproof.errors import Problem, SelectionError

if TYPE_CHECKING:
    from shardproof.case import Case
    from shardproof.coverage.pairs import Coverage

Entries = list[tuple[str, str]]

What = Literal[
    "impls",
    "strategies",
    "backends",
    "scenarios",
    "cases",
    "coverage",
    "mutants",
    "checks",
    "traits",
]
#: What the filters of `run` apply to.
_OF_CASES = ("cases", "coverage")


def implementations() -> Entries:
    """Every implementation but mutants; none of them is imported."""
    from shardproof import registry

    return [(name, "") for name in registry.names()]


def strategies() -> Entries:
    """Every strategy that can be used: its family, its axes and where its formulas come from."""
    from shardproof import strategies as known
    from shardproof.costs import cost_model_class

    rows = []
    for name in known.names():
        with suppress(known.BrokenStrategy):  # `list` ends with what is wrong
            record, source = known.of(name), " ".join(cost_model_class(name).source.split())
            kinds = (f"family {record.family}" if record.family else "", ", ".join(record.axes))
            rows.append((name, ": ".join(("; ".join(filter(None, kinds)), source))))
    return rows


def _require_usable_strategies() -> None:
    """Name the strategies that installed packages register and that cannot be used.

    :raises BrokenStrategy: there are some.
    """
    from shardproof import strategies as known
    from shardproof.costs import cost_model_class

    problems = []
    for name in known.registered_names():
        try:
            known.registered(name)
            cost_model_class(name)
        except known.BrokenStrategy as error:
            problems += error.problems
    if problems:
        raise known.BrokenStrategy(problems)


def backends() -> Entries:
    """Backends and whether this machine has them."""
    from shardproof.backends import BACKENDS

    return [
        (name, f"not usable here: {reason}" if (reason := backend.available()) else "usable here")
        for name, backend in BACKENDS.items()
    ]


def scenarios() -> Entries:
    """Scenarios of the default folder and why each exists; others as folder/name."""
    from shardproof.scenarios import source
    from shardproof.scenarios.load import default_folder, files_of_wings, find

    folder = default_folder()
    files = find([str(folder)])
    judged = [(file.name, " ".join(file.scenario.about.split())) for file in files]
    for path, kind in files_of_wings(folder).items():
        about = " ".join(str(source.read(path).plain().get("about", "")).split())
        judged.append(
            (f"{path.parent.name}/{path.stem}", f"{kind.done} by `{kind.command}`: {about}")
        )
    return judged


def mutants() -> Entries:
    """Planted faults."""
    from shardproof import registry

    names = registry.mutant_names()
    declared = [registry.load_mutant(name) for name in names]
    return [
        (name, f"{fault.summary} [{fault.parent}; killed by {', '.join(fault.killed_by)}]")
        for name, fault in zip(names, declared, strict=True)
    ]


def checks() -> Entries:
    """Checks and what they say of themselves."""
    from shardproof import checks as package

    return [(name, " ".join(text.split())) for name, text in package.summaries().items()]


def traits() -> Entries:
    """Trigger conditions that a workload can carry."""
    from shardproof.workloads import TRAITS

    return [(name, trait.about) for name, trait in TRAITS.items()]


#: By the word that ``shardproof list`` takes.
LISTS: Mapping[str, Callable[[], Entries]] = {
    "impls": implementations,
    "strategies": strategies,
    "backends": backends,
    "scenarios": scenarios,
    "mutants": mutants,
    "checks": checks,
    "traits": traits,
}


@dataclass(frozen=True, kw_only=True)
class OfCoverage:
    """Options of ``list coverage``."""

    campaign: Annotated[
        int | None,
        typer.Option(
            "--campaign",
            metavar="N",
            min=1,
            max=100_000,
            help="of coverage: what N random cases from --seed meet",
        ),
    ] = None
    triples: Annotated[
        bool, typer.Option("--triples", help="of coverage: triples of what touches communication")
    ] = False


@options.grouped(tier="full")
def list_(
    what: Annotated[What, typer.Argument(help="what to list")],
    *,
    filters: options.Filters,
    of_coverage: OfCoverage,
) -> None:
    """List what there is. Piped, one full name a line; the filters of `run` apply to cases.

    `coverage` counts the cases that have both a trigger (a trait, a form of batch or mesh) and a
    feature (a strategy, an option, a backend). Piped, a line is trigger, feature, cases of the
    quick tier, of the full one, and why there is none, with tabs between. Of all scenarios a pair
    without a case or a reason is open, and ends this with exit code 1; filters only select.
    `--triples` counts the cases that have a strategy, a way to send and a circumstance of that; not
    all that are possible are met.

    \b
    shardproof list impls
    shardproof list cases --tier quick -k 'tied and gloo'
    shardproof list cases --impl mine:MyZero1 --like 'reference/zero1*'
    shardproof list strategies
    shardproof list traits
    shardproof list coverage
    shardproof list coverage --triples
    shardproof list coverage --campaign 2000 --seed 7
    shardproof list coverage --impl reference/zero3 | grep -P 'tied\\t'
    """
    campaign, triples = of_coverage.campaign, of_coverage.triples
    if triples and what != "coverage":
        raise SelectionError(Problem("--triples belongs to `list coverage`", "leave it out", what))
    if campaign is not None:
        given = {f"list {what}": what != "coverage", **filters.given(), "--triples": triples}
        problem = "--campaign belongs to `list coverage` and draws its own cases"
        options.refuse(given, problem, campaign)
        _list_campaign(campaign, filters.seed or 0, filters.impl or ())
        return
    is_whole = not (any(filters.given().values()) or filters.impl or filters.seed is not None)
    if what in _OF_CASES:
        cases = filters.cases()
        if triples:
            _list_triples(cases)
            return
        if what == "coverage":
            _list_coverage(cases, is_whole=is_whole and filters.tier == "full")
            return
        rows = [(case.id, "") for case in cases]
    elif not is_whole:
        names = " and ".join(f"`list {name}`" for name in _OF_CASES)
        raise SelectionError(Problem(f"filters belong to {names}", "leave them out", what))
    else:
        rows = LISTS[what]()
    width = max((len(name) for name, about in rows if about), default=0)
    for name, about in rows:
        echo(f"{name:{width}}  {about}".rstrip() if sys.stdout.isatty() else name)
    if what == "strategies":
        _require_usable_strategies()


def _list_coverage(cases: Sequence[Case], is_whole: bool) -> None:
    """Print the coverage of ``cases``; those of all scenarios may leave no pair open."""
    from shardproof.coverage import pairs

    coverage = pairs.table(pairs.taken(cases))
    lacks = "open" if is_whole else "no case among these"
    _print_coverage(coverage, lacks, coverage.sentence(lacks))
    if is_whole and coverage.open:
        raise typer.Exit(verdicts.BROKEN)


def _print_coverage(coverage: Coverage, lacks: str, sentence: str) -> None:
    if sys.stdout.isatty():
        from shardproof.commands.console import make_console, print_line

        console = make_console()
        console.print(coverage.by_feature(lacks))
        print_line(console, sentence)
        return
    for trigger, feature in coverage.pairs:
        pair = trigger, feature
        counts = coverage.quick.get(pair, 0), coverage.full.get(pair, 0)
        why = "" if any(counts) else coverage.why_empty(pair) or lacks
        echo("\t".join((trigger, feature, *map(str, counts), why)))


def _list_campaign(count: int, seed: int, patterns: Sequence[str]) -> None:
    """Print which pairs of the table ``count`` random cases meet, and how many: on stderr."""
    coverage, sentence = wings.required(
        "campaign", "--campaign", lambda wing: wing.random_coverage(count, seed, patterns)
    )
    _print_coverage(coverage, "not drawn", sentence)
    if not sys.stdout.isatty():
        echo(sentence, err=True)


def _list_triples(cases: Sequence[Case]) -> None:
    """Print what of the triples ``cases`` meet."""
    from shardproof.commands.console import make_console, print_line
    from shardproof.coverage import pairs, triples

    found = triples.table(pairs.taken(cases))
    if sys.stdout.isatty():
        console = make_console()
        console.print(found.by_strategy())
        print_line(console, found.sentence())
        return
    for triple in sorted(found.met | {*found.open}):
        counts = found.quick.get(triple, 0), found.full.get(triple, 0)
        echo("\t".join((*triple, *map(str, counts))))
