"""The lane ``working_precision``: errors relative to those of one device in that precision.

Truth is an fp64 run that starts from the same rounded numbers.  Both it and a one-device run in the
case's dtype are *teacher-forced*: each step begins from the parameters that the system under test
held, so that every step is judged alone.  For gradient tensor t

    rho(t) = err(system, t) / max(err(one device, t), median over tensors of err(one device))

with err the relative Frobenius error against fp64, and rho may be at most k (``numbers.py``).
Tensors of fewer than 64 elements count as one, laid end to end: few errors are single draws, and
one draw is many times another by chance.  Of a system that errs 1.5 times as much as one device,
F(16, 16) exceeds (3 / 1.5)^2 in one case of 240, F(64, 64) in one of 20 million.  So do matrices of
fewer than 4 rows or columns: what is wrong of one activation is wrong of its whole column.  Where
all of these have fewer than 64 ways to err, the smallest other, which is also judged alone, joins
them and counts for the ways that they lack: none outweighs the others.
A tensor in which the loss of one micro-batch's contribution would err no more than is allowed is
*undecidable* here (:func:`hides`): its pass says little, and the reports list it.
The update is replayed (at most 4 ULP), and the factor of clipping is held to the roundings of
correct runs (:func:`wrong_factors`).  A part of equivalence; sees the plumbing of precisions and
gross faults, not one wrong element in bf16: alone it gives ``pass (working precision only)``.

*Cannot see* whether a divisor of gradients or a loss scale was rounded before it was applied: one
round-off of bf16 or fp16 in a common factor is less than the gradients' own errors, and no rank
shows gradients from before the division.  Nor what fp16 loses of gradients below 6e-5 on their way
to the sum, where a workload has few of them: the error is relative to the norm of its tensor.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from shardproof import axes
from shardproof.case import Case
from shardproof.checks import numbers
from shardproof.checks.causes.fits import pieces
from shardproof.checks.numbers import ZERO_FLOOR, root_mean_square, split_zero
from shardproof.contract import Piece
from shardproof.evidence.assembled import Evidence, Figures
from shardproof.oracle import training
from shardproof.oracle.asked import follows_of
from shardproof.oracle.truth import Tensors, TruthStep
from shardproof.workloads import Workload, for_case, make

#: Tensors of fewer elements have too few errors to be judged alone.
SMALL = 64
#: Matrices of fewer rows or columns err in as few directions.
THIN = 4
#: Errors of one device that a system has at least, in the middle tensor, under a policy.
LEAST_ROUNDED = 1 / 16
#: What guards the division in torch; others leave it out.
_EPSILON = 1e-6
#: Standard deviations of a sum of roundings.
_SIGMAS = 6.0
#: Of a quotient in fp32.
_QUOTIENT = 2.0**-22
#: Zero slices in one-device runs: (start, stop) per dimension.
Regions = Mapping[str, list[tuple[tuple[int, int], ...]]]
#: Tensors that are judged as one.
Group = frozenset[str]


def factor(evidence: Figures) -> float:
    """k: how many times the error of one device is allowed."""
    case = evidence.case
    data_parallel = axes.size(case.mesh, axes.exchanging(case.mesh)) == 1
    wide = case.precision.get("reduce") == "float32"
    wide = wide or "fp32_reduction" in evidence.declaration.features
    if case.lowest_dtype in numbers.NARROW and data_parallel and wide:
        return numbers.WORKING_PRECISION_FACTOR_DATA_PARALLEL
    return numbers.WORKING_PRECISION_FACTORS[case.lowest_dtype]


class Given:
    """A sum over coordinates that keeps their contributions, by step: one each micro-batch."""

    def __init__(self) -> None:
        self.at: dict[int, list[Tensors]] = {}

    def __call__(self, step: int, parts: Sequence[Tensors]) -> dict[str, Tensor]:
        self.at.setdefault(step, []).extend(parts)
        return training.left_fold([dict(part) for part in parts])


def teachers(evidence: Evidence) -> tuple[list[TruthStep], list[TruthStep], Given]:
    """Steps of the fp64 twin and of one device in the case's precision, both forced.

    The twin has the widest dtype that the model computes in; also what each of its micro-batches
    contributed.

    They compute with the same values: masters and shards are rounded to what is computed with.
    """
    case = evidence.case
    narrow = getattr(torch, case.compute_dtype)
    steps = range(case.steps)  # also those before a checkpoint that was loaded
    states = [evidence.observed(step, "after_update", "parameters") for step in steps]
    forced = [{n: t.to(narrow) for n, t in state.first().items()} for state in states]
    rule = evidence.declaration.buffers
    changing = evidence.members if case.changes_members else ()
    own = for_case(case)
    twin = make(case.workload, own.found.widest, case.lane, case.compute_dtype)

    plain = training.Way(
        {}, changing, forced=forced, follows=follows_of(case, evidence.declaration)
    )

    def steps_of(workload: Workload, way: training.Way) -> list[TruthStep]:
        size = case.data_coordinates, case.steps
        return training.train(workload, case.optimizer, *size, rule, way).steps

    given = Given()
    twins = steps_of(twin, replace(plain, fold=given, by_round=True))
    return twins, steps_of(own, replace(plain, precision=case.precision)), given


def ratios(
    held: Tensors, single: Tensors, truth: Tensors, regions: Regions | None = None
) -> dict[str, float]:
    """rho per tensor, small ones together; tensors whose true value is 0 are left out (see
    :func:`noise`).
    """
    many, least = errors(held, truth, regions or {}), scales(single, truth, regions or {})
    return {name: _ratio(many[group], least[group]) for group in many for name in group}


def scales(single: Tensors, truth: Tensors, regions: Regions) -> dict[Group, float]:
    """The error of one device in each group, by which others are measured.

    One device may have a tensor right by luck: the middle one is the least that counts.
    """
    one = errors(single, truth, regions)
    middle = statistics.median(one.values()) if one else 0.0
    return {group: max(error, middle) for group, error in one.items()}


def hides(
    truth: Tensors, given: Sequence[Tensors], allowed: Mapping[Group, float], regions: Regions
) -> set[str]:
    """Tensors in which a lost contribution could hide: its error is no more than is ``allowed``.

    ``given``: the contribution of each micro-batch.  Each is dropped, and rolled by one element,
    where it has an effect.  A sum that is too small by 1/N has the error 1/N.
    """
    given = [own for own in given if any(bool(part.any()) for part in own.values())]
    hidden = {group for group, most in allowed.items() if 1 / max(len(given), 2) <= most}
    for own in given:
        dropped = {n: g - own[n].to(g.dtype) if n in own else g for n, g in truth.items()}
        rolled = {
            n: g + own[n].to(g.dtype).reshape(-1).roll(1).view(g.shape) if n in own else g
            for n, g in dropped.items()
        }
        for spoilt in (dropped, rolled):
            found = errors(spoilt, truth, regions)
            hidden |= {group for group, error in found.items() if 0 < error <= allowed[group]}
    return {name for group in hidden for name in group}


def errors(held: Tensors, truth: Tensors, regions: Regions) -> dict[Group, float]:
    """The relative error of each tensor, or of the small ones, which count as one."""
    parts = {
        name: [split_zero(t, regions.get(name, []))[0] for t in (held[name], value)]
        for name, value in truth.items()
    }
    parts = {name: own for name, own in parts.items() if own[1].numel() and bool(own[1].any())}
    ways = {name: ways_to_err(own[1], truth[name]) for name, own in parts.items()}
    together = pool(ways)
    few = {name for name in together if ways[name] < SMALL}
    groups: list[tuple[str, ...]] = [(name,) for name in parts if name not in few]
    groups += [tuple(together)] if together else []
    found: dict[Group, float] = {}
    for group in groups:
        # None outweighs the others: larger ones, for their ways to err, become as the middle one,
        # and so does the one that joins, which counts for fewer ways than it has.
        # Per independent way to err: n equal ones make a norm that is sqrt(n) times as large.
        sizes = {name: float(parts[name][1].norm()) / math.sqrt(ways[name]) for name in group}
        middle = statistics.median_low(sizes.values())
        factors = {
            name: min(middle / size, 1.0)
            if name in few or len(group) == 1
            else middle / size * math.sqrt(together[name] / ways[name])
            for name, size in sizes.items()
        }
        many, want = (
            torch.cat([parts[n][which].reshape(-1).to(torch.float64) * factors[n] for n in group])
            for which in range(2)
        )
        found[frozenset(group) & few or frozenset(group)] = float(
            (many - want).norm() / want.norm()
        )
    return found


def is_unrounded(case: Case, rho: Mapping[str, float]) -> bool:
    """Whether a policy of precision was not followed: gradients have no errors of its dtype.

    What computes in it errs as one device does, whatever the sums: 0.68 to 1.25 times in the middle
    tensor [measured, 68 moments]; what does not, 2^-13 times or less [derived: fp32 for fp16].
    """
    #     rho    2^-13 or less         1/16         0.68 to 1.25
    #            computed wide      LEAST_ROUNDED   computed as asked
    is_narrow = round_off(case.compute_dtype) > round_off(case.dtype)
    return is_narrow and bool(rho) and statistics.median(rho.values()) < LEAST_ROUNDED


def pool(ways: Mapping[str, int]) -> dict[str, int]:
    """Tensors that are judged as one, by how many ways each has to err, and the ways it counts for.

    Those with few and, if they have fewer than ``SMALL`` together, the smallest of the others for
    what is lacking.
    """
    joined = {name: own for name, own in ways.items() if own < SMALL}
    left = SMALL - sum(joined.values())
    others = sorted(ways.keys() - joined.keys(), key=lambda name: (ways[name], name))
    if joined and left > 0 and others:
        joined[others[0]] = left
    return joined


def ways_to_err(value: torch.Tensor, whole: torch.Tensor) -> int:
    """How many errors of ``value``, a part of ``whole``, are independent of each other."""
    return min(whole.shape[0], whole[0].numel()) if is_thin(whole) else value.numel()


def is_thin(tensor: torch.Tensor) -> bool:
    """Whether ``tensor`` is a matrix (a convolution's by its outputs) of few rows or columns."""
    return tensor.dim() > 1 and min(tensor.shape[0], tensor[0].numel()) < THIN


def noise(held: Tensors, truth: Tensors, regions: Regions, unit: float) -> dict[str, float]:
    """Root mean square of what should be 0, over its floor: 100 round-offs of the model's."""
    floor = ZERO_FLOOR * unit * root_mean_square(list(truth.values()))
    return {
        name: _ratio(root_mean_square([part]), floor)
        for name, parts in regions.items()
        if name in truth
        for part in split_zero(held[name], parts)[1]
    }


def loss_ratio(loss: float, single: float, truth: float, unit: float, shares: int) -> float:
    """rho of the loss, one number that one device may have right by luck.

    So at least sqrt(n) round-offs count, what a sum of the ``shares`` of n micro-batches loses in
    any order (Higham and Mary, doi 10.1137/18M1226312, section 2).
    """
    lost = math.sqrt(shares) * unit * abs(truth)
    return _ratio(abs(loss - truth), max(abs(single - truth), lost))


def round_off(dtype: str) -> float:
    """Half the distance from 1 to the next number."""
    return torch.finfo(getattr(torch, dtype)).eps / 2


def _ratio(error: float, scale: float) -> float:
    if math.isnan(error) or (error and not scale):
        return math.inf
    return error / scale if error else 0.0


def wrong_factors(evidence: Evidence, step: int) -> Iterator[tuple[int, str]]:
    """Every rank whose gradients were clipped by another factor, and a sentence.

    In bf16 a gradient may err by several per cent, so a factor that is 1 % off hides in its errors.
    But a factor is one number: from what a rank shows before and after clipping it is known to a
    small part of one round-off.  Each rank is held to the norm that it reports, which the check
    ``norm`` judges, or to that of the gradients that are shown.

        correct   limit / (norm + 1e-6), as computed in fp64
                  the same rounded to the dtype of the gradients, as a product with them may do
                  computed in that dtype, as torch's ``clip_grad_norm_`` does

    Allowed is what lies between these, and the rounding of the products: n products of random sign
    err together by 1 / sqrt(n) of one, and never by more than one.
    """
    limit = evidence.case.optimizer.clip_norm
    given = dict(pieces(evidence, step, "gradients_final", "gradients"))
    # FSDP1 clips by a norm in fp32, and reports it rounded.
    shown = evidence.observed(step, "gradients_final", "gradients").first()
    whole = math.hypot(*(float(tensor.double().norm()) for tensor in shown.values()))
    for rank, clipped in pieces(evidence, step, "after_clip", "gradients"):
        norm = evidence.ranks[rank].steps[step].norm
        if limit is None or not norm or not math.isfinite(norm):
            continue
        before, after = _by_place(given.get(rank, ())), _by_place(clipped)
        pairs = [(before[key], after[key]) for key in before.keys() & after.keys()]
        if pairs and (problem := _wrong_factor(pairs, limit, (norm, whole or norm))):
            yield rank, problem


def _by_place(own: Iterable[Piece]) -> dict[object, Tensor]:
    return {(p.name, p.slices, p.flat_range, p.replica): p.tensor for p in own}


def _wrong_factor(
    pairs: list[tuple[Tensor, Tensor]], limit: float, norms: tuple[float, float]
) -> str:
    """The problem of the factor between two states of one rank; empty: none."""
    dtype = max((after.dtype for _, after in pairs), key=lambda kind: torch.finfo(kind).eps)
    unit = torch.finfo(dtype).eps / 2
    lost = torch.finfo(dtype).smallest_normal * unit  # by a product that underflows
    x, y = (torch.cat([pair[n].double().reshape(-1) for pair in pairs]) for n in (0, 1))
    squares = float(x @ x)
    if not squares or not math.isfinite(squares):
        return ""
    found = float(x @ y) / squares
    together = min(1.0, _SIGMAS * float(x.square().norm()) / squares)
    noise = unit * together * abs(found) + lost * float(x.abs().sum()) / squares
    right = [min(1.0, one) for norm in norms for one in _correct(limit, norm, dtype)]
    slack = _QUOTIENT + _EPSILON / min(norms)
    if min(right) * (1 - slack) - noise <= found <= max(right) * (1 + slack) + noise:
        return ""
    off = f"{found:.6g}, expected {right[0]:.6g} by the norm that it reports"
    kind = str(dtype).removeprefix("torch.")
    return f"gradients were clipped by the factor {off}: more than rounding in {kind} explains"


def _correct(limit: float, norm: float, dtype: torch.dtype) -> Iterator[float]:
    true, over = limit / (norm + _EPSILON), torch.tensor(norm, dtype=dtype) + _EPSILON
    yield true
    yield float(torch.tensor(true, dtype=dtype))
    # A number over a tensor is two roundings in torch: its reciprocal, and the product.
    yield float(limit / over)
    yield float(torch.tensor(limit, dtype=dtype) / over)
