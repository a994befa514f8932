"""``shardproof list``: what there is to run and to judge with.  Names cost little to list."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import Annotated, Literal

import typer

from shardproof.commands import options
from shardproof.commands.console import echo
from shardproof.errors import Problem, SelectionError

Entries = list[tuple[str, str]]


What = Literal["impls", "backends", "scenarios", "cases", "mutants", "checks", "traits"]


def implementations() -> Entries:
    """Every implementation but mutants; none of them is imported."""
    from shardproof import registry

    return [(name, "") for name in registry.names()]


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
    from shardproof.scenarios.load import default_folder, find, timed_files, trained_files

    folder = default_folder()
    files = find([str(folder)])
    judged = [(file.name, " ".join(file.scenario.about.split())) for file in files]
    others = dict.fromkeys(timed_files(folder), "timed by `shardproof bench`")
    others |= dict.fromkeys(trained_files(folder), "trained by `shardproof study convergence`")
    for path, by in others.items():
        about = " ".join(str(source.read(path).plain().get("about", "")).split())
        judged.append((f"{path.parent.name}/{path.stem}", f"{by}: {about}"))
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
    "backends": backends,
    "scenarios": scenarios,
    "mutants": mutants,
    "checks": checks,
    "traits": traits,
}


def list_(
    what: Annotated[What, typer.Argument(help="what to list")],
    scenarios: options.Scenarios = None,
    impl: options.Impl = None,
    backend: options.BackendOption = None,
    world: options.World = None,
    like: options.Like = "",
    expression: options.Expression = "",
    tier: options.Tier = "full",
    seed: options.Seed = None,
) -> None:
    """List what there is. Piped, one full name a line; the filters of `run` apply to cases.

    \b
    shardproof list impls
    shardproof list cases --tier quick -k 'tied and gloo'
    shardproof list cases --impl mine:MyZero1 --like 'reference/zero1*'
    shardproof list traits
    """
    if what == "cases":
        from shardproof.scenarios.vocabulary import installed

        selection = options.selection(scenarios, impl, backend, world, expression, tier, seed, like)
        rows = [(case.id, "") for case in selection.cases(installed())]
    elif scenarios or impl or backend or world or like or expression or seed is not None:
        raise SelectionError(Problem("filters belong to `list cases`", "leave them out", what))
    else:
        rows = LISTS[what]()
    width = max((len(name) for name, about in rows if about), default=0)
    for name, about in rows:
        echo(f"{name:{width}}  {about}".rstrip() if sys.stdout.isatty() else name)
