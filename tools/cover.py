"""Choose cases for pairs of a trigger and a feature that no scenario has (suite/coverage/).

    python -m tools.cover                # writes scenarios/conformance/covering/ again
    python -m tools.cover --draw 20000   # among more cases: fewer are needed
    python -m tools.cover --triples      # writes conformance/covering-triples/: triples of
                                             # what touches communication
    python -m tools.cover --arrays       # writes conformance/covering-arrays/: three conditions
                                             # of three kinds (campaign/conditions.py)
    python -m tools.cover --more NAME    # beside those that stand: for a new trigger

What is written has no quick case: ``python -m tools.choose_quick`` chooses them anew.

Candidates come from two places.  Cases of a campaign (``shardproof run --campaign N``) combine the
options of each system freely.  What no campaign draws (checkpoints, members, loss scales, systems
of others) is taken from the scenarios: a case of theirs with other traits and another cut of the
batch.  Chosen is always the candidate with the most new pairs for its cost, so each file says with
each case what it was chosen for.  Of triples only as many cases are chosen as of pairs, those with
the most first.  Libraries for covering arrays want constraints between values; here only a whole
case can be held against what its system declares.
"""

from __future__ import annotations

import argparse
import heapq
import itertools
import json
import math
import random
import re
import zlib
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, TypeAlias

from shardproof.backends import BACKENDS
from shardproof.campaign import conditions
from shardproof.campaign.draws import numbered_case
from shardproof.campaign.varied import EXACT, RARE, can_vary, other, scaled
from shardproof.case import Case
from shardproof.cases.runner import Session
from shardproof.contract import OptimizerSpec
from shardproof.coverage import pairs
from shardproof.launch.process_control import cores
from shardproof.scenarios.load import find
from shardproof.scenarios.matrix import DTYPES, expand
from shardproof.scenarios.vocabulary import installed
from tools import triples

ROOT = Path(__file__).resolve().parents[1] / "scenarios"
FOLDER, TRIPLES, ARRAYS = (
    ROOT / "conformance" / name for name in ("covering", "covering-triples", "covering-arrays")
)
#: Most cases of arrays, and about the CPU seconds of those that the quick tier takes of them.
MOST_ARRAYS, QUICK_SECONDS = 400, 8.0
#: Folders whose scenarios stand, but for those that are written.
STANDING = (ROOT / "conformance", ROOT / "checkpoint")
SEED = 1
#: More traits than a campaign's: fewer cases are needed, and a failure is looked into once.
MOST_TRAITS = 8
#: What the smallest model of a Transformer has, where the system's mesh asks for nothing else.
SMALL = {"width": 16, "seq": 8}
GPT = "charnames_gpt"
#: Tries to replace what was refused.
ROUNDS = 10
#: Letters of a scenario's name.
LONGEST = 60
#: What a case is chosen for: a pair, or a triple.
Item: TypeAlias = tuple[str, ...]


@dataclass(frozen=True, eq=False)
class Candidate:
    """``group``: the file for the case; ``cost``: CPU seconds."""

    group: str
    case: Case
    items: frozenset[Item]
    cost: float


def estimate(case: Case) -> float:
    """The estimated CPU seconds of ``case``."""
    several = 0.0 if BACKENDS[case.backend].threads else 1.0
    return 1.0 + case.world * (0.2 + several * 0.3)


def standing(*written: Path) -> list[Case]:
    """Every case of the existing scenarios, without those in the folders ``written``."""
    names = [str(folder) for folder in STANDING]
    files = [f for f in find(names) if not {*written} & {*Path(f.file).resolve().parents}]
    return pairs.taken([case for file in files for case in expand(file, installed())])


def drawn(count: int) -> Iterator[tuple[str, Case]]:
    """Cases of a campaign that a scenario can express, each after the file that it would be in."""
    source = random.Random(SEED)
    for number in range(count):
        case = numbered_case(number, SEED, most_traits=MOST_TRAITS)
        if (
            case.membership
            or case.deaths
            or (case.lane in EXACT and case.dtype != DTYPES[case.lane])
        ):
            continue
        spec = case.workload
        if spec.name == GPT and "width" not in spec.params:
            case = replace(case, workload=replace(spec, params={**spec.params, **SMALL}))
        if source.random() < RARE and case.lane not in EXACT and case.implementation != "plain":
            case = scaled(case)
        system = case.implementation.replace("/", "-")
        yield system if system != case.implementation else f"{system}-drawn", case


