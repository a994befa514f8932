"""``shardproof mutants``: plant every fault and see its check catch it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, Literal

import typer

from shardproof.commands import options
from shardproof.commands.options import option
from shardproof.errors import Problem, SelectionError, nearest
from shardproof.launch.process_control import cores


@dataclass(frozen=True, kw_only=True)
class HowPlanted(options.Output):
    """Which faults are planted, how (in cases of their own, or in random ones), and what is printed
    of them.
    """

    impl: list[str] | None = option(
        None, "--impl", metavar="P", help="select faults by a glob on their names or parents"
    )
    tier: options.TierName = option(
        "full", "--tier", help="full: run `memory` for every fault; see above for the exit code"
    )
    depth: Literal["family"] | None = option(
        None, "--depth", help="judge bytes by general bounds; a fault is caught if any check fails"
    )
    campaign: int | None = option(
        None,
        "--campaign",
        metavar="N",
        min=1,
        max=1000,
        help="plant each fault in up to N random cases",
    )
    seed: int | None = option(
        None, "--seed", metavar="S", min=0, help="with --campaign: seed of the cases [default: 0]"
    )


@options.grouped()
def mutants(*, how: HowPlanted, session: options.SessionOptions) -> None:
    """Plant each fault: a check must fail with the fault, and pass without the fault.

    A fault is a changed copy of an implementation (the parent). A fault survives if
    the check that must catch the fault does not fail (with --depth family: if no check fails). If a
    fault survives, the exit code is 1. The output has one line for each system with faults, and
    lists every fault that survives. With -v, it shows which check catches which fault. --tier full
    runs the check `memory` for every fault; --tier quick, only for faults that need it. If --budget
    leaves out faults, the exit code is 3 with --tier full, and 0 with --tier quick.

    With --campaign N, each fault is planted in up to N random cases: those that `run --campaign`
    draws for the parent of the fault. A fault is caught if a check fails with the fault and passes
    without it. `kills-by-n.json` has the share of faults caught after 1, 2, ... N cases. With
    --campaign, the exit code is 1 only if a parent fails a case.
    --seed also sets the order of the faults, so the faults that fit into --budget are a random
    sample.

    \b
    shardproof mutants
    shardproof mutants --impl reference/ddp          faults of one parent
    shardproof mutants --impl 'ddp_*bucket*'
    shardproof mutants --depth family                judge bytes by bounds
    shardproof mutants --shard 2/4 --results part2   part 2 of 4: see `merge`
    shardproof mutants --campaign 20 --budget 30     in random cases
    """
    from shardproof.commands.execution import Planting
    from shardproof.commands.supervision import open_folder

    part, is_quick = session.part, how.tier == "quick"
    if how.campaign is None and how.seed is not None:
        remedy = "leave --seed out: without --campaign, cases are fixed"
        raise SelectionError(Problem("--seed needs --campaign", remedy, str(how.seed)))
    chosen = choose_mutants(how.impl or ["*"])
    if how.campaign is not None:
        given = {"--tier quick": is_quick, "--depth": how.depth, "--shard": part}
        options.refuse(given, "--campaign draws its own cases", how.campaign)
        most, seed = how.campaign, how.seed or 0
        code = options.of_campaign(lambda wing: wing.plant(chosen, most, seed, session, how))
        raise typer.Exit(code)
    jobs, budget, whole = session.jobs or cores(), session.budget, not is_quick
    with open_folder(session.results) as folder:
        planting = Planting(folder, chosen, jobs, budget, whole, how.depth or "", part, how)
        raise typer.Exit(planting.run())


def choose_mutants(patterns: Sequence[str]) -> list[Any]:
    """Mutants whose name, or whose parent's name, a glob matches.

    :raises SelectionError: a pattern that matches none.
    """
    from shardproof import registry

    declared = [registry.load_mutant(name) for name in registry.mutant_names()]
    chosen: list[Any] = []
    for pattern in patterns:
        short = pattern.removeprefix(registry.MUTANTS)
        named = [
            m for m in declared if fnmatchcase(m.name, short) or fnmatchcase(m.parent, pattern)
        ]
        if not named:
            known = {name for m in declared for name in (m.name, m.parent)}
            remedy = nearest(short, known, "faults and their parents")
            raise SelectionError(Problem("--impl matches no fault", remedy, pattern))
        chosen += [m for m in named if m not in chosen]
    return chosen
