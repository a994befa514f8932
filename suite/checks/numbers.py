"""Comparing tensors: one function per tolerance of the written policy, each with a power test.

Source: the policy of docs/tolerances.md.  A comparison is only worth something if it can fail, so
:func:`powerless` tries the same comparison on spoilt copies of the truth: rolled by one element,
halved, and scaled by (N-1)/N (a rank that is left out).  A tensor on which no spoilt copy fails
counts as *not tested*.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from shardproof.checks import Outcome, Worst, against
from shardproof.evidence.records import ComparisonRow

#: Largest relative Frobenius error of a tensor in the fp64 lane: 600 x above the worst clean run
#: seen, 50,000 x below the weakest planted fault.
FP64_BOUND = 1e-12
#: By dtype, how many times the error of one device in the same precision is allowed in the lane
#: ``working_precision``.
#: Clean maxima are measured by the study ``calibrate`` (``calibration.json`` beside this file).
WORKING_PRECISION_FACTORS = {"float64": 3.0, "float32": 3.0, "bfloat16": 4.0, "float16": 4.0}
#: The same for data parallelism alone that reduces bf16 gradients in fp32.
WORKING_PRECISION_FACTOR_DATA_PARALLEL = 2.0
#: Dtypes whose round-off is a visible part of a number.
NARROW = ("bfloat16", "float16")
#: Replayed updates: units in the last place of the larger of old and new value.
REPLAY_ULPS = 4
#: Roundings of an update and of the optimizer's state.  AdamW: 3 for each moment, of which the root
#: leaves half of the second's; one each for root, bias correction, epsilon, quotient, step size,
#: weight decay and sum (Kingma and Ba, arXiv 1412.6980, algorithm 1).  SGD: 2 each for weight
#: decay, momentum and the step.
_ROUNDINGS = {"adamw": (12, 3), "sgd": (6, 4)}


def replay_ulps(optimizer: str, is_slot: bool, on_gpu: bool) -> int:
    """Units in the last place by which a replayed update, or the optimizer's state, may differ.

    Where ranks compute on a GPU, and the replay on a CPU, no kernel is the same: each rounding is
    at most a unit of the result, on either side.
    """
    return 2 * _ROUNDINGS[optimizer][is_slot] if on_gpu else REPLAY_ULPS


#: A tensor whose root mean square is below this many round-offs of the model's is noise.
ZERO_FLOOR = 100.0

Region = tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Comparison:
    """Outcome for one tensor: ``error`` against ``bound`` (``ok`` if not above)."""

    error: float
    bound: float

    @property
    def ok(self) -> bool:
        """Whether the error is within its bound (NaN is not)."""
        return self.error <= self.bound


#: Of two flat tensors of the same parts, which begin at these places: whether each part passes.
PartsPass = Callable[[Tensor, Tensor, Sequence[int]], Iterable[bool]]


@dataclass(frozen=True)
class Compare:
    """A way to compare: two tensors, or many small ones at once."""

    whole: Callable[[Tensor, Tensor], Comparison]
    parts: PartsPass

    def __call__(self, actual: Tensor, truth: Tensor) -> Comparison:
        """Compare ``actual`` with ``truth``."""
        return self.whole(actual, truth)


class Differs(Exception):
    """Something that was compared is not as it should be; the message says what.

    ``ranks``: those on which it was found, where that is known.
    """

    def __init__(self, text: str, ranks: Iterable[int] = ()) -> None:
        super().__init__(text)
        self.ranks = frozenset(ranks)


class Lacking(Differs):
    """There is nothing to compare: names or pieces are missing, or there are too many."""


@contextmanager
def saying(text: str) -> Iterator[None]:
    """Put ``text`` in front of what differs inside."""
    try:
        yield
    except Differs as failure:
        raise Differs(f"{text}{failure}") from None


class Moment:
    """The comparisons of one moment.

    All are made, so that the first that fails is told with how many tensors and ranks are wrong.
    """

    def __init__(self, rows: list[ComparisonRow], step: int, phase: str, failure: str) -> None:
        """``rows``: where comparisons go; ``failure``: what precedes the one that failed."""
        self._rows, self._step, self._phase, self._failure = rows, step, phase, failure
        self._compared: set[str] = set()
        self._wrong: set[str] = set()
        self._ranks: set[int] = set()
        self._first = ""

    def note(
        self,
        result: Comparison,
        name: str,
        owner: str,
        ranks: Sequence[int] = (),
        unit: str = "",
        part: str = "",
        failure: str = "",
    ) -> None:
        """Add one comparison of ``name`` (or of a ``part`` of it), held by ``ranks``."""
        step, phase = self._step, self._phase
        shown = name + part
        self._rows.append(ComparisonRow(step, phase, shown, owner, result.error, result.bound))
        self._compared.add(name)
        if not result.ok:
            place = Worst(shown, step, phase, owner, result.error, result.bound).place
            says = against(result.error, result.bound, unit)
            self._fails(name, ranks, f"{failure or self._failure}: {place}: {says}")

    def problem(self, name: str, ranks: Sequence[int], text: str) -> None:
        """``name`` could not be compared."""
        self._compared.add(name)
        self._fails(name, ranks, f"step {self._step}, {self._phase}: {text}")

    def _fails(self, name: str, ranks: Sequence[int], text: str) -> None:
        self._first = self._first or text
        self._wrong.add(name)
        self._ranks.update(ranks)

    def end(self, world: int) -> None:
        """All of the moment has been compared.

        :raises Differs: something was wrong.
        """
        if not self._first:
            return
        wrong, compared, ranks = len(self._wrong), len(self._compared), len(self._ranks)
        counts = [f"{wrong} of {compared} tensors"] if compared > 1 else []
        counts += [f"on {ranks} of {world} ranks"] if ranks and world > 1 else []
        text = self._first + (f" (wrong: {', '.join(counts)})" if counts else "")
        raise Differs(text, self._ranks)


@dataclass
class Tally:
    """The outcome of stored rows, up to the first comparison that failed or could not be made."""

    compared: int = 0
    steps: set[int] = field(default_factory=set)
    #: What is furthest from its bound, what failed, and why nothing more was compared.
    worst: Worst | None = None
    failed: Worst | None = None
    problem: str = ""
    not_tested: set[str] = field(default_factory=set)

    @property
    def wrong(self) -> str:
        """The problem as a sentence; empty: none."""
        return self.problem or (f"differs: {self.failed}" if self.failed else "")

    def outcome(self, check: str, figures: Mapping[str, object]) -> Outcome:
        """The outcome of ``check``: the first problem fails."""
        return Outcome(check, "fail" if self.wrong else "pass", self.wrong, self.worst, figures)

    @classmethod
    def of(cls, rows: Iterable[ComparisonRow]) -> Tally:
        """The tally of ``rows``."""
        tally = cls()
        for row in rows:
            if row.problem:
                tally.problem = tally.problem or row.problem
            elif not row.tested:
                tally.not_tested.add(f"{row.phase}: {row.name}")
            # After the first failure nothing is counted: what follows may follow from it.
            elif not (tally.failed or tally.problem or row.error is None or row.bound is None):
                this = Worst(row.name, row.step, row.phase, row.owner, row.error, row.bound)
                tally.compared += 1
                tally.steps.add(this.step)
                if tally.worst is None or _share(this) > _share(tally.worst):
                    tally.worst = this
                tally.failed = None if this.error <= this.bound else this
        return tally


def _share(worst: Worst) -> float:
    """The error as a part of its bound."""
    if math.isnan(worst.error) or (worst.error and not worst.bound):
        return math.inf
    return worst.error / worst.bound if worst.error else 0.0


def _bitwise(actual: Tensor, truth: Tensor) -> Comparison:
    if actual.shape != truth.shape or actual.dtype != truth.dtype:
        return Comparison(math.inf, 0.0)
    if torch.equal(actual, truth):
        return Comparison(0.0, 0.0)
    return Comparison(float(_different(actual, truth).sum()), 0.0)


def _different(actual: Tensor, truth: Tensor) -> Tensor:
    # 0 and -0 count as equal, as they do among replicas.
    return ~((actual == truth) | (actual.isnan() & truth.isnan()))


def _equal_parts(actual: Tensor, truth: Tensor, starts: Sequence[int]) -> Iterable[bool]:
    return ~np.logical_or.reduceat(_different(actual, truth).numpy(), starts)


#: Bit for bit: the error is the number of elements that differ (NaN equals NaN).
bitwise = Compare(_bitwise, _equal_parts)


def relative_frobenius(bound: float) -> Compare:
    """``|actual - truth| / |truth|`` in the Frobenius norm, at most ``bound``."""

    def compare(actual: Tensor, truth: Tensor) -> Comparison:
        if actual.shape != truth.shape:
            return Comparison(math.inf, bound)
        if actual.numel() == 0:
            return Comparison(0.0, bound)
        # Contiguous: the error must not hang on strides, which a tensor that was kept may lose.
        a, b = (tensor.to(torch.float64).contiguous() for tensor in (actual, truth))
        difference = float(torch.linalg.vector_norm(a - b))
        if difference == 0.0:
            return Comparison(0.0, bound)
        # A truth of zeros has no scale: then any difference is without bound.
        scale = float(torch.linalg.vector_norm(b))
        error = difference / scale if scale else math.inf
        return Comparison(error if error == error else math.inf, bound)

    def parts(actual: Tensor, truth: Tensor, starts: Sequence[int]) -> Iterable[bool]:
        a, b = actual.to(torch.float64).numpy(), truth.to(torch.float64).numpy()
        with np.errstate(all="ignore"):  # NaN passes nothing
            squares = (np.add.reduceat(values * values, starts) for values in (a - b, b))
            difference, scale = map(np.sqrt, squares)
            return (difference == 0.0) | (difference / scale <= bound)

    return Compare(compare, parts)


def within_ulps(actual: Tensor, truth: Tensor, reference: Tensor, ulps: int) -> Comparison:
    """Largest difference in units in the last place of ``max(|truth|, |reference|)``."""
    if actual.shape != truth.shape or actual.dtype != truth.dtype:
        return Comparison(math.inf, ulps)
    if torch.equal(actual, truth):
        return Comparison(0.0, ulps)
    error = float(_ulps(actual, truth, reference).max())
    return Comparison(error if error == error else math.inf, float(ulps))


def _ulps(actual: Tensor, truth: Tensor, reference: Tensor) -> Tensor:
    size = truth.abs()
    if reference is not truth:
        size = torch.maximum(size, reference.abs())
    # One unit in the last place: the gap above ``size`` (above 0 the smallest subnormal).
    spacing = torch.nextafter(size, torch.full_like(size, math.inf)) - size
    return (actual - truth).abs() / spacing


def parts_within_ulps(
    actual: Tensor, truth: Tensor, starts: Sequence[int], ulps: int
) -> Iterable[bool]:
    """Which parts are within ``ulps`` of the truth."""
    within = (actual == truth) | (_ulps(actual, truth, truth) <= ulps)
    return np.logical_and.reduceat(within.numpy(), starts)


def take(tensor: Tensor, region: Region) -> Tensor:
    """The part of ``tensor`` that ``region`` names (one ``(start, stop)`` per dimension)."""
    return tensor[tuple(slice(start, stop) for start, stop in region)]


def split_zero(tensor: Tensor, regions: Sequence[Region]) -> tuple[Tensor, list[Tensor]]:
    """``tensor`` with the declared zero-gradient ``regions`` set to 0, and those regions."""
    if not regions:
        return tensor, []
    rest, zeros = tensor.clone(), []
    for region in regions:
        zeros.append(take(tensor, region))
        take(rest, region).zero_()
    return rest, zeros


def root_mean_square(tensors: Sequence[Tensor]) -> float:
    """Root mean square over all elements of ``tensors``."""
    count = sum(t.numel() for t in tensors)
    total = sum(float(t.to(torch.float64).square().sum()) for t in tensors)
    return math.sqrt(total / count) if count else 0.0


def powerless(truths: Mapping[str, Tensor], ranks: int, passes: PartsPass) -> dict[str, list[str]]:
    """Of each of ``truths`` the spoilt copies that pass, or that cannot be made."""
    passing = {name: ["rolled", "halved", "scaled"] for name in truths}
    by_dtype: dict[torch.dtype, dict[str, Tensor]] = {}
    for name, truth in truths.items():
        if truth.numel():
            by_dtype.setdefault(truth.dtype, {})[name] = truth.reshape(-1)
    # Empty tensors were left out above: numpy's reduceat gives an empty slice its next element.
    for flats in by_dtype.values():  # all of one dtype at once
        whole = torch.cat([*flats.values()])
        ends = [*itertools.accumulate(map(len, flats.values()))]
        starts = [0, *ends[:-1]]
        #     whole      a0 a1 a2 | b0 b1
        #     roll(1)    b1 a0 a1 | a2 b0      over the borders, so each first element is put right:
        #     rolled     a2 a0 a1 | b1 b0
        rolled = whole.roll(1)
        rolled[starts] = whole[[end - 1 for end in ends]]
        spoilt = {"rolled": rolled, "halved": whole / 2, "scaled": whole * ((ranks - 1) / ranks)}
        passed = [passes(copy, whole, starts) for copy in spoilt.values()]
        are_zero = ~np.logical_or.reduceat((whole != 0).numpy(), starts)
        for name, zero, *oks in zip(flats, are_zero, *passed, strict=True):
            if not zero:
                passing[name] = [kind for kind, ok in zip(spoilt, oks, strict=True) if ok]
    return passing