def varied(cases: Sequence[Case], count: int) -> Iterator[tuple[str, Case]]:
    """Cases of scenarios with other traits, batch cuts, meshes and models, each after its file."""
    source = random.Random(SEED)
    able = [case for case in cases if can_vary(case) and case.lane not in EXACT]
    # What is wrong with systems of others is found by hand, and told under xfail.
    able = [case for case in able if case.implementation.startswith("reference/")]
    by_scenario = defaultdict[str, list[Case]](list)
    for case in able:
        by_scenario[_group(case)].append(case)
    for _ in range(count):
        # Small scenarios as often as large ones: they have what others have not.
        case = source.choice(by_scenario[source.choice(list(by_scenario))])
        drawn = other(source, case, MOST_TRAITS)
        if drawn is not None:
            yield _group(drawn), drawn


def _group(case: Case) -> str:
    """The scenario, and the plan if there is one, because a file has one plan."""
    plan = "".join(f"[{part}" for part in case.id.split("::")[0].split("[")[1:])
    return case.scenario + (plan if case.checkpoint or case.membership or case.deaths else "")


def choose(
    candidates: Iterable[Candidate], wanted: set[Item], room: float = math.inf
) -> list[tuple[Candidate, set[Item]]]:
    """Candidates that together have all of ``wanted`` that any has, each with its new items.

    Those with the most for their cost come first; together they cost no more than ``room``.
    """
    every = [one for one in candidates if one.items & wanted]
    heap = [(-len(one.items & wanted) / one.cost, number) for number, one in enumerate(every)]
    heapq.heapify(heap)
    chosen: list[tuple[Candidate, set[Item]]] = []
    while heap:
        gain, number = heapq.heappop(heap)
        one = every[number]
        new = {*one.items} & wanted
        if not new or one.cost > room:
            continue
        now = -len(new) / one.cost
        if now > gain and heap and now > heap[0][0]:
            heapq.heappush(heap, (now, number))  # others have taken some of its items
            continue
        chosen.append((one, new))
        wanted -= new
        room -= one.cost
    return chosen


def scenario(
    name: str,
    what: str,
    chosen: Sequence[tuple[Candidate, set[Item]]],
    quick: Collection[Candidate] = (),
) -> str:
    """The file ``name`` of cases chosen for ``what``, some of them ``quick``."""
    # What a cell of ``include`` does not say it has of the matrix: a precision cannot be unsaid.
    chosen = sorted(chosen, key=lambda one: "precision" in _cell(one[0].case, 0))
    first = chosen[0][0].case
    head: dict[str, Any] = {
        "name": name,
        "about": f"Chosen by tools/cover.py: {what} of no other case.",
        "sees": ["faults that need several conditions at once"],
        "workload": {"name": first.workload.name},
        "matrix": _cell(first, 0),
        "steps": first.steps,
    }
    lines = ["# Generated: `python -m tools.cover`."]
    lines += [f"{key}: {_flow(value)}" for key, value in head.items() if key != "matrix"]
    lines += ["matrix:", *(f"  {key}: {_flow(value)}" for key, value in head["matrix"].items())]
    if len(chosen) > 1:
        lines.append("include:")
    for number, (one, new) in enumerate(chosen[1:], 1):
        lines.append(f"  - reason: {_flow(_what(new))}")
        lines += [f"    {key}: {_flow(value)}" for key, value in _cell(one.case, number).items()]
    lines += [*_plans(first), f"checks: {_flow(list(first.checks))}", "tier: full"]
    if labels := [f"c{number:03d}" for number, (one, _) in enumerate(chosen) if one in quick]:
        lines += ["quick:", f"  - {{workload: {_flow(labels)}}}"]
    return "\n".join(lines) + "\n"


