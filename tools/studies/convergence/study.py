"""Trains what scenarios ask for, or reads how it ended, and tells what comes of it."""

from __future__ import annotations

import json
import os
import platform
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from shardproof import verdicts
from shardproof.errors import Problem, SelectionError
from shardproof.files import from_plain, read_input, to_plain, write_whole
from shardproof.launch.nodes import Nodes, cap_in_words, facts_here
from shardproof.launch.pool import Pool
from shardproof.report.drawings import bands
from shardproof.runs.run_folder import RunFolder
from tools.studies.convergence import page
from tools.studies.convergence.judge import Judged, judge
from tools.studies.convergence.plan import Method, Study
from tools.studies.convergence.training import Run, Trained, train

#: Method -> how it ended with each seed.
Ends = Mapping[str, Sequence[Trained]]
#: What a run folder has of a study, beside drawings.
PAGE, RECORDS = "convergence.md", "convergence.json"
#: Trains some runs; the ends come in any order, each with its key.
Trainer = Callable[[Sequence[tuple[str, Run]]], Iterator[tuple[str, Trained]]]


def trained(study: Study, trainer: Trainer) -> Ends:
    """Train everything that ``study`` asks for."""
    keys = {f"{m.name}#{seed}": (m, seed) for m in study.every for seed in range(len(m.runs))}
    ends: dict[str, dict[int, Trained]] = {method.name: {} for method in study.every}
    # Seed by seed: what is stopped early has some of every method.
    order = sorted(keys, key=lambda key: keys[key][1])
    for key, end in trainer([(key, keys[key][0].runs[keys[key][1]]) for key in order]):
        method, seed = keys[key]
        ends[method.name][seed] = end
    return {name: [by_seed[seed] for seed in sorted(by_seed)] for name, by_seed in ends.items()}


def judged(study: Study, ends: Ends) -> dict[str, Judged]:
    """Every method beside the dense system."""
    dense = ends[study.dense.name]
    return {
        m.name: judge(dense, ends[m.name], study.margin, study.first.budget) for m in study.methods
    }


def in_leaders(jobs: int) -> Trainer:
    """Trains on ranks of leaders, ``jobs`` of these at a time; one where seconds are told.

    Ranks are threads, or processes: on the nodes that this machine is the head of, if it is one.
    """

    def trainer(runs: Sequence[tuple[str, Run]]) -> Iterator[tuple[str, Trained]]:
        timed = any(run.timed for _, run in runs)
        with Pool(1 if timed else jobs, [train]) as pool:
            items = [
                (key, (run, pool.folder / f"training{number}"), 20 * run.deadline)
                for number, (key, run) in enumerate(runs)
            ]
            for count, end in enumerate(pool.run(train, items), 1):
                problem = f"the training process {end.why_no_value}"
                yield (
                    end.key,
                    Trained.from_dict(end.value) if end.value else Trained(problem=problem),
                )
                if timed or count % 10 == 0 or count == len(runs):
                    print(f"  {count}/{len(runs)} trainings", file=sys.stderr, flush=True)

    return trainer


def run(
    studies: Sequence[Study],
    jobs: int,
    out: Path | None,
    records: Path | None,
    again: Path | None,
    folder: RunFolder | None = None,
) -> int:
    """Train, print the page, write it with its drawings to ``out`` and all losses to ``records``;
    or all of them into a run ``folder``.

    ``again``: judge these records instead of training.  Exit code: 0 all is as the files expect, 1
    it is not, 3 a precondition is not met.

    :raises SelectionError: records that are not those of the studies.
    """
    began, kept = time.monotonic(), {} if again is None else _kept(again)
    sections, codes, told = [], {verdicts.HELD}, dict[str, Any]()
    page_name = PAGE if out is None else out.name
    files = dict[str, str]()
    for study in studies:
        ends = trained(study, in_leaders(jobs)) if again is None else _of(study, kept, again)
        found = judged(study, ends)
        told[study.name] = recorded(study, ends)
        image = f"{Path(page_name).stem}-{study.name}.svg" if out or folder else ""
        sections.append(page.section(study, ends, found, image))
        if image:
            files[image] = drawn(study, ends)
        codes |= {_code(method, found[method.name]) for method in study.methods}
    about = kept.get("about") or _about(studies, jobs, time.monotonic() - began)
    files[page_name] = text = page.document(about, sections)
    print(text, end="")
    as_records = json.dumps({"about": about, "studies": told})
    if records is not None:
        write_whole(records, as_records)
    for name, content in files.items():
        if out is not None:
            write_whole(out.with_name(name), content)
        if folder is not None:
            folder.write(name, content)
    if folder is not None:
        folder.write(RECORDS, as_records)
    return max(codes, key=(verdicts.HELD, verdicts.NOT_DECIDED, verdicts.BROKEN).index)


