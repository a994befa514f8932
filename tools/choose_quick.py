"""Choose the quick tier of conformance: more pairs of a trigger and a feature for the same CPU
time.

    python -m tools.choose_quick             # writes the `quick:` rules and quick.md again
    python -m tools.choose_quick --measure   # first the CPU seconds of each case (20 minutes),
                                                 # into conformance/quick-cpu.json
    python -m tools.choose_quick --seconds 175  # cases were added: the tier costs that again

Some cases stand: those in which a planted fault was killed (``quick.json``), those whose name a
test or a page has, and those that no pair counts (calls, samplers, refusals, plans of faults).
Beside them are chosen, from the other quick cases and from ``covering*/``, cases with the most new
pairs for their CPU seconds, so that the tier costs no more than before and still meets all that it
met: its pairs, a case of each scenario, each lane, check and relation with each feature, each
number of ranks with each system.  What is not chosen is of the full tier alone.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import re
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import yaml

from shardproof.case import Case
from shardproof.cases.runner import Session
from shardproof.coverage import features, pairs
from shardproof.scenarios import schema
from shardproof.scenarios.cells import Cell, matches, mesh_name
from shardproof.scenarios.load import ScenarioFile, find
from shardproof.scenarios.matrix import cells, expand
from shardproof.scenarios.vocabulary import installed
from tools import cover, shrink
from tools.studies.backends import spent

ROOT = cover.ROOT.parent
CPU = shrink.FOLDER / "quick-cpu.json"
#: Where names of cases are kept: none of these may go.
TEXTS = ("README.md", "docs/**/*.md", "tests/**/*.py")
#: Axes by which a rule tells cells apart.
_VALUES: Mapping[str, Any] = {
    "implementation": lambda cell: cell.system,
    "workload": lambda cell: cell.workload.label if cell.workload else "",
    "mesh": lambda cell: mesh_name(cell.mesh),
    "backend": lambda cell: cell.backend,
    "optimizer": lambda cell: cell.key[4],
    "clip": lambda cell: cell.clip,
    "lane": lambda cell: cell.lane,
    "precision": lambda cell: cell.precision.label if cell.precision else "",
    "checkpoint": lambda cell: cell.checkpoint.label if cell.checkpoint else "",
    "membership": lambda cell: cell.membership.label if cell.membership else "",
}
#: Shares of the room that are tried.
SHARES = 10
_BLOCK = re.compile(r"^quick:\n((?:[ #].*\n)+)", re.MULTILINE)


def is_covering(case: Case) -> bool:
    """Whether ``cover.py`` wrote the file."""
    return case.scenario.startswith(f"{cover.FOLDER.name}-")


def name_of(case: Case) -> str:
    """The case id without its tier."""
    return case.id.rpartition("::")[0]


def met(case: Case) -> frozenset[cover.Item]:
    """The pairs of ``case``, and the other items that the tier must keep."""
    words = {f"lane {case.lane}", *(f"check {name}" for name in case.checks)}
    if (relation := case.expect.get("relation")) is not None:
        words.add(f"relation {relation if isinstance(relation, str) else 'same_as'}")
    found = {
        *itertools.product(words, features.of(case)),
        (f"world {case.world}", case.implementation),
    }
    found |= pairs.of(case) if pairs.counts(case) else set()
    found |= set() if is_covering(case) else {("scenario", case.scenario)}
    return frozenset(found)


def stands(case: Case, measured: Collection[str], homes: Collection[str], texts: str) -> bool:
    """Whether ``case`` must stay: for something that is not counted, or because it was not
    measured.
    """
    uncounted = not pairs.counts(case) or case.fault is not None
    named = case.id in homes or case.id in texts
    return uncounted or named or name_of(case) not in measured


def choose(
    standing: Sequence[Case], pool: Sequence[Case], costs: Mapping[str, float], room: float
) -> list[Case]:
    """Cases of ``pool`` that, with ``standing``, cover at least the pairs of the current quick
    cases.

    Some of the room goes to whatever meets most, then as much as is needed to what must stay met,
    the rest to pairs again: the share that gives the most pairs is taken.
    """
    candidates = [
        cover.Candidate(case.scenario, case, met(case), costs[name_of(case)]) for case in pool
    ]
    best = [one for one in candidates if one.case.tier == "quick"]  # if nothing better fits
    have = set[cover.Item]().union(*map(met, standing))
    must = set[cover.Item]().union(*(one.items for one in best))
    new = set[cover.Item]().union(*(pairs.of(case) for case in pool))
    gain = len(new & (have | must)), -sum(one.cost for one in best)
    if -gain[1] > room:  # it costs too much: pairs may go, the least that is possible
        gain, must = (0, 0.0), must - new
    for share in range(SHARES + 1):
        chosen = list[cover.Candidate]()
        for wanted, most_spent in (
            (new | must, room * share / SHARES),
            (must, math.inf),
            (new, room),
        ):
            done = have.union(*(one.items for one in chosen))
            left = [one for one in candidates if one not in chosen]
            spend = most_spent - sum(one.cost for one in chosen)
            chosen += [one for one, _ in cover.choose(left, wanted - done, spend)]
        cost = sum(one.cost for one in chosen)
        found = len(new & have.union(*(one.items for one in chosen))), -cost
        if cost <= room and found > gain:
            best, gain = chosen, found
    return [one.case for one in best]


def rules(file: ScenarioFile, text: str, chosen: Sequence[Cell]) -> str:
    """``text`` of ``file`` with ``quick:`` rules for ``chosen``; unchanged rules are kept."""
    every, keys = cells(file, installed()), {cell.key for cell in chosen}
    block = _BLOCK.search(text)
    own = re.split(r"^(?=  - )", block[1], flags=re.MULTILINE)[1:] if block else []
    lines, done = list[str](), set[tuple[str, ...]]()
    for rule, line in zip(file.scenario.quick, own, strict=True):
        found = [cell for cell in every if matches(rule, cell)]
        stay = [cell for cell in found if cell.key in keys]
        lines += [line] if len(stay) == len(found) else narrowed(rule, stay, every)
        done |= {cell.key for cell in stay}
    new = [cell for cell in every if cell.key in keys - done]
    lines += narrowed(schema.Match.model_validate({}), new, every)
    made = "".join(("quick:\n", *lines)) if lines else ""
    return _BLOCK.sub(lambda _: made, text) if block else text + made


def narrowed(rule: schema.Match, stay: Sequence[Cell], every: Sequence[Cell]) -> list[str]:
    """The fewest lines of rules over one axis that select the cells in ``stay``."""
    given = rule.model_dump(exclude_unset=True)
    for axis, value in _VALUES.items():
        tried = {**given, axis: list(dict.fromkeys(map(value, stay)))}
        if not stay or "" in tried[axis]:
            continue
        if stay == [cell for cell in every if matches(schema.Match(**tried), cell)]:
            return [_line(tried)]
    axes = {axis: value for axis, value in _VALUES.items() if len({*map(value, every)}) > 1}
    said = ({axis: [value(cell)] for axis, value in axes.items()} for cell in stay)
    return [_line({axis: own for axis, own in one.items() if own != [""]}) for one in said]


def _line(rule: Mapping[str, Sequence[Any]]) -> str:
    plain = {key: v[0] if len(v) == 1 else list(v) for key, v in rule.items()}
    made = yaml.safe_dump(plain, default_flow_style=True, width=10_000, sort_keys=False)
    return f"  - {made}"


def measure(cases: Sequence[Case]) -> None:
    """Record the CPU seconds of each passing case, over all processes; report the others."""
    costs = {}
    with Session(1) as session:
        for case in cases:
            before = spent()
            (result,), _ = session.run([case], lambda result: None)
            if result.verdict.startswith("pass") or not pairs.counts(case):
                costs[name_of(case)] = round(spent() - before, 2)
                CPU.write_text(json.dumps(costs, indent=0) + "\n")
            else:
                print(f"{result.verdict}: {case.id}: {result.reason[:200]}", flush=True)


def told(what: str, cases: Sequence[Case], saved: Sequence[Case], seconds: float) -> str:
    """Size, CPU seconds and pairs of a tier, including checkpoints."""
    found = set().union(*(pairs.of(case) for case in (*cases, *saved) if pairs.counts(case)))
    return f"{what}: {len(cases)} cases, {seconds:.0f} CPU seconds, {len(found):,} pairs"


def main() -> None:
    """Choose the quick tier and write its rules."""
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("--measure", action="store_true", help="measure all cases first")
    parser.add_argument("--seconds", type=float, help="that the tier may cost [what it does]")
    given = parser.parse_args()
    files = find([str(shrink.FOLDER)])
    cases = [case for file in files for case in expand(file, installed())]
    quick = [case for case in cases if case.tier == "quick"]
    others = [case for case in cases if case.tier == "full" and is_covering(case)]
    if given.measure:
        measure([*quick, *others])
    measured = json.loads(CPU.read_text())
    costs = {name_of(case): cover.estimate(case) for case in quick} | measured
    homes = {home for of in json.loads(shrink.SEEN.read_text()).values() for home in of}
    texts = "\n".join(path.read_text() for glob in TEXTS for path in sorted(ROOT.glob(glob)))
    # Where no rule is needed the whole file is of the tier.
    whole = {file.name for file in files if file.scenario.tier == "quick"}
    fixed = [c for c in quick if c.scenario in whole or stands(c, measured, homes, texts)]
    pool = [case for case in quick if case not in fixed]
    pool += [case for case in others if name_of(case) in measured]
    folder = find([str(cover.ROOT / "checkpoint")])
    saved = [case for file in folder for case in expand(file, installed()) if case.tier == "quick"]

    def cost(some: Sequence[Case]) -> float:
        return sum(costs[name_of(case)] for case in some)

    room = (given.seconds or cost(quick)) - cost(fixed)
    chosen = [*fixed, *choose([*fixed, *saved], pool, costs, room)]
    print(told("before", quick, saved, cost(quick)))
    print(told("now", chosen, saved, cost(chosen)))
    names = {*map(name_of, chosen)}
    for file in (file for file in files if file.name not in whole):
        path = ROOT / file.file
        # Name of a case -> its cell; one of two sizes has one name.
        own = dict.fromkeys(map(name_of, expand(file, installed())))
        found = zip(own, cells(file, installed()), strict=True)
        path.write_text(rules(file, path.read_text(), [c for name, c in found if name in names]))
        sizes = Counter(map(name_of, expand(file, installed())))
        if not any(count == 2 and name in names for name, count in sizes.items()):
            shrink.write_size(path, {})  # it would change no case
    files = find([str(shrink.FOLDER)])
    now = {name_of(c) for f in files for c in expand(f, installed()) if c.tier == "quick"}
    assert now == names, f"rules cannot say these: {sorted(now ^ names)}"
    shrink.PAGE.write_text(shrink.page(files, json.loads(shrink.SEEN.read_text())))


if __name__ == "__main__":
    main()
