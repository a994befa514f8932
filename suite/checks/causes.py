"""What makes a wrong gradient: which micro-batches of which ranks are in it, and how often.

The gradient that a system holds is fitted by least squares with those that the oracle computes of
every micro-batch of every data coordinate, and with that of the step before.  Where the fit leaves
nothing over, its coefficients are the cause: 1/N everywhere is a mean in place of a sum, 0 for one
coordinate a rank that was left out, 1 for the last micro-batch alone a lost accumulation.  A
sentence comes before the numbers of the check; it decides nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from shardproof.evidence.assembled import Assembled, Evidence
from shardproof.oracle import training
from shardproof.workloads import for_case

#: What a fit may leave over, by dtype, relative to what is fitted.
LEFT_OVER = {"float64": 1e-7, "float32": 1e-3, "bfloat16": 0.03, "float16": 0.01}
#: Digits of a coefficient that count, by dtype.
DIGITS = {"float64": 6, "float32": 3, "bfloat16": 2, "float16": 2}
_CLOSE = 1e-5
_SHOWN = 3


def of_gradients(evidence: Evidence, step: int, state: Assembled) -> str:
    """A sentence on the first copy of the gradients of ``step``; empty: no fit explains them.

    Asked where a comparison has failed; gradients that have been clipped are no sums any more.
    """
    truth = evidence.truth.steps[step]
    held = _first(state, truth.gradients)
    names = list(held)
    wrong = [n for n in names if not _equal(held[n], truth.gradients[n], evidence)]
    if not wrong or not all(bool(held[n].isfinite().all()) for n in names):
        return ""
    parts = _parts(evidence, step)
    for scope in (names, wrong):
        found = _explained(evidence, step, held, truth.gradients, parts, scope)
        if found:
            where = "" if len(scope) == len(names) else f"in {_some(wrong)}: "
            return where + found
    return _other(held, truth.gradients, wrong)


def of_clipping(evidence: Evidence, step: int, state: Assembled) -> str:
    """A sentence on gradients after clipping: by what norm, and whether all were clipped."""
    truth = evidence.truth.steps[step]
    if truth.clipped is None:
        return ""
    held = _first(state, truth.clipped)
    limit = LEFT_OVER[evidence.case.lowest_dtype]
    times = _multiple(held, truth.clipped, limit)
    if times is not None and times > 0:
        whole = _multiple(held, truth.gradients, limit)
        if abs(times - 1) <= limit:
            return ""  # this copy is right
        if whole is not None and abs(whole - 1) <= limit:
            return "nothing was clipped"
        return f"clipped by a norm that is {1 / times:.4g} times the true one"
    left = [n for n in held if _multiple_of_one(held[n], truth.gradients[n], limit)]
    right = [n for n in held if _multiple_of_one(held[n], truth.clipped[n], limit)]
    if left and len(left) + len(right) == len(held):
        return f"not clipped: {_some(left)}"
    return ""


def of_update(evidence: Evidence, step: int, state: Assembled, truth: Mapping[str, Tensor]) -> str:
    """A sentence on parameters after the update of ``step``, from what was held before it."""
    before = (
        evidence.initial("parameters")
        if step == 0
        else evidence.observed(step - 1, "after_update", "parameters")
    ).first()
    held = _first(state, truth)
    names = [n for n in held if n in before and before[n].shape == held[n].shape]
    made = {n: held[n].double() - before[n].double() for n in names}
    wanted = {n: truth[n].double() - before[n].double() for n in names}
    # Differences of values have lost digits.
    times = _multiple(made, wanted, 1e-4)
    if times is None:
        still = [n for n in names if bool(wanted[n].any()) and not bool(made[n].any())]
        return f"not updated: {_some(still)}" if still else ""
    if abs(times) < 1e-6:
        return "no update was made"
    return "" if _is(times, 1.0, 1e-3) else f"every update is {times:.4g} times the true one"


def of_loss(evidence: Evidence, held: float, truth: float) -> str:
    """A sentence on a loss that is a known multiple of the true one."""
    known = _known(evidence)
    for number in {n for n in known.values() if n > 1}:
        for times in (number, 1 / number):
            if abs(held - times * truth) <= 1e-6 * abs(times * truth):
                return _factor(times, known).replace("every gradient", "the loss")
    return ""


def _first(state: Assembled, like: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """One copy of each tensor of the shape that ``like`` has of it."""
    found = state.first()
    return {n: found[n] for n, want in like.items() if n in found and found[n].shape == want.shape}


def _multiple(
    held: Mapping[str, Tensor], truth: Mapping[str, Tensor], limit: float
) -> float | None:
    """``a`` where all of ``held`` is a times ``truth``; ``None``: it is no multiple."""
    names = [name for name in held if name in truth]
    got, want = _flat(held, truth, names), _flat(truth, truth, names)
    size = float(want @ want)
    if not size or not bool(got.isfinite().all()):
        return None
    times = float(got @ want) / size
    scale = max(float(got.norm()), float(want.norm()))
    return times if float((got - times * want).norm()) <= limit * scale else None


def _multiple_of_one(held: Tensor, truth: Tensor, limit: float) -> bool:
    times = _multiple({"": held}, {"": truth}, limit)
    return times is not None and abs(times - 1) <= limit


def _equal(held: Tensor, want: Tensor, evidence: Evidence) -> bool:
    limit = LEFT_OVER[evidence.case.lowest_dtype] * float(want.double().norm())
    return float((held.double() - want.double()).norm()) <= limit


def _parts(evidence: Evidence, step: int) -> list[list[dict[str, Tensor]]]:
    """Gradients of every micro-batch of every data coordinate, from what the system held before."""
    state = evidence.initial if step == 0 else None
    kinds = ("parameters", "buffers")
    held = {
        kind: (state(kind) if state else evidence.observed(step - 1, "after_update", kind)).tensors
        for kind in kinds
    }
    workload = for_case(evidence.case)
    batches = workload.batch(step, evidence.case.data_coordinates)
    parameters = {name: copies[min(copies)] for name, copies in held["parameters"].items()}
    return [
        training.parts(
            workload,
            evidence.case.precision,
            parameters
            | {n: copies[min(number, max(copies))] for n, copies in held["buffers"].items()},
            batch,
        )
        for number, batch in enumerate(batches)
    ]


def _explained(
    evidence: Evidence,
    step: int,
    held: Mapping[str, Tensor],
    truth: Mapping[str, Tensor],
    parts: Sequence[Sequence[Mapping[str, Tensor]]],
    names: Sequence[str],
) -> str:
    """What the fit over the tensors ``names`` says; empty: it leaves something over."""
    columns = [_flat(micro, truth, names) for share in parts for micro in share]
    if step:
        columns.append(_flat(evidence.truth.steps[step - 1].gradients, truth, names))
    got = _flat(held, truth, names)
    # A micro-batch that has no such gradient says nothing of how often it was counted.
    there = [number for number, column in enumerate(columns) if bool(column.any())]
    if len(there) >= len(got):
        return ""
    matrix = torch.stack([columns[number] for number in there], dim=1) if there else None
    if matrix is None or not bool(matrix.isfinite().all()):
        return ""
    scales = matrix.norm(dim=0)
    fit = torch.linalg.lstsq(matrix / scales, got.unsqueeze(1), driver="gelsd").solution
    counts = fit.squeeze(1) / scales
    dtype = evidence.case.lowest_dtype
    left_over = float((got - matrix @ counts).norm())
    if left_over > LEFT_OVER[dtype] * max(float(got.norm()), 1e-300):
        return ""
    counted = dict(zip(there, counts.tolist(), strict=True))
    numbers = iter(range(len(columns)))
    rows = [[counted.get(next(numbers)) for _ in share] for share in parts]
    before = counted.get(next(numbers, -1)) or 0.0
    return said(rows, before, _known(evidence), DIGITS[dtype])


def _flat(
    tensors: Mapping[str, Tensor], like: Mapping[str, Tensor], names: Sequence[str]
) -> Tensor:
    """The tensors ``names`` end to end in fp64; 0 where there is none."""
    return torch.cat(
        [
            (tensors[n] if n in tensors else torch.zeros_like(like[n])).double().reshape(-1)
            for n in names
        ]
    )


def _known(evidence: Evidence) -> dict[str, float]:
    """What factors are often made of."""
    case = evidence.case
    micro_batches = max(case.workload.micro_batch_counts(case.data_coordinates), default=1)
    scale = evidence.oracle.steps[0].scale if evidence.oracle.steps else None
    axes = {f"ranks of the axis {axis!r}": size for axis, size in case.mesh.items()}
    known = {"ranks": case.world, **(axes if len(case.mesh) > 1 else {})}
    return known | {
        "micro-batches": micro_batches,
        "ranks x micro-batches": case.world * micro_batches,
        "loss scale": scale or 1.0,
    }


# ------------------------------------------------------------------------------------- sentences


def said(
    rows: Sequence[Sequence[float | None]],
    before: float,
    known: Mapping[str, float] | None = None,
    digits: int = 6,
) -> str:
    """What the coefficients mean: ``rows[coordinate][micro-batch]``, and that of the step before.

    ``None``: there was nothing to count.  Empty where all are 1.
    """
    found = [value for row in rows for value in row if value is not None]
    largest = max(map(abs, (*found, before)), default=0.0)

    def snapped(value: float) -> float:
        return float(f"{value:.{digits}g}") if abs(value) > 10.0**-digits * largest else 0.0

    # What is not there counts as whatever stands beside it.
    usual = next((value for value in found), 1.0)
    filled = []
    for row in rows:
        own = next((value for value in row if value is not None), usual)
        filled.append([snapped(own if value is None else value) for value in row])
    values, before = [value for row in filled for value in row], snapped(before)
    if before and not any(values):
        return "this is the gradient of the step before"
    also = f"that of the step before is in it {before:.4g} times" if before else ""
    if all(_is(value, 1.0) for value in values):
        return also
    cause = _of_parts(filled, values, known or {}, 10.0 ** (1 - digits))
    return "; ".join(filter(None, (cause, also)))


def _of_parts(
    rows: Sequence[Sequence[float]],
    values: Sequence[float],
    known: Mapping[str, float],
    close: float,
) -> str:
    if all(_is(value, values[0]) for value in values):
        return _factor(values[0], known, close)
    if all(_is(value, row[0]) for row in rows for value in row):
        return _by("data coordinate", [row[0] for row in rows if row])
    depth = max(map(len, rows))
    last = [[float(at == len(row) - 1) for at in range(len(row))] for row in rows]
    if _agree(rows, last):
        return "only the last micro-batch is in it"
    if _agree(rows, [[float(at == 0) for at in range(len(row))] for row in rows]):
        return "only the first micro-batch is in it"
    by_micro = [[row[at] for row in rows if at < len(row)] for at in range(depth)]
    if all(_is(value, column[0]) for column in by_micro for value in column):
        return _by("micro-batch", [column[0] for column in by_micro])
    odd = [
        f"micro-batch {at} of data coordinate {number} counts {value:.4g} times"
        for number, row in enumerate(rows)
        for at, value in enumerate(row)
        if not _is(value, 1.0)
    ]
    return "; ".join(odd[:_SHOWN]) + (f"; {len(odd) - _SHOWN} more" if len(odd) > _SHOWN else "")


def _by(what: str, values: Sequence[float]) -> str:
    present = [number for number, value in enumerate(values) if value]
    if len(present) == 1 and len(values) > 1:
        value = values[present[0]]
        times = "" if _is(value, 1.0) else f", {value:.4g} times"
        if what == "data coordinate":
            return f"this is the gradient of {what} {present[0]} alone{times}: it was not reduced"
        return f"only {what} {present[0]} is in it{times}"
    missing = [number for number in range(len(values)) if number not in present]
    odd = [
        f"{what} {number} counts {values[number]:.4g} times"
        for number in present
        if not _is(values[number], 1.0)
    ]
    lacks = [f"the share of {what} {number} is missing" for number in missing]
    return "; ".join((*lacks, *odd)[: 2 * _SHOWN])


def _factor(value: float, known: Mapping[str, float], close: float = 1e-5) -> str:
    if abs(value) < 1e-9:
        return "every gradient is zero"
    if value < 0:
        return f"every gradient has the wrong sign ({value:.4g} times the true one)"
    size = f"{value:.4g} times too large" if value > 1 else f"{1 / value:.4g} times too small"
    ratio = max(value, 1 / value)
    names = [n for n, k in known.items() if k > 1 and abs(ratio - k) <= close * k]
    of = f" ({ratio:.4g} = {' = '.join(names)})" if names else ""
    return f"every gradient is {size}{of}"


def _is(value: float, number: float, close: float = _CLOSE) -> bool:
    return abs(value - number) <= close * max(abs(number), 0.1)


def _agree(rows: Sequence[Sequence[float]], pattern: Sequence[Sequence[float]]) -> bool:
    return all(
        _is(value, wanted)
        for row, wants in zip(rows, pattern, strict=True)
        for value, wanted in zip(row, wants, strict=True)
    )


def _other(held: Mapping[str, Tensor], truth: Mapping[str, Tensor], wrong: Sequence[str]) -> str:
    """Causes that no sum of gradients explains."""
    moved = [n for n in wrong if held[n].numel() > 1 and _same_elements(held[n], truth[n])]
    if moved:
        return f"the right elements in another order: {_some(moved)}"
    if _multiple({n: held[n] for n in wrong}, truth, 1e-7) is not None:
        return ""
    errors = [
        float((held[n].double() - truth[n].double()).norm() / truth[n].double().norm())
        for n in wrong
        if bool(truth[n].any())
    ]
    for dtype, low, high in (("float32", 1e-9, 1e-6), ("bfloat16 or float16", 1e-5, 1e-2)):
        if len(errors) > 2 and low < min(errors) <= max(errors) < high:
            return f"{len(wrong)} gradients are as wrong as a cast to {dtype} makes them"
    return ""


def _same_elements(one: Tensor, other: Tensor) -> bool:
    a, b = (t.double().reshape(-1).sort().values for t in (one, other))
    return torch.allclose(a, b, rtol=1e-9, atol=0.0)


def _some(names: Sequence[str]) -> str:
    shown = ", ".join(map(repr, names[:_SHOWN]))
    return shown + (f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else "")
