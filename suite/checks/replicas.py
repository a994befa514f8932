"""Copies of one tensor are equal, bit for bit, on all ranks that hold one.

Looks at parameters, gradients (final and after clipping) and optimizer state of every step, and at
the initial parameters.  Buffers are compared only under the declared rule ``synced``: after a clean
DDP step the ranks' BatchNorm buffers differ until the next broadcast.

*Cannot see* a fault that all replicas share, nor anything in a world of one replica.
"""

from __future__ import annotations

from suite.checks import Outcome, Worst
from suite.checks.numbers import bitwise
from suite.evidence import Assembled, Evidence


def judge(evidence: Evidence) -> Outcome:
    """Compare every replica with the first one."""
    compared = 0
    moments = [(-1, "initial", evidence.initial("parameters"))]
    for step in evidence.steps:
        for point in ("gradients_final", "after_clip"):
            if evidence.has(step, point):
                moments.append((step, point, evidence.observed(step, point, "gradients")))
        for kind in _settled_kinds(evidence):
            moments.append(
                (step, f"after_update {kind}", evidence.observed(step, "after_update", kind))
            )
    for step, phase, state in moments:
        for name, copies in state.tensors.items():
            first = min(copies)
            for replica, copy in copies.items():
                if replica == first:
                    continue
                compared += 1
                result = bitwise(copy, copies[first])
                if not result.ok:
                    worst = Worst(name, step, phase, f"replica {replica}", result.error, 0.0)
                    return Outcome(
                        "replicas",
                        "fail",
                        f"replicas {first} and {replica} differ in {int(result.error)} of "
                        f"{copy.numel()} elements of {name!r} at step {step} ({phase})",
                        worst,
                        {"compared": compared},
                    )
        lone = _lone(state, evidence.initial("parameters"))
        if lone:
            return Outcome("replicas", "fail", f"step {step} ({phase}): {lone}")
    if not compared:
        return Outcome("replicas", "skip", "no tensor has more than one replica")
    return Outcome("replicas", "pass", figures={"compared": compared, "different": 0})


def _settled_kinds(evidence: Evidence) -> list[str]:
    kinds = ["parameters", "optimizer"]
    if evidence.capabilities["buffers"] == "synced":
        kinds.append("buffers")
    return kinds


def _lone(state: Assembled, initial: Assembled) -> str:
    """A name that has other replicas than one that it had equally many copies with after setup.

    Names may differ in how often they exist (a weight split over tensor ranks exists once, a norm
    on each of them), but those that started alike stay alike.  Numbers that belong to a whole
    parameter (Adam's ``step``) are held by whoever needs them.
    """
    leaders: dict[frozenset[int], tuple[str, frozenset[int]]] = {}
    for name, copies in state.tensors.items():
        parameter = name if name in initial.tensors else name.rpartition(".")[0]
        if parameter not in initial.tensors:
            continue
        if parameter != name and next(iter(copies.values())).dim() == 0:
            continue
        kind, present = frozenset(initial.tensors[parameter]), frozenset(copies)
        other, expected = leaders.setdefault(kind, (name, present))
        if present != expected:
            return f"{name!r} exists on replicas {sorted(present)}, {other!r} on {sorted(expected)}"
    return ""
