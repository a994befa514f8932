"""Replicas of a tensor are equal, bit for bit, on all ranks that hold one.

Where ranks train alone that is so of what they share, and of parameters right after a meeting.
Between meetings replicas of the parameters must differ, as the oracle's trajectories do: ranks that
never part have done something else than what they say.  A case in which they never meet is a
``precondition``.  Their gradients and optimizer state are
their own.

Looks at parameters, gradients (final and after clipping), optimizer state and further state of
every step, and at the initial parameters.  Buffers are compared only under the declared rule
``synced``: after a clean DDP step the ranks' BatchNorm buffers differ until the next broadcast.

*Cannot see* a fault that all replicas share, nor anything in a world of one replica.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from shardproof.checks import Needs, Outcome, Worst
from shardproof.contract import is_outer
from shardproof.evidence.assembled import KEPT, Figures
from shardproof.evidence.records import TensorRow

NEEDS: Needs = ("values", "every rank")

#: Name -> replica -> what is stored of that copy.
Copies = Mapping[str, Mapping[int, TensorRow]]


def decide(figures: Figures) -> Outcome:
    """Compare every replica's digest with that of the first one."""
    moments = _moments(figures)
    steps = figures.oracle.steps
    if figures.declaration.trains_alone and not any(step.met for step in steps):
        text = f"ranks that train alone never synchronize in the {len(steps)} steps"
        then = "synchronization cannot be judged; synchronize more often, or take more steps"
        return Outcome("replicas", "precondition", f"{text}: {then}")
    initial = moments.get((-1, "initial", "parameters"), {})
    compared = parted = 0
    for (step, point, kind), tensors in moments.items():
        phase = f"{point} {kind}" if point == "after_update" else point
        truth = steps[step] if step >= 0 and steps else None
        if truth is not None and truth.parted and kind == "parameters":
            if not any(row.differs for copies in tensors.values() for row in copies.values()):
                text = "replicas are equal, though ranks trained alone and did not synchronize"
                return Outcome("replicas", "fail", f"step {step} ({phase}): {text}")
            parted += 1
            continue
        first_wrong: Outcome | None = None
        wrong: dict[str, set[int]] = {}
        for name, copies in tensors.items():
            first = min(copies)
            for replica, row in copies.items():
                if replica == first:
                    continue
                compared += 1
                # Digests differ, too, where 0 meets -0 or one NaN another: these are equal.
                if row.digest == copies[first].digest or not row.differs:
                    continue
                wrong.setdefault(name, set()).update(row.owners)
                if first_wrong is None:
                    worst = Worst(name, step, phase, f"replica {replica}", row.differs, 0.0)
                    meets = (
                        ", where ranks that train alone synchronize" if truth and truth.met else ""
                    )
                    where = f"at step {step} ({phase}{meets})"
                    count = f"{row.differs} of {math.prod(row.shape)} elements of {name!r}"
                    message = f"replicas {first} and {replica} differ in {count} {where}"
                    first_wrong = Outcome("replicas", "fail", message, worst)
        if first_wrong is not None:
            ranks = len(set().union(*wrong.values()))
            counts = f"{len(wrong)} of {len(tensors)} tensors, on {ranks} ranks"
            first_wrong.message += f" (different: {counts})"
            first_wrong.figures = {"compared": compared}
            return first_wrong
        if lone := _lone(tensors, initial):
            return Outcome("replicas", "fail", f"step {step} ({phase}): {lone}")
    if not compared:
        return Outcome("replicas", "skip", "no tensor has more than one replica")
    found = {"compared": compared, "different": 0} | ({"parted_steps": parted} if parted else {})
    return Outcome("replicas", "pass", figures=found)


def _moments(figures: Figures) -> dict[tuple[int, str, str], dict[str, dict[int, TensorRow]]]:
    """The stored copies that must be equal, by moment."""
    alone, synced = figures.declaration.trains_alone, figures.declaration.buffers == "synced"
    kinds = ["parameters", "gradients", "optimizer", "extra", *(["buffers"] if synced else [])]
    moments: dict[tuple[int, str, str], dict[str, dict[int, TensorRow]]] = {}
    for row in figures.tensors:
        if row.kind not in kinds or (row.step < 0 and row.kind != "parameters"):
            continue
        shared = row.kind == "parameters" or (row.kind == "optimizer" and is_outer(row.name))
        if alone and not shared:
            continue
        moment = moments.setdefault((row.step, row.point, row.kind), {})
        moment.setdefault(row.name, {})[row.replica] = row
    return moments


def _lone(state: Copies, initial: Copies) -> str:
    """A name whose replicas are not those of another name that started with as many.

    Names may differ in how often they exist (a weight split over tensor ranks exists once, a norm
    on each of them), but those that started alike stay alike.  Numbers that belong to a whole
    parameter (Adam's ``step``) are held by whoever needs them.
    """
    leaders: dict[frozenset[int], tuple[str, frozenset[int]]] = {}
    for name, copies in state.items():
        if KEPT in name:
            continue  # of one rank, or of all together
        parameter = name if name in initial else name.rpartition(".")[0]
        if parameter not in initial:
            continue
        if parameter != name and next(iter(copies.values())).shape == []:
            continue
        # Names that started on the same replicas are of one kind; the first name of a kind tells on
        # which replicas all its others must be.
        kind, present = frozenset(initial[parameter]), frozenset(copies)
        other, expected = leaders.setdefault(kind, (name, present))
        if present != expected:
            return f"{name!r} exists on replicas {sorted(present)}, {other!r} on {sorted(expected)}"
    return ""
