"""The value that a wrong loss or a wrong norm equals."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain, combinations
from typing import Any

import torch
from torch import Tensor

from shardproof import axes, table
from shardproof.checks.causes import fits, positions
from shardproof.checks.causes.fits import some
from shardproof.checks.causes.state import of_buffers_at_start
from shardproof.contract import Batch, MicroBatch, Piece
from shardproof.evidence.assembled import Evidence
from shardproof.oracle import training
from shardproof.workloads import for_case

#: Values to try, and what it means if one is what the system holds.
Tries = Iterator[tuple[float, str]]
#: Loss by data coordinate and micro-batch.
Losses = list[list[float]]
#: Tells the loss of micro-batches with a state.
LossOf = Callable[..., float]
#: Kinds of biases, by the ends of their names, of which pairs are tried.
_MOST_KINDS = 12
#: Positions of samples that are left out one by one: each costs a forward.
_MOST_POSITIONS = 64
#: What outputs are cast to by mistake.
_NARROW = ("float32", "bfloat16", "float16")
#: How close a loss, and a norm, must come to a try, by dtype.
_CLOSE = {"float64": 1e-9, "float32": 1e-5, "bfloat16": 1e-2, "float16": 1e-2}
_CLOSE_NORM = _CLOSE | {"float16": 0.005}


# ---------------------------------------------------------------------------------------- losses


def of_loss(evidence: Evidence, step: int, shares: Mapping[int | None, float]) -> str:
    """A sentence on the loss of ``step``, of which ``shares`` are those of data coordinates."""
    held, truth = sum(shares.values()), evidence.truth.steps[step]
    within = _CLOSE[evidence.case.lowest_dtype]
    known, tried = fits.known(evidence), _Losses(evidence, step)
    tries = chain(
        _multiples(truth.loss, known, "the loss is"),
        _logarithms(evidence, truth.loss),
        tried.of_batches(),
        tried.of_earlier(),
    )
    if found := fits.nearest(held, truth.loss, tries, within):
        return found
    wrong = [
        number
        for number, share in shares.items()
        if number is not None
        and number < len(truth.losses)
        and abs(share - truth.losses[number]) > within * abs(truth.losses[number])
    ]
    if wrong and len(shares) > len(wrong):
        shares_of = [evidence.shares(step)[number] for number in wrong]
        samples = [str(int(i)) for b in shares_of for m in b.micro_batches for i in m.sample_ids]
        of = f"that of samples {table.some(samples, fits.SHOWN)}"
        return f"only the loss of data coordinates {wrong} is wrong, {of}"
    return ""


def of_evaluation(evidence: Evidence, step: int, held: float, truth: float) -> str:
    """A sentence on the loss that an evaluation of the batch of ``step`` tells."""
    multiples = _multiples(truth, fits.known(evidence), "the loss is")
    tries = chain(multiples, _Losses(evidence, step).of_evaluation())
    return fits.nearest(held, truth, tries, _CLOSE[evidence.case.lowest_dtype])


def _multiples(truth: float, known: Mapping[str, float], what: str) -> Tries:
    """Multiples that a forgotten scale makes."""
    for number in {n for n in known.values() if n > 1}:
        for times in (float(number), 1 / number):
            yield times * truth, fits.factor(times, known).replace("every gradient is", what)


def _logarithms(evidence: Evidence, truth: float) -> Tries:
    for axis, size in evidence.case.mesh.items():
        # Cross-entropy is log(sum of exp) - logit: n times the sum adds log(n).
        for sign, way in ((1, "large"), (-1, "small")) if size > 1 else ():
            off = f"the loss is too {way} by log({size}), the ranks of the axis {axis!r}"
            why = "the sum of exponentials counts each class a wrong number of times"
            yield truth + sign * math.log(size), f"{off}: {why}"


@dataclass(frozen=True)
class _Losses:
    """Losses of the batches of a step, made otherwise."""

    evidence: Evidence
    step: int

    @cached_property
    def batches(self) -> list[Batch]:
        """The share of every data coordinate."""
        return self.evidence.shares(self.step)

    def evaluator(self, training_mode: bool, **precision: str) -> LossOf:
        """As the policy of the case says, but for ``precision``."""
        case = self.evidence.case
        return training.evaluator(for_case(case), {**case.precision, **precision}, training_mode)

    def of(
        self, loss_of: LossOf, states: Sequence[Mapping[str, Tensor]], batches: Sequence[Batch] = ()
    ) -> Losses:
        """With these states, of these ``batches`` (default: those of the step)."""
        return [
            [loss_of(state, [micro]) for micro in batch.micro_batches]
            for state, batch in zip(states, batches or self.batches, strict=True)
        ]

    def of_batches(self) -> Tries:
        """Sums over other micro-batches, or with other weights, in training mode and not."""
        states, loss_of = fits.states(self.evidence, self.step), self.evaluator(True)
        losses = self.of(loss_of, states)
        # The identity, first: whatever changes nothing here would explain a wrong state as well.
        yield _sum(losses), self._of_held()
        yield from self._selections(losses)
        yield from self._weighted(losses)
        yield from self._biases(loss_of, states)
        yield from positions.losses(self.evidence, states, self.batches, training_mode=True)
        turned = _sum(self.of(loss_of, states, [_next_targets(batch) for batch in self.batches]))
        yield turned, "this is the loss against the targets of the next micro-batch"
        yield from self._of_outputs(states, True)
        evaluated = _sum(self.of(self.evaluator(False), states))
        yield evaluated, "this is the loss in evaluation mode"
        if self.evidence.case.lowest_dtype == "float64":  # among so many, one fits by chance
            yield from self._of_parts(loss_of, states, _sum(losses))

    def _of_parts(
        self, loss_of: LossOf, states: Sequence[Mapping[str, Tensor]], whole: float
    ) -> Tries:
        """One sample, or one position of all samples, that is counted not at all, or twice."""
        #     weights of a micro-batch, sample by position
        #         a b c       row 1 alone: sample 1        column 2 alone: position 2
        #         d e f           0 0 0                        0 0 c
        #                         d e f                        0 0 f
        positions: dict[int, float] = {}
        for state, batch in zip(states, self.batches, strict=True):
            for micro in batch.micro_batches:
                for row, sample in enumerate(micro.sample_ids.tolist()):
                    own = loss_of(state, [_only(micro, (row,))])
                    yield whole - own, f"sample {sample} is not in the loss"
                    yield whole + own, f"sample {sample} counts twice in the loss"
                length = micro.weights.shape[1] if micro.weights.dim() > 1 else 0
                for at in range(length) if length <= _MOST_POSITIONS else ():
                    own = loss_of(state, [_only(micro, (slice(None), at))])
                    positions[at] = positions.get(at, 0.0) + own
        for at, own in positions.items():
            yield whole - own, f"position {at} of every sample is not in the loss"
            yield whole + own, f"position {at} of every sample counts twice in the loss"

    def _of_held(self) -> str:
        """A sentence on a loss that is right for a state that is wrong."""
        wrong = of_buffers_at_start(self.evidence) if self.step == 0 else ""
        held = f"the loss is right for the state held before step {self.step}"
        return wrong or f"{held}: that state is wrong"

    def of_evaluation(self) -> Tries:
        """In training mode, with other weights or with other parameters."""
        states = fits.states(self.evidence, self.step)
        losses = self.of(self.evaluator(False), states)
        # The identity: another rule for buffers, before anything else is said of the batch.
        yield _sum(losses), "this is the loss with the buffers of rank 0 on every rank"
        yield from self._selections(losses)
        yield from self._weighted(losses)
        trained = _sum(self.of(self.evaluator(True), states))
        yield trained, "this is the loss in training mode"
        yield from self._of_outputs(states, False)
        yield from self._of_state(False)
        if self.evidence.case.lowest_dtype == "float64":
            yield from self._of_parts(self.evaluator(False), states, _sum(losses))

    def of_earlier(self) -> Tries:
        """Of the step before, or with its parameters."""
        if self.step:
            earlier = self.evidence.truth.steps[self.step - 1].loss
            yield earlier, "this is the loss of the step before"
            yield from self._of_state(True)

    def _of_state(self, training_mode: bool) -> Tries:
        before = fits.states(self.evidence, self.step - 1)
        before = [before[min(number, len(before) - 1)] for number in range(len(self.batches))]
        loss = _sum(self.of(self.evaluator(training_mode), before))
        yield loss, "this is the loss with the parameters before the last update"

    def _biases(self, loss_of: LossOf, states: Sequence[Mapping[str, Tensor]]) -> Tries:
        """Biases that every tensor rank adds before the sum over the axis."""
        mesh = self.evidence.case.mesh
        axis, ranks = axes.cutting("widths"), axes.parts(mesh, "widths")
        biases = [n for n in states[0] if n.endswith(".bias")] if ranks > 1 else []
        kinds = sorted({".".join(name.rsplit(".", 3)[-3:]) for name in biases})
        if len(kinds) > _MOST_KINDS:
            return
        for chosen in chain(combinations(kinds, 1), combinations(kinds, 2)):
            scaled = [
                {n: t * ranks if n.endswith(chosen) else t for n, t in state.items()}
                for state in states
            ]
            added = f"{' and '.join(chosen)} were added on every rank of the axis {axis!r}"
            yield _sum(self.of(loss_of, scaled)), f"the biases {added}"

    def _of_outputs(self, states: Sequence[Mapping[str, Tensor]], training_mode: bool) -> Tries:
        """Losses of outputs in another dtype than the case asks for."""
        for dtype in _NARROW:
            loss = _sum(self.of(self.evaluator(training_mode, output=dtype), states))
            yield loss, f"the outputs were cast to {dtype} before the loss"

    def _selections(self, losses: Losses) -> Tries:
        whole, last = _sum(losses), sum(own[-1] for own in losses if own)
        yield last, "the loss contains only the last micro-batch"
        yield sum(own[0] for own in losses if own), "only the first micro-batch is in the loss"
        yield whole - last, "the last micro-batch is not in the loss"
        sizes = [[len(window) for window in batch.windows] for batch in self.batches]
        if max(map(len, sizes)) > 1:
            pairs = [(own, size) for own, size in zip(losses, sizes, strict=True) if own]
            yield sum(sum(o[-s[-1] :]) for o, s in pairs), "only the last window is in the loss"
            yield sum(sum(o[: s[0]]) for o, s in pairs), "only the first window is in the loss"
        for number, own in enumerate(losses) if len(losses) > 1 else ():
            yield sum(own), f"this is the loss of data coordinate {number} alone"
            yield whole - sum(own), f"the loss of data coordinate {number} is missing"

    def _weighted(self, losses: Losses) -> Tries:
        """Means of means, where weights ask for a sum over tokens."""
        weights = [[float(m.weights.double().sum()) for m in b.micro_batches] for b in self.batches]
        pairs = [*zip(losses, weights, strict=True)]
        # A loss is a weighted sum over tokens: divided by the weights it is their mean.
        means = [[a / w if w else 0.0 for a, w in zip(*pair, strict=True)] for pair in pairs]
        what = "counts the same in the loss, however many tokens it has"
        yield _sum(means) / sum(map(len, means)), f"every micro-batch {what}"
        shares = [sum(own) / sum(ws) for own, ws in pairs if sum(ws)]
        yield sum(shares) / len(losses), f"every data coordinate {what}"
        largest, loss = max((len(w) for b in self.batches for w in b.windows), default=1), 0.0
        for own, batch in zip(losses, self.batches, strict=True):
            left = iter(own)
            for window in batch.windows:
                loss += sum(next(left) for _ in window) * len(window) / largest
        what = "divided by the number of micro-batches of a complete one"
        yield loss, f"an incomplete window is {what}"


def _sum(losses: Losses) -> float:
    return sum(map(sum, losses))


def _only(micro: MicroBatch, place: tuple[Any, ...]) -> MicroBatch:
    """The micro-batch with the weights at ``place`` alone."""
    weights = torch.zeros_like(micro.weights)
    weights[place] = micro.weights[place]
    return replace(micro, weights=weights)


def _next_targets(batch: Batch) -> Batch:
    """The inputs of every micro-batch with the targets and weights of the next."""
    micros = list(batch.micro_batches)
    changed = iter(
        replace(m, targets=n.targets, weights=n.weights)
        if m.targets.shape == n.targets.shape
        else m
        for m, n in zip(micros, [*micros[1:], *micros[:1]], strict=True)
    )
    return Batch(batch.step, tuple(tuple(next(changed) for _ in w) for w in batch.windows))


# ----------------------------------------------------------------------------------------- norms


def of_norm(evidence: Evidence, step: int, rank: int, held: float, true: float) -> str:
    """A sentence on the norm ``held`` that ``rank`` reports of ``step``, in place of ``true``.

    By which norm it clipped: over which ranks squares were summed, and of which gradients.
    """
    within = _CLOSE_NORM[evidence.case.lowest_dtype]
    if not math.isfinite(held) or not true:
        return ""
    if held == 0:
        return "the norm is 0: it covers no gradient"
    own = dict(fits.pieces(evidence, step, "gradients_final", "gradients"))
    shown = "the norm is right for the reported gradients: they are wrong, not the norm"
    if step and _began_wrong(evidence, step):
        shown = f"the norm is right for the state after step {step - 1}: that state is wrong"
    tries = chain(
        (
            (norm, shown)
            for norm in (math.sqrt(_square_once(own, list(own))), *_wholes(evidence, own, rank))
        ),
        _multiples(true, fits.known(evidence, step), "the norm is"),
        _over_axes(evidence, own, rank, true),
    )
    if found := fits.nearest(held, true, tries, within):
        return found
    if evidence.case.lowest_dtype != "float64":
        return ""  # among so many, one fits by chance
    local = (fits.nearest(held, true, [one], within) for one in _local(evidence, step))
    near = [*filter(None, local)]
    return near[0] if len(near) == 1 else ""


def _began_wrong(evidence: Evidence, step: int) -> bool:
    """Whether a step begins with parameters that are not the oracle's, round-off apart."""
    truth = evidence.truth.steps[step - 1].parameters
    held = fits.first(evidence.observed(step - 1, "after_update", "parameters"), truth)
    plain = evidence.declaration.oracle == "plain" and evidence.case.lane != "working_precision"
    return plain and not fits.all_equal(held, truth, [*held], fits.limit_of(evidence))


