"""What makes a wrong gradient: which micro-batches of which ranks are in it, and how often.

The gradient that a system holds is fitted by least squares with those that the oracle computes of
every micro-batch of every data coordinate, and with that of the step before.  Where the fit leaves
nothing over, its coefficients are the cause: 1/N everywhere is a mean in place of a sum, 0 for one
coordinate a rank that was left out, 1 for the last micro-batch alone a lost accumulation.  What no
such sum explains is looked for by tensor, by copy and by rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

import torch
from torch import Tensor

from shardproof.checks.causes import fits
from shardproof.checks.causes.compressed import of_sent
from shardproof.checks.causes.fits import Tensors, multiple, some
from shardproof.checks.causes.where import Moment, of_place
from shardproof.checks.causes.words import factor, number, said, same_of_loss
from shardproof.evidence.assembled import Assembled, Evidence
from shardproof.evidence.held import part

#: What another order of the same sums changes at most, relative to the largest element.
_REORDERED = {"float64": 1e-11, "float32": 1e-5}
#: Fits: elements for every column at least, and elements times columns at most.
_ELEMENTS_A_COLUMN, _LARGEST_FIT = 4, 50_000_000
#: Pairs of equal shape that are looked at for an exchange.
_MOST_PAIRS = 200
#: Relative errors that rounding to a dtype makes: those of the usual tensor, and of any.
_ROUNDED = {"float32": (1e-9, 1e-6, 1e-4), "bfloat16 or float16": (1e-5, 1e-2, 0.2)}
#: Cases in these may be rounded to something narrower.
_WIDER = {"float32": ("float64",), "bfloat16 or float16": ("float64", "float32")}
#: How far from a whole number the counts of an exchange are at most.
_MOST_OFF = 0.1


def of_gradients(evidence: Evidence, step: int, state: Assembled) -> str:
    """A sentence on the gradients of ``step``; empty: nothing explains them.

    Gradients that have been clipped are no sums any more: see :func:`of_clipping`.
    """
    truth = evidence.truth.steps[step].gradients
    limit = fits.limit_of(evidence)
    held = fits.first(state, truth)
    bad = [n for n in held if not bool(held[n].isfinite().all())]
    if bad:
        return f"not finite: {some(bad)}"
    if not held or any(c.shape != truth[n].shape for n in held for c in state.tensors[n].values()):
        return ""
    wrong = _wrong(evidence, state, held, truth)
    if not wrong:
        exact = evidence.case.lane == "dyadic"
        return "" if exact else "no more is wrong than another order of sums explains"
    if evidence.declaration.oracle == "emulated" and (
        found := of_sent(held, truth, wrong, fits.known(evidence, step))
    ):
        return found
    # Sums of all come first: a factor or a lost rank explains every tensor with one sentence.
    parts = fits.parts(evidence, step)
    if found := _of_sums(evidence, step, held, truth, parts, wrong):
        return found
    rounded = _rounded(held, truth, wrong, evidence.case.lowest_dtype)
    if rounded:
        return rounded
    moment = (step, "gradients_final", "gradients")
    return (
        _copies(state, truth, wrong, limit)
        or _by_rank(evidence, moment, truth, parts, wrong)
        or _by_tensor(held, truth, wrong, parts, limit)
        or _moved(held, truth, wrong)
        or of_place(evidence, moment, truth, wrong)
    )


def beside_loss(evidence: Evidence, step: int, loss: str, times: float) -> str:
    """What is wrong with the sums of gradients where the loss is ``times`` the true one, too.

    Empty where the same is so of the loss, of which ``loss`` is said, or gradients are no sums of
    right ones: then the forward that made the loss wrong may have made them so.
    """
    if not evidence.has(step, "gradients_final") or evidence.truth.steps[step].skipped:
        return ""
    state, truth = evidence.observed(step, "gradients_final", "gradients"), evidence.truth
    tensors = truth.steps[step].gradients
    held = fits.first(state, tensors)
    if not held or any(
        c.shape != tensors[n].shape or not bool(c.isfinite().all())
        for n in held
        for c in state.tensors[n].values()
    ):
        return ""
    wrong = _wrong(evidence, state, held, tensors)
    if not wrong:
        return ""
    parts, moment = fits.parts(evidence, step), (step, "gradients_final", "gradients")
    found = (
        _of_sums(evidence, step, held, tensors, parts, wrong)
        or _copies(state, tensors, wrong, fits.limit_of(evidence))
        or _by_rank(evidence, moment, tensors, parts, wrong)
    )
    within = 10.0 ** (1 - fits.DIGITS[evidence.case.lowest_dtype])
    alike = factor(times, fits.known(evidence, step), within)
    return "" if found == alike or same_of_loss(loss, found) else found


def _wrong(evidence: Evidence, state: Assembled, held: Tensors, truth: Tensors) -> list[str]:
    """Names of which some copy is further off than another order of the same sums explains."""
    within = _REORDERED.get(evidence.case.lowest_dtype, 0.0)
    return [
        name
        for name in held
        if not all(_near(copy, truth[name], within) for copy in state.tensors[name].values())
    ]


def _of_sums(
    evidence: Evidence,
    step: int,
    held: Tensors,
    truth: Tensors,
    parts: Sequence[Sequence[Tensors]],
    wrong: Sequence[str],
) -> str:
    """What the fit says of all gradients, or else of the wrong ones alone."""
    for scope in (list(held), wrong):
        if found := _explained(evidence, step, held, truth, parts, scope):
            where = "" if len(scope) == len(held) else f"in {some(wrong)}: "
            return where + found
    return ""


def of_clipping(evidence: Evidence, step: int, state: Assembled) -> str:
    """A sentence on gradients after clipping: by what norm, and whether all were clipped."""
    truth = evidence.truth.steps[step]
    if truth.clipped is None:
        return ""
    held, limit = fits.first(state, truth.clipped), fits.limit_of(evidence)
    times = multiple(held, truth.clipped, limit)
    if times is not None and times > 0 and times != 1:
        # Not clipped at all is a multiple of the clipped truth, too.
        if _once(held, truth.gradients, limit):
            return "nothing was clipped"
        return f"clipped by a norm that is {number(1 / times)} times the true one"
    by_rank = _clipped_by_rank(evidence, step, truth.clipped, truth.gradients, limit)
    if by_rank:
        return by_rank
    left = [n for n in held if not _once({n: held[n]}, truth.clipped, limit)]
    if left and all(_once({n: held[n]}, truth.gradients, limit) for n in left):
        return f"not clipped: {some(left)}"
    return ""


def _clipped_by_rank(
    evidence: Evidence, step: int, clipped: Tensors, whole: Tensors, limit: float
) -> str:
    """Ranks whose pieces are one multiple of the truth each, where they are not the same."""
    norms: dict[int, str] = {}
    for rank, own in fits.pieces(evidence, step, "after_clip", "gradients"):
        known = [p for p in own if p.name in clipped and p.tensor.numel()]
        held = {str(n): p.tensor for n, p in enumerate(known)}
        cut = {str(n): part(p, clipped[p.name]) for n, p in enumerate(known)}
        times = multiple(held, cut, limit)
        if times is None:
            return ""
        uncut = multiple(held, {str(n): part(p, whole[p.name]) for n, p in enumerate(known)}, limit)
        if abs(times - 1) <= limit:
            norms[rank] = ""
        elif uncut is not None and abs(uncut - 1) <= limit:
            norms[rank] = "does not clip"
        elif times > 0:
            norms[rank] = f"clips by a norm that is {1 / times:.4g} times the true one"
        else:
            return ""
    said_of = [f"rank {rank} {text}" for rank, text in norms.items() if text]
    return "; ".join(said_of[:3])


def _once(held: Tensors, truth: Tensors, limit: float) -> bool:
    times = multiple(held, truth, limit)
    return times is not None and abs(times - 1) <= limit


def _near(held: Tensor, truth: Tensor, within: float) -> bool:
    """Whether every element is the true one but for ``within`` of the largest."""
    size = float(truth.double().abs().max()) if truth.numel() else 0.0
    return bool(((held.double() - truth.double()).abs() <= within * size).all())


def _copies(state: Assembled, truth: Tensors, wrong: Sequence[str], limit: float) -> str:
    """Whether copies that differ are the terms of a sum that nobody made."""
    torn = []
    for name in wrong:
        one, *others = state.tensors[name].values()
        alike = all(other.shape == truth[name].shape for other in (one, *others))
        if alike and not all(fits.equal(other, one, limit) for other in others):
            torn.append(name)
    sums = {n: torch.stack([c.double() for c in state.tensors[n].values()]).sum(0) for n in torn}
    if not torn or not fits.all_equal(sums, truth, torn, limit):
        return ""
    ranks = sorted({rank for n in torn for rank in state.owners[n]})
    return f"the copies of {some(torn)} on ranks {ranks} add up to the truth: they were not summed"


def _rounded(held: Tensors, truth: Tensors, wrong: Sequence[str], lowest: str) -> str:
    """Whether all that is wrong is wrong by the rounding of a dtype narrower than ``lowest``."""
    multiples = {multiple({n: held[n]}, truth, limit=1.0) for n in wrong}
    if not multiples & {None, 1.0}:
        return ""
    errors = [
        float((held[n].double() - truth[n].double()).norm() / truth[n].double().norm())
        for n in wrong
        if bool(truth[n].any())
    ]
    errors.sort()
    for dtype, (low, high, most) in _ROUNDED.items():
        if lowest not in _WIDER[dtype]:
            continue
        # What is zero but for round-off has lost all its digits.
        # Largest errors last, which is where those tensors are.
        usual = errors[: max(3, len(errors) * 3 // 4)]
        if len(errors) > 2 and low < median(errors) < high and usual[-1] < most:
            return f"{len(wrong)} gradients are as wrong as rounding to {dtype} makes them"
    return ""


def _explained(
    evidence: Evidence,
    step: int,
    held: Tensors,
    truth: Tensors,
    parts: Sequence[Sequence[Tensors]],
    names: Sequence[str],
) -> str:
    """What the fit over the tensors ``names`` says; empty: it leaves something over."""
    #     held = c00 g00 + c01 g01 + c10 g10 + c11 g11 + b g(step before)
    #            coordinate 0        coordinate 1
    #     all c = 1, b = 0      right
    #     all c = 1/2           a mean over 2 ranks in place of the sum
    #     c10 = c11 = 0         coordinate 1 was left out
    #     c00 = c10 = 0         only the last micro-batch is in it
    before = evidence.truth.steps[step - 1].gradients if step else None
    whole = [*(micro for share in parts for micro in share), *([before] if before else [])]
    columns = [fits.flat(tensors, truth, names) for tensors in whole]
    got, want = (fits.flat(tensors, truth, names) for tensors in (held, truth))
    return _counts(evidence, step, got, want, columns, parts)


def _counts(
    evidence: Evidence,
    step: int,
    got: Tensor,
    want: Tensor,
    columns: Sequence[Tensor],
    parts: Sequence[Sequence[Tensors]],
) -> str:
    counted = fitted(got, want, columns, fits.limit_of(evidence))
    if counted is None:
        return ""
    numbers = iter(range(len(columns)))
    rows = [[counted.get(next(numbers)) for _ in share] for share in parts]
    before = counted.get(next(numbers, -1)) or 0.0
    digits = fits.DIGITS[evidence.case.lowest_dtype]
    return said(rows, before, fits.known(evidence, step), digits)


def _by_rank(
    evidence: Evidence,
    moment: Moment,
    truth: Tensors,
    parts: Sequence[Sequence[Tensors]],
    wrong: Sequence[str],
) -> str:
    """What the fit says of the pieces of each rank that holds wrong ones."""
    found: dict[int, str] = {}
    for rank, own in fits.pieces(evidence, *moment):
        bad = [p for p in own if p.name in wrong and p.tensor.numel()]
        if not bad:
            continue
        got = torch.cat([p.tensor.double().reshape(-1) for p in bad])
        columns = [
            torch.cat(
                [
                    part(p, micro.get(p.name, torch.zeros_like(truth[p.name]))).double().reshape(-1)
                    for p in bad
                ]
            )
            for share in parts
            for micro in share
        ]
        want = torch.cat([part(p, truth[p.name]).double().reshape(-1) for p in bad])
        if fits.equal(got, want, fits.limit_of(evidence)):
            continue
        sentence = _counts(evidence, moment[0], got, want, columns, parts)
        if not sentence:
            return ""
        found[rank] = sentence
    if not found:
        return ""
    rank, sentence = next(iter(found.items()))
    rest = [other for other in found if other != rank]
    also = f"; the like on ranks {rest}" if rest else ""
    return f"in what rank {rank} holds of {some(wrong)}: {sentence}{also}"


def fitted(
    got: Tensor, want: Tensor, columns: Sequence[Tensor], limit: float
) -> dict[int, float] | None:
    """How often each column is in ``got``, by least squares; ``None``: something is left over.

    Something is left over, too, where ``want``, the truth, is nearly as near.  A column of zeros is
    left out: it says nothing of how often it was counted.
    """
    there = [number for number, column in enumerate(columns) if bool(column.any())]
    # With hardly more elements than columns anything fits.
    if not there or len(got) < _ELEMENTS_A_COLUMN * len(there):
        return None
    if len(got) * len(there) > _LARGEST_FIT:
        return None
    matrix = torch.stack([columns[number] for number in there], dim=1)
    if not bool(matrix.isfinite().all()):
        return None
    scales = matrix.norm(dim=0)
    # Columns of norm 1, since gradients may differ by orders of magnitude; by SVD (gelsd), since
    # equal micro-batches make columns that depend on each other.
    fit = torch.linalg.lstsq(matrix / scales, got.unsqueeze(1), driver="gelsd").solution
    counts = fit.squeeze(1) / scales
    most = min(limit * max(float(got.norm()), 1e-300), fits.MUCH * float((got - want).norm()))
    if float((got - matrix @ counts).norm()) > most:
        return None
    return dict(zip(there, counts.tolist(), strict=True))


def _by_tensor(
    held: Tensors,
    truth: Tensors,
    wrong: Sequence[str],
    parts: Sequence[Sequence[Tensors]],
    limit: float,
) -> str:
    """Whether each wrong gradient is a multiple of its own truth, or holds another's."""
    times = {n: multiple({n: held[n]}, truth, limit) for n in wrong}
    if all(t is not None and t != 1 for t in times.values()):
        factors = [number(t) for t in sorted({t for t in times.values() if t is not None})]
        shown = [*dict.fromkeys(factors)][:4]
        return f"{some(wrong)} are multiples of the truth, {' and '.join(shown)} times"
    pairs = [
        (name, other)
        for name in wrong
        for other in truth
        if other != name and truth[other].numel() == truth[name].numel() > 1
    ]
    sums = [_sum(share) for share in parts] if pairs else []
    for name, other in pairs if len(pairs) <= _MOST_PAIRS else ():
        #     other, own, other, own, ...      one pair for each data coordinate: own are [1::2]
        columns = [s[n].double().reshape(-1) for s in sums for n in (other, name) if n in s]
        got, want = (tensors[name].double().reshape(-1) for tensors in (held, truth))
        if len(columns) < 2 or fitted(got, want, columns[1::2], limit) is not None:
            continue  # its own are enough
        counted = fitted(got, want, columns, limit)
        if counted and _is_exchange(list(counted.values()), limit):
            return f"in the gradient of {name!r} is a rank's gradient of {other!r}"
    return ""


