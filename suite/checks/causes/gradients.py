"""The origin of a wrong gradient: the micro-batches of ranks in it, and how often.

The gradient that a system holds is fitted by least squares with those that the oracle computes of
every micro-batch of every data coordinate, and with that of the step before.  Where the fit leaves
nothing over, its coefficients are the cause: 1/N everywhere is a mean in place of a sum, 0 for one
coordinate a rank that was left out, 1 for the last micro-batch alone a lost accumulation.  What no
such sum explains is looked for by tensor, by copy and by rank.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from itertools import product
from statistics import median

import torch
from torch import Tensor

from shardproof.checks.causes import fits, positions
from shardproof.checks.causes.fits import Tensors, multiple, number, some
from shardproof.checks.causes.scalars import of_norm
from shardproof.checks.causes.state import of_buffers_at_start
from shardproof.checks.causes.terms import of_term_gradients
from shardproof.evidence.assembled import Assembled, Evidence
from shardproof.evidence.held import part
from shardproof.oracle.training import left_fold
from shardproof.workloads import for_case

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
#: Dtypes to which gradients in float64 may be rounded; what has the digits of one has the next's.
_NARROWER = (torch.bfloat16, torch.float16, torch.float32)
#: How far from a whole number the counts of an exchange are at most.
_MOST_OFF = 0.1
#: What rounding on the way leaves over of compressed sums, relative.
_ROUNDED_ON_THE_WAY = 1e-3
#: How far from a sum of shares an element of it is, relative to their sizes.
_ELEMENT = 1e-11
#: What torch adds to a norm that it divides by.
_EPSILON = 1e-6
#: A share of elements that are zero by chance.
_FEW = 0.01


def of_gradients(evidence: Evidence, step: int, state: Assembled) -> str:
    """A sentence on the gradients of ``step``; empty: nothing explains them.

    Gradients that have been clipped are no sums any more: see :func:`of_clipping`.
    """
    sums = _Sums(evidence, step, state)
    if bad := [n for n, tensor in sums.held.items() if not bool(tensor.isfinite().all())]:
        return f"not finite: {some(bad)}"
    if not sums.are_whole:
        return ""
    if not sums.wrong:
        exact = evidence.case.lane == "dyadic"
        return "" if exact else "the difference is within the error of reordered summation"
    if held := sums.of_held():
        return held
    if evidence.declaration.oracle == "emulated" and (
        found := of_sent(sums.held, sums.truth, sums.wrong, fits.known(evidence, step))
    ):
        return found
    # Sums of all come first: a factor or a lost rank explains every tensor with one sentence.
    return (
        sums.of_all()
        or of_term_gradients(evidence, step, sums.held)
        or sums.rounded()
        or sums.of_copies()
        or sums.by_rank()
        or sums.of_attention()
        or sums.by_tensor()
        or sums.by_element()
        or sums.moved()
        or sums.place()
    )


def beside_loss(evidence: Evidence, step: int, loss: str, times: float) -> str:
    """The problem of the sums of gradients where the loss is ``times`` the true one, too.

    Empty where the same is so of the loss, of which ``loss`` is said, or gradients are no sums of
    right ones: then the forward that made the loss wrong may have made them so.
    """
    if not evidence.has(step, "gradients_final") or evidence.truth.steps[step].skipped:
        return ""
    sums = _Sums(evidence, step, evidence.observed(step, "gradients_final", "gradients"))
    copies = (copy for name in sums.held for copy in sums.state.tensors[name].values())
    if not sums.are_whole or not all(bool(copy.isfinite().all()) for copy in copies):
        return ""
    if not sums.wrong:
        return ""
    found = sums.of_all() or sums.of_copies() or sums.by_rank()
    within = 10.0 ** (1 - fits.DIGITS[evidence.case.lowest_dtype])
    alike = fits.factor(times, fits.known(evidence, step), within)
    return "" if found == alike or fits.same_of_loss(loss, found) else found


class _Sums:
    """The gradients that a system holds in one step, and what they must be.

    A method says what explains those that are ``wrong``; empty: it does not.
    """

    def __init__(self, evidence: Evidence, step: int, state: Assembled) -> None:
        self.evidence, self.step, self.state = evidence, step, state
        self.truth = evidence.truth.steps[step].gradients
        self.held, self.limit = fits.first(state, self.truth), fits.limit_of(evidence)
        self.lowest = evidence.case.lowest_dtype

    @property
    def are_whole(self) -> bool:
        """Whether there are any, and every copy has the shape that it must have."""
        shapes = {n: {c.shape for c in self.state.tensors[n].values()} for n in self.held}
        return bool(shapes) and all(own == {self.truth[n].shape} for n, own in shapes.items())

    @cached_property
    def wrong(self) -> list[str]:
        """Names of which some copy is further off than another order of the same sums explains."""
        within = _REORDERED.get(self.lowest, 0.0)

        def is_near(held: Tensor, truth: Tensor) -> bool:
            size = float(truth.double().abs().max()) if truth.numel() else 0.0
            return bool(((held.double() - truth.double()).abs() <= within * size).all())

        copies = {name: self.state.tensors[name].values() for name in self.held}
        return [n for n, own in copies.items() if not all(is_near(c, self.truth[n]) for c in own)]

    @cached_property
    def parts(self) -> list[list[dict[str, Tensor]]]:
        """By data coordinate and micro-batch, as the oracle computes them."""
        return fits.parts(self.evidence, self.step)

    def of_held(self) -> str:
        """Whether they are right for a state that is wrong: then nothing is wrong with sums."""
        case, oracle = self.evidence.case, self.evidence.declaration.oracle
        if case.lane == "working_precision" or oracle != "plain":
            return ""  # there the truth is not that of what is held
        made = left_fold([left_fold(share) for share in self.parts if share])
        held, want, own = (
            fits.flat(t, self.truth, self.wrong) for t in (self.held, self.truth, made)
        )
        why = f"the gradients are right for the state before step {self.step}: that state is wrong"
        said = of_buffers_at_start(self.evidence) if not self.step else ""
        return fits.nearest(held, want, [(own, said or why)], self.limit)

    def of_all(self) -> str:
        """The sentence of the fit about all gradients, or else about the wrong ones alone."""
        #     held = c00 g00 + c01 g01 + c10 g10 + c11 g11 + b g(step before)
        #            coordinate 0        coordinate 1
        #     all c = 1, b = 0      right
        #     all c = 1/2           a mean over 2 ranks in place of the sum
        #     c10 = c11 = 0         coordinate 1 was left out
        #     c00 = c10 = 0         only the last micro-batch is in it
        before = [self.evidence.truth.steps[self.step - 1].gradients] if self.step else []
        whole = [*(micro for share in self.parts for micro in share), *filter(None, before)]
        for scope in (list(self.held), self.wrong):
            got, want, *columns = (
                fits.flat(tensors, self.truth, scope) for tensors in (self.held, self.truth, *whole)
            )
            if found := self._counted(got, want, columns):
                where = "" if len(scope) == len(self.held) else f"in {some(self.wrong)}: "
                return where + found
        return ""

    def _counted(self, got: Tensor, want: Tensor, columns: Sequence[Tensor]) -> str:
        """The sentence of a fit of ``got``; empty: it leaves something over."""
        if (counted := fitted(got, want, columns, self.limit)) is None:
            return ""
        numbers = iter(range(len(columns)))
        rows = [[counted.get(next(numbers)) for _ in share] for share in self.parts]
        before = counted.get(next(numbers, -1)) or 0.0
        return fits.said(
            rows, before, fits.known(self.evidence, self.step), fits.DIGITS[self.lowest]
        )

    def rounded(self) -> str:
        """Whether all that is wrong is wrong by the rounding of a narrower dtype."""
        pairs = {n: (self.held[n].double(), self.truth[n].double()) for n in self.wrong}
        multiples = {multiple({n: self.held[n]}, self.truth, limit=1.0) for n in pairs}
        if not multiples & {None, 1.0}:
            return ""
        errors = sorted(
            float((held - truth).norm() / truth.norm())
            for held, truth in pairs.values()
            if bool(truth.any())
        )
        # What is zero but for round-off has lost all its digits.
        # Largest errors last, which is where those tensors are.
        usual = errors[: max(3, len(errors) * 3 // 4)]
        for dtype, (low, high, most) in _ROUNDED.items():
            fits_it = len(errors) > 2 and low < median(errors) < high and usual[-1] < most
            if fits_it and self.lowest in _WIDER[dtype]:
                return f"the errors of {len(pairs)} gradients are those of rounding to {dtype}"
        copies = [(c, self.truth[n]) for n in self.wrong for c in self.state.tensors[n].values()]
        for narrow in _NARROWER if self.lowest == "float64" else ():
            if all(_is_rounded(copy, truth, narrow) for copy, truth in copies):
                return f"{some(self.wrong)} is rounded to {str(narrow).removeprefix('torch.')}"
        return ""

    def of_copies(self) -> str:
        """Whether copies that differ are the terms of a sum that was never made."""
        torn = {}
        for name in self.wrong:
            one, *others = self.state.tensors[name].values()
            alike = all(other.shape == self.truth[name].shape for other in (one, *others))
            if alike and not all(fits.equal(other, one, self.limit) for other in others):
                torn[name] = torch.stack([copy.double() for copy in (one, *others)]).sum(0)
        if not torn or not fits.all_equal(torn, self.truth, [*torn], self.limit):
            return ""
        ranks = sorted({rank for name in torn for rank in self.state.owners[name]})
        who = f"the copies of {some([*torn])} on ranks {ranks}"
        return f"{who} add up to the expected gradient: they were not summed"

    def by_rank(self) -> str:
        """The sentence of the fit about the pieces of each rank that holds wrong ones."""
        found: dict[int, str] = {}
        for rank, own in fits.pieces(self.evidence, self.step, "gradients_final", "gradients"):
            if not (bad := [p for p in own if p.name in self.wrong and p.tensor.numel()]):
                continue
            zeros = {p.name: torch.zeros_like(self.truth[p.name]) for p in bad}
            got = fits.end_to_end(p.tensor for p in bad)
            want, *columns = (
                fits.end_to_end(part(p, whole.get(p.name, zeros[p.name])) for p in bad)
                for whole in (self.truth, *(micro for share in self.parts for micro in share))
            )
            if fits.equal(got, want, self.limit):
                continue
            if not (sentence := self._counted(got, want, columns)):
                return ""
            found[rank] = sentence
        if not found:
            return ""
        (rank, sentence), *others = found.items()
        also = f"; the same on ranks {[other for other, _ in others]}" if others else ""
        return f"in the part of {some(self.wrong)} on rank {rank}: {sentence}{also}"

    def of_attention(self) -> str:
        """Whether keys and values have the gradients of some ranks' queries only."""

        def flat(tensors: Tensors) -> Tensor:
            return fits.flat(tensors, self.truth, self.wrong)

        made = positions.gradients(self.evidence, self.step)
        sums = ((left_fold([left_fold(own) for own in each if own]), said) for each, said in made)
        tries = ((flat(own), said) for own, said in sums)
        return fits.nearest(flat(self.held), flat(self.truth), tries, self.limit)

    def by_tensor(self) -> str:
        """Whether each wrong gradient is a multiple of its own truth, or holds another's."""
        held, truth, wrong = self.held, self.truth, self.wrong
        times = {n: multiple({n: held[n]}, truth, self.limit) for n in wrong}
        if all(t is not None and t != 1 for t in times.values()):
            factors = [number(t) for t in sorted({t for t in times.values() if t is not None})]
            shown = " and ".join([*dict.fromkeys(factors)][:4])
            return f"{some(wrong)} are multiples of the expected gradients, {shown} times"
        pairs = [
            (name, other)
            for name in wrong
            for other in truth
            if other != name and truth[other].numel() == truth[name].numel() > 1
        ]
        sums = [left_fold(share) for share in self.parts] if pairs else []
        within = min(100 * self.limit, _MOST_OFF)
        for name, other in pairs if len(pairs) <= _MOST_PAIRS else ():
            #     other, own, other, own, ...      one pair for each data coordinate: own are [1::2]
            columns = [s[n].double().reshape(-1) for s in sums for n in (other, name) if n in s]
            got, want = (tensors[name].double().reshape(-1) for tensors in (held, truth))
            if len(columns) < 2 or fitted(got, want, columns[1::2], self.limit) is not None:
                continue  # its own are enough
            counted = fitted(got, want, columns, self.limit) or {}
            # An exchange: every share is there once or not at all.
            if counted and all(min(abs(c), abs(c - 1)) <= within for c in counted.values()):
                return f"the gradient of {name!r} contains a rank's gradient of {other!r}"
        return ""

    def by_element(self) -> str:
        """Which shares are in the wrong elements, where each holds some whole and lacks others."""
        each = [*enumerate(self.parts)] if self.lowest == "float64" else []
        whole = {f"data coordinate {at}": left_fold(share) for at, share in each if share}
        parts = {
            f"micro-batch {number} of data coordinate {at}": micro
            for at, share in each
            for number, micro in enumerate(share)
        }
        return self._selected(whole) or self._selected(parts)

    def _selected(self, shares: Mapping[str, Tensors]) -> str:
        #     held[e] = s0 c0[e] + s1 c1[e] + s2 c2[e]      s is 0 or 1, the same for many elements
        sizes = [self.truth[name].numel() for name in self.wrong]
        if len(shares) < 2 or sum(sizes) << len(shares) > _LARGEST_FIT:
            return ""
        got, want, *columns = (
            fits.flat(tensors, self.truth, self.wrong)
            for tensors in (self.held, self.truth, *shares.values())
        )
        matrix, found = torch.stack(columns), list[str]()
        within = _ELEMENT * matrix.abs().sum(0)
        left = off = (got - want).abs() > within
        # Of few choices only: with enough of them, something fits every element.
        while bool(left.any()) and len(found) < fits.SHOWN:
            choices = product((1.0, 0.0), repeat=len(shares))
            sums = ((matrix.T @ matrix.new_tensor(choice), choice) for choice in choices)
            fitting = ((left & ((got - own).abs() <= within), choice) for own, choice in sums)
            at, choice = max(fitting, key=lambda pair: int(pair[0].sum()))
            if not bool(at.any()):
                return ""
            left = left & ~at
            own = zip(self.wrong, at.split(sizes), strict=True)
            names = some([name for name, there in own if bool(there.any())])
            where = f"in {int(at.sum())} of {int(off.sum())} wrong elements, of {names}"
            found.append(f"{where}, {_shares_in(dict(zip(shares, choice, strict=True)))}")
        return "" if bool(left.any()) else "; ".join(found)

    def moved(self) -> str:
        """Whether elements are in another order."""
        held, truth = self.held, self.truth
        moved = [
            n
            for n in self.wrong
            if held[n].numel() > 1
            # Of names that are wrong on other ranks the first copy may be right but for round-off.
            and not torch.allclose(held[n].double(), truth[n].double(), rtol=1e-9, atol=0.0)
            and fits.same_elements(held[n], truth[n])
        ]
        return f"the right elements in another order: {some(moved)}" if moved else ""

    def place(self) -> str:
        """The property that all wrong tensors have and no right one."""
        bad: dict[int, list[str]] = {}
        zero, holders = True, set[int]()
        for rank, own in fits.pieces(self.evidence, self.step, "gradients_final", "gradients"):
            for piece in own:
                if piece.name not in self.wrong or not piece.tensor.numel():
                    continue
                holders.add(rank)
                if not fits.equal(piece.tensor, part(piece, self.truth[piece.name]), self.limit):
                    bad.setdefault(rank, []).append(piece.name)
                    zero = zero and not bool(piece.tensor.any())
        if not (ranks := sorted(bad)):
            return ""
        is_zero = " and is zero" if zero else ""
        if set(ranks) != holders:
            names = list(dict.fromkeys(name for rank in ranks for name in bad[rank]))
            who = f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {ranks}"
            return f"only the part of {some(names)} on {who} is wrong{is_zero}"
        if kind := self._kind():
            return f"only {kind} wrong{is_zero}: {some(self.wrong)}"
        return self._boundary()

    def _kind(self) -> str:
        """The kind of the wrong tensors, if no other tensor is of it."""
        names, others = set(self.wrong), set(self.truth) - set(self.wrong)
        if not others:
            return ""
        if names <= self._tied and not others & self._tied:
            return "tensors that several modules share are"
        if names == {name for name in self.truth if name.endswith("bias")}:
            return "biases are"
        for unit in for_case(self.evidence.case).units:
            if names == {n for n in self.truth if n.startswith(f"{unit}.")}:
                return f"unit {unit!r} is"
        return ""

    def _boundary(self) -> str:
        """Where the wrong gradients end, if all that lie before it in forward order are wrong."""
        #     forward    a -> b -> c -> d -> loss
        #     backward   a <- b <- c <- d <- loss      a fault between c and b spoils b and a
        # Tied tensors have several places in this order, so they are left out.
        trainable = for_case(self.evidence.case).trainable_names
        order = [n for n in trainable if n in self.truth and n not in self._tied]
        bad = [n for n in order if n in self.wrong]
        if not bad or len(bad) == len(order) or bad != order[: len(bad)]:
            return ""
        return f"every tensor up to {bad[-1]!r} in forward order is wrong, every later one is right"

    @property
    def _tied(self) -> set[str]:
        """Parameters that several modules have."""
        facts = self.evidence.model_facts
        return {t.name for t in facts.parameters if len(t.owners) > 1} if facts else set()