class _Ranks:
    """Ranks that meet along some axes of the mesh, of those that hold ``own``."""

    def __init__(self, evidence: Evidence, own: Mapping[int, Sequence[Piece]]) -> None:
        self.own = own
        self.mesh = {axis: size for axis, size in evidence.case.mesh.items() if size > 1}
        self._where = {at: record.coordinate for at, record in evidence.ranks.items()}

    def meeting(self, rank: int, along: Sequence[str]) -> list[int]:
        """Those that differ from ``rank`` along these axes at most."""
        at = [(axis, place) for axis, place in self._where[rank].items() if axis not in along]
        alike = (r for r in self.own if all(self._where[r][axis] == place for axis, place in at))
        return [*alike]

    def but(self, along: Sequence[str]) -> list[str]:
        """The other axes."""
        return [axis for axis in self.mesh if axis not in along]

    def choices(self) -> Iterator[tuple[str, ...]]:
        """Every choice of axes, few first."""
        for count in range(len(self.mesh) + 1):
            yield from combinations(self.mesh, count)

    def hold_all(self, ranks: Sequence[int]) -> bool:
        """Whether each element of every gradient is held by one of ``ranks``."""
        return len(_squares(self.own, ranks)) == len(_squares(self.own, [*self.own]))


def _wholes(evidence: Evidence, own: Mapping[int, Sequence[Piece]], rank: int) -> Iterator[float]:
    """Norms of all gradients as ``rank`` and those that it meets hold them.

    Where replicas differ, each sums up its own: along the axes that cut gradients, and no others.
    """
    ranks = _Ranks(evidence, own)
    for along in ranks.choices():
        if ranks.hold_all(peers := ranks.meeting(rank, along)):
            yield math.sqrt(_square_once(own, peers))


