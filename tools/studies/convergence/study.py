"""Train the scenarios or read earlier results, and report the outcome."""

from __future__ import annotations

import json
import os
import platform
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any

import typer

from shardproof import verdicts
from shardproof.commands import options, supervision
from shardproof.commands.console import make_console
from shardproof.errors import Problem, SelectionError, shorten
from shardproof.files import DAMAGE, Stored, read_input, to_plain
from shardproof.launch.nodes import Nodes, cap_in_words, facts_here
from shardproof.launch.pool import Pool
from shardproof.launch.process_control import cores
from shardproof.runs.run_folder import RunFolder
from tools.studies.convergence import bands, page, plan
from tools.studies.convergence.judge import Judged, judge
from tools.studies.convergence.plan import Method, Study
from tools.studies.convergence.training import Run, Trained, train

#: Method -> how it ended with each seed.
Ends = Mapping[str, Sequence[Trained]]
#: Trains some runs; the ends come in any order, each with its key.
Trainer = Callable[[Sequence[tuple[str, Run]]], Iterator[tuple[str, Trained]]]


@dataclass(frozen=True)
class _OfMethod(Stored):
    """Records of a method: its run with the first seed, and the results of all seeds."""

    run: dict[str, Any]
    ends: list[Trained]


@dataclass(frozen=True)
class _Kept(Stored):
    """Records of studies: study -> method -> its record."""

    studies: dict[str, dict[str, _OfMethod]]
    about: str = ""


def trained(study: Study, trainer: Trainer) -> Ends:
    """Train everything in ``study``."""
    seeds = range(len(study.dense.runs))
    # Seed by seed: what is stopped early has some of every method.
    runs = [(f"{m.name}#{seed}", m.runs[seed]) for seed in seeds for m in study.every]
    ends = dict(trainer(runs))
    return {m.name: [ends[f"{m.name}#{seed}"] for seed in seeds] for m in study.every}


def judged(study: Study, ends: Ends) -> dict[str, Judged]:
    """Every method compared with the dense system."""
    dense = ends[study.dense.name]
    return {
        m.name: judge(dense, ends[m.name], study.margin, study.first.budget) for m in study.methods
    }