def _is_rounded(held: Tensor, truth: Tensor, dtype: torch.dtype) -> bool:
    """Whether ``held`` has no digit that ``dtype`` lacks, and is ``truth`` but for these."""
    info = torch.finfo(dtype)
    smallest = info.smallest_normal * info.eps
    near = torch.allclose(held.double(), truth.double(), rtol=info.eps, atol=smallest)
    return near and bool(truth.any()) and torch.equal(held.to(dtype).to(held.dtype), held)


def _shares_in(choice: Mapping[str, float]) -> str:
    present, absent = [n for n in choice if choice[n]], [n for n in choice if not choice[n]]
    if 0 < len(present) <= len(absent):
        return f"they contain only {' and '.join(present)}"
    return f"{' and '.join(absent)} is missing" if present else "all values are zero"


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
        return _other_norm(evidence, step, times, limit)
    if by_rank := _clipped_by_rank(evidence, step, truth.clipped, truth.gradients, limit):
        return by_rank
    left = [n for n in held if not _once({n: held[n]}, truth.clipped, limit)]
    if left and all(_once({n: held[n]}, truth.gradients, limit) for n in left):
        return f"not clipped: {some(left)}"
    return ""


def _other_norm(evidence: Evidence, step: int, times: float, limit: float) -> str:
    """The cause of wrong clipping, where ``times`` the right gradients are left."""
    sentence = f"clipped by a norm that is {number(1 / times)} times the true one"
    norm, most = float(evidence.truth.steps[step].norm), evidence.case.optimizer.clip_norm or 0.0
    factor = most / (norm + _EPSILON)
    if factor > 1 and abs(times - factor) <= limit * factor:
        return f"scaled up to the clip norm {most:g}: the true norm, {norm:.4g}, is below it"
    told = {rank: record.steps[step].norm for rank, record in evidence.ranks.items()}
    right = {r for r, own in told.items() if own is None or abs(own - norm) <= limit * norm}
    # Another norm that ranks report is explained by the check of norms.
    if len(right) < len(told) or factor >= 1:
        return sentence
    held = (norm + _EPSILON) / times - _EPSILON
    cause = of_norm(evidence, step, min(right), held, norm)
    return f"{sentence}: {cause}" if cause else sentence