def _over_axes(
    evidence: Evidence, own: Mapping[int, Sequence[Piece]], rank: int, true: float
) -> Tries:
    """Sums of squares over some axes of the mesh, with every copy counted or none."""
    #     squares of the ranks of a 2 x 2 mesh     a b     rank 0 clips by the root of
    #                                              c d
    #         a + b + c + d    all axes: right where no two ranks hold the same piece
    #         a + b            the inner axis only
    #         a                what the rank holds itself
    ranks = _Ranks(evidence, own)
    copied = [axis for axis in ranks.mesh if ranks.hold_all(ranks.meeting(rank, ranks.but([axis])))]
    places = ((p.name, p.slices, p.flat_range) for pieces in own.values() for p in pieces)
    held = Counter[tuple[object, ...]](places)
    often = {place: count if count < len(own) else 1 for place, count in held.items()}
    squares_of = _squares(own, [*own])
    total = sum(square * often[place] for place, square in squares_of.items())
    yield math.sqrt(total), "tensors that only some ranks hold count with every copy"
    for along in ranks.choices():
        peers, rest = ranks.meeting(rank, along), ranks.but(along)
        over, alone = _named(along), f"this is the norm of the part that rank {rank} holds itself"
        if along and {*along} <= {*copied}:
            # n equal squares make n times the square, so sqrt(n) times the norm.
            root = math.sqrt(len(peers))
            of = f"{root:.4g} times the true one, the root of {len(peers)} (ranks along {over})"
            yield root * true, f"the norm is {of}: equal gradients were counted on every rank"
        if along:
            # Along an axis of copies only nothing is left to sum.
            cut = [axis for axis in rest if axis not in copied]
            less = f", not over {_named(cut)}" if cut else ""
            alone = f"the squares were summed over {over} only{less}"
            squares = [
                float(sum(piece.tensor.double().square().sum() for piece in own[peer]))
                for peer in peers
            ]
            norms = sum(map(math.sqrt, squares))
            yield norms, f"the norms of ranks {peers} were added, not their squares"
            yield norms / len(peers), f"the norms of ranks {peers} were averaged"
            inner = sum(math.sqrt(_square_once(own, ranks.meeting(r, rest))) for r in peers)
            yield inner, f"norms were added over {over}, not their squares"
            copies = "with every copy that its ranks hold"
            yield math.sqrt(sum(squares)), f"the squares were summed over {over}, {copies}{less}"
        if rest and not ranks.hold_all(peers):
            yield math.sqrt(_square_once(own, peers)), alone


