"""Fits of held values: which of several candidates, or which multiple of the truth; in words.

Small errors are like the truth, and so is a cause that changes nothing in this case.  So a cause
counts only where it leaves over at most a tenth of what the truth leaves over.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from math import inf
from typing import TypeVar

import torch
from torch import Tensor

from shardproof import table
from shardproof.checks.results import ALIKE
from shardproof.contract import Piece
from shardproof.evidence.assembled import Assembled, Evidence
from shardproof.oracle import training
from shardproof.workloads import for_case

Tensors = Mapping[str, Tensor]
Number = TypeVar("Number", Tensor, float)
#: Coefficients by data coordinate and micro-batch; ``None``: the micro-batch has no gradient there.
Rows = Sequence[Sequence[float | None]]

#: What a fit may leave over, by dtype, relative to what is fitted.
LEFT_OVER = {"float64": 1e-7, "float32": 1e-3, "bfloat16": 0.03, "float16": 0.01}
#: Digits of a coefficient that count, by dtype.
DIGITS = {"float64": 6, "float32": 3, "bfloat16": 2, "float16": 2}
#: What a cause may leave over of what the truth leaves over, or a cause that was tried before it.
MUCH = 0.1
#: What is left over of this part of a limit is round-off.
_ROUND_OFF = 1e-5
#: Names, or samples, in a sentence.
SHOWN = 3
#: How near a coefficient is to the number that it stands for.
_CLOSE = 1e-5


def limit_of(evidence: Evidence) -> float:
    """The most that a fit may leave over in this case."""
    return LEFT_OVER[evidence.case.lowest_dtype]


def first(state: Assembled, like: Tensors) -> dict[str, Tensor]:
    """One copy of each tensor of the shape that ``like`` has of it."""
    found = state.first()
    return {n: found[n] for n, want in like.items() if n in found and found[n].shape == want.shape}


def flat(tensors: Tensors, like: Tensors, names: Sequence[str]) -> Tensor:
    """The tensors ``names`` end to end in fp64; 0 where there is none."""
    return end_to_end(tensors[n] if n in tensors else torch.zeros_like(like[n]) for n in names)


def end_to_end(tensors: Iterable[Tensor]) -> Tensor:
    """All elements in fp64, one tensor after the other."""
    return torch.cat([tensor.double().reshape(-1) for tensor in tensors])


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
    if not (names := [name for name in held if name in truth]):
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
    return _apart(held, want) <= limit * _size(want)


def same(held: Tensor, want: Tensor) -> bool:
    """Whether they have one shape and the same numbers, in whatever dtypes."""
    return torch.equal(held.double(), want.double())


def all_equal(held: Tensors, want: Tensors, names: Sequence[str], limit: float) -> bool:
    """Whether each of ``names`` is the other's."""
    return all(n in held and n in want and equal(held[n], want[n], limit) for n in names)


def same_elements(one: Tensor, other: Tensor) -> bool:
    """Whether both hold the same numbers, in another order."""
    if one.numel() != other.numel():
        return False
    flat = [t.double().reshape(-1) for t in (one, other)]
    # Sorted, a permutation is undone: what is left over then is round-off.
    a, b = (t.sort().values for t in flat)
    is_much = (a - b).norm() <= MUCH * (flat[0] - flat[1]).norm()
    return bool(is_much) and torch.allclose(a, b, rtol=1e-9, atol=0.0)


def state_before(evidence: Evidence, step: int) -> dict[str, dict[str, dict[int, Tensor]]]:
    """Kind -> name -> copies of what the system held before ``step``."""
    kinds = "parameters", "buffers"
    if step:
        return {kind: evidence.observed(step - 1, "after_update", kind).tensors for kind in kinds}
    return {kind: evidence.initial(kind).tensors for kind in kinds}


