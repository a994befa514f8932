"""What made a wrong update: an optimizer step that was made otherwise, or not at all."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import combinations, permutations
from typing import Any

import torch
from torch import Tensor

from shardproof.backends.errors import name_ranks
from shardproof.checks.causes import fits
from shardproof.checks.causes.fits import Tensors, some
from shardproof.checks.causes.meetings import of_meeting
from shardproof.checks.one_update import Update, update_of
from shardproof.contract import OptimizerSpec, Piece
from shardproof.evidence.assembled import CoordinateEvidence, Evidence
from shardproof.evidence.held import part

#: What may be left over of an update, by dtype: differences of values have lost digits.
_LEFT_OVER = {"float64": 1e-6, "float32": 1e-2, "bfloat16": 0.1, "float16": 0.1}

#: Parameters of one shape of which pairs are tried for an exchange.
_MOST_OF_A_SHAPE = 12


@dataclass(frozen=True)
class _Place:
    """What a rank holds at a piece, what must be there, and what was before; in fp64."""

    piece: Piece
    held: Tensor
    want: Tensor
    was: Tensor

    def is_wrong(self, limit: float) -> bool:
        """Whether an element is not the right one."""
        return bool(self._wrong(limit).any())

    def is_made(self, value: Tensor, limit: float) -> bool:
        """Whether every element is that of ``value`` or the right one, by the size of updates."""
        wrong = self._wrong(limit)
        left, apart = ((self.held - other).abs()[wrong] for other in (value, self.want))
        within = min(limit * self._size(), fits.MUCH * float(apart.norm()))
        return float(left.max()) <= within if len(left) else True

    def _wrong(self, limit: float) -> Tensor:
        return (self.held - self.want).abs() > limit * self._size()

    def _size(self) -> float:
        # An update is much smaller than its parameter, which would make any error small.
        return max(float((t - self.was).abs().max()) for t in (self.want, self.held))


#: Of one rank: the wrong places of each parameter.
_Wrong = dict[str, list[_Place]]


def of_update(evidence: Evidence, step: int, truth: Tensors) -> str:
    """A sentence on parameters after the update of ``step``; empty: nothing explains them.

    ``truth``: what they must be.  Asked where the gradients of the step are right.
    """
    if isinstance(evidence, CoordinateEvidence) and (said := of_meeting(evidence, step)):
        return said
    limit = _LEFT_OVER[evidence.case.lowest_dtype]
    update = update_of(evidence, step)
    before = update.before
    wrong: dict[int, _Wrong] = {}
    holders: set[int] = set()
    for rank, own in fits.pieces(evidence, step, "after_update", "parameters"):
        for piece in own:
            if piece.name not in truth or piece.name not in before or not piece.tensor.numel():
                continue
            holders.add(rank)
            values = (piece.tensor, part(piece, truth[piece.name]))
            held, want, was = (t.double() for t in (*values, part(piece, before[piece.name])))
            place = _Place(piece, held, want, was)
            if held.shape == want.shape and place.is_wrong(limit):
                wrong.setdefault(rank, {}).setdefault(piece.name, []).append(place)
    # Per rank: ranks may have different causes, and those that are right have none.
    found = {rank: _multiple_of_all(names, limit) for rank, names in wrong.items()}
    bad = list(dict.fromkeys(name for own in wrong.values() for name in own))
    tries = _tries(evidence, update, step, bad)
    for make, sentence in tries if wrong else ():
        left = [rank for rank in wrong if not found[rank]]
        if not left:
            break
        made = make()
        for rank in left:
            if _fits(wrong[rank], made, limit):
                found[rank] = sentence
    if not wrong or not all(found.values()):
        return ""
    rank, sentence = next(iter(found.items()))
    what = "" if len(bad) == len(truth) else f" ({some(bad)})"
    if len(set(found.values())) > 1:
        return f"on rank {rank}, {sentence}{what}"
    where = "" if set(found) == holders else f"on {name_ranks(sorted(found))}, "
    return f"{where}{sentence}{what}"


def _fits(wrong: _Wrong, made: Tensors, limit: float) -> bool:
    return all(
        place.is_made(part(place.piece, made[name]).double(), limit)
        for name, places in wrong.items()
        for place in places
    )


def _multiple_of_all(wrong: _Wrong, limit: float) -> str:
    places = [place for own in wrong.values() for place in own]
    made = {str(n): place.held - place.was for n, place in enumerate(places)}
    wanted = {str(n): place.want - place.was for n, place in enumerate(places)}
    within = min(100 * limit, 1e-2)
    times = fits.multiple(made, wanted, within)
    if times is None or abs(times) < 1e-6 or abs(times - 1) <= 2 * within:
        return ""
    return f"every update is {times:.4g} times the true one"


def _tries(
    evidence: Evidence, update: Update, step: int, wrong: Sequence[str]
) -> Iterator[tuple[Callable[[], Tensors], str]]:
    """Updates as they are often made, and what to say of them."""
    spec = update.spec

    def of(**changed: Any) -> Callable[[], Tensors]:
        return lambda: replace(update, **changed).make().parameters

    # Functions, because each costs an optimizer step and most are never asked.
    yield (lambda: update.before), "no update was made"
    yield from _swaps(update, wrong)
    if _decays(spec):
        yield of(spec=_without_decay(spec)), "weight decay was left out"
    for other in _other_decays(spec):
        yield of(spec=other), "the weight decay of another parameter group was applied"
    if update.slots:
        yield of(slots={}), "the update began with an empty optimizer state"
        counters = {n: t for n, t in update.slots.items() if n.endswith(".step")}
        if counters:
            begun = {**update.slots, **{n: torch.zeros_like(t) for n, t in counters.items()}}
            yield of(slots=begun), "the optimizer's step counter had started again"
            once = {**update.slots, **{n: t + 1 for n, t in counters.items()}}
            yield of(slots=once), "the optimizer's step counter was one step ahead"
    if step:
        earlier = update_of(evidence, step - 1)
        yield of(gradients=earlier.gradients), "the update used the gradients of the step before"
        yield of(before=earlier.before), "the update began with the parameters of the step before"
        if earlier.slots:
            yield of(slots=earlier.slots), "the optimizer state is one step behind"
    if spec.clip_norm is not None:
        raw = evidence.observed(step, "gradients_final", "gradients").first()
        yield of(gradients=raw), "the update used gradients that had not been clipped"
    zeros = {n: torch.zeros_like(update.before[n]) for n in update.trainable}
    yield of(gradients=zeros), "the update used gradients of zero"
    held = evidence.observed(step - 1, "after_update", "parameters") if step else None
    if held is not None:
        rounded = {n: t.to(update.before[n].dtype) for n, t in held.first().items()}
        yield of(before=rounded), "the update began with the rounded parameters, not with masters"


def _swaps(update: Update, wrong: Sequence[str]) -> Iterator[tuple[Callable[[], Tensors], str]]:
    """Values of a parameter in the place of another that has its shape."""
    made = update.make().parameters
    sizes: dict[tuple[int, ...], list[str]] = {}
    for name in (n for n in update.trainable if n in wrong):
        sizes.setdefault(tuple(made[name].shape), []).append(name)
    for names in sizes.values():
        for one, other in combinations(names[:_MOST_OF_A_SHAPE], 2):
            swapped = {**made, one: made[other], other: made[one]}
            yield (lambda s=swapped: s), f"{one!r} and {other!r} hold each other's values"  # type: ignore[misc]


def _decays(spec: OptimizerSpec) -> bool:
    return bool(spec.weight_decay or any(group.weight_decay for group in spec.groups))


def _without_decay(spec: OptimizerSpec) -> OptimizerSpec:
    groups = tuple(replace(group, weight_decay=0.0) for group in spec.groups)
    return replace(spec, weight_decay=0.0, groups=groups)


def _other_decays(spec: OptimizerSpec) -> Iterator[OptimizerSpec]:
    decays = [spec.weight_decay, *(_decay(spec, n) for n in range(len(spec.groups)))]
    for order in permutations(decays) if 1 < len(decays) <= 4 else ():
        if list(order) != decays:
            groups = tuple(
                replace(group, weight_decay=decay)
                for group, decay in zip(spec.groups, order[1:], strict=True)
            )
            yield replace(spec, weight_decay=order[0], groups=groups)


def _decay(spec: OptimizerSpec, group: int) -> float:
    own = spec.groups[group].weight_decay
    return spec.weight_decay if own is None else own
