"""The cause of a wrong update: a different optimizer step, or none.

Of ranks that train alone also what made a wrong meeting: forgotten, early, or of something else.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations, permutations, product
from typing import Any

import torch
from torch import Tensor

from shardproof.backends.errors import name_ranks
from shardproof.checks.causes import fits
from shardproof.checks.causes.fits import Tensors, some
from shardproof.checks.one_update import Update, update_of
from shardproof.contract import OptimizerSpec, Piece
from shardproof.evidence.assembled import CoordinateEvidence, Evidence
from shardproof.evidence.held import part
from shardproof.oracle.asked import follows_of
from shardproof.registry import follows

#: What may be left over of an update, by dtype: differences of values have lost digits.
_LEFT_OVER = {"float64": 1e-6, "float32": 1e-2, "bfloat16": 0.1, "float16": 0.1}
#: What a cause may leave over, relative to how far the ranks' own updates lie from the truth.
_LEFT_OVER_OF_A_MEETING = 1e-6
#: Said of an update that is right for what it began with.
_HELD = "the update is right for the held state and gradients: these are wrong"
#: Settings that optimizers often have.
_USUAL: Mapping[str, Mapping[str, Sequence[Any]]] = {
    "sgd": {"momentum": (0.0, 0.5, 0.8, 0.9, 0.95, 0.99)},
    "adamw": {
        "betas": [*product((0.8, 0.9, 0.95), (0.95, 0.98, 0.99, 0.999))],
        "eps": [10.0**-n for n in range(3, 16)],
    },
}
#: Parameters of one shape of which pairs are tried for an exchange.
_MOST_OF_A_SHAPE = 12


@dataclass(frozen=True)
class _Place:
    """The value of a rank at a piece, the expected one, and the one before; in fp64."""

    piece: Piece
    held: Tensor
    want: Tensor
    was: Tensor
    limit: float

    @property
    def wrong(self) -> Tensor:
        """Which elements are not the right ones, by the size of updates."""
        return (self.held - self.want).abs() > self._within

    def is_made(self, value: Tensor) -> bool:
        """Whether every element is that of ``value`` or the right one, by the size of updates."""
        wrong = self.wrong
        left, apart = ((self.held - other).abs()[wrong] for other in (value, self.want))
        within = min(self._within, fits.MUCH * float(apart.norm()))
        return float(left.max()) <= within if len(left) else True

    @property
    def _within(self) -> float:
        # An update is much smaller than its parameter, which would make any error small.
        size = max(float((t - self.was).abs().max()) for t in (self.want, self.held))
        return self.limit * size


def of_update(evidence: Evidence, step: int, truth: Tensors) -> str:
    """A sentence on parameters after the update of ``step``; empty: nothing explains them.

    ``truth``: what they must be.  Asked where the gradients of the step are right.
    """
    if isinstance(evidence, CoordinateEvidence) and (said := of_meeting(evidence, step)):
        return said
    limit = _LEFT_OVER[evidence.case.lowest_dtype]
    update = update_of(evidence, step)
    before = update.before
    wrong: dict[int, list[_Place]] = {}
    held: dict[int, set[str]] = {}
    for rank, own in fits.pieces(evidence, step, "after_update", "parameters"):
        for piece in own:
            if piece.name not in truth or piece.name not in before or not piece.tensor.numel():
                continue
            held.setdefault(rank, set()).add(piece.name)
            want, was = (part(piece, each[piece.name]).double() for each in (truth, before))
            place = _Place(piece, piece.tensor.double(), want, was, limit)
            if piece.tensor.shape == want.shape and bool(place.wrong.any()):
                wrong.setdefault(rank, []).append(place)
    # Per rank: ranks may have different causes, and those that are right have none.
    made: Tensors = update.make().parameters if wrong else {}
    found = {
        rank: _HELD if _is_made(places, made) else _multiple_of_all(places, limit)
        for rank, places in wrong.items()
    }
    bad = list(dict.fromkeys(place.piece.name for own in wrong.values() for place in own))
    for make, sentence in _tries(evidence, update, step, bad) if wrong else ():
        if not (left := [rank for rank in wrong if not found[rank]]):
            break
        made = make()
        for rank in left:
            if _is_made(wrong[rank], made):
                found[rank] = sentence
    if not wrong or not all(found.values()):
        return "" if wrong else _of_slots(evidence, update, step)
    rank, sentence = next(iter(found.items()))
    what = "" if len(bad) == len(truth) else f" ({some(bad)})"
    names = {r: {place.piece.name for place in own} for r, own in wrong.items()}
    if len({*found.values()}) == 1 and (pattern := fits.of_others(names, held)):
        return f"{sentence} {pattern} ({some(bad)})"
    if len(set(found.values())) > 1:
        return f"on rank {rank}, {sentence}{what}"
    where = "" if found.keys() == held.keys() else f"on {name_ranks(sorted(found))}, "
    return f"{where}{sentence}{what}"


def _is_made(places: Sequence[_Place], made: Tensors) -> bool:
    """Whether all of ``places`` hold what was ``made``, where they are not right."""
    parts = ((place, part(place.piece, made[place.piece.name])) for place in places)
    return all(place.is_made(value.double()) for place, value in parts)


def _multiple_of_all(places: Sequence[_Place], limit: float) -> str:
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
    spec, rules = update.spec, follows_of(evidence.case, evidence.declaration)

    def of(**changed: Any) -> Callable[[], Tensors]:
        return lambda: replace(update, **changed).make().parameters

    # Functions, because each costs an optimizer step and most are never asked.
    yield (lambda: update.before), "no update was made"
    yield from _swaps(update, wrong)
    for number in (n for n in range(3 * evidence.case.steps) if n != step):
        # A schedule that has ended may go below 0, which no optimizer takes.
        settings = {n: v for n, v in rules.settings(number).items() if follows.is_usable(v)}
        for names in (settings, *((name,) for name in settings if len(settings) > 1)):
            changed = replace(spec, **{name: settings[name] for name in names})
            told = ", ".join(follows.SETTING + name for name in names)
            if changed != spec:
                late = f"the update used {told} of step {number}, not of step {step}"
                yield of(spec=changed), late
    decays = [spec.weight_decay, *(group.weight_decay for group in spec.groups)]
    own = [spec.weight_decay if decay is None else decay for decay in decays]
    if any(decays):
        yield of(spec=_decayed(spec, [0.0] * len(decays))), "weight decay was left out"
        kept, twice = 1 - spec.lr_at(step) * spec.weight_decay, "weight decay was applied twice"
        yield of(spec=_decayed(spec, [2 * decay for decay in own])), twice
        yield of(before={name: kept * t for name, t in update.before.items()}), twice
    for order in permutations(own) if 1 < len(own) <= 4 else ():
        if list(order) != own:
            other = "the weight decay of another parameter group was applied"
            yield of(spec=_decayed(spec, order)), other
    if update.slots:
        yield of(slots={}), "the update began with an empty optimizer state"
        if counters := {n: t for n, t in update.slots.items() if n.endswith(".step")}:
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
    if step:
        held = evidence.observed(step - 1, "after_update", "parameters").first()
        rounded = {n: t.to(update.before[n].dtype) for n, t in held.items()}
        yield of(before=rounded), "the update began with the rounded parameters, not with masters"
    yield from ((of(spec=other), sentence) for other, sentence in _others(spec))


def _others(spec: OptimizerSpec) -> Iterator[tuple[OptimizerSpec, str]]:
    """Specs with a setting that is usual, and not that of ``spec``."""
    for name, values in _USUAL[spec.name].items():
        used = getattr(spec, name)
        for value in (value for value in values if value != used):
            yield replace(spec, **{name: value}), f"the update used {name} {value}, not {used}"


def _of_slots(evidence: Evidence, update: Update, step: int) -> str:
    """A sentence on optimizer state of right parameters; empty: nothing explains it."""
    slots = evidence.observed(step, "after_update", "optimizer").first()
    # First of all as it must be: where that is near, no setting is to blame.
    for spec, sentence in ((update.spec, ""), *_others(update.spec)):
        made = replace(update, spec=spec).make().slots
        if fits.all_equal(slots, made, [*made], fits.limit_of(evidence)):
            return sentence
    return ""


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


def _decayed(spec: OptimizerSpec, decays: Sequence[float]) -> OptimizerSpec:
    """``spec`` with these weight decays: its own, and that of each group."""
    own, *rest = decays
    groups = (replace(g, weight_decay=decay) for g, decay in zip(spec.groups, rest, strict=True))
    return replace(spec, weight_decay=own, groups=tuple(groups))


# -------------------------------------------------------------------------------------- meetings


def of_meeting(evidence: CoordinateEvidence, step: int) -> str:
    """A sentence on the parameters of one trajectory after ``step``; empty: nothing explains them.

    Asked where the gradients of the step, and all before it, are right.
    """
    truth, alone = evidence.truth.steps[step], evidence.base.trajectories
    ends = [update_of(other, step).make().parameters for other in alone]
    shown = [each.observed(step, "after_update", "parameters").first() for each in alone]
    held = shown[evidence.coordinate]

    def is_wrong(name: str) -> bool:
        """Whether it differs from the truth by more than rounding, against the ranks' own ends."""
        if name not in held or held[name].shape != truth.parameters[name].shape:
            return False
        apart = max(float((end[name] - ends[0][name]).double().norm()) for end in ends)
        gap = float((held[name] - truth.parameters[name]).double().norm())
        return gap > _LEFT_OVER_OF_A_MEETING * apart

    if not (names := [name for name in evidence.workload.trainable_names if is_wrong(name)]):
        return ""

    def flat(tensors: Tensors) -> Tensor:
        return fits.end_to_end(tensors[name] for name in names)

    have, want, each_end = flat(held), flat(truth.parameters), [*map(flat, ends)]
    own, mean = each_end[evidence.coordinate], torch.stack(each_end).mean(0)
    # Relative to how far the ranks are apart: parameters themselves are much larger.
    apart = float(torch.stack([(end - mean).norm() for end in each_end]).max())
    near = _LEFT_OVER_OF_A_MEETING * apart

    def is_near(value: Tensor, what: Tensor = have) -> bool:
        return float((what - value).norm()) <= near

    if not truth.met:
        early = is_near(mean) and not is_near(own)
        return "ranks synchronized before the step that was due: these are means" if early else ""
    for number, end in enumerate(each_end):
        if all(is_near(end, flat(each)) for each in shown):
            return f"no mean was taken: all ranks have the parameters of data coordinate {number}"
    if is_near(own):
        return "the ranks did not synchronize: this is the result of the rank's own update"
    ratio = float(have @ mean / (mean @ mean))
    if is_near(mean, want) and is_near(ratio * mean):
        return f"{ratio:.6g} times the mean of the ranks' own results"
    if is_near(mean):
        return "the mean of the ranks' own results, without an outer step"
    met = [s for s in range(step) if evidence.truth.steps[s].met]
    before = evidence.truth.steps[met[-1]].parameters if met else evidence.truth.initial
    #     start ------ due ------> want
    #     start --- made ---> have             made = ratio x due, where they point the same way
    due, made = want - flat(before), have - flat(before)
    if not due.norm():
        return ""
    ratio = float(made @ due / (due @ due))
    most = max(near, _LEFT_OVER_OF_A_MEETING * float(made.norm()))
    if float((made - ratio * due).norm()) > most:
        return ""
    if ratio < 0:
        return f"the outer step goes the wrong way: {ratio:.6g} times the right one"
    return f"{ratio:.6g} times the outer step that was due"