def states(evidence: Evidence, step: int) -> list[dict[str, Tensor]]:
    """Parameters and buffers with which each data coordinate is to begin ``step``."""
    held = state_before(evidence, step)
    parameters = {name: copies[min(copies)] for name, copies in held["parameters"].items()}
    #     rank0     every coordinate begins with the first copy
    #     others    each with its own, or with the last one where there are fewer copies
    sent = evidence.declaration.buffers == "rank0"
    # A system that promises nothing of buffers need not show them: the model runs on those given.
    given = for_case(evidence.case).state()
    return [
        {name: given[name] for name in given if name not in parameters}
        | parameters
        | {n: c[min(c) if sent else min(number, max(c))] for n, c in held["buffers"].items()}
        for number in range(len(evidence.shares(step)))
    ]


def parts(
    evidence: Evidence, step: int, change: training.Change = None
) -> list[list[dict[str, Tensor]]]:
    """Gradients of every micro-batch of every data coordinate, from what the system held before.

    ``change`` is made to the model first.
    """
    workload, precision = for_case(evidence.case), evidence.case.precision
    began, shares = states(evidence, step), evidence.shares(step)
    pulls: training.Pulls = [[] for _ in shares]
    if terms := workload.build_for(0).terms:
        pairs = zip(began, shares, strict=True)
        own = [training.statistics(workload, precision, *pair, terms) for pair in pairs]
        pulls = training.pulls(terms, own)
    each = zip(began, shares, pulls, strict=True)
    return [training.parts(workload, precision, *one, change=change) for one in each]


def pieces(
    evidence: Evidence, step: int, point: str, kind: str
) -> Iterator[tuple[int, list[Piece]]]:
    """Every rank with its own pieces of ``kind`` at a moment (step -1: after ``setup``)."""
    for rank, record in evidence.ranks.items():
        kinds = record.initial if step < 0 else record.steps[step].observed.get(point, {})
        yield rank, list(kinds.get(kind, ()))


def known(evidence: Evidence, step: int = 0) -> dict[str, float]:
    """The usual components of factors."""
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
    """The first three of ``names``, and the number of the others."""
    return table.some([*map(repr, names)], SHOWN)


def of_others(wrong: Mapping[int, Collection[str]], held: Mapping[int, Collection[str]]) -> str:
    """Words for names that are right on their owner only: each on one of the ranks, or on none.

    ``wrong``, ``held``: names by rank, or by copy.  Empty: another pattern, or none.
    """
    right = {rank: {*names} - {*wrong.get(rank, ())} for rank, names in held.items()}
    owned = [name for names in right.values() for name in names]
    if len(held) < 2 or not all(right.values()) or len(owned) > len({*owned}):
        return ""
    return "on each rank, of what other ranks own"


# ------------------------------------------------------------------------- coefficients in words


def said(
    rows: Rows, before: float, known: Mapping[str, float] | None = None, digits: int = 6
) -> str:
    """The meaning of coefficients: ``rows[coordinate][micro-batch]``, and that of the step before.

    ``None``: there was nothing to count.  Empty where all are 1.
    """
    found = [value for row in rows for value in row if value is not None]
    largest = max(map(abs, (*found, before)), default=0.0)

    def snapped(value: float) -> float:
        return float(f"{value:.{digits}g}") if abs(value) > 10.0**-digits * largest else 0.0

    # What is not there counts as whatever stands beside it.
    usual = next(iter(found), 1.0)
    filled = []
    for row in rows:
        own = next((value for value in row if value is not None), usual)
        filled.append([snapped(own if value is None else value) for value in row])
    values, before = [value for row in filled for value in row], snapped(before)
    if before and not any(values):
        times = "" if close(before, 1.0) else f", {before:.4g} times"
        return f"this is the gradient of the step before{times}"
    also = f"the gradient contains that of the step before {before:.4g} times" if before else ""
    if all(close(value, 1.0) for value in values):
        return also
    cause = _of_parts(filled, known or {}, 10.0 ** (1 - digits))
    return "; ".join(filter(None, (cause, also)))