def _local(evidence: Evidence, step: int) -> Tries:
    """Norms of gradients that had not been reduced, or not all, or not yet come."""
    truth = evidence.truth.steps[step].gradients
    true = {n: float(truth[n].double().square().sum()) for n in truth}
    whole = sum(true.values())
    for number, share in enumerate(fits.parts(evidence, step)):
        squares = {
            n: float(torch.stack([m[n].double() for m in share if n in m]).sum(0).square().sum())
            for n in truth
            if any(n in m for m in share)
        }
        own = f"data coordinate {number}'s own gradients: not yet reduced"
        yield math.sqrt(sum(squares.values())), f"this is the norm of {own}"
        for names in _runs(list(truth)):
            left = whole - sum(true[n] for n in names)
            norm = math.sqrt(max(0.0, left + sum(squares.get(n, 0.0) for n in names)))
            yield norm, f"the norm was taken before the gradients of {some(names)} were reduced"
    for names in _runs(list(truth)):
        norm = math.sqrt(max(0.0, whole - sum(true[n] for n in names)))
        yield norm, f"the gradients of {some(names)} are not in the norm"


def _runs(names: Sequence[str]) -> Iterator[list[str]]:
    """One of them, the first few, or the last few, but never all."""
    yield from ([name] for name in names)
    yield from (list(names[:number]) for number in range(2, len(names)))
    yield from (list(names[number:]) for number in range(1, len(names) - 1))


def _named(axes: Sequence[str]) -> str:
    return " and ".join(map(repr, axes))


def _square_once(own: Mapping[int, Sequence[Piece]], ranks: Sequence[int]) -> float:
    """The square of all that ``ranks`` hold, every element once."""
    return sum(_squares(own, ranks).values())


def _squares(
    own: Mapping[int, Sequence[Piece]], ranks: Sequence[int]
) -> dict[tuple[object, ...], float]:
    """The square of each piece that ``ranks`` hold, by its place."""
    seen: dict[tuple[object, ...], float] = {}
    for rank in ranks:
        for piece in own[rank]:
            place = (piece.name, piece.slices, piece.flat_range)
            # By place: a copy on another rank has the same key, and counts once.
            seen[place] = float(piece.tensor.double().square().sum())
    return seen
