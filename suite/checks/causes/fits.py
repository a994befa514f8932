"""What fits what a system holds: which of several values, or which multiple of the truth.

Small errors are like the truth, and so is a cause that changes nothing in this case.  So a cause
counts only where it leaves over at most a tenth of what the truth leaves over.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from math import inf
from typing import TypeVar

import torch
from torch import Tensor

from shardproof import table
from shardproof.contract import Piece
from shardproof.evidence.assembled import Assembled, Evidence
from shardproof.oracle import training
from shardproof.workloads import for_case

Tensors = Mapping[str, Tensor]
Number = TypeVar("Number", Tensor, float)

#: What a fit may leave over, by dtype, relative to what is fitted.
LEFT_OVER = {"float64": 1e-7, "float32": 1e-3, "bfloat16": 0.03, "float16": 0.01}
#: Digits of a coefficient that count, by dtype.
DIGITS = {"float64": 6, "float32": 3, "bfloat16": 2, "float16": 2}
#: What a cause may leave over of what the truth leaves over, or a cause that was tried before it.
MUCH = 0.1
#: What is left over of this part of a limit is round-off.
_ROUND_OFF = 1e-5
_SHOWN = 3


def limit_of(evidence: Evidence) -> float:
    """What a fit may leave over in this case."""
    return LEFT_OVER[evidence.case.lowest_dtype]


def first(state: Assembled, like: Tensors) -> dict[str, Tensor]:
    """One copy of each tensor of the shape that ``like`` has of it."""
    found = state.first()
    return {n: found[n] for n, want in like.items() if n in found and found[n].shape == want.shape}


def flat(tensors: Tensors, like: Tensors, names: Sequence[str]) -> Tensor:
    """The tensors ``names`` end to end in fp64; 0 where there is none."""
    return torch.cat(
        [
            (tensors[n] if n in tensors else torch.zeros_like(like[n])).double().reshape(-1)
            for n in names
        ]
    )


def nearest(held: Number, truth: Number, tries: Iterable[tuple[Number, str]], limit: float) -> str:
    """The sentence of the value that is nearest to ``held``; empty: none is near.

    Near is at most ``limit`` of its size, and much nearer than ``truth``.  Of values that are
    equally near the first tells.
    """
    found, least = "", _apart(held, truth)
    for value, sentence in tries:
        within = limit * max(_size(value), _size(truth))
        left = _apart(held, value)
        if left <= min(within, MUCH * least):
            found, least = sentence, left
            # No later value can be nearer but by round-off, and each may cost a step.
            if left <= _ROUND_OFF * within:
                break
    return found


def _apart(one: Tensor | float, other: Tensor | float) -> float:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return _size(one.double() - other.double()) if one.shape == other.shape else inf
    return _size(one - other)


def _size(value: Tensor | float) -> float:
    return float(value.double().norm()) if isinstance(value, Tensor) else abs(value)


def multiple(held: Tensors, truth: Tensors, limit: float) -> float | None:
    """``a`` where all of ``held`` is a times ``truth``; ``None``: it is no multiple.

    Exactly 1 where ``truth`` itself is as near but for ``limit``.
    """
    names = [name for name in held if name in truth]
    if not names:
        return None
    got, want = flat(held, truth, names), flat(truth, truth, names)
    size = float(want @ want)
    if not size or not bool(got.isfinite().all()):
        return None
    times = float(got @ want) / size
    #     left     what the multiple leaves over       apart    what 1 leaves over
    #     a cause counts where left is small, and at most MUCH of apart
    within = limit * max(float(got.norm()), float(want.norm()))
    left, apart = _size(got - times * want), _size(got - want)
    if apart <= _ROUND_OFF * within or (left > MUCH * apart and apart <= within):
        return 1.0
    return times if left <= min(within, MUCH * apart) else None


def equal(held: Tensor, want: Tensor, limit: float) -> bool:
    """Whether they have one shape and differ by at most ``limit`` of the second's norm."""
    if held.shape != want.shape:
        return False
    size = float(want.double().norm())
    return float((held.double() - want.double()).norm()) <= limit * size


def all_equal(held: Tensors, want: Tensors, names: Sequence[str], limit: float) -> bool:
    """Whether each of ``names`` is the other's."""
    return all(n in held and n in want and equal(held[n], want[n], limit) for n in names)


def state_before(evidence: Evidence, step: int) -> dict[str, dict[str, dict[int, Tensor]]]:
    """Kind -> name -> copies of what the system held before ``step``."""
    return {
        kind: (
            evidence.initial(kind)
            if step == 0
            else evidence.observed(step - 1, "after_update", kind)
        ).tensors
        for kind in ("parameters", "buffers")
    }


def states(evidence: Evidence, step: int) -> list[dict[str, Tensor]]:
    """Parameters and buffers with which each data coordinate is to begin ``step``."""
    held = state_before(evidence, step)
    parameters = {name: copies[min(copies)] for name, copies in held["parameters"].items()}
    #     rank0     every coordinate begins with the first copy
    #     others    each with its own, or with the last one where there are fewer copies
    sent = evidence.declaration.buffers == "rank0"
    return [
        parameters
        | {n: c[min(c) if sent else min(number, max(c))] for n, c in held["buffers"].items()}
        for number in range(len(evidence.shares(step)))
    ]


def parts(evidence: Evidence, step: int) -> list[list[dict[str, Tensor]]]:
    """Gradients of every micro-batch of every data coordinate, from what the system held before."""
    workload = for_case(evidence.case)
    batches = evidence.shares(step)
    return [
        training.parts(workload, evidence.case.precision, state, batch)
        for state, batch in zip(states(evidence, step), batches, strict=True)
    ]


def pieces(
    evidence: Evidence, step: int, point: str, kind: str
) -> Iterator[tuple[int, list[Piece]]]:
    """Every rank with its own pieces of ``kind`` at a moment (step -1: after ``setup``)."""
    for rank, record in evidence.ranks.items():
        kinds = record.initial if step < 0 else record.steps[step].observed.get(point, {})
        yield rank, list(kinds.get(kind, ()))


def known(evidence: Evidence, step: int = 0) -> dict[str, float]:
    """What factors are often made of."""
    case = evidence.case
    micro_batches = max(case.workload.micro_batch_counts(case.data_coordinates), default=1)
    ranks = len(evidence.members[step].members)
    scale = evidence.oracle.steps[step].scale if evidence.oracle.steps else None
    axes = {f"ranks of the axis {axis!r}": size for axis, size in case.mesh.items()}
    return {
        "ranks": ranks,
        **(axes if len(case.mesh) > 1 else {}),
        "micro-batches": micro_batches,
        "ranks x micro-batches": ranks * micro_batches,
        "loss scale": scale or 1.0,
    }


def some(names: Sequence[str]) -> str:
    """The first three of ``names``, and how many there are beside them."""
    return table.some([*map(repr, names)], _SHOWN)
