"""Find the smallest size at which the quick cases of a scenario still catch their faults.

    python -m tools.shrink                # every scenario of the quick tier (half an hour)
    python -m tools.shrink ddp-gpt        # one
    python -m tools.shrink --keep         # only fewer steps, at the current sizes
    python -m tools.shrink --page         # only regenerate conformance/quick.md

A size is sufficient if every check of every quick case ends as at full size, and if every planted
fault that its named checks see at full size is still seen by them.  A fault is planted in one quick
case: the first of all scenarios that runs its parent under its trigger.  The size is written into
the file as ``quick_size``, the faults into ``conformance/quick.json``, and ``conformance/quick.md``
lists what each quick case is for.
"""

from __future__ import annotations

import argparse
import itertools
import json
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from shardproof import registry
from shardproof.case import Case
from shardproof.cases import kinds
from shardproof.cases.kills import VERDICT_KILLERS
from shardproof.cases.runner import Session
from shardproof.errors import ScenarioError
from shardproof.impls.mutants.declare import Mutant
from shardproof.launch.process_control import cores
from shardproof.scenarios import schema
from shardproof.scenarios.load import ScenarioFile, find
from shardproof.scenarios.matrix import expand
from shardproof.scenarios.vocabulary import installed
from shardproof.shrink.reductions import ladder
from shardproof.table import Table

FOLDER = Path(__file__).resolve().parents[1] / "scenarios" / "conformance"
PAGE, SEEN = FOLDER / "quick.md", FOLDER / "quick.json"
HEAD = """\
<!-- Generated: `python -m tools.shrink --page`. -->

# What each quick case is for

This page lists the cases of the quick tier by scenario, with the faults that a scenario must catch.

- *alone*: the number of pairs of values (or of the scenario and a value) that only this case has.
- *faults*: planted faults of the case's system that its checks catch at this size. Each fault is
  planted in one quick case here. `shardproof mutants` plants all faults, each in its own case.
"""
#: How a case ended: its verdict, and the status of every check.
End = tuple[str, dict[str, str]]


def sizes(file: ScenarioFile) -> Iterator[dict[str, Any]]:
    """Sizes to try, the cheapest first; a width or steps set by the file are kept."""
    for size in _models(file):
        yield from _steps(file, size)


def _steps(file: ScenarioFile, size: dict[str, Any]) -> list[dict[str, Any]]:
    fixed = "steps" in file.scenario.model_fields_set or not kinds.of(file.scenario.workload).trains
    return [size] if fixed else [{**size, "steps": 2}, size]


def _models(file: ScenarioFile) -> Iterator[dict[str, Any]]:
    own = file.scenario.workload
    kind = kinds.of(own)
    if kind.tests_backend:
        yield from ({"params": {"strength": strength}} for strength in ladder(1, 3))
    if not kind.trains:
        return
    fewer = {"global_batch": 12} if own.global_batch > 12 else {}
    if own.name != "charnames_gpt":
        yield fewer
        return
    narrow = {"seq": 8} if "width" in own.params else {"width": 16, "seq": 8}
    layers = own.params.get("layers", 3)
    for count in (*ladder(1, layers), layers):
        depth = {"layers": count} if count < layers else {}
        yield {**fewer, "params": {**depth, **narrow}}
        yield {"params": {**depth, **narrow}}
        yield {"params": depth}


def quick_cases(file: ScenarioFile, size: dict[str, Any] | None) -> list[Case]:
    """The quick cases of ``file`` at ``size``, without refusals."""
    chosen = None if not size else schema.QuickSize.model_validate(size)
    scenario = file.scenario.model_copy(update={"quick_size": chosen})
    cases = expand(replace(file, scenario=scenario), installed())
    return [case for case in cases if case.tier == "quick" and "refuses" not in case.expect]


def fits(fault: Mutant, case: Case) -> bool:
    """Whether ``case`` runs the parent of ``fault`` under its trigger."""
    options, clip = case.options, case.optimizer.clip_norm
    checks = set(fault.killed_by) - set(VERDICT_KILLERS)
    return (
        fault.parent == case.implementation
        and _asks(fault.workload) <= _asks(case.workload)
        and all(options.get(name) == value for name, value in fault.options.items())
        and set(fault.traits) <= set(case.workload.traits)
        and _axes(fault.mesh) == _axes(case.mesh)
        and dict(fault.precision) == dict(case.precision)
        and fault.optimizer.clip_norm in (None, clip)
        and fault.optimizer.name in ("sgd", case.optimizer.name)
        and fault.expect.get("relation") == case.expect.get("relation")
        and checks <= set(case.checks)
    )


def _asks(workload: Any) -> set[tuple[str, Any]]:
    """The parameters that a workload without training must have; of calls, the operation."""
    kind = kinds.of(workload)
    every = not kind.trains and not kind.tests_backend
    return {(k, v) for k, v in workload.params.items() if every or k == "operation"}


def _axes(mesh: Any) -> set[str]:
    return {axis for axis, ranks in mesh.items() if ranks > 1}


def homes(files: Sequence[ScenarioFile]) -> dict[str, dict[str, str]]:
    """Scenario -> fault -> the quick case that it is planted in."""
    found: dict[str, dict[str, str]] = {file.name: {} for file in files}
    cases = [case for file in files for case in quick_cases(file, None)]
    for name in registry.mutant_names():
        fault = registry.load_mutant(name)
        if (case := next((case for case in cases if fits(fault, case)), None)) is not None:
            found[case.scenario][name] = case.id
    return found