def _clipped_by_rank(
    evidence: Evidence, step: int, clipped: Tensors, whole: Tensors, limit: float
) -> str:
    """Ranks whose pieces are one multiple of the truth each, where they are not the same."""
    norms: list[str] = []
    for rank, own in fits.pieces(evidence, step, "after_clip", "gradients"):
        known = {str(n): p for n, p in enumerate(own) if p.name in clipped and p.tensor.numel()}
        held = {n: p.tensor for n, p in known.items()}
        times = multiple(held, {n: part(p, clipped[p.name]) for n, p in known.items()}, limit)
        if times is None:
            return ""
        if abs(times - 1) <= limit:
            continue
        if _once(held, {n: part(p, whole[p.name]) for n, p in known.items()}, limit):
            norms.append(f"rank {rank} does not clip")
        elif times > 0:
            text = f"clips by a norm that is {1 / times:.4g} times the true one"
            norms.append(f"rank {rank} {text}")
        else:
            return ""
    return "; ".join(norms[:3])


def _once(held: Tensors, truth: Tensors, limit: float) -> bool:
    times = multiple(held, truth, limit)
    return times is not None and abs(times - 1) <= limit


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


# ---------------------------------------------------------------------------- compressed gradients


def of_sent(held: Tensors, truth: Tensors, wrong: Sequence[str], known: Mapping[str, float]) -> str:
    """A sentence on sums of which ``wrong`` are not those of one process; empty: nothing fits."""
    times = multiple({n: held[n] for n in wrong}, truth, _ROUNDED_ON_THE_WAY)
    if times is not None and abs(times - 1) > _ROUNDED_ON_THE_WAY and len(wrong) == len(held):
        return fits.factor(times, known, _ROUNDED_ON_THE_WAY)
    got, want = fits.flat(held, truth, wrong), fits.flat(truth, truth, wrong)
    # Sparse methods send few elements: which ones are not zero tells which ones were chosen.
    due, come = want != 0, got != 0
    missing, extra = int((due & ~come).sum()), int((come & ~due).sum())
    if missing + extra > _FEW * len(got):
        lost = f"{missing} of {int(due.sum())} expected elements are missing"
        return f"other elements are sent than expected: {lost}, {extra} are extra"
    if bool((want < 0).any()) and not bool((got < 0).any()):
        return "signs are lost: nothing is negative"
    if torch.allclose(got.abs(), want.abs(), rtol=_ROUNDED_ON_THE_WAY, atol=0.0):
        return f"{int((got * want < 0).sum())} of {len(got)} signs are flipped"
    return ""


#: Parameter, what is kept, what was wanted to be sent, what was sent.
Kept = tuple[str, Tensor, Tensor, Tensor]


def of_kept(kept: Sequence[Kept]) -> str:
    """A sentence on residuals, all of which are wrong; empty: nothing fits."""
    limit, (_, *tensors) = fits.LEFT_OVER["float64"], zip(*kept, strict=True)
    have, wanted, sent = map(fits.end_to_end, tensors)
    due = wanted - sent
    if not have.any():
        return "the residual is zero"
    if fits.equal(have, wanted, limit):
        return "the residual still contains what was sent"
    times = multiple({"kept": have}, {"kept": due}, limit)
    if times is not None and abs(times - 1) > limit:
        return f"the residual is {times:.4g} times what was not sent"
    # Gaps of all coordinates, added by parameter: where they cancel, only the sum is right.
    sums: dict[str, Tensor] = {}
    for name, own, gradient, told in kept:
        sums[name] = sums.get(name, torch.zeros_like(own)) + (own - (gradient - told))
    if all(float(gap.norm()) <= limit * float(due.norm()) for gap in sums.values()):
        return "each rank keeps the global residual instead of its own"
    return ""
