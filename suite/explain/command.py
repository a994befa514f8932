"""``shardproof explain``: what a case, a check or a verdict means."""

from __future__ import annotations

import shlex
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from shardproof import verdicts
from shardproof.commands.console import echo
from shardproof.errors import Problem, SelectionError, nearest
from shardproof.scenarios import source

if TYPE_CHECKING:
    from shardproof.case import Case

#: Columns of a line.
_WIDTH = 88


def explain(
    name: Annotated[str, typer.Argument(metavar="CASE|CHECK|VERDICT", help="what to explain")],
) -> None:
    """Explain a case, a check or a verdict, and what to do next.

    For a case, the output shows how the case trains, its checks, the command that runs the case,
    and its verdict in the newest run.

    \b
    shardproof explain hang
    shardproof explain traffic
    shardproof explain "$(shardproof list cases -k 'zero2 and gloo' | head -1)"
    """
    from shardproof import checks

    if "::" in name:
        lines = _case(name)
    elif (kind := verdicts.kind(name)) == name or "(" in name:
        lines = iter((f"verdict {kind}", *textwrap.wrap(meanings()[kind], _WIDTH)))
    elif name in checks.CHECKS:
        lines = iter((f"check {name}", *checks.explanation(name).splitlines()))
    else:
        remedy = nearest(name, (*verdicts.VERDICTS, *checks.CHECKS), "verdicts and checks")
        remedy += "; `shardproof list scenarios` and `shardproof list impls` show other names"
        raise SelectionError(Problem("this is not a case, check or verdict", remedy, name))
    for line in lines:
        echo(line)


def meanings() -> dict[str, str]:
    """The meaning of each verdict, and what to do about it."""
    found = source.read(Path(__file__).with_name("verdicts.yaml")).plain()
    return {verdict: str(text) for verdict, text in found.items()}


def _case(name: str) -> Iterator[str]:
    """Lines about the case with that id.

    :raises SelectionError: there is none.
    """
    from shardproof import checks
    from shardproof.scenarios.load import find
    from shardproof.scenarios.selection import Selection
    from shardproof.scenarios.vocabulary import installed

    [case] = Selection(scenarios=(name,), tier="full").cases(installed())
    summaries = checks.summaries()
    yield f"case {case.id}"
    for file in find([case.scenario.split("[")[0]]):
        yield from textwrap.wrap(f"scenario {file.name}: {file.scenario.about}", _WIDTH)
    for label, text in _facts(case):
        yield f"  {label:<10}{text}"
    for check in case.checks:
        about = " ".join(summaries[check].split())
        yield from textwrap.wrap(f"checks {check}: {about}", _WIDTH, subsequent_indent="  ")
    yield from _newest(case)
    yield f"run: shardproof run {shlex.quote(case.id)}"


def _facts(case: Case) -> Iterator[tuple[str, str]]:
    work, optimizer = case.workload, case.optimizer
    options = ", ".join(f"{key}={value}" for key, value in case.options.items())
    clip = "no clipping" if optimizer.clip_norm is None else f"clipped at {optimizer.clip_norm:g}"
    batch = f"{work.global_batch} samples, {work.micro_batches} micro-batches, {case.steps} steps"
    yield "system", case.implementation + (f" with {options}" if options else "")
    yield "ranks", f"{case.world} on {case.backend}, mesh {case.mesh}"
    yield "model", ", ".join((work.name, *work.traits))
    yield "training", f"{batch}; {optimizer.name}, {clip}"
    if "refuses" in case.expect:
        yield "expected", f"an error that says {str(case.expect['refuses'])!r}, and no training"
    else:
        yield "compared", f"in lane {case.lane}, {case.dtype}"


def _newest(case: Case) -> Iterator[str]:
    """The verdict and reason of ``case`` in the newest run here, if that has it."""
    from shardproof.runs.run_folder import find_run, read

    try:
        path = find_run(None)
        results = [one for one in read(path).cases if one.id == case.id]
    except SelectionError:
        return
    for one in results:
        yield f"in {path}: {one.verdict}"
        yield from (f"    {line}" for line in one.reason.splitlines())