def drawn(study: Study, ends: Ends) -> str:
    """The losses of all methods, as an SVG file."""
    curves = {name: [end.losses for end in own] for name, own in ends.items()}
    dense = curves.pop(study.dense.name)
    title = f"{study.name}: loss over steps"
    return bands.drawing(title, dense, curves, study.first.every, study.first.target)


def _code(method: Method, found: Judged) -> int:
    if found.verdict == "precondition":
        return verdicts.NOT_DECIDED
    return verdicts.HELD if found.holds(method.expect) else verdicts.BROKEN


def _about(studies: Sequence[Study], jobs: int, seconds: float) -> str:
    at_once = 1 if all(study.first.timed for study in studies) else jobs
    about = (
        f"{seconds:.0f} s with -j {at_once}; torch {version('torch')}, {platform.machine()}, "
        f"{os.cpu_count()} cores."
    )
    nodes, facts = Nodes.here(), facts_here()
    if nodes is None or facts is None:
        return about
    return f"{about} Ranks on {nodes}{_caps_in_words(facts['told'])}."


def _caps_in_words(told: Mapping[str, Any]) -> str:
    """What ``run.json`` tells of caps, to stand behind the nodes; empty: there are none."""
    texts = []
    for name, asked in told.get("declared", {}).items():
        has = [
            cap_in_words(name, one)
            for one in told.get("measured", {}).get(name, ())
            if one is not None
        ]
        measured = f", measured {' and '.join(has)}" if has else ""
        texts.append(f"declared {cap_in_words(name, asked)}{measured}")
    for node, own in told.get("slow_nodes", {}).items():
        texts.append(f"{node} has {', '.join(cap_in_words(*item) for item in own.items())}")
    return "".join(f"; {text}" for text in texts)


def _kept(path: Path) -> dict[str, Any]:
    try:
        data = json.loads(read_input(path))
    except (OSError, ValueError) as error:
        cause = error.strerror if isinstance(error, OSError) else error
        what = f"no records of a convergence study: {cause}"
        raise SelectionError(Problem(what, "give a file that --records wrote", str(path))) from None
    if not isinstance(data, dict) or not isinstance(data.get("studies"), dict):
        what = "no records of a convergence study: there are no studies in it"
        raise SelectionError(Problem(what, "give a file that --records wrote", str(path)))
    return data


def recorded(study: Study, ends: Ends) -> dict[str, Any]:
    """What records keep of each method: its run with the first seed, and how all seeds ended."""
    return {m.name: {"run": _plain(m.runs[0]), "ends": to_plain(ends[m.name])} for m in study.every}


def _plain(run: Run) -> dict[str, Any]:
    """As a file has it."""
    plain: dict[str, Any] = json.loads(json.dumps(to_plain(run)))
    return plain


def _of(study: Study, kept: Mapping[str, Any], path: Path) -> Ends:
    """The ends of ``study`` in stored records.

    :raises SelectionError: there are fewer seeds, or what was trained is not what is asked.
    """
    own = kept["studies"].get(study.name, {})
    if any(isinstance(one, list) for one in own.values()):
        what = f"{study.name}: records of an older version, which do not tell what was trained"
        raise SelectionError(Problem(what, "train again", str(path)))
    ends = {}
    for method in study.every:
        name, seeds = method.name, len(method.runs)
        one = own.get(name, {"ends": []})
        if len(one["ends"]) < seeds:
            what = f"{study.name}: {name} has {len(one['ends'])} seeds there, asked are {seeds}"
            remedy = "train again, or ask for --seeds and --method that are there"
            raise SelectionError(Problem(what, remedy, str(path)))
        asked, there = _plain(method.runs[0]), one["run"]
        if differ := [key for key in {**asked, **there} if asked.get(key) != there.get(key)]:
            each = (f"{key} was {there.get(key)!r}, asked is {asked.get(key)!r}" for key in differ)
            what = f"{study.name}: {name} was trained otherwise: {'; '.join(each)}"
            remedy = "train again, or give the scenario that was trained"
            raise SelectionError(Problem(what, remedy, str(path)))
        ends[name] = from_plain(list[Trained], one["ends"][:seeds])
    return ends