def _of_parts(rows: Sequence[Sequence[float]], known: Mapping[str, float], within: float) -> str:
    values = [value for row in rows for value in row]
    if all(close(value, values[0]) for value in values):
        return factor(values[0], known, within)
    #     1 1      differs by coordinate      1 0      differs by micro-batch
    #     0 0                                 1 0
    if all(close(value, row[0]) for row in rows for value in row):
        return _by("data coordinate", [row[0] for row in rows if row])
    for one, which in ((-1, "last"), (0, "first")):
        if all(close(v, at == one % len(row)) for row in rows for at, v in enumerate(row)):
            return f"the gradient contains only the {which} micro-batch"
    columns = [[row[at] for row in rows if at < len(row)] for at in range(max(map(len, rows)))]
    if all(close(value, column[0]) for column in columns for value in column):
        return _by("micro-batch", [column[0] for column in columns])
    odd = [
        f"micro-batch {at} of data coordinate {number} counts {value:.4g} times"
        for number, row in enumerate(rows)
        for at, value in enumerate(row)
        if not close(value, 1.0)
    ]
    return "; ".join(odd[:SHOWN]) + (f"; {len(odd) - SHOWN} more" if len(odd) > SHOWN else "")


def _by(what: str, values: Sequence[float]) -> str:
    present = [number for number, value in enumerate(values) if value]
    if len(present) == 1 and len(values) > 1:
        value = values[present[0]]
        times = "" if close(value, 1.0) else f", {value:.4g} times"
        if what == "data coordinate":
            return f"this is the gradient of {what} {present[0]} alone{times}: it was not reduced"
        return f"only {what} {present[0]} is in it{times}"
    odd = [
        f"{what} {number} counts {values[number]:.4g} times"
        for number in present
        if not close(values[number], 1.0)
    ]
    lacks = [f"the share of {what} {n} is missing" for n, value in enumerate(values) if not value]
    return "; ".join((*lacks, *odd)[: 2 * SHOWN])


def factor(value: float, known: Mapping[str, float], within: float = _CLOSE) -> str:
    """The meaning of a factor of all gradients, by the numbers that factors are made of."""
    if abs(value) < 1e-9:
        return "every gradient is zero"
    if value < 0:
        return f"every gradient has the wrong sign ({value:.4g} times the true one)"
    #     value      4         1/4        the ratio of both is 4: it is looked up in ``known``
    #     in words   too large too small
    large = value > 1
    size = f"{number(value if large else 1 / value)} times too {'large' if large else 'small'}"
    ratio = max(value, 1 / value)
    names = [n for n, k in known.items() if k > 1 and abs(ratio - k) <= within * k]
    of = f" ({ratio:.4g} = {' or '.join(names)}{ALIKE * (len(names) > 1)})" if names else ""
    return f"every gradient is {size}{of}"


def number(value: float) -> str:
    """``value`` with four digits, or what it is more or less than 1 where these do not tell."""
    short = f"{value:.4g}"
    more = value - 1
    return short if short != "1" or not more else f"1 {'-+'[more > 0]} {abs(more):.2g}"


def same_of_loss(loss: str, gradients: str) -> bool:
    """Whether what is said of the ``loss`` says what is said of ``gradients``, too."""
    by_weight = "counts the same" in loss or "window" in loss
    if by_weight and "every gradient" not in gradients:
        return True  # other weights of micro-batches: the fit tells how often each is counted
    whole = [("the loss of", "the share of"), ("the gradient of", "the share of")]
    it = [(words, "it") for words in ("every gradient", "the gradient", "the loss")]
    for words, plain in (*whole, *it):
        loss, gradients = loss.replace(words, plain), gradients.replace(words, plain)
    return gradients.removesuffix(": it was not reduced") == loss


def close(value: float, number: float, within: float = _CLOSE) -> bool:
    """Whether ``value`` is ``number`` but for noise."""
    return abs(value - number) <= within * max(abs(number), 0.1)