def _is_exchange(counts: Sequence[float], limit: float) -> bool:
    """Whether every share is there once or not at all."""
    within = min(100 * limit, _MOST_OFF)
    return all(min(abs(count), abs(count - 1)) <= within for count in counts)


def _sum(share: Sequence[Tensors]) -> dict[str, Tensor]:
    total: dict[str, Tensor] = {}
    for micro in share:
        for name, tensor in micro.items():
            total[name] = total[name] + tensor if name in total else tensor
    return total


def _moved(held: Tensors, truth: Tensors, wrong: Sequence[str]) -> str:
    moved = [
        n
        for n in wrong
        if held[n].numel() > 1
        # Of names that are wrong on other ranks the first copy may be right but for round-off.
        and not torch.allclose(held[n].double(), truth[n].double(), rtol=1e-9, atol=0.0)
        and same_elements(held[n], truth[n])
    ]
    return f"the right elements in another order: {some(moved)}" if moved else ""


def same_elements(one: Tensor, other: Tensor) -> bool:
    """Whether both hold the same numbers, in another order."""
    if one.numel() != other.numel():
        return False
    flat = [t.double().reshape(-1) for t in (one, other)]
    # Sorted, a permutation is undone: what is left over then is round-off.
    a, b = (t.sort().values for t in flat)
    is_much = (a - b).norm() <= fits.MUCH * (flat[0] - flat[1]).norm()
    return bool(is_much) and torch.allclose(a, b, rtol=1e-9, atol=0.0)
