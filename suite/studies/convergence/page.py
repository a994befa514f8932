"""The page of a convergence study, in Markdown."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence

from shardproof.studies.convergence.judge import Judged
from shardproof.studies.convergence.plan import Method, Study
from shardproof.studies.convergence.training import Trained
from shardproof.table import Table

INTRODUCTION = """\
# Convergence

Written by `shardproof study convergence`. Every method trains to a target loss with the same seeds
as dense synchronous training (equal initial values, batches and order); the loss is that of one
fixed batch of training data. Ranks stop together, by a vote. *Ratio*: steps to the target over
dense training's, the geometric mean over seeds with the 95 % interval of a paired t on logarithms.
*Non-inferior*: its upper end is below the margin; *inferior*: its lower end is above; *not shown*:
neither. A method that misses the target with some seed is never non-inferior; that seed counts with
the whole budget, so the ratio, but neither end of its interval, is a lower bound. Bytes are those
that all ranks send in steps, by the collective model.

Small models at one learning rate, the same for all: the page shows what each method does here, and
that faults which equality cannot see are seen. It ranks no methods.
"""
HEADINGS = (
    *("method", "steps to target: median (range)", "missed", "ratio of steps [95 %]"),
    *("bytes to target", "verdict", "as expected"),
)


def document(about: str, sections: Sequence[str]) -> str:
    """The whole page."""
    return "\n".join([INTRODUCTION, f"{about}\n", *sections])


def section(
    study: Study,
    ends: Mapping[str, Sequence[Trained]],
    found: Mapping[str, Judged],
    image: str,
) -> str:
    """What came of one scenario; ``image``: the file of its drawing."""
    run = study.first
    dense = ends[study.dense.name]
    sent = statistics.median(end.sent for end in dense)
    given = f"{study.dense.name} (dense)", *_steps(dense), "1", f"{sent:,.0f} bytes", "-", "-"
    rows: list[tuple[str, ...]] = [given]
    rows += [_row(method, ends[method.name], found[method.name]) for method in study.methods]
    params = ", ".join(f"{key} {value}" for key, value in run.workload.params.items())
    setting = (
        f"{run.workload.name} ({params}), {run.world} ranks, batch {run.workload.global_batch}, "
        f"SGD lr {run.optimizer.lr:g} momentum {run.optimizer.momentum:g}; target {run.target:g} "
        f"within {run.steps} steps, looked at every {run.every} on {run.judged_on} samples; "
        f"{len(study.dense.runs)} seeds; margin {study.margin:g}."
    )
    parts = [f"## {study.name}\n", f"{study.about}\n", f"{setting}\n"]
    parts.append(Table("", HEADINGS, rows).markdown())
    reasons = [f"- `{m.name}`: {m.reason}" for m in study.methods if m.reason]
    problems = [f"- `{name}`: {one.problem}" for name, one in found.items() if one.problem]
    if reasons:
        parts.append("Not expected to be non-inferior:\n\n" + "\n".join(reasons) + "\n")
    if problems:
        parts.append("Not compared:\n\n" + "\n".join(problems) + "\n")
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
    return (method.name, *_steps(ends), found.ratio, sent, found.verdict, right)


def _steps(ends: Sequence[Trained]) -> tuple[str, str]:
    steps = [end.reached for end in ends if end.reached is not None]
    missed = len(ends) - len(steps)
    if not steps:
        return "-", f"{missed} of {len(ends)}"
    return (
        f"{statistics.median(steps):g} ({min(steps)} to {max(steps)})",
        f"{missed} of {len(ends)}",
    )