def ends(session: Session, cases: Sequence[Case]) -> dict[str, End]:
    """Verdict and status of each check, by case id."""
    results, _ = session.run(cases, lambda result: None)
    return {r.id: (r.verdict, {o.check: o.status for o in r.checks}) for r in results}


def survivors(session: Session, cases: Sequence[Case], faults: dict[str, str]) -> set[str]:
    """The ``faults`` that at least one of their named checks does not see in its case."""
    by_id = {case.id: case for case in cases}
    runs = [replace(by_id[at], id=name, implementation=name) for name, at in faults.items()]
    alive = set()
    for name, (verdict, statuses) in ends(session, runs).items():
        failing = {check for check, status in statuses.items() if status == "fail"}
        if not set(registry.load_mutant(name).killed_by) <= {verdict, *failing}:
            alive.add(name)
    return alive


def search(
    session: Session, file: ScenarioFile, faults: dict[str, str], keep: bool
) -> tuple[dict[str, Any], dict[str, str]]:
    """The smallest sufficient size (empty: full size), and the ``faults`` seen at it.

    ``keep``: start from the file's own size and try only fewer steps.
    """
    own = file.scenario.quick_size
    stands = own.model_dump(exclude_defaults=True) if own and keep else {}
    whole = quick_cases(file, stands)
    truth = ends(session, whole)
    unseen = survivors(session, whole, faults)
    seen = {name: case for name, case in faults.items() if name not in unseen}
    for size in _steps(file, stands) if keep else sizes(file):
        try:
            cases = quick_cases(file, size)
        except ScenarioError:
            continue
        # A few of them first: these rule out most sizes that are too small.
        few = cases[:: 1 + len(cases) // 4]
        if cases == whole:
            continue
        tried = (_differing(ends(session, some), truth) for some in (few, cases))
        if other := next(filter(None, tried), None):
            print(f"{file.name}: not {size}: ends otherwise: {', '.join(other)}", flush=True)
        elif lost := survivors(session, cases, seen):
            print(f"{file.name}: not {size}: survive: {', '.join(sorted(lost))}", flush=True)
        else:
            return size, seen
    return stands, seen


def _differing(ends: dict[str, End], truth: dict[str, End]) -> list[str]:
    return [case for case, end in ends.items() if end != truth[case]]


def write_size(path: Path, size: dict[str, Any]) -> None:
    """Put ``size`` into the file, before its rules of the quick tier."""
    text = re.sub(r"^quick_size:.*\n", "", path.read_text(), flags=re.MULTILINE)
    if size:
        line = "quick_size: " + re.sub(r'"(\w+)"', r"\1", json.dumps(size)) + "\n"
        text = re.sub(r"^(?=tier:|quick:)", line, text, count=1, flags=re.MULTILINE)
    path.write_text(text)


def page(files: Sequence[ScenarioFile], seen: dict[str, dict[str, list[str]]]) -> str:
    """``quick.md``: every quick case, the pairs that only it has, and the faults seen in it."""
    parts = [HEAD]
    quick = [[c for c in expand(file, installed()) if c.tier == "quick"] for file in files]
    count = Counter(pair for cases in quick for case in cases for pair in _pairs(case))
    for file, cases in zip(files, quick, strict=True):
        if not cases:
            continue
        rows = []
        for case in cases:
            alone = [" + ".join(p) for p in sorted(_pairs(case)) if count[p] == 1]
            faults = seen.get(file.name, {}).get(case.id, [])
            judged = ", ".join(faults) or case.expect.get("refuses", "")
            name = case.id.removesuffix("::quick").removeprefix(f"{file.name}")
            rows.append((name.removeprefix("::"), str(len(alone)), "; ".join(alone[:2]), judged))
        table = Table("", ("case", "alone", "for example", "faults"), rows, align="lrll")
        about = "Must catch: " + "; ".join(file.scenario.sees)
        size = file.scenario.quick_size
        small = f" Size: `{json.dumps(size.model_dump(exclude_none=True))}`." if size else ""
        parts.append(f"## {file.name}\n\n{about}.{small}\n\n{table.markdown().strip()}\n")
    return "\n".join(parts)


def _pairs(case: Case) -> set[tuple[str, str]]:
    head, *rest, _ = case.id.split("::")
    return set(itertools.combinations([head, *rest], 2))


def main() -> None:
    """Find and write the smallest sizes of scenarios."""
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("scenarios", nargs="*", help="names (default: all of conformance/)")
    parser.add_argument("--keep", action="store_true", help="only try fewer steps")
    parser.add_argument("--page", action="store_true", help="only regenerate quick.md")
    given = parser.parse_args()
    seen = json.loads(SEEN.read_text()) if SEEN.exists() else {}
    every = find([str(FOLDER)])
    files = [] if given.page else find(given.scenarios) if given.scenarios else every
    home = homes(every) if files else {}
    with Session(cores()) as session:
        for file in (file for file in files if quick_cases(file, None)):
            size, faults = search(session, file, home[file.name], given.keep)
            write_size(FOLDER.parent.parent / file.file, size)
            by_case = sorted(set(faults.values()))
            seen[file.name] = {c: sorted(n for n in faults if faults[n] == c) for c in by_case}
            SEEN.write_text(json.dumps(seen, indent=1, sort_keys=True) + "\n")
            print(f"{file.name}: {size or 'whole'}; {len(faults)} faults seen", flush=True)
    PAGE.write_text(page(every, seen))


if __name__ == "__main__":
    main()
