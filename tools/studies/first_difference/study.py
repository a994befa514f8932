"""``python -m tools.studies first-difference``: does `locate` name the fault that was planted?

A fault counts as named if the line that `locate` names lies in the fault's own source, in the
function of the parent that it replaces, or within 3 lines of either; or if what `locate` names was
called by one of these functions.  The sample is fixed: the faults whose names have the lowest
SHA-256.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from shardproof import verdicts
from shardproof.cases.kills import pair
from shardproof.locate.finding import Finding
from shardproof.locate.task import locate_all
from tools.studies.first_difference import planted

#: The aim: of faults that change numbers or calls.
LEAST_NAMED = 0.80


def run(
    sample: Annotated[int, typer.Option("--sample", metavar="N", help="faults", min=1)] = 40,
    after: Annotated[int, typer.Option("--after", metavar="N", help="leave out the first")] = 0,
    jobs: Annotated[int, typer.Option("-j", metavar="N", help="at once", min=1)] = 1,
    impl: Annotated[str, typer.Option("--impl", metavar="NAMES", help="these faults only")] = "",
    output: Annotated[
        Path | None, typer.Option("--output", metavar="FILE", help="a line for each fault (JSON)")
    ] = None,
) -> int:
    """Locate a fixed sample of planted faults and count how many are named.

    Exit codes: 0 the aim is met, 1 it is not, 2 bad input.
    """
    mutants = planted.sample(after + sample if not impl else 1 << 20)[0 if impl else after :]
    if impl:
        wanted = impl.split(",")
        mutants = [m for m in mutants if m.name in wanted]
    by_id = {pair(mutant).case.id: mutant for mutant in mutants}
    lines: list[dict[str, Any]] = []
    for case, found, seconds in locate_all([pair(m).case for m in mutants], jobs):
        line = _line(by_id[case.id], found, seconds)
        lines.append(line)
        print(
            f"{line['named']:<9} {line['changes']:<8} {line['fault']}: {line['sentence']}",
            flush=True,
        )
    if output is not None:
        output.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return summary(lines)


def _line(mutant: Any, found: Finding | str, seconds: float) -> dict[str, Any]:
    kind = planted.changes(mutant)
    line = {"fault": mutant.name, "changes": kind, "seconds": round(seconds, 1)}
    if isinstance(found, str):
        return line | {"named": "miss", "kind": "broke", "sentence": found, "place": ""}
    how = planted.named(found, mutant)
    place = "" if found.place is None else str(found.place)
    calls = [str(each) for each in found.calls]
    origin = "" if found.origin is None else str(found.origin)
    return line | {
        "named": how,
        "kind": found.kind,
        "sentence": found.sentence,
        "place": place,
        "origin": origin,
        "calls": calls,
    }


def summary(lines: list[dict[str, Any]]) -> int:
    """Print the counts; the exit code."""
    table = planted.counted([(line["changes"], line["named"]) for line in lines])
    for kind, row in table.items():
        total = sum(row.values())
        print(
            f"{kind}: {total - row['miss']} of {total} named "
            f"({row['line']} by line, {row['origin']} by origin, "
            f"{row['operation']} by operation), {row['miss']} missed"
        )
    judged = [row for kind, row in table.items() if kind != "other"]
    total = sum(sum(row.values()) for row in judged)
    named = sum(sum(row.values()) - row["miss"] for row in judged)
    share = named / total if total else 0.0
    print(f"named: {named} of {total} faults that change numbers or calls ({share:.0%}), aim 80 %")
    return verdicts.HELD if total and share >= LEAST_NAMED else verdicts.BROKEN
