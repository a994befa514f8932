"""Whether a run under torchrun equals the training of one process with the same members.

From what ranks wrote: which group committed each step, and whether it was one alone; whether each
sample was trained on once; the losses of every step, and all that each rank holds after the last
one, beside the oracle's; who was refused.  Two runs of one history: the digests of every step.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from shardproof import tensor_bytes, workloads
from shardproof.checks.numbers import FP64_BOUND, relative_frobenius, split_zero
from shardproof.oracle import training
from shardproof.oracle.truth import Truth
from tools.studies.elastic import records
from tools.studies.elastic.history import SPLITS, History, of_worlds
from tools.studies.elastic.records import Generation

_SHOWN = 3


@dataclass
class Judged:
    """The result of one run; it holds if ``problems`` is empty."""

    problems: list[str] = field(default_factory=list)
    generations: int = 0
    refusals: list[str] = field(default_factory=list)
    #: Members that committed each step.
    members: list[tuple[int, ...]] = field(default_factory=list)
    compared: int = 0
    worst: float = 0.0
    #: Step, then rank: digests of all that it held.
    digests: list[list[Any]] = field(default_factory=list)


def judge(history: History, folder: Path) -> Judged:
    """Judge the run in ``folder``."""
    found = records.generations(folder)
    judged = Judged(generations=len(found))
    judged.refusals = [r.refused for one in found for r in one.ranks.values() if r.refused]
    groups = committers(found, history.steps, judged.problems)
    judged.problems += _refused(history, folder, judged.refusals)
    if judged.problems:
        return judged
    judged.members = [group.members for group in groups]
    for step, (members, wanted) in enumerate(zip(judged.members, history.told(), strict=True)):
        if members != wanted:
            judged.problems.append(f"step {step}: committed by members {members}, not {wanted}")
    judged.problems += samples(history, groups)
    if not judged.problems:
        judged.digests = [
            [one.steps[step]["digests"] for one in group.ranks.values()]
            for step, group in enumerate(groups)
        ]
        _compare(history, groups, truth_of(history), judged)
    return judged


def committers(found: Sequence[Generation], steps: int, problems: list[str]) -> list[Generation]:
    """The group that committed each step; ``problems``: no group, or several.

    Who was there saw it, or was killed before it could say so: then the next group loaded it.
    """
    groups: list[Generation] = []
    for step in range(steps):
        saw = [one for one in found if one.saw_committed(step)]
        last = [one for one in found if one.has_made(step)][-1:]
        behind = any(one.loaded > step and one.number > last[0].number for one in found if last)
        if len(saw) > 1:
            numbers = " and ".join(str(one.number) for one in saw)
            problems.append(f"step {step}: committed by groups {numbers}, each for itself")
        elif saw or behind:
            groups.append((saw or last)[0])
        else:
            problems.append(f"step {step}: committed by no member")
    return groups


def samples(history: History, groups: Sequence[Generation]) -> list[str]:
    """The problems of the samples of committed steps: each of the sequence of epochs must come
    once.
    """
    problems, first, began = [], 0, groups[0].world
    for step, group in enumerate(groups):
        due = range(first, first + history.batch_size(group.world, began))
        taken = sorted(i for rank in group.ranks.values() for i in rank.steps[step]["samples"])
        if taken != [*due]:
            what = f"not {len(due)} from {due.start} on, each once"
            problems.append(f"step {step}: trained on samples {taken}, {what}")
        first = due.stop
    return problems


def truth_of(history: History, worlds: Sequence[int] = ()) -> Truth:
    """The oracle for the history's numbers of members per step."""
    told = of_worlds(history, worlds or history.worlds())
    most = max(len(step.members) for step in told)
    workload = workloads.make(history.workload)
    way = training.Way(members=told)
    return training.train(workload, history.optimizer, most, history.steps, "per_rank", way)


def differs_in(one: Judged, other: Judged) -> str:
    """The first bit in which two runs of one history differ (empty: none)."""
    for step, (ours, theirs) in enumerate(zip(one.digests, other.digests, strict=True)):
        for rank, (mine, its) in enumerate(zip(ours, theirs, strict=True)):
            for name in (name for name in mine if mine[name] != its.get(name)):
                return f"step {step}, rank {rank}: {name} has other bits in another run"
    return ""


def _refused(history: History, folder: Path, refusals: Sequence[str]) -> list[str]:
    """Whether saves were refused where two groups had one folder, and nowhere else."""
    splits = sum(event.what in SPLITS for event in history.events)
    if len(refusals) != splits:
        said = "; ".join(refusals[:_SHOWN]) or "none"
        return [f"{len(refusals)} saves were refused, {splits} had to be: {said}"]
    return [
        f"a refusal names no folder, or no remedy: {said}"
        for said in refusals
        if str(folder / records.CHECKPOINTS) not in said or "end one of the two" not in said
    ]


def _compare(history: History, groups: Sequence[Generation], truth: Truth, judged: Judged) -> None:
    """Compare the losses of all steps, and the state after the last one, with the oracle's."""

    def note(what: str, error: float) -> None:
        judged.compared += 1
        judged.worst = max(judged.worst, error) if error == error else math.inf
        if not error <= FP64_BOUND:
            said = f"{what} differs from the oracle's, {error:.1e} against {FP64_BOUND:g}"
            judged.problems.append(said)

    for step, (group, wanted) in enumerate(zip(groups, truth.steps, strict=True)):
        loss = sum(rank.steps[step]["loss"] for rank in group.ranks.values())
        note(f"step {step}: the loss", abs(loss - wanted.loss) / abs(wanted.loss))
    last, end = groups[-1], truth.steps[-1]
    regions = workloads.make(history.workload).zero_gradient
    compare = relative_frobenius(FP64_BOUND)
    for rank in last.ranks:
        held = tensor_bytes.load(last.path / f"rank{rank}.end")
        whole = {
            "parameters": end.parameters,
            "optimizer": end.optimizer,
            "buffers": end.buffers[rank],
        }
        for kind, wanted_tensors in whole.items():
            if odd := sorted(held[kind].keys() ^ wanted_tensors.keys()):
                judged.problems.append(f"rank {rank}: {kind} of one side only: {odd[:_SHOWN]}")
                continue
            for name, tensor in wanted_tensors.items():
                # Where the true gradient is zero its rounding is all that there is.
                silent = regions.get(name) or regions.get(name.rpartition(".")[0]) or ()
                silent = silent if tensor.dim() else ()  # Adam's count of steps
                mine, its = (split_zero(t, silent)[0] for t in (held[kind][name], tensor))
                note(f"rank {rank}: {kind} {name}", compare(mine, its).error)