def in_leaders(jobs: int) -> Trainer:
    """Train on ranks of leaders, ``jobs`` at a time; one at a time if seconds are reported.

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
                broke = Trained(problem=f"the training process {end.why_no_value}")
                yield end.key, Trained.from_dict(end.value) if end.value else broke
                if timed or count % 10 == 0 or count == len(runs):
                    print(f"  {count}/{len(runs)} trainings", file=sys.stderr, flush=True)

    return trainer


def run(
    studies: Sequence[Study], jobs: int, again: Path | None, folder: RunFolder | None = None
) -> int:
    """Train, print the page, and write it into a run ``folder`` with its drawings and all losses.

    ``again``: judge these records instead of training.  Exit code: 0 all is as the files expect, 1
    it is not, 3 a precondition is not met.

    :raises SelectionError: records that are not those of the studies.
    """
    began, kept = time.monotonic(), _Kept({}) if again is None else _kept(again)
    sections, codes, told = [], {verdicts.HELD}, dict[str, Any]()
    for study in studies:
        ends = trained(study, in_leaders(jobs)) if again is None else _of(study, kept, again)
        found = judged(study, ends)
        told[study.name] = recorded(study, ends)
        image = f"convergence-{study.name}.svg" if folder is not None else ""
        sections.append(page.section(study, ends, found, image))
        if folder is not None:
            folder.write(image, drawn(study, ends))
        codes |= {_code(method, found[method.name]) for method in study.methods}
    about = kept.about or _about(studies, jobs, time.monotonic() - began)
    text = page.document(about, sections)
    print(text, end="")
    if folder is not None:
        folder.write("convergence.md", text)
        folder.write("convergence.json", json.dumps({"about": about, "studies": told}))
    return verdicts.gravest(codes)


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
    """The caps in ``run.json`` as text after the nodes; empty if there are none."""
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


def _kept(path: Path) -> _Kept:
    try:
        return _Kept.from_dict(json.loads(read_input(path)))
    except (OSError, *DAMAGE) as error:
        cause = error.strerror if isinstance(error, OSError) else shorten(str(error), 200)
        what = f"no records of a convergence study: {cause}"
        raise SelectionError(
            Problem(what, "give the convergence.json of a run folder", str(path))
        ) from None


def recorded(study: Study, ends: Ends) -> dict[str, Any]:
    """The stored record of each method: its run with the first seed, and the results of all
    seeds.
    """
    every = {m.name: _OfMethod(to_plain(m.runs[0]), [*ends[m.name]]) for m in study.every}
    plain: dict[str, Any] = json.loads(json.dumps(to_plain(every)))
    return plain


def _of(study: Study, kept: _Kept, path: Path) -> Ends:
    """The results of ``study`` in stored records.

    :raises SelectionError: there are fewer seeds, or what was trained is not what is asked.
    """
    own, ends = kept.studies.get(study.name, {}), {}
    for name, asked in recorded(study, dict.fromkeys((m.name for m in study.every), ())).items():
        one, seeds = own.get(name, _OfMethod(asked["run"], [])), len(study.dense.runs)
        if len(one.ends) < seeds:
            what = f"{study.name}: {name} has {len(one.ends)} seeds there, expected {seeds}"
            remedy = "train again, or ask for --seeds and --method that are there"
            raise SelectionError(Problem(what, remedy, str(path)))
        keys = {**asked["run"], **one.run}
        pairs = {key: (one.run.get(key), asked["run"].get(key)) for key in keys}
        if differ := [f"{k} was {a!r}, expected {b!r}" for k, (a, b) in pairs.items() if a != b]:
            what = f"{study.name}: {name} was trained otherwise: {'; '.join(differ)}"
            remedy = "train again, or give the scenario that was trained"
            raise SelectionError(Problem(what, remedy, str(path)))
        ends[name] = one.ends[:seeds]
    return ends


def convergence(
    scenario: Annotated[
        list[str] | None,
        typer.Argument(metavar="[SCENARIO]...", help="files or names [plans of the study]"),
    ] = None,
    method: Annotated[
        list[str] | None, typer.Option("--method", metavar="M", help="only this one; repeatable")
    ] = None,
    seeds: Annotated[
        int | None, typer.Option("--seeds", metavar="N", min=2, help="so many [the file's]")
    ] = None,
    backend: Annotated[
        str,
        typer.Option("--backend", metavar="B", help="communication backend [the file's]"),
    ] = "",
    jobs: options.Jobs = None,
    results: options.Results = None,
    again: Annotated[
        Path | None,
        typer.Option("--from", metavar="FILE", help="judge this convergence.json, train nothing"),
    ] = None,
) -> int:
    """Train methods to a target loss, compared with dense synchronous training with the same seeds.

    Compressors, local SGD and asynchronous SGD do not promise the same numbers; this asks what that
    costs. A method is non-inferior if it needs at most `margin` times the steps of the dense
    system, by the 95 % interval of a paired t over seeds. A scenario says what it expects of each
    method, and plants faults that equality cannot see.

    Where ranks are processes (backend gloo, as in the scenario cluster) trainings run one at a
    time, the page tells the seconds of the steps to the target beside the steps, and which method
    is there first. `convergence-on-nodes` trains on nodes with a network between them.

    \b
    python -m tools.studies convergence -j 1 --results results/convergence
    python -m tools.studies convergence digits --method reference/ddp+topk1 --seeds 4
    python -m tools.studies convergence digits --backend gloo --seeds 4
    python -m tools.studies convergence --from results/convergence/convergence.json

    The run folder holds the page (convergence.md), its drawings and all losses (convergence.json).

    Exit codes: 0 every method is what its scenario expects, 1 one is not, 2 bad input, 3 dense
    training misses the target, or ranks broke.
    """
    studies = plan.chosen(scenario or (), method, seeds, backend)
    if (nodes := Nodes.here()) is not None:
        plan.require_room(studies, nodes)
        options.wait_for(nodes)
    if results is None:
        return run(studies, jobs or cores(), again)
    console = make_console()

    def body(interrupts: supervision.Interrupts) -> int:
        return run(studies, jobs or cores(), again, folder)

    def stopped() -> str:
        return "stopped: not all systems were trained, so nothing was stored"

    with supervision.open_folder(results) as folder:
        return supervision.supervised(folder, console, body, stopped)