def _what(new: set[Item]) -> str:
    """The first of the new items, by feature, and their number."""
    first = min(new, key=lambda item: item[::-1])
    return " with ".join(first) + (f", and {len(new) - 1} more" if len(new) > 1 else "")


def _cell(case: Case, number: int) -> dict[str, Any]:
    """The axes of a matrix that give ``case``."""
    label = f"c{number:03d}"
    options = {key: value for key, value in case.options.items() if key != "precision"}
    implementation: dict[str, Any] = {"name": case.implementation}
    if options:
        implementation |= {"label": label, "options": options}
    cell: dict[str, Any] = {
        "implementation": implementation,
        "backend": case.backend,
        "mesh": dict(case.mesh),
        "optimizer": _optimizer(case.optimizer),
        "clip": case.optimizer.clip_norm,
        "lane": case.lane,
        "workload": {"label": label, **asdict(case.workload)},
    }
    if case.precision or case.dtype != DTYPES[case.lane]:
        cell["precision"] = {"label": label, "built": case.dtype, **case.precision}
    return cell


def _optimizer(spec: OptimizerSpec) -> dict[str, Any]:
    """The values in which it differs from others of its name; clipping is a separate axis."""
    plain = asdict(OptimizerSpec(name=spec.name, groups=spec.groups, clip_norm=spec.clip_norm))
    own = {name: v for name, v in asdict(spec).items() if _flow(v) != _flow(plain[name])}
    return {"name": spec.name, "lr": spec.lr, **own}


def _plans(case: Case) -> list[str]:
    """The plan of every case in the file, and the expectations apart from numbers."""
    lines = []
    if case.expect:
        lines.append(f"expect: {_flow(dict(case.expect))}")
    if (plan := case.checkpoint) is not None:
        given: dict[str, Any] = {"label": "p", "save_at": plan.save_at}
        given |= {"saves": plan.saves} if plan.saves != 1 else {}
        given |= {"again_at": plan.again_at} if plan.again_at else {}
        if into := dict(plan.into or {}):
            if "precision" in into:
                into["precision"] = {"label": "p", **into["precision"]}
            given["into"] = into
        lines.append(f"checkpoints: [{_flow(given)}]")
    if case.membership or case.deaths:
        changes = [{"step": int(k), "members": list(v)} for k, v in case.membership.items()]
        deaths = [{"rank": d.rank, "step": d.step, "call": d.call} for d in case.deaths]
        lines.append(f"membership: [{_flow({'label': 'p', 'changes': changes, 'deaths': deaths})}]")
    return lines


#: Plain data as YAML on one line: JSON is.
_flow = json.dumps


def failing(session: Session, chosen: Sequence[Candidate]) -> set[Candidate]:
    """The ``chosen`` cases that do not pass; report those that their system does not refuse."""
    cases = [replace(one.case, id=f"{number}::{one.group}") for number, one in enumerate(chosen)]
    results, _ = session.run(cases, lambda result: None)
    found = set()
    for result in results:
        if result.verdict.startswith("pass"):
            continue
        one = chosen[int(result.id.partition("::")[0])]
        found.add(one)
        if result.verdict != "refused" and "Refused: " not in result.reason:
            print(f"{result.verdict}: {one.group}: {result.reason[:300]}\n{one.case}", flush=True)
    return found


def passing(
    candidates: Sequence[Candidate], wanted: set[Item], most: int | None
) -> list[tuple[Candidate, set[Item]]]:
    """The cases chosen for ``wanted``, at most ``most``, that were tried and pass."""
    tried: set[Candidate] = set()
    wrong: set[Candidate] = set()
    with Session(cores()) as session:
        for number in itertools.count(1):
            left = [one for one in candidates if one not in wrong]
            if number > ROUNDS:  # what was refused so often is not to be had
                left = [one for one in left if one in tried]
            chosen = choose(left, {*wanted})[:most]
            new = [one for one, _ in chosen if one not in tried]
            if not new:
                break
            print(f"{len(chosen)} cases, of which {len(new)} are tried now", flush=True)
            tried.update(new)
            wrong |= failing(session, new)
    print(f"{len(tried)} cases were tried, {len(wrong)} did not pass")
    return chosen


