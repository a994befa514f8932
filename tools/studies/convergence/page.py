"""The page of a convergence study, in Markdown."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence

from shardproof.table import Table
from tools.studies.convergence.judge import Judged, interval, soonest
from tools.studies.convergence.plan import Method, Study
from tools.studies.convergence.training import Trained

INTRODUCTION = """\
# Convergence

Written by `python -m tools.studies convergence`. Every method trains to a target loss with the same
seeds as dense synchronous training (equal initial values, batches and order); the loss is that of
one fixed batch of training data. Ranks stop together, by a vote. *Ratio*: steps to the target over
dense training's, the geometric mean over seeds with the 95 % interval of a paired t on logarithms.
*Non-inferior*: its upper end is below the margin; *inferior*: its lower end is above; *not shown*:
neither. A method that misses the target with some seed is never non-inferior; that seed counts with
the whole budget, so the ratio, but neither end of its interval, is a lower bound. Bytes are those
that all ranks send in steps, by the collective model.

Where ranks are processes with cores of their own, trainings run one at a time, all methods with a
seed before the next seed, and *seconds* are those of the steps to the target, of the slowest rank
between two looks: steps with their batches and their count of bytes, without set-up, evaluations
and votes. Their ratio is that of paired seeds as well, of methods that reach the target with every
seed; the verdict is about steps alone.

Small models at one learning rate, the same for all: the page shows what each method does here, and
that faults which equality cannot see are seen. It ranks no methods but by their seconds there.
"""
HEADINGS = (
    *("method", "steps to target: median (range)", "missed", "ratio of steps [95 %]"),
    *("bytes to target", "seconds to target: median (range)", "ratio of seconds [95 %]"),
    *("verdict", "as expected"),
)
#: Those of seconds, which are left out where none are told.
_OF_SECONDS = HEADINGS[5:7]


def document(about: str, sections: Sequence[str]) -> str:
    """The whole page."""
    return "\n".join([INTRODUCTION, f"{about}\n", *sections])


def section(
    study: Study,
    ends: Mapping[str, Sequence[Trained]],
    found: Mapping[str, Judged],
    image: str,
) -> str:
    """The results of one scenario; ``image``: the file of its drawing."""
    run = study.first
    dense = ends[study.dense.name]
    sent = statistics.median(end.sent for end in dense)
    name, size = f"{study.dense.name} (dense)", f"{sent:,.0f} bytes"
    given = name, *_steps(dense), "1", size, _seconds(dense), "1", "-", "-"
    rows: list[tuple[str, ...]] = [given]
    rows += [_row(method, ends[method.name], found[method.name]) for method in study.methods]
    timed = any(end.seconds for end in dense)
    places = [i for i, heading in enumerate(HEADINGS) if timed or heading not in _OF_SECONDS]
    headings, *rows = (tuple(row[place] for place in places) for row in (HEADINGS, *rows))
    params = ", ".join(f"{key} {value}" for key, value in run.workload.params.items())
    setting = (
        f"{run.workload.name} ({params}), {run.world} ranks on {run.backend}, "
        f"batch {run.workload.global_batch}, SGD lr {run.optimizer.lr:g} momentum "
        f"{run.optimizer.momentum:g}; target {run.target:g} within {run.steps} steps, looked at "
        f"every {run.every} on {run.judged_on} samples; {len(study.dense.runs)} seeds; "
        f"margin {study.margin:g}."
    )
    parts = [f"## {study.name}\n", f"{study.about}\n", f"{setting}\n"]
    parts.append(Table("", headings, rows).markdown())
    if timed:
        parts.append(f"{in_wall_time(ends)}\n")
    elif run.timed:
        parts.append("No seconds are given: ranks had no cores of their own.\n")
    for title, whys in (
        ("Not expected to be non-inferior", {m.name: m.reason for m in study.methods}),
        ("Not compared", {name: one.problem for name, one in found.items()}),
    ):
        if listed := [f"- `{name}`: {why}" for name, why in whys.items() if why]:
            parts.append(f"{title}:\n\n" + "\n".join(listed) + "\n")
    if image:
        parts.append(
            f"![{study.name}: loss over steps]({image})\n\n"
            "Median over seeds, with the band from the lowest to the highest; grey: dense "
            "training; dashed: the target. A run that has reached it stays at its last loss.\n"
        )
    return "\n".join(parts)


def _row(method: Method, ends: Sequence[Trained], found: Judged) -> tuple[str, ...]:
    sent = "-" if found.sent is None else f"{found.sent:.3g}x"
    right = "yes" if found.holds(method.expect) else "NO"
    figures = (found.ratio, sent, _seconds(ends), found.ratio_of_seconds)
    return (method.name, *_steps(ends), *figures, found.verdict, right)


def in_wall_time(ends: Mapping[str, Sequence[Trained]]) -> str:
    """The system that reaches the target first, as a sentence."""
    found = soonest(ends)
    if found is None:
        return "In wall time nothing is compared: fewer than two systems reached the target."
    beside = "; ".join(
        f"{interval(log)} of the seconds of `{n}`" for n, log in found.beside.items()
    )
    if found.open:
        others = " and ".join(f"`{name}`" for name in found.open)
        return (
            f"In wall time `{found.name}` takes the least seconds ({beside}), but the interval "
            f"next to {others} holds 1: which reaches the target first is not shown."
        )
    return f"In wall time `{found.name}` reaches the target first: {beside}."


def _seconds(ends: Sequence[Trained]) -> str:
    return _spread([end.seconds for end in ends if end.reached is not None and end.seconds], ".1f")


def _steps(ends: Sequence[Trained]) -> tuple[str, str]:
    steps = [end.reached for end in ends if end.reached is not None]
    return _spread(steps, "g"), f"{len(ends) - len(steps)} of {len(ends)}"


def _spread(values: Sequence[float], form: str) -> str:
    """The median, with the range."""
    if not values:
        return "-"
    median, least, most = (
        format(value, form) for value in (statistics.median(values), min(values), max(values))
    )
    return f"{median} ({least} to {most})"