def write(
    folder: Path,
    what: str,
    chosen: Sequence[tuple[Candidate, set[Item]]],
    more: str = "",
    quick: Collection[Candidate] = (),
) -> None:
    """Write them into files of ``folder``, replacing the existing files, or, with ``more``, adding
    to them.
    """
    groups = defaultdict[str, list[tuple[Candidate, set[Item]]]](list)
    homes: dict[str, dict[str, int]] = {}
    for one in chosen:
        plain = one[0].group.replace("[", "-").replace("]", "")
        # Those that were chosen before, varied.
        plain = re.sub("covering-(triples-|arrays-|acting-|rotating-|again-)*", "again-", plain)
        plain = f"{plain}-{homes.setdefault(plain, {}).setdefault(one[0].group, len(homes[plain]))}"
        plain = plain.removesuffix("-0")
        name = "-".join(filter(None, (folder.name, more, plain)))
        if len(name) > LONGEST:
            name = f"{name[: LONGEST - 9]}-{zlib.crc32(name.encode()):08x}"
        groups[name].append(one)
    folder.mkdir(exist_ok=True)
    for old in folder.glob(f"{folder.name}-{more}-*.yaml" if more else "*.yaml"):
        old.unlink()
    for name, members in groups.items():
        (folder / f"{name}.yaml").write_text(scenario(name, what, members, quick))
    cost, met = sum(one.cost for one, _ in chosen), sum(len(new) for _, new in chosen)
    print(f"{len(chosen)} cases in {len(groups)} files for {met:,} {what},")
    print(f"about {cost:,.0f} CPU seconds")


def arrays(draw: int, more: str, most: int) -> None:
    """Write the cases for triples of conditions, and print the covered share before and after."""
    cases = [case for case in standing(*() if more else (ARRAYS,)) if pairs.counts(case)]
    others = [(g, c) for g, c in (*drawn(draw), *varied(cases, draw)) if c.world > 1]
    candidates = [Candidate(g, c, conditions.triples(c), estimate(c)) for g, c in others]
    print(conditions.sentence(cases), flush=True)
    met = set[Item]().union(*map(conditions.triples, cases))
    wanted = set[Item]().union(*(one.items for one in candidates)) - met
    chosen = passing(candidates, wanted, most)
    new = set[Item]().union(*(own for _, own in chosen))
    sampled = [] if more else choose([one for one, _ in chosen], new, QUICK_SECONDS)
    quick = [one for one, _ in sampled]
    write(ARRAYS, "triples of conditions", chosen, more, quick)
    print(conditions.sentence([*cases, *(one.case for one, _ in chosen)]))


def main() -> None:
    """Write the scenarios of the covering cases."""
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("--draw", type=int, default=30_000, help="candidates of each kind")
    parser.add_argument("--triples", action="store_true", help="cases for triples")
    parser.add_argument(
        "--more", metavar="NAME", help="files of this name in addition to the present ones"
    )
    parser.add_argument("--most", type=int, help="triples, arrays: cases at most")
    parser.add_argument("--arrays", action="store_true", help="cases for three conditions")
    given = parser.parse_args()
    if given.arrays:
        arrays(given.draw, given.more or "", given.most or MOST_ARRAYS)
        return
    cases = standing(*() if given.more else (TRIPLES,) if given.triples else (FOLDER, TRIPLES))
    others = [*drawn(given.draw), *varied(cases, given.draw)]
    of: Callable[[Case], frozenset[Item]] = triples.of if given.triples else pairs.of
    candidates = [Candidate(group, case, of(case), estimate(case)) for group, case in others]
    table = triples.table if given.triples else pairs.table
    stands = table(cases, [case for _, case in others])
    print(stands.sentence(), flush=True)
    wanted: set[Item] = {*stands.open} & set[Item]().union(*(one.items for one in candidates))
    if given.triples:
        most = sum(case.scenario.startswith(f"{FOLDER.name}-") for case in cases)
        write(TRIPLES, "triples", passing(candidates, wanted, given.most or most), given.more)
    else:
        what = "pairs of a trigger and a feature"
        write(FOLDER, what, passing(candidates, wanted, None), given.more)


if __name__ == "__main__":
    main()
